"""Durable execution for Python: functions that survive crashes, on SQLite or Postgres."""

from flowfabric.app import App
from flowfabric.codec import Codec
from flowfabric.config import EngineConfig
from flowfabric.connection import connect, migrate
from flowfabric.engine.engine import Engine
from flowfabric.errors import (
    AccessDenied,
    BudgetExceeded,
    CodecFailed,
    DatabaseGone,
    DoNotRetry,
    ExecutionCancelled,
    ExecutionExpired,
    ExecutionFailed,
    ExecutionNotTerminal,
    ExecutionSkipped,
    FlowFabricError,
    HistoryChanged,
    IdempotencyConflict,
    InvalidInput,
    InvalidToken,
    KeptSignalsFull,
    KeyUndecided,
    LockTimeout,
    MissingToken,
    NotFound,
    NotInAStep,
    OperationTimeout,
    ResourceExhausted,
    RetryExhausted,
    RotationConflict,
    SignalTimeout,
    StepFailed,
    TokenExpired,
    Transport,
    Unauthorized,
    Unavailable,
    WaitpointClosed,
    WaitpointNotFound,
    WrongSignalName,
)
from flowfabric.flows.builder import Flow
from flowfabric.flows.nodes import AllOf, AnyOf, Node, Quorum
from flowfabric.flows.run import FlowRun
from flowfabric.limits import Limit
from flowfabric.run import Run
from flowfabric.signals import Signal, SignalToken, all_of, any_of, count
from flowfabric.streams import Frame
from flowfabric.task import Retry, Task, provided
from flowfabric.version import __version__
from flowfabric.worker.context import Context
from flowfabric.worker.worker import WorkerSettings

__all__ = [
    "AccessDenied",
    "AllOf",
    "AnyOf",
    "App",
    "BudgetExceeded",
    "Codec",
    "CodecFailed",
    "Context",
    "DatabaseGone",
    "DoNotRetry",
    "Engine",
    "EngineConfig",
    "ExecutionCancelled",
    "ExecutionExpired",
    "ExecutionFailed",
    "ExecutionNotTerminal",
    "ExecutionSkipped",
    "Flow",
    "FlowFabricError",
    "FlowRun",
    "Frame",
    "HistoryChanged",
    "IdempotencyConflict",
    "InvalidInput",
    "InvalidToken",
    "KeptSignalsFull",
    "KeyUndecided",
    "Limit",
    "LockTimeout",
    "MissingToken",
    "Node",
    "NotFound",
    "NotInAStep",
    "OperationTimeout",
    "Quorum",
    "ResourceExhausted",
    "Retry",
    "RetryExhausted",
    "RotationConflict",
    "Run",
    "Signal",
    "SignalTimeout",
    "SignalToken",
    "StepFailed",
    "Task",
    "TokenExpired",
    "Transport",
    "Unauthorized",
    "Unavailable",
    "WaitpointClosed",
    "WaitpointNotFound",
    "WorkerSettings",
    "WrongSignalName",
    "__version__",
    "all_of",
    "any_of",
    "connect",
    "count",
    "migrate",
    "provided",
]
