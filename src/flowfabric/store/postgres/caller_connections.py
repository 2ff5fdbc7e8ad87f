"""Our statements on a caller's Postgres connection, inside its transaction."""

import importlib
import re
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Generic, Protocol, Self, TypeVar

from msgspec import Struct

from flowfabric import errors
from flowfabric.outages import patience_s
from flowfabric.store.base import Value
from flowfabric.store.caller_connections import CLOSED, ONLY_READS, comes_from, unknown
from flowfabric.store.postgres import driver
from flowfabric.store.postgres.hints import hint_payloads
from flowfabric.store.postgres.pool import COMMAND_TIMEOUT_S, SEARCH_PATH
from flowfabric.store.postgres.statements import CHANNEL, SCHEMA

_NUMBERED: Final = re.compile(r"\$(\d+)")
_OURS: Final = """
select current_database() as name,
       (select oid from pg_database where datname = current_database())::text as oid,
       has_function_privilege('public', 'pg_control_system()', 'execute') as tells
"""
_SYSTEM: Final = "(select system_identifier from pg_control_system())::text"
# In the statement that is needed anyway.
_FOUND: Final = """
select current_setting('search_path') as search_path,
       current_setting('lock_timeout') as lock_timeout,
       current_setting('transaction_read_only') as read_only,
       pg_is_in_recovery() as standby,
       current_database() as name,
       (select oid from pg_database where datname = current_database())::text as oid,
       {system} as system
"""
_WHO_SAID_READ_ONLY: Final = """
select source from pg_settings where name = 'default_transaction_read_only' and setting = 'on'
"""
_THE_SERVER: Final = frozenset({"configuration file", "command line", "override", "database"})
"""Whoever makes a whole database read-only there makes it read-only for everybody."""
# Until the transaction ends the server probes for its client: one that vanished behind a
# network that swallows packets must not keep what it has locked.
_ENTER: Final = """
select set_config('search_path', $1, true),
       set_config('lock_timeout', $2, true),
       set_config('tcp_keepalives_idle', '3', true),
       set_config('tcp_keepalives_interval', '1', true),
       set_config('tcp_keepalives_count', '3', true)
"""
_LEAVE: Final = "select set_config('search_path', $1, true), set_config('lock_timeout', $2, true)"
# Unless it is named, temporary tables come first.
_THEIR_PATH: Final = f"{SEARCH_PATH}, pg_temp"
_NO_TRANSACTION: Final = "has no open transaction to take part in; begin one first"
_FAILED: Final = (
    "is in a transaction in which a statement has failed; roll it back and begin another one"
)
_PIPELINE: Final = (
    "is in pipeline mode, in which answers come later than they are needed; leave"
    " `connection.pipeline()` first"
)
_BYTES: Final = "returns bytes for text, as client_encoding SQL_ASCII has it; set that to UTF8"
_ENCODING: Final = "cannot hold all that has to be written in its client_encoding; set that to UTF8"
_COLLIDED: Final = "your transaction collided with another one: roll it back and run it again"
_MAY_NOT: Final = (
    "belongs to a role that may not use the tables of the app; grant it what it lacks in the"
    f" schema {SCHEMA}"
)
_LOST: Final = "the connection was lost; make another one"
_PSYCOPG2_CLOSED: Final = 1
"""Any other value but zero: it was lost."""
_ABORTED: Final = "25P02"
_FORBIDDEN: Final = frozenset({"42501", "42P01"})
"""Tables of a schema that a role may not use do not exist for it."""


class Database(Struct, frozen=True):
    """Which database a connection leads to, whatever its address is called."""

    name: str
    oid: str
    system: str | None
    """The server, with its standbys; None if not everybody may ask for it."""

    def check_same(self, theirs: "Database") -> None:
        """Raise unless the caller's connection leads here too."""
        if theirs == self:
            return
        where = repr(theirs.name)
        if theirs.name == self.name:
            where += " on another server" if theirs.system != self.system else ", made again since"
        raise errors.InvalidInput(
            "connection",
            f"leads to another database, {where}; pass one that leads to {self.name!r}, the"
            " database of the app",
        )


