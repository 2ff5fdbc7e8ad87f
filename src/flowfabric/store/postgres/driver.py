"""The little of asyncpg that we use, with types.

asyncpg ships no annotations. This module is the only one that imports it and
says what its objects look like; everything else depends on these protocols.
"""

import importlib
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


class Connection(Fetching, Protocol):
    async def execute(self, query: str, *args: object, timeout: float | None = None) -> str: ...

    async def fetch(
        self, query: str, *args: object, timeout: float | None = None
    ) -> Sequence[DriverRow]: ...

    async def add_listener(self, channel: str, callback: Notification) -> None: ...

    def add_termination_listener(self, callback: Callable[["Connection"], None]) -> None: ...

    def is_closed(self) -> bool: ...

    def is_in_transaction(self) -> bool: ...

    async def close(self, *, timeout: float | None = None) -> None: ...

    def terminate(self) -> None: ...


class Pool(Protocol):
    def acquire(self, *, timeout: float | None = None) -> Awaitable[Connection]: ...

    async def release(self, connection: Connection) -> None: ...

    async def expire_connections(self) -> None: ...

    async def close(self) -> None: ...

    def terminate(self) -> None: ...

    def get_idle_size(self) -> int: ...

    def get_size(self) -> int: ...


class _Connect(Protocol):
    def __call__(
        self,
        dsn: str,
        *,
        timeout: float,
        command_timeout: float,
        statement_cache_size: int,
        server_settings: dict[str, str],
    ) -> Awaitable[Connection]: ...


class _CreatePool(Protocol):
    def __call__(
        self,
        dsn: str,
        *,
        min_size: int,
        max_size: int,
        max_queries: int,
        max_inactive_connection_lifetime: float,
        timeout: float,
        command_timeout: float,
        statement_cache_size: int,
        max_cached_statement_lifetime: int,
        server_settings: dict[str, str],
        reset: Callable[[Connection], Awaitable[None]],
    ) -> Awaitable[Pool]: ...


connect: Final[_Connect] = _ASYNCPG.connect
create_pool: Final[_CreatePool] = _ASYNCPG.create_pool

PostgresError: Final[type[Exception]] = _ASYNCPG.PostgresError
"""The server refused; see `sqlstate`."""
InterfaceError: Final[type[Exception]] = _ASYNCPG.InterfaceError
"""The connection was unusable before the server saw anything."""
InternalClientError: Final[type[Exception]] = _ASYNCPG.InternalClientError
"""The driver lost track of the connection, as it does when the server ends it unasked."""
UUID: Final[type] = _ASYNCPG.pgproto.pgproto.UUID


def sqlstate(error: BaseException) -> str:
    return str(getattr(error, "sqlstate", None) or "")


def table_name(error: BaseException) -> str:
    return str(getattr(error, "table_name", None) or "")
