"""One execution for one worker, by id; or for none, while it is kept back.

A scheduler that has picked an execution for a worker issues a grant; the worker turns it into
a lease. The execution's own row says until when it is granted, which keeps `claim` away from
it. Nobody has to revoke a grant: any change to the execution invalidates it, and it expires.

The worker shows the key it received. It is signed over everything the grant is about, and
names the one grant it stands for, so that an old key never claims a later life of
the execution. The lease has the id of the grant: a claim that is repeated because its answer
was lost gets the same lease.

An execution is kept back from every worker for a reason that the caller names: a budget or a quota
is used up, no registered worker can run it, or an operator or a policy pauses it. An execution that
waits for anything else is refused: that wait comes first, and the reason may no longer hold once it
is over. Executions that limits hold up are not kept back: they stay ready
(`diagnosis.held_up_by_limits`).
"""

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import decisions, states
from flowfabric.core.checks import missing
from flowfabric.core.events import LeaseEventType, lease_event
from flowfabric.core.handles import HandleKind
from flowfabric.core.ids import (
    AttemptId,
    ExecutionId,
    GateId,
    LeaseId,
    WorkerId,
    WorkerInstanceId,
    parse_uuid,
)
from flowfabric.core.leases import (
    Granted,
    NewIds,
    WorkerIdentity,
    grant_lease,
    lease_is_dead,
    not_active,
    note_expired,
    reclaims,
)
from flowfabric.core.policies import parse_policy, reclaim_limit
from flowfabric.core.records import Execution, GrantKind, Lane, Record, StoredGrant
from flowfabric.core.results import (
    Blocked,
    GrantNotFound,
    Marked,
    NotReclaimable,
    ReclaimCapExceeded,
    Unblocked,
)
from flowfabric.core.situations import (
    GATE_REASONS,
    LOST_LEASE,
    Hold,
    Situation,
    gated,
    held_by,
    situation_of,
)

# The key a worker shows -----------------------------------------------------

_encode: Final = msgspec.msgpack.Encoder().encode
KEY_CHARS_MAX: Final = 256


class GrantKey(Struct, frozen=True, kw_only=True):
    """A key as presented. Its repr leaves the signature out."""

    kind: GrantKind
    grant_id: str
    expires_at_ms: int
    signature: bytes

    def __repr__(self) -> str:
        return f"GrantKey({self.kind}, {self.grant_id})"


def show(grant: StoredGrant, execution: Execution, secret: bytes) -> str:
    """The key to a grant, as text."""
    signature = _signature(grant, execution, grant.worker_id, secret)
    return f"{grant.kind}:{grant.grant_id}:{grant.expires_at_ms}:{signature.hex()}"


def read_key(grant_key: object) -> GrantKey:
    """Read what `show` wrote. The signature is carried over, not checked."""
    if not isinstance(grant_key, str):
        raise errors.InvalidInput("grant_key", "must be text", grant_key)
    if len(grant_key) > KEY_CHARS_MAX:
        raise errors.InvalidInput("grant_key", f"must have at most {KEY_CHARS_MAX} characters")
    try:
        kind, grant_id, expires_at_ms, signature = grant_key.split(":")
        return GrantKey(
            kind=GrantKind(kind),
            grant_id=parse_uuid("grant_key", grant_id),
            expires_at_ms=int(expires_at_ms),
            signature=bytes.fromhex(signature),
        )
    except ValueError:
        raise errors.InvalidInput(
            "grant_key", "is not a key that was handed out", grant_key
        ) from None


def _signature(
    grant: StoredGrant | GrantKey, execution: Execution, worker_id: str, secret: bytes
) -> bytes:
    """Over fields with their lengths, so that none can run into the next."""
    about = (grant.kind, grant.grant_id, grant.expires_at_ms)
    message = _encode((*about, execution.execution_id, execution.lane_id, worker_id))
    return hashlib.blake2s(message, key=secret, digest_size=16, person=b"grant").digest()


