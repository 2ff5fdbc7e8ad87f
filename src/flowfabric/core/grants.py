"""Claiming one execution by id.

A scheduler that has picked an execution for a worker issues a grant; the worker
turns it into a lease. A grant is a row beside the execution, with an end, and
changes nothing about it: an unused one is simply ignored once it has expired.
"""

from msgspec import Struct, structs

from flowfabric.core.capabilities import missing
from flowfabric.core.checks import check_int, check_optional_time
from flowfabric.core.decision import Changes, Decision
from flowfabric.core.lease import Granted, NewIds, Worker, grant_lease, not_active
from flowfabric.core.model import ClaimGrant, Execution
from flowfabric.core.policies import DURATION_MAX_MS
from flowfabric.core.states import (
    AttemptState,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)
from flowfabric.core.transition import Subject
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
    """What a claim may set differently from the execution's policy."""

    attempt_timeout_ms: int | None = None
    deadline_at_ms: int | None = None


def check_timers(attempt_timeout_ms: object, execution_deadline_at_ms: object) -> Timers:
    return Timers(
        attempt_timeout_ms=None
        if attempt_timeout_ms is None
        else check_int("attempt_timeout_ms", attempt_timeout_ms, 0, DURATION_MAX_MS),
        deadline_at_ms=check_optional_time("execution_deadline_at_ms", execution_deadline_at_ms),
    )


class GrantRequest(Struct, frozen=True, kw_only=True):
    grant_id: str
    worker: Worker
    offered: frozenset[str]
    ttl_ms: int


def decide_grant(
    subject: Subject, required: tuple[str, ...], request: GrantRequest, now_ms: int
) -> Decision[ClaimGrant]:
    """Reserve a waiting execution. A live grant of another worker stands in the way."""
    execution = subject.execution
    if not execution.ready or execution.lifecycle_phase is not LifecyclePhase.RUNNABLE:
        raise ExecutionNotEligible(
            f"{execution.execution_id} is {execution.public_state} and waits for no worker"
        )
    lacking = missing(required, request.offered)
    if lacking:
        raise CapabilityMismatch(lacking)
    old = subject.grant
    if (
        old is not None
        and old.expires_at_ms >= now_ms
        and old.worker_id != request.worker.worker_id
    ):
        raise GrantAlreadyExists(f"{execution.execution_id} is reserved for {old.worker_id}")
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
    worker: Worker,
    lease_ttl_ms: int,
    ids: NewIds,
    timers: Timers,
    now_ms: int,
) -> Decision[Granted]:
    """Turn a grant into a lease. The grant is used up; on refusal it stays."""
    check_leaseable(subject.execution)
    if subject.execution.attempt_state is AttemptState.ATTEMPT_INTERRUPTED:
        raise UseClaimResumedExecution(
            f"{subject.execution.execution_id} continues an attempt: claim it as resumed"
        )
    grant = check_grant(subject, worker, now_ms)
    execution = subject.execution
    if timers.attempt_timeout_ms is not None:
        execution = structs.replace(execution, attempt_timeout_ms=timers.attempt_timeout_ms or None)
    if timers.deadline_at_ms is not None:
        execution = structs.replace(execution, deadline_at_ms=timers.deadline_at_ms)
    decision = grant_lease(
        structs.replace(subject, execution=execution), worker, lease_ttl_ms, ids, now_ms
    )
    return structs.replace(decision, changes=structs.replace(decision.changes, deletes=(grant,)))


def check_leaseable(execution: Execution) -> None:
    """Raise unless the execution waits for a worker."""
    if execution.lifecycle_phase in (LifecyclePhase.TERMINAL, LifecyclePhase.ACTIVE):
        raise not_active(execution)
    if execution.lifecycle_phase is not LifecyclePhase.RUNNABLE:
        raise ExecutionNotLeaseable(f"{execution.execution_id} is {execution.public_state}")
    if execution.ownership_state is not OwnershipState.UNOWNED:
        raise LeaseConflict(f"{execution.execution_id} is owned by {execution.worker_id}")
    if (
        execution.eligibility_state is not EligibilityState.ELIGIBLE_NOW
        or execution.terminal_outcome is not TerminalOutcome.NONE
    ):
        raise ExecutionNotLeaseable(f"{execution.execution_id} is {execution.public_state}")
    if execution.attempt_state is AttemptState.RUNNING_ATTEMPT:
        raise ActiveAttemptExists(f"{execution.execution_id} has a running attempt")


def check_grant(subject: Subject, worker: Worker, now_ms: int) -> ClaimGrant:
    grant = subject.grant
    if grant is None or grant.worker_id != worker.worker_id:
        raise InvalidClaimGrant(
            f"{subject.execution.execution_id} is not granted to {worker.worker_id}"
        )
    if grant.expires_at_ms < now_ms:
        raise ClaimGrantExpired(
            f"the grant of {subject.execution.execution_id} expired at {grant.expires_at_ms}"
        )
    return grant
