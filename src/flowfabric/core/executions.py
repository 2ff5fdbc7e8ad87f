"""What workers, people and time do to an execution.

Each `decide_…` takes the locked `Subject`, the request and the time, and
returns what to write and what to answer. Repeats are safe: a worker whose
connection died before it saw our answer sends the same request with the same
fence, and gets the same answer with nothing written.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from flowfabric import errors
from flowfabric.core import decisions, policies, results
from flowfabric.core.bounds import PRIORITY_MAX, PRIORITY_MIN
from flowfabric.core.events import LeaseEventType, lease_event, operator_event
from flowfabric.core.leases import OPERATOR_OVERRIDE, Fence, check_fence, check_holder
from flowfabric.core.records import Execution, FailedStep
from flowfabric.core.situations import RULES, Operation, Situation, into, situation_of
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    FailureClass,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)

ALREADY_TERMINAL = "already terminal in state "
"""Why what has ended is not cancelled, followed by its state."""


class Failure(Struct, frozen=True, kw_only=True):
    """Why an attempt failed, and whether trying again may help."""

    reason: str
    failure_class: FailureClass = FailureClass.TRANSIENT
    category: str = ""
    """Free-form; the class's name when empty."""
    traceback: str | None = None
    """Where in the program it happened."""
    step: FailedStep | None = None
    """The step that failed, if it was one."""

    @property
    def named_category(self) -> str:
        return self.category or self.failure_class.value

    @property
    def attempt_fields(self) -> Mapping[str, decisions.Field]:
        """What the attempt keeps of it, apart from reason and category."""
        fields: dict[str, decisions.Field] = {"failure_traceback": self.traceback}
        if self.step is not None:
            fields |= {
                "failed_step_key": self.step.step_key,
                "failed_step_name": self.step.name,
                "failed_step_line": self.step.line,
                "failed_step_error": self.step.error,
                "failed_step_duration_ms": self.step.duration_ms,
            }
        return fields


def repeats(execution: Execution, fence: Fence | None) -> bool:
    """Whether the caller is the worker that last held the execution."""
    return (
        fence is not None
        and execution.lease_epoch == fence.lease_epoch
        and execution.current_attempt_id == fence.attempt_id
    )


# Ending ---------------------------------------------------------------------


def decide_complete(
    subject: decisions.Subject,
    fence: Fence | None,
    result: bytes | None,
    result_encoding: str | None,
    timing: decisions.Timing,
) -> decisions.Decision[results.Completed]:
    """Finish a running execution successfully."""
    execution = subject.execution
    answer = results.Completed(
        execution_id=execution.execution_id, public_state=PublicState.COMPLETED
    )
    if execution.terminal_outcome is TerminalOutcome.SUCCESS and repeats(execution, fence):
        return decisions.Decision(answer=answer)
    check_fence(subject, fence, timing.now_ms)
    changes = decisions.finish(
        subject,
        TerminalOutcome.SUCCESS,
        timing.now_ms,
        attempt_end=AttemptLifecycle.ENDED_SUCCESS,
        reason="completed",
        fields={"result": result, "result_encoding": result_encoding},
    )
    return decisions.Decision(answer=answer, changes=changes)


def decide_fail(
    subject: decisions.Subject,
    fence: Fence | None,
    failure: Failure,
    timing: decisions.Timing,
    retry_policy: policies.RetryPolicy | None = None,
) -> decisions.Decision[results.FailResult]:
    """Record a failed attempt: schedule a retry if policy and class allow, else end.

    `retry_policy` stands in for the one the execution was created with.
    """
    execution = subject.execution
    repeated = _repeated_failure(execution, fence)
    if repeated is not None:
        return decisions.Decision(answer=repeated)
    check_fence(subject, fence, timing.now_ms)
    policy = retry_policy or policies.parse_policy(execution.policy).retry_policy
    delay_ms = policies.decide_retry(
        policy,
        retry_count=execution.retry_count,
        failure_class=failure.failure_class,
        category=failure.named_category,
        chance=timing.chance,
    )
    if delay_ms is not None:
        return schedule_retry(subject, failure, timing.now_ms + delay_ms, timing.now_ms)
    changes = decisions.finish(
        subject,
        TerminalOutcome.FAILED,
        timing.now_ms,
        attempt_end=AttemptLifecycle.ENDED_FAILURE,
        reason="failed_terminal",
        attempt_failure=failure.reason,
        attempt_category=failure.named_category,
        attempt_fields=failure.attempt_fields,
        fields={"failure_reason": failure.reason},
    )
    return decisions.Decision(
        answer=results.TerminalFailed(execution_id=execution.execution_id), changes=changes
    )


