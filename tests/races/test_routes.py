"""Kinds are forgotten while somebody creates with them: whatever exists can be claimed."""

import asyncio

import pytest

from flowfabric import Engine
from flowfabric.core.creation import NewExecution
from flowfabric.core.gates import GateName, GateOwner
from flowfabric.core.limits import policy_id_of
from flowfabric.core.results import Created
from flowfabric.engine.shell import Swept
from tests.conformance.auditing import complaints_of
from tests.conformance.given import WORKER
from tests.races.rival import DEADLOCKS, Rival

WORK = NewExecution(execution_kind="work")
OVERDUE = "update route set retain_until_ms = 0"
ROUNDS = 50


async def test_a_kind_that_an_open_transaction_creates_with_is_not_forgotten(
    engine: Engine, rival: Rival
) -> None:
    await engine.know_routes([engine.check_request(WORK)])
    await rival.execute(OVERDUE)
    async with rival.connection.transaction():
        await engine.create_executions_on(rival.connection, [WORK])
        assert await engine.trim_routes() == Swept(acted=0, full=False)
    assert await engine.trim_routes() == Swept(acted=0, full=False)
    assert await engine.claim(**WORKER) is not None


async def test_whoever_creates_while_the_kind_is_forgotten_registers_it_again(
    engine: Engine, rival: Rival
) -> None:
    await engine.know_routes([engine.check_request(WORK)])
    async with rival.holding("select 1 from route for update"):
        (creating,) = await rival.queued(engine.create_execution(WORK))
        await rival.execute("delete from route")
    assert isinstance(await creating, Created)
    assert await engine.claim(**WORKER) is not None
    assert await complaints_of(engine) == []


@pytest.mark.parametrize("limited", [False, True])
async def test_creating_and_forgetting_at_once_leaves_nothing_that_cannot_be_claimed(
    engine: Engine, rival: Rival, *, limited: bool
) -> None:
    await engine.set_limit("keyed", active_concurrency_cap=100)
    for number in range(ROUNDS):
        key = GateName(GateOwner.QUOTA, policy_id_of("default", "keyed"), f"key-{number}")
        request = NewExecution(execution_kind=f"work-{number}", gates=[key] if limited else ())
        await engine.know_routes([engine.check_request(request)])
        await rival.execute(OVERDUE)
        if limited:
            # Registered again, as by another process, while it is forgotten.
            engine.shell.routes.clear()
        await asyncio.gather(
            *(engine.trim_routes() for _ in range(4)),
            *(engine.create_execution(request) for _ in range(4)),
        )
    assert await complaints_of(engine) == []
    claimed = 0
    while found := await engine.claim_many(["default"], limit=100, **WORKER):
        claimed += len(found)
    assert claimed == 4 * ROUNDS
    assert await rival.count(DEADLOCKS) == 0
