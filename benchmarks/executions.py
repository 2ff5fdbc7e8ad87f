"""Creating, claiming and completing executions, beside the floor of the same database."""

import time
from collections.abc import Mapping

import asyncpg

from benchmarks.floor import PAYLOAD, Floor
from benchmarks.report import figures, percentile, rates
from flowfabric import Engine
from flowfabric.core.creation import NewExecution
from flowfabric.core.results import Claimed
from flowfabric.engine.work import Completion

CREATE_BATCH = 1_000
TURNS = 5
KIND = "bench"


async def measure(store: str, engine: Engine, floor: Floor, counts: dict[int, int]) -> None:
    """One table for one store. `counts`: how many executions for each claim batch size."""
    rows: list[tuple[str, float, float]] = []
    for batch, count in counts.items():
        floor_s, ours_s = await _pairs(engine, floor, count // TURNS, batch)
        rows.append((f"claim + complete, batches of {batch}", count / floor_s, count / ours_s))
    count = max(counts.values())
    floor_s, ours_s = await _creations(engine, floor, count // TURNS)
    rows.append((f"create, batches of {CREATE_BATCH:,}", count / floor_s, count / ours_s))
    rates(f"Executions on {store}", rows)


async def _pairs(engine: Engine, floor: Floor, part: int, batch: int) -> tuple[float, float]:
    """Seconds of both. They take turns, so that both meet the machine in the same moods."""
    floor_s = ours_s = 0.0
    for _ in range(TURNS):
        await floor.create(part, min(CREATE_BATCH, part))
        await create(engine, part)
        floor_s += await floor.claim_and_complete(part, batch)
        ours_s += await claim_and_complete(engine, part, batch)
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
        claimed = await claim(engine, batch)
        await engine.complete_many(
            [Completion(handle=each.handle, result=b"ok") for each in claimed]
        )
    return time.perf_counter() - started


async def claim(engine: Engine, limit: int) -> list[Claimed]:
    return await engine.claim_many(
        ["default"], limit=limit, worker_id="bench", worker_instance_id="bench-1"
    )


async def claim_cost(engines: Mapping[int, Engine], samples: int = 50) -> None:
    """What a claim of one and of a hundred rows costs, by how many rows wait.

    The engines, by their backlog, take turns: the machine is as slow for one as for the other.
    """
    rows: list[tuple[str, str]] = []
    for limit in (1, 100):
        taken_ms: dict[int, list[float]] = {waiting: [] for waiting in engines}
        for _ in range(samples):
            for waiting, engine in engines.items():
                taken_ms[waiting].append(await _claim_ms(engine, limit))
        medians = {waiting: percentile(taken, 0.5) for waiting, taken in taken_ms.items()}
        least = medians[min(medians)]
        rows += [
            (
                f"claim of {limit} with {waiting:,} waiting",
                f"{median_ms:.2f} ms  ({median_ms / least:.2f}x)",
            )
            for waiting, median_ms in medians.items()
        ]
    figures("Claim cost by backlog, Postgres", rows)


async def _claim_ms(engine: Engine, limit: int) -> float:
    started = time.perf_counter()
    claimed = await claim(engine, limit)
    taken_ms = (time.perf_counter() - started) * 1_000
    await engine.complete_many([Completion(handle=each.handle) for each in claimed])
    # Put as many back, so that the backlog stays what it is said to be.
    await create(engine, limit)
    return taken_ms


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
            # Rows arrive in the order of time, and ids begin with it, as they do in life.
            f"insert into execution (execution_id, created_at_ms, {listed})"
            " select (lpad(to_hex(created_at_ms + number), 12, '0') || '7'"
            "         || substr(md5(number::text), 1, 3) || '8'"
            "         || substr(md5(number::text), 4, 15))::uuid,"
            f"       created_at_ms + number, {listed}"
            "  from (select * from execution where ready limit 1) as one,"
            "       generate_series(1, $1::bigint) as number",
            count - waiting,
        )
        await connection.execute("vacuum analyze execution")
    finally:
        await connection.close()