def _repeated_failure(execution: Execution, fence: Fence | None) -> results.FailResult | None:
    if execution.terminal_outcome is TerminalOutcome.FAILED and repeats(execution, fence):
        return results.TerminalFailed(execution_id=execution.execution_id)
    # The retry cleared the attempt id, so only the epoch identifies this holder.
    if (
        fence is not None
        and execution.lifecycle_phase is LifecyclePhase.RUNNABLE
        and execution.attempt_state is AttemptState.PENDING_RETRY_ATTEMPT
        and execution.lease_epoch == fence.lease_epoch
    ):
        return results.RetryScheduled(
            execution_id=execution.execution_id,
            delay_until_ms=execution.delay_until_ms or execution.last_mutation_at_ms,
            next_attempt_index=execution.total_attempt_count,
        )
    return None


def schedule_retry(
    subject: decisions.Subject, failure: Failure, delay_until_ms: int, now_ms: int
) -> decisions.Decision[results.FailResult]:
    """End the attempt and wait until `delay_until_ms` for the next one."""
    before = subject.execution
    fields: dict[str, decisions.Field] = {
        **decisions.NO_LEASE,
        **into(Situation.RETRYING, f"retry backoff until {delay_until_ms}"),
        "current_attempt_id": None,
        "retry_count": before.retry_count + 1,
        "delay_until_ms": delay_until_ms,
        "pending_retry_reason": failure.reason,
        "pending_previous_attempt_index": before.current_attempt_index,
    }
    after = decisions.change(before, now_ms, **fields)
    attempts = decisions.end_attempt(
        subject.attempt,
        AttemptLifecycle.ENDED_FAILURE,
        now_ms,
        failure.reason,
        failure.named_category,
        failure.attempt_fields,
    )
    event = lease_event(before, LeaseEventType.REVOKED, now_ms, "failed_retry_scheduled")
    return decisions.Decision(
        answer=results.RetryScheduled(
            execution_id=before.execution_id,
            delay_until_ms=delay_until_ms,
            next_attempt_index=before.total_attempt_count,
        ),
        changes=decisions.Changes(updates=(after, *attempts), events=(event,)),
    )


# Reporting --------------------------------------------------------------------


def decide_progress(
    subject: decisions.Subject,
    fence: Fence,
    percent: int | None,
    message: str | None,
    timing: decisions.Timing,
) -> decisions.Decision[results.Updated]:
    """Overwrite what is given, keep what is not; nothing given writes nothing."""
    execution = subject.execution
    check_holder(execution, fence, timing.now_ms)
    answer = results.Updated(execution_id=execution.execution_id)
    if percent is None and message is None:
        return decisions.Decision(answer=answer)
    after = decisions.change(
        execution,
        timing.now_ms,
        progress_pct=execution.progress_pct if percent is None else percent,
        progress_message=execution.progress_message if message is None else message,
        progress_updated_at_ms=timing.now_ms,
    )
    return decisions.Decision(answer=answer, changes=decisions.Changes(updates=(after,)))


# Time -------------------------------------------------------------------------


def decide_promote(
    subject: decisions.Subject, timing: decisions.Timing
) -> decisions.Decision[results.Marked | results.AlreadySatisfied]:
    """Make a delayed execution ready once its time has come."""
    execution = subject.execution
    if situation_of(execution) not in RULES[Operation.PROMOTE].leads:
        return decisions.Decision(answer=results.AlreadySatisfied(reason="not_delayed"))
    if execution.delay_until_ms is not None and execution.delay_until_ms > timing.now_ms:
        return decisions.Decision(answer=results.AlreadySatisfied(reason="not_yet_due"))
    after = decisions.change(
        execution, timing.now_ms, **decisions.UNBLOCKED, delay_until_ms=None, awaits_child=False
    )
    answer = results.Marked(execution_id=execution.execution_id, public_state=after.public_state)
    return decisions.Decision(answer=answer, changes=decisions.Changes(updates=(after,)))


