"""Every situation meets every operation: what happens is what the table of the core says."""

from collections.abc import Callable, Sequence

import pytest
from msgspec import structs

from flowfabric.core.changed_code import decide_accept, decide_block
from flowfabric.core.decisions import Changes, Refusal, Subject, Timing, change
from flowfabric.core.executions import (
    CancelRequest,
    Failure,
    decide_attempt_timeout,
    decide_cancel,
    decide_change_priority,
    decide_complete,
    decide_deadline,
    decide_fail,
    decide_hand_back,
    decide_promote,
    decide_replay,
)
from flowfabric.core.flow_endings import block, release
from flowfabric.core.flow_records import ExecutionInput, GroupState, JoinRecord
from flowfabric.core.grants import decide_keep_back, decide_let_go
from flowfabric.core.ids import AttemptId, EdgeId, LeaseId, SignalId, WaitpointId, WaitpointKey
from flowfabric.core.leases import (
    Fence,
    decide_expire_lease,
    decide_renew,
    decide_revoke,
    grant_lease,
)
from flowfabric.core.parking import (
    decide_await,
    decide_delay,
    decide_wait_children,
    decide_wake,
)
from flowfabric.core.policies import RetryPolicy
from flowfabric.core.records import SignalEffect, SignalFacts, TimeoutBehavior, view_of
from flowfabric.core.resumption import decide_expire_suspension, decide_resume
from flowfabric.core.signals import Mailbox, SignalFindings, SignalRequest, decide_deliver
from flowfabric.core.situations import (
    ENDED,
    HELD_BY_WORKER,
    READY,
    RULES,
    SET_ASIDE,
    UNFINISHED,
    Operation,
    Situation,
    situation_of,
)
from flowfabric.core.states import BlockingReason, EligibilityState, FailureClass
from flowfabric.core.suspension import SuspendFindings, decide_suspend
from flowfabric.errors import FlowFabricError
from tests.unit.lives import (
    KEY,
    LATE,
    NOW_MS,
    RETRY,
    TIMING,
    TTL_MS,
    WORKER,
    applied,
    asking,
    cancelled,
    completed,
    delayed,
    expired,
    expired_lease,
    failed,
    fence_of,
    ids,
    parked,
    resumable,
    retrying,
    revoked,
    running,
    suspended,
    waiting,
)
from tests.unit.test_flow_policy import GROUP

NOBODY = Fence(
    lease_id=LeaseId("00000000-0000-4000-8000-00000000dead"),
    lease_epoch=99,
    attempt_id=AttemptId("00000000-0000-4000-8000-00000000dead"),
)
BROKEN = Failure(reason="broken", failure_class=FailureClass.PERMANENT)
RETRY_POLICY = RetryPolicy(max_retries=3)
MAILBOX = Mailbox(
    waitpoint_id=WaitpointId("00000000-0000-4000-8000-0000000000c2"),
    waitpoint_key=WaitpointKey("gate"),
)
SIGNAL = SignalRequest(
    signal_name="approved", new_id=SignalId("00000000-0000-4000-8000-0000000000c1")
)
KEPT = SignalFacts(
    partition_key=1,
    execution_id=waiting().execution.execution_id,
    signal_id=SIGNAL.new_id,
    sequence=0,
    waitpoint_id=MAILBOX.waitpoint_id,
    waitpoint_key=MAILBOX.waitpoint_key,
    suspension_id=None,
    signal_name="approved",
    source_type="external",
    source_identity="",
    observed_effect=SignalEffect.KEPT,
)
INPUT = ExecutionInput(
    partition_key=1,
    execution_id=waiting().execution.execution_id,
    edge_id=EdgeId("00000000-0000-4000-8000-0000000000c3"),
    name="x",
    value=b"",
    value_encoding="raw",
    replaces_payload=False,
    resolved_at_ms=NOW_MS,
)
MUCH_LATER_MS = NOW_MS + 10**9
DEADLINE: dict[str, object] = {"execution_deadline_at_ms": MUCH_LATER_MS}
FRAGILE = {"max_reclaim_count": 0}
OTHER = waiting().execution

# The situations ---------------------------------------------------------------


def blocked(**fields: object) -> Subject:
    held = running(**fields)
    decision = decide_block(held, fence_of(held), "charge", "the code has changed", TIMING)
    return applied(held, decision.changes)


