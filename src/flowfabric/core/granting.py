"""Giving an execution to a worker.

A grant raises the epoch, so whoever held the execution before is fenced from this moment on. A
paused attempt continues; a lost lease, a retry or a replay starts another.
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct, structs

from flowfabric.core.events import LeaseEventType, lease_event
from flowfabric.core.handles import HandleKind
from flowfabric.core.ids import AttemptId, LeaseId, WorkerId, WorkerInstanceId
from flowfabric.core.records import FIRST_EPOCH, Attempt, Execution
from flowfabric.core.situations import Situation, into
from flowfabric.core.states import AttemptLifecycle, AttemptState, AttemptType, LifecyclePhase
from flowfabric.core.transitions import NO_LEASE, Changes, Decision, Field, Subject, change

NO_TIMERS: Mapping[str, Field] = MappingProxyType({})


class WorkerIdentity(Struct, frozen=True, kw_only=True):
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


def grant_lease(
    subject: Subject,
    worker: WorkerIdentity,
    lease_ttl_ms: int,
    ids: NewIds,
    now_ms: int,
    *,
    timers: Mapping[str, Field] = NO_TIMERS,
) -> Decision[Granted]:
    """Give a ready execution to `worker`.

    An interrupted attempt (delayed, suspended, waiting for children) continues
    under the same index; work with a lost lease, a retry or a replay starts a
    new attempt. `timers` replace those of an attempt that starts.
    """
    execution = subject.execution
    assert execution.ready, "only ready executions are granted"
    lease = _lease(execution, worker, lease_ttl_ms=lease_ttl_ms, ids=ids, now_ms=now_ms)
    if execution.lifecycle_phase is LifecyclePhase.ACTIVE:
        return _reclaim(subject, lease, now_ms=now_ms)
    if execution.attempt_state is AttemptState.ATTEMPT_INTERRUPTED:
        return _resume(subject, lease, now_ms=now_ms)
    return _start(subject, {**lease, **timers}, now_ms=now_ms)


def _start(subject: Subject, lease: dict[str, Field], *, now_ms: int) -> Decision[Granted]:
    before = subject.execution
    leased = change(before, now_ms, **lease, worker_deaths=0)
    attempt = _new_attempt(before, leased, now_ms)
    event = lease_event(leased, LeaseEventType.ACQUIRED, now_ms)
    # The first attempt follows from the execution; see `core.records`.
    stored = () if leased.lease_epoch == FIRST_EPOCH else (attempt,)
    return Decision(
        answer=Granted(kind=HandleKind.FRESH, execution=leased, attempt=attempt),
        changes=Changes(inserts=stored, updates=(leased,), events=(event,)),
    )


def _reclaim(subject: Subject, lease: dict[str, Field], *, now_ms: int) -> Decision[Granted]:
    before = subject.execution
    assert subject.attempt is not None, "an active execution has an attempt"
    reason = f"lease_{before.ownership_state.removeprefix('lease_')}"
    ended = structs.replace(
        subject.attempt,
        attempt_state=AttemptLifecycle.INTERRUPTED_RECLAIMED,
        ended_at_ms=now_ms,
        failure_reason=reason,
    )
    reclaims = before.lease_reclaim_count + 1
    leased = change(before, now_ms, **lease, lease_reclaim_count=reclaims)
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


def _resume(subject: Subject, lease: dict[str, Field], *, now_ms: int) -> Decision[Granted]:
    before = subject.execution
    assert subject.attempt is not None, "an interrupted execution has an attempt"
    same_attempt: dict[str, Field] = {
        "current_attempt_id": before.current_attempt_id,
        "current_attempt_index": before.current_attempt_index,
        "total_attempt_count": before.total_attempt_count,
        "attempt_deadline_ms": _deadline(now_ms, before.attempt_time_left_ms),
        "worker_deaths": 0,
    }
    leased = change(before, now_ms, **{**lease, **same_attempt})
    attempt = structs.replace(
        subject.attempt,
        attempt_state=AttemptLifecycle.STARTED,
        resumed_at_ms=now_ms,
        suspended_at_ms=None,
        suspension_id=None,
        lease_id=leased.lease_id,
        lease_epoch=leased.lease_epoch,
        worker_id=leased.worker_id,
        worker_instance_id=leased.worker_instance_id,
    )
    event = lease_event(leased, LeaseEventType.ACQUIRED, now_ms, "claim_resumed")
    return Decision(
        answer=Granted(kind=HandleKind.RESUMED, execution=leased, attempt=attempt),
        changes=Changes(updates=(leased, attempt), events=(event,)),
    )


def _deadline(now_ms: int, timeout_ms: int | None) -> int | None:
    return now_ms + timeout_ms if timeout_ms else None


def _lease(
    before: Execution, worker: WorkerIdentity, *, lease_ttl_ms: int, ids: NewIds, now_ms: int
) -> dict[str, Field]:
    """The fields of `before` that a lease changes, and with it the next attempt."""
    return {
        **NO_LEASE,
        **into(Situation.RUNNING),
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
