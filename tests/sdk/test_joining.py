"""Submitting and fencing inside the user's own transaction."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from flowfabric import App, Context
from flowfabric.errors import InvalidInput
from flowfabric.task import Call
from tests.apps import PATIENCE_S, working


def made(url: str) -> App:
    app = App(url)

    @app.task
    async def greet(name: str) -> str:
        return f"hello {name}"

    return app


@pytest.fixture
async def app(postgres_database: str) -> AsyncIterator[App]:
    async with made(postgres_database) as opened:
        yield opened
        opened.blocking.close()


async def names(app: App) -> list[str]:
    page = await app.engine.find_executions(limit=100)
    contexts = [await app.engine.read_execution_context(e.execution_id) for e in page.executions]
    return sorted(context.input_payload.decode() for context in contexts)


def greeting(app: App, name: str) -> Call[object]:
    return app.tasks["greet"](name)


async def test_with_asyncpg_work_exists_if_and_when_the_transaction_commits(app: App) -> None:
    connection = await asyncpg.connect(app.url)
    try:
        await connection.execute("create table article (id int)")
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("insert into article values (1)")
        await app.submit(greeting(app, "rolled back"), connection=connection)
        await transaction.rollback()
        assert await names(app) == []
        async with connection.transaction():
            await connection.execute("insert into article values (2)")
            await app.submit(greeting(app, "kept"), connection=connection)
            assert await names(app) == []
        assert await names(app) == ['{"name":"kept"}']
        path = await connection.fetchval("show search_path")
        assert "flowfabric" not in path
    finally:
        await connection.close()


async def test_with_asyncpg_an_idle_worker_is_woken_by_the_commit(app: App) -> None:
    connection = await asyncpg.connect(app.url)
    try:
        async with working(app):
            async with connection.transaction():
                run = await app.submit(greeting(app, "x"), connection=connection)
            assert await run.result(timeout="4s") == "hello x"
    finally:
        await connection.close()


async def test_with_psycopg_async(app: App) -> None:
    async with await psycopg.AsyncConnection.connect(app.url) as connection:
        await app.submit(greeting(app, "dropped"), connection=connection)
        await connection.rollback()
        await app.submit(greeting(app, "kept"), connection=connection)
        await app.submit_many([greeting(app, "a"), greeting(app, "b")], connection=connection)
    assert await names(app) == ['{"name":"a"}', '{"name":"b"}', '{"name":"kept"}']


async def test_with_psycopg_from_code_without_a_loop(app: App) -> None:
    def view() -> None:
        with psycopg.connect(app.url) as connection:
            app.blocking.submit(greeting(app, "dropped"), connection=connection)
            connection.rollback()
            app.blocking.submit(greeting(app, "kept"), connection=connection)

    await asyncio.to_thread(view)
    assert await names(app) == ['{"name":"kept"}']


async def test_with_a_sqlalchemy_session_sync_and_async(app: App) -> None:
    url = app.url.replace("postgresql://", "postgresql+psycopg://")

    def view() -> None:
        engine = create_engine(url)
        with Session(engine) as session:
            app.blocking.submit(greeting(app, "dropped"), connection=session)
            session.rollback()
        with Session(engine) as session, session.begin():
            app.blocking.submit(greeting(app, "sync"), connection=session)
        engine.dispose()

    await asyncio.to_thread(view)
    engines = [
        create_async_engine(app.url.replace("postgresql://", f"postgresql+{driver}://"))
        for driver in ("asyncpg", "psycopg")
    ]
    for engine in engines:
        async with AsyncSession(engine) as session:
            await app.submit(greeting(app, "dropped"), connection=session)
            await session.rollback()
        async with AsyncSession(engine) as session, session.begin():
            await app.submit(greeting(app, engine.driver), connection=session)
        await engine.dispose()
    assert await names(app) == ['{"name":"asyncpg"}', '{"name":"psycopg"}', '{"name":"sync"}']


async def test_a_connection_without_a_transaction_or_of_another_kind_is_refused(app: App) -> None:
    connection = await asyncpg.connect(app.url)
    try:
        with pytest.raises(InvalidInput, match="no open transaction"):
            await app.submit(greeting(app, "x"), connection=connection)
    finally:
        await connection.close()
    with pytest.raises(InvalidInput, match="must be a connection of asyncpg, psycopg or psycopg2"):
        await app.submit(greeting(app, "x"), connection=object())


async def test_submitting_begins_the_transaction_where_the_driver_does(
    app: App, tmp_path: Path
) -> None:
    """As any other first statement would; whoever does not commit has submitted nothing."""
    on_file = made(f"sqlite:///{tmp_path}/shop.db")
    async with on_file:
        for connection, place in (
            (sqlite3.connect(tmp_path / "shop.db"), on_file),
            (psycopg.connect(app.url), app),
        ):
            await place.submit(greeting(place, "forgotten"), connection=connection)
            assert await names(place) == []
            connection.rollback()
            await place.submit(greeting(place, "kept"), connection=connection)
            connection.commit()
            assert await names(place) == ['{"name":"kept"}']
            connection.close()


async def test_on_sqlite_a_connection_to_the_same_file_takes_part(tmp_path: Path) -> None:
    app = made(f"sqlite:///{tmp_path}/shop.db")
    async with app:
        connection = sqlite3.connect(tmp_path / "shop.db")
        connection.row_factory = sqlite3.Row
        connection.execute("create table article (id integer)")
        connection.execute("insert into article values (1)")
        await app.submit(greeting(app, "dropped"), connection=connection)
        connection.rollback()
        connection.execute("insert into article values (2)")
        run = await app.submit(greeting(app, "kept"), connection=connection)
        connection.commit()
        assert connection.row_factory is sqlite3.Row
        connection.close()
        assert await names(app) == ['{"name":"kept"}']
        async with working(app):
            assert await run.result(timeout="10s") == "hello kept"
        other = sqlite3.connect(tmp_path / "other.db")
        with pytest.raises(InvalidInput, match="is not on the file"):
            await app.submit(greeting(app, "x"), connection=other)
        other.close()


def test_on_sqlite_the_first_use_may_be_inside_the_transaction(tmp_path: Path) -> None:
    first, app = made(f"sqlite:///{tmp_path}/shop.db"), made(f"sqlite:///{tmp_path}/shop.db")
    first.blocking.submit(greeting(first, "sets the file up"))
    first.blocking.close()
    connection = sqlite3.connect(tmp_path / "shop.db")
    connection.execute("create table article (id integer)")
    connection.execute("insert into article values (1)")
    run = app.blocking.submit(greeting(app, "x"), connection=connection)
    connection.commit()
    connection.close()
    assert run.state() == "waiting"
    app.blocking.close()


@pytest.mark.parametrize("taken", [False, True])
async def test_a_worker_that_lost_its_lease_cannot_commit_business_rows(
    app: App, taken: bool
) -> None:
    outcome: asyncio.Queue[str] = asyncio.Queue()
    begun = 0

    @app.task
    async def publish(ctx: Context) -> None:
        nonlocal begun
        begun += 1
        if begun > 1:
            return  # What was taken away is handed out again.
        # Of its own: a handler that is told to stop may be cancelled in any statement.
        connection = await asyncpg.connect(app.url)
        try:
            if taken:
                await app.engine.revoke_lease(ctx.execution_id, reason="test")
            async with connection.transaction(), ctx.fence(connection):
                await connection.execute("insert into article values (1)")
        except asyncio.CancelledError:
            outcome.put_nowait("stopped")
            raise
        finally:
            connection.terminate()
        outcome.put_nowait("committed")

    reader = await asyncpg.connect(app.url)
    try:
        await reader.execute("create table article (id int)")
        async with working(app):
            await app.submit(publish)
            async with asyncio.timeout(PATIENCE_S):
                assert await outcome.get() == ("stopped" if taken else "committed")
        rows = await reader.fetch("select id from article")
        assert len(rows) == (0 if taken else 1)
    finally:
        await reader.close()


async def test_nobody_takes_the_lease_before_a_fenced_transaction_ends(app: App) -> None:
    connection = await asyncpg.connect(app.url)
    waited: asyncio.Queue[bool] = asyncio.Queue()

    @app.task
    async def publish(ctx: Context) -> None:
        async with connection.transaction(), ctx.fence(connection):
            revoking = asyncio.create_task(app.engine.revoke_lease(ctx.execution_id, reason="test"))
            done, _ = await asyncio.wait([revoking], timeout=0.2)
            waited.put_nowait(not done)
        await revoking

    try:
        async with working(app):
            run = await app.submit(publish)
            assert await waited.get()
            await run.cancel()
    finally:
        await connection.close()


def test_a_plain_handler_fences_a_psycopg_connection(postgres_database: str) -> None:
    app = App(postgres_database)

    @app.task
    def publish(ctx: Context) -> str:
        with psycopg.connect(postgres_database) as connection, ctx.fence(connection):
            connection.execute("create table article (id int)")
        return "committed"

    async def main() -> str:
        async with app, working(app):
            return await (await app.submit(publish)).result(timeout="20s")

    assert asyncio.run(main()) == "committed"