def awaiting(until_ms: int | None, **fields: object) -> Subject:
    held = running(**fields)
    others = {OTHER.execution_id: OTHER}
    decision = decide_await(held, fence_of(held), others, until_ms, TIMING)
    return applied(held, structs.replace(decision.changes, updates=decision.changes.updates[:2]))


def held_by_join(before: Subject) -> Subject:
    execution, _ = block(before.execution, GROUP, NOW_MS)
    return structs.replace(before, execution=execution)


def parked_for_join(**fields: object) -> Subject:
    before = resumable(**fields)
    return structs.replace(before, execution=change(before.execution, NOW_MS, join_pending=True))


def gated(before: Subject) -> Subject:
    decision = decide_keep_back(before, BlockingReason.WAITING_FOR_QUOTA, "", TIMING)
    return applied(before, decision.changes)


def skipped(**fields: object) -> Subject:
    held = held_by_join(waiting(**fields))
    return applied(held, release(held, group(GroupState.IMPOSSIBLE), [], TIMING, 100))


def timing_out(behavior: TimeoutBehavior, **fields: object) -> Subject:
    held = running(**fields)
    request = asking(timeout_at_ms=NOW_MS + 1, timeout_behavior=behavior)
    found = SuspendFindings(keys=[KEY])
    decision = decide_suspend(held, fence_of(held), request, found, TIMING)
    return applied(held, decision.changes)


def with_attempt_deadline(subject: Subject) -> Subject:
    execution = structs.replace(subject.execution, attempt_deadline_ms=NOW_MS)
    return structs.replace(subject, execution=execution)


def group(state: GroupState) -> JoinRecord:
    return structs.replace(GROUP, group_state=state, staged=1)


LIVES: dict[Situation, Sequence[Subject]] = {
    Situation.WAITING: [waiting(**DEADLINE)],
    Situation.RESUMABLE: [resumable(**DEADLINE)],
    Situation.DELAYED: [delayed(**DEADLINE)],
    Situation.RETRYING: [retrying(**DEADLINE)],
    Situation.PARKED: [parked(**DEADLINE), awaiting(NOW_MS + 50, **DEADLINE)],
    Situation.BLOCKED: [blocked(**DEADLINE)],
    Situation.HELD: [held_by_join(waiting(**DEADLINE)), held_by_join(delayed(**DEADLINE))],
    Situation.WAITING_CHILDREN: [awaiting(None, **DEADLINE), parked_for_join(**DEADLINE)],
    Situation.SUSPENDED: [
        suspended(**DEADLINE),
        *(timing_out(each, **DEADLINE) for each in TimeoutBehavior),
    ],
    Situation.GATED: [
        gated(waiting(**DEADLINE)),
        gated(resumable(**DEADLINE)),
    ],
    Situation.RUNNING: [
        running(**DEADLINE),
        with_attempt_deadline(running(policy=RETRY, **DEADLINE)),
        with_attempt_deadline(running(policy=FRAGILE, **DEADLINE)),
    ],
    Situation.OVERDUE_LEASE: [
        with_attempt_deadline(running(policy=RETRY, **DEADLINE)),
        with_attempt_deadline(running(policy=FRAGILE, **DEADLINE)),
    ],
    Situation.EXPIRED_LEASE: [expired_lease(**DEADLINE)],
    Situation.REVOKED: [revoked(**DEADLINE)],
    Situation.COMPLETED: [completed(**DEADLINE)],
    Situation.FAILED: [failed(**DEADLINE)],
    Situation.CANCELLED: [cancelled(**DEADLINE)],
    Situation.EXPIRED: [expired()],
    Situation.SKIPPED: [skipped(**DEADLINE)],
}


def now_in(situation: Situation) -> Timing:
    return LATE if situation is Situation.OVERDUE_LEASE else TIMING


# The operations ---------------------------------------------------------------

Act = Callable[[Subject, Timing], Changes]


def holder(subject: Subject) -> Fence:
    return NOBODY if subject.execution.lease_id is None else fence_of(subject)


def claim(subject: Subject, timing: Timing) -> Changes:
    if not subject.execution.ready:
        return Changes()
    return grant_lease(subject, WORKER, TTL_MS, ids(7), timing.now_ms).changes


def complete(subject: Subject, timing: Timing) -> Changes:
    return decide_complete(subject, holder(subject), b"r", "raw", timing).changes


