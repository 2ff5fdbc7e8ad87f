"""Durable steps, and executions that wait for others.

A step is stored under the fence of the lease that made it, and belongs to the
execution from then on: every later attempt finds it. Storing it again, which
happens when an answer was lost, changes nothing.

An execution that waits for others is parked like one that sleeps. What it waits
for is marked `awaited`; when a marked execution has ended, a reconciler makes
those that wait for it ready. Waking is a matter of "look again": the handler runs
again, finds the results there are, and parks for the rest.
"""

from collections.abc import Iterable, Mapping, Sequence
from shlex import quote
from typing import Final

from msgspec import Struct, structs

from flowfabric.core.events import operator_event
from flowfabric.core.executions import WAITING_CHILDREN, already_parked, park
from flowfabric.core.ids import ExecutionId, partition_of
from flowfabric.core.leases import Fence, check_fence
from flowfabric.core.records import Attempt, Execution, Step, StepKind, Waiter
from flowfabric.core.results import AlreadySatisfied, Changed, Delayed, Marked, Moved
from flowfabric.core.situations import RULES, Operation, Situation, into, situation_of
from flowfabric.core.states import BlockingReason, LifecyclePhase, PublicState
from flowfabric.core.transitions import UNBLOCKED, Changes, Decision, Subject, Timing, change
from flowfabric.errors import ExecutionNotEligible, NotFound


class NewStep(Struct, frozen=True, kw_only=True, gc=False):
    """A finished step to be stored."""

    step_key: str
    after_key: str | None = None
    kind: StepKind = StepKind.CALL
    line: str = ""
    name: str = ""
    """The key, if it is empty."""
    digest: str = ""
    number: int = 1
    parallel: bool = False
    asked_after: int | None = None
    position: int | None = None
    result: bytes | None = None
    failure: bytes | None = None
    sleep_ms: int | None = None
    duration_ms: int | None = None


class StepStored(Struct, frozen=True, kw_only=True, gc=False):
    at_ms: int
    """The store's time when the step was stored."""


def decide_record(
    subject: Subject, fence: Fence, step: NewStep, stored: Step | None, timing: Timing
) -> Decision[StepStored]:
    """Store a step, unless it is stored already: then only what it lacks is added.

    That is its place in the order, for a sleep that has ended, or that it was given up.
    """
    check_fence(subject, fence, timing.now_ms)
    answer = StepStored(at_ms=timing.now_ms)
    if stored is not None:
        completed = structs.replace(
            stored,
            failure=step.failure if stored.failure is None else stored.failure,
            position=step.position if stored.position is None else stored.position,
        )
        updates = () if completed == stored else (completed,)
        return Decision(answer=answer, changes=Changes(updates=updates))
    execution = subject.execution
    record = Step(
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        step_key=step.step_key,
        after_key=step.after_key,
        kind=step.kind,
        line=step.line,
        name=step.name or step.step_key,
        digest=step.digest,
        number=step.number,
        parallel=step.parallel,
        asked_after=step.asked_after,
        position=step.position,
        result=step.result,
        failure=step.failure,
        wake_at_ms=None if step.sleep_ms is None else timing.now_ms + step.sleep_ms,
        duration_ms=step.duration_ms,
        attempt_index=execution.current_attempt_index,
        recorded_at_ms=timing.now_ms,
    )
    return Decision(answer=answer, changes=Changes(inserts=(record,)))


def in_order(steps: Iterable[Step]) -> list[Step]:
    """Oldest first, and each after the step its line of execution had finished before it.

    Several steps may share a millisecond, so times alone do not order them.
    """
    oldest_first = sorted(steps, key=lambda step: (step.recorded_at_ms, step.step_key))
    missing = {step.step_key: step for step in oldest_first}
    ordered: list[Step] = []
    for step in oldest_first:
        line: list[Step] = []
        key: str | None = step.step_key
        while key is not None and (found := missing.pop(key, None)) is not None:
            line.append(found)
            key = found.after_key
        ordered += reversed(line)
    return ordered


def check_awaitable(waiting: Execution | None, awaited: Mapping[ExecutionId, Execution]) -> None:
    """Raise for executions of another namespace: they do not exist for the one that waits."""
    for execution_id, each in sorted(awaited.items()):
        if waiting is not None and each.namespace != waiting.namespace:
            raise NotFound("execution", execution_id)


def decide_await(
    subject: Subject,
    fence: Fence,
    awaited: Mapping[ExecutionId, Execution],
    until_ms: int | None,
    timing: Timing,
) -> Decision[Moved]:
    """Park until any of `awaited` has ended, or until `until_ms` at the latest.

    If one of them has ended already, the execution is ready again at once.
    """
    check_fence(subject, fence, timing.now_ms)
    ended = any(e.lifecycle_phase is LifecyclePhase.TERMINAL for e in awaited.values())
    due_ms = timing.now_ms if ended else until_ms
    situation = Situation.WAITING_CHILDREN if due_ms is None else Situation.PARKED
    waits = into(situation, _waits_for(list(awaited.values())))
    changes = park(
        subject,
        WAITING_CHILDREN,
        timing.now_ms,
        waits | {"blocking_reason": BlockingReason.WAITING_FOR_CHILDREN},
        delay_until_ms=due_ms,
        awaits_child=True,
    )
    marked = tuple(
        change(execution, timing.now_ms, awaited=True)
        for execution in awaited.values()
        if execution.lifecycle_phase is not LifecyclePhase.TERMINAL and not execution.awaited
    )
    moved = changes.updates[0]
    assert isinstance(moved, Execution)
    return Decision(
        answer=Moved(execution_id=moved.execution_id, public_state=moved.public_state),
        changes=Changes(updates=(*changes.updates, *marked), events=changes.events),
    )


def new_waiter(awaited: ExecutionId, waiting: ExecutionId) -> Waiter:
    return Waiter(partition_key=partition_of(awaited), execution_id=awaited, waiting=waiting)


SHOWN_MAX = 3


def _waits_for(awaited: Sequence[Execution]) -> str:
    """In the order of the ids: the stores give them in orders of their own."""
    first = sorted(awaited, key=lambda each: each.execution_id)[:SHOWN_MAX]
    shown = ", ".join(f"{each.execution_kind} {each.called}" for each in first)
    more = len(awaited) - SHOWN_MAX
    return f"waiting for {shown}" + (f" and {more} more" if more > 0 else "")


def decide_wake(subject: Subject, timing: Timing) -> Decision[Marked | None]:
    """Make an execution ready that waited for others; nothing to do if it does not wait."""
    execution, attempt = subject.execution, subject.attempt
    waits = (
        situation_of(execution) in RULES[Operation.WAKE].leads
        and execution.awaits_child
        and attempt is not None
        and attempt.suspension_id == WAITING_CHILDREN
    )
    if not waits:
        return Decision(answer=None)
    after = change(execution, timing.now_ms, **UNBLOCKED, delay_until_ms=None, awaits_child=False)
    answer = Marked(execution_id=execution.execution_id, public_state=after.public_state)
    return Decision(answer=answer, changes=Changes(updates=(after,)))


# Executions that the code of their task no longer fits ----------------------
#
# A handler that asks for a new step while stored steps of the same line are left over
# would run effects again or leave them out. Its execution is *blocked* instead: parked
# before anything runs, with nothing counted against it. It looks again by itself, less
# and less often, and at once when a worker starts that serves its kind, since that may
# bring code that fits. Or a person accepts the change: then the step it asked for may
# run, and the left-over steps no longer count.

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


def accepted_key(step_key: str) -> str:
    """The key under which it is stored that a step may run."""
    return f"accept {step_key}"


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