def opens(key: GrantKey, execution: Execution, worker_id: str, secret: bytes) -> bool:
    """Whether the key was issued to this worker for this execution."""
    return hmac.compare_digest(_signature(key, execution, worker_id, secret), key.signature)


# Issuing --------------------------------------------------------------------


class GrantRequest(Struct, frozen=True, kw_only=True):
    grant_id: str
    worker: WorkerIdentity
    offered: frozenset[str]
    ttl_ms: int


class Where(Struct, frozen=True, kw_only=True):
    """What an execution's route says about who may run it."""

    lane: Lane | None
    required: tuple[str, ...]


def live_grant(subject: decisions.Subject, now_ms: int) -> StoredGrant | None:
    """The grant that keeps the execution for its worker now."""
    grant = subject.grant
    until_ms = subject.execution.granted_until_ms
    if grant is None or until_ms is None or until_ms < now_ms:
        return None
    return grant


def hands_out(lane: Lane | None) -> bool:
    """Whether work of this lane may reach workers at all."""
    return lane is None or lane.state in (states.LaneState.ACTIVE, states.LaneState.DRAINING)


def check_lane(lane: Lane | None) -> None:
    if lane is not None and not hands_out(lane):
        raise errors.LanePaused(f"lane {lane.lane_id!r} is {lane.state}: resume it")


def decide_grant(
    subject: decisions.Subject, request: GrantRequest, *, place: Where, now_ms: int
) -> decisions.Decision[StoredGrant]:
    """Reserve a waiting execution. A live grant of another worker stands in the way.

    A worker that asks again gets the grant it has. A worker that lacks a capability is
    refused, and the execution remembers when.
    """
    execution = subject.execution
    waits = execution.lifecycle_phase is states.LifecyclePhase.RUNNABLE
    if not waits or held_by(execution) not in (Hold.NOTHING, Hold.GRANT):
        raise not_eligible(execution)
    old = _granted_before(subject, request.worker, now_ms)
    if old is not None:
        return decisions.Decision(answer=old)
    check_lane(place.lane)
    lacking = missing(place.required, request.offered)
    if lacking:
        raise decisions.Refusal(
            errors.CapabilityMismatch(lacking), _note_mismatch(execution, now_ms)
        )
    return _grant(subject, GrantKind.CLAIM, request, now_ms)


def decide_reclaim_grant(
    subject: decisions.Subject, request: GrantRequest, *, place: Where, timing: decisions.Timing
) -> decisions.Decision[StoredGrant | NotReclaimable | ReclaimCapExceeded]:
    """Reserve an execution that has lost its lease; an unnoticed loss is recorded first."""
    execution_id = subject.execution.execution_id
    lost = _notice(subject, timing)
    subject = decisions.advance(subject, lost)
    execution = subject.execution
    if execution.lifecycle_phase is states.LifecyclePhase.TERMINAL and lost.updates:
        limit = reclaim_limit(parse_policy(execution.policy))
        if reclaims(execution) >= limit:
            exceeded = ReclaimCapExceeded(execution_id=execution_id, reclaim_count=limit)
            return decisions.Decision(answer=exceeded, changes=lost)
    if not _reclaimable(execution):
        return _not_reclaimable(execution_id, "execution_not_reclaimable", lost)
    try:
        old = _granted_before(subject, request.worker, timing.now_ms)
        check_lane(place.lane)
    except errors.FlowFabricError as error:
        raise decisions.Refusal(error, lost) from error
    if old is not None:
        return decisions.Decision(answer=old)
    lacking = missing(place.required, request.offered)
    if lacking:
        changes = decisions.combine((lost, _note_mismatch(execution, timing.now_ms)))
        detail = f"capability_mismatch: {','.join(lacking)}"
        return _not_reclaimable(execution_id, detail, changes)
    made = _grant(subject, GrantKind.RECLAIM, request, timing.now_ms)
    return structs.replace(made, changes=decisions.combine((lost, made.changes)))