def fail(subject: Subject, timing: Timing) -> Changes:
    return decide_fail(subject, holder(subject), BROKEN, timing).changes


def fail_for_now(subject: Subject, timing: Timing) -> Changes:
    failure = Failure(reason="flaky")
    return decide_fail(subject, holder(subject), failure, timing, RETRY_POLICY).changes


def sleep(subject: Subject, timing: Timing) -> Changes:
    return decide_delay(subject, holder(subject), MUCH_LATER_MS, timing).changes


def wait_for(until_ms: int | None) -> Act:
    def act(subject: Subject, timing: Timing) -> Changes:
        others = {OTHER.execution_id: OTHER}
        changes = decide_await(subject, holder(subject), others, until_ms, timing).changes
        return structs.replace(changes, updates=changes.updates[:2])

    return act


def wait_children(*, join_pending: bool) -> Act:
    """In a flow whose join is open, or with nothing to wait for."""

    def act(subject: Subject, timing: Timing) -> Changes:
        execution = structs.replace(subject.execution, join_pending=join_pending)
        asked = structs.replace(subject, execution=execution)
        return decide_wait_children(asked, holder(asked), timing).changes

    return act


def suspend(*kept: SignalFacts) -> Act:
    def act(subject: Subject, timing: Timing) -> Changes:
        found = SuspendFindings(keys=[KEY], kept=kept)
        return decide_suspend(subject, holder(subject), asking(), found, timing).changes

    return act


def meet_changed_code(subject: Subject, timing: Timing) -> Changes:
    return decide_block(subject, holder(subject), "charge", "changed", timing).changes


def hand_back(subject: Subject, timing: Timing) -> Changes:
    return decide_hand_back(subject, holder(subject), "stops", timing).changes


def renew(subject: Subject, timing: Timing) -> Changes:
    return decide_renew(subject, holder(subject), TTL_MS, timing.now_ms).changes


def signal(subject: Subject, timing: Timing, *, keep: bool = False) -> Changes:
    waitpoint = None if keep or not subject.waitpoints else subject.waitpoints[0]
    mailbox = MAILBOX if waitpoint is None else view_of(Mailbox, waitpoint)
    found = SignalFindings(mailbox=mailbox, waitpoint=waitpoint)
    return decide_deliver(subject, SIGNAL, found, timing).changes


def signal_for_later(subject: Subject, timing: Timing) -> Changes:
    return signal(subject, timing, keep=True)


def settle(state: GroupState, inputs_bytes: int = 0) -> Act:
    """`inputs_bytes` are passed on, where 10 are allowed."""

    def act(subject: Subject, timing: Timing) -> Changes:
        passed = structs.replace(INPUT, value=b"x" * inputs_bytes)
        before = EligibilityState.NOT_ELIGIBLE_UNTIL_TIME
        waited = subject.execution.delay_until_ms is not None
        fired = structs.replace(
            group(state), prior_eligibility=before if waited else EligibilityState.ELIGIBLE_NOW
        )
        return release(subject, fired, [passed], timing, inputs_bytes_max=10)

    return act


def promote(subject: Subject, timing: Timing) -> Changes:
    return decide_promote(subject, Timing(now_ms=MUCH_LATER_MS)).changes


def wake(subject: Subject, timing: Timing) -> Changes:
    return decide_wake(subject, timing).changes


def expire_lease(subject: Subject, timing: Timing) -> Changes:
    return decide_expire_lease(subject, timing).changes


def time_out_attempt(subject: Subject, timing: Timing) -> Changes:
    return decide_attempt_timeout(subject, timing).changes


def time_out_suspension(subject: Subject, timing: Timing) -> Changes:
    return decide_expire_suspension(subject, SIGNAL.new_id, LATE).changes


def meet_deadline(subject: Subject, timing: Timing) -> Changes:
    late = Timing(now_ms=MUCH_LATER_MS)
    return decide_deadline(subject, late).changes


def revoke(subject: Subject, timing: Timing) -> Changes:
    return decide_revoke(
        subject,
        expected_lease_id="",
        worker_instance_id="",
        reason="drain",
        now_ms=timing.now_ms,
    ).changes


def resume(delay_ms: int) -> Act:
    return lambda subject, timing: decide_resume(subject, "operator", delay_ms, timing).changes


