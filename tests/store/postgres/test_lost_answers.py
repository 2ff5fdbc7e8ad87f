"""Submissions and signals whose connection goes away under them.

They are stored under ids made for them, so asking again finds what was done before.
"""

from collections.abc import AsyncIterator, Collection, Sequence
from typing import TypeVar

import asyncpg
import pytest

from flowfabric import Engine, EngineConfig
from flowfabric.core.conditions import ByName, Single
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import ExecutionId
from flowfabric.core.results import Created
from flowfabric.core.states import PublicState
from flowfabric.errors import BackendErrorKind, Transport
from flowfabric.store.base import Body, Parameter, Row
from flowfabric.store.postgres.store import PostgresStore

T = TypeVar("T")

WORK = NewExecution(execution_kind="work")
DIE_AT_FIRST = """
create sequence public.tries;
create function die_at_first() returns trigger language plpgsql as $$
begin
    if nextval('public.tries') {times} then
        perform pg_terminate_backend(pg_backend_pid());
    end if;
    return null;
end $$;
create trigger die_at_first after insert on flowfabric.{table}
    for each statement execute function die_at_first();
"""


class DeafStore(PostgresStore):
    """What it commits by a single statement, it hears nothing of."""

    async def execute_alone(
        self, name: str, topics: Collection[str] = (), /, **parameters: Parameter
    ) -> Sequence[Row]:
        await super().execute_alone(name, topics, **parameters)
        raise Transport("tests", "lost", kind=BackendErrorKind.TRANSPORT, may_have_happened=True)


class LateStore(PostgresStore):
    """Once it is `away`, single statements find no connection; what others commit is not heard."""

    away = False

    async def execute_alone(
        self, name: str, topics: Collection[str] = (), /, **parameters: Parameter
    ) -> Sequence[Row]:
        if self.away:
            raise Transport("tests", "refused", kind=BackendErrorKind.TRANSPORT)
        return await super().execute_alone(name, topics, **parameters)

    async def transact(self, body: Body[T], *, lock_wait_ms: int | None = None) -> T:
        answer = await super().transact(body, lock_wait_ms=lock_wait_ms)
        if self.away:
            kind = BackendErrorKind.TRANSPORT
            raise Transport("tests", "lost", kind=kind, may_have_happened=True)
        return answer


@pytest.fixture
async def engine(postgres_database: str) -> AsyncIterator[Engine]:
    async with await Engine.open(PostgresStore(postgres_database), EngineConfig()) as opened:
        await opened.know_routes([opened.check_request(WORK)])
        yield opened


async def test_what_was_not_stored_is_stored_over_another_connection(
    engine: Engine, postgres_database: str
) -> None:
    await execute(postgres_database, DIE_AT_FIRST.format(times="= 1", table="execution"))
    created = await engine.create_executions([WORK, WORK])
    assert [type(each) for each in created] == [Created, Created]
    assert await ready_in(engine) == [each.execution_id for each in created]


async def test_what_was_stored_is_found_again(postgres_database: str) -> None:
    async with await Engine.open(DeafStore(postgres_database), EngineConfig()) as engine:
        created = await engine.create_executions([WORK, WORK])
        assert created == [
            Created(execution_id=each.execution_id, public_state=PublicState.WAITING)
            for each in created
        ]
    async with await Engine.open(PostgresStore(postgres_database), EngineConfig()) as engine:
        assert await ready_in(engine) == [each.execution_id for each in created]


async def test_when_there_is_no_other_connection_either_it_may_have_happened(
    engine: Engine, postgres_database: str
) -> None:
    await execute(postgres_database, DIE_AT_FIRST.format(times="> 0", table="execution"))
    with pytest.raises(Transport) as lost:
        await engine.create_execution(WORK)
    assert lost.value.may_have_happened


@pytest.fixture
async def waiting(engine: Engine) -> ExecutionId:
    await engine.create_execution(WORK)
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    await engine.suspend(claimed.handle, resume_condition=Single("gate", ByName("go")))
    return claimed.execution_id


async def test_a_signal_that_was_not_stored_is_stored_over_another_connection(
    engine: Engine, waiting: ExecutionId, postgres_database: str
) -> None:
    await execute(postgres_database, DIE_AT_FIRST.format(times="= 1", table="signal"))
    answer = await engine.deliver_operator_signal(waiting, "gate", signal_name="go")
    assert answer.resumed
    assert await ready_in(engine) == [waiting]


async def test_a_signal_that_was_stored_is_found_again(
    engine: Engine, waiting: ExecutionId, postgres_database: str
) -> None:
    async with await Engine.open(DeafStore(postgres_database), EngineConfig()) as deaf:
        answer = await deaf.deliver_operator_signal(waiting, "gate", signal_name="go")
    assert answer.resumed
    progress = await engine.read_progress(waiting)
    assert progress.pause is not None
    assert [each.signal_name for each in progress.pause.signals] == ["go"]
    assert await ready_in(engine) == [waiting]


async def test_a_signal_may_have_happened_when_there_is_no_other_connection(
    engine: Engine, waiting: ExecutionId, postgres_database: str
) -> None:
    await execute(postgres_database, DIE_AT_FIRST.format(times="> 0", table="signal"))
    with pytest.raises(Transport) as lost:
        await engine.deliver_operator_signal(waiting, "gate", signal_name="go")
    assert lost.value.may_have_happened


async def test_what_was_stored_by_the_second_try_may_have_happened(
    engine: Engine, waiting: ExecutionId, postgres_database: str
) -> None:
    store = LateStore(postgres_database)
    async with await Engine.open(store, EngineConfig()) as late:
        await late.know_routes([late.check_request(WORK)])
        store.away = True
        with pytest.raises(Transport) as lost_signal:
            await late.deliver_operator_signal(waiting, "gate", signal_name="go")
        with pytest.raises(Transport) as lost_work:
            await late.create_execution(WORK)
    assert lost_signal.value.may_have_happened
    assert lost_work.value.may_have_happened
    assert len(await ready_in(engine)) == 2


async def execute(url: str, script: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(script)
    await connection.close()


async def ready_in(engine: Engine) -> list[str]:
    claimed = await engine.claim_many(
        ["default"], limit=10, worker_id="w", worker_instance_id="w-1"
    )
    return [each.execution_id for each in claimed]
