"""A wait after branches have ended: what came early is taken, and never lost."""

import asyncio

from flowfabric import App, Context
from flowfabric.core.records import StepKind
from flowfabric.run import Run
from tests.apps import working


def one() -> int:
    return 1


async def two_branches(ctx: Context) -> None:
    async def branch(name: str) -> None:
        await ctx.step(name, one)

    begun = [asyncio.create_task(branch(name)) for name in "pq"]
    for each in begun:
        await each


async def counted_once(run: Run[object], sent: str) -> None:
    """Every signal is in one stored wait; none is kept."""
    steps = [step for step in await run.steps() if step.kind is StepKind.SIGNAL]
    assert len(steps) == len(sent)
    assert (await run.snapshot()).kept_signals == ()


async def test_a_wait_after_branches_takes_what_came_early(app: App) -> None:
    @app.task
    async def waits(ctx: Context) -> list[object]:
        x = await ctx.wait_for_signal("x")
        await two_branches(ctx)
        y = await ctx.wait_for_signal("y")
        z = await ctx.wait_for_signal("z")
        return [x.payload, y.payload, z.payload]

    run = await app.submit(waits)
    for name in "xyz":
        assert (await run.signal(name, name)).kept
    async with working(app):
        assert await run.result(timeout="20s") == ["x", "y", "z"]
    await counted_once(run, "xyz")


async def test_a_branch_that_begins_with_a_wait_takes_what_came_early(app: App) -> None:
    @app.task
    async def waits(ctx: Context) -> list[object]:
        async def waiting(name: str) -> object:
            return (await ctx.wait_for_signal(name)).payload

        found = []
        for name in "yy":
            await two_branches(ctx)
            found.append(await asyncio.create_task(waiting(name)))
        return found

    run = await app.submit(waits)
    for number in (1, 2):
        assert (await run.signal("y", number)).kept
    async with working(app):
        assert await run.result(timeout="20s") == [1, 2]
    await counted_once(run, "yy")