def decide_attempt_timeout(
    subject: decisions.Subject, timing: decisions.Timing
) -> decisions.Decision[results.Marked | results.AlreadySatisfied]:
    """End an attempt that ran too long: a failure of class `timeout`, retried as such.

    With no retry left the execution expires.
    """
    execution = subject.execution
    if execution.lifecycle_phase is not LifecyclePhase.ACTIVE:
        return decisions.Decision(answer=results.AlreadySatisfied(reason="not_active"))
    if execution.attempt_deadline_ms is None or execution.attempt_deadline_ms > timing.now_ms:
        return decisions.Decision(answer=results.AlreadySatisfied(reason="not_yet_due"))
    delay_ms = policies.decide_retry(
        policies.parse_policy(execution.policy).retry_policy,
        retry_count=execution.retry_count,
        failure_class=FailureClass.TIMEOUT,
        category=FailureClass.TIMEOUT.value,
        chance=timing.chance,
    )
    if delay_ms is None:
        return expire(subject, policies.ATTEMPT_TIMEOUT, timing)
    failure = Failure(reason=policies.ATTEMPT_TIMEOUT, failure_class=FailureClass.TIMEOUT)
    retry = schedule_retry(subject, failure, timing.now_ms + delay_ms, timing.now_ms)
    answer = results.Marked(execution_id=execution.execution_id, public_state=PublicState.DELAYED)
    return decisions.Decision(answer=answer, changes=retry.changes)


def decide_deadline(
    subject: decisions.Subject, timing: decisions.Timing
) -> decisions.Decision[results.Marked | results.AlreadySatisfied]:
    """End an execution whose deadline passed, whatever it was doing."""
    execution = subject.execution
    if execution.lifecycle_phase is LifecyclePhase.TERMINAL:
        return decisions.Decision(answer=results.AlreadySatisfied(reason="already_terminal"))
    if execution.deadline_at_ms is None or execution.deadline_at_ms > timing.now_ms:
        return decisions.Decision(answer=results.AlreadySatisfied(reason="not_yet_due"))
    return expire(subject, policies.EXECUTION_DEADLINE, timing)


def expire(
    subject: decisions.Subject, reason: str, timing: decisions.Timing
) -> decisions.Decision[results.Marked | results.AlreadySatisfied]:
    changes = decisions.finish(
        subject,
        TerminalOutcome.EXPIRED,
        timing.now_ms,
        attempt_end=AttemptLifecycle.ENDED_FAILURE,
        reason=f"expired:{reason}",
        attempt_failure=reason,
        attempt_category=FailureClass.TIMEOUT.value,
        lease_event_type=LeaseEventType.EXPIRED,
        fields={"failure_reason": reason},
    )
    answer = results.Marked(
        execution_id=subject.execution.execution_id, public_state=PublicState.EXPIRED
    )
    return decisions.Decision(answer=answer, changes=changes)


# What people do to executions: cancel, reprioritise, replay -----------------
#
# An operator needs no lease. A system or worker that names another source does:
# on an active execution it must show the epoch it believes in.


class CancelRequest(Struct, frozen=True, kw_only=True):
    reason: str
    source: str = OPERATOR_OVERRIDE
    lease_id: str | None = None
    lease_epoch: int | None = None
    attempt_id: str | None = None


def decide_cancel(
    subject: decisions.Subject, request: CancelRequest, timing: decisions.Timing
) -> decisions.Decision[results.Cancelled]:
    """End the execution as cancelled, in any phase. Asking twice is safe."""
    execution = subject.execution
    answer = results.Cancelled(
        execution_id=execution.execution_id, public_state=PublicState.CANCELLED
    )
    if execution.terminal_outcome is TerminalOutcome.CANCELLED:
        return decisions.Decision(answer=answer)
    if execution.lifecycle_phase is LifecyclePhase.TERMINAL:
        raise errors.InvalidInput(
            "execution_id",
            f"{ALREADY_TERMINAL}{execution.public_state}",
            execution.execution_id,
        )
    if execution.lifecycle_phase is LifecyclePhase.ACTIVE and request.source != OPERATOR_OVERRIDE:
        _check_epoch(execution, request)
    # The epoch grows so that the holder is fenced at once.
    epoch = execution.lease_epoch + 1
    changes = _cancel(subject, request.reason, request.source, timing, epoch)
    return decisions.Decision(answer=answer, changes=changes)


