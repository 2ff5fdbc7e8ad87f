"""Budgets that are used up: what is attached to them waits until there is room."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.budget_terms import BudgetDefinition, BudgetUpdate
from flowfabric.core.budgets import WAITING_CHECK_MS, HardBreach, UsageCounted
from flowfabric.core.diagnosis import Cause
from flowfabric.core.ids import ExecutionId, named_budget_id, named_flow_id
from flowfabric.core.results import Claimed
from flowfabric.core.states import PublicState
from flowfabric.reconcilers import run_due
from flowfabric.testing import SettableClock
from tests.conformance.given import UNKNOWN_ID, WORKER, Given
from tests.conformance.graphs import Graph

HOUR_MS = 3_600_000
TEAM_ID = named_budget_id("team", "default")
TEAM = BudgetDefinition(budget_id="team", hard_limits={"tokens": 100})
ATTACHED = {"budget_ids": [TEAM_ID]}


async def create(engine: Engine, **fields: object) -> None:
    await engine.create_budget(structs.replace(TEAM, **fields))


async def report(engine: Engine, tokens: int) -> None:
    assert await engine.report_usage_admin("team", ["tokens"], [tokens]) == UsageCounted()


async def claim(engine: Engine, lane_id: str = "default", wait_ms: int = 0) -> ExecutionId | None:
    claimed = await engine.claim(lane_id, **WORKER, max_wait_ms=wait_ms)
    return None if claimed is None else claimed.execution_id


async def attend(engine: Engine) -> None:
    """Have a worker that would run it all."""
    await engine.register_worker(["default"], **WORKER, liveness_ttl_ms=60_000)


async def test_what_is_attached_starts_as_long_as_there_is_room(
    engine: Engine, given: Given
) -> None:
    await create(engine)
    first, second = [await given.waiting(policy=ATTACHED) for _ in range(2)]
    await report(engine, 99)

    assert await claim(engine) == first
    await report(engine, 1)
    assert await claim(engine) is None

    free = await given.waiting()
    assert await claim(engine) == free
    await engine.reset_budget("team")
    assert await claim(engine) == second


async def test_what_runs_already_goes_on(engine: Engine, given: Given) -> None:
    await create(engine)
    await given.waiting(policy=ATTACHED)
    claimed = await engine.claim(**WORKER)
    assert isinstance(claimed, Claimed)

    await report(engine, 100)

    await engine.renew(claimed.handle)
    await engine.complete(claimed.handle, None)


@pytest.mark.parametrize("how", ["reset", "raised", "given back", "advisory", "due reset"])
async def test_room_lets_it_start(
    engine: Engine, given: Given, clock: SettableClock, how: str
) -> None:
    await create(engine, reset_interval_ms=HOUR_MS)
    waiting = await given.waiting(policy=ATTACHED)
    await engine.record_spend("team", UNKNOWN_ID, {"tokens": 100}, idempotency_key="k")
    assert await claim(engine) is None

    match how:
        case "reset":
            await engine.reset_budget("team")
        case "raised":
            await engine.update_budget("team", BudgetUpdate(hard_limits={"tokens": 101}))
        case "given back":
            await engine.release_budget("team", UNKNOWN_ID)
        case "advisory":
            await engine.update_budget("team", BudgetUpdate(enforcement_mode="warn"))
        case _:
            clock.advance(ms=HOUR_MS)
            assert (await engine.reset_due_budgets()).acted == 1

    assert await claim(engine) == waiting


async def test_lowering_the_limit_stops_it_from_starting(engine: Engine, given: Given) -> None:
    await create(engine)
    waiting = await given.waiting(policy=ATTACHED)
    await report(engine, 50)
    await engine.update_budget("team", BudgetUpdate(hard_limits={"tokens": 50}))

    assert await claim(engine) is None

    await engine.update_budget("team", BudgetUpdate(hard_limits={"tokens": 0}))
    assert await claim(engine) == waiting


async def test_a_budget_that_is_used_up_before_anything_is_attached_stops_it_too(
    engine: Engine, given: Given
) -> None:
    await create(engine)
    await report(engine, 100)
    waiting = await given.waiting(policy=ATTACHED)

    assert await claim(engine) is None

    await engine.reset_budget("team")
    assert await claim(engine) == waiting


async def test_usage_of_a_budget_nobody_has_created_stops_nothing(
    engine: Engine, given: Given
) -> None:
    waiting = await given.waiting(policy=ATTACHED)
    await engine.report_usage_admin("team", ["tokens"], [10**6])
    assert await claim(engine) == waiting

    await given.waiting(policy=ATTACHED)
    await create(engine)
    assert await claim(engine) is None


async def test_a_worker_that_waits_is_woken_by_the_reset(engine: Engine, given: Given) -> None:
    await create(engine)
    waiting = await given.waiting(policy=ATTACHED)
    await report(engine, 100)
    asking = asyncio.create_task(claim(engine, wait_ms=30_000))

    await engine.reset_budget("team")

    assert await asking == waiting


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize(
    ("scope_type", "scope_id", "attached", "others"),
    [
        ("lane", "gpu", [{"lane_id": "gpu"}], [{"lane_id": "cpu"}]),
        (
            "kind",
            "ask",
            [{"execution_kind": "ask"}, {"execution_kind": "ask@2"}],
            [{"execution_kind": "asks"}, {"execution_kind": "ask", "namespace": "shop"}],
        ),
        ("namespace", "shop", [{"namespace": "shop"}], [{"namespace": "default"}]),
    ],
)
async def test_a_budget_reaches_all_of_its_scope(
    engine: Engine,
    given: Given,
    existing: bool,
    scope_type: str,
    scope_id: str,
    attached: list[dict[str, object]],
    others: list[dict[str, object]],
) -> None:
    lanes = ["default", "gpu", "cpu"]

    async def claimed() -> set[ExecutionId]:
        found = await engine.claim_many(lanes, limit=10, **WORKER)
        return {each.execution_id for each in found}

    if existing:
        # Their routes are there before the budget is.
        before = [await given.waiting(**fields) for fields in (*attached, *others)]
        assert await claimed() == set(before)
    await create(engine, scope_type=scope_type, scope_id=scope_id)
    await report(engine, 100)
    held = {await given.waiting(**fields) for fields in attached}
    free = {await given.waiting(**fields) for fields in others}

    assert await claimed() == free

    await engine.reset_budget("team")
    assert await claimed() == held


async def test_nothing_starts_before_there_is_room_for_who_waits(
    engine: Engine, given: Given
) -> None:
    await create(engine)
    holder, asking = await given.running(policy=ATTACHED), await given.running(policy=ATTACHED)
    waiting = await given.waiting(policy=ATTACHED)
    await engine.reserve_budget(holder.handle, "team", {"tokens": 60}, reservation_id="a")

    refused = await engine.reserve_budget(
        asking.handle, "team", {"tokens": 50}, reservation_id="b", waits=True
    )

    assert isinstance(refused, HardBreach)
    status = await engine.get_budget_status("team")
    assert (status.closed, status.breach_count) == (True, 0)
    assert await claim(engine) is None
    await engine.settle_reservation("team", "a", {"tokens": 51})
    assert await claim(engine) is None
    await engine.update_budget("team", BudgetUpdate(hard_limits={"tokens": 101}))
    assert await claim(engine) == waiting


async def waits_for(given: Given, tokens: int, **fields: object) -> Claimed:
    """An attached execution that found no room, and lets go of its worker until there is."""
    asking = await given.running(policy=ATTACHED, **fields)
    await let_wait(given, asking, tokens)
    return asking


async def let_wait(given: Given, asking: Claimed, tokens: int) -> None:
    await given.engine.reserve_budget(
        asking.handle, "team", {"tokens": tokens}, reservation_id=asking.execution_id, waits=True
    )
    await given.engine.delay(asking.handle, given.clock.now_ms() + 1_000)


async def completed(given: Given, holder: Claimed) -> None:
    await given.engine.complete(holder.handle, None)


async def lost(given: Given, holder: Claimed) -> None:
    await given.engine.revoke_lease(holder.execution_id, reason="its worker is gone")


@pytest.mark.parametrize("ends", [completed, lost])
async def test_room_that_an_ended_attempt_leaves_is_found_by_who_waits(
    engine: Engine,
    given: Given,
    clock: SettableClock,
    ends: Callable[[Given, Claimed], Awaitable[None]],
) -> None:
    await create(engine)
    holder = await given.running(policy=ATTACHED)
    await engine.reserve_budget(holder.handle, "team", {"tokens": 60}, reservation_id="a")
    asking = await waits_for(given, 50)
    await ends(given, holder)
    assert await claim(engine) is None

    clock.advance(ms=WAITING_CHECK_MS)
    await run_due(engine)

    assert asking.execution_id in {await claim(engine) for _ in range(2)}


async def cancelled(given: Given, waiter: Claimed) -> None:
    await given.engine.cancel_execution(waiter.execution_id, reason="no")


async def expired(given: Given, waiter: Claimed) -> None:
    given.clock.advance(ms=HOUR_MS)
    await given.engine.expire_due_deadlines()


async def gone_on(given: Given, waiter: Claimed) -> None:
    """It does something else instead, once there is a worker for it."""
    await given.engine.promote_due_delays()
    await given.engine.issue_grant_and_claim(waiter.execution_id)


@pytest.mark.parametrize("ends", [cancelled, expired, gone_on])
async def test_who_no_longer_waits_holds_nobody_up(
    engine: Engine,
    given: Given,
    clock: SettableClock,
    ends: Callable[[Given, Claimed], Awaitable[None]],
) -> None:
    await create(engine)
    await report(engine, 60)
    waiter = await waits_for(given, 50, execution_deadline_at_ms=clock.now_ms() + HOUR_MS)
    other = await given.waiting(policy=ATTACHED)
    clock.advance(ms=WAITING_CHECK_MS)
    await run_due(engine)
    assert await claim(engine) is None

    await ends(given, waiter)
    clock.advance(ms=WAITING_CHECK_MS)
    await run_due(engine)

    assert (await engine.get_budget_status("team")).closed is False
    assert await claim(engine) == other
    assert "budget_reservations" not in await engine.next_due()


async def test_others_who_wait_hold_up_as_long_as_they_do(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await create(engine)
    await report(engine, 60)
    more, less = await given.running(policy=ATTACHED), await given.running(policy=ATTACHED)
    await let_wait(given, more, 80)
    await let_wait(given, less, 50)
    await given.waiting(policy=ATTACHED)
    await cancelled(given, more)
    for _ in range(3):
        clock.advance(ms=WAITING_CHECK_MS)
        await run_due(engine)
        assert await claim(engine) is None
    await cancelled(given, less)
    clock.advance(ms=WAITING_CHECK_MS)
    await run_due(engine)
    assert await claim(engine) is not None


async def test_more_than_the_limit_is_not_waited_for(engine: Engine, given: Given) -> None:
    await create(engine, hard_limits={"tokens": 100, "a": 10})
    waiting = await given.waiting(policy=ATTACHED)
    await engine.report_usage_admin("team", ["a"], [9])
    asking = await given.running(lane_id="other")
    refused = await engine.reserve_budget(
        asking.handle, "team", {"a": 2, "tokens": 101}, reservation_id="b", waits=True
    )
    assert refused == HardBreach(dimension="tokens", current_usage=0, hard_limit=100)
    status = await engine.get_budget_status("team")
    assert (status.closed, status.breach_count) == (False, 1)
    assert await claim(engine) == waiting


async def test_what_can_no_longer_be_had_is_not_waited_for(engine: Engine, given: Given) -> None:
    await create(engine)
    await report(engine, 10)
    await waits_for(given, 95)
    waiting = await given.waiting(policy=ATTACHED)
    assert await claim(engine) is None
    await engine.update_budget("team", BudgetUpdate(hard_limits={"tokens": 90}))
    assert await claim(engine) == waiting


@pytest.mark.parametrize(
    ("interval_ms", "says"),
    [
        (0, "budget team: 100 of 100 tokens used; reset the budget or raise its limit; 1 ahead."),
        (HOUR_MS, "budget team: 100 of 100 tokens used, reset in 1h; 1 ahead."),
    ],
)
async def test_what_waits_says_so_with_the_numbers(
    engine: Engine, given: Given, interval_ms: int, says: str
) -> None:
    await create(engine, reset_interval_ms=interval_ms)
    await given.waiting(policy=ATTACHED)
    second = await given.waiting(policy=ATTACHED)
    await report(engine, 100)
    await attend(engine)

    explained = await engine.explain_execution(second)

    assert explained.sentence == f"It waits for {says}"
    assert explained.cause is Cause.LIMITED


async def test_what_waits_for_more_than_is_left_says_so(engine: Engine, given: Given) -> None:
    await create(engine)
    asking = await given.running(policy=ATTACHED)
    waiting = await given.waiting(policy=ATTACHED)
    await report(engine, 60)
    await engine.reserve_budget(
        asking.handle, "team", {"tokens": 50}, reservation_id="b", waits=True
    )
    await attend(engine)

    explained = await engine.explain_execution(waiting)

    assert explained.sentence == (
        "It waits for budget team: 60 of 100 tokens used: 40 left, 50 needed; reset the"
        " budget or raise its limit; 0 ahead."
    )


# What a breach cancels


async def test_a_breach_may_cancel_whatever_is_attached_and_not_running(
    engine: Engine, given: Given
) -> None:
    await create(engine, on_hard_limit="cancel_pending")
    running = await given.running(policy=ATTACHED)
    waiting = [await given.waiting(policy=ATTACHED) for _ in range(3)]
    delayed = await given.delayed(policy=ATTACHED)
    suspended = await given.suspended(policy=ATTACHED)
    other = await given.waiting()

    assert isinstance(await engine.report_usage_admin("team", ["tokens"], [101]), HardBreach)
    assert (await engine.next_due())["budget_action"] == 0
    while "budget_action" in await engine.next_due():
        await engine.act_on_breaches(limit=2)

    states = [await engine.read_execution_state(each) for each in (*waiting, delayed)]
    assert states == [PublicState.CANCELLED] * 4
    assert await engine.read_execution_state(running.execution_id) is PublicState.ACTIVE
    assert await engine.read_execution_state(suspended.execution_id) is PublicState.SUSPENDED
    assert await engine.read_execution_state(other) is PublicState.WAITING
    described = await engine.describe_execution(delayed)
    assert described is not None
    assert described.cancellation_reason == "budget team is used up"


async def test_a_refusal_because_of_what_others_hold_cancels_nothing(
    engine: Engine, given: Given
) -> None:
    await create(engine, on_hard_limit="cancel_pending")
    running = await given.running(policy=ATTACHED)
    await engine.reserve_budget(running.handle, "team", {"tokens": 60}, reservation_id="r")

    assert isinstance(await engine.report_usage_admin("team", ["tokens"], [41]), HardBreach)

    assert "budget_action" not in await engine.next_due()


async def test_an_advisory_budget_cancels_nothing(engine: Engine) -> None:
    await create(engine, on_hard_limit="cancel_pending", enforcement_mode="warn")

    await engine.report_usage_admin("team", ["tokens"], [101])

    assert "budget_action" not in await engine.next_due()


async def test_a_breach_may_cancel_the_flow_the_budget_is_for(engine: Engine) -> None:
    flow_id = named_flow_id("nightly", "default")
    await engine.create_flow(flow_id, flow_kind="nightly", namespace="default")
    member = await Graph(engine, flow_id).member("page")
    await create(engine, on_hard_limit="cancel_flow", scope_type="flow", scope_id="nightly")

    assert isinstance(await engine.report_usage_admin("team", ["tokens"], [101]), HardBreach)
    await run_due(engine)

    assert await engine.read_execution_state(member) is PublicState.CANCELLED
    assert "budget_action" not in await engine.next_due()


async def test_a_breach_of_a_budget_whose_flow_is_not_there_is_over_with(engine: Engine) -> None:
    await create(engine, on_hard_limit="cancel_flow", scope_type="flow", scope_id="nightly")

    await engine.report_usage_admin("team", ["tokens"], [101])
    await run_due(engine)

    assert "budget_action" not in await engine.next_due()
