"""Executions in any state, made by the core alone: no store, no clock."""

from collections.abc import Callable
from itertools import count

from msgspec import structs

from flowfabric.core.conditions import ByName, Condition, Single
from flowfabric.core.creation import NewExecution, check_new, check_terms, new_execution
from flowfabric.core.decisions import Changes, Subject, Timing, change
from flowfabric.core.executions import (
    CancelRequest,
    Failure,
    decide_cancel,
    decide_complete,
    decide_deadline,
    decide_fail,
    decide_promote,
    decide_replay,
)
from flowfabric.core.ids import AttemptId, LeaseId, PartitionConfig, WorkerId, WorkerInstanceId
from flowfabric.core.leases import (
    Fence,
    NewIds,
    WorkerIdentity,
    decide_expire_lease,
    decide_revoke,
    grant_lease,
)
from flowfabric.core.parking import decide_delay, decide_wait_children
from flowfabric.core.records import (
    Attempt,
    Execution,
    HmacKey,
    StoredGrant,
    Suspension,
    Waitpoint,
    WaitpointState,
)
from flowfabric.core.resumption import NORMAL
from flowfabric.core.states import FailureClass
from flowfabric.core.suspension import (
    SuspendFindings,
    SuspendRequest,
    check_suspend,
    decide_suspend,
)

