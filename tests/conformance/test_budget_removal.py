"""Budgets that are removed, and what becomes of those they limited."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.budgets import UsageCounted
from flowfabric.errors import Conflict, NotFound
from tests.conformance.given import Given
from tests.conformance.observed import unchanged
from tests.conformance.test_budget_gates import ATTACHED, TEAM, claim, create, report


async def test_a_removed_budget_is_gone_with_all_it_counted(engine: Engine) -> None:
    await create(engine)
    await engine.report_usage_admin("team", ["tokens"], [60], dedup_key="call")
    assert (await engine.remove_budget("team")).usage == {"tokens": 60}
    assert (await engine.list_budgets()).budgets == ()
    with pytest.raises(NotFound, match="budget not found"):
        await engine.remove_budget("team")
    await create(engine)
    again = await engine.report_usage_admin("team", ["tokens"], [60], dedup_key="call")
    assert again == UsageCounted()
    assert (await engine.get_budget_status("team")).usage == {"tokens": 60}


@pytest.mark.parametrize("scope", ["tenant", "lane"])
async def test_what_a_removed_budget_held_up_starts_and_a_new_one_limits_it_again(
    engine: Engine, given: Given, scope: str
) -> None:
    lane = structs.replace(TEAM, scope_type="lane", scope_id="default")
    definition = TEAM if scope == "tenant" else lane
    await engine.create_budget(definition)
    first, second = [
        await given.waiting(policy=ATTACHED if scope == "tenant" else {}) for _ in range(2)
    ]
    await report(engine, 100)
    assert await claim(engine) is None
    await engine.remove_budget("team")
    assert await claim(engine) == first
    await engine.create_budget(definition)
    await report(engine, 100)
    assert await claim(engine) is None
    await engine.reset_budget("team")
    assert await claim(engine) == second


async def test_a_budget_of_which_attempts_hold_amounts_is_not_removed(
    engine: Engine, given: Given
) -> None:
    await create(engine)
    claimed = await given.running()
    await engine.reserve_budget(claimed.handle, "team", {"tokens": 5}, reservation_id="call")
    async with unchanged(engine):
        with pytest.raises(Conflict, match="attempts hold amounts of budget 'team'"):
            await engine.remove_budget("team")
    await engine.settle_reservation("team", "call", {"tokens": 5})
    await engine.remove_budget("team")


async def test_a_budget_of_another_namespace_stays(engine: Engine) -> None:
    await create(engine, namespace="shop")
    with pytest.raises(NotFound, match="budget not found"):
        await engine.remove_budget("team")
    await engine.remove_budget("team", namespace="shop")
