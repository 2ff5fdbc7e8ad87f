"""Help for tests of code that uses FlowFabric."""

import re
from threading import Lock

from flowfabric.core.checks import check_int, check_time
from flowfabric.errors import InvalidInput

_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PART = re.compile(r"(\d+)(ms|s|m|h|d)")


class SettableClock:
    """A clock that stands still until it is moved. Pass it to `connect(url, clock=…)`."""

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = check_time("start_ms", start_ms)
        # A store reads its clock on a thread of its own.
        self._lock = Lock()

    def now_ms(self) -> int:
        with self._lock:
            return self._now_ms

    def set_ms(self, now_ms: int) -> None:
        check_time("now_ms", now_ms)
        with self._lock:
            self._now_ms = now_ms

    def advance(
        self,
        duration: str = "",
        *,
        ms: int = 0,
        seconds: int = 0,
        minutes: int = 0,
        hours: int = 0,
        days: int = 0,
    ) -> int:
        """Move forward, by `"1h30m"` or by units, and return the new time."""
        parts = {"ms": ms, "seconds": seconds, "minutes": minutes, "hours": hours, "days": days}
        for name, count in parts.items():
            check_int(name, count, 0, 2**53)
        step_ms = _parse_duration_ms(duration) + sum(
            count * unit_ms
            for count, unit_ms in zip(parts.values(), _UNIT_MS.values(), strict=True)
        )
        with self._lock:
            self._now_ms = check_time("now_ms", self._now_ms + step_ms)
            return self._now_ms


def _parse_duration_ms(text: object) -> int:
    if not isinstance(text, str) or _PART.sub("", text):
        raise InvalidInput("duration", "must look like 500ms, 30s, 1h30m or 2d", text)
    return sum(int(count) * _UNIT_MS[unit] for count, unit in _PART.findall(text))
