"""How a child ended, as its parent has seen it and stores it."""

from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Struct

from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import Step, StepKind
from flowfabric.core.states import PublicState
from flowfabric.engine.details import Outcome

RESULT_OF: Final = "result of "
"""Before the id of the child, in the name of the step."""


class ChildEnd(Struct, frozen=True):
    """How it ended without a result."""

    public_state: PublicState
    reason: str


def failure_of(outcome: Outcome) -> bytes | None:
    """What is stored beside the result."""
    if outcome.public_state is PublicState.COMPLETED:
        return None
    return msgspec.json.encode(ChildEnd(outcome.public_state, outcome.reason))


def is_end(failure: bytes) -> bool:
    """Whether a child ended so; else its parent was refused to ask."""
    try:
        msgspec.json.decode(failure, type=ChildEnd)
    except msgspec.ValidationError:
        return False
    return True


def stored_outcome(execution_id: ExecutionId, stored: Step) -> Outcome:
    end = ChildEnd(PublicState.COMPLETED, "")
    if stored.failure is not None:
        end = msgspec.json.decode(stored.failure, type=ChildEnd)
    return Outcome(
        execution_id=execution_id,
        public_state=end.public_state,
        result=stored.result,
        reason=end.reason,
    )


def ends_in(steps: Iterable[Step]) -> dict[str, Outcome]:
    """How the children ended that a run has seen the end of, by the names of their steps."""
    found: dict[str, Outcome] = {}
    for step in steps:
        if step.kind is StepKind.CHILD and (step.failure is None or is_end(step.failure)):
            execution_id = ExecutionId(step.name.removeprefix(RESULT_OF))
            found.setdefault(step.name, stored_outcome(execution_id, step))
    return found