def accept(subject: Subject, timing: Timing) -> Changes:
    return decide_accept(subject, None, timing).changes


def keep_back(subject: Subject, timing: Timing) -> Changes:
    reason = BlockingReason.PAUSED_BY_OPERATOR
    return decide_keep_back(subject, reason, "wait", timing).changes


def let_go(subject: Subject, timing: Timing) -> Changes:
    return decide_let_go(subject, None, timing).changes


def reprioritise(*, any_runnable: bool) -> Act:
    def act(subject: Subject, timing: Timing) -> Changes:
        return decide_change_priority(subject, 5, any_runnable, timing).changes

    return act


def cancel(subject: Subject, timing: Timing) -> Changes:
    return decide_cancel(subject, CancelRequest(reason="no"), timing).changes


def replay(subject: Subject, timing: Timing) -> Changes:
    return decide_replay(subject, "again", "ann", timing).changes


OPERATIONS: dict[Operation, Sequence[Act]] = {
    Operation.CLAIM: [claim],
    Operation.COMPLETE: [complete],
    Operation.FAIL: [fail, fail_for_now],
    Operation.DELAY: [sleep],
    Operation.AWAIT: [wait_for(None), wait_for(MUCH_LATER_MS)],
    Operation.WAIT_CHILDREN: [wait_children(join_pending=True), wait_children(join_pending=False)],
    Operation.SUSPEND: [suspend(), suspend(KEPT)],
    Operation.BLOCK: [meet_changed_code],
    Operation.HAND_BACK: [hand_back],
    Operation.RENEW: [renew],
    Operation.SIGNAL: [signal, signal_for_later],
    Operation.PROMOTE: [promote],
    Operation.WAKE: [wake],
    Operation.RESOLVE_JOIN: [
        settle(GroupState.SATISFIED),
        settle(GroupState.SATISFIED, inputs_bytes=11),
        settle(GroupState.IMPOSSIBLE),
    ],
    Operation.EXPIRE_LEASE: [expire_lease],
    Operation.EXPIRE_ATTEMPT: [time_out_attempt],
    Operation.EXPIRE_SUSPENSION: [time_out_suspension],
    Operation.EXPIRE: [meet_deadline],
    Operation.REVOKE: [revoke],
    Operation.RESUME: [resume(0), resume(50)],
    Operation.ACCEPT: [accept],
    Operation.KEEP_BACK: [keep_back],
    Operation.LET_GO: [let_go],
    Operation.REPRIORITISE: [reprioritise(any_runnable=False)],
    Operation.REPRIORITISE_ANY: [reprioritise(any_runnable=True)],
    Operation.CANCEL: [cancel],
    Operation.REPLAY: [replay],
}


# The table --------------------------------------------------------------------


def test_every_situation_and_operation_is_driven() -> None:
    assert set(LIVES) == set(Situation)
    assert set(OPERATIONS) == set(Operation) == set(RULES)


def test_each_situation_is_of_one_kind() -> None:
    assert sorted((*READY, *SET_ASIDE, *HELD_BY_WORKER, *ENDED)) == sorted(Situation)
    assert set(UNFINISHED) == set(Situation) - set(ENDED)


@pytest.mark.parametrize("situation", LIVES)
def test_each_life_is_in_its_situation(situation: Situation) -> None:
    now_ms = now_in(situation).now_ms
    for subject in LIVES[situation]:
        assert situation_of(subject.execution, now_ms) is situation
        assert subject.execution.ready == (situation in RULES[Operation.CLAIM].leads)


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("situation", LIVES)
def test_what_happens_is_what_the_table_says(situation: Situation, operation: Operation) -> None:
    rule = RULES[operation]
    reached: set[Situation] = set()
    refused: set[type[FlowFabricError]] = set()
    for subject in LIVES[situation]:
        for act in OPERATIONS[operation]:
            timing = now_in(situation)
            try:
                changes = act(subject, timing)
            except Refusal as refusal:
                refused.add(type(refusal.error))
            except FlowFabricError as error:
                refused.add(type(error))
            else:
                if changes.updates:
                    after = applied(subject, changes).execution
                    reached.add(situation_of(after, timing.now_ms))

    assert reached == set(rule.leads.get(situation, ()))
    assert refused == ({rule.refusals[situation]} if situation in rule.refusals else set())
