"""Creating, claiming and completing executions, beside the floor of the same database."""

import asyncio
import time
from collections.abc import Sequence

from benchmarks.bench import Bench
from benchmarks.floor import PAYLOAD, Floor, PostgresFloor, SqliteFloor
from benchmarks.report import rates
from flowfabric import Engine, connect
from flowfabric.batching import PARALLEL
from flowfabric.core.creation import NewExecution
from flowfabric.core.results import Claimed
from flowfabric.engine.executions import Completion
from tests.postgres import server_version

COUNTS = {1: 1_000, 10: 5_000, 100: 20_000}
"""How many executions for each size of batches, the largest last."""
CREATE_BATCH = 1_000
TURNS = 5
KIND = "bench"


async def measure(bench: Bench) -> None:
    async with (
        bench.database() as url,
        await connect(url) as engine,
        PostgresFloor.opened(url) as floor,
    ):
        store = f"Postgres {await server_version(url)}"
        share = await beside(store, engine, floor)
        bench.at_least(0.5, share, "claim + complete on Postgres, of the floor's rate")
    async with await connect(f"sqlite:///{bench.file('executions')}") as engine:
        with SqliteFloor.opened(bench.file("floor")) as file_floor:
            share = await beside("SQLite", engine, file_floor)
        bench.at_least(0.3, share, "claim + complete on SQLite as a worker, of the floor's rate")


async def beside(store: str, engine: Engine, floor: Floor) -> float:
    """One table for one store; returns the share of the floor's rate in the largest batches.

    On SQLite, of batches that are claimed while others complete.
    """
    rows: list[tuple[str, float, float]] = []
    for batch, count in COUNTS.items():
        floor_s, ours_s = await _pairs(engine, floor, count // TURNS, batch)
        rows.append((f"claim + complete, batches of {batch}", count / floor_s, count / ours_s))
    if isinstance(floor, SqliteFloor):
        floor_s, ours_s = await _overlapping_pairs(engine, floor, count // TURNS, batch)
        rows.append(("the same, claimed while others complete", count / floor_s, count / ours_s))
    share = floor_s / ours_s
    count = max(COUNTS.values())
    floor_s, ours_s = await _creations(engine, floor, count // TURNS)
    rows.append((f"create, batches of {CREATE_BATCH:,}", count / floor_s, count / ours_s))
    rates(f"Executions on {store}", rows)
    return share


async def _pairs(engine: Engine, floor: Floor, part: int, batch: int) -> tuple[float, float]:
    """Seconds of both. They take turns, so that both meet the machine in the same moods."""
    floor_s = ours_s = 0.0
    for _ in range(TURNS):
        await floor.create(part, min(CREATE_BATCH, part))
        await create(engine, part)
        floor_s += await floor.claim_and_complete(part, batch)
        ours_s += await claim_and_complete(engine, part, batch)
    return floor_s, ours_s


async def _overlapping_pairs(
    engine: Engine, floor: SqliteFloor, part: int, batch: int
) -> tuple[float, float]:
    floor_s = ours_s = 0.0
    for _ in range(TURNS):
        await floor.create(part, min(CREATE_BATCH, part))
        await create(engine, part)
        floor_s += await floor.claim_while_completing(part, batch)
        ours_s += await claim_while_completing(engine, part, batch)
    return floor_s, ours_s


async def _creations(engine: Engine, floor: Floor, part: int) -> tuple[float, float]:
    floor_s = ours_s = 0.0
    for _ in range(TURNS):
        floor_s += await floor.create(part, CREATE_BATCH)
        ours_s += await create(engine, part)
    return floor_s, ours_s


async def create(engine: Engine, count: int) -> float:
    batch = min(CREATE_BATCH, count)
    started = time.perf_counter()
    for _ in range(count // batch):
        await engine.create_executions(
            [NewExecution(execution_kind=KIND, input_payload=PAYLOAD) for _ in range(batch)]
        )
    return time.perf_counter() - started


async def claim_and_complete(engine: Engine, count: int, batch: int) -> float:
    started = time.perf_counter()
    for _ in range(count // batch):
        await complete(engine, await claim(engine, batch))
    return time.perf_counter() - started


async def claim_while_completing(engine: Engine, count: int, batch: int) -> float:
    """As a worker does: one claim after the other, while earlier batches are reported.

    With as many slots as a batch, a worker runs one batch, has claimed the next, and reports
    `PARALLEL` others.
    """
    started = time.perf_counter()
    reports: set[asyncio.Task[None]] = set()
    for _ in range(count // batch):
        claimed = await claim(engine, batch)
        if len(reports) == PARALLEL:
            _, reports = await asyncio.wait(reports, return_when=asyncio.FIRST_COMPLETED)
        reports.add(asyncio.create_task(complete(engine, claimed)))
    await asyncio.gather(*reports)
    return time.perf_counter() - started


async def claim(engine: Engine, limit: int) -> list[Claimed]:
    return await engine.claim_many(
        ["default"], limit=limit, worker_id="bench", worker_instance_id="bench-1"
    )


async def complete(engine: Engine, claimed: Sequence[Claimed]) -> None:
    await engine.complete_many([Completion(handle=each.handle, result=b"ok") for each in claimed])
