"""Connections of a program's own that cannot take part, and what it is told."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, nullcontext
from pathlib import Path

import aiosqlite
import asyncpg
import psycopg
import psycopg2
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from flowfabric import App, Context, Retry
from flowfabric.errors import ExecutionFailed, InvalidInput, RetryExhausted, Transport
from flowfabric.outages import is_outage
from flowfabric.store.postgres.store import PostgresStore
from tests.apps import working
from tests.sdk.test_joining import greeting, made, names

Submit = Callable[[object], Awaitable[object]]


@pytest.fixture
async def app(postgres_database: str) -> AsyncIterator[App]:
    async with made(postgres_database) as opened:
        yield opened
        opened.blocking.close()


async def submit(app: App, connection: object) -> None:
    await app.submit(greeting(app, "x"), connection=connection)


async def submit_sync(app: App, connection: object) -> None:
    def view() -> None:
        app.blocking.submit(greeting(app, "x"), connection=connection)

    await asyncio.to_thread(view)


def refused(problem: str) -> "pytest.RaisesExc[InvalidInput]":
    return pytest.raises(InvalidInput, match=rf"^connection: {problem}")


# Another database ----------------------------------------------------------------------


@asynccontextmanager
async def begun(url: str, *statements: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection on which these statements ran."""
    connection = await asyncpg.connect(url)
    try:
        for statement in statements or ["begin"]:
            await connection.execute(statement)
        yield connection
    finally:
        connection.terminate()


async def test_a_connection_to_another_database_is_refused_whatever_is_in_there(
    app: App, empty_postgres_database: str
) -> None:
    other = empty_postgres_database
    await PostgresStore(other).migrate()
    name = other.rpartition("/")[2]
    problem = f"leads to another database, '{name}'; pass one that leads to"
    async with made(other) as neighbour:
        await neighbour.submit(greeting(neighbour, "a tenant"))
        async with begun(other) as connection:
            with refused(problem):
                await submit(app, connection)
            # It is as it was, and fit for the app whose database it is.
            await submit(neighbour, connection)
            await connection.execute("commit")
        with closing(psycopg.connect(other)) as connected, refused(problem):
            await submit_sync(app, connected)
        assert len(await names(neighbour)) == 2
    async with begun(other.rpartition("/")[0] + "/postgres") as connection:
        with refused("leads to another database, 'postgres'"):
            await submit(app, connection)
    assert await names(app) == []


async def test_a_database_that_was_made_again_under_the_same_name_is_the_apps(app: App) -> None:
    """As from a backup, while the program runs on."""
    async with begun(app.url) as connection:
        await submit(app, connection)
    server, _, name = app.url.rpartition("/")
    for connected in (submit, submit_sync):
        async with begun(f"{server}/postgres", "select") as connection:
            await connection.execute(f"drop database {name} with (force)")
            await connection.execute(f"create database {name}")
        await PostgresStore(app.url).migrate()
        with closing(psycopg.connect(app.url)) as again:
            await connected(app, again)
            again.commit()
        assert await names(app) == ['{"name":"x"}']


# Connections that are closed, read only, or in a failed transaction ---------------------


async def test_closed_connections_of_every_driver(app: App) -> None:
    direct = await asyncpg.connect(app.url)
    await direct.close()
    pool = await asyncpg.create_pool(app.url, min_size=1, max_size=1)
    released = await pool.acquire()
    await pool.release(released)
    later = await psycopg.AsyncConnection.connect(app.url)
    await later.close()
    with refused("is closed; pass one that is open"):
        await submit(app, direct)
    with refused("cannot be used: InterfaceError: .*released back to the pool"):
        await submit(app, released)
    with refused("is closed"):
        await submit(app, later)
    for connect in (psycopg.connect, psycopg2.connect):
        connection = connect(app.url)
        connection.close()
        with refused("is closed"):
            await submit_sync(app, connection)
        with refused("is closed"):
            await submit(app, connection)
    await pool.close()