def decide_cancel_waiting(
    subject: decisions.Subject, reason: str, timing: decisions.Timing
) -> decisions.Decision[results.Cancelled]:
    """The same, except for executions that a worker has begun or that are suspended."""
    execution = subject.execution
    if execution.lifecycle_phase in (LifecyclePhase.ACTIVE, LifecyclePhase.SUSPENDED):
        return decisions.Decision(
            answer=results.Cancelled(
                execution_id=execution.execution_id, public_state=execution.public_state
            )
        )
    return decide_cancel(subject, CancelRequest(reason=reason), timing)


def _check_epoch(execution: Execution, request: CancelRequest) -> None:
    if request.lease_epoch is None:
        raise errors.InvalidInput(
            "lease_epoch", f"is required to cancel active work as {request.source!r}"
        )
    if execution.ownership_state is OwnershipState.LEASE_REVOKED:
        raise errors.LeaseRevoked(f"the lease of {execution.called} was revoked")
    if (
        request.lease_epoch != execution.lease_epoch
        or request.lease_id not in (None, execution.lease_id)
        or request.attempt_id not in (None, execution.current_attempt_id)
    ):
        raise errors.StaleLease(
            f"{execution.called}: lease epoch {request.lease_epoch} is not the current one"
            f" ({execution.lease_epoch})"
        )


def decide_worker_cancel(
    subject: decisions.Subject, fence: Fence, reason: str, timing: decisions.Timing
) -> decisions.Decision[results.Cancelled]:
    """Cancel by the lease holder. The epoch stays, so a repeat is recognised."""
    execution = subject.execution
    answer = results.Cancelled(
        execution_id=execution.execution_id, public_state=PublicState.CANCELLED
    )
    if execution.terminal_outcome is TerminalOutcome.CANCELLED and repeats(execution, fence):
        return decisions.Decision(answer=answer)
    check_fence(subject, fence, timing.now_ms)
    changes = _cancel(subject, reason, "worker", timing, execution.lease_epoch)
    return decisions.Decision(answer=answer, changes=changes)


