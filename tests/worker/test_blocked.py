"""A worker that starts, and what changed code had blocked before."""

from flowfabric import App
from tests.apps import working


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