def _granted_before(
    subject: decisions.Subject, worker: WorkerIdentity, now_ms: int
) -> StoredGrant | None:
    old = live_grant(subject, now_ms)
    if old is not None and old.worker_id != worker.worker_id:
        raise errors.GrantAlreadyExists(f"{subject.execution.called} is kept for {old.worker_id}")
    return old


def _grant(
    subject: decisions.Subject, kind: GrantKind, request: GrantRequest, now_ms: int
) -> decisions.Decision[StoredGrant]:
    execution = subject.execution
    grant = StoredGrant(
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        route_id=execution.route_id,
        grant_id=request.grant_id,
        kind=kind,
        worker_id=request.worker.worker_id,
        worker_instance_id=request.worker.worker_instance_id,
        issued_at_ms=now_ms,
        expires_at_ms=now_ms + request.ttl_ms,
    )
    kept = decisions.change(execution, now_ms, granted_until_ms=grant.expires_at_ms)
    changes = (
        decisions.Changes(inserts=(grant,), updates=(kept,))
        if subject.grant is None
        else decisions.Changes(updates=(kept, grant))
    )
    return decisions.Decision(answer=grant, changes=changes)


def _note_mismatch(execution: Execution, now_ms: int) -> decisions.Changes:
    after = decisions.change(execution, now_ms, last_capability_mismatch_at_ms=now_ms)
    return decisions.Changes(updates=(after,))


def _notice(subject: decisions.Subject, timing: decisions.Timing) -> decisions.Changes:
    execution = subject.execution
    leased = execution.ownership_state is states.OwnershipState.LEASED
    if not leased or not lease_is_dead(execution, timing.now_ms):
        return decisions.NO_CHANGES
    return note_expired(subject, timing.now_ms)


def _reclaimable(execution: Execution) -> bool:
    lost = execution.ownership_state in LOST_LEASE
    active = execution.lifecycle_phase is states.LifecyclePhase.ACTIVE
    return active and lost and held_by(execution) in (Hold.NOTHING, Hold.GRANT)


def _not_reclaimable(
    execution_id: ExecutionId, detail: str, changes: decisions.Changes = decisions.NO_CHANGES
) -> decisions.Decision[NotReclaimable]:
    answer = NotReclaimable(execution_id=execution_id, detail=detail)
    return decisions.Decision(answer=answer, changes=changes)


# Time -----------------------------------------------------------------------


def decide_return(subject: decisions.Subject, now_ms: int) -> decisions.Decision[Marked | None]:
    """Forget a grant that was not used in time: any worker may claim the execution again."""
    grant, execution = subject.grant, subject.execution
    if grant is None or grant.expires_at_ms >= now_ms:
        return decisions.Decision(answer=None)
    answer = Marked(execution_id=execution.execution_id, public_state=execution.public_state)
    return decisions.Decision(answer=answer, changes=given_back(subject, now_ms))


def unused_starts(
    subjects: Iterable[decisions.Subject], changes: decisions.Changes, now_ms: int
) -> dict[GateId, list[int]]:
    """When each gate counted a start for a grant that expires unused with `changes`.

    A grant that the execution no longer refers to keeps its start: the execution has moved on.
    """
    written = (*changes.updates, *changes.deletes)
    gone = {each.execution_id for each in written if isinstance(each, StoredGrant)}
    times: dict[GateId, list[int]] = {}
    for subject in subjects:
        grant, until_ms = subject.grant, subject.execution.granted_until_ms
        if grant is None or grant.execution_id not in gone or grant.expires_at_ms >= now_ms:
            continue
        if until_ms == grant.expires_at_ms:
            for gate_id in msgspec.json.decode(grant.counted_by, type=list[GateId]):
                times.setdefault(gate_id, []).append(grant.issued_at_ms)
    return times


