"""What an attempt leaves behind in its worker: nothing."""

import asyncio
import gc
import itertools
import logging
from collections.abc import Callable

import pytest

from flowfabric import App, Context, Retry
from flowfabric.core.states import PublicState
from flowfabric.worker.attempt import RunningAttempt
from flowfabric.worker.branches import DurableCall
from flowfabric.worker.journal import Journal
from flowfabric.worker.moved_calls import Moves
from flowfabric.worker.parking import LongWaits
from flowfabric.worker.pools import Pools
from flowfabric.worker.services import Services
from flowfabric.worker.turns import Rest
from tests.apps import PATIENCE_S, reached, working


def in_memory(*kinds: type) -> int:
    # Not isinstance, which asks objects for their class: some do anything then.
    return sum(type(each) in kinds for each in gc.get_objects())


def attempts_in_memory() -> int:
    return in_memory(RunningAttempt, Services)


@pytest.mark.parametrize(
    ("what", "state"),
    [
        ("returns", PublicState.COMPLETED),
        ("raises", PublicState.FAILED),
        ("takes a step", PublicState.COMPLETED),
        ("waits for a signal", PublicState.SUSPENDED),
    ],
)
async def test_an_attempt_is_gone_without_the_garbage_collector(
    new_database: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
    what: str,
    state: PublicState,
) -> None:
    # A captured record of the failure holds its traceback, and that the attempt.
    caplog.set_level(logging.CRITICAL, "flowfabric")
    app = App(new_database("sqlite-memory"))

    @app.task(retry=Retry(max_retries=0))
    async def work(ctx: Context) -> None:
        if what == "raises":
            raise ConnectionError("as asked")
        if what == "takes a step":
            await ctx.step("one", int)
        if what == "waits for a signal":
            await ctx.wait_for_signal("go")

    gc.collect()
    before = attempts_in_memory()
    gc.disable()
    try:
        async with app, working(app):
            for _ in range(3):
                await reached(await app.submit(work), state)
            async with asyncio.timeout(PATIENCE_S):
                for _ in itertools.count():
                    if attempts_in_memory() <= before:
                        break
                    await asyncio.sleep(0)
    finally:
        gc.enable()


async def test_a_handler_without_a_context_has_no_journal(
    new_database: Callable[[str], str],
) -> None:
    app = App(new_database("sqlite-memory"))

    @app.task
    async def plain(number: int) -> int:
        return in_memory(Context, Services, Journal)

    @app.task
    async def durable(ctx: Context) -> int:
        return in_memory(Context, Services, Journal)

    gc.collect()
    before = in_memory(Context, Services, Journal)
    async with app, working(app):
        assert await (await app.submit(plain, 1)).result() == before
        assert await (await app.submit(durable)).result() == before + 3


SEVERAL_LINES = (Moves, Pools, Rest, LongWaits)


async def test_what_is_about_several_lines_is_made_for_several(
    new_database: Callable[[str], str],
) -> None:
    app = App(new_database("sqlite-memory"))

    @app.task
    async def one_line(ctx: Context) -> int:
        await ctx.step("first", int)
        await ctx.step("second", int)
        return in_memory(*SEVERAL_LINES)

    @app.task
    async def branches(ctx: Context) -> int:
        await asyncio.gather(ctx.step("first", int), ctx.step("second", int))
        return in_memory(*SEVERAL_LINES)

    gc.collect()
    before = in_memory(*SEVERAL_LINES)
    async with app, working(app):
        assert await (await app.submit(one_line)).result() == before
        assert await (await app.submit(branches)).result() > before


async def test_a_run_keeps_no_calls_that_it_has_gone_past(
    new_database: Callable[[str], str],
) -> None:
    app = App(new_database("sqlite-memory"))

    @app.task
    async def loop(ctx: Context, times: int) -> int:
        for _ in range(times):
            await ctx.step("again", int)
        gc.collect()
        return in_memory(DurableCall)

    async with app, working(app):
        few = await (await app.submit(loop, 3)).result()
        assert await (await app.submit(loop, 30)).result() == few
