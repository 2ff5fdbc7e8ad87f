"""Durable steps, and executions that wait for others.

A step is stored under the fence of the lease that made it, and belongs to the
execution from then on: every later attempt finds it. Storing it again, which
happens when an answer was lost, changes nothing.

An execution that waits for others is parked like one that sleeps. What it waits
for is marked `awaited`; when a marked execution has ended, a reconciler makes
whoever waits for it ready. Waking is a matter of "look again": the handler runs
anew, finds the results there are, and parks again for the rest.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, structs

from flowfabric.core.executions import WAITING_CHILDREN, Timing, park
from flowfabric.core.ids import ExecutionId, partition_of
from flowfabric.core.leases import Fence, check_fence
from flowfabric.core.records import Execution, Step, StepKind, Waiter
from flowfabric.core.results import Marked, Moved
from flowfabric.core.situations import Situation, into
from flowfabric.core.states import BlockingReason, LifecyclePhase
from flowfabric.core.transitions import UNBLOCKED, Changes, Decision, Subject, change
from flowfabric.errors import NotFound


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
    check_fence(subject, fence, timing.now_ms, timing.retention_ms)
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

    Several steps may share a millisecond, so the times alone do not tell.
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
    check_fence(subject, fence, timing.now_ms, timing.retention_ms)
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
        execution.lifecycle_phase is LifecyclePhase.RUNNABLE
        and execution.awaits_child
        and attempt is not None
        and attempt.suspension_id == WAITING_CHILDREN
    )
    if not waits:
        return Decision(answer=None)
    after = change(execution, timing.now_ms, **UNBLOCKED, delay_until_ms=None, awaits_child=False)
    answer = Marked(execution_id=execution.execution_id, public_state=after.public_state)
    return Decision(answer=answer, changes=Changes(updates=(after,)))
