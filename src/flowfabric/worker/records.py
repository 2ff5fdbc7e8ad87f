"""Calls as they are stored, and stored steps as a run meets them."""

from collections.abc import Sequence

from flowfabric.core.journal import Kept
from flowfabric.core.records import Step
from flowfabric.core.steps import NewStep
from flowfabric.worker.failures import GIVEN_UP
from flowfabric.worker.lines import DurableCall


def positions_of(steps: Sequence[Step]) -> dict[str, int]:
    """The order in which stored outcomes reach the handler: a number of its own for each."""
    delivered = [step for step in steps if step.position is not None and step.failure != GIVEN_UP]
    found: dict[str, int] = {}
    last = 0
    for step in sorted(delivered, key=lambda step: (step.position or 0, step.step_key)):
        last = found[step.step_key] = max(last + 1, step.position or 0)
    return found


def kept_of(step: Step) -> Kept:
    return Kept(step.step_key, step.kind, step.name, step.digest, step.number, step.parallel)


def new_step(
    call: DurableCall,
    *,
    result: bytes | None = None,
    failure: bytes | None = None,
    sleep_ms: int | None = None,
    position: int | None = None,
) -> NewStep:
    asked = call.asked
    return NewStep(
        step_key=call.key,
        after_key=call.after_key,
        kind=call.kind,
        line=call.line.known_as,
        name=asked.name,
        digest=asked.digest,
        number=asked.number,
        parallel=asked.parallel,
        position=position,
        result=result,
        failure=failure,
        sleep_ms=sleep_ms,
        duration_ms=call.took_ms,
    )
