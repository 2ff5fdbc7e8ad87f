"""Suspending, delivering and resuming, decided without a database."""

import pytest
from msgspec import structs

from flowfabric.core.bounds import SUSPEND_DEDUP_TTL_MS_MAX
from flowfabric.core.conditions import OperatorOnly, Single
from flowfabric.core.decisions import NO_CHANGES, Refusal, Subject, Timing
from flowfabric.core.executions import CancelRequest, decide_cancel
from flowfabric.core.ids import SignalId, WaitpointId
from flowfabric.core.records import (
    SignalDedup,
    SignalEffect,
    SignalFacts,
    SuspendDedup,
    Suspension,
    TimeoutBehavior,
    Waitpoint,
    WaitpointState,
    view_of,
)
from flowfabric.core.results import AlreadySatisfied
from flowfabric.core.resumption import (
    NORMAL,
    decide_close_waitpoint,
    decide_expire_suspension,
    decide_expire_waitpoints,
    decide_resume,
)
from flowfabric.core.signals import (
    Mailbox,
    SignalAccepted,
    SignalDuplicate,
    SignalFindings,
    SignalRequest,
    decide_deliver,
)
from flowfabric.core.suspension import (
    SuspendFindings,
    decide_suspend,
    dedup_ttl_ms,
    may_repeat,
    with_default_timeout,
)
from flowfabric.core.waitpoints import BoundWaitpoint, UsePending, decide_create_waitpoint
from flowfabric.errors import (
    AlreadySuspended,
    ExecutionNotActive,
    ExecutionNotSuspended,
    LeaseExpired,
    LeaseRevoked,
    TargetNotSignalable,
    WaitpointClosed,
    WaitpointNotFound,
    WaitpointNotOpen,
)
from tests.unit.lives import (
    ENDED,
    KEY,
    LATE,
    LIVES,
    NOW_MS,
    TIMING,
    Life,
    applied,
    asking,
    expired_lease,
    fence_of,
    ids,
    name_of,
    revoked,
    running,
    suspended,
    vector,
)

FOUND = SuspendFindings(keys=[KEY])
SIGNAL_ID = SignalId("00000000-0000-4000-8000-0000000000c1")
PENDING = BoundWaitpoint(
    waitpoint_id=WaitpointId("00000000-0000-4000-8000-0000000000d1"),
    waitpoint_key=asking().fresh[0].waitpoint_key,
)


def sending(name: str = "approved", **fields: object) -> SignalRequest:
    request = SignalRequest(
        signal_name=name, new_id=SIGNAL_ID, signal_id=SIGNAL_ID, dedup_ttl_ms=100
    )
    return structs.replace(request, **fields)


def open_waitpoint(subject: Subject) -> Waitpoint:
    (waitpoint,) = subject.waitpoints
    return waitpoint


def findings(
    waitpoint: Waitpoint,
    *,
    by_token: bool = False,
    dedup: SignalDedup | None = None,
    recorded: bool = False,
) -> SignalFindings:
    return SignalFindings(
        mailbox=view_of(Mailbox, waitpoint),
        waitpoint=waitpoint,
        by_token=by_token,
        dedup=dedup,
        recorded=recorded,
    )


def with_pending(subject: Subject) -> Subject:
    decision = decide_create_waitpoint(subject, fence_of(subject), PENDING, None, 50, [KEY], TIMING)
    return applied(subject, decision.changes)


# Who may suspend ------------------------------------------------------------------


@pytest.mark.parametrize("life", LIVES, ids=name_of)
def test_only_a_running_execution_suspends(life: Life) -> None:
    held = running()
    subject = life()
    if life is running:
        parked = decide_suspend(subject, fence_of(held), asking(), FOUND, TIMING)
        assert not parked.answer.outcome.already_satisfied
        return
    errors = {suspended: AlreadySuspended, expired_lease: Refusal, revoked: LeaseRevoked}
    with pytest.raises(errors.get(life, ExecutionNotActive)) as caught:
        decide_suspend(subject, fence_of(held), asking(), FOUND, LATE)
    if isinstance(caught.value, Refusal):
        assert isinstance(caught.value.error, LeaseExpired)


