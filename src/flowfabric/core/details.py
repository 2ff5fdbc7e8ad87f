"""One execution with all that belongs to it: its steps, its attempts, its children."""

import msgspec
from msgspec import Struct

from flowfabric.core.ids import ExecutionId
from flowfabric.core.journal import branch_name
from flowfabric.core.records import Attempt, Execution, Step, StepKind, failed_step
from flowfabric.core.states import PublicState
from flowfabric.core.views import ExecutionSnapshot, snapshot


class StepView(Struct, frozen=True, kw_only=True):
    """What a handler has done: a step with its result, or the error it ended with."""

    step_key: str
    name: str
    branch: str
    """Which of the handler's parallel branches it belongs to; empty for the handler itself."""
    kind: StepKind
    result: bytes | None
    """As stored: JSON, unless the app's codec says otherwise."""
    error: str | None
    recorded_at_ms: int
    duration_ms: int | None
    """How long its function ran; None where there is none, as for a sleep."""
    wake_at_ms: int | None
    attempt_index: int


class ChildView(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    execution_kind: str
    public_state: PublicState
    created_at_ms: int


class ExecutionDetails(ExecutionSnapshot, frozen=True, kw_only=True):
    """A snapshot, and all that belongs to the execution."""

    steps: tuple[StepView, ...]
    """In the order they were made in. The one whose failure ended the last attempt comes last: it
    is not stored, and the next attempt tries it again."""
    attempts: tuple[Attempt, ...]
    """Oldest first; a failed one has its traceback."""
    children: tuple[ChildView, ...]
    """What it submitted and is still stored, oldest first."""


def step_view(step: Step) -> StepView:
    return StepView(
        step_key=step.step_key,
        name=step.name or step.step_key,
        branch=branch_name(step.line),
        kind=step.kind,
        result=step.result,
        error=_error(step.failure),
        recorded_at_ms=step.recorded_at_ms,
        duration_ms=step.duration_ms,
        wake_at_ms=step.wake_at_ms,
        attempt_index=step.attempt_index,
    )


def failed_view(attempt: Attempt) -> StepView | None:
    """The step whose failure ended an attempt, as it would look if it were stored."""
    failed = failed_step(attempt)
    if failed is None:
        return None
    return StepView(
        step_key=failed.step_key,
        name=failed.name or failed.step_key,
        branch=branch_name(failed.line),
        kind=StepKind.CALL,
        result=None,
        error=failed.error,
        recorded_at_ms=attempt.ended_at_ms or attempt.created_at_ms,
        duration_ms=failed.duration_ms,
        wake_at_ms=None,
        attempt_index=attempt.attempt_index,
    )


def _error(failure: bytes | None) -> str | None:
    """What was stored of a failure, in a line; each kind of step has its own form."""
    if failure is None:
        return None
    try:
        meaning: object = msgspec.json.decode(failure)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return failure.decode(errors="replace")
    if not isinstance(meaning, dict):
        return str(meaning)
    what = meaning.get("name") or meaning.get("public_state") or "failed"
    why = meaning.get("message") or meaning.get("reason") or ""
    return f"{what}: {why}"


def details(
    execution: Execution,
    tags: dict[str, str],
    *,
    steps: tuple[Step, ...],
    attempts: tuple[Attempt, ...],
    children: tuple[ChildView, ...],
) -> ExecutionDetails:
    seen = snapshot(execution, tags)
    failed = failed_view(attempts[-1]) if attempts else None
    stored = {step.step_key for step in steps}
    shared = {name: getattr(seen, name) for name in ExecutionSnapshot.__struct_fields__}
    return ExecutionDetails(
        **shared,
        steps=(
            *(step_view(step) for step in steps),
            *([failed] if failed is not None and failed.step_key not in stored else ()),
        ),
        attempts=attempts,
        children=children,
    )
