"""Random durable functions that change while a run of them is under way.

A run comes to its signal; by then every call before that is stored. Then one call or branch
is inserted, replaced or removed there. If something stored lies ahead of the change, the run is
blocked before anything new has had an effect, and the old code completes it, every effect
once. If nothing does, the new code completes it.

The arguments of a branch stay what they are, or say what its code is and change with that. Then
`asyncio.as_completed`, which starts coroutines in the order of a set, may start it where another
was: such a run may be blocked although nothing lies ahead of the change.

The same where all steps have one name, and all children are of one task: one call of these is
inserted, and if the run is blocked, the change is accepted once. Then the new code completes it,
every effect once, and each call returns its own result.

`FLOWFABRIC_EXAMPLES=500 pytest tests/properties/test_changed_functions.py --hypothesis-seed=7`
looks longer, and elsewhere.
"""

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from flowfabric import Context, Run
from flowfabric.core.states import PublicState
from flowfabric.testing import LocalApp
from tests.properties.asyncio_runner import run

EXAMPLES = int(os.environ.get("FLOWFABRIC_EXAMPLES", "75"))
RESTS = 3
"""How often it is looked at until nothing more comes of it."""
LONGEST = 100
"""The same, where it is known what has to come of it."""

Verb = Literal["step", "uuid", "sleep", "child"]
How = Literal["gather", "group", "task", "arriving"]


class Act(msgspec.Struct, frozen=True):
    """One durable call."""

    verb: Verb
    name: str = ""
    """Of a step or a child. Each has one of its own."""


class Row(msgspec.Struct, frozen=True):
    """One after another."""

    parts: tuple["Act | Fork", ...]
    label: str = ""
    """One of its own."""


class Fork(msgspec.Struct, frozen=True):
    """Each in a branch."""

    how: How
    rows: tuple[Row, ...]


NEW: tuple[Act | Fork, ...] = (
    Act("step", "new"),
    Fork("gather", (Row((Act("step", "new"),), "a"), Row((Act("step", "newer"),), "b"))),
    Fork("task", (Row((Act("step", "new"),), "a"),)),
)

acts = st.builds(Act, st.sampled_from(("step", "step", "step", "uuid", "sleep")))
hows = st.sampled_from(("gather", "group", "task", "arriving"))


def rows(parts: st.SearchStrategy[Act | Fork], least: int = 1) -> st.SearchStrategy[Row]:
    return st.builds(Row, st.lists(parts, min_size=least, max_size=3).map(tuple))


def forks(parts: st.SearchStrategy[Act | Fork]) -> st.SearchStrategy[Act | Fork]:
    several = st.lists(rows(parts), min_size=1, max_size=3).map(tuple)
    return st.one_of(parts, st.builds(Fork, hows, several))


def codes_of(acts: st.SearchStrategy[Act | Fork]) -> st.SearchStrategy[Row]:
    made = rows(st.recursive(acts, forks, max_leaves=6))
    return made.map(lambda row: named(row, itertools.count()))


codes = codes_of(acts)
alike = codes_of(st.builds(Act, st.sampled_from(("step", "step", "child", "child", "sleep"))))


def named(row: Row, numbers: Iterator[int]) -> Row:
    """The same, with a name for each step and each row."""
    parts: list[Act | Fork] = []
    for part in row.parts:
        match part:
            case Act(verb, _):
                parts.append(Act(verb, f"{verb}-{next(numbers)}"))
            case Fork(how, inner):
                parts.append(Fork(how, tuple(named(each, numbers) for each in inner)))
    return Row(tuple(parts), f"row-{next(numbers)}")


# Changes


class Place(NamedTuple):
    """A place in the code: the parts and branches that lead there."""

    path: tuple[int, ...]
    is_end: bool
    """The end of a row."""
    is_last: bool
    """Nothing comes after it before the signal, unless beside it."""


def places(row: Row, path: tuple[int, ...] = (), is_last: bool = True) -> Iterator[Place]:
    """Before each part of it, and at its end."""
    for n, part in enumerate(row.parts):
        yield Place((*path, n), False, False)
        if isinstance(part, Fork):
            ends = is_last and n == len(row.parts) - 1
            for number, inner in enumerate(part.rows):
                # Tasks are awaited one after another, and started then.
                last = part.how != "task" or number == len(part.rows) - 1
                yield from places(inner, (*path, n, number), ends and last)
    yield Place((*path, len(row.parts)), True, is_last)