def test_a_timeout_given_wins_over_the_policy() -> None:
    policy = {"suspension_policy": {"default_timeout_ms": 5, "timeout_behavior": "cancel"}}
    execution = running(policy=policy).execution
    plain = with_default_timeout(asking(), execution, NOW_MS)
    assert (plain.timeout_at_ms, plain.timeout_behavior) == (NOW_MS + 5, TimeoutBehavior.CANCEL)
    given = asking(timeout_at_ms=NOW_MS + 9, timeout_behavior="escalate")
    named = with_default_timeout(given, execution, NOW_MS)
    assert (named.timeout_at_ms, named.timeout_behavior) == (NOW_MS + 9, TimeoutBehavior.ESCALATE)
    without = with_default_timeout(asking(), running().execution, NOW_MS)
    assert (without.timeout_at_ms, without.timeout_behavior) == (None, TimeoutBehavior.FAIL)


@pytest.mark.parametrize(
    ("timeout_at_ms", "ttl_ms"),
    [
        (None, SUSPEND_DEDUP_TTL_MS_MAX),
        (NOW_MS + 500, 60_500),
        (NOW_MS - 500, 60_000),
        (NOW_MS + 10**12, SUSPEND_DEDUP_TTL_MS_MAX),
    ],
)
def test_an_answer_is_remembered_as_long_as_the_pause_can_last(
    timeout_at_ms: int | None, ttl_ms: int
) -> None:
    assert dedup_ttl_ms(timeout_at_ms, NOW_MS) == ttl_ms


def test_an_answer_is_repeated_to_who_got_it_or_who_holds_the_lease_now() -> None:
    held = running()
    request = asking(idempotency_key="once")
    changes = decide_suspend(held, fence_of(held), request, FOUND, TIMING).changes
    dedup = changes.inserts[-1]
    away = applied(held, changes)
    later = structs.replace(away.execution, lease_id=ids(2).lease_id, lease_epoch=2)
    assert isinstance(dedup, SuspendDedup)
    assert may_repeat(away.execution, dedup, fence_of(held))
    assert may_repeat(later, dedup, fence_of(structs.replace(held, execution=later)))
    assert not may_repeat(later, dedup, fence_of(held, lease_epoch=7))


# Delivering -----------------------------------------------------------------------


def test_a_signal_that_fits_resumes() -> None:
    away = suspended()
    found = findings(open_waitpoint(away))
    decision = decide_deliver(away, sending(), found, TIMING)
    assert decision.answer == SignalAccepted(signal_id=SIGNAL_ID, effect=SignalEffect.SATISFIED)
    back = applied(away, decision.changes)
    assert vector(back.execution) == (
        "runnable unowned eligible_now waiting_for_worker none attempt_interrupted waiting"
    )
    assert (back.suspension, back.waitpoints) == (None, ())


def test_a_closed_or_foreign_waitpoint_takes_nothing() -> None:
    away = suspended()
    waitpoint = open_waitpoint(away)
    closed = structs.replace(waitpoint, state=WaitpointState.CLOSED)
    foreign = structs.replace(waitpoint, suspension_id=None)
    for each in (closed, foreign):
        found = findings(each)
        with pytest.raises(WaitpointClosed):
            decide_deliver(away, sending(), found, TIMING)
    no_longer = structs.replace(away, suspension=None)
    with pytest.raises(WaitpointClosed):
        decide_deliver(no_longer, sending(), findings(waitpoint), TIMING)


@pytest.mark.parametrize("life", ENDED, ids=name_of)
def test_what_has_ended_takes_no_signal(life: Life) -> None:
    waitpoint = open_waitpoint(suspended())
    with pytest.raises(TargetNotSignalable):
        decide_deliver(life(), sending(), findings(waitpoint), TIMING)


