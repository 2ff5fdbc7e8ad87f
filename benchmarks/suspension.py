"""Suspending and resuming: how long a signal takes to a worker, and what waiting costs."""

import asyncio
import re
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final
from unittest.mock import patch

import asyncpg

from benchmarks.executions import KIND
from benchmarks.report import figures, percentile
from benchmarks.sdk import CONCURRENCY, worker
from flowfabric import App, Context, Engine, Task
from flowfabric.core.conditions import ByName, Single
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import uuid_of
from flowfabric.core.suspension_model import Suspension, Waitpoint
from flowfabric.store.mapping import table_of
from flowfabric.store.postgres.transaction import STATEMENTS
from flowfabric.store.statements import numbered
from tests.bulk import POSTGRES_ID, SQLITE_ID, postgres_copies, sqlite_copies

LANE: Final = "pauses"
APPROVED: Final = Single("gate", ByName("approved"))
SUSPENDED: Final = 100_000
SALT: Final = 77


async def resume_latency(store: str, url: str, rounds: int = 200) -> None:
    """From a signal to the line of the handler after its wait, with a worker that is idle.

    Sent by the app that works, and by another one on the same database, as a web
    process would: the worker then hears of it through the database.
    """
    rows: list[tuple[str, str]] = []
    working = App(url)
    started: asyncio.Queue[float] = asyncio.Queue()
    went_on: asyncio.Queue[float] = asyncio.Queue()

    @working.task
    async def gate(ctx: Context) -> object:
        started.put_nowait(time.perf_counter())
        signal = await ctx.wait_for_signal("go")
        went_on.put_nowait(time.perf_counter())
        return signal.payload

    async with App(url) as other, working, worker(working, CONCURRENCY):
        for who, sender in (("its own app", working), ("another app", other)):
            runs = await working.submit_many([gate() for _ in range(rounds)])
            await _all_wait(working, rounds)
            called: list[float] = []
            answered: list[float] = []
            for run in runs:
                # The worker should be idle again, and not expect the next one.
                await asyncio.sleep(0.02)
                asked_s = time.perf_counter()
                await sender.signals.send(run.execution_id, "go", {"by": "ada"})
                answered_s = time.perf_counter()
                on_s = await went_on.get()
                called.append((on_s - asked_s) * 1_000)
                answered.append((on_s - answered_s) * 1_000)
            rows += _shares(f"signal sent by {who} until the handler goes on", called)
            rows += _shares(f"signal of {who} accepted until the handler goes on", answered)
        whole = await _rounds(working, gate, rounds, started, went_on)
        rows += _shares("wait, signal, until the handler goes on", whole)
    figures(f"Resuming on {store}", rows)


def _shares(what: str, samples: Sequence[float]) -> list[tuple[str, str]]:
    return [
        (f"{what}, {name}", f"{percentile(samples, share):.2f} ms")
        for name, share in (("p50", 0.5), ("p99", 0.99))
    ]


async def _all_wait(app: App, count: int) -> None:
    waiting = 0
    while waiting < count:
        await asyncio.sleep(0.05)
        waiting = len((await app.signals.pending(limit=1_000)).entries)


async def _rounds(
    app: App,
    gate: Task[[], object],
    rounds: int,
    started: asyncio.Queue[float],
    went_on: asyncio.Queue[float],
) -> list[float]:
    """From the handler's wait to its next line, signalled as soon as the pause is answered."""
    paused: asyncio.Queue[None] = asyncio.Queue()
    suspend: Callable[..., Awaitable[object]] = app.engine.suspend
    samples: list[float] = []

    async def noting(*arguments: object, **options: object) -> object:
        answer = await suspend(*arguments, **options)
        paused.put_nowait(None)
        return answer

    with patch.object(app.engine, "suspend", noting):
        for _ in range(rounds):
            while not started.empty():
                started.get_nowait()
            run = await app.submit(gate)
            began_s = await started.get()
            await paused.get()
            await run.signal("go")
            samples.append((await went_on.get() - began_s) * 1_000)
            await asyncio.sleep(0.02)
    return samples


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
    claimed = await engine.claim(LANE, worker_id="bench", worker_instance_id="bench-1")
    assert claimed is not None
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