async def read_database(connection: driver.Fetching) -> Database:
    """The database of a connection of ours."""
    (row,) = await connection.fetch(_OURS)
    system = None
    if row["tells"]:
        ((found,),) = await connection.fetch(f"select {_SYSTEM}")
        system = str(found)
    return Database(name=str(row["name"]), oid=str(row["oid"]), system=system)


class Settings(Struct, frozen=True):
    """What their transaction had set, and finds again."""

    search_path: str
    lock_timeout: str
    database: Database


class _Speaking(Protocol):
    """What speaks the protocol for a connection of asyncpg."""

    def is_connected(self) -> bool: ...

    def is_in_transaction(self) -> bool: ...


class _Endable(driver.Fetching, Protocol):
    """A connection of asyncpg, which can be ended without an answer."""

    def is_closed(self) -> bool: ...

    def is_in_transaction(self) -> bool: ...

    def terminate(self) -> None: ...


class AsyncpgConnection:
    """An asyncpg connection, and what it is asked once its owner may have closed it."""

    def __init__(self, connection: _Endable, speaking: _Speaking | None) -> None:
        self._connection = connection
        # A terminated connection no longer knows it, and so cannot say what it was doing.
        self._speaking = speaking

    @property
    def is_lost(self) -> bool:
        """Whether it ended inside a transaction."""
        speaking = self._speaking
        return speaking is not None and not speaking.is_connected() and speaking.is_in_transaction()

    def terminate(self) -> None:
        self._connection.terminate()

    async def fetch(
        self, query: str, *args: object, timeout: float | None = None
    ) -> Sequence[driver.DriverRow]:
        return await self._connection.fetch(query, *args, timeout=timeout)


class ForeignRow:
    """A psycopg row as the driver we know would give it: uuids as text."""

    def __init__(self, names: Sequence[str], values: Iterable[Value | uuid.UUID]) -> None:
        self._values: dict[str, Value] = {
            name: str(value) if isinstance(value, uuid.UUID) else value
            for name, value in zip(names, values, strict=True)
        }
        self._in_order = tuple(self._values.values())

    def __getitem__(self, column: int | str, /) -> object:
        return self._in_order[column] if isinstance(column, int) else self._values[column]

    def __iter__(self) -> Iterator[Value]:
        return iter(self._in_order)

    def keys(self) -> Iterable[str]:
        return self._values.keys()

    def items(self) -> Iterable[tuple[str, Value]]:
        return self._values.items()


class _Column(Protocol):
    @property
    def name(self) -> str: ...


class _Broken(Protocol):
    @property
    def broken(self) -> bool: ...


class _Closed(Protocol):
    @property
    def closed(self) -> int: ...


class _Cursor(Protocol):
    @property
    def description(self) -> Sequence[_Column] | None: ...

    def execute(self, query: str, params: Sequence[object] | dict[str, object]) -> object: ...

    def fetchall(self) -> Iterable[Iterable[Value | uuid.UUID]]: ...


class _AsyncCursor(Protocol):
    @property
    def description(self) -> Sequence[_Column] | None: ...

    async def execute(self, query: str, params: Sequence[object]) -> object: ...

    async def fetchall(self) -> Iterable[Iterable[Value | uuid.UUID]]: ...


C = TypeVar("C", _Cursor, _AsyncCursor)


class _Psycopg(Generic[C]):
    def __init__(self, cursor: C, connection: _Broken) -> None:
        self._cursor: C = cursor
        self._connection = connection

    @property
    def is_lost(self) -> bool:
        return self._connection.broken


class PsycopgConnection(_Psycopg[_Cursor]):
    """A psycopg connection behind the face of asyncpg's. Its `fetch` never really waits."""

    async def fetch(
        self, query: str, *args: object, timeout: float | None = None
    ) -> Sequence[driver.DriverRow]:
        self._cursor.execute(query, [_parameter(value) for value in args])
        columns = self._cursor.description
        return [] if columns is None else _rows(columns, self._cursor.fetchall())


