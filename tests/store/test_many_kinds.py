"""What a claim costs follows what the worker serves, not how many kinds there are."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from flowfabric import connect
from flowfabric.core.creation import NewExecution
from flowfabric.store.sqlite.connection import connect as connect_sqlite
from tests.store.grown import claim
from tests.store.test_plans import as_the_store_does, explain, steps_of

OTHERS = 30_000
MORE_MAX = 1.2

OTHERS_IN_POSTGRES = f"""
insert into route (namespace, lane_id, execution_kind, needs_hash, created_at_ms,
                   retain_until_ms)
select 'default', 'main', 'other-' || n, '', 1, 1 from generate_series(1, {OTHERS}) as n
"""
OTHERS_IN_SQLITE = f"""
with recursive number (n) as (select 1 union all select n + 1 from number where n < {OTHERS})
insert into route (namespace, lane_id, execution_kind, created_at_ms, retain_until_ms)
select 'default', 'main', 'other-' || n, 1, 1 from number
"""


async def submit(url: str) -> None:
    async with await connect(url) as engine:
        await engine.create_executions(
            [NewExecution(execution_kind="mail", lane_id="main") for _ in range(20)]
        )


async def test_many_kinds_cost_a_postgres_worker_of_one_nothing(postgres_database: str) -> None:
    await submit(postgres_database)
    connection = await as_the_store_does(postgres_database)
    try:
        for _ in range(3):
            few = await explain(connection, claim("main", 1))
        await connection.execute(OTHERS_IN_POSTGRES)
        for _ in range(3):
            unanalyzed = await explain(connection, claim("main", 1))
        await connection.execute("analyze route")
        for _ in range(3):
            many = await explain(connection, claim("main", 1))
    finally:
        await connection.close()

    assert (few.actual_rows, unanalyzed.actual_rows, many.actual_rows) == (1, 1, 1)
    assert max(unanalyzed.pages, many.pages) <= MORE_MAX * few.pages
    assert max(unanalyzed.examined, many.examined) <= MORE_MAX * few.examined


async def test_many_kinds_cost_a_sqlite_worker_of_one_nothing(
    tmp_path: Path, exercised_store: Callable[[str], None]
) -> None:
    exercised_store("sqlite file")
    path = tmp_path / "a.db"
    await submit(f"sqlite:///{path}")
    with closing(connect_sqlite(str(path), "off")) as connection:
        few = steps_of(connection, claim("main", 10))
        add_others(connection)
        many = steps_of(connection, claim("main", 10))

    # Steps are counted in hundreds, and the last of them may belong to the next.
    assert many <= MORE_MAX * few + 200


def add_others(connection: sqlite3.Connection) -> None:
    connection.execute(OTHERS_IN_SQLITE)
