"""A handler is not parked while a branch of it works outside of durable calls."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from flowfabric import App, Context
from flowfabric.core.states import PublicState
from flowfabric.errors import ExecutionExpired, SignalTimeout
from tests.apps import reached, working

WORK_S = 0.5
"""Much longer than it takes to find a handler at rest."""


async def endless() -> None:
    """Work that does not end, as a request that is not answered."""
    await asyncio.get_running_loop().create_future()


async def nap(ctx: Context) -> str:
    await ctx.sleep("1h")
    return "woke"


async def signal(ctx: Context) -> str:
    return (await ctx.wait_for_signal("go")).name


@pytest.mark.parametrize("wait", [nap, signal])
@pytest.mark.parametrize("deep", [False, True])
async def test_plain_work_of_a_branch_is_not_cut_off(
    app: App, wait: Callable[[Context], Awaitable[str]], deep: bool
) -> None:
    done: Counter[str] = Counter()

    async def work() -> None:
        done["begun"] += 1
        await asyncio.sleep(WORK_S)
        done["ended"] += 1

    async def branch() -> None:
        await asyncio.gather(work())

    @app.task
    async def handler(ctx: Context) -> None:
        await asyncio.gather(branch() if deep else work(), wait(ctx))

    async with working(app):
        run = await app.submit(handler)
        state = PublicState.SUSPENDED if wait is signal else PublicState.DELAYED
        await reached(run, state)
    assert done == {"begun": 1, "ended": 1}


async def test_waits_beside_plain_work_are_over_in_time(app: App) -> None:
    """It works until they are: a sleep, a child, a signal that comes and one that does not."""

    @app.task
    async def child() -> str:
        return "ended"

    @app.task
    async def handler(ctx: Context, what: str) -> str:
        beside = asyncio.create_task(endless())
        try:
            if what == "sleep":
                await ctx.sleep("0.3s")
                return "slept"
            if what == "child":
                return await (await ctx.submit(child)).result()
            if what == "timeout":
                await ctx.wait_for_signal("never", timeout=0.3)
            return (await ctx.wait_for_signal("go")).name
        except SignalTimeout:
            return "timed out"
        finally:
            beside.cancel()

    async with working(app):
        runs = {
            what: await app.submit(handler, what) for what in ("sleep", "child", "timeout", "go")
        }
        await runs["go"].signal("go")
        told = {what: await run.result(timeout="20s") for what, run in runs.items()}
    assert told == {"sleep": "slept", "child": "ended", "timeout": "timed out", "go": "go"}


async def test_a_long_sleep_beside_plain_work_ends_on_its_worker(app: App) -> None:
    @app.task
    async def handler(ctx: Context) -> str:
        beside = asyncio.create_task(endless())
        await ctx.sleep("5.2s")
        beside.cancel()
        return "slept"

    async with working(app):
        assert await (await app.submit(handler)).result(timeout="20s") == "slept"


@pytest.mark.parametrize("meeting", ["semaphore", "event", "queue", "task"])
async def test_a_branch_that_waits_for_another_branch_is_not_at_work(
    app: App, meeting: str
) -> None:
    """The worker has one slot: the children run only if their parent lets go of it."""

    @app.task
    async def child(number: int) -> int:
        return number

    @app.task
    async def parent(ctx: Context) -> list[int]:
        limit, event = asyncio.Semaphore(1), asyncio.Event()
        queue: asyncio.Queue[int] = asyncio.Queue()

        async def limited(number: int) -> int:
            async with limit:
                return await (await ctx.submit(child, number)).result()

        if meeting == "semaphore":
            return list(await asyncio.gather(*(limited(number) for number in range(3))))

        async def first() -> int:
            found = await limited(1)
            event.set()
            queue.put_nowait(found)
            return found

        begun = asyncio.create_task(first())

        async def second() -> int:
            if meeting == "event":
                await event.wait()
            return await (queue.get() if meeting == "queue" else begun)

        return [await asyncio.create_task(second())]

    async with working(app, concurrency=1, prefetch=0):
        run = await app.submit(parent)
        assert await run.result(timeout="20s") == ([0, 1, 2] if meeting == "semaphore" else [1])


async def test_a_deadline_ends_a_handler_whose_branch_works_on(app: App) -> None:
    @app.task(timeout=0.5)
    async def handler(ctx: Context) -> None:
        await asyncio.gather(endless(), ctx.wait_for_signal("never"))

    async with working(app):
        run = await app.submit(handler)
        with pytest.raises(ExecutionExpired):
            await run.result(timeout="20s")


@pytest.mark.parametrize("how", ["cancel", "drain"])
async def test_a_handler_whose_branch_works_on_is_stopped_like_another(app: App, how: str) -> None:
    begun = asyncio.Event()
    ended: list[str] = []

    @app.task
    async def handler(ctx: Context) -> None:
        async def branch() -> None:
            begun.set()
            try:
                await endless()
            finally:
                ended.append("branch")

        await asyncio.gather(branch(), ctx.sleep("1h"))

    async with working(app, drain_timeout=0.2):
        run = await app.submit(handler)
        async with asyncio.timeout(20):
            await begun.wait()
        if how == "cancel":
            await run.cancel("enough")
            await reached(run, PublicState.CANCELLED)
    assert ended == ["branch"]
