"""What people do to executions: cancel, reprioritise, replay.

An operator needs no lease. A system or worker that names another source does:
on an active execution it must show the epoch it believes in.
"""

import msgspec

from flowfabric.core.events import operator_event
from flowfabric.core.execution import Timing, repeats
from flowfabric.core.leases import OPERATOR_OVERRIDE, Fence, check_fence
from flowfabric.core.limits import PRIORITY_MAX, PRIORITY_MIN
from flowfabric.core.policies import parse_policy
from flowfabric.core.records import Execution
from flowfabric.core.results import Cancelled, Changed, Replayed
from flowfabric.core.situations import Situation, into
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.core.transitions import Changes, Decision, Field, Subject, change, finish
from flowfabric.errors import (
    ExecutionNotEligible,
    ExecutionNotTerminal,
    InvalidInput,
    LeaseRevoked,
    MaxReplaysExhausted,
    StaleLease,
)


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    source: str = OPERATOR_OVERRIDE
    lease_id: str | None = None
    lease_epoch: int | None = None
    attempt_id: str | None = None


def decide_cancel(subject: Subject, request: CancelRequest, timing: Timing) -> Decision[Cancelled]:
    """End the execution as cancelled, in any phase. Asking twice is safe."""
    execution = subject.execution
    answer = Cancelled(execution_id=execution.execution_id, public_state=PublicState.CANCELLED)
    if execution.terminal_outcome is TerminalOutcome.CANCELLED:
        return Decision(answer=answer)
    if execution.lifecycle_phase is LifecyclePhase.TERMINAL:
        raise InvalidInput(
            "execution_id",
            f"already terminal in state {execution.public_state}",
            execution.execution_id,
        )
    if execution.lifecycle_phase is LifecyclePhase.ACTIVE and request.source != OPERATOR_OVERRIDE:
        _check_epoch(execution, request)
    # The epoch grows so that the holder is fenced at once.
    epoch = execution.lease_epoch + 1
    changes = _cancel(subject, request.reason, request.source, timing, epoch)
    return Decision(answer=answer, changes=changes)


def _check_epoch(execution: Execution, request: CancelRequest) -> None:
    if request.lease_epoch is None:
        raise InvalidInput(
            "lease_epoch", f"is required to cancel active work as {request.source!r}"
        )
    if execution.ownership_state is OwnershipState.LEASE_REVOKED:
        raise LeaseRevoked(f"the lease of {execution.called} was revoked")
    if (
        request.lease_epoch != execution.lease_epoch
        or request.lease_id not in (None, execution.lease_id)
        or request.attempt_id not in (None, execution.current_attempt_id)
    ):
        raise StaleLease(
            f"{execution.called}: lease epoch {request.lease_epoch} is not the current one"
            f" ({execution.lease_epoch})"
        )


def decide_worker_cancel(
    subject: Subject, fence: Fence, reason: str, timing: Timing
) -> Decision[Cancelled]:
    """Cancel by the lease holder. The epoch stays, so a repeat is recognised."""
    execution = subject.execution
    answer = Cancelled(execution_id=execution.execution_id, public_state=PublicState.CANCELLED)
    if execution.terminal_outcome is TerminalOutcome.CANCELLED and repeats(execution, fence):
        return Decision(answer=answer)
    check_fence(subject, fence, timing.now_ms, timing.retention_ms)
    changes = _cancel(subject, reason, "worker", timing, execution.lease_epoch)
    return Decision(answer=answer, changes=changes)


def _cancel(
    subject: Subject, reason: str, source: str, timing: Timing, lease_epoch: int
) -> Changes:
    return finish(
        subject,
        TerminalOutcome.CANCELLED,
        timing.now_ms,
        retention_ms=timing.retention_ms,
        attempt_end=AttemptLifecycle.ENDED_CANCELLED,
        reason="cancelled",
        attempt_failure=f"cancelled: {reason}",
        attempt_category="cancelled",
        fields={
            "cancellation_reason": reason,
            "cancelled_by": source or subject.execution.execution_id,
            "lease_epoch": lease_epoch,
        },
    )


def clamp_priority(priority: object, field: str = "priority") -> int:
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidInput(field, "must be an integer", priority)
    return min(max(priority, PRIORITY_MIN), PRIORITY_MAX)