class AsyncPsycopgConnection(_Psycopg[_AsyncCursor]):
    """The same for psycopg's async connection."""

    async def fetch(
        self, query: str, *args: object, timeout: float | None = None
    ) -> Sequence[driver.DriverRow]:
        await self._cursor.execute(query, [_parameter(value) for value in args])
        columns = self._cursor.description
        return [] if columns is None else _rows(columns, await self._cursor.fetchall())


def _rows(
    columns: Sequence[_Column], rows: Iterable[Iterable[Value | uuid.UUID]]
) -> list[driver.DriverRow]:
    names = [column.name for column in columns]
    return [ForeignRow(names, row) for row in rows]


class Psycopg2Connection:
    """A psycopg2 connection behind the same face: it writes values into the statement itself."""

    def __init__(self, cursor: _Cursor, connection: _Closed) -> None:
        self._cursor = cursor
        self._connection = connection

    @property
    def is_lost(self) -> bool:
        return bool(self._connection.closed)

    async def fetch(
        self, query: str, *args: object, timeout: float | None = None
    ) -> Sequence[driver.DriverRow]:
        named = _NUMBERED.sub(r"%(p\1)s", query.replace("%", "%%"))
        values = {f"p{place}": _parameter(value) for place, value in enumerate(args, 1)}
        self._cursor.execute(named, values)
        columns = self._cursor.description
        if columns is None:
            return []
        names = [column.name for column in columns]
        return [ForeignRow(names, map(_plain, row)) for row in self._cursor.fetchall()]


def _plain(value: Value | uuid.UUID | memoryview) -> Value | uuid.UUID:
    return bytes(value) if isinstance(value, memoryview) else value


