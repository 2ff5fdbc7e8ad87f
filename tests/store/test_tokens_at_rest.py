"""Whoever reads the database without the table of keys can deliver nothing."""

import sqlite3
from collections.abc import AsyncIterator, Callable

import asyncpg
import pytest

from flowfabric import Engine, connect
from flowfabric.core.conditions import ByName, Single
from flowfabric.core.creation import NewExecution
from flowfabric.core.waitpoints import WaitpointToken


@pytest.fixture
def sqlite_url(new_database: Callable[[str], str]) -> str:
    return new_database("sqlite-file")


async def used(engine: Engine) -> list[WaitpointToken]:
    """Tokens of a waitpoint that waits, of one that was signalled and of one made beforehand."""
    found: list[WaitpointToken] = []
    for signalled in (False, True):
        await engine.create_execution(NewExecution(execution_kind="work"))
        claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
        assert claimed is not None
        made = await engine.create_waitpoint(claimed.handle, "later", expires_in_ms=60_000)
        outcome = await engine.suspend(
            claimed.handle,
            resume_condition=Single("gate", ByName("approved")),
            idempotency_key="once",
        )
        found += [made.waitpoint_token, outcome.details.waitpoint_token]
        if signalled:
            await engine.deliver_signal(
                claimed.execution_id,
                outcome.details.waitpoint_id,
                waitpoint_token=outcome.details.waitpoint_token,
                signal_name="approved",
                idempotency_key="click",
            )
    return found


def assert_unknown(tokens: list[WaitpointToken], stored: str) -> None:
    assert "approved" in stored
    for token in tokens:
        assert token.reveal().partition(":")[2] not in stored


async def test_a_file_holds_no_token(sqlite_url: str) -> None:
    async with await connect(sqlite_url) as engine:
        tokens = await used(engine)
    connection = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))
    try:
        assert_unknown(tokens, "\n".join(connection.iterdump()))
    finally:
        connection.close()


@pytest.fixture
async def connection(
    postgres_database: str,
) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    opened: asyncpg.Connection[asyncpg.Record] = await asyncpg.connect(postgres_database)
    yield opened
    await opened.close()


async def test_a_database_holds_no_token(
    postgres_database: str, connection: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    async with await connect(postgres_database) as engine:
        tokens = await used(engine)
    tables = await connection.fetch(
        "select format('%I.%I', schemaname, tablename) from pg_tables where schemaname = $1",
        "flowfabric",
    )
    stored = [
        str(row[0])
        for (table,) in tables
        for row in await connection.fetch(f"select t::text from {table} as t")
    ]
    assert_unknown(tokens, "\n".join(stored))
