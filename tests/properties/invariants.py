"""What must hold of the rows of any execution, and of any step from one version to the next."""

from collections.abc import Sequence

from flowfabric.core.decisions import with_derived
from flowfabric.core.events import Event, EventCategory
from flowfabric.core.handles import Handle
from flowfabric.core.records import Execution
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)
from tests.properties.world import Life

HELD = (
    "lease_id",
    "worker_id",
    "worker_instance_id",
    "lease_acquired_at_ms",
    "lease_expires_at_ms",
    "lease_last_renewed_at_ms",
)
LOST = ("lease_expired_at_ms", "lease_revoked_at_ms", "lease_revoke_reason")


def check_rows(life: Life) -> None:
    """The rows agree with each other and with themselves."""
    execution = life.execution
    assert execution == with_derived(execution), "public_state and ready follow from the dimensions"
    ended = execution.lifecycle_phase is LifecyclePhase.TERMINAL
    assert ended == (execution.terminal_outcome is not TerminalOutcome.NONE)
    assert ended == (execution.completed_at_ms is not None)
    assert ended == (execution.retain_until_ms is not None)
    waits = execution.eligibility_state is EligibilityState.NOT_ELIGIBLE_UNTIL_TIME
    assert waits == (execution.delay_until_ms is not None)
    _check_lease(execution)
    _check_attempts(life)


def _check_lease(execution: Execution) -> None:
    present = {name for name in (*HELD, *LOST) if getattr(execution, name) is not None}
    match execution.ownership_state:
        case OwnershipState.LEASED:
            assert present == set(HELD)
        case OwnershipState.LEASE_EXPIRED_RECLAIMABLE:
            assert present == {*HELD, "lease_expired_at_ms"}
        case OwnershipState.LEASE_REVOKED:
            assert present == {"lease_revoked_at_ms", "lease_revoke_reason"}
        case OwnershipState.UNOWNED:
            assert present == set()
    active = execution.lifecycle_phase is LifecyclePhase.ACTIVE
    assert active == (execution.ownership_state is not OwnershipState.UNOWNED)
    if execution.ownership_state is not OwnershipState.LEASED:
        assert execution.attempt_deadline_ms is None, "only a running attempt times out"


def _check_attempts(life: Life) -> None:
    execution, attempts = life.execution, life.attempts
    assert [attempt.attempt_index for attempt in attempts] == list(
        range(execution.total_attempt_count)
    )
    assert len({attempt.attempt_id for attempt in attempts}) == len(attempts)
    assert [a for a in attempts[:-1] if not a.attempt_state.is_terminal] == []
    for attempt in attempts:
        assert attempt.attempt_state.is_terminal == (attempt.ended_at_ms is not None)
        assert attempt.lease_epoch <= execution.lease_epoch
    if not attempts:
        assert execution.current_attempt_index == 0
        assert execution.current_attempt_id is None
        return
    last = attempts[-1]
    assert execution.current_attempt_index == last.attempt_index
    assert execution.current_attempt_id in (last.attempt_id, None)
    assert last.attempt_state.is_terminal == (
        execution.attempt_state
        not in (AttemptState.RUNNING_ATTEMPT, AttemptState.ATTEMPT_INTERRUPTED)
    )
    if execution.ownership_state is OwnershipState.LEASED:
        assert last.attempt_state is AttemptLifecycle.STARTED
        assert (last.attempt_id, last.lease_id, last.lease_epoch, last.worker_instance_id) == (
            execution.current_attempt_id,
            execution.lease_id,
            execution.lease_epoch,
            execution.worker_instance_id,
        )


def check_step(before: Life, after: Life, events: Sequence[Event], now_ms: int) -> None:
    """One operation led from `before` to `after` and told `events`."""
    old, new = before.execution, after.execution
    assert new.lease_epoch >= old.lease_epoch, "the epoch only grows"
    ended = [attempt for attempt in before.attempts if attempt.attempt_state.is_terminal]
    assert list(after.attempts[: len(ended)]) == ended, "history stays"
    if new != old:
        assert new.last_mutation_at_ms == now_ms
    moved = new.lifecycle_phase is not old.lifecycle_phase
    assert new.last_transition_at_ms == (now_ms if moved else old.last_transition_at_ms)
    _check_completions(old, new, events)


def _check_completions(old: Execution, new: Execution, events: Sequence[Event]) -> None:
    """Exactly one completion event for each end, and none for anything else."""
    told = [
        (event.event_type, event.lease_epoch, event.attempt_index, event.occurred_at_ms)
        for event in events
        if event.category is EventCategory.COMPLETION
    ]
    ended = (
        new.lifecycle_phase is LifecyclePhase.TERMINAL
        and old.lifecycle_phase is not LifecyclePhase.TERMINAL
    )
    expected = (
        new.terminal_outcome,
        new.lease_epoch,
        new.current_attempt_index,
        new.completed_at_ms,
    )
    assert told == ([expected] if ended else [])


def holds(life: Life, handle: Handle, now_ms: int) -> bool:
    """Whether the handle stands for a live lease."""
    execution = life.execution
    return (
        execution.ownership_state is OwnershipState.LEASED
        and execution.lease_id == handle.lease_id
        and execution.lease_epoch == handle.lease_epoch
        and execution.current_attempt_id == handle.attempt_id
        and (execution.lease_expires_at_ms or 0) > now_ms
    )
