"""The little of asyncpg that we use, with types.

asyncpg ships no annotations. This module is the only one that imports it and
says what its objects look like; everything else depends on these protocols.
"""

import importlib
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

from flowfabric.store.base import Value

_ASYNCPG: Final = importlib.import_module("asyncpg")


class DriverRow(Protocol):
    def __getitem__(self, column: int | str, /) -> object: ...

    def __iter__(self) -> Iterator[object]: ...

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
    """Spare the driver asking each server connection anew what arrays of numbers are.

    Its question costs more than all the rest of a first statement.
    """
    register = getattr(connection.get_settings(), "register_data_types", None)
    if register is not None:
        register(_ARRAY_TYPES)


KEEPALIVE_IDLE_S: Final = 5
KEEPALIVE_INTERVAL_S: Final = 2
KEEPALIVE_COUNT: Final = 3
UNACKNOWLEDGED_MS: Final = 15_000
"""Later than whoever waits gives up, who would take it for a connection that was closed."""

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
