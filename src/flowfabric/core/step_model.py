"""Rows of durable steps: what a handler has done, and which executions wait for which."""

from enum import StrEnum
from typing import ClassVar

from msgspec import Struct

from flowfabric.core.ids import ExecutionId
from flowfabric.core.model import Attempt, Record


class StepKind(StrEnum):
    """What a step is. Asking for a recorded step as another kind means the code has changed."""

    CALL = "call"
    SLEEP = "sleep"
    NOW = "now"
    RANDOM = "random"
    UUID = "uuid"
    SUBMIT = "submit"
    CHILD = "child"
    WAITPOINT = "waitpoint"
    SIGNAL = "signal"
    PATCH = "patch"
    """Remembers that a changed piece of code is on for this execution."""
    ACCEPT = "accept"
    """Not of the handler: a person allowed a step that changed code asks for."""


class Step(Record, frozen=True, kw_only=True):
    """One finished step. It belongs to the execution, whichever attempt made it."""

    table: ClassVar[str] = "step"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "step_key")

    partition_key: int
    execution_id: ExecutionId
    step_key: str
    """A name nothing else of the execution has; see `journal.step_key`."""
    after_key: str | None = None
    """The step before it in the same line, for whoever reads them in order."""
    kind: StepKind
    line: str = ""
    """The line it belongs to; empty for the function itself."""
    name: str = ""
    digest: str = ""
    """Of its arguments."""
    number: int = 1
    parallel: bool = False
    """Whether it was asked for while earlier ones of its line were under way."""
    position: int | None = None
    """The place of its outcome among all that reached the handler; none, if it has not yet."""
    result: bytes | None = None
    failure: bytes | None = None
    """How it ended without a result, as the handler saw it."""
    wake_at_ms: int | None = None
    """When a sleep ends."""
    duration_ms: int | None = None
    """How long the function of a step ran, by the clock of its worker."""
    attempt_index: int
    recorded_at_ms: int


class FailedStep(Struct, frozen=True, kw_only=True):
    """The step whose failure ended an attempt.

    It is kept with the attempt and not as a step, so that the next attempt tries it again.
    """

    step_key: str
    name: str
    line: str = ""
    error: str
    """What the step raised; the handler may have raised something else in its place."""
    duration_ms: int | None = None


def failed_step(attempt: Attempt) -> FailedStep | None:
    if attempt.failed_step_key is None:
        return None
    return FailedStep(
        step_key=attempt.failed_step_key,
        name=attempt.failed_step_name or "",
        line=attempt.failed_step_line or "",
        error=attempt.failed_step_error or "",
        duration_ms=attempt.failed_step_duration_ms,
    )


class Waiter(Record, frozen=True, kw_only=True):
    """An execution that waits for the end of another, or has waited for it.

    It keeps the other from being deleted until it has ended itself.
    """

    table: ClassVar[str] = "waiter"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "waiting")

    partition_key: int
    execution_id: ExecutionId
    """The one that is waited for."""
    waiting: str
    """The full id of the one that waits."""
