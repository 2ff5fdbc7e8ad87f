"""Our statements on a caller's Postgres connection, inside its transaction."""

import importlib
import re
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Generic, Protocol, TypeVar

from msgspec import Struct

from flowfabric import errors
from flowfabric.outages import patience_s
from flowfabric.store.base import Value
from flowfabric.store.caller_connections import comes_from, unknown
from flowfabric.store.postgres import driver
from flowfabric.store.postgres.hints import hint_payloads
from flowfabric.store.postgres.pool import COMMAND_TIMEOUT_S, SEARCH_PATH
from flowfabric.store.postgres.statements import CHANNEL

_NUMBERED: Final = re.compile(r"\$(\d+)")
_FOUND: Final = """
select current_setting('search_path') as search_path,
       current_setting('lock_timeout') as lock_timeout
"""
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
_NO_TRANSACTION: Final = "has no open transaction to take part in; begin one first"


class Settings(Struct, frozen=True):
    """What their transaction had set, and finds again."""

    search_path: str
    lock_timeout: str


class _Speaking(Protocol):
    """What speaks the protocol for a connection of asyncpg."""

    def is_connected(self) -> bool: ...

    def is_in_transaction(self) -> bool: ...


class _Endable(driver.Fetching, Protocol):
    """A connection of asyncpg, which can be ended without an answer."""

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


@contextmanager
def outage_told() -> Iterator[None]:
    """Report a failure of the caller's connection under our statements as a database outage."""
    try:
        yield
    except errors.FlowFabricError:
        raise
    except Exception as error:
        if not tells_of_outage(error):
            raise
        busy = driver.in_trouble(error)
        kind = errors.BackendErrorKind.BUSY_LOADING if busy else errors.BackendErrorKind.TRANSPORT
        raise errors.Transport(driver.BACKEND, driver.in_words(error), kind=kind) from error


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


async def enter(connection: driver.Fetching, lock_wait_ms: int | None) -> Settings:
    """Make our tables visible to our statements; return what to `leave` with."""
    (row,) = await connection.fetch(_FOUND)
    found = Settings(str(row["search_path"]), str(row["lock_timeout"]))
    waits = found.lock_timeout if lock_wait_ms is None else str(lock_wait_ms)
    await connection.fetch(_ENTER, SEARCH_PATH, waits)
    return found


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
    return Answering(connection, timeout_s + lock_wait_ms / 1_000)


def _asyncpg(connection: object) -> AsyncpgConnection:
    asyncpg = importlib.import_module("asyncpg")
    if not isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        raise unknown(connection)
    known: _Endable = connection
    if not known.is_in_transaction():
        raise errors.InvalidInput("connection", _NO_TRANSACTION)
    # Behind that of a pool, which cannot be asked anything once it is given back.
    own: _Endable = getattr(connection, "_con", connection)
    return AsyncpgConnection(own, getattr(own, "_protocol", None))


def _psycopg(connection: object) -> PsycopgConnection | AsyncPsycopgConnection:
    psycopg = importlib.import_module("psycopg")
    rows = importlib.import_module("psycopg.rows")
    if not isinstance(connection, psycopg.Connection | psycopg.AsyncConnection):
        raise unknown(connection)
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
    idle = connection.info.transaction_status == extensions.TRANSACTION_STATUS_IDLE
    if connection.autocommit and idle:
        raise errors.InvalidInput("connection", _NO_TRANSACTION)
    # Of the plain kind: theirs may return rows of another shape.
    cursor = connection.cursor(cursor_factory=extensions.cursor)
    return Psycopg2Connection(cursor, connection)


def _parameter(value: object) -> object:
    """psycopg takes lists for arrays; a tuple would be a record."""
    return list(value) if isinstance(value, tuple) else value
