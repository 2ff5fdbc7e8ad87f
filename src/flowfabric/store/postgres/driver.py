"""The little of asyncpg that we use, with types.

asyncpg ships no annotations. This module is the only one that imports it and
says what its objects look like; everything else depends on these protocols.
"""

import importlib
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

from flowfabric.errors import BackendErrorKind, LockTimeout, NotStorable, Transport
from flowfabric.store.base import UniqueViolation, Value

_ASYNCPG: Final = importlib.import_module("asyncpg")


class DriverRow(Protocol):
    def __getitem__(self, column: int | str, /) -> object: ...

    def __iter__(self) -> Iterator[Value]: ...

    def keys(self) -> Iterable[str]: ...

    def items(self) -> Iterable[tuple[str, Value]]: ...


Notification = Callable[["Connection", int, str, object], None]


class Fetching(Protocol):
    """All that a unit of work needs of a connection."""

    async def fetch(
        self, query: str, *args: object, timeout: float | None = None
    ) -> Sequence[DriverRow]: ...


class Usable(Fetching, Protocol):
    """What a caller of the pool may do with a connection."""

    async def execute(self, query: str, *args: object, timeout: float | None = None) -> str: ...

    def terminate(self) -> None: ...


class Connection(Usable, Protocol):
    def get_settings(self) -> object: ...

    async def add_listener(self, channel: str, callback: Notification) -> None: ...

    def add_termination_listener(self, callback: Callable[["Connection"], None]) -> None: ...

    def is_closed(self) -> bool: ...

    def is_in_transaction(self) -> bool: ...

    async def close(self, *, timeout: float | None = None) -> None: ...


class _Connect(Protocol):
    def __call__(
        self,
        dsn: str,
        *,
        timeout: float,
        command_timeout: float,
        statement_cache_size: int,
        max_cached_statement_lifetime: int,
        max_cacheable_statement_size: int,
        server_settings: dict[str, str],
    ) -> Awaitable[Connection]: ...


connect: Final[_Connect] = _ASYNCPG.connect

PostgresError: Final[type[Exception]] = _ASYNCPG.PostgresError
"""The server refused; see `sqlstate`."""
InterfaceError: Final[type[Exception]] = _ASYNCPG.InterfaceError
"""The connection was unusable before the server saw anything."""
InternalClientError: Final[type[Exception]] = _ASYNCPG.InternalClientError
"""The driver lost track of the connection, as it does when the server ends it unasked."""
UUID: Final[type] = _ASYNCPG.pgproto.pgproto.UUID


def sqlstate(error: BaseException) -> str:
    """In the words of any driver: psycopg2 calls it otherwise."""
    return str(getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or "")


def table_name(error: BaseException) -> str:
    return str(getattr(error, "table_name", None) or "")


_ARRAYS: Final = {
    "bool": (1000, 16),
    "bytea": (1001, 17),
    "int2": (1005, 21),
    "int4": (1007, 23),
    "int8": (1016, 20),
    "float8": (1022, 701),
    "uuid": (2951, 2950),
}
"""Those our statements use: their own numbers, and those of their elements, as in any Postgres."""
_ARRAY_TYPES: Final = [
    {
        "oid": own,
        "name": f"_{name}",
        "ns": "pg_catalog",
        "kind": b"b",
        "basetype": None,
        "elemtype": element,
        "elemdelim": ",",
        "range_subtype": None,
        "attrtypoids": None,
        "attrnames": None,
    }
    for name, (own, element) in _ARRAYS.items()
]


def know_arrays(connection: Connection) -> None:
    """Spare the driver asking each server connection again what arrays of numbers are.

    Its question costs more than all the rest of a first statement.
    """
    register = getattr(connection.get_settings(), "register_data_types", None)
    if register is not None:
        register(_ARRAY_TYPES)


KEEPALIVE_IDLE_S: Final = 5
KEEPALIVE_INTERVAL_S: Final = 2
KEEPALIVE_COUNT: Final = 3
UNACKNOWLEDGED_MS: Final = 15_000
"""Longer than callers wait: to them an earlier end would look like a closed connection."""

_TCP_OPTIONS: Final = (
    ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
    ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
    ("TCP_KEEPCNT", KEEPALIVE_COUNT),
    ("TCP_USER_TIMEOUT", UNACKNOWLEDGED_MS),
)
"""Those that the platform has are set."""


def give_up_early(connection: Connection) -> None:
    """Tell the kernel to end the connection soon when the other side falls silent."""
    transport = getattr(connection, "_transport", None)
    found = None if transport is None else transport.get_extra_info("socket")
    if found is None or found.family not in (socket.AF_INET, socket.AF_INET6):
        return
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS:
        option = getattr(socket, name, None)
        if option is not None:
            found.setsockopt(socket.IPPROTO_TCP, option, value)


# What the driver's errors mean to us ----------------------------------------

BACKEND: Final = "postgres"

