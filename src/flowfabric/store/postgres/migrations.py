"""Bringing a Postgres schema up to date, by one process at a time."""

from pathlib import Path
from typing import Final

from flowfabric.errors import Unavailable
from flowfabric.store.migrate import AppliedMigration, Migration, load, pending
from flowfabric.store.postgres.driver import Connection, Usable
from flowfabric.store.postgres.statements import CLOCK_MS, SCHEMA

ENCODING: Final = "UTF8"
MIGRATIONS: Final = Path(__file__).parent / "migrations"

LOCK_KEY: Final = 0x666C6F77666162
"""`flowfab` in ASCII: the advisory lock migrations are applied under."""

_LEDGER_EXISTS: Final = (
    f"select to_regclass('{SCHEMA}.schema_migration') is not null,"
    " current_setting('server_encoding')"
)
_APPLIED: Final = (
    "select version, name, checksum, backward_compatible"
    f" from {SCHEMA}.schema_migration order by version"
)
_TIMEOUT_S: Final = 3_600
"""How long a migration may take, and the wait for that of another process."""
_LOCK: Final = f"set local lock_timeout = 0; select pg_advisory_xact_lock({LOCK_KEY})"
_LEDGER: Final = f"""
create schema if not exists {SCHEMA};
set local search_path = {SCHEMA}, public;
create table if not exists schema_migration (
    version              integer primary key,
    name                 text not null,
    checksum             text not null,
    backward_compatible  boolean not null,
    applied_at_ms        bigint not null
)
"""


async def read_ledger(connection: Usable) -> list[AppliedMigration]:
    """What was applied, oldest first; nothing, if the schema does not exist.

    Refuses a database that cannot hold every text: it would take a failure's reason today and
    break on another tomorrow.
    """
    ((exists, encoding),) = await connection.fetch(_LEDGER_EXISTS)
    if encoding != ENCODING:
        raise Unavailable(
            "postgres",
            f"the encoding of the database is {encoding}, and must be {ENCODING}, which holds any"
            " text; make another: create database … encoding 'UTF8' template template0",
        )
    if not exists:
        return []
    rows = await connection.fetch(_APPLIED)
    return [
        AppliedMigration(int(str(row[0])), str(row[1]), str(row[2]), row[3] is True) for row in rows
    ]


async def apply_pending(connection: Connection) -> list[str]:
    """Apply what is missing, all or nothing; return the names."""
    await connection.execute("begin")
    try:
        await connection.execute(_LOCK, timeout=_TIMEOUT_S)
        await connection.execute(_LEDGER)
        migrations = pending(load(MIGRATIONS), await read_ledger(connection))
        for migration in migrations:
            await _apply(connection, migration)
    except BaseException:
        await connection.execute("rollback")
        raise
    await connection.execute("commit")
    return [migration.name for migration in migrations]


async def _apply(connection: Connection, migration: Migration) -> None:
    await connection.execute(migration.text, timeout=_TIMEOUT_S)
    await connection.execute(
        f"insert into {SCHEMA}.schema_migration values ($1, $2, $3, $4, {CLOCK_MS})",
        migration.version,
        migration.name,
        migration.checksum,
        migration.backward_compatible,
    )
