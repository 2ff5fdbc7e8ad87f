"""Claiming one execution by id.

A scheduler that has picked an execution for a worker issues a grant; the worker
turns it into a lease. A grant is a row beside the execution, with an end, and
changes nothing about it: an unused one is simply ignored once it has expired.
"""

from msgspec import Struct, structs

from flowfabric.core.checks import check_int, check_optional_time, missing
from flowfabric.core.granting import Granted, NewIds, WorkerIdentity, grant_lease
from flowfabric.core.lease import not_active
from flowfabric.core.policies import DURATION_MAX_MS
from flowfabric.core.records import ClaimGrant, Execution
from flowfabric.core.states import (
    AttemptState,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)
from flowfabric.core.transitions import Changes, Decision, Field, Refusal, Subject, change
from flowfabric.errors import (
    ActiveAttemptExists,
    CapabilityMismatch,
    ClaimGrantExpired,
    ExecutionNotEligible,
    ExecutionNotLeaseable,
    GrantAlreadyExists,
    InvalidClaimGrant,
    LeaseConflict,
    UseClaimResumedExecution,
)

CLAIM = "claim"


class Timers(Struct, frozen=True, kw_only=True):
    """What a claim may set differently: the timeout of its own attempt, and the deadline."""

    attempt_timeout_ms: int | None = None
    """Zero: this attempt has none."""
    deadline_at_ms: int | None = None

    def fields(self, now_ms: int) -> dict[str, Field]:
        timeout_ms, deadline_ms = self.attempt_timeout_ms, self.deadline_at_ms
        fields: dict[str, Field] = {}
        if timeout_ms is not None:
            fields["attempt_deadline_ms"] = now_ms + timeout_ms if timeout_ms else None
        if deadline_ms is not None:
            fields["deadline_at_ms"] = deadline_ms
        return fields


def check_timers(attempt_timeout_ms: object, execution_deadline_at_ms: object) -> Timers:
    return Timers(
        attempt_timeout_ms=None
        if attempt_timeout_ms is None
        else check_int("attempt_timeout_ms", attempt_timeout_ms, 0, DURATION_MAX_MS),
        deadline_at_ms=check_optional_time("execution_deadline_at_ms", execution_deadline_at_ms),
    )


class GrantRequest(Struct, frozen=True, kw_only=True):
    grant_id: str
    worker: WorkerIdentity
    offered: frozenset[str]
    ttl_ms: int


def decide_grant(
    subject: Subject, request: GrantRequest, *, required: tuple[str, ...], now_ms: int
) -> Decision[ClaimGrant]:
    """Reserve a waiting execution. A live grant of another worker stands in the way.

    A worker that asks again gets the grant it has. One that lacks a capability is
    refused, and the time of it kept on the execution.
    """
    execution = subject.execution
    if not execution.ready or execution.lifecycle_phase is not LifecyclePhase.RUNNABLE:
        raise ExecutionNotEligible(
            f"{execution.called} is {execution.public_state} and waits for no worker"
        )
    old = subject.grant
    if old is not None and old.expires_at_ms >= now_ms:
        if old.worker_id != request.worker.worker_id:
            raise GrantAlreadyExists(f"{execution.called} is reserved for {old.worker_id}")
        return Decision(answer=old)
    lacking = missing(required, request.offered)
    if lacking:
        after = change(execution, now_ms, last_capability_mismatch_at_ms=now_ms)
        raise Refusal(CapabilityMismatch(lacking), Changes(updates=(after,)))
    grant = ClaimGrant(
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        grant_id=request.grant_id,
        kind=CLAIM,
        worker_id=request.worker.worker_id,
        worker_instance_id=request.worker.worker_instance_id,
        issued_at_ms=now_ms,
        expires_at_ms=now_ms + request.ttl_ms,
    )
    changes = Changes(inserts=(grant,)) if old is None else Changes(updates=(grant,))
    return Decision(answer=grant, changes=changes)


def decide_claim_granted(
    subject: Subject,
    worker: WorkerIdentity,
    *,
    lease_ttl_ms: int,
    ids: NewIds,
    timers: Timers,
    now_ms: int,
) -> Decision[Granted]:
    """Turn a grant into a lease. The grant is used up; on refusal it stays."""
    check_leaseable(subject.execution)
    if subject.execution.attempt_state is AttemptState.ATTEMPT_INTERRUPTED:
        raise UseClaimResumedExecution(
            f"{subject.execution.called} continues an attempt: claim it as resumed"
        )
    grant = check_grant(subject, worker, now_ms)
    decision = grant_lease(subject, worker, lease_ttl_ms, ids, now_ms, timers=timers.fields(now_ms))
    return structs.replace(decision, changes=structs.replace(decision.changes, deletes=(grant,)))


def check_leaseable(execution: Execution) -> None:
    """Raise unless the execution waits for a worker."""
    if execution.lifecycle_phase in (LifecyclePhase.TERMINAL, LifecyclePhase.ACTIVE):
        raise not_active(execution)
    if execution.lifecycle_phase is not LifecyclePhase.RUNNABLE:
        raise ExecutionNotLeaseable(f"{execution.called} is {execution.public_state}")
    if execution.ownership_state is not OwnershipState.UNOWNED:
        raise LeaseConflict(f"{execution.called} is owned by {execution.worker_id}")
    if (
        execution.eligibility_state is not EligibilityState.ELIGIBLE_NOW
        or execution.terminal_outcome is not TerminalOutcome.NONE
        or execution.cancel_requested
    ):
        raise ExecutionNotLeaseable(f"{execution.called} is {execution.public_state}")
    if execution.attempt_state is AttemptState.RUNNING_ATTEMPT:
        raise ActiveAttemptExists(f"{execution.called} has a running attempt")


def check_grant(subject: Subject, worker: WorkerIdentity, now_ms: int) -> ClaimGrant:
    grant = subject.grant
    if grant is None or grant.worker_id != worker.worker_id:
        raise InvalidClaimGrant(f"{subject.execution.called} is not granted to {worker.worker_id}")
    if grant.expires_at_ms < now_ms:
        raise ClaimGrantExpired(
            f"the grant of {subject.execution.called} expired at {grant.expires_at_ms}"
        )
    return grant
