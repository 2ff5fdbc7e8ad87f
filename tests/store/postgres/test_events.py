"""Readers of the log miss nothing, whatever the writers do, and wait for nobody else."""

import asyncio
import random
import re
from collections.abc import AsyncIterator

import asyncpg
import pytest

from flowfabric.core.bounds import BATCH_MAX
from flowfabric.core.decisions import Changes
from flowfabric.store.base import EventPage, Transaction
from flowfabric.store.mapping import WINDOW
from flowfabric.store.postgres.events import WRITERS, EventLog
from flowfabric.store.postgres.statements import EVENT_ROWS_MAX, EVENTS_PER_ROW
from flowfabric.store.postgres.store import PostgresStore
from flowfabric.store.postgres.transaction import STATEMENTS
from flowfabric.store.statements import load
from tests.store.records import an_event, an_execution, change_postgres, save

INSERT = """
insert into flowfabric.event
       (occurred_at_ms, execution_id, partition_key, category, event_type, namespace, reason)
values (1, array[gen_random_uuid()], array[7], 'completion', 'success', 'tests', $1)
"""


class Writer:
    """A transaction of somebody's that writes events, or something else."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.connection = connection
        self.transaction = connection.transaction()

    async def begin(self, *reasons: str) -> None:
        await self.transaction.start()
        for reason in reasons:
            await self.connection.execute(INSERT, reason)


@pytest.fixture
async def writer(postgres_database: str) -> AsyncIterator[Writer]:
    connection = await asyncpg.connect(postgres_database)
    yield Writer(connection)
    await connection.close()


@pytest.fixture
async def other(postgres_database: str) -> AsyncIterator[Writer]:
    connection = await asyncpg.connect(postgres_database)
    yield Writer(connection)
    await connection.close()


async def append(store: PostgresStore, *reasons: str) -> None:
    execution = an_execution()
    await save(store, Changes(events=tuple(an_event(execution, reason) for reason in reasons)))


def seen(page: EventPage) -> tuple[list[str | None], int]:
    """What the page holds, and how many rows of the log it has come to the end of."""
    return [event.reason for event in page.events], page.cursor // EVENTS_PER_ROW


async def test_an_event_of_a_slow_writer_is_waited_for(
    postgres_store: PostgresStore, writer: Writer
) -> None:
    await writer.begin("slow")
    await append(postgres_store, "fast")
    assert seen(await postgres_store.read_events(after=0, limit=10)) == ([], 0)

    reading = asyncio.create_task(postgres_store.read_events(after=0, limit=10, wait_s=60))
    await writer.transaction.commit()
    assert seen(await reading) == (["slow", "fast"], 2)


async def test_events_before_the_missing_one_are_not_held_back(
    postgres_store: PostgresStore, writer: Writer
) -> None:
    await append(postgres_store, "before")
    await writer.begin("slow")
    await append(postgres_store, "after")
    assert seen(await postgres_store.read_events(after=0, limit=10, wait_s=60)) == (["before"], 1)
    assert seen(await postgres_store.read_events(after=EVENTS_PER_ROW, limit=10)) == ([], 1)
    await writer.transaction.commit()
    assert seen(await postgres_store.read_events(after=EVENTS_PER_ROW, limit=10)) == (
        ["slow", "after"],
        3,
    )


async def test_a_rolled_back_event_is_passed(postgres_store: PostgresStore, writer: Writer) -> None:
    await writer.begin("never")
    await append(postgres_store, "kept")
    reading = asyncio.create_task(postgres_store.read_events(after=0, limit=10, wait_s=60))
    await writer.transaction.rollback()
    assert seen(await reading) == (["kept"], 2)
    assert seen(await postgres_store.read_events(after=0, limit=10)) == (["kept"], 2)


async def test_a_writer_that_dies_is_passed(
    postgres_store: PostgresStore, postgres_database: str, writer: Writer
) -> None:
    await writer.begin("never")
    await append(postgres_store, "kept")
    pid = writer.connection.get_server_pid()
    await change_postgres(postgres_database, f"select pg_terminate_backend({pid})")
    assert seen(await postgres_store.read_events(after=0, limit=10, wait_s=60)) == (["kept"], 2)


async def test_a_strangers_long_transaction_is_not_waited_for(
    postgres_store: PostgresStore, writer: Writer, other: Writer
) -> None:
    await other.begin()
    await other.connection.execute("insert into flowfabric.lane values ('x', 'active', 1, 'me')")
    await other.connection.execute("select count(*) from flowfabric.event")
    await writer.begin("never")
    await append(postgres_store, "kept")
    await writer.transaction.rollback()
    assert seen(await postgres_store.read_events(after=0, limit=10)) == (["kept"], 2)
    await other.transaction.rollback()


async def test_writers_that_begin_later_are_not_waited_for(
    postgres_store: PostgresStore, postgres_database: str, writer: Writer, other: Writer
) -> None:
    looked = asyncio.Event()

    async def writers() -> frozenset[str]:
        rows = await change_postgres(postgres_database, WRITERS)
        looked.set()
        return frozenset(str(name) for (name,) in rows)

    log = EventLog(postgres_store.execute_alone, writers)
    await writer.begin("never")
    await append(postgres_store, "kept")
    reading = asyncio.create_task(log.page(after=0, limit=10, category=None, wait_s=60))
    await looked.wait()
    await other.begin("later")
    await writer.transaction.rollback()
    assert seen(await reading) == (["kept"], 2)
    await other.transaction.rollback()


async def test_one_wait_is_enough_for_everything_that_was_rolled_back(
    postgres_store: PostgresStore, postgres_database: str, writer: Writer, other: Writer
) -> None:
    asked = 0

    async def writers() -> frozenset[str]:
        nonlocal asked
        asked += 1
        rows = await change_postgres(postgres_database, WRITERS)
        return frozenset(str(name) for (name,) in rows)

    log = EventLog(postgres_store.execute_alone, writers)
    await writer.begin("never")
    await append(postgres_store, "first")
    await other.begin("never")
    await append(postgres_store, "second")
    await writer.transaction.rollback()
    await other.transaction.rollback()
    first = await log.page(after=0, limit=1, category=None, wait_s=60)
    assert seen(first) == (["first"], 2)
    assert asked == 1
    second = await log.page(after=first.cursor, limit=1, category=None, wait_s=60)
    assert seen(second) == (["second"], 4)
    assert asked == 1


async def test_what_retention_deleted_is_passed(
    postgres_store: PostgresStore, postgres_database: str
) -> None:
    for reason in "abcde":
        await append(postgres_store, reason)
    deleted = ", ".join(str(row * EVENTS_PER_ROW) for row in (1, 2, 4))
    await change_postgres(
        postgres_database, f"delete from flowfabric.event where event_id in ({deleted})"
    )
    first = await postgres_store.read_events(after=0, limit=10)
    assert seen(first) == (["c", "e"], 5)


async def append_alike(store: PostgresStore, count: int) -> list[str]:
    """Events of a kind, each of an execution of its own; returns whose they are, in order."""
    events = tuple(an_event(an_execution(), "same") for _ in range(count))
    await save(store, Changes(events=events))
    return [event.execution_id for event in events]


async def test_a_page_may_end_within_a_row(postgres_store: PostgresStore) -> None:
    expected = await append_alike(postgres_store, 3) + await append_alike(postgres_store, 2)
    pages = []
    cursor = 0
    for _ in range(4):
        page = await postgres_store.read_events(after=cursor, limit=2)
        pages.append([event.execution_id for event in page.events])
        cursor = page.cursor
    assert pages == [expected[:2], expected[2:4], expected[4:], []]
    assert cursor == 2 * EVENTS_PER_ROW + 1


async def test_ids_are_handed_out_by_as_many_as_a_row_holds(postgres_database: str) -> None:
    assert await change_postgres(
        postgres_database,
        "select seqstart, seqincrement from pg_sequence where seqrelid ="
        " pg_get_serial_sequence('flowfabric.event', 'event_id')::regclass",
    ) == [(EVENTS_PER_ROW, EVENTS_PER_ROW)]


@pytest.mark.parametrize("name", ["event_window", "read_events"])
def test_statements_go_from_row_to_row_by_as_many_ids_as_a_row_holds(name: str) -> None:
    numbers = re.findall(r"\b\d{2,}\b", load(name, STATEMENTS))
    assert set(numbers) == {str(EVENTS_PER_ROW)}


def test_the_events_of_a_batch_fit_in_a_row() -> None:
    """Statements that take a batch append one row for all of it."""
    assert BATCH_MAX <= EVENTS_PER_ROW


async def test_more_events_than_a_row_holds_take_several(postgres_store: PostgresStore) -> None:
    expected = await append_alike(postgres_store, EVENTS_PER_ROW + 1)
    page = await postgres_store.read_events(after=0, limit=10_000)
    assert [event.execution_id for event in page.events] == expected
    assert page.cursor == 2 * EVENTS_PER_ROW


async def test_more_rows_than_a_statement_writes_take_several(
    postgres_store: PostgresStore,
) -> None:
    reasons = [str(number) for number in range(2 * EVENT_ROWS_MAX + 1)]
    await append(postgres_store, *reasons)
    page = await postgres_store.read_events(after=0, limit=10_000)
    assert [event.reason for event in page.events] == reasons


async def test_events_of_a_kind_stand_together_and_those_of_an_execution_in_order(
    postgres_store: PostgresStore,
) -> None:
    one, two = an_execution(), an_execution()
    await save(
        postgres_store,
        Changes(
            events=(an_event(one, "a"), an_event(one, "b"), an_event(two, "a"), an_event(two, "c"))
        ),
    )
    page = await postgres_store.read_events(after=0, limit=10)
    assert [(event.execution_id, event.reason) for event in page.events] == [
        (one.execution_id, "a"),
        (two.execution_id, "a"),
        (one.execution_id, "b"),
        (two.execution_id, "c"),
    ]
    assert page.cursor == 3 * EVENTS_PER_ROW


async def test_a_page_looks_through_a_bounded_number_of_events_for_its_category(
    postgres_store: PostgresStore,
) -> None:
    for _ in range(4):
        await append(postgres_store, *([""] * EVENTS_PER_ROW))
    rows_looked_through = -(-WINDOW // EVENTS_PER_ROW)
    page = await postgres_store.read_events(after=0, limit=10, category="operator")
    assert seen(page) == ([], rows_looked_through)
    last = await postgres_store.read_events(after=page.cursor, limit=10, category="operator")
    assert seen(last) == ([], 4)


async def test_a_reader_beside_many_writers_sees_each_committed_event_once(
    postgres_store: PostgresStore,
) -> None:
    chance = random.Random(1)
    committed: list[str] = []
    done = asyncio.Event()

    async def write(number: int) -> None:
        for turn in range(20):
            names = [f"{number}.{turn}.{part}" for part in range(chance.randint(1, 3))]
            fails = chance.random() < 0.3

            async def body(
                transaction: Transaction, names: list[str] = names, fails: bool = fails
            ) -> None:
                for name in names:
                    event = an_event(an_execution(), name)
                    await transaction.save(Changes(events=(event,)))
                if fails:
                    raise LookupError("rolled back")

            try:
                await postgres_store.transact(body)
            except LookupError:
                continue
            committed.extend(names)

    async def read() -> list[str | None]:
        found: list[str | None] = []
        cursor = 0
        while True:
            finished = done.is_set()
            page = await postgres_store.read_events(after=cursor, limit=7, wait_s=60)
            ids = [event.event_id for event in page.events]
            assert ids == sorted(ids)
            assert all(cursor < event_id <= page.cursor for event_id in ids)
            found += [event.reason for event in page.events]
            if finished and page.cursor == cursor:
                return found
            cursor = page.cursor

    reading = asyncio.create_task(read())
    await asyncio.gather(*(write(number) for number in range(6)))
    done.set()
    found = await reading
    assert len(found) == len(committed)
    assert set(found) == set(committed)
