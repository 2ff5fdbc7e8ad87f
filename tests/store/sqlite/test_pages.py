"""How much of the file a batch touches."""

import sqlite3
from contextlib import closing
from pathlib import Path

from flowfabric import Engine, connect
from flowfabric.core.creation import NewExecution
from flowfabric.core.results import Claimed
from flowfabric.engine.executions import Completion

WAITING, BATCH = 3_000, 100
PAGE_BYTES = 4_096


async def test_what_was_submitted_together_is_completed_on_few_pages(path: Path) -> None:
    """Keys that begin with the partition would put each row onto a page of its own."""
    async with await connect(f"sqlite:///{path}") as engine:
        for _ in range(WAITING // 1_000):
            await engine.create_executions([NewExecution(execution_kind="work")] * 1_000)
        for _ in range(WAITING // BATCH - 1):
            await complete(engine, await claim(engine))
        claimed = await claim(engine)
        with closing(sqlite3.connect(path)) as stranger:
            stranger.execute("pragma wal_checkpoint(truncate)")
        await complete(engine, claimed)
        pages = path.with_name(f"{path.name}-wal").stat().st_size // PAGE_BYTES
    assert pages < 0.65 * BATCH


async def claim(engine: Engine) -> list[Claimed]:
    return await engine.claim_many(
        ["default"], limit=BATCH, worker_id="w", worker_instance_id="w-1"
    )


async def complete(engine: Engine, claimed: list[Claimed]) -> None:
    await engine.complete_many([Completion(handle=each.handle) for each in claimed])
