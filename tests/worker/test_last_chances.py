"""A run that the next death of a worker fails begins alone: nothing takes it along."""

import asyncio
import itertools

from flowfabric import App, Context
from tests.apps import working


async def test_a_run_on_its_last_chance_waits_for_what_has_just_begun(app: App) -> None:
    """That may kill the worker, and what has begun beside it would have seen one death too many."""
    told: list[str] = []
    begun, let_go = asyncio.Event(), asyncio.Event()

    @app.task
    async def new() -> None:
        begun.set()
        await let_go.wait()
        told.append("the new one ends")

    @app.task(lane="later")
    async def suspect(ctx: Context) -> None:
        told.append("the suspect begins")

    async with app:
        run = await app.submit(suspect)
        for _ in range(2):
            await _die_over(app)
        await app.engine.pause_lane("later")
        async with working(app, lanes=["default", "later"]):
            first = await app.submit(new)
            await begun.wait()
            await app.engine.resume_lane("later")
            await _claimed(app, run.execution_id)
            let_go.set()
            await first.result(timeout="20s")
            await run.result(timeout="20s")
    assert told == ["the new one ends", "the suspect begins"]


async def _die_over(app: App) -> None:
    """A worker claims what there is, and is never heard of again."""
    claimed = await app.engine.claim(
        "later", worker_id="ghost", worker_instance_id="ghost", lease_ttl_ms=1_000
    )
    assert claimed is not None
    async with asyncio.timeout(20):
        for _ in itertools.count():
            if (await app.engine.expire_due_leases()).acted:
                return
            await asyncio.sleep(0)


async def _claimed(app: App, execution_id: str) -> None:
    async with asyncio.timeout(20):
        for _ in itertools.count():
            held = await app.engine.list_attempts(execution_id)
            if held[-1].worker_instance_id == "w-1":
                return
            await asyncio.sleep(0)