async def test_closed_connections_of_sqlalchemy(app: App) -> None:
    engine = create_engine(app.url.replace("postgresql://", "postgresql+psycopg2://"))
    connection = engine.connect()
    connection.close()
    with refused("cannot be used: ResourceClosedError"):
        await submit_sync(app, connection)
    with Session(engine) as session:
        with pytest.raises(SQLAlchemyError):
            session.execute(text("select 1 / 0"))
        with refused("is in a transaction in which a statement has failed; roll it back"):
            await submit_sync(app, session)
    engine.dispose()
    asynchronous = create_async_engine(app.url.replace("postgresql://", "postgresql+asyncpg://"))
    async with AsyncSession(asynchronous) as failed:
        with pytest.raises(SQLAlchemyError):
            await failed.execute(text("select 1 / 0"))
        with refused("is in a transaction in which a statement has failed"):
            await submit(app, failed)
    await asynchronous.dispose()


async def test_a_failed_transaction_is_to_be_rolled_back(app: App) -> None:
    async with begun(app.url) as connection:
        with pytest.raises(asyncpg.PostgresError):
            await connection.execute("select 1 / 0")
        with refused("is in a transaction in which a statement has failed; roll it back"):
            await submit(app, connection)
        await connection.execute("rollback")
        await connection.execute("begin")
        await submit(app, connection)
        await connection.execute("commit")
    assert await names(app) == ['{"name":"x"}']


@pytest.mark.parametrize(
    "statements",
    [["begin read only"], ["set default_transaction_read_only = on", "begin"]],
    ids=["begun so", "set so"],
)
async def test_a_transaction_that_only_reads_is_the_programs_own_mistake(
    app: App, statements: Sequence[str]
) -> None:
    async with begun(app.url, *statements) as connection:
        with refused("is in a transaction that only reads; begin one that may write"):
            await submit(app, connection)
        assert await connection.fetchval("select 1") == 1


async def test_a_database_that_only_reads_is_an_outage(app: App) -> None:
    """As those who operate it make it when its disk is full."""
    name = app.url.rpartition("/")[2]
    async with begun(app.url) as connection:
        # So that nothing but the connection has to write.
        await submit(app, connection)
        await connection.execute("rollback")
        await connection.execute(f"alter database {name} set default_transaction_read_only = on")
    async with begun(app.url) as connection:
        with pytest.raises(Transport, match="the server only reads") as told:
            await submit(app, connection)
        assert is_outage(told.value)


async def test_what_a_role_lacks_and_what_collides_is_said_in_words(app: App) -> None:
    # Of the role that everybody may take and that may do nothing.
    async with begun(app.url, "begin", "set local role pg_monitor") as connection:
        with refused("belongs to a role that may not use the tables of the app"):
            await submit(app, connection)
    serializable = "begin isolation level serializable"
    async with begun(app.url, serializable) as one, begun(app.url, serializable) as other:
        await other.execute("select * from flowfabric.live")
        await app.submit(greeting(app, "1"), connection=one, idempotency_key="k")
        await one.execute("commit")
        with pytest.raises(RetryExhausted, match="roll it back and run it again"):
            await app.submit(greeting(app, "2"), connection=other, idempotency_key="k")


async def test_a_pipeline_is_to_be_left_first(app: App) -> None:
    piped = refused("is in pipeline mode")
    with psycopg.connect(app.url) as connection, connection.pipeline(), piped:
        await submit_sync(app, connection)
    async with await psycopg.AsyncConnection.connect(app.url) as asynchronous:
        async with asynchronous.pipeline():
            await asynchronous.execute("select 1")
            with refused("is in pipeline mode"):
                await submit(app, asynchronous)
        await submit(app, asynchronous)
    assert await names(app) == ['{"name":"x"}']


@pytest.mark.parametrize("connect", [psycopg.connect, psycopg2.connect])
async def test_an_encoding_that_cannot_hold_what_is_written_is_named(
    app: App, connect: Callable[..., psycopg.Connection]
) -> None:
    with closing(connect(app.url, client_encoding="LATIN1")) as connection:
        before = settings_of(connection)
        with refused("cannot hold all that has to be written in its client_encoding"):
            await app.submit(greeting(app, "y"), connection=connection, tags={"a.b": "\U0001f600"})
        assert settings_of(connection) == before
        await app.submit(greeting(app, "x"), connection=connection, tags={"a.b": "caf\xe9"})
        connection.commit()
    assert await names(app) == ['{"name":"x"}']