def changed(row: Row, path: tuple[int, ...], taken: int, put: tuple[Act | Fork, ...]) -> Row:
    """The same, with so many parts taken out at a place, and others put there."""
    n, *inside = path
    if not inside:
        return Row((*row.parts[:n], *put, *row.parts[n + taken :]), row.label)
    fork = row.parts[n]
    assert isinstance(fork, Fork)
    number, *rest = inside
    inner = changed(fork.rows[number], tuple(rest), taken, put)
    made = Fork(fork.how, (*fork.rows[:number], inner, *fork.rows[number + 1 :]))
    return Row((*row.parts[:n], made, *row.parts[n + 1 :]), row.label)


def names(row: Row) -> Iterator[str]:
    """Of what has effects."""
    for part in row.parts:
        match part:
            case Act(verb, name):
                if verb in ("step", "child"):
                    yield name
            case Fork(_, inner):
                for each in inner:
                    yield from names(each)


def forks_in(row: Row) -> Iterator[Fork]:
    for part in row.parts:
        if isinstance(part, Fork):
            yield part
            for each in part.rows:
                yield from forks_in(each)


# Runs


class Deployed:
    """A task whose code changes, and the effects it has had."""

    def __init__(self, app: LocalApp, code: Row, *, by_label: bool, alike: bool = False) -> None:
        """`by_label`, if the arguments of its branches do not change with its code; `alike`, if
        its steps have one name."""
        self._app = app
        self._alike = alike
        self.wrong: list[str] = []
        """Calls that have returned what is another's."""
        self._by_label = by_label
        self.deploy(code)
        self.effects: Counter[str] = Counter()

        @app.task(name="child")
        async def child(ctx: Context, name: str) -> str:
            await ctx.step("effect", self._effect, name)
            await ctx.sleep(len(name) * 10)
            return name

        @app.task(name="changing")
        async def changing(ctx: Context) -> str:
            await self._row(ctx, self.code)
            await ctx.wait_for_signal("go")
            return await ctx.step("last", self._effect, "last")

        self.task = changing
        self._child = child

    def deploy(self, code: Row) -> None:
        self.code = code
        self._rows = {row.label: row for fork in forks_in(code) for row in fork.rows}

    async def _effect(self, name: str) -> str:
        self.effects[name] += 1
        return name

    async def _row(self, ctx: Context, row: Row) -> None:
        for part in row.parts:
            match part:
                case Act("step", name):
                    called = "step" if self._alike else name
                    if await ctx.step(called, self._effect, name) != name:
                        self.wrong.append(name)
                case Act("child", name):
                    if await (await ctx.submit(self._child, name)).result() != name:
                        self.wrong.append(name)
                case Act("uuid", _):
                    await ctx.uuid()
                case Act():
                    await ctx.sleep(10)
                case Fork(how, inner):
                    await self._fork(ctx, how, inner)

    async def _labelled(self, ctx: Context, label: str) -> None:
        await self._row(ctx, self._rows[label])

    async def _fork(self, ctx: Context, how: How, inner: tuple[Row, ...]) -> None:
        branches = (
            self._labelled(ctx, each.label) if self._by_label else self._row(ctx, each)
            for each in inner
        )
        match how:
            case "gather":
                await asyncio.gather(*branches)
            case "group":
                async with asyncio.TaskGroup() as group:
                    for each in branches:
                        group.create_task(each)
            case "task":
                for each in branches:
                    await asyncio.create_task(each)
            case "arriving":
                for done in asyncio.as_completed(list(branches)):
                    await done

    async def rest(self) -> None:
        """Until nothing more comes of it."""
        for _ in range(RESTS):
            await self._app.drain()
            self._app.clock.advance("2h")

    async def blocks(self, submitted: Run[str]) -> bool:
        """Whether it is blocked before it waits for its signal, or ends."""
        for _ in range(LONGEST):
            await self._app.drain()
            seen = await submitted.snapshot()
            if seen.blocked or seen.public_state in (PublicState.SUSPENDED, PublicState.COMPLETED):
                return seen.blocked
            self._app.clock.advance("50s")
        raise AssertionError("it goes on for ever")


