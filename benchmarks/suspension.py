"""What waiting costs: asking for due work while a hundred thousand executions are suspended."""

import re
import time
from pathlib import Path
from typing import Final

import asyncpg

from benchmarks.bench import Bench
from benchmarks.executions import KIND
from benchmarks.grown import multiply, multiply_in_file
from benchmarks.report import figures, median
from flowfabric import Engine, connect
from flowfabric.core.conditions import ByName, Single
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import uuid_of
from flowfabric.store.postgres.transaction import STATEMENTS
from flowfabric.store.statements import numbered

LANE: Final = "pauses"
APPROVED: Final = Single("gate", ByName("approved"))
SUSPENDED: Final = 100_000


async def measure(bench: Bench) -> None:
    async with bench.database() as url, await connect(url) as engine:
        await idle_cost_on_postgres(engine, url)
    path = bench.file("suspension")
    async with await connect(f"sqlite:///{path}") as engine:
        await idle_cost_on_sqlite(engine, path)


async def idle_cost_on_postgres(engine: Engine, url: str) -> None:
    """What asking for due work reads, without and with many suspended executions."""
    connection = await asyncpg.connect(url, server_settings={"search_path": "flowfabric"})
    try:
        before = await _blocks(connection)
        await multiply(url, await _one_suspended(engine), SUSPENDED)
        after = await _blocks(connection)
    finally:
        await connection.close()
    await _report("Postgres", engine, f"{before} blocks", f"{after} blocks")


async def idle_cost_on_sqlite(engine: Engine, path: Path) -> None:
    before = await _asking_ms(engine)
    multiply_in_file(path, await _one_suspended(engine), SUSPENDED)
    after = await _asking_ms(engine)
    await _report("SQLite", engine, f"{before:.3f} ms", f"{after:.3f} ms")


async def _report(store: str, engine: Engine, before: str, after: str) -> None:
    page = await engine.list_suspended(limit=1_000)
    assert page.next_cursor is not None
    dues = await engine.next_due()
    assert "suspension_timeout" not in dues
    figures(
        f"{SUSPENDED:,} suspended executions on {store}, none with a timeout",
        [
            ("asking what is due, with none suspended", before),
            ("asking what is due, with all suspended", after),
            ("asking takes, with all suspended", f"{await _asking_ms(engine):.2f} ms"),
        ],
    )


async def _asking_ms(engine: Engine) -> float:
    samples = []
    for _ in range(50):
        started = time.perf_counter()
        await engine.next_due()
        samples.append((time.perf_counter() - started) * 1_000)
    return median(samples)


async def _blocks(connection: "asyncpg.Connection[asyncpg.Record]") -> int:
    """Pages of the database that `next_due` touches."""
    statement = numbered("next_due", STATEMENTS)
    text = re.sub(r"\$\d+", "1", statement.text)
    rows = await connection.fetch(f"explain (analyze, buffers, timing off) {text}")
    line = next(str(row[0]) for row in rows if "Buffers:" in str(row[0]))
    return sum(
        int(part.partition("=")[2]) for part in line.split() if part.startswith(("hit=", "read="))
    )


async def _one_suspended(engine: Engine) -> str:
    created = await engine.create_execution(NewExecution(execution_kind=KIND, lane_id=LANE))
    claimed = await engine.claim(LANE, worker_id="bench", worker_instance_id="bench-1")
    assert claimed is not None
    assert claimed.execution_id == created.execution_id
    await engine.suspend(claimed.handle, resume_condition=APPROVED)
    return uuid_of(claimed.execution_id)
