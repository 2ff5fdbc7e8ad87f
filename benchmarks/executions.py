"""Creating, claiming and completing executions, beside the floor of the same database."""

import time
from collections.abc import Sequence

import asyncpg

from benchmarks.floor import PAYLOAD, Floor
from benchmarks.report import figures, percentile, rates
from flowfabric import Engine
from flowfabric.core.creation import NewExecution
from flowfabric.core.results import Claimed
from flowfabric.engine.work import Completion

CREATE_BATCH = 1_000
KIND = "bench"


async def measure(store: str, engine: Engine, floor: Floor, counts: dict[int, int]) -> None:
    """One table for one store. `counts`: how many executions for each claim batch size."""
    rows: list[tuple[str, float, float]] = []
    for batch, count in counts.items():
        floor_create = await floor.create(count, min(CREATE_BATCH, count))
        created = await create(engine, count)
        if batch == max(counts):
            rows.append((f"create, batches of {CREATE_BATCH:,}", floor_create, created))
        floor_pairs = await floor.claim_and_complete(count, batch)
        rows.append(
            (
                f"claim + complete, batches of {batch}",
                floor_pairs,
                await claim_and_complete(engine, count, batch),
            )
        )
    rates(f"Executions on {store}", rows)


async def create(engine: Engine, count: int) -> float:
    batch = min(CREATE_BATCH, count)
    started = time.perf_counter()
    for _ in range(count // batch):
        await engine.create_executions(
            [NewExecution(execution_kind=KIND, input_payload=PAYLOAD) for _ in range(batch)]
        )
    return count / (time.perf_counter() - started)


async def claim_and_complete(engine: Engine, count: int, batch: int) -> float:
    started = time.perf_counter()
    for _ in range(count // batch):
        claimed = await claim(engine, batch)
        await engine.complete_many(
            [Completion(handle=each.handle, result=b"ok") for each in claimed]
        )
    return count / (time.perf_counter() - started)


async def claim(engine: Engine, limit: int) -> list[Claimed]:
    return await engine.claim_many(
        ["default"], limit=limit, worker_id="bench", worker_instance_id="bench-1"
    )


async def claim_cost(engine: Engine, url: str, waiting: Sequence[int]) -> None:
    """What a claim of one and of a hundred rows costs, by how many rows wait."""
    rows: list[tuple[str, str]] = []
    base: dict[int, float] = {}
    for count in waiting:
        await fill(url, count)
        for limit in (1, 100):
            median_ms = await _claim_ms(engine, limit)
            base.setdefault(limit, median_ms)
            rows.append(
                (
                    f"claim of {limit} with {count:,} waiting",
                    f"{median_ms:.2f} ms  ({median_ms / base[limit]:.2f}x)",
                )
            )
    figures("Claim cost by backlog, Postgres", rows)


async def _claim_ms(engine: Engine, limit: int, samples: int = 15) -> float:
    taken = []
    for _ in range(samples):
        started = time.perf_counter()
        claimed = await claim(engine, limit)
        taken.append((time.perf_counter() - started) * 1_000)
        await engine.complete_many([Completion(handle=each.handle) for each in claimed])
        # Put as many back, so that the backlog stays what it is said to be.
        await engine.create_executions(
            [NewExecution(execution_kind=KIND, input_payload=PAYLOAD) for _ in claimed]
        )
    return percentile(taken, 0.5)


async def fill(url: str, count: int) -> None:
    """Copy one waiting execution until `count` wait: a million would take the engine minutes."""
    connection = await asyncpg.connect(url, server_settings={"search_path": "flowfabric"})
    try:
        columns = [
            row["attname"]
            for row in await connection.fetch(
                "select attname from pg_attribute where attrelid = 'execution'::regclass"
                " and attnum > 0 and not attisdropped"
                " and attname not in ('execution_id', 'created_at_ms')"
            )
        ]
        listed = ", ".join(columns)
        waiting = await connection.fetchval("select count(*) from execution where ready")
        await connection.execute(
            # Rows arrive in the order of time, as they do in life.
            f"insert into execution (execution_id, created_at_ms, {listed})"
            f" select gen_random_uuid(), created_at_ms + number, {listed}"
            "  from (select * from execution where ready limit 1) as one,"
            "       generate_series(1, $1::bigint) as number",
            count - waiting,
        )
        await connection.execute("vacuum analyze execution")
    finally:
        await connection.close()
