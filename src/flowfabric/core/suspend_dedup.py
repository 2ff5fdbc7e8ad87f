"""What a suspend was answered, so that a repeat gets the same."""

from flowfabric.core.leases import Fence
from flowfabric.core.limits import SUSPEND_DEDUP_GRACE_MS, SUSPEND_DEDUP_TTL_MS_MAX
from flowfabric.core.records import Execution, SuspendDedup, Suspension
from flowfabric.core.transitions import Subject
from flowfabric.core.waitpoints import SuspendRequest


def remember(
    subject: Subject,
    request: SuspendRequest,
    suspension: Suspension,
    already_satisfied: bool,
    now_ms: int,
) -> tuple[SuspendDedup, ...]:
    """So that a repeat gets this answer, whatever else it asks for."""
    execution = subject.execution
    if request.idempotency_key is None:
        return ()
    assert execution.lease_id is not None
    assert execution.current_attempt_id is not None
    assert execution.worker_instance_id is not None
    return (
        SuspendDedup(
            partition_key=execution.partition_key,
            execution_id=execution.execution_id,
            idempotency_key=request.idempotency_key,
            suspension_id=suspension.suspension_id,
            already_satisfied=already_satisfied,
            lease_id=execution.lease_id,
            lease_epoch=execution.lease_epoch,
            attempt_id=execution.current_attempt_id,
            attempt_index=execution.current_attempt_index,
            worker_instance_id=execution.worker_instance_id,
            lease_ttl_ms=lease_ttl_of(execution),
            expires_at_ms=now_ms + dedup_ttl_ms(suspension.timeout_at_ms, now_ms),
        ),
    )


def lease_ttl_of(execution: Execution) -> int:
    """How long the live lease was granted or renewed for."""
    assert execution.lease_expires_at_ms is not None
    assert execution.lease_last_renewed_at_ms is not None
    return execution.lease_expires_at_ms - execution.lease_last_renewed_at_ms


def dedup_ttl_ms(timeout_at_ms: int | None, now_ms: int) -> int:
    """As long as the suspension can last, and a little more."""
    if timeout_at_ms is None:
        return SUSPEND_DEDUP_TTL_MS_MAX
    lasts_ms = max(timeout_at_ms - now_ms, 0)
    return min(lasts_ms + SUSPEND_DEDUP_GRACE_MS, SUSPEND_DEDUP_TTL_MS_MAX)


def may_repeat(execution: Execution, dedup: SuspendDedup, fence: Fence) -> bool:
    """Whether the caller is who was answered, or who holds the execution now."""
    asked = (fence.lease_id, fence.lease_epoch, fence.attempt_id)
    return asked in (
        (dedup.lease_id, dedup.lease_epoch, dedup.attempt_id),
        (execution.lease_id, execution.lease_epoch, execution.current_attempt_id),
    )