class OurWords:
    """Reports what goes wrong on a caller's connection as an error of ours. Use as a context.

    A database that is away is an outage. A connection that the program has closed, uses twice at
    a time or has left in a failed transaction is its own mistake.
    """

    def __init__(self) -> None:
        self.connection: driver.Fetching | None = None
        """The connection, once it is known."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *rest: object
    ) -> None:
        if isinstance(error, Exception) and _of_a_driver(error):
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> errors.FlowFabricError:
        said, state = driver.in_words(error), driver.sqlstate(error)
        if tells_of_outage(error) and not self._was_closed(error):
            kind = errors.BackendErrorKind
            busy = kind.BUSY_LOADING if driver.in_trouble(error) else kind.TRANSPORT
            return errors.Transport(driver.BACKEND, said, kind=busy)
        if state == _ABORTED:
            return errors.InvalidInput("connection", _FAILED)
        if state in driver.COLLISIONS:
            return errors.RetryExhausted(f"{_COLLIDED} ({said})")
        if state in _FORBIDDEN:
            return errors.InvalidInput("connection", f"{_MAY_NOT} ({said})")
        if driver.about_data(state):
            return errors.NotStorable(driver.BACKEND, said)
        if not state:
            return errors.InvalidInput("connection", f"cannot be used: {said}")
        return errors.Transport(driver.BACKEND, said)

    def _was_closed(self, error: BaseException) -> bool:
        """Whether a driver refuses to use a connection which is not lost."""
        if driver.sqlstate(error) or type(error).__name__ != "InterfaceError":
            return False
        return self.connection is None or not lost_in_transaction(self.connection)


def _of_a_driver(error: BaseException) -> bool:
    drivers = ("asyncpg", "psycopg", "psycopg2")
    return isinstance(error, OSError) or any(comes_from(error, each) for each in drivers)


def tells_of_outage(error: BaseException) -> bool:
    """Whether an error of any driver we know means that the database, or the way to it, is away."""
    if driver.in_trouble(error) or isinstance(error, TimeoutError) or driver.connection_lost(error):
        return True
    state = driver.sqlstate(error)
    of_psycopg = comes_from(error, "psycopg") or comes_from(error, "psycopg2")
    named = type(error).__name__ in ("OperationalError", "InterfaceError")
    return of_psycopg and (state.startswith(("08", "57P")) or (named and not state))


def lost_in_transaction(connection: driver.Fetching) -> bool:
    """Whether a connection of theirs has ended, and not because they were done with it.

    As far as its driver tells: with psycopg2 it looks the same.
    """
    match connection:
        case Answering():
            return lost_in_transaction(connection.theirs)
        case (
            AsyncpgConnection()
            | PsycopgConnection()
            | AsyncPsycopgConnection()
            | Psycopg2Connection()
        ):
            return connection.is_lost
        case _:
            return False


def joined(connection: object) -> driver.Fetching:
    """A connection of any driver we know, as one we can run our statements on."""
    if comes_from(connection, "asyncpg"):
        return _asyncpg(connection)
    if comes_from(connection, "psycopg"):
        return _psycopg(connection)
    if comes_from(connection, "psycopg2"):
        return _psycopg2(connection)
    raise unknown(connection)


def joined_sync(connection: object) -> driver.Fetching:
    """The same, for connections that need no event loop."""
    if comes_from(connection, "psycopg2"):
        return _psycopg2(connection)
    if comes_from(connection, "psycopg"):
        fetching = _psycopg(connection)
        if isinstance(fetching, PsycopgConnection):
            return fetching
    if comes_from(connection, "asyncpg") or comes_from(connection, "psycopg"):
        raise errors.InvalidInput("connection", "is async; use `await app.submit(…)` with it")
    raise unknown(connection)


async def look(connection: driver.Fetching, ours: Database) -> Settings:
    """What their transaction has set; refuses one that cannot write."""
    system = "null" if ours.system is None else _SYSTEM
    (row,) = await connection.fetch(_FOUND.format(system=system))
    if isinstance(row["name"], bytes):
        raise errors.InvalidInput("connection", _BYTES)
    if row["read_only"] == "on":
        if not row["standby"] and await _reads_by_choice(connection):
            raise errors.InvalidInput("connection", ONLY_READS)
        raise errors.Transport(
            driver.BACKEND, driver.ONLY_READS, kind=errors.BackendErrorKind.CLUSTER
        )
    database = Database(
        name=str(row["name"]),
        oid=str(row["oid"]),
        system=None if row["system"] is None else str(row["system"]),
    )
    return Settings(str(row["search_path"]), str(row["lock_timeout"]), database)


async def _reads_by_choice(connection: driver.Fetching) -> bool:
    """Whether the program has made its transaction read-only, and not the server every one."""
    rows = await connection.fetch(_WHO_SAID_READ_ONLY)
    return not any(row["source"] in _THE_SERVER for row in rows)


async def enter(connection: driver.Fetching, found: Settings, lock_wait_ms: int | None) -> None:
    """Make our tables visible to our statements, until `leave`."""
    waits = found.lock_timeout if lock_wait_ms is None else str(lock_wait_ms)
    await connection.fetch(_ENTER, _THEIR_PATH, waits)


async def leave(connection: driver.Fetching, found: Settings, hinted: set[str]) -> None:
    """Leave the transaction as it was. Hints travel with its commit."""
    await connection.fetch(_LEAVE, found.search_path, found.lock_timeout)
    for payload in hint_payloads(uuid.uuid4().hex, hinted):
        await connection.fetch("select pg_notify($1, $2)", CHANNEL, payload)


@asynccontextmanager
async def whole(connection: driver.Fetching) -> AsyncIterator[None]:
    """Undo our part of the caller's transaction if it is refused, or times out, half-way."""
    await connection.fetch("savepoint flowfabric")
    try:
        try:
            yield
        except UnicodeError as error:
            raise errors.InvalidInput("connection", f"{_ENCODING} ({error})") from error
        except Exception as error:
            if not driver.lock_timed_out(error):
                raise
            raise errors.LockTimeout(driver.in_words(error)) from None
    except errors.FlowFabricError:
        await connection.fetch("rollback to savepoint flowfabric")
        await connection.fetch("release savepoint flowfabric")
        raise
    await connection.fetch("release savepoint flowfabric")


