"""Our statements on a caller's SQLite connection, inside its transaction.

No hint is needed: other connections to the file notice the commit.
"""

import os
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.store.caller_connections import CLOSED, ONLY_READS, unknown
from flowfabric.store.sqlite.connection import MEMORY, only_reads, why_not

_NO_TRANSACTION: Final = "has no open transaction to take part in; begin one first"
_UNTRUSTING: Final = (
    "has `trusted_schema` off, with which this SQLite does not let our tables check what they are"
    " given; leave it on"
)

T = TypeVar("T")


async def on_its_thread(connection: object, work: Callable[[sqlite3.Connection], T]) -> T:
    """Run something on the thread of an aiosqlite connection."""
    # It offers no other way to run more than one statement of ours.
    run: Callable[[Callable[[], T]], Awaitable[T]] | None = getattr(connection, "_execute", None)
    try:
        own: object = getattr(connection, "_conn", None)
    except ValueError:
        own = None
    if own is None and run is not None:
        raise InvalidInput("connection", CLOSED)
    if run is None or not isinstance(own, sqlite3.Connection):
        raise unknown(connection)
    return await run(partial(work, own))


@contextmanager
def joined(connection: object, path: str, tables: Collection[str]) -> Iterator[sqlite3.Connection]:
    """The connection, checked to be on the file at `path` and to see our `tables` there, while we
    use it."""
    if not isinstance(connection, sqlite3.Connection):
        raise unknown(connection)
    with _plain(connection), _trusting():
        _check_same_file(connection, path)
        if connection.isolation_level is None and not connection.in_transaction:
            raise InvalidInput("connection", _NO_TRANSACTION)
        _check_not_hidden(connection, tables)
        with _whole(connection):
            _be_the_writer(connection, path)
            yield connection


@contextmanager
def _plain(connection: sqlite3.Connection) -> Iterator[None]:
    """Have rows and texts returned as they are, whatever the program would have."""
    row_factory, text_factory = connection.row_factory, connection.text_factory
    connection.row_factory, connection.text_factory = None, str
    try:
        yield
    finally:
        connection.row_factory, connection.text_factory = row_factory, text_factory


def _be_the_writer(connection: sqlite3.Connection, path: str) -> None:
    """Wait for our turn to write before reading anything.

    A transaction that reads first and then writes is refused without waiting if another process
    wrote in between. A plain `begin` takes its turn with the first statement that can write.
    """
    try:
        connection.execute("update deployment set created_at_ms = created_at_ms where false")
    except sqlite3.OperationalError as error:
        if only_reads(error) and why_not(Path(path).absolute()) is None:
            raise InvalidInput("connection", ONLY_READS) from error
        raise


def _check_not_hidden(connection: sqlite3.Connection, tables: Collection[str]) -> None:
    """Statements find temporary tables first, and there is no order in which to look otherwise."""
    temporary = connection.execute("select lower(name) from temp.sqlite_master order by name")
    if hidden := [repr(name) for (name,) in temporary if name in tables]:
        raise InvalidInput(
            "connection",
            f"has a temporary {hidden[0]}, which hides a table of the app; give it another name",
        )


@contextmanager
def _trusting() -> Iterator[None]:
    """Say what a connection may not do with our tables, and what takes that from it."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if "unsafe use of" in str(error):
            raise InvalidInput("connection", f"{_UNTRUSTING} ({error})") from error
        raise


@contextmanager
def _whole(connection: sqlite3.Connection) -> Iterator[None]:
    """Leave nothing in their transaction of what is refused half-way."""
    nested = connection.in_transaction
    if nested:
        connection.execute("savepoint flowfabric")
    try:
        yield
    except (FlowFabricError, sqlite3.Error):
        if nested and connection.in_transaction:
            connection.execute("rollback to savepoint flowfabric")
            connection.execute("release savepoint flowfabric")
        elif not nested:
            # It began with what we wrote.
            connection.rollback()
        raise
    if nested:
        connection.execute("release savepoint flowfabric")


def _refused(error: sqlite3.ProgrammingError) -> InvalidInput:
    """What `sqlite3` lets nobody do: use a closed connection, or one of another thread."""
    closed = "closed" in str(error)
    return InvalidInput("connection", CLOSED if closed else f"cannot be used: {error}")


def _check_same_file(connection: sqlite3.Connection, path: str) -> None:
    if path == MEMORY:
        raise InvalidInput("connection", "a database in memory cannot be shared; use a file")
    try:
        listed = connection.execute("pragma database_list").fetchall()
    except sqlite3.ProgrammingError as error:
        raise _refused(error) from error
    files = [row[2] for row in listed if row[1] == "main"]
    if not files or not files[0] or not os.path.samefile(files[0], path):
        raise InvalidInput("connection", f"is not on the file {path}")
