"""Databases that have been in use, and what a drain costs in them.

One execution is copied inside the database: through the engine, ten million would take hours.
Whatever rows an execution has in whichever tables, each copy has too, so that nothing here
knows the schema.
"""

import sqlite3
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg

from benchmarks.bench import Bench
from benchmarks.costs import Jobs, submit_and_drain
from benchmarks.meter import Cost
from benchmarks.report import costs
from flowfabric import App
from flowfabric.core.ids import ExecutionId, uuid_of

DRAINED = 10_000
ROUNDS = 2
FIRST = 9_000
"""The highest priority."""
CHUNK = 500_000
"""Rows one statement makes: few enough that the server's checkpoints keep up."""
PARTITIONS = 256

POSTGRES_COLUMNS = """
select c.relname, a.attname
  from pg_class c
  join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
 where c.relnamespace = 'flowfabric'::regnamespace and c.relkind = 'r' and a.attidentity = ''
   and exists (select from pg_attribute k where k.attrelid = c.oid
                  and k.attname = 'execution_id' and k.atttypid = 'uuid'::regtype)"""
SQLITE_COLUMNS = """
select t.name, c.name
  from sqlite_master t
  join pragma_table_info(t.name) c
 where t.type = 'table' and t.name <> 'event' and c.name <> 'sequence'
   and exists (select * from pragma_table_info(t.name) k where k.name = 'execution_id')"""

# Ids begin with the time, as those of real executions do, and so arrive in the order of the index.
POSTGRES_ID = (
    "(lpad(to_hex({first_ms} + n), 12, '0') || '7' || substr(md5('{uuid}' || n), 1, 3) || '8'"
    " || substr(md5('{uuid}' || n), 4, 15))::uuid"
)
SQLITE_ID = (
    "printf('%s-%s-7000-8000-%s', substr(printf('%012x', {first_ms} + n), 1, 8),"
    " substr(printf('%012x', {first_ms} + n), 9), substr('{uuid}', 25))"
)


async def measure(bench: Bench) -> None:
    """Drains of an empty database and of grown ones, in turns; the quickest of each counts."""
    ended, others = bench.scale.ended, bench.scale.others
    situations: dict[str, tuple[Callable[[str], Awaitable[ExecutionId]] | None, int]] = {
        "an empty database": (None, 0),
        f"{ended:,} ended executions behind": (one_ended, ended),
        f"{others:,} for others in front": (one_for_others, others),
        f"{others:,} of its own in front": (one_of_its_own, others),
    }
    drains: dict[str, list[Cost]] = {what: [] for what in situations}
    async with AsyncExitStack() as stack:
        urls = {}
        for what, (one, count) in situations.items():
            url = urls[what] = await stack.enter_async_context(bench.database())
            if one is not None:
                await multiply(url, uuid_of(await one(url)), count)
        for _ in range(ROUNDS):
            for what, url in urls.items():
                drains[what].append((await submit_and_drain(url, DRAINED))[1])
    best = [(what, min(each, key=lambda cost: cost.seconds)) for what, each in drains.items()]
    empty = best[0][1]
    rows = [(what, cost, cost.rate / empty.rate) for what, cost in best]
    costs("Drains of no-op jobs on Postgres", rows, "of the empty rate")
    bench.at_least(0.9, rows[1][2], f"{rows[1][0]}, of the empty rate")
    bench.at_least(0.91, rows[2][2], f"{rows[2][0]}, of the empty rate")


async def one_ended(url: str) -> ExecutionId:
    work = Jobs(url)
    async with work.app:
        (run,) = await work.submit(1)
        await work.drain()
    return run.execution_id


async def one_for_others(url: str) -> ExecutionId:
    """Ready, ahead of everything, in the same lane, and of a task the worker does not have."""
    app = App(url)

    @app.task(priority=FIRST)
    async def elsewhere() -> None: ...

    async with app:
        return (await app.submit(elsewhere)).execution_id


async def one_of_its_own(url: str) -> ExecutionId:
    work = Jobs(url)
    async with work.app:
        (run,) = await work.submit(1)
    return run.execution_id


async def multiply(url: str, uuid: str, count: int) -> None:
    """Copy all rows of the execution, each copy a millisecond older than the next."""
    first_ms = int(time.time() * 1_000) - count
    connection = await asyncpg.connect(url, server_settings={"search_path": "flowfabric"})
    try:
        found = await connection.fetch(POSTGRES_COLUMNS)
        columns = [(str(table), str(column)) for table, column in found]
        identity = POSTGRES_ID.format(first_ms=first_ms, uuid=uuid)
        for start in range(0, count, CHUNK):
            last = min(start + CHUNK, count)
            series = f"generate_series({start + 1}, {last}) as copies (n)"
            for statement in copies(columns, uuid, identity, series, count):
                await connection.execute(statement)
        await connection.execute("vacuum analyze")
        await connection.execute("checkpoint")
    finally:
        await connection.close()


def multiply_in_file(path: Path, uuid: str, count: int) -> None:
    """The same for SQLite."""
    identity = SQLITE_ID.format(first_ms=int(time.time() * 1_000) - count, uuid=uuid)
    connection = sqlite3.connect(path)
    columns = connection.execute(SQLITE_COLUMNS).fetchall()
    counting = f"select 1 union all select n + 1 from copies where n < {count}"
    series = f"(with recursive copies (n) as ({counting}) select n from copies)"
    with connection:
        for statement in copies(columns, uuid, identity, series, count):
            connection.execute(statement)
    connection.close()


def copies(
    columns: list[tuple[str, str]], uuid: str, identity: str, series: str, count: int
) -> list[str]:
    """A statement for each table. `series` counts copies as `n`; `identity` is the id of one."""
    new = {"execution_id": identity, "partition_key": f"n % {PARTITIONS}"}
    tables: dict[str, dict[str, str]] = {}
    for table, column in columns:
        moves = column.endswith(("_at_ms", "_until_ms"))
        kept = f"t.{column} - ({count} - n)" if moves else f"t.{column}"
        tables.setdefault(table, {})[column] = new.get(column, kept)
    return [
        f"insert into {table} ({', '.join(values)}) select {', '.join(values.values())}"
        f" from {table} as t cross join {series} where t.execution_id = '{uuid}'"
        for table, values in tables.items()
    ]
