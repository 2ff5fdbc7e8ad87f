"""A program's own transaction that was begun without a turn to write."""

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from flowfabric import Engine
from flowfabric.core.creation import NewExecution
from flowfabric.errors import RetryExhausted
from flowfabric.store.base import Transaction
from flowfabric.store.sqlite.store import SqliteStore


@pytest.fixture
async def engine(path: Path) -> AsyncIterator[Engine]:
    engine = await Engine.open(SqliteStore(str(path)))
    yield engine
    await engine.close()


@pytest.fixture
def theirs(engine: Engine, path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as connection:
        connection.execute("begin")
        yield connection


def write_elsewhere(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as other:
        other.execute("update deployment set created_at_ms = created_at_ms + 1")


def test_nobody_writes_between_what_we_read_and_what_we_write(
    engine: Engine, theirs: sqlite3.Connection, path: Path
) -> None:
    async def body(transaction: Transaction) -> None:
        await transaction.now_ms()
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            write_elsewhere(path)

    engine.store.transact_on_sync(theirs, body)
    theirs.execute("commit")
    write_elsewhere(path)


async def test_a_transaction_that_read_too_early_is_told_how_to_begin(
    engine: Engine, theirs: sqlite3.Connection, path: Path
) -> None:
    asked = NewExecution(execution_kind="greet")
    theirs.execute("select * from deployment").fetchall()
    write_elsewhere(path)
    with pytest.raises(RetryExhausted, match="BEGIN IMMEDIATE"):
        await engine.on(theirs).create_execution(asked)
    theirs.execute("rollback")
    theirs.execute("begin immediate")
    created = await engine.on(theirs).create_execution(asked)
    theirs.execute("commit")
    assert (await engine.describe_execution(created.execution_id)) is not None
