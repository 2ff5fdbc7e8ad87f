"""Who may act on a running execution, and until when.

A worker owns an execution through a lease. Each grant raises `lease_epoch` by
one, and a worker sends what it was granted (its *fence*: lease, epoch and
attempt) with every request. A worker that was paused, cut off or replaced
still holds the old fence, so its writes are refused whatever its own clock
says.

`check_holder` is the only place ownership is decided. A lease is dead from
`lease_expires_at_ms` on, whether or not anybody has noticed; the first to notice
writes it down.

A lost lease, expired or revoked, leaves the execution active and ready: the
next claim continues it with a new attempt, counted against the policy's
`max_reclaim_count`, and `max_worker_deaths` if it expired and its worker may be dead.
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import bounds, decisions
from flowfabric.core.checks import check_int, check_text
from flowfabric.core.events import Event, LeaseEventType, lease_event
from flowfabric.core.handles import HandleKind
from flowfabric.core.ids import AttemptId, LeaseId, WorkerId, WorkerInstanceId, parse_uuid
from flowfabric.core.policies import in_words, parse_policy, reclaim_limit
from flowfabric.core.records import FIRST_EPOCH, Attempt, Execution
from flowfabric.core.results import AlreadySatisfied, Marked, Renewed, Revoked
from flowfabric.core.situations import LOST_LEASE, Situation, into
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    AttemptType,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)


class Fence(Struct, frozen=True, kw_only=True):
    """What a worker was granted."""

    lease_id: LeaseId
    lease_epoch: int
    attempt_id: AttemptId
    attempt_index: int | None = None
    """Compared when the caller names it."""
    by_handle: bool = False
    """A handle's holder gets `LeaseConflict`, a caller of the typed form `StaleLease`."""


OPERATOR_OVERRIDE = "operator_override"
LEASE_EXPIRED = "lease_expired"
"""Why an attempt ended whose lease ran out."""


def check_ttl(lease_ttl_ms: object, field: str = "lease_ttl_ms") -> int:
    return check_int(field, lease_ttl_ms, bounds.LEASE_TTL_MS_MIN, bounds.LEASE_TTL_MS_MAX)


def not_active(execution: Execution) -> errors.ExecutionNotActive:
    return errors.ExecutionNotActive(
        execution.execution_id,
        lifecycle_phase=execution.lifecycle_phase,
        terminal_outcome=execution.terminal_outcome,
        lease_epoch=execution.lease_epoch,
        attempt_id=execution.current_attempt_id,
        reason=execution.cancellation_reason
        or in_words(execution.failure_reason or "", execution.policy),
    )


def check_fence(subject: decisions.Subject, fence: Fence | None, now_ms: int) -> None:
    """Raise unless `fence` is the live lease of an active execution.

    Without a fence (an operator acting for the worker) only the comparison is
    left out. An expired lease is noted on the way: the refusal carries it.
    """
    try:
        check_holder(subject.execution, fence, now_ms)
    except errors.LeaseExpired as error:
        # A holder that still sends requests is alive.
        died = fence is None or fence.lease_id != subject.execution.lease_id
        changes = note_expired(subject, now_ms, died=died)
        raise decisions.Refusal(error, changes) from error


def check_fence_given(fence: Fence | None, source: str) -> Fence | None:
    """Only an operator acting for the worker may omit the fence."""
    check_text("source", source)
    return None if fence is None and source == OPERATOR_OVERRIDE else require_fence(fence)


def require_fence(fence: Fence | None) -> Fence:
    """The fence of a worker that acts for itself."""
    if fence is None:
        raise errors.InvalidInput(
            "fence", f"fence_required unless the source is {OPERATOR_OVERRIDE}"
        )
    if not isinstance(fence, Fence):
        raise errors.InvalidInput("fence", "must be a Fence", fence)
    if not (fence.lease_id and fence.attempt_id):
        raise errors.InvalidInput(
            "fence", "partial_fence_triple: lease_id, lease_epoch, attempt_id"
        )
    parse_uuid("fence.lease_id", fence.lease_id)
    parse_uuid("fence.attempt_id", fence.attempt_id)
    check_int("fence.lease_epoch", fence.lease_epoch, 0, 2**62)
    if fence.attempt_index is not None:
        check_int("fence.attempt_index", fence.attempt_index, 0, 2**31 - 1)
    return fence