async def check(old: Row, new: Row, blocks: bool, *, by_label: bool) -> None:
    async with LocalApp() as app:
        deployed = Deployed(app, old, by_label=by_label)
        submitted = await app.submit(deployed.task)
        await app.drain(skip_time=True)
        stored = Counter(names(old))
        assert deployed.effects == stored
        await submitted.signal("go")
        deployed.deploy(new)
        await deployed.rest()
        may_block = not by_label and any(fork.how == "arriving" for fork in forks_in(new))
        blocked = (await submitted.snapshot()).blocked
        assert blocked == blocks or (blocked and may_block)
        if blocked:
            assert deployed.effects == stored
            deployed.deploy(old)
            await deployed.rest()
        assert await submitted.result(timeout=1) == "last"
        assert deployed.effects == Counter([*names(deployed.code), "last"]) | stored


@pytest.mark.timeout(600 + EXAMPLES)
@pytest.mark.parametrize("change", ["insert", "replace", "remove"])
def test_changed_code_blocks_a_run_before_anything_new_if_something_stored_is_left(
    change: str,
) -> None:
    @settings(
        max_examples=max(1, EXAMPLES // 5), deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(old=codes, data=st.data())
    def holds(old: Row, data: st.DataObject) -> None:
        inserts = change == "insert"
        found = [place for place in places(old) if inserts or not place.is_end]
        place = data.draw(st.sampled_from(found))
        put = data.draw(st.sampled_from(NEW))
        new = changed(old, place.path, 0 if inserts else 1, () if change == "remove" else (put,))
        by_label = data.draw(st.booleans())
        note(f"{old} becomes {new}")
        run(check(old, new, not place.is_last, by_label=by_label))

    holds()


@pytest.mark.parametrize("by_label", [True, False])
@pytest.mark.parametrize("how", ["arriving", "gather"])
def test_a_step_replaced_by_branches_is_left_behind_in_the_branch_that_waits_for_them(
    how: How, by_label: bool
) -> None:
    def code(last: Act | Fork) -> Row:
        first = Row((Act("step", "step-1"),), "first")
        return Row((Fork(how, (first, Row((Act("step", "step-2"), last), "second"))),))

    _, branches, _ = NEW
    run(check(code(Act("step", "step-3")), code(branches), blocks=True, by_label=by_label))


async def check_accepted(old: Row, new: Row, *, by_label: bool) -> None:
    async with LocalApp() as app:
        deployed = Deployed(app, old, by_label=by_label, alike=True)
        submitted = await app.submit(deployed.task)
        assert not await deployed.blocks(submitted)
        stored = deployed.effects.copy()
        assert stored == Counter(names(old))
        await submitted.signal("go")
        deployed.deploy(new)
        if await deployed.blocks(submitted):
            assert deployed.effects == stored
            deployed.wrong.clear()
            app.clock.advance("1s")
            await submitted.accept_changes()
            app.clock.advance("1s")
            assert not await deployed.blocks(submitted), (await submitted.why()).sentence
        assert await submitted.result(timeout=1) == "last"
        assert deployed.effects == Counter([*names(new), "last"])
        assert not deployed.wrong


@pytest.mark.timeout(600 + EXAMPLES)
@pytest.mark.parametrize("verb", ["step", "child"])
def test_an_inserted_call_of_a_name_that_exists_takes_one_acceptance(verb: Verb) -> None:
    @settings(
        max_examples=max(1, EXAMPLES // 5), deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(old=alike, data=st.data())
    def holds(old: Row, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(list(places(old))))
        new = changed(old, place.path, 0, (Act(verb, "new"),))
        # Started in the order of a set, a branch with other arguments may come where another was.
        arrives = any(fork.how == "arriving" for fork in forks_in(new))
        by_label = arrives or data.draw(st.booleans())
        note(f"{old} becomes {new}")
        run(check_accepted(old, new, by_label=by_label))

    holds()
