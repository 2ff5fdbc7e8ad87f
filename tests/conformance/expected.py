"""Records and events as the operations must leave them, spelled out."""

from collections.abc import Sequence

from msgspec import structs

from flowfabric.core.events import Event, EventCategory
from flowfabric.core.records import Attempt, Execution
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)

DAY_MS = 24 * 60 * 60 * 1_000

NO_LEASE = dict.fromkeys(
    (
        "lease_id",
        "worker_id",
        "worker_instance_id",
        "lease_acquired_at_ms",
        "lease_expires_at_ms",
        "lease_last_renewed_at_ms",
        "lease_expired_at_ms",
        "lease_revoked_at_ms",
        "lease_revoke_reason",
        "attempt_deadline_ms",
    )
)

_ENDS = {
    PublicState.COMPLETED: TerminalOutcome.SUCCESS,
    PublicState.FAILED: TerminalOutcome.FAILED,
    PublicState.CANCELLED: TerminalOutcome.CANCELLED,
    PublicState.EXPIRED: TerminalOutcome.EXPIRED,
}


def ended(before: Execution, public_state: PublicState, now_ms: int, **fields: object) -> Execution:
    """`before` at its end; the attempt too, if there was one."""
    had_attempt = before.total_attempt_count > 0
    changes = {
        **NO_LEASE,
        "lifecycle_phase": LifecyclePhase.TERMINAL,
        "ownership_state": OwnershipState.UNOWNED,
        "eligibility_state": EligibilityState.NOT_APPLICABLE,
        "blocking_reason": BlockingReason.NONE,
        "blocking_detail": "",
        "terminal_outcome": _ENDS[public_state],
        "attempt_state": AttemptState.ATTEMPT_TERMINAL if had_attempt else before.attempt_state,
        "public_state": public_state,
        "ready": False,
        "delay_until_ms": None,
        "awaits_child": False,
        "attempt_time_left_ms": None,
        "current_suspension_id": None,
        "current_waitpoint_id": None,
        "open_waitpoint_count": 0,
        "completed_at_ms": now_ms,
        "final_lease_id": before.lease_id,
        "final_worker_id": before.worker_id,
        "final_worker_instance_id": before.worker_instance_id,
        "retain_until_ms": now_ms
        + (7 * DAY_MS if public_state is PublicState.COMPLETED else 30 * DAY_MS),
        "last_transition_at_ms": now_ms,
        "last_mutation_at_ms": now_ms,
    }
    return structs.replace(before, **changes | fields)


def set_aside(
    before: Execution,
    eligibility_state: EligibilityState,
    blocking_reason: BlockingReason,
    attempt_state: AttemptState,
    now_ms: int,
    **fields: object,
) -> Execution:
    """`before` without a worker, waiting for something."""
    public_state = (
        PublicState.DELAYED
        if eligibility_state is EligibilityState.NOT_ELIGIBLE_UNTIL_TIME
        else PublicState.WAITING_CHILDREN
    )
    changes = {
        **NO_LEASE,
        "lifecycle_phase": LifecyclePhase.RUNNABLE,
        "ownership_state": OwnershipState.UNOWNED,
        "eligibility_state": eligibility_state,
        "blocking_reason": blocking_reason,
        "attempt_state": attempt_state,
        "public_state": public_state,
        "last_transition_at_ms": now_ms,
        "last_mutation_at_ms": now_ms,
    }
    return structs.replace(before, **changes | fields)


def to_be_retried(before: Execution, reason: str, until_ms: int, now_ms: int) -> Execution:
    """`before` after its first failure, waiting until the next attempt."""
    return set_aside(
        before,
        EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
        BlockingReason.WAITING_FOR_RETRY_BACKOFF,
        AttemptState.PENDING_RETRY_ATTEMPT,
        now_ms,
        blocking_detail=f"retry backoff until {until_ms}",
        current_attempt_id=None,
        retry_count=1,
        delay_until_ms=until_ms,
        pending_retry_reason=reason,
        pending_previous_attempt_index=0,
    )


def attempt_ended(
    before: Attempt,
    state: AttemptLifecycle,
    now_ms: int,
    failure: str | None = None,
    category: str | None = None,
) -> Attempt:
    return structs.replace(
        before,
        attempt_state=state,
        ended_at_ms=now_ms,
        failure_reason=failure,
        failure_category=category,
    )


def attempts_ended(
    before: Sequence[Attempt], state: AttemptLifecycle, now_ms: int, failure: str, category: str
) -> tuple[Attempt, ...]:
    """Those that were open have ended."""
    return tuple(
        each
        if each.attempt_state.is_terminal
        else attempt_ended(each, state, now_ms, failure, category)
        for each in before
    )


def attempt_set_aside(before: Attempt, waits_for: str, now_ms: int, **fields: object) -> Attempt:
    return structs.replace(
        before,
        attempt_state=AttemptLifecycle.SUSPENDED,
        suspended_at_ms=now_ms,
        suspension_id=waits_for,
        **fields,
    )


def lease_event(
    holding: Execution, event_type: str, now_ms: int, reason: str | None = None
) -> Event:
    """About the lease `holding` has."""
    return Event(
        category=EventCategory.LEASE,
        event_type=event_type,
        partition_key=holding.partition_key,
        execution_id=holding.execution_id,
        flow_id=holding.flow_id,
        lease_id=holding.lease_id,
        lease_epoch=holding.lease_epoch,
        attempt_index=holding.current_attempt_index,
        worker_instance_id=holding.worker_instance_id,
        reason=reason,
        namespace=holding.namespace,
        instance_tag=holding.instance_tag,
        occurred_at_ms=now_ms,
    )


def completion_event(after: Execution, now_ms: int) -> Event:
    return Event(
        category=EventCategory.COMPLETION,
        event_type=after.terminal_outcome,
        partition_key=after.partition_key,
        execution_id=after.execution_id,
        flow_id=after.flow_id,
        lease_epoch=after.lease_epoch,
        attempt_index=after.current_attempt_index,
        namespace=after.namespace,
        instance_tag=after.instance_tag,
        occurred_at_ms=now_ms,
    )


def operator_event(after: Execution, event_type: str, details: str, now_ms: int) -> Event:
    return Event(
        category=EventCategory.OPERATOR,
        event_type=event_type,
        partition_key=after.partition_key,
        execution_id=after.execution_id,
        flow_id=after.flow_id,
        details=details,
        namespace=after.namespace,
        instance_tag=after.instance_tag,
        occurred_at_ms=now_ms,
    )
