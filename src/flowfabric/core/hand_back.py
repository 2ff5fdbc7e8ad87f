"""Giving work back: a worker that stops returns its leases instead of letting them expire.

The attempt ends as interrupted and the execution is ready again at once. It was
nobody's fault, so neither retries nor reclaims are counted.
"""

from flowfabric.core.events import LeaseEventType, lease_event
from flowfabric.core.execution import Timing
from flowfabric.core.leases import Fence, check_fence
from flowfabric.core.records import Execution
from flowfabric.core.results import HandedBack
from flowfabric.core.situations import Situation, into
from flowfabric.core.states import AttemptLifecycle, AttemptState, LifecyclePhase
from flowfabric.core.transitions import (
    NO_LEASE,
    Changes,
    Decision,
    Field,
    Subject,
    change,
    end_attempt,
)

HANDED_BACK = "handed_back"


def decide_hand_back(
    subject: Subject, fence: Fence, reason: str, timing: Timing
) -> Decision[HandedBack]:
    """Release the lease; the next claim starts a new attempt. Safe to repeat."""
    before = subject.execution
    if _repeated(before, fence):
        return Decision(answer=HandedBack(execution_id=before.execution_id))
    check_fence(subject, fence, timing.now_ms, timing.retention_ms)
    why = f"{HANDED_BACK}: {reason}"
    fields: dict[str, Field] = {
        **NO_LEASE,
        **into(Situation.WAITING),
        "attempt_state": AttemptState.PENDING_RETRY_ATTEMPT,
        "current_attempt_id": None,
        "pending_retry_reason": why,
        "pending_previous_attempt_index": before.current_attempt_index,
    }
    after = change(before, timing.now_ms, **fields)
    attempts = end_attempt(
        subject.attempt, AttemptLifecycle.INTERRUPTED_RECLAIMED, timing.now_ms, why
    )
    event = lease_event(before, LeaseEventType.REVOKED, timing.now_ms, HANDED_BACK)
    return Decision(
        answer=HandedBack(execution_id=before.execution_id),
        changes=Changes(updates=(after, *attempts), events=(event,)),
    )


def _repeated(execution: Execution, fence: Fence) -> bool:
    """Whether this holder has handed it back already and nobody has claimed it since."""
    return (
        execution.lifecycle_phase is LifecyclePhase.RUNNABLE
        and execution.attempt_state is AttemptState.PENDING_RETRY_ATTEMPT
        and execution.lease_epoch == fence.lease_epoch
        and (execution.pending_retry_reason or "").startswith(HANDED_BACK)
    )
