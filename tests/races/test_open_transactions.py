"""Somebody submits in a transaction that stays open: strangers must not notice."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable

import asyncpg
import psycopg
import pytest

from flowfabric import App, Engine
from flowfabric.core import bounds
from flowfabric.core.creation import NewExecution
from flowfabric.core.results import Created, CreateResult, Duplicate
from flowfabric.core.schedules import ScheduleDefinition
from flowfabric.errors import KeyUndecided
from flowfabric.submission import Submissions
from tests.races.rival import Rival

AT_ONCE_S = 6.0
"""Below the time anybody waits for a lock or for a key, however busy the machine."""


def new(kind: str = "work", key: str | None = None, lane: str = "default") -> NewExecution:
    return NewExecution(execution_kind=kind, idempotency_key=key, lane_id=lane)


def stranger(engine: Engine) -> Engine:
    """The same database through an engine that has met no route yet."""
    return Engine(engine.store, engine.config, engine.deployment)


async def at_once(answer: Awaitable[CreateResult]) -> CreateResult:
    async with asyncio.timeout(AT_ONCE_S):
        return await answer


@pytest.fixture
async def theirs(
    postgres_database: str,
) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    connection = await asyncpg.connect(postgres_database)
    yield connection
    await connection.close()


async def test_a_new_kind_in_an_open_transaction_holds_up_nobody(
    engine: Engine, theirs: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    async with theirs.transaction():
        await engine.create_executions_on(theirs, [new("fresh", lane="fresh")])

        answer = await at_once(stranger(engine).create_execution(new("fresh", lane="fresh")))
        assert isinstance(answer, Created)


async def test_nor_does_one_submitted_without_an_event_loop(
    engine: Engine, postgres_database: str
) -> None:
    with psycopg.connect(postgres_database) as connection:
        engine.create_executions_on_sync(connection, [new("fresh", lane="fresh")])

        answer = await at_once(stranger(engine).create_execution(new("fresh", lane="fresh")))
        assert isinstance(answer, Created)
        connection.rollback()


async def test_nor_does_a_schedule_that_has_to_wait_while_it_fires(
    engine: Engine, rival: Rival
) -> None:
    await engine.upsert_schedule(
        ScheduleDefinition(
            schedule_id="often", execution_kind="fresh", lane_id="fresh", every_ms=3_600_000
        )
    )
    due_ms = time.time_ns() // 1_000_000 - 1_000
    await rival.execute(f"update schedule set next_due_at_ms = {due_ms}")
    key = f"insert into idempotency_guard values ('default', 'schedule:often:{due_ms}', '', '')"
    async with rival.holding(key):
        (firing,) = await rival.queued(engine.fire_due_schedules())
        answer = await at_once(stranger(engine).create_execution(new("fresh", lane="fresh")))
        assert isinstance(answer, Created)
        assert not firing.done()
        firing.cancel()


async def test_a_route_outlives_the_rollback_of_who_used_it_first(
    engine: Engine, theirs: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    transaction = theirs.transaction()
    await transaction.start()
    await engine.create_executions_on(theirs, [new("fresh")])
    await transaction.rollback()

    created = await engine.create_execution(new("fresh"))
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    assert claimed.execution_id == created.execution_id


async def test_innocents_of_a_group_do_not_wait_for_a_key_that_is_being_decided(
    engine: Engine, theirs: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    submissions = Submissions(engine)
    async with theirs.transaction():
        (first,) = await engine.create_executions_on(theirs, [new(key="order-1")])
        blocked = asyncio.create_task(submissions.submit(engine.check_request(new(key="order-1"))))
        innocents = [
            submissions.submit(engine.check_request(new(key=f"other-{i}"))) for i in range(30)
        ]
        plain = [submissions.submit(engine.check_request(new())) for _ in range(30)]

        answers = await asyncio.gather(*map(at_once, innocents + plain))
        assert {type(answer) for answer in answers} == {Created}
        assert not blocked.done()

    assert await at_once(blocked) == Duplicate(execution_id=first.execution_id)


async def test_many_who_wait_for_keys_leave_the_connections_to_others(
    engine: Engine, theirs: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    submissions = Submissions(engine)
    keys = [f"order-{i}" for i in range(40)]
    async with theirs.transaction():
        await engine.create_executions_on(theirs, [new(key=key) for key in keys])
        blocked = [
            asyncio.create_task(submissions.submit(engine.check_request(new(key=key))))
            for key in keys
        ]
        for _ in range(5):
            assert isinstance(
                await at_once(submissions.submit(engine.check_request(new()))), Created
            )

    answers = await asyncio.gather(*blocked)
    assert {type(answer) for answer in answers} == {Duplicate}


async def test_after_a_rollback_the_key_goes_to_who_waited(
    engine: Engine, theirs: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    submissions = Submissions(engine)
    transaction = theirs.transaction()
    await transaction.start()
    await engine.create_executions_on(theirs, [new(key="order-1")])
    blocked = asyncio.create_task(submissions.submit(engine.check_request(new(key="order-1"))))
    assert isinstance(await at_once(submissions.submit(engine.check_request(new()))), Created)
    await transaction.rollback()

    assert isinstance(await blocked, Created)


async def test_who_waits_too_long_learns_what_for(
    engine: Engine,
    theirs: "asyncpg.Connection[asyncpg.Record]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flowfabric.submission.KEY_WAIT_MS", 300)
    async with theirs.transaction():
        await engine.create_executions_on(theirs, [new(key="order-1")])

        with pytest.raises(KeyUndecided, match=r"another open transaction is deciding .*'order-1'"):
            await Submissions(engine).submit(engine.check_request(new(key="order-1")))

        named = NewExecution(execution_kind="work", execution_id="order-2")
        await engine.create_executions_on(theirs, [named])
        with pytest.raises(KeyUndecided, match=r"another open transaction is deciding .*'order-2'"):
            await Submissions(engine).submit(engine.check_request(named))


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_second_transaction_with_the_key_is_told_so_and_stays_sound(
    engine: Engine,
    theirs: "asyncpg.Connection[asyncpg.Record]",
    postgres_database: str,
    monkeypatch: pytest.MonkeyPatch,
    driver: str,
) -> None:
    monkeypatch.setattr("flowfabric.engine.creation.KEY_WAIT_MS", 200)
    async with theirs.transaction():
        await engine.create_executions_on(theirs, [new(key="order-1")])
        if driver == "asyncpg":
            second = await asyncpg.connect(postgres_database)
            async with second.transaction():
                await second.execute("create table business (id integer)")
                with pytest.raises(KeyUndecided, match="order-1"):
                    await engine.create_executions_on(second, [new(key="order-1")])
            assert await second.fetchval("select count(*) from business") == 0
            assert await second.fetchval("show lock_timeout") == "0"
            await second.close()
        else:
            with psycopg.connect(postgres_database) as connection:
                connection.execute("create table business (id integer)")
                with pytest.raises(KeyUndecided, match="order-1"):
                    engine.create_executions_on_sync(connection, [new(key="order-1")])
                assert connection.execute("show lock_timeout").fetchone() == ("0",)
                connection.commit()


async def test_an_id_of_ones_own_is_waited_for_in_the_same_way(
    postgres_database: str, theirs: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    app = App(postgres_database)

    @app.task
    def work() -> None: ...

    own = "{fp:186}:00000000-0000-4000-8000-000000000001"
    async with app:
        async with theirs.transaction():
            await app.submit(work, execution_id=own, connection=theirs)
            again = asyncio.create_task(app.submit(work, execution_id=own))
            async with asyncio.timeout(AT_ONCE_S):
                await asyncio.gather(*(app.submit(work) for _ in range(20)))
            assert not again.done()
        assert (await again).execution_id == own


def test_the_wait_for_a_key_is_bounded() -> None:
    assert bounds.KEY_WAIT_MS == 10_000
