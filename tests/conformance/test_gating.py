"""Keeping executions back from every worker, and letting them go."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.results import Blocked, Unblocked
from flowfabric.core.states import BlockingReason, EligibilityState, PublicState
from flowfabric.errors import (
    ExecutionNotActive,
    ExecutionNotEligible,
    InvalidBlockingReason,
    NotFound,
)
from flowfabric.testing import SettableClock
from tests.conformance.given import (
    ENDED,
    LOST,
    SET_ASIDE,
    UNKNOWN_ID,
    WAITING,
    WORKER,
    Given,
)
from tests.conformance.graphs import new_graph
from tests.conformance.observed import call, execution_of, refused, refuses, unchanged

REASONS = {
    "waiting_for_budget": ("blocked_by_budget", "rate_limited"),
    "waiting_for_quota": ("blocked_by_quota", "rate_limited"),
    "waiting_for_capable_worker": ("blocked_by_route", "waiting"),
    "paused_by_operator": ("blocked_by_operator", "waiting"),
    "paused_by_policy": ("blocked_by_lane_state", "waiting"),
}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("state", WAITING)
async def test_a_waiting_execution_is_kept_back_and_let_go(
    engine: Engine, given: Given, clock: SettableClock, state: str, reason: str
) -> None:
    execution_id = await given.state(state)
    before = await execution_of(engine, execution_id)
    now_ms = clock.advance("1s")
    blocked = await engine.block_execution_for_admission(
        execution_id, reason=reason, reason_detail="team: tokens 5/5", lane_id="default"
    )
    assert blocked == Blocked(execution_id=execution_id, reason=BlockingReason(reason))
    eligibility, public_state = REASONS[reason]
    assert await execution_of(engine, execution_id) == structs.replace(
        before,
        eligibility_state=EligibilityState(eligibility),
        blocking_reason=BlockingReason(reason),
        blocking_detail="team: tokens 5/5",
        public_state=PublicState(public_state),
        ready=False,
        last_mutation_at_ms=now_ms,
    )
    async with unchanged(engine):
        assert await engine.claim(**WORKER) is None
    now_ms = clock.advance("1s")
    freed = await engine.unblock_execution(execution_id, expected_blocking_reason=reason)
    assert freed == Unblocked(execution_id=execution_id)
    assert await execution_of(engine, execution_id) == structs.replace(
        before, last_mutation_at_ms=now_ms
    )
    assert (await given.taken()).execution_id == execution_id


async def test_keeping_back_again_replaces_the_reason(engine: Engine, given: Given) -> None:
    execution_id = await given.gated()
    await engine.block_execution_for_admission(execution_id, reason="paused_by_operator")
    kept = await execution_of(engine, execution_id)
    assert (kept.blocking_reason, kept.blocking_detail) == ("paused_by_operator", "")


async def test_only_what_waits_for_a_worker_is_kept_back(engine: Engine, given: Given) -> None:
    elsewhere = [each for each in SET_ASIDE if each != "gated"]
    for state in (*elsewhere, "running", "overdue_lease", *LOST):
        execution_id = await given.state(state)
        async with refused(engine, ExecutionNotEligible):
            await engine.block_execution_for_admission(execution_id, reason="waiting_for_quota")
    for state in ENDED:
        execution_id = await given.state(state)
        async with refused(engine, ExecutionNotActive):
            await engine.block_execution_for_admission(execution_id, reason="waiting_for_quota")
    async with refused(engine, NotFound):
        await engine.block_execution_for_admission(UNKNOWN_ID, reason="waiting_for_quota")


async def test_only_what_is_kept_back_is_let_go(engine: Engine, given: Given) -> None:
    elsewhere = [each for each in SET_ASIDE if each != "gated"]
    for state in (*WAITING, *elsewhere, "running", "overdue_lease", *LOST, *ENDED):
        execution_id = await given.state(state)
        async with refused(engine, ExecutionNotEligible):
            await engine.unblock_execution(execution_id)
    async with refused(engine, NotFound):
        await engine.unblock_execution(UNKNOWN_ID)


async def test_it_is_let_go_for_the_reason_expected_only(engine: Engine, given: Given) -> None:
    execution_id = await given.gated("waiting_for_budget")
    async with refused(engine, ExecutionNotEligible):
        await engine.unblock_execution(execution_id, expected_blocking_reason="waiting_for_quota")
    await engine.unblock_execution(execution_id)


async def test_what_a_flow_holds_is_left_alone(engine: Engine) -> None:
    graph = await new_graph(engine)
    await graph.build({"b": "a"})
    async with refused(engine, ExecutionNotEligible):
        await engine.block_execution_for_admission(graph["b"], reason="waiting_for_budget")


async def test_what_is_kept_back_ends_like_anything_else(engine: Engine, given: Given) -> None:
    cancelled = await given.gated()
    await engine.cancel_execution(cancelled, reason="no")
    expired = await given.gated(execution_deadline_at_ms=given.clock.now_ms())
    await engine.expire_execution(expired, "execution_deadline")
    states = [await engine.read_execution_state(each) for each in (cancelled, expired)]
    assert states == ["cancelled", "expired"]


async def test_why_says_what_keeps_it_back(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    await engine.block_execution_for_admission(
        execution_id, reason="waiting_for_budget", reason_detail="team: tokens 5/5"
    )
    why = await engine.explain_execution(execution_id)
    assert why.sentence == "It is kept back: team: tokens 5/5."


async def test_bad_reasons_are_refused(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    async with unchanged(engine):
        for reason in ("paused_by_flow_cancel", "waiting_for_children", "none", "", "x", 5):
            with pytest.raises(InvalidBlockingReason):
                await call(engine, "block_execution_for_admission", execution_id, reason=reason)
        fine = {"reason": "waiting_for_budget"}
        name = "block_execution_for_admission"
        await refuses(engine, "lane_id", name, execution_id, **fine, lane_id="other")
        await refuses(engine, "reason_detail", name, execution_id, **fine, reason_detail=5)
    kept = await given.gated()
    async with unchanged(engine):
        with pytest.raises(InvalidBlockingReason):
            await engine.unblock_execution(kept, expected_blocking_reason="waiting_for_worker")
        await refuses(engine, "lane_id", "unblock_execution", kept, lane_id="other")
