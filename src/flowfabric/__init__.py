"""Durable execution for Python: functions that survive crashes, on SQLite or Postgres."""

from flowfabric.config import EngineConfig
from flowfabric.connection import connect, migrate
from flowfabric.engine.engine import Engine
from flowfabric.errors import FlowFabricError
from flowfabric.version import __version__

__all__ = ["Engine", "EngineConfig", "FlowFabricError", "__version__", "connect", "migrate"]