def counted(changes: decisions.Changes, gate_ids: Iterable[GateId]) -> decisions.Changes:
    """The same changes; their grant remembers the gates that counted its start."""
    counted_by = msgspec.json.encode(sorted(gate_ids)).decode()

    def noted(records: Iterable[Record]) -> tuple[Record, ...]:
        return tuple(
            structs.replace(each, counted_by=counted_by) if isinstance(each, StoredGrant) else each
            for each in records
        )

    return structs.replace(changes, inserts=noted(changes.inserts), updates=noted(changes.updates))


def given_back(subject: decisions.Subject, now_ms: int) -> decisions.Changes:
    """The execution without its grant."""
    assert subject.grant is not None
    if subject.execution.granted_until_ms is None:
        return decisions.Changes(deletes=(subject.grant,))
    free = decisions.change(subject.execution, now_ms, granted_until_ms=None)
    return decisions.Changes(updates=(free,), deletes=(subject.grant,))


# Using ----------------------------------------------------------------------


class GrantClaim(Struct, frozen=True, kw_only=True):
    """A worker's claim of an execution by id."""

    worker: WorkerIdentity
    key: GrantKey
    secret: bytes
    """What keys are signed with."""
    lease_ttl_ms: int
    lane_id: str | None = None
    """The claim is refused if the execution is in another lane."""
    lease_id: LeaseId | None = None
    """Defaults to the grant's id."""
    attempt_id: AttemptId | None = None
    """For an attempt that begins; defaults to the grant's id."""
    attempt_timeout_ms: int | None = None
    """Zero: this attempt has none."""
    deadline_at_ms: int | None = None
    attempt_index: int | None = None
    attempt_time_left_ms: int | None = None
    """Replaces the time that a resumed attempt had left when it was parked."""
    max_reclaim_count: int | None = None

    @property
    def ids(self) -> NewIds:
        grant_id = self.key.grant_id
        return NewIds(
            lease_id=self.lease_id or LeaseId(grant_id),
            attempt_id=self.attempt_id or AttemptId(grant_id),
        )

    def timers(self, now_ms: int) -> dict[str, decisions.Field]:
        """The times that the claim sets."""
        timeout_ms, timers = self.attempt_timeout_ms, dict[str, decisions.Field]()
        if timeout_ms is not None:
            timers["attempt_deadline_ms"] = now_ms + timeout_ms if timeout_ms else None
        if self.deadline_at_ms is not None:
            timers["deadline_at_ms"] = self.deadline_at_ms
        return timers


def decide_claim_granted(
    subject: decisions.Subject, claim: GrantClaim, lane: Lane | None, timing: decisions.Timing
) -> decisions.Decision[Granted]:
    """Turn a grant into a lease under which an attempt begins."""
    repeated = _repeated(subject, claim, timing.now_ms)
    if repeated is not None:
        return decisions.Decision(answer=repeated)
    execution = subject.execution
    check_leaseable(execution)
    check_lane_meant(execution, claim.lane_id)
    if execution.attempt_state is states.AttemptState.ATTEMPT_INTERRUPTED:
        raise errors.UseClaimResumedExecution(
            f"{execution.called} continues an attempt: claim it as resumed"
        )
    _check_attempt_meant("expected_attempt_index", execution.total_attempt_count, claim)
    return _use(subject, claim, lane, timing.now_ms)


def decide_claim_resumed(
    subject: decisions.Subject, claim: GrantClaim, lane: Lane | None, timing: decisions.Timing
) -> decisions.Decision[Granted]:
    """Turn a grant into a lease under which the interrupted attempt continues."""
    repeated = _repeated(subject, claim, timing.now_ms)
    if repeated is not None:
        return decisions.Decision(answer=repeated)
    execution = subject.execution
    check_lane_meant(execution, claim.lane_id)
    if execution.lifecycle_phase is not states.LifecyclePhase.RUNNABLE:
        raise errors.ExecutionNotLeaseable(f"{execution.called} is {execution.public_state}")
    if execution.attempt_state is not states.AttemptState.ATTEMPT_INTERRUPTED:
        raise errors.NotAResumedExecution(
            f"{execution.called} has no attempt to continue: claim it the ordinary way"
        )
    if held_by(execution) not in (Hold.NOTHING, Hold.GRANT):
        raise errors.ExecutionNotLeaseable(f"{execution.called} is {execution.public_state}")
    _check_attempt_meant("current_attempt_index", execution.current_attempt_index, claim)
    return _use(subject, claim, lane, timing.now_ms)


