"""SQLite as the store: a writer thread, reader threads, hints by watching the file.

One Store object belongs to the event loop that opened it. Any number of Store
objects, in any number of processes on one machine, may share a file. `:memory:`
is private to its Store object and disappears with it.
"""

import asyncio
import atexit
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from flowfabric.core.events import LogEnd
from flowfabric.core.handles import SQLITE_TAG
from flowfabric.errors import Bug, FlowFabricError, Unavailable
from flowfabric.outages import OutageWatch
from flowfabric.store import base, mapping
from flowfabric.store.caller_connections import comes_from, unwrap, unwrap_sync
from flowfabric.store.hints import HintingStore, topics_in
from flowfabric.store.migrate import AppliedMigration, Migration, check, created, load, pending
from flowfabric.store.sqlite.caller_connections import joined, on_its_thread
from flowfabric.store.sqlite.connection import (
    BUSY_TIMEOUT_MS,
    MEMORY,
    FileConnection,
    FileIdentity,
    MachineClock,
    Synchronous,
    connect,
    data_version,
    translate,
    translate_opening,
)
from flowfabric.store.sqlite.transaction import SqliteReader, SqliteTransaction
from flowfabric.store.sqlite.watcher import watch
from flowfabric.store.sqlite.writer import Committer, Writer

# Bringing an SQLite schema up to date, by one process at a time -------------

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


_MODEL_IN_USE: Final = threading.Lock()
_RENEW: Final = """
update deployment
   set handle_key = randomblob(32),
       created_at_ms = cast((julianday('now') - 2440587.5) * 86400000 as integer)
"""


def fill_memory(connection: sqlite3.Connection) -> list[str]:
    """Give a new database in memory the schema; return the names of its migrations.

    All such databases of a process begin as copies of one: its pages are copied in a tenth of
    the time that the statements take.
    """
    with _MODEL_IN_USE:
        _model().backup(connection)
    # What is issued by one of them is not of the others.
    connection.execute(_RENEW)
    return [migration.name for migration in load(MIGRATIONS)]


@cache
def _model() -> sqlite3.Connection:
    model = sqlite3.connect(MEMORY, isolation_level=None, check_same_thread=False)
    atexit.register(model.close)
    apply_pending(model)
    return model


def check_schema(connection: sqlite3.Connection) -> None:
    """Refuse a file that does not have our schema, or another version of it. Changes nothing."""
    applied = read_ledger(connection) if _has_ledger(connection) else []
    check(load(MIGRATIONS), applied)


def _has_ledger(connection: sqlite3.Connection) -> bool:
    known = "select 1 from sqlite_master where type = 'table' and name = 'schema_migration'"
    return connection.execute(known).fetchone() is not None