def _cancel(
    subject: decisions.Subject,
    reason: str,
    source: str,
    timing: decisions.Timing,
    lease_epoch: int,
) -> decisions.Changes:
    return decisions.finish(
        subject,
        TerminalOutcome.CANCELLED,
        timing.now_ms,
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
        raise errors.InvalidInput(field, "must be an integer", priority)
    return min(max(priority, PRIORITY_MIN), PRIORITY_MAX)


def decide_change_priority(
    subject: decisions.Subject, priority: int, any_runnable: bool, timing: decisions.Timing
) -> decisions.Decision[results.Changed]:
    """Move an execution in its queue. By default only one that is waiting for a worker."""
    execution = subject.execution
    operation = Operation.REPRIORITISE_ANY if any_runnable else Operation.REPRIORITISE
    if situation_of(execution) not in RULES[operation].leads:
        raise errors.ExecutionNotEligible(
            f"{execution.called} is {execution.public_state}: only an execution that waits"
            " for a worker can change its priority"
        )
    new_priority = clamp_priority(priority)
    after = decisions.change(execution, timing.now_ms, priority=new_priority)
    details: dict[str, int | str] = {
        "old_priority": execution.priority,
        "new_priority": new_priority,
    }
    event = operator_event(after, "priority_changed", timing.now_ms, _json(details))
    return decisions.Decision(
        answer=results.Changed(execution_id=execution.execution_id),
        changes=decisions.Changes(updates=(after,), events=(event,)),
    )


def decide_replay(
    subject: decisions.Subject,
    reason: str | None,
    requested_by: str | None,
    timing: decisions.Timing,
) -> decisions.Decision[results.Replayed]:
    """Run an ended execution again, as a new attempt; its history stays."""
    execution = subject.execution
    if execution.lifecycle_phase is not LifecyclePhase.TERMINAL:
        raise errors.ExecutionNotTerminal(
            f"{execution.called} is {execution.public_state}: only ended executions replay"
        )
    policy = policies.parse_policy(execution.policy)
    if execution.replay_count >= policy.max_replay_count:
        raise errors.MaxReplaysExhausted(
            f"{execution.called} was replayed {execution.replay_count} times;"
            f" its policy allows {policy.max_replay_count}"
        )
    after = decisions.change(
        execution, timing.now_ms, **_replayed(execution, reason, requested_by, timing.now_ms)
    )
    event = operator_event(
        after, "replayed", timing.now_ms, _json({"branch": "normal", "groups_reset": 0})
    )
    return decisions.Decision(
        answer=results.Replayed(public_state=after.public_state),
        # The attempt may have had no row so far, and follows from the execution no longer.
        changes=decisions.Changes(
            updates=(after,) if subject.attempt is None else (after, subject.attempt),
            events=(event,),
        ),
    )


_FORGOTTEN: Final = (
    "current_attempt_id", "completed_at_ms", "final_lease_id", "final_worker_id",
    "final_worker_instance_id", "retain_until_ms", "delay_until_ms", "progress_pct",
    "progress_message", "progress_updated_at_ms", "result", "result_encoding", "failure_reason",
    "cancellation_reason", "cancelled_by", "next_input", "next_input_encoding",
)  # fmt: skip
"""What a replayed execution no longer has."""


def _replayed(
    execution: Execution, reason: str | None, requested_by: str | None, now_ms: int
) -> dict[str, decisions.Field]:
    had_attempt = execution.total_attempt_count > 0
    return {
        **dict.fromkeys(_FORGOTTEN),
        **into(Situation.WAITING),
        "terminal_outcome": TerminalOutcome.NONE,
        "attempt_state": AttemptState.PENDING_REPLAY_ATTEMPT,
        # The old holder must not be able to act on the new life of the execution.
        "lease_epoch": execution.lease_epoch + 1,
        "retry_count": 0,
        "lease_reclaim_count": 0,
        "worker_deaths": 0,
        "replay_count": execution.replay_count + 1,
        "deadline_at_ms": _rearmed_deadline(execution, now_ms),
        "cancel_requested": False,
        "join_pending": False,
        "pending_replay_reason": reason,
        "pending_replay_requested_by": requested_by,
        "pending_previous_attempt_index": execution.current_attempt_index if had_attempt else None,
    }


def _rearmed_deadline(execution: Execution, now_ms: int) -> int | None:
    """A relative deadline starts again; a fixed one that has passed no longer applies."""
    timeout = policies.parse_policy(execution.policy).timeout_policy
    if timeout is not None and timeout.execution_deadline_ms is not None:
        return now_ms + timeout.execution_deadline_ms
    if execution.deadline_at_ms is not None and execution.deadline_at_ms > now_ms:
        return execution.deadline_at_ms
    return None


def _json(details: dict[str, int | str]) -> str:
    return msgspec.json.encode(details).decode()


# Giving work back: a worker that stops returns its leases instead of letting them expire
#
# The attempt ends as interrupted and the execution is ready again at once. It was
# Nobody failed, so it counts neither as a retry nor as a reclaim.

HANDED_BACK = "handed_back"


def decide_hand_back(
    subject: decisions.Subject, fence: Fence, reason: str, timing: decisions.Timing
) -> decisions.Decision[results.HandedBack]:
    """Release the lease; the next claim starts a new attempt. Safe to repeat."""
    before = subject.execution
    if _repeated(before, fence):
        return decisions.Decision(answer=results.HandedBack(execution_id=before.execution_id))
    check_fence(subject, fence, timing.now_ms)
    why = f"{HANDED_BACK}: {reason}"
    fields: dict[str, decisions.Field] = {
        **decisions.NO_LEASE,
        **into(Situation.WAITING),
        "attempt_state": AttemptState.PENDING_RETRY_ATTEMPT,
        "current_attempt_id": None,
        "pending_retry_reason": why,
        "pending_previous_attempt_index": before.current_attempt_index,
    }
    after = decisions.change(before, timing.now_ms, **fields)
    attempts = decisions.end_attempt(
        subject.attempt, AttemptLifecycle.INTERRUPTED_RECLAIMED, timing.now_ms, why
    )
    event = lease_event(before, LeaseEventType.REVOKED, timing.now_ms, HANDED_BACK)
    return decisions.Decision(
        answer=results.HandedBack(execution_id=before.execution_id),
        changes=decisions.Changes(updates=(after, *attempts), events=(event,)),
    )


def _repeated(execution: Execution, fence: Fence) -> bool:
    """Whether this holder has handed it back already, and it was not claimed since."""
    return (
        execution.lifecycle_phase is LifecyclePhase.RUNNABLE
        and execution.attempt_state is AttemptState.PENDING_RETRY_ATTEMPT
        and execution.lease_epoch == fence.lease_epoch
        and (execution.pending_retry_reason or "").startswith(HANDED_BACK)
    )
