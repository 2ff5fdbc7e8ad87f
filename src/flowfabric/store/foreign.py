"""Whose connection is this? Finding the driver's own connection in what users pass.

SQLAlchemy and Django wrap the driver's connection. SQLAlchemy begins its transaction only when it
is first used, so it is used here first: what is then written through the driver
belongs to the same transaction.
"""

import sys
from types import ModuleType

from flowfabric.errors import InvalidInput


def comes_from(connection: object, package: str) -> bool:
    """Whether one of the object's classes is defined in a package."""
    return any(
        kind.__module__ == package or kind.__module__.startswith(f"{package}.")
        for kind in type(connection).__mro__
    )


def unwrap_sync(connection: object) -> object:
    """The driver's connection behind Django's or SQLAlchemy's; others as they are."""
    if comes_from(connection, "django"):
        return _unwrap_django(connection)
    if not comes_from(connection, "sqlalchemy"):
        return connection
    orm, engine = _loaded("sqlalchemy.orm"), _loaded("sqlalchemy.engine")
    if orm is not None and isinstance(connection, orm.Session | orm.scoped_session):
        connection = connection.connection()
    if engine is not None and isinstance(connection, engine.Connection):
        connection.exec_driver_sql("select 1")
        driver: object = connection.connection.dbapi_connection
        return driver
    raise unknown(connection)


def _unwrap_django(connection: object) -> object:
    """`django.db.connection` stands for the connection of the calling thread."""
    ensure = getattr(connection, "ensure_connection", None)
    if ensure is None:
        raise unknown(connection)
    ensure()
    driver: object = getattr(connection, "connection", None)
    return driver


async def unwrap(connection: object) -> object:
    """The same, for async sessions and connections too."""
    asyncio = _loaded("sqlalchemy.ext.asyncio")
    if asyncio is None or not comes_from(connection, "sqlalchemy.ext.asyncio"):
        return unwrap_sync(connection)
    if isinstance(connection, asyncio.AsyncSession | asyncio.async_scoped_session):
        connection = await connection.connection()
    if isinstance(connection, asyncio.AsyncConnection):
        await connection.exec_driver_sql("select 1")
        driver: object = (await connection.get_raw_connection()).driver_connection
        return driver
    raise unknown(connection)


def unknown(connection: object) -> InvalidInput:
    kind = type(connection)
    return InvalidInput(
        "connection",
        "must be a connection of asyncpg, psycopg or psycopg2, on SQLite one of sqlite3 or"
        " aiosqlite, or over one of these a SQLAlchemy connection or session, or Django's;"
        f" this is a {kind.__module__}.{kind.__qualname__}",
    )


def _loaded(name: str) -> ModuleType | None:
    """Whoever passes an object of a package has imported it."""
    return sys.modules.get(name)