def settings_of(connection: psycopg.Connection) -> object:
    with connection.cursor() as cursor:
        cursor.execute("select current_setting('search_path'), current_setting('lock_timeout')")
        return cursor.fetchone()


async def test_a_connection_without_an_encoding_is_refused(app: App) -> None:
    with (
        closing(psycopg.connect(app.url, client_encoding="SQL_ASCII")) as connection,
        refused("returns bytes for text, as client_encoding SQL_ASCII has it"),
    ):
        await submit(app, connection)


async def test_temporary_tables_do_not_hide_those_of_the_app(app: App) -> None:
    tables = [f"create temporary table {name} (x int)" for name in ("execution", "live")]
    async with begun(app.url, *tables, "begin") as connection:
        await submit(app, connection)
        await connection.execute("commit")
    assert await names(app) == ['{"name":"x"}']


async def test_on_sqlite_temporary_tables_that_hide_those_of_the_app_are_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "shop.db"
    async with made(f"sqlite:///{path}") as app:
        with sqlite(path) as connection:
            connection.execute("create temporary table article (x)")
            await submit(app, connection)
            connection.commit()
            connection.execute("create temporary table Execution (x)")
            with refused("has a temporary 'execution', which hides a table of the app"):
                await submit(app, connection)
        assert await names(app) == ['{"name":"x"}']


def distrusts() -> bool:
    """Whether this SQLite, by how it was built, refuses JSON in the checks of such a schema."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("pragma trusted_schema = off")
        try:
            connection.execute("create table kept (text check (json_valid(text)))")
        except sqlite3.OperationalError:
            return True
        return False


async def test_on_sqlite_a_schema_that_is_not_trusted_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    async with made(f"sqlite:///{path}") as app:
        for statement in ("select 1", "select * from execution"):
            with sqlite(path) as connection:
                connection.execute(statement)
                connection.execute("pragma trusted_schema = off")
                with refused("has `trusted_schema` off") if distrusts() else nullcontext():
                    await submit(app, connection)
                assert connection.in_transaction is not distrusts()


@contextmanager
def sqlite(path: Path, mode: str = "rwc") -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(f"file:{path}?mode={mode}", uri=True)) as connection:
        yield connection


async def test_on_sqlite_they_are_told_the_same(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    async with made(f"sqlite:///{path}") as app:
        await app.submit(greeting(app, "first"))
        with sqlite(path) as connection:
            pass
        with refused("is closed; pass one that is open"):
            await submit(app, connection)
        async with aiosqlite.connect(path) as asynchronous:
            pass
        with refused("is closed; pass one that is open"):
            await submit(app, asynchronous)
        reads = "is in a transaction that only reads; begin one that may write"
        with sqlite(path, "ro") as connection, refused(reads):
            await submit(app, connection)
        with sqlite(path) as connection:
            connection.execute("pragma query_only = on")
            with refused(reads):
                await submit(app, connection)
            with refused("cannot be used: SQLite objects created in a thread"):
                await submit_sync(app, connection)
            connection.execute("pragma query_only = off")
            connection.text_factory = bytes
            await submit(app, connection)
            assert connection.text_factory is bytes
            connection.commit()
        assert await names(app) == ['{"name":"first"}', '{"name":"x"}']


# In a handler: a failure, and no outage ------------------------------------------------


async def closed(url: str, app: App) -> None:
    connection: sqlite3.Connection | psycopg2.extensions.connection
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    else:
        connection = psycopg2.connect(url)
    connection.close()
    await submit(app, connection)


async def reading(url: str, app: App) -> None:
    if url.startswith("sqlite"):
        with sqlite(Path(url.removeprefix("sqlite:///")), "ro") as connection:
            await submit(app, connection)
        return
    async with begun(url, "begin read only") as connected:
        await submit(app, connected)


@pytest.mark.parametrize("unfit", [closed, reading])
async def test_a_handler_that_submits_on_an_unfit_connection_fails(
    store_url: str, unfit: Callable[[str, App], Awaitable[None]]
) -> None:
    async with made(store_url) as app:

        @app.task(retry=Retry(max_retries=1, delay=0))
        async def work(ctx: Context) -> None:
            await unfit(store_url, app)

        async with working(app):
            run = await app.submit(work)
            with pytest.raises(ExecutionFailed, match="connection: is "):
                await run.result(timeout="20s")
