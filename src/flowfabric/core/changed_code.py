"""Executions that the code of their task no longer fits.

A handler that asks for a new step while stored steps of the same line are left over
would run effects again or leave them out. Its execution is *blocked* instead: parked
before anything runs, with nothing counted against it. It looks again by itself, less
and less often, and at once when a worker starts that serves its kind, since that may
bring code that fits. Or a person accepts the change: then the step it asked for may
run, and the left-over steps no longer count.
"""

from shlex import quote
from typing import Final

from flowfabric.core.events import operator_event
from flowfabric.core.leases import Fence, check_fence
from flowfabric.core.parking import already_parked, park
from flowfabric.core.records import Attempt, Execution, Step, StepKind
from flowfabric.core.results import AlreadySatisfied, Changed, Delayed, Marked
from flowfabric.core.situations import Situation, into
from flowfabric.core.states import BlockingReason, LifecyclePhase, PublicState
from flowfabric.core.steps import accepted_key
from flowfabric.core.transitions import UNBLOCKED, Changes, Decision, Subject, Timing, change
from flowfabric.errors import ExecutionNotEligible

BLOCKED_BY_CODE: Final = "blocked_by_code"
"""What marks the attempt of a blocked execution."""
DEPLOY: Final = "deploy code that fits"
LOOK_AGAIN_MS: Final = 60_000
"""How long a blocked execution waits before it looks at the code again; each time twice that."""
LOOK_AGAIN_MS_MAX: Final = 60 * 60 * 1_000


def decide_block(
    subject: Subject,
    fence: Fence,
    step_key: str | None,
    detail: str,
    timing: Timing,
    *,
    advice: str = DEPLOY,
) -> Decision[Delayed]:
    """Set the attempt aside because the code does not fit what is stored.

    `step_key` is the step that must not run, if it is one.
    """
    execution, attempt = subject.execution, subject.attempt
    answer = Delayed(execution_id=execution.execution_id, public_state=PublicState.DELAYED)
    if already_parked(subject, fence, BLOCKED_BY_CODE):
        return Decision(answer=answer)
    check_fence(subject, fence, timing.now_ms)
    assert attempt is not None, "an active execution has an attempt"
    changes = park(
        subject,
        BLOCKED_BY_CODE,
        timing.now_ms,
        into(Situation.BLOCKED, _with_advice(execution, step_key, f"{detail}; {advice}")),
        blocked_on=step_key,
        blocked_count=attempt.blocked_count + 1,
        delay_until_ms=timing.now_ms + look_again_ms(attempt),
    )
    return Decision(answer=answer, changes=changes)


def look_again_ms(attempt: Attempt) -> int:
    """How long to wait, by how often this attempt was blocked in a row before."""
    doublings = min(attempt.blocked_count, 30)
    return min(LOOK_AGAIN_MS << doublings, LOOK_AGAIN_MS_MAX)


def _with_advice(execution: Execution, step_key: str | None, detail: str) -> str:
    named = quote(execution.called)
    accept = f"or accept the change: flowfabric accept {named}"
    way_out = "or cancel it" if step_key is None else accept
    return f"{detail}, {way_out}"


def is_blocked(execution: Execution) -> bool:
    """Whether changed code has stopped it: delayed, until an operator or other code helps."""
    return blocked_by_code(execution.lifecycle_phase, execution.blocking_reason)


def blocked_by_code(phase: object, reason: object) -> bool:
    """`is_blocked` where only a part of the execution was read."""
    return phase == LifecyclePhase.RUNNABLE and reason == BlockingReason.WAITING_FOR_CODE


def decide_release(subject: Subject, timing: Timing) -> Decision[Marked | AlreadySatisfied]:
    """Let a blocked execution look at the code again at once."""
    execution = subject.execution
    if not is_blocked(execution):
        return Decision(answer=AlreadySatisfied(reason="not_blocked"))
    after = change(execution, timing.now_ms, **UNBLOCKED, delay_until_ms=None)
    answer = Marked(execution_id=execution.execution_id, public_state=after.public_state)
    return Decision(answer=answer, changes=Changes(updates=(after,)))


def decide_accept(subject: Subject, accepted: Step | None, timing: Timing) -> Decision[Changed]:
    """Allow the step a blocked execution asked for, and let it run at once. Safe to repeat."""
    execution, attempt = subject.execution, subject.attempt
    answer = Changed(execution_id=execution.execution_id)
    blocked_on = None if attempt is None else attempt.blocked_on
    if blocked_on is None and is_blocked(execution):
        raise ExecutionNotEligible(
            f"{execution.execution_id} cannot be accepted: that allows changed steps to run, and"
            f" changes nothing that is stored. {execution.blocking_detail}"
        )
    if blocked_on is None or execution.lifecycle_phase is not LifecyclePhase.RUNNABLE:
        raise ExecutionNotEligible(
            f"{execution.called} is {execution.public_state}: only an execution that is"
            " blocked by changed steps can be told to accept them; `flowfabric why` tells what it"
            " waits for"
        )
    record = Step(
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        step_key=accepted_key(blocked_on),
        kind=StepKind.ACCEPT,
        attempt_index=execution.current_attempt_index,
        recorded_at_ms=timing.now_ms,
    )
    released = decide_release(subject, timing).changes
    if accepted is not None:
        return Decision(answer=answer, changes=released)
    event = operator_event(execution, "changes_accepted", timing.now_ms, blocked_on)
    return Decision(
        answer=answer,
        changes=Changes(inserts=(record,), updates=released.updates, events=(event,)),
    )
