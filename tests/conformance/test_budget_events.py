"""What the event log tells of budgets."""

import msgspec
import pytest

from flowfabric import Engine
from flowfabric.core.budget_events import QUIET_MS, BudgetDetails
from flowfabric.core.budget_terms import BudgetDefinition, BudgetUpdate
from flowfabric.core.budgets import Reserved
from flowfabric.core.events import StoredEvent
from flowfabric.testing import SettableClock
from tests.conformance.given import Given

TEAM = BudgetDefinition(
    budget_id="team", hard_limits={"tokens": 100, "pages": 9}, soft_limits={"tokens": 50}
)


async def told(engine: Engine) -> list[StoredEvent]:
    return list((await engine.read_events(category="budget")).events)


async def types(engine: Engine) -> list[str]:
    return [each.event_type for each in await told(engine)]


async def report(engine: Engine, **amounts: int) -> None:
    await engine.report_usage_admin("team", list(amounts), list(amounts.values()))


async def test_its_removal_is_told(engine: Engine) -> None:
    await report(engine, tokens=1)
    await engine.remove_budget("team")
    assert await types(engine) == []
    await engine.create_budget(TEAM)
    await engine.remove_budget("team")
    assert await types(engine) == ["created", "removed"]


async def test_the_life_of_a_budget_is_told(engine: Engine, clock: SettableClock) -> None:
    await engine.create_budget(TEAM)
    await engine.create_budget(TEAM)
    await report(engine, tokens=50)
    await report(engine, tokens=10)
    await report(engine, tokens=50)
    await engine.update_budget("team", BudgetUpdate(hard_limits={"tokens": 200}))
    await engine.update_budget("team", BudgetUpdate(hard_limits={"tokens": 200}))
    await engine.reset_budget("team")

    events = await told(engine)

    assert [(each.event_type, each.reason) for each in events] == [
        ("created", "0 of 9 pages used, 0 of 100 tokens used"),
        ("soft_limit", "60 of 50 tokens used"),
        ("breached", "60 of 100 tokens used"),
        ("changed", "0 of 9 pages used, 60 of 200 tokens used"),
        ("reset", "0 of 9 pages used, 0 of 200 tokens used"),
    ]
    assert {(each.namespace, each.occurred_at_ms) for each in events} == {
        ("default", clock.now_ms())
    }
    budget_id = (await engine.get_budget_status("team")).budget_id
    assert {each.execution_id for each in events} == {f"{{fp:0}}:{budget_id}"}
    details = msgspec.json.decode(events[2].details or "", type=BudgetDetails)
    assert details == BudgetDetails(
        budget="team",
        usage={"tokens": 60},
        hard_limits={"tokens": 100, "pages": 9},
        soft_limits={"tokens": 50},
        dimension="tokens",
    )


async def test_a_reset_by_time_is_told(engine: Engine, clock: SettableClock) -> None:
    await engine.create_budget(BudgetDefinition(budget_id="team", reset_interval_ms=60_000))
    clock.advance("1m")
    await engine.reset_due_budgets()
    assert await types(engine) == ["created", "reset"]


async def test_what_goes_on_is_told_once(engine: Engine, clock: SettableClock) -> None:
    await engine.create_budget(TEAM)
    for _ in range(3):
        await report(engine, tokens=30)
    for _ in range(3):
        await report(engine, tokens=30)
        clock.advance(ms=QUIET_MS - 1)
    await report(engine, pages=10)
    assert await types(engine) == ["created", "soft_limit", "breached", "breached"]
    clock.advance(ms=QUIET_MS)
    await report(engine, pages=10)
    await engine.reset_budget("team")
    await report(engine, pages=10)
    assert (await types(engine))[4:] == ["breached", "reset", "breached"]


async def test_a_refused_reservation_is_told_and_one_that_waits_is_not(
    engine: Engine, given: Given
) -> None:
    await engine.create_budget(TEAM)
    claimed = await given.running()
    for amount, waits in ((101, True), (101, False), (100, False)):
        outcome = await engine.reserve_budget(
            claimed.handle, "team", {"tokens": amount}, reservation_id="call", waits=waits
        )
    assert outcome == Reserved()
    assert await types(engine) == ["created", "breached"]


async def test_usage_before_a_budget_is_created_is_not_told(engine: Engine) -> None:
    await report(engine, tokens=60)
    assert await types(engine) == []
    await engine.create_budget(TEAM)
    assert await types(engine) == ["created"]


@pytest.mark.parametrize("mode", ["warn", "strict"])
async def test_limits_that_warn_nobody_are_not_told(engine: Engine, mode: str) -> None:
    await engine.create_budget(
        BudgetDefinition(
            budget_id="team",
            soft_limits={"tokens": 50},
            on_soft_limit="allow",
            enforcement_mode=mode,
        )
    )
    await report(engine, tokens=60)
    assert await types(engine) == ["created"]


async def test_whoever_follows_the_log_hears_of_budgets(engine: Engine, given: Given) -> None:
    await given.completed()
    subscription = await engine.subscribe_events(category="budget")
    await engine.create_budget(TEAM)
    assert (await anext(subscription)).event.event_type == "created"
    by_kind = await engine.subscribe_events(after="0", kind="work")
    while (heard := await by_kind.next_if_any()) is not None:
        assert heard.event.category != "budget"