def _up_to_date(connection: sqlite3.Connection) -> bool:
    """Whether there is nothing to apply: then opening the file needs no lock on it.

    A caller may open it for the first time while its own transaction holds the lock.
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


T = TypeVar("T")

READERS: Final = 4


class SqliteStore(HintingStore):
    """A store on one SQLite file, or in memory."""

    label = "sqlite"
    writes_beside = False
    backend_tag = SQLITE_TAG

    def __init__(
        self,
        path: str,
        *,
        clock: base.Clock | None = None,
        synchronous: Synchronous = "full",
        busy_timeout_ms: int = BUSY_TIMEOUT_MS,
        set_up: bool = True,
    ) -> None:
        """`synchronous="normal"` may lose the latest commits when the power fails.

        Without `set_up`, opening neither creates nor migrates the file.
        """
        super().__init__()
        self._path = path
        self._named = f"the database in {path}"
        self._clock = clock or MachineClock()
        self._synchronous: Synchronous = synchronous
        self._busy_timeout_ms = busy_timeout_ms
        self._set_up = set_up
        self._identity = FileIdentity(MEMORY)
        self._writer: Writer | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._idle: queue.SimpleQueue[FileConnection] = queue.SimpleQueue()

    async def open(self) -> None:
        """Open the file, create or migrate it, and start the threads."""
        if self._writer is not None:
            return
        loop = asyncio.get_running_loop()
        with OutageWatch(self._named, wrote=False):
            connection, seen = await loop.run_in_executor(None, self._connect_watched)
        in_file = self._path != MEMORY
        if in_file:
            mapping.prepare_structs()
        self._identity = FileIdentity(self._path)
        committer = Committer(connection, self._clock, self._identity, on_disk=in_file)
        self._writer = Writer(
            committer, loop, self._board.publish, named=self._named, threaded=in_file
        )
        if in_file:
            self._readers = ThreadPoolExecutor(READERS, "flowfabric-sqlite-read")
            watching = watch(self._board, self._writer, self._path, seen=seen)
            self._watcher = asyncio.create_task(watching)

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await loop.run_in_executor(None, writer.close)
        if self._readers is not None:
            readers, self._readers = self._readers, None
            await loop.run_in_executor(None, readers.shutdown)
            while not self._idle.empty():
                self._idle.get().close()

    async def migrate(self) -> Sequence[str]:
        """Nothing to do on an open store: opening it migrates it."""
        if self._writer is not None:
            return []
        with OutageWatch(self._named, wrote=False):
            loop = asyncio.get_running_loop()
            connection, names = await loop.run_in_executor(None, self._migrate)
        connection.close()
        return names

    async def ping(self) -> None:
        async def nothing(reader: base.Reader) -> None:
            await reader.now_ms()

        await self.read(nothing)

    async def transact(self, body: base.Body[T], *, lock_wait_ms: int | None = None) -> T:
        return await self._open_writer().transact(body)

    def transact_apart(self, body: base.Body[T]) -> T:
        raise Bug("writers of an SQLite file take turns")

    async def try_unlocked(self, body: base.UnlockedBody[T]) -> T | None:
        """Nothing can interfere: there is one writer at a time."""

        async def unless_refused(transaction: SqliteTransaction) -> T | None:
            try:
                return await body(transaction)
            except FlowFabricError:
                return None

        try:
            return await self._open_writer().transact(unless_refused)
        except base.UniqueViolation:
            return None

    async def transact_on(
        self, connection: object, body: base.Body[T], *, lock_wait_ms: int | None = None
    ) -> T:
        theirs = await unwrap(connection)
        if comes_from(theirs, "aiosqlite"):
            # Its connection may be used on a thread of its own only.
            return await on_its_thread(theirs, lambda own: self.transact_on_sync(own, body))
        return self.transact_on_sync(theirs, body)

    def transact_on_sync(
        self, connection: object, body: base.Body[T], *, lock_wait_ms: int | None = None
    ) -> T:
        self._identity.check()
        try:
            with joined(unwrap_sync(connection), self._path, created(load(MIGRATIONS))) as theirs:
                return base.drive(body(SqliteTransaction(theirs, self._clock)))
        except sqlite3.Error as error:
            raise translate(error) from error

    async def read(self, body: base.ReadBody[T]) -> T:
        if self._readers is None:
            return await self.transact(body)
        with OutageWatch(self._named, wrote=False):
            return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, body)

    async def execute_alone(
        self, name: str, topics: Collection[str] = (), /, **parameters: base.Parameter
    ) -> Sequence[base.Row]:
        async def body(transaction: SqliteTransaction) -> Sequence[base.Row]:
            rows = transaction.fetch(name, parameters)
            for topic in (*topics, *topics_in(rows)) if rows else ():
                transaction.hint(topic)
            return rows

        return await self._open_writer().transact(body)

    async def execute_and_read(
        self,
        name: str,
        read: Callable[[Sequence[base.Row]], T],
        /,
        **parameters: base.Parameter,
    ) -> T:
        if self._path == MEMORY:
            return read(await self.execute_alone(name, **parameters))

        async def body(transaction: SqliteTransaction) -> Sequence[base.Row]:
            return transaction.fetch(name, parameters)

        return await self._open_writer().transact_and_read(body, read)

    async def read_events(
        self, *, after: int, limit: int, category: str | None = None, wait_s: float = 0.0
    ) -> base.EventPage:
        """Writers take turns, so ids become visible in order and there is never one to wait for."""

        async def body(reader: base.Reader) -> base.EventPage:
            (window,) = await reader.select_as(
                mapping.EventWindow, "event_window", after=after, window=mapping.WINDOW
            )
            rows = await reader.select(
                "read_events", after=after, through=window.last, category=category, limit=limit
            )
            return mapping.page(rows, through=window.last, limit=limit)

        assert 0 < limit <= mapping.EVENTS_MAX, f"a page has 1 to {mapping.EVENTS_MAX} events"
        return await self.read(body)

    async def end_of_events(self) -> LogEnd:
        async def body(reader: base.Reader) -> LogEnd:
            return mapping.log_end(await reader.select("event_end"))

        return await self.read(body)

    def hint(self, topic: str) -> None:
        self._board.publish({topic})

    # Inside ---------------------------------------------------------------

    def _open_writer(self) -> Writer:
        if self._writer is None:
            raise Unavailable("store", "it is not open")
        return self._writer

    def _connect(self, check: Callable[[sqlite3.Connection], None] | None = None) -> FileConnection:
        return connect(
            self._path, self._synchronous, busy_timeout_ms=self._busy_timeout_ms, check=check
        )

    def _connect_watched(self) -> tuple[FileConnection, int]:
        """Listeners hear of everything that is committed once we are open."""
        with self._opening():
            creates = self._set_up or self._path == MEMORY
            connection = self._migrate()[0] if creates else self._connect(check_schema)
            try:
                return connection, data_version(connection)
            except sqlite3.Error:
                connection.close()
                raise

    def _migrate(self) -> tuple[FileConnection, Sequence[str]]:
        with self._opening():
            connection = self._connect()
            try:
                fill = fill_memory if self._path == MEMORY else apply_pending
                return connection, fill(connection)
            except BaseException:
                connection.close()
                raise

    @contextmanager
    def _opening(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise translate_opening(error, self._path) from error

    def _read(self, body: base.ReadBody[T]) -> T:
        """Run `body` on a reader's thread, in one snapshot."""
        self._identity.check()
        connection = self._reader()
        try:
            connection.execute("begin")
            return base.drive(body(SqliteReader(connection, self._clock)))
        except sqlite3.Error as error:
            raise translate(error) from error
        finally:
            if connection.in_transaction:
                connection.execute("rollback")
            self._idle.put(connection)

    def _check_opened(self, connection: sqlite3.Connection) -> None:
        """Another file may have taken the place of ours just before."""
        self._identity.check()

    def _reader(self) -> FileConnection:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            pass
        try:
            connection = self._connect(self._check_opened)
            connection.execute("pragma query_only = on")
        except sqlite3.Error as error:
            # It may have been deleted since the last look.
            self._identity.check()
            raise translate_opening(error, self._path) from error
        return connection
