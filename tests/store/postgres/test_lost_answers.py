"""Submissions whose connection goes away under them.

They are stored under ids made for them, so asking again finds what was done before.
"""

from collections.abc import AsyncIterator, Collection, Sequence

import asyncpg
import pytest

from flowfabric import Engine, EngineConfig
from flowfabric.core.creation import NewExecution
from flowfabric.core.results import Created
from flowfabric.core.states import PublicState
from flowfabric.errors import BackendErrorKind, Transport
from flowfabric.store.base import Parameter, Row
from flowfabric.store.postgres.store import PostgresStore

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
create trigger die_at_first after insert on flowfabric.execution
    for each statement execute function die_at_first();
"""


class DeafStore(PostgresStore):
    """What it commits by a single statement, it hears nothing of."""

    async def execute_alone(
        self, name: str, topics: Collection[str] = (), /, **parameters: Parameter
    ) -> Sequence[Row]:
        await super().execute_alone(name, topics, **parameters)
        raise Transport("tests", "lost", kind=BackendErrorKind.TRANSPORT, may_have_happened=True)


@pytest.fixture
async def engine(postgres_database: str) -> AsyncIterator[Engine]:
    async with await Engine.open(PostgresStore(postgres_database), EngineConfig()) as opened:
        await opened.know_routes([opened.check_request(WORK)])
        yield opened


async def test_what_was_not_stored_is_stored_over_another_connection(
    engine: Engine, postgres_database: str
) -> None:
    await execute(postgres_database, DIE_AT_FIRST.format(times="= 1"))
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
    await execute(postgres_database, DIE_AT_FIRST.format(times="> 0"))
    with pytest.raises(Transport) as lost:
        await engine.create_execution(WORK)
    assert lost.value.may_have_happened


async def execute(url: str, script: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(script)
    await connection.close()


async def ready_in(engine: Engine) -> list[str]:
    claimed = await engine.claim_many(
        ["default"], limit=10, worker_id="w", worker_instance_id="w-1"
    )
    return [each.execution_id for each in claimed]
