"""What belongs to an execution, as `show` prints it: steps, children, tracebacks."""

from typing import Final

from rich.text import Text

from flowfabric.cli import screen
from flowfabric.cli.screen import REMARK, ScreenColumn, fixed, flexible, right
from flowfabric.core.policies import span
from flowfabric.core.views import ExecutionDetails, StepView
from flowfabric.terminal import Indented

STEP_CHARS_MAX: Final = 200
"""How much of a step's result the list shows; `--json` prints all of it."""
STEPS_SHOWN_MAX: Final = 200
"""How many steps and children are listed; `--json` prints all of them."""

STEP_COLUMNS: Final = (
    flexible("STEP"),
    flexible("BRANCH"),
    fixed("KIND"),
    right("ENDED"),
    right("TOOK"),
    REMARK,
)
CHILD_COLUMNS: Final[tuple[ScreenColumn, ...]] = (
    fixed("CHILD"),
    fixed("STATE"),
    flexible("KIND"),
    right("AGE"),
)


def print_steps(execution: ExecutionDetails, now_ms: int) -> None:
    if not execution.steps:
        return
    shown = execution.steps[-STEPS_SHOWN_MAX:]
    console = screen.out()
    console.print()
    console.print(
        screen.table(
            STEP_COLUMNS,
            [
                (
                    step.name,
                    step.branch,
                    step.kind,
                    screen.ago(step.recorded_at_ms, now_ms),
                    "" if step.duration_ms is None else span(step.duration_ms),
                    _outcome(step, now_ms),
                )
                for step in shown
            ],
        )
    )
    _print_left_out(len(execution.steps) - len(shown), "earlier steps")


def _outcome(step: StepView, now_ms: int) -> Text | str:
    if step.error is not None:
        return Text(screen.one_line(step.error), style="red")
    if step.wake_at_ms is not None:
        return f"wakes {screen.ago(step.wake_at_ms, now_ms)}" if step.wake_at_ms > now_ms else ""
    return screen.one_line(screen.shown(step.result, STEP_CHARS_MAX))


def print_children(execution: ExecutionDetails, now_ms: int) -> None:
    if not execution.children:
        return
    shown = execution.children[:STEPS_SHOWN_MAX]
    screen.out().print()
    screen.out().print(
        screen.table(
            CHILD_COLUMNS,
            [
                (
                    screen.short_id(child.execution_id),
                    screen.state(child.public_state),
                    child.execution_kind,
                    span(now_ms - child.created_at_ms),
                )
                for child in shown
            ],
        )
    )
    _print_left_out(len(execution.children) - len(shown), "later children")


def print_tracebacks(execution: ExecutionDetails) -> None:
    """Where each failed attempt failed."""
    for attempt in execution.attempts:
        if attempt.failure_traceback:
            screen.out().print()
            screen.out().print(Text(f"try {attempt.attempt_index + 1}", style="dim"))
            screen.out().print(Indented(attempt.failure_traceback.rstrip()))


def _print_left_out(count: int, what: str) -> None:
    if count > 0:
        screen.err().print(Text(f"{count} {what} left out: --json", style="dim"))
