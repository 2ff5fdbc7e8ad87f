"""Changes that are accepted: once is enough, and nothing that is stored runs again."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import chain

import pytest

from flowfabric import Context, Run
from flowfabric.core.states import PublicState
from flowfabric.testing import LocalApp

Code = Callable[["Deployed", Context], Awaitable[list[int]]]


class Deployed:
    """A task whose code changes, and the effects it has had."""

    def __init__(self, app: LocalApp, code: Code) -> None:
        self.app = app
        self.code = code
        self.effects: Counter[tuple[str, int]] = Counter()
        self.got: list[int] = []
        """What the run has returned."""
        self.sentence = ""
        """Why it was blocked."""

        @app.task
        async def kid(ctx: Context, number: int) -> int:
            await ctx.step("effect", self.effect, "kid", number)
            await ctx.sleep(number)
            return number

        @app.task
        async def changing(ctx: Context) -> list[int]:
            got = await self.code(self, ctx)
            await ctx.wait_for_signal("go")
            return got

        self.kid = kid
        self.task = changing

    def effect(self, name: str, number: int) -> int:
        self.effects[name, number] += 1
        return number

    async def step(self, ctx: Context, name: str, number: int) -> int:
        return await ctx.step(name, self.effect, name, number)

    async def child(self, ctx: Context, number: int) -> int:
        return await (await ctx.submit(self.kid, number)).result()

    async def rest(self, run: Run[list[int]]) -> bool:
        """Until nothing more comes of it; whether it is blocked then."""
        for _ in range(50):
            await self.app.drain()
            seen = await run.snapshot()
            if seen.blocked or seen.public_state in (PublicState.SUSPENDED, PublicState.COMPLETED):
                return seen.blocked
            self.app.clock.advance("50s")
        raise AssertionError("it goes on for ever")

    async def accept(self, run: Run[list[int]]) -> bool:
        self.app.clock.advance(seconds=1)
        await run.accept_changes()
        self.app.clock.advance(seconds=1)
        return await self.rest(run)


async def accepted_once(old: Code, new: Code) -> Deployed:
    """What comes of a run whose code changes before its signal, if that is accepted once."""
    async with LocalApp() as app:
        deployed = Deployed(app, old)
        run = await app.submit(deployed.task)
        assert not await deployed.rest(run)
        stored = deployed.effects.copy()
        deployed.code = new
        await run.signal("go")
        assert await deployed.rest(run), "the change is noticed"
        assert deployed.effects == stored, "before anything new has run"
        deployed.sentence = (await run.why()).sentence
        assert not await deployed.accept(run), (await run.why()).sentence
        assert max(deployed.effects.values()) == 1, deployed.effects
        deployed.got = await run.result(timeout=1)
        return deployed


async def test_a_child_added_before_stored_ones_of_its_task_takes_one_acceptance() -> None:
    async def old(deployed: Deployed, ctx: Context) -> list[int]:
        return [await deployed.child(ctx, number) for number in (1, 2)]

    async def new(deployed: Deployed, ctx: Context) -> list[int]:
        return [await deployed.child(ctx, number) for number in (0, 1, 2)]

    deployed = await accepted_once(old, new)
    assert deployed.got == [0, 1, 2]


async def steps_of_a_name(deployed: Deployed, ctx: Context, *numbers: int) -> list[int]:
    return [await deployed.step(ctx, "shared", number) for number in numbers]


@pytest.mark.parametrize("numbers", [(0, 1, 2), (0, 3, 1, 2), (1, 0, 2), (0, 1, 3, 2)])
async def test_steps_added_between_those_of_their_name_take_one_acceptance(
    numbers: tuple[int, ...],
) -> None:
    async def old(deployed: Deployed, ctx: Context) -> list[int]:
        return await steps_of_a_name(deployed, ctx, 1, 2)

    async def new(deployed: Deployed, ctx: Context) -> list[int]:
        return await steps_of_a_name(deployed, ctx, *numbers)

    deployed = await accepted_once(old, new)
    assert deployed.got == [*numbers]
    assert deployed.effects == {("shared", number): 1 for number in numbers}


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("child", [False, True])
async def test_a_call_added_in_every_branch_of_a_function_takes_one_acceptance(
    by_name: bool, child: bool
) -> None:
    async def call(deployed: Deployed, ctx: Context, number: int) -> int:
        if child:
            return await deployed.child(ctx, number)
        return await deployed.step(ctx, "shared", number)

    async def branch(deployed: Deployed, ctx: Context, *numbers: int) -> list[int]:
        if not by_name:
            return [await call(deployed, ctx, number) for number in numbers]
        with ctx.branch(f"item {numbers[-1]}"):
            return [await call(deployed, ctx, number) for number in numbers]

    async def old(deployed: Deployed, ctx: Context) -> list[int]:
        got = await asyncio.gather(*(branch(deployed, ctx, number) for number in range(4)))
        return [*chain(*got)]

    async def new(deployed: Deployed, ctx: Context) -> list[int]:
        each = (branch(deployed, ctx, 10 + number, number) for number in range(4))
        return [*chain(*await asyncio.gather(*each))]

    deployed = await accepted_once(old, new)
    assert deployed.got == [10, 0, 11, 1, 12, 2, 13, 3]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("added", ["child", "step", "sleep"])
async def test_a_call_added_for_each_item_of_a_shared_queue_takes_one_acceptance(
    added: str, workers: int
) -> None:
    async def code(deployed: Deployed, ctx: Context, *, is_new: bool) -> list[int]:
        queue = list(range(1, 6))
        got: list[int] = []

        async def worker() -> None:
            while queue:
                item = queue.pop(0)
                await deployed.step(ctx, "first", item)
                got.append(await deployed.child(ctx, item))
                if is_new and added == "child":
                    got.append(await deployed.child(ctx, 10 + item))
                if is_new and added == "step":
                    got.append(await deployed.step(ctx, "added", 10 + item))
                if is_new and added == "sleep":
                    await ctx.sleep(item)
                await deployed.step(ctx, "last", item)

        await asyncio.gather(*(worker() for _ in range(workers)))
        return sorted(got)

    async def old(deployed: Deployed, ctx: Context) -> list[int]:
        return await code(deployed, ctx, is_new=False)

    async def new(deployed: Deployed, ctx: Context) -> list[int]:
        return await code(deployed, ctx, is_new=True)

    deployed = await accepted_once(old, new)
    items = [1, 2, 3, 4, 5]
    assert deployed.got == (items if added == "sleep" else [*items, *(10 + each for each in items)])


async def test_a_result_that_must_not_be_waited_for_is_told_by_the_call_that_submitted() -> None:
    async def code(deployed: Deployed, ctx: Context, *, waits: bool) -> list[int]:
        first, second = [await ctx.submit(deployed.kid, number) for number in (1, 2)]
        if waits:
            await second.result()
        return [await first.result()]

    async def old(deployed: Deployed, ctx: Context) -> list[int]:
        return await code(deployed, ctx, waits=False)

    async def new(deployed: Deployed, ctx: Context) -> list[int]:
        return await code(deployed, ctx, waits=True)

    told = (
        "the result of 'submit kid' (number 2) is not stored, but"
        " the result of 'submit kid' is and has not been asked for"
    )
    assert told in (await accepted_once(old, new)).sentence
