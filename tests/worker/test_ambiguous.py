"""Calls that nothing tells apart: refused before anything runs, with a way out."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from flowfabric import App, Context, Retry
from flowfabric.core.states import PublicState
from tests.apps import blocked, reached, working


async def test_a_parallel_call_that_may_be_another_is_refused_with_a_way_out(app: App) -> None:
    ran: Counter[str] = Counter()
    moments = itertools.count()
    fetched = asyncio.Event()

    async def prepare() -> None:
        await fetched.wait()

    async def fetch(at: float) -> float:
        ran["fetch"] += 1
        fetched.set()
        return at

    @app.task
    async def both(ctx: Context) -> float:
        beside = asyncio.create_task(ctx.step("prepare", prepare))
        await asyncio.sleep(0)
        # Another time in every run, as from time.time(), while a branch is under way.
        found = await ctx.step("fetch", fetch, float(next(moments)))
        await beside
        ran["past"] += 1
        await ctx.wait_for_signal("go")
        return found

    async with working(app):
        run = await app.submit(both)
        await reached(run, PublicState.SUSPENDED)
        assert ran == {"fetch": 1, "past": 1}
        await run.signal("go")
        why = await blocked(run)
    assert "step 'fetch' may be the one that is stored or another one" in why
    assert "give each branch a name: with ctx.branch(name)" in why
    assert ran == {"fetch": 1, "past": 1}, "it is refused before anything runs"


class Order:
    """Who arrives when, in which run: branches that only do something outside of steps."""

    def __init__(self, *runs: str) -> None:
        self._runs = iter(runs)
        self._order = ""
        self._turns: dict[str, asyncio.Event] = {}

    def begin(self, people: str) -> None:
        self._order = next(self._runs)
        self._turns = {who: asyncio.Event() for who in people}
        self._turns[self._order[0]].set()

    async def arrive(self, who: str) -> str:
        await self._turns[who].wait()
        return who

    def arrived(self, who: str) -> None:
        """The next one may come."""
        after = self._order.partition(who)[2]
        if after:
            self._turns[after[0]].set()


class Box:
    """An object that nobody can look into."""

    def __init__(self, content: str) -> None:
        self.content = content

    def open(self) -> str:
        return self.content


Note = Callable[[str], str]


def as_lambda(note: Note, who: str) -> Callable[[], str]:
    return lambda: note(who)


def as_inner_function(note: Note, who: str) -> Callable[[], str]:
    def got() -> str:
        return note(who)

    return got


@pytest.mark.parametrize("bind", [as_lambda, as_inner_function, partial])
async def test_reactions_in_order_of_arrival_are_known_by_what_they_have_bound(
    app: App, bind: Callable[[Note, str], Callable[[], str]]
) -> None:
    ran: Counter[str] = Counter()
    order = Order("abc", "cba")

    @app.task(retry=Retry(max_retries=1, delay=0))
    async def collect(ctx: Context) -> dict[str, str]:
        order.begin("abc")
        found: dict[str, str] = {}

        def note(who: str) -> str:
            ran[who] += 1
            return who.upper()

        for each in asyncio.as_completed([order.arrive(who) for who in "abc"]):
            who = await each
            found[who] = await ctx.step("got", bind(note, who))
            order.arrived(who)
        if not ctx.retry_count:
            raise RuntimeError("again")
        return found

    async with working(app):
        run = await app.submit(collect)
        assert await run.result(timeout="20s") == {"a": "A", "b": "B", "c": "C"}
    assert ran == {"a": 1, "b": 1, "c": 1}


async def test_a_reaction_gets_its_own_result_although_another_came_first_before(app: App) -> None:
    """Only one of them is stored, and in the next run the other one comes first."""
    ran: Counter[str] = Counter()
    order = Order("ab", "ba")

    @app.task(retry=Retry(max_retries=1, delay=0))
    async def collect(ctx: Context) -> dict[str, str]:
        order.begin("ab")
        found: dict[str, str] = {}

        def note(who: str) -> str:
            ran[who] += 1
            return who.upper()

        for each in asyncio.as_completed([order.arrive(who) for who in "ab"]):
            who = await each
            found[who] = await ctx.step("got", as_lambda(note, who))
            assert found[who] == who.upper()
            if not ctx.retry_count:
                raise RuntimeError("again")
            order.arrived(who)
        return found

    async with working(app):
        run = await app.submit(collect)
        assert await run.result(timeout="20s") == {"a": "A", "b": "B"}
    assert ran == {"a": 1, "b": 1}


@pytest.mark.parametrize("same", [True, False])
async def test_reactions_that_have_bound_what_nobody_can_look_into_are_refused(
    app: App, same: bool
) -> None:
    ran: list[str] = []
    order = Order("abc")

    @app.task
    async def collect(ctx: Context) -> list[str]:
        order.begin("abc")
        box = Box("of all")
        for each in asyncio.as_completed([order.arrive(who) for who in "abc"]):
            who = await each
            box = box if same else Box(who)
            ran.append(await ctx.step("got", box.open))
            order.arrived(who)
        return ran

    async with working(app):
        run = await app.submit(collect)
        if same:
            assert await run.result(timeout="20s") == ["of all"] * 3
        else:
            assert "step 'got' (number 2) cannot be told from others" in await blocked(run)
            assert ran == ["a"], "it is refused before anything runs"
