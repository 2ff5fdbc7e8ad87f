"""The one rule of readiness: what holds an execution back, in every life it can have."""

import pytest
from msgspec import structs

from flowfabric.core.decisions import Subject, Timing, change, with_derived
from flowfabric.core.executions import (
    Failure,
    decide_fail,
    decide_hand_back,
    decide_promote,
    decide_replay,
)
from flowfabric.core.leases import decide_expire_lease, decide_revoke
from flowfabric.core.parking import decide_delay, decide_wait_children
from flowfabric.core.situations import HELD_BY_JOIN, Hold, held_by, is_ready
from flowfabric.core.states import BlockingReason, EligibilityState, PublicState
from tests.unit.lives import (
    LIVES,
    NOW_MS,
    TIMING,
    Life,
    applied,
    fence_of,
    name_of,
    running,
    waiting,
)

HOLDS = {
    "waiting": Hold.NOTHING,
    "resumable": Hold.NOTHING,
    "replayed": Hold.NOTHING,
    "expired_lease": Hold.NOTHING,
    "revoked": Hold.NOTHING,
    "delayed": Hold.TIME,
    "retrying": Hold.TIME,
    "parked": Hold.TIME,
    "running": Hold.LEASE,
    "suspended": Hold.SIGNAL,
    "waiting_children": Hold.JOIN,
    "completed": Hold.ENDED,
    "failed": Hold.ENDED,
    "cancelled": Hold.ENDED,
    "expired": Hold.ENDED,
}


@pytest.mark.parametrize("life", LIVES, ids=name_of)
def test_one_thing_holds_back_whatever_is_not_ready(life: Life) -> None:
    execution = life().execution
    assert held_by(execution) is HOLDS[life.__name__]
    assert is_ready(execution) == execution.ready


@pytest.mark.parametrize("life", LIVES, ids=name_of)
def test_nothing_with_an_open_join_is_ready(life: Life) -> None:
    held = change(life().execution, NOW_MS, join_pending=True)
    assert not held.ready
    expected = HOLDS[life.__name__]
    assert held_by(held) is (Hold.JOIN if expected is Hold.NOTHING else expected)


@pytest.mark.parametrize("life", LIVES, ids=name_of)
def test_nothing_about_to_be_cancelled_is_ready(life: Life) -> None:
    marked = change(life().execution, NOW_MS, cancel_requested=True)
    assert not marked.ready
    ended = HOLDS[life.__name__] is Hold.ENDED
    assert held_by(marked) is (Hold.ENDED if ended else Hold.CANCELLATION)


def test_what_only_its_join_holds_back_shows_it() -> None:
    held = change(waiting().execution, NOW_MS, join_pending=True)
    assert {name: getattr(held, name) for name in HELD_BY_JOIN} == dict(HELD_BY_JOIN)
    assert held.public_state is PublicState.WAITING_CHILDREN


@pytest.mark.parametrize(
    "eligibility",
    [
        EligibilityState.BLOCKED_BY_OPERATOR,
        EligibilityState.BLOCKED_BY_BUDGET,
        EligibilityState.BLOCKED_BY_LANE_STATE,
    ],
)
def test_a_gate_of_its_own_comes_before_the_join(eligibility: EligibilityState) -> None:
    gated = change(
        waiting().execution,
        NOW_MS,
        eligibility_state=eligibility,
        blocking_reason=BlockingReason.PAUSED_BY_OPERATOR,
        join_pending=True,
    )
    assert (held_by(gated), gated.eligibility_state) == (Hold.GATE, eligibility)


def test_a_child_holds_back_besides_the_join() -> None:
    execution = structs.replace(
        waiting().execution,
        eligibility_state=EligibilityState.BLOCKED_BY_DEPENDENCIES,
        awaits_child=True,
        join_pending=True,
    )
    assert held_by(execution) is Hold.CHILD


# Every way out of a worker's hands


def held() -> Subject:
    """A worker runs it, and edges were staged into it meanwhile."""
    subject = running(policy='{"retry_policy": {"max_retries": 3}}')
    execution = change(subject.execution, NOW_MS, join_pending=True)
    return structs.replace(subject, execution=execution)


