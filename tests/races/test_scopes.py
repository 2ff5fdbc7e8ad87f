"""Budgets of a scope are created while what they are for is submitted for the first time."""

import pytest

from flowfabric import Engine
from flowfabric.core.budget_terms import BudgetDefinition
from flowfabric.core.creation import NewExecution
from flowfabric.engine.routes import Registration
from tests.conformance.given import WORKER
from tests.races.rival import Rival

WORK = NewExecution(execution_kind="work")
SCOPES = pytest.mark.parametrize(
    ("scope_type", "scope_id"), [("lane", "default"), ("kind", "work"), ("namespace", "default")]
)


def budget(scope_type: str, scope_id: str) -> BudgetDefinition:
    return BudgetDefinition(
        budget_id="team", scope_type=scope_type, scope_id=scope_id, hard_limits={"tokens": 1}
    )


async def check_attached(engine: Engine) -> None:
    await engine.report_usage_admin("team", ["tokens"], [1])
    await engine.create_execution(WORK)
    assert await engine.claim(**WORKER) is None
    await engine.reset_budget("team")
    assert await engine.claim(**WORKER) is not None


@SCOPES
async def test_a_budget_reaches_what_was_being_registered_when_it_was_created(
    engine: Engine, rival: Rival, scope_type: str, scope_id: str
) -> None:
    registration = Registration([engine.check_request(WORK)], {})
    async with rival.connection.transaction():
        await engine.store.transact_on(rival.connection, registration.run)
        (creating,) = await rival.queued(engine.create_budget(budget(scope_type, scope_id)))
    await creating
    await check_attached(engine)


@SCOPES
async def test_what_is_registered_meets_the_budget_that_was_being_created(
    engine: Engine, rival: Rival, scope_type: str, scope_id: str
) -> None:
    async with rival.connection.transaction():
        await engine.on(rival.connection).create_budget(budget(scope_type, scope_id))
        request = engine.check_request(WORK)
        (registering,) = await rival.queued(engine.know_routes([request]))
    await registering
    await check_attached(engine)


async def test_a_budget_waits_for_no_other_namespace(engine: Engine, rival: Rival) -> None:
    registration = Registration([engine.check_request(WORK)], {})
    elsewhere = BudgetDefinition(
        budget_id="team", namespace="shop", scope_type="namespace", scope_id="shop"
    )
    async with rival.connection.transaction():
        await engine.store.transact_on(rival.connection, registration.run)
        assert (await engine.create_budget(elsewhere)).change == "created"