def _use(
    subject: decisions.Subject, claim: GrantClaim, lane: Lane | None, now_ms: int
) -> decisions.Decision[Granted]:
    """Turn the grant into a lease. On refusal it stays, unless its time is over."""
    grant = check_grant(subject, claim, GrantKind.CLAIM, now_ms)
    check_lane(lane)
    return _lease(subject, grant, claim, now_ms)


def _lease(
    subject: decisions.Subject, grant: StoredGrant, claim: GrantClaim, now_ms: int
) -> decisions.Decision[Granted]:
    fields: dict[str, decisions.Field] = {"granted_until_ms": None}
    if claim.attempt_time_left_ms is not None:
        fields["attempt_time_left_ms"] = claim.attempt_time_left_ms or None
    free = decisions.change(subject.execution, now_ms, **fields)
    decision = grant_lease(
        structs.replace(subject, execution=free),
        claim.worker,
        claim.lease_ttl_ms,
        claim.ids,
        now_ms,
        timers=claim.timers(now_ms),
    )
    return structs.replace(decision, changes=structs.replace(decision.changes, deletes=(grant,)))


def check_grant(
    subject: decisions.Subject, claim: GrantClaim, kind: GrantKind, now_ms: int
) -> StoredGrant:
    """The grant the key stands for, if it may be used."""
    execution, key, worker_id = subject.execution, claim.key, claim.worker.worker_id
    if key.kind is not kind or not opens(key, execution, worker_id, claim.secret):
        raise errors.InvalidClaimGrant(f"{execution.called} is not granted to {worker_id}")
    grant = subject.grant
    held = grant is not None and grant.grant_id == key.grant_id
    if key.expires_at_ms < now_ms:
        late = errors.ClaimGrantExpired(
            f"the grant of {execution.called} expired at {key.expires_at_ms}"
        )
        if held:
            raise decisions.Refusal(late, given_back(subject, now_ms))
        raise late
    if grant is None or not held or execution.granted_until_ms != key.expires_at_ms:
        raise errors.InvalidClaimGrant(f"{execution.called} has changed since the grant was issued")
    return grant


def check_leaseable(execution: Execution) -> None:
    """Raise unless the execution waits for a worker."""
    if execution.lifecycle_phase is states.LifecyclePhase.TERMINAL:
        raise not_active(execution)
    if execution.lifecycle_phase is not states.LifecyclePhase.RUNNABLE:
        raise errors.ExecutionNotLeaseable(f"{execution.called} is {execution.public_state}")
    if execution.ownership_state is not states.OwnershipState.UNOWNED:
        raise errors.LeaseConflict(f"{execution.called} is owned by {execution.worker_id}")
    if (
        execution.eligibility_state is not states.EligibilityState.ELIGIBLE_NOW
        or execution.terminal_outcome is not states.TerminalOutcome.NONE
        or execution.cancel_requested
    ):
        raise errors.ExecutionNotLeaseable(f"{execution.called} is {execution.public_state}")
    if execution.attempt_state is states.AttemptState.RUNNING_ATTEMPT:
        raise errors.ActiveAttemptExists(f"{execution.called} has a running attempt")


def _repeated(subject: decisions.Subject, claim: GrantClaim, now_ms: int) -> Granted | None:
    """The lease this process got for this grant before, if it still holds it."""
    execution, attempt = subject.execution, subject.attempt
    if (
        execution.ownership_state is not states.OwnershipState.LEASED
        or execution.lease_id != claim.ids.lease_id
        or execution.worker_instance_id != claim.worker.worker_instance_id
        or lease_is_dead(execution, now_ms)
        or attempt is None
        or not opens(claim.key, execution, claim.worker.worker_id, claim.secret)
    ):
        return None
    return Granted(
        kind=_kind(attempt.attempt_type, attempt.resumed_at_ms),
        execution=execution,
        attempt=attempt,
    )