class Answering:
    """A connection of theirs that is ended when one of our statements is not answered in time.

    The network may have swallowed it, and with it whatever they would send next.
    """

    def __init__(self, connection: AsyncpgConnection, timeout_s: float) -> None:
        self.theirs = connection
        self._timeout_s = timeout_s

    async def fetch(
        self, query: str, *args: object, timeout: float | None = None
    ) -> Sequence[driver.DriverRow]:
        try:
            return await self.theirs.fetch(query, *args, timeout=self._timeout_s)
        except TimeoutError:
            self.theirs.terminate()
            raise


def answering(connection: driver.Fetching, lock_wait_ms: int | None) -> driver.Fetching:
    """The connection; if the wait for locks is limited, it has to answer in time besides.

    Only asyncpg lets us end a connection that does not answer; others end as they are set to.
    """
    if lock_wait_ms is None or not isinstance(connection, AsyncpgConnection):
        return connection
    timeout_s = patience_s(COMMAND_TIMEOUT_S) or COMMAND_TIMEOUT_S
    # A lock is waited for twice: behind those who wait already, and then for its holder.
    return Answering(connection, timeout_s + 2 * lock_wait_ms / 1_000)


def _asyncpg(connection: object) -> AsyncpgConnection:
    asyncpg = importlib.import_module("asyncpg")
    if not isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        raise unknown(connection)
    known: _Endable = connection
    if not known.is_in_transaction():
        raise errors.InvalidInput("connection", CLOSED if known.is_closed() else _NO_TRANSACTION)
    # Behind that of a pool, which cannot be asked anything once it is given back.
    own: _Endable = getattr(connection, "_con", connection)
    return AsyncpgConnection(own, getattr(own, "_protocol", None))


def _psycopg(connection: object) -> PsycopgConnection | AsyncPsycopgConnection:
    psycopg = importlib.import_module("psycopg")
    rows = importlib.import_module("psycopg.rows")
    if not isinstance(connection, psycopg.Connection | psycopg.AsyncConnection):
        raise unknown(connection)
    if connection.closed and not connection.broken:
        raise errors.InvalidInput("connection", CLOSED)
    if connection.info.pipeline_status != psycopg.pq.PipelineStatus.OFF:
        raise errors.InvalidInput("connection", _PIPELINE)
    idle = connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    if connection.autocommit and idle:
        raise errors.InvalidInput("connection", _NO_TRANSACTION)
    if isinstance(connection, psycopg.AsyncConnection):
        return AsyncPsycopgConnection(
            psycopg.AsyncRawCursor(connection, row_factory=rows.tuple_row), connection
        )
    cursor = psycopg.RawCursor(connection, row_factory=rows.tuple_row)
    return PsycopgConnection(cursor, connection)


def _psycopg2(connection: object) -> Psycopg2Connection:
    psycopg2 = importlib.import_module("psycopg2")
    extensions = importlib.import_module("psycopg2.extensions")
    if not isinstance(connection, psycopg2.extensions.connection):
        raise unknown(connection)
    if connection.closed:
        if connection.closed == _PSYCOPG2_CLOSED:
            raise errors.InvalidInput("connection", CLOSED)
        raise errors.Transport(driver.BACKEND, _LOST, kind=errors.BackendErrorKind.TRANSPORT)
    idle = connection.info.transaction_status == extensions.TRANSACTION_STATUS_IDLE
    if connection.autocommit and idle:
        raise errors.InvalidInput("connection", _NO_TRANSACTION)
    # Of the plain kind: theirs may return rows of another shape.
    cursor = connection.cursor(cursor_factory=extensions.cursor)
    return Psycopg2Connection(cursor, connection)


def _parameter(value: object) -> object:
    """psycopg takes lists for arrays; a tuple would be a record."""
    return list(value) if isinstance(value, tuple) else value