def retried() -> Subject:
    subject = held()
    failed = decide_fail(subject, fence_of(subject), Failure(reason="no"), TIMING)
    return promoted(applied(subject, failed.changes))


def delayed() -> Subject:
    subject = held()
    parked = decide_delay(subject, fence_of(subject), NOW_MS, TIMING)
    return promoted(applied(subject, parked.changes))


def promoted(subject: Subject) -> Subject:
    return applied(subject, decide_promote(subject, Timing(now_ms=NOW_MS + 10_000_000)).changes)


def handed_back() -> Subject:
    subject = held()
    return applied(subject, decide_hand_back(subject, fence_of(subject), "stop", TIMING).changes)


def waiting_for_children() -> Subject:
    subject = held()
    return applied(subject, decide_wait_children(subject, fence_of(subject), TIMING).changes)


def expired() -> Subject:
    subject = held()
    late = Timing(now_ms=subject.execution.lease_expires_at_ms or 0)
    return applied(subject, decide_expire_lease(subject, late).changes)


def revoked() -> Subject:
    subject = held()
    decision = decide_revoke(
        subject,
        expected_lease_id="",
        worker_instance_id="",
        reason="moved",
        now_ms=NOW_MS,
    )
    return applied(subject, decision.changes)


PARKED = (delayed, waiting_for_children)
"""The same attempt goes on."""
ENDED_ATTEMPT = (retried, handed_back, expired, revoked)
"""Another one follows."""
WAYS = (*PARKED, *ENDED_ATTEMPT)


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_no_way_leads_to_ready_past_an_open_join(way: Life) -> None:
    execution = way().execution
    assert (held_by(execution), execution.ready) == (Hold.JOIN, False)
    assert with_derived(execution) == execution


@pytest.mark.parametrize("way", PARKED, ids=name_of)
def test_a_parked_attempt_goes_on_with_its_payload(way: Life) -> None:
    subject = way()
    before = subject.execution.taken_payload
    satisfied = change(subject.execution, NOW_MS, join_pending=False, next_input=b"from upstream")
    assert (satisfied.taken_payload, satisfied.next_input) == (before, b"from upstream")


@pytest.mark.parametrize("way", ENDED_ATTEMPT, ids=name_of)
def test_what_the_join_passed_on_meanwhile_is_the_payload_of_the_next_attempt(way: Life) -> None:
    subject = way()
    satisfied = change(
        subject.execution,
        NOW_MS,
        join_pending=False,
        next_input=b"from upstream",
        next_input_encoding="json",
    )
    assert satisfied.taken_payload == (b"from upstream", "json")
    assert satisfied.next_input is None


def test_a_payload_does_not_change_under_a_running_attempt() -> None:
    subject = running()
    before = subject.execution.taken_payload
    told = change(subject.execution, NOW_MS, next_input=b"from upstream")
    assert (told.taken_payload, told.next_input) == (before, b"from upstream")
    subject = structs.replace(subject, execution=told)
    back = decide_hand_back(subject, fence_of(subject), "stop", TIMING)
    assert applied(subject, back.changes).execution.taken_payload == (b"from upstream", None)


def test_a_replay_starts_with_nothing_of_the_former_life() -> None:
    subject = LIVES_BY_NAME["failed"]()
    stale = change(
        subject.execution,
        NOW_MS,
        join_pending=True,
        next_input=b"stale",
        progress_pct=50,
        progress_message="halfway",
        progress_updated_at_ms=NOW_MS,
    )
    subject = structs.replace(subject, execution=stale)
    after = applied(subject, decide_replay(subject, None, None, TIMING).changes).execution
    assert (after.ready, after.join_pending, after.next_input) == (True, False, None)
    assert (after.progress_pct, after.progress_message, after.progress_updated_at_ms) == (
        None,
        None,
        None,
    )


LIVES_BY_NAME = {life.__name__: life for life in LIVES}
