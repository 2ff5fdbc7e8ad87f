"""The record of a schedule: what to create, and when next."""

from enum import StrEnum
from typing import ClassVar

from flowfabric.core.ids import LaneId, Namespace
from flowfabric.core.records import Record


class ScheduleKind(StrEnum):
    CRON = "cron"
    INTERVAL = "interval"


class CatchUp(StrEnum):
    """What happens to due times that nobody was there to notice."""

    LATEST = "latest"
    """The last one is made up for, those before it are dropped."""
    ALL = "all"
    """Each is made up for, oldest first; see `CATCH_UP_MAX`."""
    NONE = "none"
    """All are dropped; see `LATENESS_MAX_MS`."""


class Schedule(Record, frozen=True, kw_only=True):
    """Creates an execution at each of its due times."""

    table: ClassVar[str] = "schedule"
    key: ClassVar[tuple[str, ...]] = ("namespace", "schedule_id")

    namespace: Namespace
    schedule_id: str
    """The name its owner gave it."""
    schedule_kind: ScheduleKind
    expression: str
    """Five cron fields, or the interval in milliseconds."""
    timezone: str
    anchor_at_ms: int
    """Where the multiples of an interval are counted from; when the timing was defined."""
    catch_up: CatchUp
    paused: bool = False

    lane_id: LaneId
    execution_kind: str
    payload: bytes = b""
    payload_encoding: str | None = None
    policy: str = "{}"
    priority: int | None = None
    tags: str = "{}"
    """A JSON object."""

    next_due_at_ms: int | None
    """Null while paused."""
    last_due_at_ms: int | None = None
    """The latest due time that created an execution."""
    last_fired_at_ms: int | None = None
    last_execution: str | None = None
    """The full id of the execution created last."""
    fired_count: int = 0
    last_error: str | None = None
    """Why the latest due time created nothing; null when it did."""
    created_at_ms: int
    updated_at_ms: int
    """When the definition, or whether it is paused, last changed."""
