"""What a failure is reported as: how grave it is, in which words, and from where."""

import traceback

from msgspec import Struct

from flowfabric.core.checks import shorten
from flowfabric.core.limits import NAME_BYTES_MAX
from flowfabric.core.states import FailureClass, TerminalOutcome
from flowfabric.errors import (
    DoNotRetry,
    ExecutionNotActive,
    FlowFabricError,
    StepsChanged,
    Validation,
)
from flowfabric.retrying import Retry
from flowfabric.task import Task


class ReportedFailure(Struct, frozen=True, array_like=True):
    """What became of a task in another process: a result, or a failure."""

    result: bytes | None = None
    reason: str = ""
    failure_class: FailureClass = FailureClass.TRANSIENT
    category: str = ""
    trace: str = ""
    pickled: bytes | None = None
    """The exception, where it can be rebuilt."""


class ProcessDied(Exception):
    """The process of a task ended before the task did."""


class RaisedElsewhere(Exception):
    """What a task raised in its process: the exception's text and where it came from."""

    def __init__(self, told: ReportedFailure) -> None:
        super().__init__(told.reason)
        self.told = told

    def __str__(self) -> str:
        return f"{self.told.reason}\n{self.told.trace}".rstrip()


def elsewhere(error: BaseException) -> RaisedElsewhere | None:
    """How the exception looked where it was raised, if that was in another process."""
    origin = error if isinstance(error, RaisedElsewhere) else error.__cause__
    return origin if isinstance(origin, RaisedElsewhere) else None


def classify(error: BaseException, task: Task[..., object] | None) -> FailureClass:
    """Whether trying again may help."""
    origin = elsewhere(error)
    if origin is not None:
        return origin.told.failure_class
    retry = (None if task is None else task.settings.retry) or Retry()
    if isinstance(error, (DoNotRetry, StepsChanged, Validation, *retry.final)):
        return FailureClass.PERMANENT
    if isinstance(error, ProcessDied):
        return FailureClass.INFRA_CRASH
    return FailureClass.TRANSIENT


def category(error: BaseException) -> str:
    origin = elsewhere(error)
    if origin is not None:
        return origin.told.category
    named = error.code if isinstance(error, FlowFabricError) else type(error).__name__
    return shorten(named, NAME_BYTES_MAX)


def describe(error: BaseException) -> str:
    """The exception in one line, and where the handler raised it."""
    origin = elsewhere(error)
    if origin is not None:
        return origin.told.reason
    if isinstance(error, FlowFabricError | ProcessDied):
        return text_of(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text_of(error)}{where}"


def why_lost(error: FlowFabricError) -> str:
    """Why a handler is to stop: how its execution ended, if that is why."""
    if not isinstance(error, ExecutionNotActive) or error.terminal_outcome == TerminalOutcome.NONE:
        return str(error)
    return f"{error.terminal_outcome}: {error.reason}" if error.reason else error.terminal_outcome


def text_of(error: BaseException) -> str:
    """What the exception says of itself; its `__str__` is the user's and may fail as well."""
    try:
        return str(error)
    except Exception as failure:
        return f"<its text cannot be had: {type(failure).__name__}>"