def test_repeats_come_before_everything_else() -> None:
    """Also for what has ended: the sender of the last signal may ask again."""
    waitpoint = open_waitpoint(suspended())
    ended = ENDED[0]()
    request = sending(idempotency_key="k")
    dedup = SignalDedup(
        partition_key=1,
        execution_id=ended.execution.execution_id,
        waitpoint_id=waitpoint.waitpoint_id,
        idempotency_key="k",
        signal_id=SignalId("00000000-0000-4000-8000-0000000000c9"),
        expires_at_ms=NOW_MS + 1,
    )
    known = findings(waitpoint, dedup=dedup)
    answer = decide_deliver(ended, request, known, TIMING).answer
    assert answer == SignalDuplicate(existing_signal_id=dedup.signal_id)
    recorded = findings(waitpoint, recorded=True)
    assert decide_deliver(ended, request, recorded, TIMING).answer == SignalDuplicate(
        existing_signal_id=SIGNAL_ID
    )
    forgotten = structs.replace(known, dedup=structs.replace(dedup, expires_at_ms=NOW_MS))
    with pytest.raises(TargetNotSignalable):
        decide_deliver(ended, request, forgotten, TIMING)


def test_a_pending_waitpoint_keeps_signals_until_it_expires() -> None:
    held = with_pending(running())
    found = findings(open_waitpoint(held))
    request = sending()
    answer = decide_deliver(held, request, found, TIMING).answer
    assert answer == SignalAccepted(signal_id=SIGNAL_ID, effect=SignalEffect.BUFFERED, kept=True)
    with pytest.raises(WaitpointClosed):
        decide_deliver(held, request, found, Timing(now_ms=NOW_MS + 50))


def test_a_token_ends_on_time_though_a_wait_keeps_its_waitpoint_open() -> None:
    held = suspended()
    ending = structs.replace(open_waitpoint(held), token_expires_at_ms=NOW_MS + 50)
    bearer = findings(ending, by_token=True)
    assert decide_deliver(held, sending(), bearer, TIMING).changes != NO_CHANGES
    late = Timing(now_ms=NOW_MS + 50)
    with pytest.raises(WaitpointClosed, match=r"the token of waitpoint .* has expired"):
        decide_deliver(held, sending(), bearer, late)
    operator = findings(ending)
    assert decide_deliver(held, sending(), operator, late).changes != NO_CHANGES


# Coming back ------------------------------------------------------------------------


@pytest.mark.parametrize("life", LIVES, ids=name_of)
def test_only_what_is_suspended_comes_back_or_times_out(life: Life) -> None:
    subject = life()
    if life is suspended:
        assert decide_resume(subject, "operator", 0, TIMING).changes != NO_CHANGES
        return
    with pytest.raises(ExecutionNotSuspended):
        decide_resume(subject, "operator", 0, TIMING)
    decision = decide_expire_suspension(subject, SIGNAL_ID, LATE)
    assert decision.answer == AlreadySatisfied(reason="not_suspended_cleaned")
    assert decision.changes == NO_CHANGES


