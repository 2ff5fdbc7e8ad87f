"""Settings of an engine, checked once."""

from functools import cached_property

from msgspec import Struct

from flowfabric.core.bounds import BATCH_MAX, PAYLOAD_BYTES_MAX
from flowfabric.core.checks import check_int, check_list
from flowfabric.core.decisions import Keep
from flowfabric.core.ids import parse_lane_id
from flowfabric.core.policies import Duration, duration_ms


class EngineConfig(Struct, frozen=True, kw_only=True, dict=True):
    keep: Duration = "7d"
    """How long completed executions are kept, unless their task says otherwise."""
    keep_failed: Duration = "30d"
    """How long executions are kept that failed, were cancelled, expired or were skipped."""
    keep_events: Duration = "7d"
    """How long the event log reaches back."""
    payload_bytes_max: int = PAYLOAD_BYTES_MAX
    """Largest input payload and largest result."""
    lanes: tuple[str, ...] = ()
    """Lanes to make known when the engine opens; others appear with their first execution."""

    def __post_init__(self) -> None:
        _ = self.kept, self.event_retention_ms
        check_int("payload_bytes_max", self.payload_bytes_max, 1, 1024 * 1024 * 1024)
        for lane_id in check_list("lanes", self.lanes, 0, BATCH_MAX):
            parse_lane_id(lane_id, "lanes")

    @cached_property
    def kept(self) -> Keep:
        return Keep(
            completed_ms=duration_ms("keep", self.keep),
            failed_ms=duration_ms("keep_failed", self.keep_failed),
        )

    @property
    def retention_ms(self) -> int:
        return self.kept.completed_ms

    @cached_property
    def event_retention_ms(self) -> int:
        return duration_ms("keep_events", self.keep_events)
