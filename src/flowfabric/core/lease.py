"""Who may act on a running execution, and until when.

A worker owns an execution through a lease. Each grant raises `lease_epoch` by
one, and a worker sends what it was granted (its *fence*: lease, epoch and
attempt) with every request. A worker that was paused, cut off or replaced
still holds the old fence, so its writes are refused whatever its own clock
says.

`check_holder` is the only place ownership is decided. A lease is dead from
`lease_expires_at_ms` on, whether or not anybody has noticed; whoever notices
first writes it down.

A lost lease, expired or revoked, leaves the execution active and ready: the
next claim continues it with a new attempt, counted against the policy's
`max_reclaim_count`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct, structs

from flowfabric.core.attempts import FIRST_EPOCH
from flowfabric.core.decision import Changes, Decision, Refusal
from flowfabric.core.ending import finish
from flowfabric.core.events import LeaseEventType, lease_event
from flowfabric.core.handles import HandleKind
from flowfabric.core.ids import AttemptId, LeaseId, WorkerId, WorkerInstanceId
from flowfabric.core.limits import LEASE_TTL_MS_MAX, LEASE_TTL_MS_MIN
from flowfabric.core.model import Attempt, Execution
from flowfabric.core.policies import parse_policy
from flowfabric.core.results import AlreadySatisfied, Marked, Renewed, Revoked
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)
from flowfabric.core.transition import LOST_LEASE, NO_LEASE, Field, Subject, change, final_lease
from flowfabric.errors import (
    ExecutionNotActive,
    InvalidInput,
    LeaseConflict,
    LeaseExpired,
    LeaseRevoked,
    StaleLease,
)


class Fence(Struct, frozen=True, kw_only=True):
    """What a worker was granted."""

    lease_id: LeaseId
    lease_epoch: int
    attempt_id: AttemptId
    attempt_index: int | None = None
    """Compared when the caller names it."""
    by_handle: bool = False
    """A handle's holder is told `LeaseConflict`, a caller of the typed form `StaleLease`."""


OPERATOR_OVERRIDE = "operator_override"
NO_TIMERS: Mapping[str, Field] = MappingProxyType({})


