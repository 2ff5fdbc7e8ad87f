"""Durable steps.

A step is stored under the fence of the lease that made it, and belongs to the
execution from then on: every later attempt finds it. Storing it again, which
happens when an answer was lost, changes nothing, and is answered as it was the
first time: what a handler is told is what every later run of it finds.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from msgspec import Struct, structs

from flowfabric.core.decisions import Changes, Decision, Subject, Timing
from flowfabric.core.leases import Fence, check_fence
from flowfabric.core.records import Step, StepKind, view_of


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
    """The store's time when the step was first stored."""


def decide_record(
    subject: Subject, fence: Fence, step: NewStep, stored: Step | None, timing: Timing
) -> Decision[StepStored]:
    """Store a step, unless it is stored already: then only what it lacks is added.

    That is its place in the order, for a sleep that has ended, or that it was given up.
    """
    check_fence(subject, fence, timing.now_ms)
    if stored is not None:
        answer = StepStored(at_ms=stored.recorded_at_ms)
        completed = structs.replace(
            stored,
            failure=step.failure if stored.failure is None else stored.failure,
            position=step.position if stored.position is None else stored.position,
        )
        updates = () if completed == stored else (completed,)
        return Decision(answer=answer, changes=Changes(updates=updates))
    execution = subject.execution
    record = view_of(
        Step,
        step,
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        name=step.name or step.step_key,
        wake_at_ms=None if step.sleep_ms is None else timing.now_ms + step.sleep_ms,
        attempt_index=execution.current_attempt_index,
        recorded_at_ms=timing.now_ms,
    )
    return Decision(
        answer=StepStored(at_ms=record.recorded_at_ms), changes=Changes(inserts=(record,))
    )


S = TypeVar("S", NewStep, Step)


def recoded(step: S, change: Callable[[bytes | None], bytes | None]) -> S:
    """The step with the values that a codec writes, its result and its failure, changed."""
    return structs.replace(step, result=change(step.result), failure=change(step.failure))


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


def accepted_key(step_key: str) -> str:
    """The key under which it is stored that a step may run."""
    return f"accept {step_key}"
