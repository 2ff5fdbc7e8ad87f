"""A schema is created, kept up to date, and refused when it does not fit."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest

from flowfabric import connect
from flowfabric.errors import FlowFabricError, SchemaTooNew, SchemaTooOld, Unavailable
from flowfabric.store.migrate import AppliedMigration, Migration, check, load, pending
from flowfabric.store.postgres import pool
from flowfabric.store.postgres.store import LOCK_KEY, PostgresStore
from flowfabric.store.sqlite.store import SqliteStore, fill_memory
from tests.store.records import change_postgres, change_sqlite

STORE = Path(__file__).parents[2] / "src/flowfabric/store"
HAS_WAITED_LONG = """
select 1 from pg_stat_activity
 where datname = current_database() and wait_event = 'advisory'
   and query_start < clock_timestamp() - interval '200 milliseconds'
"""
SCHEMA_OF_SQLITE = "select type, name, sql from sqlite_master order by type, name"
NAMES = [migration.name for migration in load(STORE / "postgres/migrations")]
LAST = len(NAMES)


def a_migration(version: int, checksum: str = "same") -> Migration:
    return Migration(version, f"{version:04}_it", checksum, backward_compatible=False, text="")


def applied(version: int, *, compatible: bool = False) -> AppliedMigration:
    return AppliedMigration(version, f"{version:04}_it", "same", compatible)


KNOWN = [a_migration(1), a_migration(2)]


def test_what_is_missing_is_pending() -> None:
    assert pending(KNOWN, []) == KNOWN
    assert pending(KNOWN, [applied(1)]) == [a_migration(2)]
    assert pending(KNOWN, [applied(1), applied(2)]) == []


@pytest.mark.parametrize(
    ("ledger", "error"),
    [
        pytest.param([], SchemaTooOld, id="an empty database"),
        pytest.param([applied(1)], SchemaTooOld, id="an older one"),
        pytest.param([applied(1), applied(2), applied(3)], SchemaTooNew, id="a newer one"),
        pytest.param(
            [applied(1), applied(2), applied(3, compatible=True), applied(4)],
            SchemaTooNew,
            id="a newer one of which one step is incompatible",
        ),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(
    ledger: list[AppliedMigration], error: type[FlowFabricError]
) -> None:
    with pytest.raises(error):
        check(KNOWN, ledger)


def test_a_schema_that_fits_is_accepted() -> None:
    check(KNOWN, [applied(1), applied(2)])
    check(KNOWN, [applied(1), applied(2), applied(3, compatible=True)])


def test_a_changed_file_is_refused() -> None:
    with pytest.raises(Unavailable, match="0002_it was changed"):
        check([a_migration(1), a_migration(2, "other")], [applied(1), applied(2)])


def test_both_dialects_agree_on_names_and_compatibility() -> None:
    postgres, sqlite = (
        [(m.version, m.name, m.backward_compatible) for m in load(STORE / dialect / "migrations")]
        for dialect in ("postgres", "sqlite")
    )
    assert postgres == sqlite


# Postgres -------------------------------------------------------------------


async def test_postgres_is_migrated_once(empty_postgres_database: str) -> None:
    store = PostgresStore(empty_postgres_database)
    assert await store.migrate() == NAMES
    assert await store.migrate() == []
    await store.open()
    await store.close()


async def test_processes_that_migrate_postgres_at_once_take_turns(
    empty_postgres_database: str,
) -> None:
    stores = [PostgresStore(empty_postgres_database) for _ in range(4)]
    applied_by = await asyncio.gather(*(store.migrate() for store in stores))
    assert sorted(applied_by, key=len) == [[], [], [], NAMES]


async def test_a_process_that_migrates_waits_longer_than_for_other_locks(
    empty_postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pool._SETTINGS, "lock_timeout", "50ms")
    another = await asyncpg.connect(empty_postgres_database)
    await another.execute(f"select pg_advisory_lock({LOCK_KEY})")
    migrating = asyncio.create_task(PostgresStore(empty_postgres_database).migrate())
    while not await another.fetch(HAS_WAITED_LONG) and not migrating.done():
        pass
    await another.close()
    assert await migrating == NAMES


async def test_an_empty_postgres_database_is_too_old(empty_postgres_database: str) -> None:
    with pytest.raises(SchemaTooOld, match="run: flowfabric migrate --app"):
        await PostgresStore(empty_postgres_database).open()


async def test_whoever_connects_too_early_is_told_the_command(empty_postgres_database: str) -> None:
    scheme, _, place = empty_postgres_database.partition("://")
    login, _, server = place.rpartition("@")
    user = login.partition(":")[0] or "postgres"
    with pytest.raises(SchemaTooOld) as refused:
        await connect(f"{scheme}://{user}:hunter2@{server}")
    assert str(refused.value).endswith(
        "; run: flowfabric migrate --app module:app"
        " (or set FLOWFABRIC_URL, and run: flowfabric migrate)"
    )
    more = "&" if "?" in server else "?"
    url = f"{scheme}://{user}@{server}{more}application_name=shop"
    with pytest.raises(SchemaTooOld) as refused:
        await connect(url)
    assert str(refused.value).endswith(f"; run: flowfabric migrate --url '{url}'")


async def test_a_newer_postgres_schema_is_accepted_if_compatible(postgres_database: str) -> None:
    newer = "insert into flowfabric.schema_migration values ({}, 'x', 'x', {}, 0)"
    await change_postgres(postgres_database, newer.format(LAST + 1, "true"))
    store = PostgresStore(postgres_database)
    await store.open()
    await store.close()
    await change_postgres(postgres_database, newer.format(LAST + 2, "false"))
    with pytest.raises(SchemaTooNew, match="upgrade the flowfabric package"):
        await PostgresStore(postgres_database).open()


async def test_a_changed_migration_is_refused_on_postgres(postgres_database: str) -> None:
    await change_postgres(
        postgres_database, "update flowfabric.schema_migration set checksum = 'x'"
    )
    with pytest.raises(Unavailable, match="was changed after it had been applied"):
        await PostgresStore(postgres_database).open()
    with pytest.raises(Unavailable, match="was changed after it had been applied"):
        await PostgresStore(postgres_database).migrate()


async def test_nothing_of_ours_is_outside_our_schema(empty_postgres_database: str) -> None:
    await PostgresStore(empty_postgres_database).migrate()
    rows = await change_postgres(
        empty_postgres_database,
        "select schemaname, tablename from pg_tables"
        " where schemaname not in ('pg_catalog', 'information_schema', 'flowfabric')",
    )
    assert rows == []


# SQLite ---------------------------------------------------------------------


async def test_sqlite_is_migrated_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    store = SqliteStore(str(path))
    await store.open()
    assert await store.migrate() == []
    await store.close()
    assert change_sqlite(path, "select name from schema_migration") == [(name,) for name in NAMES]
    assert await SqliteStore(str(path)).migrate() == []


async def test_sqlite_can_be_migrated_without_opening_it(tmp_path: Path) -> None:
    assert await SqliteStore(str(tmp_path / "a.db")).migrate() == NAMES


async def test_a_database_in_memory_has_what_a_file_has_and_shares_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    assert await SqliteStore(":memory:").migrate() == await SqliteStore(path).migrate()
    with closing(sqlite3.connect(path)) as file:
        expected = file.execute(SCHEMA_OF_SQLITE).fetchall()

    keys: set[tuple[bytes]] = set()
    for _ in range(2):
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as memory:
            fill_memory(memory)
            assert memory.execute(SCHEMA_OF_SQLITE).fetchall() == expected
            keys.update(memory.execute("select handle_key from deployment"))
            memory.execute("drop table event")
    assert len(keys) == 2


async def test_stores_that_create_one_file_at_once_take_turns(tmp_path: Path) -> None:
    stores = [SqliteStore(str(tmp_path / "a.db")) for _ in range(4)]
    await asyncio.gather(*(store.open() for store in stores))
    keys = [await store.execute_alone("get_deployment") for store in stores]
    assert all(key == keys[0] for key in keys)
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_newer_sqlite_schema_is_accepted_if_compatible(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await SqliteStore(str(path)).migrate()
    newer = "insert into schema_migration values ({}, 'x', 'x', {}, 0)"
    change_sqlite(path, newer.format(LAST + 1, 1))
    store = SqliteStore(str(path))
    await store.open()
    await store.close()
    change_sqlite(path, newer.format(LAST + 2, 0))
    with pytest.raises(SchemaTooNew):
        await SqliteStore(str(path)).open()


async def test_a_changed_migration_is_refused_on_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await SqliteStore(str(path)).migrate()
    change_sqlite(path, "update schema_migration set checksum = 'x'")
    with pytest.raises(Unavailable, match="was changed after it had been applied"):
        await SqliteStore(str(path)).open()
