"""What a run's snapshot tells of its steps."""

import asyncio
import time

from flowfabric import App, Context
from flowfabric.core.states import PublicState
from tests.apps import reached, working


async def test_steps_tell_branch_result_duration_and_error(store_url: str) -> None:
    app = App(store_url)

    def boom() -> None:
        raise ValueError("no")

    def slow(name: str) -> str:
        until_s = time.monotonic() + 0.02
        while time.monotonic() < until_s:
            pass
        return name

    @app.task
    async def order(ctx: Context) -> None:
        async def part(name: str) -> str:
            return await ctx.step("fetch", slow, name)

        await asyncio.gather(part("ada"), part("bob"))
        with ctx.branch("billing"):
            await ctx.step("charge", slow, "charge")
        try:
            await ctx.step("notify", boom)
        except ValueError:
            await ctx.sleep("1h")

    async with app, working(app):
        run = await app.submit(order)
        await reached(run, PublicState.DELAYED)
        steps = await run.steps()
    told = [(each.name, each.branch, each.result, each.error) for each in steps]
    assert sorted(told, key=str) == sorted(
        [
            ("fetch", "part[1]", b'"ada"', None),
            ("fetch", "part[2]", b'"bob"', None),
            ("charge", "billing", b'"charge"', None),
            ("notify", "", None, "ValueError: no"),
            ("sleep", "", None, None),
        ],
        key=str,
    )
    took = {each.name: each.duration_ms for each in steps}
    assert took["sleep"] is None
    assert took["notify"] is not None
    assert (took["fetch"] or 0) >= 15
