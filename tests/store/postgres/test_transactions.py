"""Locks, retries and lost connections on Postgres."""

import asyncio
import random
import time
from collections.abc import AsyncIterator

import asyncpg
import pytest
from msgspec import structs

from flowfabric.core.decisions import Changes
from flowfabric.core.records import Execution, Lane
from flowfabric.core.states import LaneState
from flowfabric.errors import (
    Bug,
    InvalidInput,
    ResourceExhausted,
    RetryExhausted,
    Transport,
    Unavailable,
)
from flowfabric.outages import is_outage
from flowfabric.store.base import Key, Reader, Transaction, UniqueViolation, Unlocked
from flowfabric.store.postgres import driver, pool
from flowfabric.store.postgres.driver import Connection, connect
from flowfabric.store.postgres.store import TRIES_MAX, PostgresStore
from flowfabric.store.urls import open_store
from tests.store.records import a_lane, add_route, an_execution, change_postgres, key, save

SOMEBODY_WAITS_FOR_A_LOCK = """
select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'
"""
POOLED = """
select pg_terminate_backend(pid) from pg_stat_activity
 where datname = current_database() and application_name = 'flowfabric'
"""


@pytest.fixture
async def stranger(postgres_database: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection that is none of ours."""
    connection = await asyncpg.connect(postgres_database)
    yield connection
    await connection.close()


async def until_somebody_waits_for_a_lock(url: str) -> None:
    while not await change_postgres(url, SOMEBODY_WAITS_FOR_A_LOCK):
        pass


async def test_locks_taken_in_any_order_of_keys_do_not_deadlock(
    postgres_store: PostgresStore,
) -> None:
    executions = [an_execution() for _ in range(8)]
    await save(postgres_store, Changes(inserts=tuple(executions)))
    runs = 0

    async def body(transaction: Transaction) -> None:
        nonlocal runs
        runs += 1
        keys = [key(execution) for execution in executions]
        random.shuffle(keys)
        found = await transaction.lock(Execution, keys)
        assert list(found) == sorted(keys)
        updates = (structs.replace(row, priority=row.priority + 1) for row in found.values())
        await transaction.save(Changes(updates=tuple(updates)))

    await asyncio.gather(*(postgres_store.transact(body) for _ in range(40)))
    assert runs == 40, "no transaction had to be repeated"


async def test_a_deadlock_is_resolved_by_running_one_of_them_again(
    postgres_store: PostgresStore,
) -> None:
    await save(postgres_store, Changes(inserts=(a_lane("a"), a_lane("b"))))
    runs: list[str] = []
    both_hold_one = asyncio.Barrier(2)

    async def lock_in_turn(transaction: Transaction, first: str, second: str) -> None:
        again = first in runs
        runs.append(first)
        await transaction.lock(Lane, [(first,)])
        if not again:
            await both_hold_one.wait()
        await transaction.lock(Lane, [(second,)])

    await asyncio.gather(
        postgres_store.transact(lambda transaction: lock_in_turn(transaction, "a", "b")),
        postgres_store.transact(lambda transaction: lock_in_turn(transaction, "b", "a")),
    )
    assert len(runs) == 3


@pytest.mark.parametrize(
    ("error", "tries"), [("40001", TRIES_MAX), ("40P01", TRIES_MAX), ("55P03", 1)]
)
async def test_a_transaction_that_keeps_colliding_is_given_up(
    postgres_store: PostgresStore, postgres_database: str, error: str, tries: int
) -> None:
    """At once after a lock timeout: it has waited long, with other rows locked."""
    await change_postgres(
        postgres_database,
        f"""
        do $$ begin
            create function collide() returns trigger language plpgsql as
                $f$ begin raise exception 'again' using errcode = '{error}'; end $f$;
            create trigger collide before insert on flowfabric.lane
                for each row execute function collide();
        end $$
        """,
    )
    runs = 0

    async def body(transaction: Transaction) -> None:
        nonlocal runs
        runs += 1
        await transaction.save(Changes(inserts=(a_lane("a"),)))

    with pytest.raises(RetryExhausted, match="again"):
        await postgres_store.transact(body)
    assert runs == tries


async def test_the_time_is_read_after_the_lock_was_waited_for(
    postgres_store: PostgresStore, postgres_database: str, stranger: asyncpg.Connection
) -> None:
    await save(postgres_store, Changes(inserts=(a_lane("a"),)))
    held = stranger.transaction()
    await held.start()
    await stranger.execute("select 1 from flowfabric.lane for update")

    async def body(transaction: Transaction) -> tuple[int, int]:
        await transaction.lock(Lane, [("a",)])
        return await transaction.now_ms(), await transaction.now_ms()

    waiting = asyncio.create_task(postgres_store.transact(body))
    await until_somebody_waits_for_a_lock(postgres_database)
    released_ms = await stranger.fetchval(
        "select floor(extract(epoch from clock_timestamp()) * 1000)::bigint"
    )
    # A rollback leaves the row as it was, so nothing makes the server look at it again.
    await held.rollback()
    first, second = await waiting
    assert first == second
    assert first >= released_ms


async def test_time_without_a_lock_comes_from_the_server(postgres_store: PostgresStore) -> None:
    async def body(reader: Reader) -> int:
        return await reader.now_ms()

    assert abs(await postgres_store.read(body) - time.time() * 1000) < 60_000


async def test_unchanged_columns_are_not_written_again(
    postgres_store: PostgresStore, postgres_database: str
) -> None:
    """A trigger on a column fires when a statement mentions it, whatever the value."""
    execution = an_execution()
    await save(postgres_store, Changes(inserts=(execution,)))
    await change_postgres(
        postgres_database,
        """
        do $$ begin
            create function refuse() returns trigger language plpgsql as
                $f$ begin raise exception 'payload was written'; end $f$;
            create trigger refuse before update of payload on flowfabric.execution
                for each row execute function refuse();
        end $$
        """,
    )

    async def body(transaction: Transaction) -> None:
        await transaction.lock(Execution, [key(execution)])
        await transaction.save(Changes(updates=(structs.replace(execution, priority=1),)))
        await transaction.save(Changes(updates=(structs.replace(execution, priority=2),)))

    await postgres_store.transact(body)
    with pytest.raises(Transport, match="payload was written"):
        await save(postgres_store, Changes(updates=(structs.replace(execution, priority=3),)))


async def test_going_on_after_a_failed_statement_is_a_bug(postgres_store: PostgresStore) -> None:
    await save(postgres_store, Changes(inserts=(a_lane("a"),)))

    async def body(transaction: Transaction) -> None:
        with pytest.raises(asyncpg.UniqueViolationError):
            await transaction.save(Changes(inserts=(a_lane("a"),)))

    with pytest.raises(Bug, match="went on after"):
        await postgres_store.transact(body)


async def test_a_lost_connection_is_reported_as_worth_trying_again(
    postgres_store: PostgresStore, postgres_database: str
) -> None:
    async def body(transaction: Transaction) -> None:
        await transaction.now_ms()
        await change_postgres(postgres_database, POOLED)
        await transaction.save(Changes(inserts=(a_lane("a"),)))

    with pytest.raises(Transport) as caught:
        await postgres_store.transact(body)
    assert caught.value.retryable


async def test_connections_that_died_in_the_pool_are_replaced(
    postgres_store: PostgresStore, postgres_database: str
) -> None:
    await asyncio.gather(*(postgres_store.ping() for _ in range(10)))
    await change_postgres(postgres_database, POOLED)
    await asyncio.gather(
        *(save(postgres_store, Changes(inserts=(a_lane(str(n)),))) for n in range(10))
    )


async def test_a_pool_that_is_used_up_says_so(postgres_database: str) -> None:
    store = PostgresStore(postgres_database, pool_max=1, acquire_timeout_s=0.01)
    await store.open()

    async def body(transaction: Transaction) -> None:
        with pytest.raises(ResourceExhausted, match="all 1 are in use"):
            await store.ping()

    await store.transact(body)
    await store.close()


async def test_a_server_that_is_not_there_is_a_transport_error() -> None:
    with pytest.raises(Transport) as caught:
        await PostgresStore("postgresql://nobody@127.0.0.1:1/nothing").open()
    assert caught.value.retryable


async def test_a_cancelled_transaction_leaves_a_usable_connection(
    postgres_database: str, stranger: asyncpg.Connection
) -> None:
    store = PostgresStore(postgres_database, pool_max=1)
    await store.open()
    await save(store, Changes(inserts=(a_lane("a"),)))

    async def body(transaction: Transaction) -> None:
        await transaction.lock(Lane, [("a",)])
        await transaction.save(Changes(updates=(a_lane("a", LaneState.PAUSED),)))

    async with stranger.transaction():
        await stranger.execute("select 1 from flowfabric.lane for update")
        waiting = asyncio.create_task(store.transact(body))
        await until_somebody_waits_for_a_lock(postgres_database)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await store.transact(body)
    await store.close()


async def test_a_caller_who_gives_up_leaves_a_connection_that_the_next_can_use(
    postgres_database: str, stranger: asyncpg.Connection
) -> None:
    store = open_store(postgres_database, pool_max=1)
    await store.open()
    async with stranger.transaction():
        await stranger.execute("lock table flowfabric.lane")
        waiting = asyncio.create_task(store.execute_alone("list_lanes", after="", limit=1))
        await until_somebody_waits_for_a_lock(postgres_database)
        waiting.cancel()
        await store.ping()
    assert waiting.cancelled()
    await store.close()


async def test_a_transaction_cancelled_while_it_commits_does_not_stay_open(
    postgres_database: str, stranger: asyncpg.Connection
) -> None:
    await change_postgres(
        postgres_database,
        """
        do $$ begin
            create function wait_for_stranger() returns trigger language plpgsql as
                $f$ begin perform pg_advisory_xact_lock(1); return null; end $f$;
            create constraint trigger wait_for_stranger after insert on flowfabric.lane
                deferrable initially deferred
                for each row execute function wait_for_stranger();
        end $$
        """,
    )
    store = PostgresStore(postgres_database, pool_max=1)
    await store.open()
    async with stranger.transaction():
        await stranger.execute("select pg_advisory_xact_lock(1)")
        committing = asyncio.create_task(save(store, Changes(inserts=(a_lane("a"),))))
        await until_somebody_waits_for_a_lock(postgres_database)
        committing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await committing
        still_open = (
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and application_name = 'flowfabric' and state <> 'idle'"
        )
        async with asyncio.timeout(10):
            while await change_postgres(postgres_database, still_open) != [(0,)]:
                pass
    lanes = await change_postgres(postgres_database, "select lane_id from flowfabric.lane")
    assert lanes == [("default",)]
    await save(store, Changes(inserts=(a_lane("a"),)))
    await store.close()


async def test_a_closed_store_says_so(postgres_database: str) -> None:
    store = PostgresStore(postgres_database)
    await store.open()
    await store.close()
    with pytest.raises(Unavailable, match="not open"):
        await store.ping()


async def test_a_pooler_that_refuses_settings_is_noticed_before_the_schema_is_there(
    empty_postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "connect", without_settings)
    store = PostgresStore(empty_postgres_database)
    assert await store.migrate()
    await store.open()
    await save(store, Changes(inserts=(a_lane("a"),)))
    await store.close()


async def test_a_setting_that_a_pooler_refuses_for_good_is_no_outage(
    postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: object, **rest: object) -> asyncpg.Connection:
        raise asyncpg.ProtocolViolationError("unsupported startup parameter: options")

    monkeypatch.setattr(driver, "connect", refuse)
    for asked in (PostgresStore.migrate, PostgresStore.open):
        with pytest.raises(Transport, match="unsupported startup parameter") as told:
            await asked(PostgresStore(postgres_database))
        assert not is_outage(told.value)


async def without_settings(
    url: str,
    *,
    timeout: float,
    command_timeout: float,
    statement_cache_size: int,
    max_cached_statement_lifetime: int,
    max_cacheable_statement_size: int,
    server_settings: dict[str, str],
) -> Connection:
    """As PgBouncer in transaction mode."""
    if server_settings:
        raise asyncpg.ProtocolViolationError("unsupported startup parameter: search_path")
    assert statement_cache_size == 0
    return await connect(
        url,
        timeout=timeout,
        command_timeout=command_timeout,
        statement_cache_size=statement_cache_size,
        max_cached_statement_lifetime=max_cached_statement_lifetime,
        max_cacheable_statement_size=max_cacheable_statement_size,
        server_settings=server_settings,
    )


async def test_everything_works_without_session_state(postgres_database: str) -> None:
    """Behind a transaction-mode pooler every transaction brings its own settings."""
    store = PostgresStore(postgres_database, statement_cache_size=0)
    await store.open()
    execution = an_execution()
    await add_route(store, execution)
    await save(store, Changes(inserts=(execution, a_lane("a"))))
    with pytest.raises(UniqueViolation):
        await save(store, Changes(inserts=(a_lane("a"),)))
    assert len(await store.execute_alone("get_deployment")) == 1

    async def body(reader: Reader) -> list[Execution]:
        return list((await reader.get(Execution, [key(execution)])).values())

    assert await store.read(body) == [execution]
    settings = await change_postgres(
        postgres_database,
        "select count(*) from pg_stat_activity"
        " where datname = current_database() and application_name = 'flowfabric'",
    )
    assert settings == [(0,)]
    await store.close()


@pytest.mark.parametrize("url", ["mysql://host/db", "sqlite:///", "flowfabric.db", ""])
def test_an_unknown_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="url"):
        open_store(url)


async def test_who_waits_for_a_connection_of_a_store_that_is_closed_is_told_so(
    postgres_database: str,
) -> None:
    store = open_store(postgres_database, pool_max=1)
    await store.open()
    held, may_end = asyncio.Event(), asyncio.Event()

    async def hold(reader: Reader) -> int:
        held.set()
        await may_end.wait()
        return await reader.now_ms()

    async def ask(reader: Reader) -> int:
        return await reader.now_ms()

    holding = asyncio.create_task(store.read(hold))
    await held.wait()
    waiting = asyncio.create_task(store.read(ask))
    await asyncio.sleep(0)
    closing = asyncio.create_task(store.close())
    for _ in range(10):
        await asyncio.sleep(0)
    may_end.set()

    assert await holding > 0
    with pytest.raises(Unavailable, match="not open"):
        await waiting
    await closing


async def test_callers_that_take_turns_share_a_connection_and_others_get_their_own(
    postgres_database: str, stranger: asyncpg.Connection
) -> None:
    store = open_store(postgres_database, pool_max=2)
    await store.open()
    opened = (
        "select count(*) from pg_stat_activity"
        " where datname = current_database() and application_name = 'flowfabric'"
    )
    for _ in range(5):
        await store.ping()
    assert await stranger.fetchval(opened) == 1
    async with stranger.transaction():
        await stranger.execute("lock table flowfabric.lane in access exclusive mode")
        reading = asyncio.create_task(store.read(the_default_lane))
        for _ in range(5):
            await store.ping()
        assert await stranger.fetchval(opened) == 2
    assert (await reading).keys() == {("default",)}
    await store.close()


async def the_default_lane(reader: Reader) -> dict[Key, Lane]:
    return await reader.get(Lane, [("default",)])


async def test_a_connection_that_lay_idle_for_long_is_not_trusted(
    postgres_database: str, stranger: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "IDLE_LIFETIME_S", 0.0)
    store = open_store(postgres_database, pool_max=1)
    await store.open()
    servers = (
        "select pid from pg_stat_activity"
        " where datname = current_database() and application_name = 'flowfabric'"
    )
    await store.ping()
    before = await stranger.fetch(servers)
    await store.ping()
    after = await stranger.fetch(servers)
    await store.close()
    assert before
    assert before != after


async def test_a_read_without_locks_outlives_a_connection_that_died(
    postgres_store: PostgresStore, postgres_database: str
) -> None:
    async def look(unlocked: Unlocked) -> int:
        return await unlocked.now_ms()

    await postgres_store.ping()
    await change_postgres(postgres_database, POOLED)
    assert await postgres_store.try_unlocked(look)
