"""The attempt that needs no row.

Most executions run once and succeed. All there is to know about such an attempt
stands in the execution: who began it and when, and who ended it. So the first
attempt under its first lease is not stored; it is read off the execution here. Any
other end, a lost lease or a pause writes it down, and further attempts are stored
from their start.
"""

from flowfabric.core.model import Attempt, Execution
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptType,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)

FIRST_EPOCH = 1
"""The epoch of an execution's first lease."""


def runs_first_attempt(execution: Execution) -> bool:
    """Whether the first lease is live, so that no attempt has been written down yet."""
    return (
        execution.lease_epoch == FIRST_EPOCH
        and execution.total_attempt_count == 1
        and execution.ownership_state is OwnershipState.LEASED
    )


def first_attempt(execution: Execution) -> Attempt | None:
    """The attempt of an execution whose first lease is still its last; else none."""
    if execution.lease_epoch != FIRST_EPOCH or execution.total_attempt_count != 1:
        return None
    assert execution.current_attempt_id is not None
    ended = execution.lifecycle_phase is LifecyclePhase.TERMINAL
    if ended and execution.terminal_outcome is not TerminalOutcome.SUCCESS:
        return None
    return Attempt(
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        attempt_index=execution.current_attempt_index,
        attempt_id=execution.current_attempt_id,
        attempt_type=AttemptType.INITIAL,
        attempt_state=AttemptLifecycle.ENDED_SUCCESS if ended else AttemptLifecycle.STARTED,
        created_at_ms=execution.started_at_ms or execution.created_at_ms,
        started_at_ms=execution.started_at_ms,
        ended_at_ms=execution.completed_at_ms,
        lease_id=execution.final_lease_id if ended else execution.lease_id,
        lease_epoch=execution.lease_epoch,
        worker_id=execution.final_worker_id if ended else execution.worker_id,
        worker_instance_id=(
            execution.final_worker_instance_id if ended else execution.worker_instance_id
        ),
    )
