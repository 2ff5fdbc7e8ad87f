"""A worker that stood still looks at the clock before it goes on."""

import asyncio

from flowfabric import App, Context
from tests.apps import working


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