def _kind(attempt_type: states.AttemptType, resumed_at_ms: int | None) -> HandleKind:
    if resumed_at_ms is not None:
        return HandleKind.RESUMED
    return HandleKind.RECLAIMED if attempt_type is states.AttemptType.RECLAIM else HandleKind.FRESH


def check_lane_meant(execution: Execution, lane_id: str | None) -> None:
    if lane_id not in (None, execution.lane_id):
        raise errors.InvalidInput(
            "lane_id", f"lane_mismatch: the execution is in lane {execution.lane_id!r}", lane_id
        )


def _check_attempt_meant(field: str, index: int, claim: GrantClaim) -> None:
    if claim.attempt_index not in (None, index):
        raise errors.InvalidInput(
            field, f"the attempt to be claimed is {index}", claim.attempt_index
        )


def decide_reclaim(
    subject: decisions.Subject, claim: GrantClaim, lane: Lane | None, timing: decisions.Timing
) -> decisions.Decision[Granted | NotReclaimable | ReclaimCapExceeded | GrantNotFound]:
    """Turn a grant into a lease under which a lost attempt is tried again.

    An execution that has lost its lease too often fails, but only when a grant
    is used.
    """
    repeated = _repeated(subject, claim, timing.now_ms)
    if repeated is not None:
        return decisions.Decision(answer=repeated)
    execution, grant, worker_id = subject.execution, subject.grant, claim.worker.worker_id
    execution_id = execution.execution_id
    if not _reclaimable(execution):
        return _not_reclaimable(execution_id, "execution_not_reclaimable")
    limit = reclaim_limit(parse_policy(execution.policy))
    if claim.max_reclaim_count is not None:
        limit = min(limit, claim.max_reclaim_count)
    exceeded = ReclaimCapExceeded(execution_id=execution_id, reclaim_count=limit)
    too_often = reclaims(execution) >= limit
    check_lane_meant(execution, claim.lane_id)
    if grant is not None and grant.grant_id == claim.key.grant_id and grant.worker_id != worker_id:
        problem = f"the grant was issued to {grant.worker_id}"
        raise errors.InvalidInput("worker_id", problem, worker_id)
    try:
        grant = check_grant(subject, claim, GrantKind.RECLAIM, timing.now_ms)
    except (decisions.Refusal, errors.Contention) as late:
        answer = exceeded if too_often else GrantNotFound(execution_id=execution_id)
        noted = late.changes if isinstance(late, decisions.Refusal) else decisions.NO_CHANGES
        return decisions.Decision(answer=answer, changes=noted)
    check_lane(lane)
    if too_often:
        return decisions.Decision(answer=exceeded, changes=_give_up(subject, timing))
    return _lease(subject, grant, claim, timing.now_ms)


def _give_up(subject: decisions.Subject, timing: decisions.Timing) -> decisions.Changes:
    reason = "max_reclaims_exceeded"
    ended = decisions.finish(
        subject,
        states.TerminalOutcome.FAILED,
        timing.now_ms,
        attempt_end=states.AttemptLifecycle.INTERRUPTED_RECLAIMED,
        reason=reason,
        attempt_failure=reason,
        fields={"failure_reason": reason},
    )
    taken = lease_event(subject.execution, LeaseEventType.REVOKED, timing.now_ms, reason)
    return structs.replace(ended, events=(taken, *ended.events))


# An operator takes one ------------------------------------------------------

OPERATOR: Final = "operator"


