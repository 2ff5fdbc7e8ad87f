"""Suspending and resuming: how long a signal takes to a worker, and what waiting costs."""

import asyncio
import re
import sqlite3
import time
from typing import Final

import asyncpg

from benchmarks.executions import KIND
from benchmarks.report import figures, percentile
from flowfabric import Engine
from flowfabric.core.conditions import ByName, Single
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import uuid_of
from flowfabric.core.results import Claimed
from flowfabric.core.suspension_model import Suspension, Waitpoint
from flowfabric.store.mapping import table_of
from flowfabric.store.postgres.transaction import STATEMENTS
from flowfabric.store.statements import numbered
from tests.bulk import POSTGRES_ID, SQLITE_ID, postgres_copies, sqlite_copies

LANE: Final = "pauses"
APPROVED: Final = Single("gate", ByName("approved"))
SUSPENDED: Final = 100_000
SALT: Final = 77


async def resume_latency(store: str, engine: Engine, rounds: int = 300) -> None:
    """A worker waits for work; a suspended execution is signalled; the worker has it again."""
    await engine.create_execution(NewExecution(execution_kind=KIND, lane_id=LANE))
    claimed = await _claim(engine)
    signalled: list[float] = []
    whole: list[float] = []
    for _ in range(rounds):
        waiting = asyncio.create_task(_claim(engine))
        started = time.perf_counter()
        outcome = await engine.suspend(claimed.handle, resume_condition=APPROVED)
        sent = time.perf_counter()
        await engine.deliver_signal(
            claimed.execution_id,
            outcome.details.waitpoint_id,
            waitpoint_token=outcome.details.waitpoint_token,
            signal_name="approved",
            payload=b"yes",
        )
        claimed = await waiting
        done = time.perf_counter()
        assert len(await engine.observe_signals(claimed.handle)) == 1
        signalled.append((done - sent) * 1_000)
        whole.append((done - started) * 1_000)
    await engine.complete(claimed.handle)
    figures(
        f"Resuming on {store}",
        [
            (f"{what}, {name}", f"{percentile(samples, share):.2f} ms")
            for what, samples in (
                ("signal until claimed", signalled),
                ("suspend, signal, until claimed", whole),
            )
            for name, share in (("p50", 0.5), ("p99", 0.99))
        ],
    )


async def _claim(engine: Engine) -> Claimed:
    claimed = await engine.claim(
        LANE, worker_id="bench", worker_instance_id="bench-1", max_wait_ms=60_000
    )
    assert claimed is not None
    return claimed


async def idle_cost_on_postgres(engine: Engine, url: str) -> None:
    """What asking for due work reads, without and with many suspended executions."""
    connection = await asyncpg.connect(url, server_settings={"search_path": "flowfabric"})
    try:
        before = await _blocks(connection)
        await _fill_postgres(engine, connection)
        after = await _blocks(connection)
    finally:
        await connection.close()
    await _report("Postgres", engine, f"{before} blocks", f"{after} blocks")


async def idle_cost_on_sqlite(engine: Engine, path: str) -> None:
    before = await _asking_ms(engine)
    uuid = await _one_suspended(engine)
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(sqlite_copies(uuid, SUSPENDED, SALT, {}))
        counting = f"select 1 union all select n + 1 from copies where n < {SUSPENDED}"
        rows = f"(with recursive copies (n) as ({counting}) select n from copies)"
        identity = SQLITE_ID.format(salt=SALT)
        for record in (Suspension, Waitpoint):
            connection.execute(_copies(record, uuid, rows, identity))
    connection.close()
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
    return percentile(samples, 0.5)


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
    claimed = await _claim(engine)
    assert claimed.execution_id == created.execution_id
    await engine.suspend(claimed.handle, resume_condition=APPROVED)
    return uuid_of(claimed.execution_id)


async def _fill_postgres(engine: Engine, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    uuid = await _one_suspended(engine)
    await connection.execute(postgres_copies(uuid, SUSPENDED, SALT, {}))
    rows = f"generate_series(1, {SUSPENDED}) as copies (n)"
    identity = POSTGRES_ID.format(salt=SALT)
    for record in (Suspension, Waitpoint):
        await connection.execute(_copies(record, uuid, rows, identity))
    for table in ("execution", "suspension", "waitpoint"):
        await connection.execute(f"vacuum analyze {table}")


def _copies(record: type[Suspension] | type[Waitpoint], uuid: str, rows: str, identity: str) -> str:
    """A statement that gives each copied execution a copy of the row of the first."""
    table = table_of(record)
    changes = {"execution_id": identity, "partition_key": "n % 256"}
    values = ", ".join(changes.get(name, f"t.{name}") for name in table.names)
    return (
        f"insert into {table.name} ({', '.join(table.names)}) select {values}"
        f" from {table.name} as t cross join {rows} where t.execution_id = '{uuid}'"
    )