def check_holder(execution: Execution, fence: Fence | None, now_ms: int) -> None:
    """The same for those who only report: an expired lease is left for others to note."""
    if execution.lifecycle_phase is not LifecyclePhase.ACTIVE:
        raise not_active(execution)
    if execution.ownership_state is OwnershipState.LEASE_REVOKED:
        raise errors.LeaseRevoked(f"the lease of {execution.called} was revoked")
    if lease_is_dead(execution, now_ms):
        raise errors.LeaseExpired(
            f"the lease of {execution.called} expired at {execution.lease_expires_at_ms}"
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
    mismatch = errors.LeaseConflict if fence.by_handle else errors.StaleLease
    raise mismatch(
        f"{execution.called}: lease epoch {fence.lease_epoch} of attempt"
        f" {fence.attempt_id} is not the current one (epoch {execution.lease_epoch})"
    )


def check_attempt_index(attempt_index: object) -> None:
    if attempt_index is not None:
        check_int("attempt_index", attempt_index, 0, 2**31 - 1)


def check_attempt_meant(execution: Execution, attempt_index: int | None) -> None:
    """Refuse to act on a running attempt other than the one that is meant."""
    running = execution.lifecycle_phase is LifecyclePhase.ACTIVE
    if running and attempt_index not in (None, execution.current_attempt_index):
        raise errors.StaleLease(
            f"{execution.called}: attempt {attempt_index} is not the current one"
            f" ({execution.current_attempt_index})"
        )


def lease_is_dead(execution: Execution, now_ms: int) -> bool:
    """From its end on; and once noticed for good, even if the clock is set back."""
    expires_at_ms = execution.lease_expires_at_ms
    return (
        expires_at_ms is None
        or expires_at_ms <= now_ms
        or execution.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE
    )


def is_held(execution: Execution, now_ms: int) -> bool:
    """Whether a worker has a live lease of it."""
    leased = execution.ownership_state is OwnershipState.LEASED
    active = execution.lifecycle_phase is LifecyclePhase.ACTIVE
    return active and leased and not lease_is_dead(execution, now_ms)


# Keeping --------------------------------------------------------------------


def decide_renew(
    subject: decisions.Subject, fence: Fence, lease_ttl_ms: int, now_ms: int
) -> decisions.Decision[Renewed]:
    """Extend the lease to `lease_ttl_ms` from now. The epoch stays."""
    check_fence(subject, fence, now_ms)
    renewed = _extended(subject.execution, lease_ttl_ms, now_ms)
    return decisions.Decision(
        answer=Renewed(expires_at_ms=now_ms + lease_ttl_ms, lease_epoch=renewed.lease_epoch),
        changes=decisions.Changes(
            updates=(renewed,), events=(lease_event(renewed, LeaseEventType.RENEWED, now_ms),)
        ),
    )


def decide_hold(
    execution: Execution, fence: Fence, lease_ttl_ms: int, now_ms: int
) -> decisions.Decision[Renewed]:
    """Extend the lease inside the holder's own transaction, in which nobody else can touch it.

    It logs no event: readers of the log would wait for that transaction, however long.
    """
    check_holder(execution, fence, now_ms)
    held = _extended(execution, lease_ttl_ms, now_ms)
    return decisions.Decision(
        answer=Renewed(expires_at_ms=now_ms + lease_ttl_ms, lease_epoch=held.lease_epoch),
        changes=decisions.Changes(updates=(held,)),
    )


def _extended(execution: Execution, lease_ttl_ms: int, now_ms: int) -> Execution:
    return decisions.change(
        execution,
        now_ms,
        lease_last_renewed_at_ms=now_ms,
        lease_expires_at_ms=now_ms + lease_ttl_ms,
    )


# Losing ---------------------------------------------------------------------


def decide_expire_lease(
    subject: decisions.Subject,
    timing: decisions.Timing,
    *,
    waited_ms: int = 0,
    calm_ms: int = 0,
) -> decisions.Decision[Marked | AlreadySatisfied]:
    """Take the execution back from a worker that went quiet, if it really did.

    `waited_ms` is how long the database kept us waiting, until `calm_ms` ago.
    """
    execution = subject.execution
    reason = _why_not_expirable(execution, timing.now_ms)
    if reason is not None:
        return decisions.Decision(answer=AlreadySatisfied(reason=reason))
    outage_end_ms = timing.now_ms - calm_ms
    died = not _met_an_outage(execution, outage_end_ms - waited_ms, outage_end_ms)
    changes = note_expired(subject, timing.now_ms, died=died)
    after = changes.updates[0]
    assert isinstance(after, Execution)
    return decisions.Decision(
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


def _met_an_outage(execution: Execution, began_ms: int, ended_ms: int) -> bool:
    """Whether we could not reach the database either while the lease was to be renewed. Its end
    then says nothing about its worker: that may have tried to renew it all along, or have given up
    waiting for a claim that the database carried out once it was back.
    """
    expires_at_ms, granted_at_ms = execution.lease_expires_at_ms, execution.lease_last_renewed_at_ms
    if expires_at_ms is None or granted_at_ms is None:
        return False
    if ended_ms - began_ms < bounds.OUTAGE_MS_MIN:
        return False
    until_ms = ended_ms + bounds.OUTAGE_SLACK_MS
    return began_ms <= expires_at_ms + bounds.OUTAGE_SLACK_MS and granted_at_ms <= until_ms


def note_expired(
    subject: decisions.Subject, now_ms: int, *, died: bool = True
) -> decisions.Changes:
    """Write down that the lease expired; the lease's identity stays on the row for audit."""
    execution = subject.execution
    signs = subject.signs
    if execution.ownership_state in LOST_LEASE:
        return decisions.Changes()
    event = lease_event(execution, LeaseEventType.EXPIRED, now_ms)
    lost = decisions.change(
        execution,
        now_ms,
        **into(Situation.EXPIRED_LEASE, "lease expired, awaiting reclaim"),
        lease_expired_at_ms=now_ms,
        attempt_deadline_ms=None,
        worker_deaths=deaths_that_count(execution, signs)
        + (died and has_begun(execution) and not signs.holder_lives),
    )
    return _capped(subject, lost, event, now_ms)


def decide_revoke(
    subject: decisions.Subject,
    *,
    expected_lease_id: str,
    worker_instance_id: str,
    reason: str,
    now_ms: int,
) -> decisions.Decision[Revoked | AlreadySatisfied]:
    """Take the lease away. The epoch grows, so the holder is fenced from this moment on."""
    execution = subject.execution
    if execution.lifecycle_phase is not LifecyclePhase.ACTIVE:
        return decisions.Decision(answer=AlreadySatisfied(reason="no_active_lease"))
    if execution.ownership_state is OwnershipState.LEASE_REVOKED:
        return decisions.Decision(answer=AlreadySatisfied(reason="already_revoked"))
    if lease_is_dead(execution, now_ms):
        return decisions.Decision(
            answer=AlreadySatisfied(reason="already_expired"),
            changes=note_expired(subject, now_ms),
        )
    assert execution.lease_id is not None
    if worker_instance_id and worker_instance_id != execution.worker_instance_id:
        return decisions.Decision(answer=AlreadySatisfied(reason="different_worker_instance_id"))
    if expected_lease_id and expected_lease_id != execution.lease_id:
        return decisions.Decision(answer=AlreadySatisfied(reason="lease_id_mismatch"))
    lost = _revoked(execution, reason, now_ms)
    event = lease_event(execution, LeaseEventType.REVOKED, now_ms, reason)
    return decisions.Decision(
        answer=Revoked(lease_id=execution.lease_id, lease_epoch=lost.lease_epoch),
        changes=_capped(subject, lost, event, now_ms),
    )


def _revoked(execution: Execution, reason: str, now_ms: int) -> Execution:
    fields: dict[str, decisions.Field] = {
        **decisions.NO_LEASE,
        **into(Situation.REVOKED, f"lease revoked: {reason}"),
        "lease_epoch": execution.lease_epoch + 1,
        "lease_revoked_at_ms": now_ms,
        "lease_revoke_reason": reason,
    }
    return decisions.change(execution, now_ms, **fields)


def _capped(
    subject: decisions.Subject, lost: Execution, event: Event, now_ms: int
) -> decisions.Changes:
    """The lost execution, or its end when it has been reclaimed too often.

    Decided here and not at the next claim, so that work which kills its workers
    fails as soon as it has killed enough of them.
    """
    reason = _too_often(lost)
    if reason is None:
        # The attempt may have had no row so far; what follows must find one.
        attempt = () if subject.attempt is None else (subject.attempt,)
        return decisions.Changes(updates=(lost, *attempt), events=(event,))
    ended = decisions.finish(
        structs.replace(subject, execution=lost),
        TerminalOutcome.FAILED,
        now_ms,
        attempt_end=AttemptLifecycle.INTERRUPTED_RECLAIMED,
        reason=reason,
        attempt_failure=reason,
        fields={"failure_reason": reason, **decisions.final_lease(subject.execution)},
    )
    return structs.replace(ended, events=(event, *ended.events))


def reclaims(execution: Execution) -> int:
    """How often it was reclaimed; a corrupt negative count reads as 0."""
    return max(0, execution.lease_reclaim_count)


def _too_often(lost: Execution) -> str | None:
    """Why an execution that has lost its lease is not handed out again.

    A lease that runs out is how the death of a worker shows, unless the worker is heard of later;
    one that was given back, or taken away by an operator, is none. Once a step is stored, or the
    execution waits, the count starts again: an execution that makes progress is not what kills
    its workers.
    """
    policy = parse_policy(lost.policy)
    if reclaims(lost) >= reclaim_limit(policy):
        return "max_reclaims_exceeded"
    expired = lost.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE
    if expired and lost.worker_deaths >= policy.max_worker_deaths:
        times = "once" if lost.worker_deaths == 1 else f"{lost.worker_deaths} times"
        return f"its worker died {times} in a row without getting on; see max_worker_deaths"
    return None


def has_begun(execution: Execution) -> bool:
    """Whether its worker may have begun it.

    One that said it would renew the lease first has not begun what it never renewed.
    """
    renewed_at_ms, since_ms = execution.lease_last_renewed_at_ms, execution.lease_acquired_at_ms
    return renewed_at_ms is None or since_ms is None or renewed_at_ms >= since_ms


def deaths_that_count(execution: Execution, signs: decisions.SignsOfLife) -> int:
    """In a row, and of workers that have not been heard of since."""
    return 0 if signs.stepped else max(0, execution.worker_deaths - signs.survivors)


def on_last_chance(execution: Execution, signs: decisions.SignsOfLife = decisions.NO_SIGNS) -> bool:
    """Whether its worker has died, and the next death in a row would fail it.

    All that a dead worker had in hand has then seen a death, whichever of them killed it. To tell
    that one from the others, a worker begins one execution on its last chance at a time.
    """
    limit = parse_policy(execution.policy).max_worker_deaths
    deaths = deaths_that_count(execution, signs)
    return deaths > 0 and deaths + 1 >= limit


# Giving an execution to a worker --------------------------------------------
#
# A grant raises the epoch, so the previous holder is fenced from this moment
# on. A paused attempt continues; a lost lease, a retry or a replay starts another.

NO_TIMERS: Mapping[str, decisions.Field] = MappingProxyType({})


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
    subject: decisions.Subject,
    worker: WorkerIdentity,
    lease_ttl_ms: int,
    ids: NewIds,
    now_ms: int,
    *,
    timers: Mapping[str, decisions.Field] = NO_TIMERS,
    renews_first: bool = False,
) -> decisions.Decision[Granted]:
    """Give a ready execution to `worker`.

    An interrupted attempt (delayed, suspended, waiting for children) continues
    under the same index; work with a lost lease, a retry or a replay starts a
    new attempt. `timers` replace those of an attempt that starts. A worker that `renews_first` has
    not begun an execution over which others have died before it renews the lease.
    """
    execution = subject.execution
    assert execution.ready, "only ready executions are granted"
    lease = _lease(execution, worker, lease_ttl_ms=lease_ttl_ms, ids=ids, now_ms=now_ms)
    again = lease
    if renews_first and execution.worker_deaths:
        again = {**lease, "lease_last_renewed_at_ms": now_ms - 1}
    if execution.lifecycle_phase is LifecyclePhase.ACTIVE:
        return _reclaim(subject, again, now_ms=now_ms)
    if execution.attempt_state is AttemptState.ATTEMPT_INTERRUPTED:
        return _resume(subject, again, now_ms=now_ms)
    return _start(subject, {**lease, **timers}, now_ms=now_ms)


def granted_before(execution: Execution, attempt: Attempt) -> Granted:
    """What was granted with the lease that an execution has: its worker may not have heard it."""
    if attempt.resumed_at_ms is not None:
        kind = HandleKind.RESUMED
    elif attempt.attempt_type is AttemptType.RECLAIM:
        kind = HandleKind.RECLAIMED
    else:
        kind = HandleKind.FRESH
    return Granted(kind=kind, execution=execution, attempt=attempt)


def _start(
    subject: decisions.Subject, lease: dict[str, decisions.Field], *, now_ms: int
) -> decisions.Decision[Granted]:
    before = subject.execution
    leased = decisions.change(before, now_ms, **lease, worker_deaths=0)
    attempt = _new_attempt(before, leased, now_ms)
    event = lease_event(leased, LeaseEventType.ACQUIRED, now_ms)
    # The first attempt follows from the execution; see `core.records`.
    stored = () if leased.lease_epoch == FIRST_EPOCH else (attempt,)
    return decisions.Decision(
        answer=Granted(kind=HandleKind.FRESH, execution=leased, attempt=attempt),
        changes=decisions.Changes(inserts=stored, updates=(leased,), events=(event,)),
    )


def _reclaim(
    subject: decisions.Subject, lease: dict[str, decisions.Field], *, now_ms: int
) -> decisions.Decision[Granted]:
    before = subject.execution
    assert subject.attempt is not None, "an active execution has an attempt"
    expired = before.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE
    reason = LEASE_EXPIRED if expired else before.ownership_state.value
    ended = structs.replace(
        subject.attempt,
        attempt_state=AttemptLifecycle.INTERRUPTED_RECLAIMED,
        # Whether its worker was heard of later, is asked from here on.
        ended_at_ms=before.lease_expired_at_ms or now_ms,
        failure_reason=reason,
    )
    count = reclaims(before) + 1
    leased = decisions.change(before, now_ms, **lease, lease_reclaim_count=count)
    attempt = structs.replace(
        _new_attempt(before, leased, now_ms),
        attempt_type=AttemptType.RECLAIM,
        reclaim_reason=reason,
        previous_attempt_index=before.current_attempt_index,
    )
    event = lease_event(leased, LeaseEventType.RECLAIMED, now_ms, reason)
    return decisions.Decision(
        answer=Granted(kind=HandleKind.RECLAIMED, execution=leased, attempt=attempt),
        changes=decisions.Changes(inserts=(attempt,), updates=(leased, ended), events=(event,)),
    )


def _resume(
    subject: decisions.Subject, lease: dict[str, decisions.Field], *, now_ms: int
) -> decisions.Decision[Granted]:
    before = subject.execution
    assert subject.attempt is not None, "an interrupted execution has an attempt"
    same_attempt: dict[str, decisions.Field] = {
        "current_attempt_id": before.current_attempt_id,
        "current_attempt_index": before.current_attempt_index,
        "total_attempt_count": before.total_attempt_count,
        "attempt_deadline_ms": _deadline(now_ms, before.attempt_time_left_ms),
    }
    leased = decisions.change(before, now_ms, **{**lease, **same_attempt})
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
    return decisions.Decision(
        answer=Granted(kind=HandleKind.RESUMED, execution=leased, attempt=attempt),
        changes=decisions.Changes(updates=(leased, attempt), events=(event,)),
    )


def _deadline(now_ms: int, timeout_ms: int | None) -> int | None:
    return now_ms + timeout_ms if timeout_ms else None


def _lease(
    before: Execution, worker: WorkerIdentity, *, lease_ttl_ms: int, ids: NewIds, now_ms: int
) -> dict[str, decisions.Field]:
    """The fields of `before` that a lease changes, and with it the next attempt."""
    return {
        **decisions.NO_LEASE,
        **into(Situation.RUNNING),
        "lease_id": ids.lease_id,
        "lease_epoch": before.lease_epoch + 1,
        "worker_id": worker.worker_id,
        "worker_instance_id": worker.worker_instance_id,
        "lease_acquired_at_ms": now_ms,
        "lease_expires_at_ms": now_ms + lease_ttl_ms,
        "lease_last_renewed_at_ms": now_ms,
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