def decide_change_priority(
    subject: Subject, priority: int, any_runnable: bool, now_ms: int
) -> Decision[Changed]:
    """Move an execution in its queue. By default only one that is waiting for a worker."""
    execution = subject.execution
    movable = execution.lifecycle_phase is LifecyclePhase.RUNNABLE and (
        any_runnable or execution.eligibility_state is EligibilityState.ELIGIBLE_NOW
    )
    if not movable:
        raise ExecutionNotEligible(
            f"{execution.called} is {execution.public_state}: only an execution that waits"
            " for a worker can change its priority"
        )
    new_priority = clamp_priority(priority)
    after = change(execution, now_ms, priority=new_priority)
    details: dict[str, int | str] = {
        "old_priority": execution.priority,
        "new_priority": new_priority,
    }
    event = operator_event(after, "priority_changed", now_ms, _json(details))
    return Decision(
        answer=Changed(execution_id=execution.execution_id),
        changes=Changes(updates=(after,), events=(event,)),
    )


def decide_replay(
    subject: Subject, reason: str | None, requested_by: str | None, timing: Timing
) -> Decision[Replayed]:
    """Run an ended execution again, as a new attempt; its history stays."""
    execution = subject.execution
    if execution.lifecycle_phase is not LifecyclePhase.TERMINAL:
        raise ExecutionNotTerminal(
            f"{execution.called} is {execution.public_state}: only ended executions replay"
        )
    policy = parse_policy(execution.policy)
    if execution.replay_count >= policy.max_replay_count:
        raise MaxReplaysExhausted(
            f"{execution.called} was replayed {execution.replay_count} times;"
            f" its policy allows {policy.max_replay_count}"
        )
    after = change(
        execution, timing.now_ms, **_replayed(execution, reason, requested_by, timing.now_ms)
    )
    event = operator_event(
        after, "replayed", timing.now_ms, _json({"branch": "normal", "groups_reset": 0})
    )
    return Decision(
        answer=Replayed(public_state=after.public_state),
        # The attempt may have had no row so far, and follows from the execution no longer.
        changes=Changes(
            updates=(after,) if subject.attempt is None else (after, subject.attempt),
            events=(event,),
        ),
    )


def _replayed(
    execution: Execution, reason: str | None, requested_by: str | None, now_ms: int
) -> dict[str, Field]:
    had_attempt = execution.total_attempt_count > 0
    return {
        **into(Situation.WAITING),
        "terminal_outcome": TerminalOutcome.NONE,
        "attempt_state": AttemptState.PENDING_REPLAY_ATTEMPT,
        # The old holder must not be able to act on the new life of the execution.
        "lease_epoch": execution.lease_epoch + 1,
        "current_attempt_id": None,
        "retry_count": 0,
        "lease_reclaim_count": 0,
        "worker_deaths": 0,
        "replay_count": execution.replay_count + 1,
        "completed_at_ms": None,
        "final_lease_id": None,
        "final_worker_id": None,
        "final_worker_instance_id": None,
        "retain_until_ms": None,
        "delay_until_ms": None,
        "progress_pct": None,
        "progress_message": None,
        "progress_updated_at_ms": None,
        "deadline_at_ms": _rearmed_deadline(execution, now_ms),
        "result": None,
        "result_encoding": None,
        "failure_reason": None,
        "cancellation_reason": None,
        "cancelled_by": None,
        "cancel_requested": False,
        "join_pending": False,
        "next_input": None,
        "next_input_encoding": None,
        "pending_replay_reason": reason,
        "pending_replay_requested_by": requested_by,
        "pending_previous_attempt_index": (
            execution.current_attempt_index if had_attempt else None
        ),
    }


def _rearmed_deadline(execution: Execution, now_ms: int) -> int | None:
    """A relative deadline starts anew; a fixed one that has passed no longer applies."""
    timeout = parse_policy(execution.policy).timeout_policy
    if timeout is not None and timeout.execution_deadline_ms is not None:
        return now_ms + timeout.execution_deadline_ms
    if execution.deadline_at_ms is not None and execution.deadline_at_ms > now_ms:
        return execution.deadline_at_ms
    return None


def _json(details: dict[str, int | str]) -> str:
    return msgspec.json.encode(details).decode()
