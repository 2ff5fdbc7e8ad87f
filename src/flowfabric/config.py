"""Settings of an engine, checked once."""

from msgspec import Struct

from flowfabric.core.checks import check_int, check_list
from flowfabric.core.ids import parse_lane_id
from flowfabric.core.limits import BATCH_MAX, PAYLOAD_BYTES_MAX, RETENTION_MS

_YEAR_MS = 365 * 24 * 60 * 60 * 1_000


class EngineConfig(Struct, frozen=True, kw_only=True):
    retention_ms: int = RETENTION_MS
    """How long ended executions are kept, unless their policy says otherwise."""
    event_retention_ms: int = 7 * 24 * 60 * 60 * 1_000
    """How long the event log reaches back."""
    payload_bytes_max: int = PAYLOAD_BYTES_MAX
    """Largest input payload and largest result."""
    lanes: tuple[str, ...] = ()
    """Lanes to make known when the engine opens; others appear with their first execution."""

    def __post_init__(self) -> None:
        check_int("retention_ms", self.retention_ms, 0, 100 * _YEAR_MS)
        check_int("event_retention_ms", self.event_retention_ms, 0, 100 * _YEAR_MS)
        check_int("payload_bytes_max", self.payload_bytes_max, 1, 1024 * 1024 * 1024)
        for lane_id in check_list("lanes", self.lanes, 0, BATCH_MAX):
            parse_lane_id(lane_id, "lanes")