NOW_MS = 1_000_000
TTL_MS = 9_000
TIMING = Timing(now_ms=NOW_MS)
LATE = Timing(now_ms=NOW_MS + TTL_MS)
WORKER = WorkerIdentity(worker_id=WorkerId("w"), worker_instance_id=WorkerInstanceId("w-1"))
KEY = HmacKey(kid="k1", secret=b"s" * 32, activated_at_ms=0)
APPROVED = Single("gate", ByName("approved"))
RETRY = {"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 70}}}


def ids(number: int) -> NewIds:
    return NewIds(
        lease_id=LeaseId(f"00000000-0000-4000-8000-00000000000{number}"),
        attempt_id=AttemptId(f"00000000-0000-4000-8000-0000000000a{number}"),
    )


def applied(subject: Subject, changes: Changes) -> Subject:
    """The subject once `changes` are saved."""
    for record in (*changes.inserts, *changes.updates):
        if isinstance(record, Execution):
            subject = structs.replace(subject, execution=record)
    index = subject.execution.current_attempt_index
    for record in (*changes.inserts, *changes.updates):
        if isinstance(record, Attempt) and record.attempt_index == index:
            subject = structs.replace(subject, attempt=record)
        if isinstance(record, StoredGrant):
            subject = structs.replace(subject, grant=record)
        if isinstance(record, Suspension):
            still_open = record if record.closed_at_ms is None else None
            subject = structs.replace(subject, suspension=still_open)
        if isinstance(record, Waitpoint):
            others = {each.waitpoint_id: each for each in subject.waitpoints}
            others[record.waitpoint_id] = record
            left = (each for each in others.values() if each.state is not WaitpointState.CLOSED)
            subject = structs.replace(subject, waitpoints=tuple(left))
    return subject


def waiting(**fields: object) -> Subject:
    request = structs.replace(NewExecution(execution_kind="work"), **fields)
    checked = check_new(
        request,
        check_terms(request),
        request.input_payload,
        plain_payload=request.input_payload,
        new_uuid="550e8400-e29b-41d4-a716-446655440000",
        partitions=PartitionConfig(),
    )
    return Subject(execution=new_execution(checked, 1, NOW_MS), attempt=None)


def delayed(**fields: object) -> Subject:
    return waiting(delay_until_ms=NOW_MS + 50, **fields)


def taken(subject: Subject, number: int = 1, now_ms: int = NOW_MS) -> Subject:
    decision = grant_lease(subject, WORKER, TTL_MS, ids(number), now_ms)
    held = applied(subject, decision.changes)
    return structs.replace(held, attempt=decision.answer.attempt)


def running(**fields: object) -> Subject:
    return taken(waiting(**fields))


def fence_of(subject: Subject, **fields: object) -> Fence:
    execution = subject.execution
    assert execution.lease_id is not None
    assert execution.current_attempt_id is not None
    fence = Fence(
        lease_id=execution.lease_id,
        lease_epoch=execution.lease_epoch,
        attempt_id=execution.current_attempt_id,
    )
    return structs.replace(fence, **fields)


def retrying(**fields: object) -> Subject:
    held = running(**{"policy": RETRY} | fields)
    decision = decide_fail(held, fence_of(held), Failure(reason="flaky"), TIMING)
    return applied(held, decision.changes)


def parked(**fields: object) -> Subject:
    held = running(**fields)
    decision = decide_delay(held, fence_of(held), NOW_MS + 50, TIMING)
    return applied(held, decision.changes)


def resumable(**fields: object) -> Subject:
    set_aside = parked(**fields)
    return applied(set_aside, decide_promote(set_aside, Timing(now_ms=NOW_MS + 50)).changes)


def waiting_children(**fields: object) -> Subject:
    held = running(**fields)
    held = structs.replace(held, execution=change(held.execution, NOW_MS, join_pending=True))
    return applied(held, decide_wait_children(held, fence_of(held), TIMING).changes)


def suspended(**fields: object) -> Subject:
    held = running(**fields)
    found = SuspendFindings(keys=[KEY])
    decision = decide_suspend(held, fence_of(held), asking(), found, TIMING)
    return applied(held, decision.changes)


def asking(condition: Condition = APPROVED, **options: object) -> SuspendRequest:
    """A checked request to suspend."""
    plain: dict[str, object] = {
        "suspension_id": None,
        "waitpoints": None,
        "resume_policy": NORMAL,
        "reason_code": "waiting_for_signal",
        "requested_by": "worker",
        "timeout_at_ms": None,
        "timeout_behavior": None,
        "continuation_metadata_pointer": None,
        "idempotency_key": None,
    }
    numbers = count()
    return check_suspend(
        resume_condition=condition,
        new_id=lambda: f"00000000-0000-4000-8000-0000000000b{next(numbers)}",
        **plain | options,
    )


def expired_lease(**fields: object) -> Subject:
    held = running(**fields)
    return applied(held, decide_expire_lease(held, LATE).changes)


def revoked(**fields: object) -> Subject:
    held = running(**fields)
    decision = decide_revoke(
        held,
        expected_lease_id="",
        worker_instance_id="",
        reason="drain",
        now_ms=NOW_MS,
    )
    return applied(held, decision.changes)


def completed(**fields: object) -> Subject:
    held = running(**fields)
    return applied(held, decide_complete(held, fence_of(held), b"r", "raw", TIMING).changes)


def failed(**fields: object) -> Subject:
    held = running(**fields)
    failure = Failure(reason="broken", failure_class=FailureClass.PERMANENT)
    return applied(held, decide_fail(held, fence_of(held), failure, TIMING).changes)


def cancelled(**fields: object) -> Subject:
    free = waiting(**fields)
    return applied(free, decide_cancel(free, CancelRequest(reason="no"), TIMING).changes)


def expired(**fields: object) -> Subject:
    late = waiting(execution_deadline_at_ms=NOW_MS, **fields)
    return applied(late, decide_deadline(late, TIMING).changes)


def replayed(**fields: object) -> Subject:
    done = completed(**fields)
    return applied(done, decide_replay(done, "again", "ann", TIMING).changes)


Life = Callable[..., Subject]
LIVES: tuple[Life, ...] = (
    waiting,
    delayed,
    running,
    retrying,
    parked,
    resumable,
    waiting_children,
    suspended,
    expired_lease,
    revoked,
    completed,
    failed,
    cancelled,
    expired,
    replayed,
)
ENDED: tuple[Life, ...] = (completed, failed, cancelled, expired)


def name_of(life: Life) -> str:
    return life.__name__


def vector(execution: Execution) -> str:
    """The seven state columns as one line."""
    return " ".join(
        (
            execution.lifecycle_phase,
            execution.ownership_state,
            execution.eligibility_state,
            execution.blocking_reason,
            execution.terminal_outcome,
            execution.attempt_state,
            execution.public_state,
        )
    )
