"""A worker that stood still looks at the clock before it goes on."""

import asyncio

import pytest

from flowfabric import App, Context
from tests.apps import PATIENCE_S, working


async def test_neither_a_step_nor_a_word_is_begun_once_the_lease_may_be_over(app: App) -> None:
    ran: list[str] = []
    told = asyncio.Event()

    @app.task
    async def work(ctx: Context) -> None:
        if ctx.attempt_index > 0:
            return
        # As after having stood still for so long. Nobody has had the time to say so.
        ctx._services.lease.valid_until_s = 0.0
        try:
            await ctx.step("effect", ran.append, "effect")
        except asyncio.CancelledError:
            told.set()
            raise

    async with working(app):
        await app.submit(work)
        await told.wait()
    assert ran == []


async def test_a_handler_that_ends_as_its_lease_is_lost_is_let_go_of(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    """What it did not wait for has not begun to be stored, and is not any more."""

    @app.task
    async def child() -> None: ...

    @app.task
    async def work(ctx: Context) -> None:
        await ctx.submit(child)
        ctx._services.lease.lost = "taken by another"
        ended.set()

    ended = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), working(app):
        await app.submit(work)
        await ended.wait()
    assert "did not stop" not in caplog.text