@pytest.mark.parametrize(
    ("behavior", "after"),
    [
        (
            "fail",
            "terminal unowned not_applicable none failed attempt_terminal failed",
        ),
        (
            "cancel",
            "terminal unowned not_applicable none cancelled attempt_terminal cancelled",
        ),
        (
            "expire",
            "terminal unowned not_applicable none expired attempt_terminal expired",
        ),
        (
            "auto_resume",
            "runnable unowned eligible_now waiting_for_worker none attempt_interrupted waiting",
        ),
        (
            "escalate",
            "suspended unowned not_applicable paused_by_operator none attempt_interrupted"
            " suspended",
        ),
    ],
)
def test_each_timeout_leaves_its_state_vector(behavior: str, after: str) -> None:
    held = running()
    request = asking(OperatorOnly(), timeout_at_ms=NOW_MS + 5, timeout_behavior=behavior)
    away = applied(held, decide_suspend(held, fence_of(held), request, FOUND, TIMING).changes)
    early = Timing(now_ms=NOW_MS + 4)
    assert decide_expire_suspension(away, SIGNAL_ID, early).changes == NO_CHANGES
    due = Timing(now_ms=NOW_MS + 5)
    decision = decide_expire_suspension(away, SIGNAL_ID, due)
    assert vector(applied(away, decision.changes).execution) == after
    events = [event.category for event in decision.changes.events]
    assert events == (["completion"] if after.startswith("terminal") else [])


def test_cancelling_closes_whatever_is_open() -> None:
    for subject in (suspended(), with_pending(running())):
        changes = decide_cancel(subject, CancelRequest(reason="no"), TIMING).changes
        after = applied(subject, changes)
        assert (after.suspension, after.waitpoints) == (None, ())
        assert after.execution.open_waitpoint_count == 0
        reasons = {
            record.close_reason
            for record in changes.updates
            if isinstance(record, Suspension | Waitpoint)
        }
        assert reasons == {"cancelled"}


def test_an_early_signal_that_fits_keeps_the_lease() -> None:
    held = with_pending(running())
    waitpoint = open_waitpoint(held)
    sent = decide_deliver(held, sending(), findings(waitpoint), TIMING)
    (signal, *_) = sent.changes.inserts
    assert isinstance(signal, SignalFacts)
    held = applied(held, sent.changes)
    waitpoint = open_waitpoint(held)
    request = asking(waitpoints=[UsePending(waitpoint_id=waitpoint.waitpoint_id)])
    found = SuspendFindings(keys=[KEY], bound={waitpoint.waitpoint_id: waitpoint}, kept=[signal])
    decision = decide_suspend(held, fence_of(held), request, found, TIMING)
    assert decision.answer.outcome.already_satisfied
    assert vector(applied(held, decision.changes).execution) == vector(held.execution)


# Waitpoints -------------------------------------------------------------------------


def test_closing_is_for_who_may() -> None:
    away, held = suspended(), with_pending(running())
    active, pending = open_waitpoint(away), open_waitpoint(held)
    with pytest.raises(WaitpointNotFound):
        decide_close_waitpoint(away, None, "done", True, NOW_MS)
    with pytest.raises(WaitpointNotOpen):
        decide_close_waitpoint(away, active, "done", False, NOW_MS)
    assert decide_close_waitpoint(away, active, "done", True, NOW_MS).answer.closed == 1
    assert decide_close_waitpoint(held, pending, "done", False, NOW_MS).answer.closed == 1
    closed = structs.replace(pending, state=WaitpointState.CLOSED)
    assert decide_close_waitpoint(held, closed, "done", False, NOW_MS).changes == NO_CHANGES


def test_only_pending_waitpoints_expire() -> None:
    held = with_pending(running())
    due = Timing(now_ms=NOW_MS + 50)
    assert decide_expire_waitpoints(held, TIMING).changes == NO_CHANGES
    assert decide_expire_waitpoints(held, due).answer.closed == 1
    request = asking(Single("gate"), timeout_at_ms=NOW_MS + 5)
    fresh = running()
    away = applied(fresh, decide_suspend(fresh, fence_of(fresh), request, FOUND, TIMING).changes)
    assert decide_expire_waitpoints(away, due).changes == NO_CHANGES


def test_an_execution_comes_back_at_once_unless_asked_otherwise() -> None:
    assert structs.asdict(NORMAL) == {
        "resume_target": "runnable",
        "consume_matched_signals": True,
        "retain_signal_buffer_until_closed": False,
        "resume_delay_ms": None,
        "close_waitpoint_on_resume": True,
    }
