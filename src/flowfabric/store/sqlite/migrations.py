"""Bringing an SQLite schema up to date, by one process at a time."""

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from flowfabric.store.migrate import AppliedMigration, Migration, check, load, pending

MIGRATIONS: Final = Path(__file__).parent / "migrations"

_LEDGER: Final = """
create table if not exists schema_migration (
    version              integer primary key,
    name                 text not null,
    checksum             text not null,
    backward_compatible  integer not null,
    applied_at_ms        integer not null
) strict
"""


def apply_pending(connection: sqlite3.Connection) -> list[str]:
    """Apply what is missing, all or nothing, and check the result; return the names."""
    if _up_to_date(connection):
        return []
    connection.execute("begin exclusive")
    try:
        connection.execute(_LEDGER)
        migrations = pending(load(MIGRATIONS), read_ledger(connection))
        for migration in migrations:
            _apply(connection, migration)
        check(load(MIGRATIONS), read_ledger(connection))
    except BaseException:
        connection.execute("rollback")
        raise
    connection.execute("commit")
    return [migration.name for migration in migrations]


def check_schema(connection: sqlite3.Connection) -> None:
    """Refuse a file that does not have our schema, or another version of it. Changes nothing."""
    applied = read_ledger(connection) if _has_ledger(connection) else []
    check(load(MIGRATIONS), applied)


def _has_ledger(connection: sqlite3.Connection) -> bool:
    known = "select 1 from sqlite_master where type = 'table' and name = 'schema_migration'"
    return connection.execute(known).fetchone() is not None


def _up_to_date(connection: sqlite3.Connection) -> bool:
    """Whether there is nothing to apply: then opening the file needs no lock on it.

    Somebody may open it for the first time while their own transaction holds the lock.
    """
    if not _has_ledger(connection):
        return False
    applied = read_ledger(connection)
    if pending(load(MIGRATIONS), applied):
        return False
    check(load(MIGRATIONS), applied)
    return True


def read_ledger(connection: sqlite3.Connection) -> list[AppliedMigration]:
    rows = connection.execute(
        "select version, name, checksum, backward_compatible from schema_migration order by version"
    )
    return [
        AppliedMigration(version, name, checksum, bool(compatible))
        for version, name, checksum, compatible in rows
    ]


def _apply(connection: sqlite3.Connection, migration: Migration) -> None:
    for statement in _statements(migration.text):
        connection.execute(statement)
    connection.execute(
        "insert into schema_migration values (?, ?, ?, ?, ?)",
        (
            migration.version,
            migration.name,
            migration.checksum,
            migration.backward_compatible,
            time.time_ns() // 1_000_000,
        ),
    )


def _statements(text: str) -> Iterator[str]:
    """The statements of a script. `executescript` would commit the transaction around it."""
    statement = ""
    for line in text.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    assert not statement.strip(), f"a statement without end: {statement!r}"
