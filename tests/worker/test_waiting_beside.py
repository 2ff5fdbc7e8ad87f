"""A branch that waits for a signal while another one works."""

import asyncio
import itertools
from collections import Counter

from flowfabric import App, Context, Run, count
from flowfabric.core.states import PublicState
from tests.apps import PATIENCE_S, reached, working


async def test_a_wait_beside_a_long_step_goes_on_at_once(app: App) -> None:
    ran: Counter[str] = Counter()
    started, signalled = asyncio.Event(), asyncio.Event()

    @app.task
    async def both(ctx: Context) -> list[object]:
        ran["handler"] += 1

        async def long() -> str:
            started.set()
            # Ends only because the other branch goes on meanwhile.
            await signalled.wait()
            return "worked"

        async def waiting() -> list[object]:
            found = await ctx.wait_for(count(2, "go"))
            await ctx.step("after", signalled.set)
            return [each.payload for each in found]

        return list(await asyncio.gather(ctx.step("long", long), waiting()))

    async with working(app):
        run = await app.submit(both)
        await started.wait()
        for number in (1, 2):
            assert (await run.signal("go", number)).kept
        assert await run.result(timeout="20s") == ["worked", [1, 2]]
    assert ran == {"handler": 1}
    assert (await run.snapshot()).kept_signals == ()


async def test_a_signal_for_a_branch_beside_a_step_is_taken_once(app: App) -> None:
    started, finish = asyncio.Event(), asyncio.Event()

    @app.task
    async def both(ctx: Context) -> list[object]:
        async def long() -> str:
            started.set()
            await finish.wait()
            return "worked"

        async def waiting() -> list[object]:
            first = await ctx.wait_for_signal("go")
            await ctx.step("told", finish.set)
            second = await ctx.wait_for_signal("go")
            return [first.payload, second.payload]

        return list(await asyncio.gather(ctx.step("long", long), waiting()))

    async with working(app):
        run = await app.submit(both)
        await started.wait()
        await run.signal("go", 1)
        await finish.wait()
        await reached(run, PublicState.SUSPENDED)
        await run.signal("go", 2)
        assert await run.result(timeout="20s") == ["worked", [1, 2]]


async def told(run: Run[list[object]], sentence: str) -> None:
    """Wait until `why` says something."""
    async with asyncio.timeout(PATIENCE_S):
        for _ in itertools.count():
            if sentence in (await run.why()).sentence:
                return
            await asyncio.sleep(0)


async def test_a_wait_beside_a_long_step_is_known(app: App) -> None:
    started, signalled = asyncio.Event(), asyncio.Event()

    @app.task
    async def both(ctx: Context) -> list[object]:
        async def long() -> str:
            started.set()
            await signalled.wait()
            return "worked"

        async def waiting() -> object:
            found = await ctx.wait_for_signal("go")
            signalled.set()
            return found.payload

        return list(await asyncio.gather(ctx.step("long", long), waiting()))

    async with working(app):
        run = await app.submit(both)
        await started.wait()
        await told(run, "It takes signals meanwhile: 'go'.")
        await run.signal("go", 1, keep=False)
        assert await run.result(timeout="20s") == ["worked", 1]
