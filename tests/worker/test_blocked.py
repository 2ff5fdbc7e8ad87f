"""A worker that starts, and what changed code had blocked before."""

import asyncio

from flowfabric import App, Context, Retry
from tests.apps import blocked, working


async def test_a_worker_that_starts_takes_up_what_was_blocked(app: App) -> None:
    @app.task
    async def publish() -> str:
        return "published"

    run = await app.submit(publish)
    claimed = await app.engine.claim(worker_id="old", worker_instance_id="old-1")
    assert claimed is not None
    await app.engine.block_on_code(claimed.handle, "notify", "the code has changed")
    async with working(app):
        assert await run.result(timeout="20s") == "published"
    (attempt,) = await app.engine.list_attempts(run.execution_id)
    assert attempt.attempt_index == 0


async def test_a_step_moved_between_branches_blocks_beside_a_branch_with_a_new_call(
    app: App,
) -> None:
    ran: list[str] = []
    all_ran = asyncio.Event()

    async def effect(name: str) -> None:
        ran.append(name)
        if len(ran) == 4:
            all_ran.set()

    async def fails() -> None:
        await all_ran.wait()
        raise RuntimeError("the first run ends here")

    @app.task(retry=Retry(max_retries=1, delay=0))
    async def fan_out(ctx: Context) -> None:
        moved = ctx.retry_count > 0

        async def other() -> None:
            await ctx.step("o1", effect, "o1")
            await ctx.step("o2", fails)

        async def first() -> None:
            await ctx.step("a1", effect, "a1")
            if not moved:
                await ctx.step("a2", effect, "a2")
            await ctx.step("a3", fails)

        async def second() -> None:
            await ctx.step("b1", effect, "b1")
            # Outside of steps: who comes first is uncertain.
            await asyncio.sleep(0.05 if moved else 0)
            if moved:
                await ctx.step("a2", effect, "a2")

        await asyncio.gather(other(), first(), second())

    async with working(app):
        assert "a2" in await blocked(await app.submit(fan_out))
    assert sorted(ran) == ["a1", "a2", "b1", "o1"]
