"""What ended long ago is deleted, with its events and frames, while claims go on."""

import asyncio
import time

import asyncpg

from benchmarks.bench import Bench
from benchmarks.grown import multiply
from benchmarks.report import figures, median, percentile
from flowfabric import Engine, EngineConfig, connect
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import ExecutionId, uuid_of
from flowfabric.core.streams import NewFrame
from flowfabric.engine.streams import FrameAppend
from flowfabric.reconcilers import run_due

CLAIMS = 500
"""Before the deletions begin, and again and again until they are over."""
FRAMES = 5
CONFIG = EngineConfig(keep_events="1h")
OLD_EVENTS = """
insert into flowfabric.event (
    occurred_at_ms, category, event_type, namespace, partition_key, execution_id)
select 1, 'completion', 'success', 'default', array[7], array[gen_random_uuid()]
  from generate_series(1, $1::int)
"""
LEFT = """
select (select count(*) from flowfabric.frame)
     + (select count(*) from flowfabric.event where occurred_at_ms = 1)
     + (select count(*) from flowfabric.execution_now where execution_kind = 'spoke')
"""
SWEEPS = ("retention", "stream_retention", "event_retention")


async def measure(bench: Bench) -> None:
    count = bench.scale.ended
    async with bench.database() as url, await connect(url, config=CONFIG) as engine:
        await grow(engine, url, count)
        quiet_ms = await claims_ms(engine)
        started = time.perf_counter()
        forgetting = asyncio.create_task(forget(engine))
        busy_ms: list[float] = []
        while not forgetting.done():
            busy_ms += await claims_ms(engine)
        await forgetting
        seconds = time.perf_counter() - started
        assert await left(url) == 0
    figures(
        f"{count:,} ended executions with {FRAMES} frames and an event each, deleted",
        [
            ("deleted", f"{count / seconds:,.0f} /s"),
            *claimed("quiet", quiet_ms),
            *claimed("meanwhile", busy_ms),
        ],
    )
    ratio = median(busy_ms) / median(quiet_ms)
    bench.at_most(2, ratio, "claim p50 during retention, of the quiet one")


def claimed(when: str, taken_ms: list[float]) -> list[tuple[str, str]]:
    return [
        (f"a claim, {when}, p{round(share * 100)}", f"{percentile(taken_ms, share):.1f} ms")
        for share in (0.5, 0.99)
    ]


async def grow(engine: Engine, url: str, count: int) -> None:
    """Copies of a run that has said something, and is kept for a moment."""
    connection = await asyncpg.connect(url)
    try:
        # First: the log is deleted from its beginning, as far as it is old.
        await connection.execute(OLD_EVENTS, count)
    finally:
        await connection.close()
    await multiply(url, uuid_of(await one_that_spoke(engine)), count)


async def one_that_spoke(engine: Engine) -> ExecutionId:
    policy = {"retention_policy": {"completed_ms": 1}}
    await engine.create_execution(NewExecution(execution_kind="spoke", policy=policy))
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    frames = tuple(NewFrame(payload=b"token ") for _ in range(FRAMES))
    await engine.append_frames([FrameAppend(handle=claimed.handle, frames=frames)])
    await engine.complete(claimed.handle)
    return claimed.execution_id


async def left(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval(LEFT))
    finally:
        await connection.close()


async def claims_ms(engine: Engine) -> list[float]:
    """One claim after another, each of an execution that waits."""
    await engine.create_executions([NewExecution(execution_kind="work")] * CLAIMS)
    taken_ms: list[float] = []
    for _ in range(CLAIMS):
        started = time.perf_counter()
        claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
        taken_ms.append((time.perf_counter() - started) * 1_000)
        assert claimed is not None
        await engine.cancel(claimed.handle, "measured")
    return taken_ms


async def forget(engine: Engine) -> None:
    while True:
        acted = await run_due(engine)
        if not any(acted.get(name) for name in SWEEPS):
            return
