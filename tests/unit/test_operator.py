"""Cancelling, reprioritising, replaying: in every state."""

import pytest

from flowfabric.core.decisions import NO_CHANGES
from flowfabric.core.executions import (
    CancelRequest,
    clamp_priority,
    decide_cancel,
    decide_cancel_waiting,
    decide_change_priority,
    decide_replay,
    decide_worker_cancel,
)
from flowfabric.core.results import Cancelled, Replayed
from flowfabric.core.states import LifecyclePhase, PublicState
from flowfabric.errors import (
    ExecutionNotEligible,
    ExecutionNotTerminal,
    InvalidInput,
    LeaseRevoked,
    MaxReplaysExhausted,
    StaleLease,
)
from tests.unit.lives import (
    ENDED,
    LIVES,
    NOW_MS,
    TIMING,
    Life,
    applied,
    cancelled,
    completed,
    fence_of,
    ids,
    name_of,
    revoked,
    running,
    vector,
    waiting,
)

OPERATOR = CancelRequest(reason="no")
END = "terminal unowned not_applicable none cancelled"


@pytest.mark.parametrize("life", LIVES, ids=name_of)
def test_an_operator_cancels_whatever_has_not_ended(life: Life) -> None:
    subject = life()
    if life is cancelled:
        assert decide_cancel(subject, OPERATOR, TIMING).changes == NO_CHANGES
        return
    if life in ENDED:
        with pytest.raises(InvalidInput, match="already terminal"):
            decide_cancel(subject, OPERATOR, TIMING)
        return
    decision = decide_cancel(subject, OPERATOR, TIMING)
    assert decision.answer == Cancelled(
        execution_id=subject.execution.execution_id, public_state=PublicState.CANCELLED
    )
    after = applied(subject, decision.changes).execution
    attempt = "attempt_terminal" if subject.attempt else "pending_first_attempt"
    assert vector(after) == f"{END} {attempt} cancelled"
    assert after.lease_epoch == subject.execution.lease_epoch + 1
    assert [event.category for event in decision.changes.events] == (
        ["lease", "completion"] if life is running else ["completion"]
    )


@pytest.mark.parametrize("life", [life for life in LIVES if life not in ENDED], ids=name_of)
def test_what_a_worker_has_begun_is_not_cancelled_with_what_waits(life: Life) -> None:
    """It may have been claimed since it was found waiting."""
    subject = life()
    begun = subject.execution.lifecycle_phase in (LifecyclePhase.ACTIVE, LifecyclePhase.SUSPENDED)
    decision = decide_cancel_waiting(subject, "no", TIMING)
    if begun:
        assert decision.changes == NO_CHANGES
        assert decision.answer.public_state is subject.execution.public_state
    else:
        assert decision == decide_cancel(subject, OPERATOR, TIMING)


def test_others_must_know_the_epoch_of_running_work() -> None:
    system = CancelRequest(reason="no", source="system_timeout")
    with pytest.raises(InvalidInput, match="lease_epoch"):
        decide_cancel(running(), system, TIMING)
    for wrong in (
        CancelRequest(reason="no", source="s", lease_epoch=2),
        CancelRequest(reason="no", source="s", lease_epoch=1, lease_id=ids(2).lease_id),
        CancelRequest(reason="no", source="s", lease_epoch=1, attempt_id=ids(2).attempt_id),
    ):
        with pytest.raises(StaleLease):
            decide_cancel(running(), wrong, TIMING)
    with pytest.raises(LeaseRevoked):
        decide_cancel(revoked(), CancelRequest(reason="no", source="s", lease_epoch=2), TIMING)
    right = CancelRequest(reason="no", source="s", lease_epoch=1, lease_id=ids(1).lease_id)
    assert decide_cancel(running(), right, TIMING).changes != NO_CHANGES
    assert decide_cancel(waiting(), system, TIMING).changes != NO_CHANGES


def test_a_worker_keeps_the_epoch_so_that_its_repeat_is_known() -> None:
    held = running()
    fence = fence_of(held)
    decision = decide_worker_cancel(held, fence, "enough", TIMING)
    after = applied(held, decision.changes)
    assert (after.execution.lease_epoch, after.execution.cancelled_by) == (1, "worker")
    repeat = decide_worker_cancel(after, fence, "again", TIMING)
    assert (repeat.answer, repeat.changes) == (decision.answer, NO_CHANGES)


@pytest.mark.parametrize("life", LIVES, ids=name_of)
def test_priorities_change_where_it_matters(life: Life) -> None:
    subject = life()
    execution = subject.execution
    for any_runnable in (False, True):
        movable = execution.lifecycle_phase == "runnable" and (
            any_runnable or execution.eligibility_state == "eligible_now"
        )
        if movable:
            decision = decide_change_priority(subject, 7, any_runnable, TIMING)
            assert applied(subject, decision.changes).execution.priority == 7
        else:
            with pytest.raises(ExecutionNotEligible):
                decide_change_priority(subject, 7, any_runnable, TIMING)


def test_priorities_are_clamped() -> None:
    assert [clamp_priority(each) for each in (-5, 0, 50, 9_000, 10_000)] == [0, 0, 50, 9_000, 9_000]
    for bad in ("5", 1.5, None, True):
        with pytest.raises(InvalidInput, match="priority"):
            clamp_priority(bad)


@pytest.mark.parametrize("life", LIVES, ids=name_of)
def test_only_what_has_ended_is_replayed(life: Life) -> None:
    subject = life()
    if life not in ENDED:
        with pytest.raises(ExecutionNotTerminal):
            decide_replay(subject, None, None, TIMING)
        return
    decision = decide_replay(subject, None, None, TIMING)
    assert decision.answer == Replayed(public_state=PublicState.WAITING)
    after = applied(subject, decision.changes).execution
    assert vector(after) == (
        "runnable unowned eligible_now waiting_for_worker none pending_replay_attempt waiting"
    )
    assert (after.result, after.failure_reason, after.cancellation_reason) == (None, None, None)
    assert after.lease_epoch == subject.execution.lease_epoch + 1


def test_replays_run_out() -> None:
    once = completed(policy={"max_replay_count": 0})
    with pytest.raises(MaxReplaysExhausted):
        decide_replay(once, None, None, TIMING)


@pytest.mark.parametrize(
    ("fields", "deadline_ms"),
    [
        ({}, None),
        ({"execution_deadline_at_ms": NOW_MS}, None),
        ({"execution_deadline_at_ms": NOW_MS + 1}, NOW_MS + 1),
        ({"policy": {"timeout_policy": {"execution_deadline_ms": 5}}}, NOW_MS + 5),
    ],
    ids=["none", "past", "to come", "relative"],
)
def test_a_replay_sets_the_deadline_anew(
    fields: dict[str, object], deadline_ms: int | None
) -> None:
    done = completed(**fields)
    decision = decide_replay(done, None, None, TIMING)
    assert applied(done, decision.changes).execution.deadline_at_ms == deadline_ms
