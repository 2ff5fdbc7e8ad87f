"""Durable execution for Python: functions that survive crashes, on SQLite or Postgres."""

from flowfabric.app import App
from flowfabric.config import EngineConfig
from flowfabric.connection import connect, migrate
from flowfabric.engine.engine import Engine
from flowfabric.errors import DoNotRetry, FlowFabricError
from flowfabric.run import Run
from flowfabric.task import Retry, Task
from flowfabric.version import __version__
from flowfabric.worker.context import Context
from flowfabric.worker.settings import WorkerSettings

__all__ = [
    "App",
    "Context",
    "DoNotRetry",
    "Engine",
    "EngineConfig",
    "FlowFabricError",
    "Retry",
    "Run",
    "Task",
    "WorkerSettings",
    "__version__",
    "connect",
    "migrate",
]
