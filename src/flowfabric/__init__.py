"""Durable execution for Python: functions that survive crashes, on SQLite or Postgres."""

from flowfabric.app import App
from flowfabric.codec import Codec
from flowfabric.config import EngineConfig
from flowfabric.connection import connect, migrate
from flowfabric.engine.engine import Engine
from flowfabric.errors import DoNotRetry, FlowFabricError, SignalTimeout
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
    "AllOf",
    "AnyOf",
    "App",
    "Codec",
    "Context",
    "DoNotRetry",
    "Engine",
    "EngineConfig",
    "Flow",
    "FlowFabricError",
    "FlowRun",
    "Frame",
    "Limit",
    "Node",
    "Quorum",
    "Retry",
    "Run",
    "Signal",
    "SignalTimeout",
    "SignalToken",
    "Task",
    "WorkerSettings",
    "__version__",
    "all_of",
    "any_of",
    "connect",
    "count",
    "migrate",
    "provided",
]
