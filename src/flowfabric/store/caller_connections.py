"""A caller's connection: finding the driver's own in it, and working inside its transaction.

SQLAlchemy and Django wrap the driver's connection. SQLAlchemy begins its transaction only when it
is first used, so it is used here first: what is then written through the driver
belongs to the same transaction.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Final, TypeVar

from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.store.base import (
    Body,
    Parameter,
    PassingStore,
    ReadBody,
    Row,
    Store,
    Transaction,
    UnlockedBody,
)
from flowfabric.store.hints import topics_in

CLOSED: Final = "is closed; pass one that is open and has a transaction to take part in"
ONLY_READS: Final = "is in a transaction that only reads; begin one that may write"


def comes_from(connection: object, package: str) -> bool:
    """Whether one of the object's classes is defined in a package."""
    return any(
        kind.__module__ == package or kind.__module__.startswith(f"{package}.")
        for kind in type(connection).__mro__
    )


def unwrap_sync(connection: object) -> object:
    """The driver's connection behind Django's or SQLAlchemy's; others as they are."""
    if comes_from(connection, "django"):
        with _drivers_errors():
            return _unwrap_django(connection)
    if comes_from(connection, "sqlalchemy"):
        with _drivers_errors():
            return _unwrap_sqlalchemy(connection)
    return connection


def _unwrap_django(connection: object) -> object:
    """`django.db.connection` stands for the connection of the calling thread."""
    ensure = getattr(connection, "ensure_connection", None)
    if ensure is None:
        raise unknown(connection)
    ensure()
    driver: object = getattr(connection, "connection", None)
    return driver


def _unwrap_sqlalchemy(connection: object) -> object:
    orm, engine = _loaded("sqlalchemy.orm"), _loaded("sqlalchemy.engine")
    if orm is not None and isinstance(connection, orm.Session | orm.scoped_session):
        connection = connection.connection()
    if engine is not None and isinstance(connection, engine.Connection):
        connection.exec_driver_sql("select 1")
        driver: object = connection.connection.dbapi_connection
        return driver
    raise unknown(connection)


def of_this_thread(connection: object) -> object:
    """What stands for the connection of the calling thread, as that connection; others as they are.

    For calls that go on in an event loop: Django's stands for another one there.
    """
    return unwrap_sync(connection) if comes_from(connection, "django") else connection


async def unwrap(connection: object) -> object:
    """The same, for async sessions and connections too."""
    asyncio = _loaded("sqlalchemy.ext.asyncio")
    if asyncio is None or not comes_from(connection, "sqlalchemy.ext.asyncio"):
        return unwrap_sync(connection)
    with _drivers_errors():
        if isinstance(connection, asyncio.AsyncSession | asyncio.async_scoped_session):
            connection = await connection.connection()
        if isinstance(connection, asyncio.AsyncConnection):
            await connection.exec_driver_sql("select 1")
            driver: object = (await connection.get_raw_connection()).driver_connection
            return driver
    raise unknown(connection)


@contextmanager
def _drivers_errors() -> Iterator[None]:
    """Raise the error of the driver, which the stores know, in place of the wrapper's around it.

    What the wrapper refuses by itself, as on a session that has failed, is for the program to mend.
    """
    try:
        yield
    except FlowFabricError:
        raise
    except Exception as error:
        inner: BaseException | None = error
        while inner is not None and _is_a_wrappers(inner):
            inner = getattr(inner, "orig", None) or inner.__cause__
        if inner is error:
            raise
        if inner is not None:
            raise inner from None
        said = f"{type(error).__name__}: {error}"
        raise InvalidInput("connection", f"cannot be used: {said}") from error


def _is_a_wrappers(error: BaseException) -> bool:
    return comes_from(error, "sqlalchemy") or comes_from(error, "django")


def unknown(connection: object) -> InvalidInput:
    kind = type(connection)
    return InvalidInput(
        "connection",
        "must be a connection of asyncpg, psycopg or psycopg2, on SQLite one of sqlite3 or"
        " aiosqlite, or over one of these a SQLAlchemy connection or session, or Django's;"
        f" this is a {kind.__module__}.{kind.__qualname__}",
    )


def _loaded(name: str) -> ModuleType | None:
    """A caller that passes an object of a package has imported it."""
    return sys.modules.get(name)


# A store that works inside the open transaction of a caller's connection
#
# Whatever is asked of it becomes part of that transaction, reads included: they see
# what it has written. Nothing is committed here, and nothing is tried twice.

T = TypeVar("T")


class OnConnection(PassingStore):
    """`sync` for connections that are not async: units then run on the calling thread."""

    def __init__(self, store: Store, connection: object, *, sync: bool) -> None:
        super().__init__(store)
        self._connection = connection
        self.sync = sync
        self.writes_beside = False

    async def transact(self, body: Body[T], *, lock_wait_ms: int | None = None) -> T:
        if self.sync:
            return self.transact_on_sync(self._connection, body, lock_wait_ms=lock_wait_ms)
        return await self.transact_on(self._connection, body, lock_wait_ms=lock_wait_ms)

    async def try_unlocked(self, body: UnlockedBody[T]) -> T | None:
        return None

    async def read(self, body: ReadBody[T]) -> T:
        return await self.transact(body)

    async def execute_alone(
        self, name: str, topics: Collection[str] = (), /, **parameters: Parameter
    ) -> Sequence[Row]:
        async def run(tx: Transaction) -> Sequence[Row]:
            rows = await tx.select(name, **parameters)
            for topic in (*topics, *topics_in(rows)) if rows else ():
                tx.hint(topic)
            return rows

        return await self.transact(run)

    async def execute_and_read(
        self, name: str, read: Callable[[Sequence[Row]], T], /, **parameters: Parameter
    ) -> T:
        return read(await self.execute_alone(name, **parameters))

    # The connection is not ours: it is open as long as the caller keeps it open.

    async def open(self) -> None: ...
    async def close(self) -> None: ...
