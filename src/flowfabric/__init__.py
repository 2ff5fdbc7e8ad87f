"""Durable execution for Python: functions that survive crashes, on SQLite or Postgres."""

from flowfabric.app import App
from flowfabric.config import EngineConfig
from flowfabric.connection import connect, migrate
from flowfabric.engine.engine import Engine
from flowfabric.errors import DoNotRetry, FlowFabricError
from flowfabric.flows.builder import Flow
from flowfabric.flows.node import Node
from flowfabric.flows.policies import AllOf, AnyOf, Quorum
from flowfabric.flows.run import FlowRun
from flowfabric.run import Run
from flowfabric.task import Retry, Task
from flowfabric.version import __version__
from flowfabric.worker.context import Context
from flowfabric.worker.settings import WorkerSettings

__all__ = [
    "AllOf",
    "AnyOf",
    "App",
    "Context",
    "DoNotRetry",
    "Engine",
    "EngineConfig",
    "Flow",
    "FlowFabricError",
    "FlowRun",
    "Node",
    "Quorum",
    "Retry",
    "Run",
    "Task",
    "WorkerSettings",
    "__version__",
    "connect",
    "migrate",
]