def decide_grant_and_claim(
    subject: decisions.Subject,
    ids: NewIds,
    lease_ttl_ms: int,
    *,
    lane: Lane | None,
    force: bool,
    now_ms: int,
) -> decisions.Decision[Granted]:
    """Give a waiting execution to the operator who asks for it, whatever it requires.

    With `force`, a sleeping attempt is woken.
    """
    execution = subject.execution
    if execution.lifecycle_phase is not states.LifecyclePhase.RUNNABLE:
        raise not_eligible(execution)
    grant = live_grant(subject, now_ms)
    if grant is not None:
        raise errors.GrantAlreadyExists(f"{execution.called} is kept for {grant.worker_id}")
    free = decisions.change(execution, now_ms, granted_until_ms=None)
    if force and situation_of(free) in (Situation.PARKED, Situation.BLOCKED):
        awake = {**decisions.UNBLOCKED, "delay_until_ms": None, "awaits_child": False}
        free = decisions.change(free, now_ms, **awake)
    if not free.ready:
        raise not_eligible(execution)
    check_lane(lane)
    operator = WorkerIdentity(
        worker_id=WorkerId(OPERATOR), worker_instance_id=WorkerInstanceId(OPERATOR)
    )
    decision = grant_lease(
        structs.replace(subject, execution=free), operator, lease_ttl_ms, ids, now_ms
    )
    resumed = decision.answer.kind is HandleKind.RESUMED
    reason = "issue_grant_and_claim_resumed" if resumed else "issue_grant_and_claim"
    events = tuple(structs.replace(each, reason=reason) for each in decision.changes.events)
    left = () if subject.grant is None else (subject.grant,)
    return structs.replace(
        decision, changes=structs.replace(decision.changes, events=events, deletes=left)
    )


def not_eligible(execution: Execution) -> errors.ExecutionNotEligible:
    return errors.ExecutionNotEligible(
        f"{execution.called} is {execution.public_state} and is not waiting for a worker"
    )


# Keeping one back -----------------------------------------------------------


def check_gate_reason(field: str, reason: object) -> states.BlockingReason:
    if not isinstance(reason, str) or reason not in GATE_REASONS:
        raise errors.InvalidBlockingReason(
            field, f"must be one of {', '.join(GATE_REASONS)}", reason
        )
    return states.BlockingReason(reason)


def decide_keep_back(
    subject: decisions.Subject,
    reason: states.BlockingReason,
    detail: str,
    timing: decisions.Timing,
) -> decisions.Decision[Blocked]:
    """Keep a waiting execution from every worker. Whatever else it waits for comes first."""
    execution = subject.execution
    if execution.lifecycle_phase is states.LifecyclePhase.TERMINAL:
        raise not_active(execution)
    waits = situation_of(execution) in (Situation.WAITING, Situation.RESUMABLE)
    if not (waits or _is_kept_back(execution)):
        raise not_eligible(execution)
    kept = decisions.change(execution, timing.now_ms, **gated(reason, detail))
    return decisions.Decision(
        answer=Blocked(execution_id=execution.execution_id, reason=reason),
        changes=decisions.Changes(updates=(kept,)),
    )


def decide_let_go(
    subject: decisions.Subject, expected: states.BlockingReason | None, timing: decisions.Timing
) -> decisions.Decision[Unblocked]:
    """Release an execution that was kept back, for the `expected` reason if there is one."""
    execution = subject.execution
    if not _is_kept_back(execution):
        raise errors.ExecutionNotEligible(
            f"{execution.called} is {execution.public_state} and not kept back"
        )
    if expected not in (None, execution.blocking_reason):
        raise errors.ExecutionNotEligible(
            f"{execution.called} is kept back for {execution.blocking_reason}, not {expected}"
        )
    free = decisions.change(execution, timing.now_ms, **decisions.UNBLOCKED)
    return decisions.Decision(
        answer=Unblocked(execution_id=execution.execution_id),
        changes=decisions.Changes(updates=(free,)),
    )


def _is_kept_back(execution: Execution) -> bool:
    gated_now = situation_of(execution) is Situation.GATED
    return gated_now and execution.blocking_reason in GATE_REASONS
