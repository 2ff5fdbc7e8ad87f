"""Signals inside the caller's own transaction: delivered if and when it commits."""

import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import psycopg
import pytest

from flowfabric import Engine
from flowfabric.core.signals import SignalAccepted
from flowfabric.core.states import PublicState
from flowfabric.errors import InvalidToken
from tests.conformance.given import Given
from tests.conformance.pausing import Pause, paused


@asynccontextmanager
async def callers_transaction(
    store_url: str, *, commits: bool
) -> "AsyncIterator[asyncpg.Connection[asyncpg.Record]]":
    connection = await asyncpg.connect(store_url)
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield connection
        await (transaction.commit() if commits else transaction.rollback())
    finally:
        await connection.close()


async def state_after(engine: Engine, store_url: str, pause: Pause, *, commits: bool) -> object:
    """Deliver on a connection of the caller's, and see what is left of it."""
    if store_url.startswith("postgresql"):
        async with callers_transaction(store_url, commits=commits) as connection:
            answer = await engine.deliver_signal_on(
                connection,
                pause.execution_id,
                pause.waitpoint_id,
                waitpoint_token=pause.token,
                signal_name="approved",
            )
    else:
        own = sqlite3.connect(store_url.removeprefix("sqlite:///"), isolation_level=None)
        own.execute("begin immediate")
        answer = engine.deliver_signal_on_sync(
            own,
            pause.execution_id,
            pause.waitpoint_id,
            waitpoint_token=pause.token,
            signal_name="approved",
        )
        own.execute("commit" if commits else "rollback")
        own.close()
    assert isinstance(answer, SignalAccepted)
    assert answer.resumed
    return await engine.read_execution_state(pause.execution_id)


@pytest.mark.parametrize("store_url", ["sqlite-file", "postgres"], indirect=True)
async def test_a_signal_commits_with_the_callers_transaction(
    engine: Engine, given: Given, store_url: str
) -> None:
    pause = await paused(given)
    assert await state_after(engine, store_url, pause, commits=False) is PublicState.SUSPENDED
    assert await state_after(engine, store_url, pause, commits=True) is PublicState.WAITING


@pytest.mark.parametrize("store_url", ["postgres"], indirect=True)
async def test_a_signal_by_another_driver_is_told_of_if_it_commits(
    engine: Engine, given: Given, store_url: str
) -> None:
    pause = await paused(given)
    before = await engine.last_event_id()
    for ending in (psycopg.Connection.rollback, psycopg.Connection.commit):
        with psycopg.connect(store_url) as connection:
            engine.deliver_signal_on_sync(
                connection,
                pause.execution_id,
                pause.waitpoint_id,
                waitpoint_token=pause.token,
                signal_name="approved",
                source_identity='{a,"b"} ü',
            )
            ending(connection)
    (event,) = (await engine.read_events(after=before)).events
    assert (event.execution_id, event.event_type) == (pause.execution_id, "satisfied")
    assert json.loads(event.details or "")["source_identity"] == '{a,"b"} ü'
    assert await engine.read_execution_state(pause.execution_id) is PublicState.WAITING


@pytest.mark.parametrize("store_url", ["postgres"], indirect=True)
async def test_a_wrong_token_is_refused_there_too(
    engine: Engine, given: Given, store_url: str
) -> None:
    pause = await paused(given)
    async with callers_transaction(store_url, commits=True) as connection:
        with pytest.raises(InvalidToken):
            await engine.deliver_signal_on(
                connection,
                pause.execution_id,
                pause.waitpoint_id,
                waitpoint_token="k1:" + "0" * 64,
                signal_name="approved",
            )