_UNIQUE_VIOLATION: Final = "23505"
_DIVISION_BY_ZERO: Final = "22012"
_STARTING_OR_STOPPING: Final = "57P03"
_READ_ONLY: Final = "25006"
# Whatever is asked: the server has no room, memory or connection left, or its disk fails.
_IN_TROUBLE: Final = ("53", "58")
_LOCK_TIMEOUT: Final = "55P03"
ONLY_READS: Final = "the server only reads: it is a standby, or a failover made it one"
_WORDS: Final = {
    "53100": "the disk of the server is full; make room there",
    "53200": "the server is out of memory",
    "53300": "the server has no connection left; raise its max_connections, or lower pool_max or"
    " the number of processes",
    "57P01": "the server is being stopped, or an administrator ended the connection",
    "57P03": "the server is starting or stopping",
    _LOCK_TIMEOUT: "another transaction keeps locked what this needs, perhaps a fence, and"
    " is still open; try again once it has ended",
    _READ_ONLY: ONLY_READS,
}
"""What people should know beside the server's own message."""
_INVALID_PLAN: Final = "0A000"
_PROTOCOL_VIOLATION: Final = "08P01"
"""What poolers say of all they refuse, be it for now or for good."""
# Cardinality, data, integrity, check option, and limits of the database such as the size of an
# index row: about what was to be stored, so that asking again gets the same answer.
_ABOUT_DATA: Final = ("21", "22", "23", "44", "54")

# Serialization failure, deadlock; and a prepared statement that a migration made
# stale, which the driver prepares again the next time.
COLLISIONS: Final = frozenset({"40001", "40P01", _INVALID_PLAN})

_UNANSWERED: Final = "it was sent, and no answer came"

DRIVER_ERRORS: Final = (
    PostgresError,
    InterfaceError,
    InternalClientError,
    OSError,
    TimeoutError,
)
"""Everything asyncpg raises when something is wrong with the database or the way to it."""


def collided(error: BaseException) -> bool:
    """Whether running the transaction again may help at once."""
    return isinstance(error, PostgresError) and sqlstate(error) in COLLISIONS


def connection_lost(error: BaseException) -> bool:
    if isinstance(error, PostgresError):
        return sqlstate(error).startswith(("08", "57P")) and not setting_refused(error)
    if isinstance(error, TimeoutError):
        return False
    return isinstance(error, InterfaceError | InternalClientError | OSError)


def setting_refused(error: BaseException) -> bool:
    """Whether a pooler refused to connect because of a setting that was to be made."""
    return sqlstate(error) == _PROTOCOL_VIOLATION and "startup parameter" in str(error)


def in_trouble(error: BaseException) -> bool:
    """Whether the server refuses whatever it is asked, for now."""
    return sqlstate(error).startswith(_IN_TROUBLE) or sqlstate(error) == _READ_ONLY


def divided_by_zero(error: BaseException) -> bool:
    return sqlstate(error) == _DIVISION_BY_ZERO


def note_unanswered(error: Exception) -> None:
    """Note on the error of a statement that takes effect at once whether its answer was lost."""
    if isinstance(error, TimeoutError) or connection_lost(error):
        error.add_note(_UNANSWERED)


def demoted(error: BaseException) -> bool:
    """Whether the server became a standby, so that connections should be made again."""
    return sqlstate(error) == _READ_ONLY


def about_data(state: str) -> bool:
    """Whether what was to be stored is refused, however often it is tried."""
    return state.startswith(_ABOUT_DATA)


def lock_timed_out(error: BaseException) -> bool:
    """Whether a lock did not come in time."""
    return sqlstate(error) == _LOCK_TIMEOUT


def in_words(error: BaseException) -> str:
    """What a driver's error says, after what it means."""
    said = f"{type(error).__name__}: {error}"
    meaning = _WORDS.get(sqlstate(error))
    return said if meaning is None else f"{meaning} ({said})"


def translate(error: Exception, server: str) -> Exception:
    """The error of ours that a driver's error stands for; it names a server that is not reached."""
    state = sqlstate(error)
    detail = in_words(error)
    if state == _UNIQUE_VIOLATION:
        return UniqueViolation(table_name(error), str(error))
    if state == _LOCK_TIMEOUT:
        # Long enough: meanwhile everything else that the transaction locked was held up.
        return LockTimeout(in_words(error))
    if state == _STARTING_OR_STOPPING or state.startswith(_IN_TROUBLE):
        return Transport(BACKEND, detail, kind=BackendErrorKind.BUSY_LOADING)
    if state == _READ_ONLY:
        return Transport(BACKEND, detail, kind=BackendErrorKind.CLUSTER)
    if about_data(state):
        return NotStorable(BACKEND, detail)
    if state.startswith("28"):
        return Transport(BACKEND, detail, kind=BackendErrorKind.AUTH)
    if setting_refused(error):
        return Transport(BACKEND, detail, kind=BackendErrorKind.PROTOCOL)
    unsure = _UNANSWERED in getattr(error, "__notes__", ())
    if isinstance(error, TimeoutError):
        changed = "" if unsure else "; nothing was changed"
        timed_out = f"{server} gave no answer in time{changed}"
        kind = BackendErrorKind.TIMEOUT
        return Transport(BACKEND, timed_out, kind=kind, may_have_happened=unsure)
    if connection_lost(error):
        kind, lost = BackendErrorKind.TRANSPORT, f"{server}: {detail}"
        return Transport(BACKEND, lost, kind=kind, may_have_happened=unsure)
    return Transport(BACKEND, detail, kind=BackendErrorKind.OTHER)
