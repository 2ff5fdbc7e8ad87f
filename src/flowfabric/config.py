"""What an engine is opened with: settings, checked once, and how values are stored."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

from msgspec import Struct

from flowfabric.core.bounds import BATCH_MAX, PAYLOAD_BYTES_MAX
from flowfabric.core.checks import check_int, check_list
from flowfabric.core.ids import parse_lane_id
from flowfabric.core.policies import Duration, duration_ms
from flowfabric.core.transitions import Keep

T = TypeVar("T")
Data = TypeVar("Data", bytes, bytes | None)
Item = TypeVar("Item", bound=Struct)


class EngineConfig(Struct, frozen=True, kw_only=True, dict=True):
    keep: Duration = "7d"
    """How long completed executions are kept, unless their task says otherwise."""
    keep_failed: Duration = "30d"
    """How long those are kept that failed, were cancelled, expired or were skipped."""
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


class Values:
    """How payloads, results and frames are stored: as they are, unless an app has a codec."""

    coded = False

    def __init__(self, plain_bytes_max: int) -> None:
        self.plain_bytes_max = plain_bytes_max
        """Largest payload or result that callers may pass."""

    def pack(self, data: Data) -> Data:
        """Data as it is stored. Safe to repeat."""
        return data

    def seal(self, data: bytes) -> bytes:
        """Data as it is stored where that is marked elsewhere: it may begin with anything."""
        return data

    def unpack(self, data: Data) -> Data:
        return data

    def show(self, data: Data) -> Data:
        """Unpacked; as it is stored if it cannot be read, so that others still can."""
        return data

    async def through(self, value: T, change: Callable[[T], T]) -> T:
        """Change a value by one of the above, if there is anything to change."""
        return value

    async def through_all(
        self, records: Sequence[Item], change: Callable[[Item], Item]
    ) -> Sequence[Item]:
        return records
