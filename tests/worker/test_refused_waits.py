"""Waits that are refused because another branch waits for signals."""

import asyncio

import pytest

from flowfabric import Context, testing
from flowfabric.errors import InvalidInput


@pytest.mark.parametrize("what", ["sleep", "signal", "child"])
async def test_a_wait_that_is_refused_beside_another_may_be_caught(what: str) -> None:
    async with testing.engine() as app:
        told: list[str] = []

        @app.task(lane="nobody")
        async def child() -> None: ...

        async def wait(ctx: Context) -> None:
            if what == "sleep":
                await ctx.sleep("1h")
            elif what == "signal":
                await ctx.wait_for_signal("stop")
            else:
                await (await ctx.submit(child)).result()

        @app.task
        async def both(ctx: Context) -> object:
            first = asyncio.create_task(ctx.wait_for_signal("go"))
            for _ in range(10):
                await asyncio.sleep(0)
            try:
                await wait(ctx)
            except InvalidInput as error:
                told.append(error.field)
            return (await first).payload

        run = await app.submit(both)
        await app.drain()
        await run.signal("go", 1)
        await app.drain()
        assert await run.result(timeout=1) == 1
        assert told == ["wait", "wait"], "later runs are told the same"