class Worker(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    worker_instance_id: WorkerInstanceId


class NewIds(Struct, frozen=True, kw_only=True):
    """Fresh ids for one claim; the core has no source of randomness."""

    lease_id: LeaseId
    attempt_id: AttemptId


class Granted(Struct, frozen=True, kw_only=True):
    """The outcome of a claim: the execution and attempt as the worker now holds them."""

    kind: HandleKind
    execution: Execution
    attempt: Attempt


def check_ttl(lease_ttl_ms: object) -> int:
    if not isinstance(lease_ttl_ms, int) or isinstance(lease_ttl_ms, bool):
        raise InvalidInput("lease_ttl_ms", "must be an integer", lease_ttl_ms)
    if not LEASE_TTL_MS_MIN <= lease_ttl_ms <= LEASE_TTL_MS_MAX:
        raise InvalidInput(
            "lease_ttl_ms", f"must be {LEASE_TTL_MS_MIN} to {LEASE_TTL_MS_MAX}", lease_ttl_ms
        )
    return lease_ttl_ms


def not_active(execution: Execution) -> ExecutionNotActive:
    return ExecutionNotActive(
        execution.execution_id,
        lifecycle_phase=execution.lifecycle_phase,
        terminal_outcome=execution.terminal_outcome,
        lease_epoch=execution.lease_epoch,
        attempt_id=execution.current_attempt_id,
    )


def check_fence(subject: Subject, fence: Fence | None, now_ms: int, retention_ms: int) -> None:
    """Raise unless `fence` is the live lease of an active execution.

    Without a fence (an operator acting for the worker) only the comparison is
    left out. An expired lease is noted on the way: the refusal carries it.
    """
    try:
        check_holder(subject.execution, fence, now_ms)
    except LeaseExpired as error:
        raise Refusal(error, note_expired(subject, now_ms, retention_ms)) from error


def check_holder(execution: Execution, fence: Fence | None, now_ms: int) -> None:
    """The same for those who only report: an expired lease is left for others to note."""
    if execution.lifecycle_phase is not LifecyclePhase.ACTIVE:
        raise not_active(execution)
    if execution.ownership_state is OwnershipState.LEASE_REVOKED:
        raise LeaseRevoked(f"the lease of {execution.execution_id} was revoked")
    if lease_is_dead(execution, now_ms):
        raise LeaseExpired(
            f"the lease of {execution.execution_id} expired at {execution.lease_expires_at_ms}"
        )
    if fence is not None:
        compare_fence(execution, fence)


def compare_fence(execution: Execution, fence: Fence) -> None:
    if (
        execution.lease_id == fence.lease_id
        and execution.lease_epoch == fence.lease_epoch
        and execution.current_attempt_id == fence.attempt_id
        and fence.attempt_index in (None, execution.current_attempt_index)
    ):
        return
    mismatch = LeaseConflict if fence.by_handle else StaleLease
    raise mismatch(
        f"{execution.execution_id}: lease epoch {fence.lease_epoch} of attempt"
        f" {fence.attempt_id} is not the current one (epoch {execution.lease_epoch})"
    )


def lease_is_dead(execution: Execution, now_ms: int) -> bool:
    """From its end on; and once noticed for good, even if the clock is set back."""
    expires_at_ms = execution.lease_expires_at_ms
    return (
        expires_at_ms is None
        or expires_at_ms <= now_ms
        or execution.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE
    )


# Granting -------------------------------------------------------------------


def grant_lease(
    subject: Subject,
    worker: Worker,
    lease_ttl_ms: int,
    ids: NewIds,
    now_ms: int,
    timers: Mapping[str, Field] = NO_TIMERS,
) -> Decision[Granted]:
    """Give a ready execution to `worker`.

    An interrupted attempt (delayed, suspended, waiting for children) continues
    under the same index; work with a lost lease, a retry or a replay starts a
    new attempt. `timers` replace those of an attempt that starts.
    """
    execution = subject.execution
    assert execution.ready, "only ready executions are granted"
    if execution.lifecycle_phase is LifecyclePhase.ACTIVE:
        return _reclaim(subject, worker, lease_ttl_ms, ids, now_ms)
    if execution.attempt_state is AttemptState.ATTEMPT_INTERRUPTED:
        return _resume(subject, worker, lease_ttl_ms, ids, now_ms)
    return _start(subject, worker, lease_ttl_ms, ids, now_ms, timers)


def _start(
    subject: Subject,
    worker: Worker,
    lease_ttl_ms: int,
    ids: NewIds,
    now_ms: int,
    timers: Mapping[str, Field],
) -> Decision[Granted]:
    before = subject.execution
    leased = _leased(before, worker, lease_ttl_ms, ids, now_ms, **timers)
    attempt = _new_attempt(before, leased, now_ms)
    event = lease_event(leased, LeaseEventType.ACQUIRED, now_ms)
    # The first attempt follows from the execution; see `core.attempts`.
    stored = () if leased.lease_epoch == FIRST_EPOCH else (attempt,)
    return Decision(
        answer=Granted(kind=HandleKind.FRESH, execution=leased, attempt=attempt),
        changes=Changes(inserts=stored, updates=(leased,), events=(event,)),
    )


def _reclaim(
    subject: Subject, worker: Worker, lease_ttl_ms: int, ids: NewIds, now_ms: int
) -> Decision[Granted]:
    before = subject.execution
    assert subject.attempt is not None, "an active execution has an attempt"
    reason = f"lease_{before.ownership_state.removeprefix('lease_')}"
    ended = structs.replace(
        subject.attempt,
        attempt_state=AttemptLifecycle.INTERRUPTED_RECLAIMED,
        ended_at_ms=now_ms,
        failure_reason=reason,
    )
    leased = _leased(
        before,
        worker,
        lease_ttl_ms,
        ids,
        now_ms,
        lease_reclaim_count=before.lease_reclaim_count + 1,
    )
    attempt = structs.replace(
        _new_attempt(before, leased, now_ms),
        attempt_type=AttemptType.RECLAIM,
        reclaim_reason=reason,
        previous_attempt_index=before.current_attempt_index,
    )
    event = lease_event(leased, LeaseEventType.RECLAIMED, now_ms, reason)
    return Decision(
        answer=Granted(kind=HandleKind.RECLAIMED, execution=leased, attempt=attempt),
        changes=Changes(inserts=(attempt,), updates=(leased, ended), events=(event,)),
    )


def _resume(
    subject: Subject, worker: Worker, lease_ttl_ms: int, ids: NewIds, now_ms: int
) -> Decision[Granted]:
    before = subject.execution
    assert subject.attempt is not None, "an interrupted execution has an attempt"
    assert before.current_attempt_id is not None
    same_attempt = structs.replace(ids, attempt_id=before.current_attempt_id)
    leased = _leased(
        before,
        worker,
        lease_ttl_ms,
        same_attempt,
        now_ms,
        current_attempt_index=before.current_attempt_index,
        total_attempt_count=before.total_attempt_count,
        attempt_deadline_ms=_deadline(now_ms, before.attempt_time_left_ms),
    )
    attempt = structs.replace(
        subject.attempt,
        attempt_state=AttemptLifecycle.STARTED,
        resumed_at_ms=now_ms,
        suspended_at_ms=None,
        suspension_id=None,
        lease_id=leased.lease_id,
        lease_epoch=leased.lease_epoch,
        worker_id=worker.worker_id,
        worker_instance_id=worker.worker_instance_id,
    )
    event = lease_event(leased, LeaseEventType.ACQUIRED, now_ms, "claim_resumed")
    return Decision(
        answer=Granted(kind=HandleKind.RESUMED, execution=leased, attempt=attempt),
        changes=Changes(updates=(leased, attempt), events=(event,)),
    )


def _deadline(now_ms: int, timeout_ms: int | None) -> int | None:
    return now_ms + timeout_ms if timeout_ms else None


def _leased(
    before: Execution,
    worker: Worker,
    lease_ttl_ms: int,
    ids: NewIds,
    now_ms: int,
    **overrides: Field,
) -> Execution:
    fields: dict[str, Field] = {
        **NO_LEASE,
        "lifecycle_phase": LifecyclePhase.ACTIVE,
        "ownership_state": OwnershipState.LEASED,
        "eligibility_state": EligibilityState.NOT_APPLICABLE,
        "blocking_reason": BlockingReason.NONE,
        "blocking_detail": "",
        "attempt_state": AttemptState.RUNNING_ATTEMPT,
        "lease_id": ids.lease_id,
        "lease_epoch": before.lease_epoch + 1,
        "worker_id": worker.worker_id,
        "worker_instance_id": worker.worker_instance_id,
        "lease_acquired_at_ms": now_ms,
        "lease_expires_at_ms": now_ms + lease_ttl_ms,
        "lease_last_renewed_at_ms": now_ms,
        "lease_renewal_deadline_ms": now_ms + lease_ttl_ms * 2 // 3,
        "current_attempt_id": ids.attempt_id,
        "current_attempt_index": before.total_attempt_count,
        "total_attempt_count": before.total_attempt_count + 1,
        "attempt_deadline_ms": _deadline(now_ms, before.attempt_timeout_ms),
        "attempt_time_left_ms": None,
        "started_at_ms": now_ms if before.started_at_ms is None else before.started_at_ms,
        "pending_retry_reason": None,
        "pending_replay_reason": None,
        "pending_replay_requested_by": None,
        "pending_previous_attempt_index": None,
    }
    return change(before, now_ms, **(fields | overrides))


def _new_attempt(before: Execution, leased: Execution, now_ms: int) -> Attempt:
    assert leased.current_attempt_id is not None
    is_retry = before.attempt_state is AttemptState.PENDING_RETRY_ATTEMPT
    is_replay = before.attempt_state is AttemptState.PENDING_REPLAY_ATTEMPT
    previous = before.pending_previous_attempt_index
    return Attempt(
        partition_key=leased.partition_key,
        execution_id=leased.execution_id,
        attempt_index=leased.current_attempt_index,
        attempt_id=leased.current_attempt_id,
        attempt_type=AttemptType.RETRY
        if is_retry
        else AttemptType.REPLAY
        if is_replay
        else AttemptType.INITIAL,
        attempt_state=AttemptLifecycle.STARTED,
        created_at_ms=now_ms,
        started_at_ms=now_ms,
        lease_id=leased.lease_id,
        lease_epoch=leased.lease_epoch,
        worker_id=leased.worker_id,
        worker_instance_id=leased.worker_instance_id,
        retry_reason=before.pending_retry_reason if is_retry else None,
        previous_attempt_index=previous if is_retry else None,
        replay_reason=before.pending_replay_reason if is_replay else None,
        replay_requested_by=before.pending_replay_requested_by if is_replay else None,
        replayed_from_attempt_index=previous if is_replay else None,
    )


# Keeping --------------------------------------------------------------------


def decide_renew(
    subject: Subject, fence: Fence, lease_ttl_ms: int, now_ms: int, retention_ms: int
) -> Decision[Renewed]:
    """Extend the lease to `lease_ttl_ms` from now. The epoch stays."""
    check_fence(subject, fence, now_ms, retention_ms)
    renewed = change(
        subject.execution,
        now_ms,
        lease_last_renewed_at_ms=now_ms,
        lease_renewal_deadline_ms=now_ms + lease_ttl_ms * 2 // 3,
        lease_expires_at_ms=now_ms + lease_ttl_ms,
    )
    return Decision(
        answer=Renewed(expires_at_ms=now_ms + lease_ttl_ms, lease_epoch=renewed.lease_epoch),
        changes=Changes(
            updates=(renewed,), events=(lease_event(renewed, LeaseEventType.RENEWED, now_ms),)
        ),
    )


# Losing ---------------------------------------------------------------------


def decide_expire_lease(
    subject: Subject, now_ms: int, retention_ms: int
) -> Decision[Marked | AlreadySatisfied]:
    """Take the execution back from a worker that went quiet, if it really did."""
    execution = subject.execution
    reason = _why_not_expirable(execution, now_ms)
    if reason is not None:
        return Decision(answer=AlreadySatisfied(reason=reason))
    changes = note_expired(subject, now_ms, retention_ms)
    after = changes.updates[0]
    assert isinstance(after, Execution)
    return Decision(
        answer=Marked(execution_id=execution.execution_id, public_state=after.public_state),
        changes=changes,
    )


def _why_not_expirable(execution: Execution, now_ms: int) -> str | None:
    if execution.lifecycle_phase is not LifecyclePhase.ACTIVE:
        return "not_active"
    if execution.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE:
        return "already_expired"
    if execution.ownership_state is OwnershipState.LEASE_REVOKED:
        return "already_revoked"
    if execution.ownership_state is OwnershipState.UNOWNED:
        return "unowned"
    return None if lease_is_dead(execution, now_ms) else "not_yet_expired"


def note_expired(subject: Subject, now_ms: int, retention_ms: int) -> Changes:
    """Write down that the lease expired; the lease's identity stays on the row for audit."""
    execution = subject.execution
    if execution.ownership_state in LOST_LEASE:
        return Changes()
    event = lease_event(execution, LeaseEventType.EXPIRED, now_ms)
    lost = change(
        execution,
        now_ms,
        ownership_state=OwnershipState.LEASE_EXPIRED_RECLAIMABLE,
        blocking_reason=BlockingReason.WAITING_FOR_WORKER,
        blocking_detail="lease expired, awaiting reclaim",
        attempt_state=AttemptState.ATTEMPT_INTERRUPTED,
        lease_expired_at_ms=now_ms,
        attempt_deadline_ms=None,
    )
    return _capped(
        subject,
        lost,
        event_changes=Changes(events=(event,)),
        now_ms=now_ms,
        retention_ms=retention_ms,
    )


def decide_revoke(
    subject: Subject,
    *,
    expected_lease_id: str,
    worker_instance_id: str,
    reason: str,
    now_ms: int,
    retention_ms: int,
) -> Decision[Revoked | AlreadySatisfied]:
    """Take the lease away. The epoch grows, so the holder is fenced from this moment on."""
    execution = subject.execution
    if execution.lifecycle_phase is not LifecyclePhase.ACTIVE:
        return Decision(answer=AlreadySatisfied(reason="no_active_lease"))
    if execution.ownership_state is OwnershipState.LEASE_REVOKED:
        return Decision(answer=AlreadySatisfied(reason="already_revoked"))
    if lease_is_dead(execution, now_ms):
        return Decision(
            answer=AlreadySatisfied(reason="already_expired"),
            changes=note_expired(subject, now_ms, retention_ms),
        )
    assert execution.lease_id is not None
    if worker_instance_id and worker_instance_id != execution.worker_instance_id:
        return Decision(answer=AlreadySatisfied(reason="different_worker_instance_id"))
    if expected_lease_id and expected_lease_id != execution.lease_id:
        return Decision(answer=AlreadySatisfied(reason="lease_id_mismatch"))
    lost = _revoked(execution, reason, now_ms)
    event = lease_event(execution, LeaseEventType.REVOKED, now_ms, reason)
    return Decision(
        answer=Revoked(lease_id=execution.lease_id, lease_epoch=lost.lease_epoch),
        changes=_capped(
            subject,
            lost,
            event_changes=Changes(events=(event,)),
            now_ms=now_ms,
            retention_ms=retention_ms,
        ),
    )


def _revoked(execution: Execution, reason: str, now_ms: int) -> Execution:
    fields: dict[str, Field] = {
        **NO_LEASE,
        "ownership_state": OwnershipState.LEASE_REVOKED,
        "blocking_reason": BlockingReason.WAITING_FOR_WORKER,
        "blocking_detail": f"lease revoked: {reason}",
        "attempt_state": AttemptState.ATTEMPT_INTERRUPTED,
        "lease_epoch": execution.lease_epoch + 1,
        "lease_revoked_at_ms": now_ms,
        "lease_revoke_reason": reason,
    }
    return change(execution, now_ms, **fields)


def _capped(
    subject: Subject, lost: Execution, *, event_changes: Changes, now_ms: int, retention_ms: int
) -> Changes:
    """The lost execution, or its end when it has been reclaimed too often.

    Decided here and not at the next claim, so that work which kills its workers
    fails as soon as it has killed enough of them.
    """
    cap = parse_policy(lost.policy).max_reclaim_count
    if lost.lease_reclaim_count < cap:
        # The attempt may have had no row so far; what follows must find one.
        attempt = () if subject.attempt is None else (subject.attempt,)
        return Changes(updates=(lost, *attempt), events=event_changes.events)
    ended = finish(
        structs.replace(subject, execution=lost),
        TerminalOutcome.FAILED,
        now_ms,
        retention_ms=retention_ms,
        attempt_end=AttemptLifecycle.INTERRUPTED_RECLAIMED,
        reason="max_reclaims_exceeded",
        attempt_failure="max_reclaims_exceeded",
        fields={"failure_reason": "max_reclaims_exceeded", **final_lease(subject.execution)},
    )
    return structs.replace(ended, events=event_changes.events + ended.events)
