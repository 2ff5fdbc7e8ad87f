"""Signals and flows inside the user's own transaction, whatever connection they bring."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal

import aiosqlite
import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from flowfabric import App, Context
from flowfabric.core.states import PublicState
from flowfabric.errors import InvalidToken, WaitpointNotFound
from tests.apps import reached, working

Ending = Literal["commit", "rollback"]
ENDINGS: tuple[Ending, ...] = ("rollback", "commit")
Opening = Callable[[str, Ending], AbstractAsyncContextManager[object]]


@asynccontextmanager
async def by_asyncpg(url: str, ending: Ending) -> AsyncIterator[object]:
    connection = await asyncpg.connect(url)
    try:
        transaction = connection.transaction()
        await transaction.start()
        yield connection
        await (transaction.commit() if ending == "commit" else transaction.rollback())
    finally:
        await connection.close()


@asynccontextmanager
async def by_psycopg(url: str, ending: Ending) -> AsyncIterator[object]:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield connection
        await (connection.commit() if ending == "commit" else connection.rollback())


@asynccontextmanager
async def by_session(url: str, ending: Ending) -> AsyncIterator[object]:
    scheme = "postgresql+asyncpg://" if url.startswith("postgresql") else "sqlite+aiosqlite://"
    engine = create_async_engine(scheme + url.partition("://")[2])
    async with AsyncSession(engine) as session:
        yield session
        await (session.commit() if ending == "commit" else session.rollback())
    await engine.dispose()


@asynccontextmanager
async def by_sqlite3(url: str, ending: Ending) -> AsyncIterator[object]:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    yield connection
    connection.execute(ending)
    connection.close()


@asynccontextmanager
async def by_aiosqlite(url: str, ending: Ending) -> AsyncIterator[object]:
    async with aiosqlite.connect(url.removeprefix("sqlite:///")) as connection:
        yield connection
        await (connection.commit() if ending == "commit" else connection.rollback())


KINDS: dict[str, list[Opening]] = {
    "postgres": [by_asyncpg, by_psycopg, by_session],
    "sqlite-file": [by_sqlite3, by_aiosqlite, by_session],
}
EACH = [
    pytest.param(store, opening, id=f"{store} {opening.__name__}")
    for store, openings in KINDS.items()
    for opening in openings
]


def made(url: str) -> App:
    app = App(url)

    @app.task
    async def gate(ctx: Context) -> object:
        return (await ctx.wait_for_signal("go")).payload

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    return app


@pytest.mark.parametrize(("store_url", "opening"), EACH, indirect=["store_url"])
async def test_a_signal_is_sent_if_and_when_the_transaction_commits(
    store_url: str, opening: Opening
) -> None:
    async with made(store_url) as app, working(app):
        run = await app.submit(app.tasks["gate"]())
        await reached(run, PublicState.SUSPENDED)
        token = await app.signals.token(run.execution_id, "go")
        async with opening(store_url, "rollback") as connection:
            assert (await run.signal("go", 1, connection=connection)).resumed
        async with opening(store_url, "rollback") as connection:
            assert (await app.signals.deliver(token, "go", 2, connection=connection)).resumed
        async with opening(store_url, "commit") as connection:
            with pytest.raises(InvalidToken):
                await app.signals.deliver("fft_x", "go", connection=connection)
            with pytest.raises(WaitpointNotFound):
                await app.signals.send(run.execution_id, "other", keep=False, connection=connection)
            sent = await app.signals.send(run.execution_id, "go", 3, connection=connection)
            assert sent.resumed
        assert await run.result(timeout="20s") == 3


@pytest.mark.parametrize(("store_url", "opening"), EACH, indirect=["store_url"])
async def test_a_flow_starts_if_and_when_the_transaction_commits(
    store_url: str, opening: Opening
) -> None:
    async with made(store_url) as app, working(app):
        for ending in ENDINGS:
            flow = app.flow("doubling", tags={"shop.order": "7"})
            first = flow.add(app.tasks["double"](1), name="first")
            last = flow.add(app.tasks["double"](21), join=[first], name="last")
            async with opening(store_url, ending) as connection:
                run = await flow.start(connection=connection)
            if ending == "rollback":
                assert await app.engine.describe_flow(run.flow_id) is None
            else:
                assert await run.result(last, timeout="20s") == 42


@pytest.mark.parametrize("store_url", ["postgres", "sqlite-file"], indirect=True)
async def test_code_without_a_loop_signals_in_its_transaction(store_url: str) -> None:
    async with made(store_url) as app, working(app):
        run = await app.submit(app.tasks["gate"]())
        postgres = store_url.startswith("postgresql")
        path = store_url.partition("://")[2]
        engine = create_engine(f"{'postgresql+psycopg' if postgres else 'sqlite'}://{path}")

        def view() -> None:
            blocking = app.blocking
            with Session(engine) as session:
                blocking.signals.send(run.execution_id, "go", 1, connection=session)
                session.rollback()
            with Session(engine) as session:
                blocking.run(app.tasks["gate"], run.execution_id).signal("go", connection=session)
                session.rollback()
            with Session(engine) as session, session.begin():
                answer = blocking.signals.send(run.execution_id, "go", 2, connection=session)
                assert answer.resumed or answer.kept

        await asyncio.to_thread(view)
        assert await run.result(timeout="20s") == 2
        await asyncio.to_thread(app.blocking.close)
        engine.dispose()
