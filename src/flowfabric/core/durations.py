"""How long something takes, as people write it.

`"2m"`, `"1h30m"`, `"500ms"` and `"1.5d"` are text; a number is seconds; a
`datetime.timedelta` is itself. Everything becomes whole milliseconds here and
nowhere else, and text for people again.
"""

import math
import re
from typing import Final, Protocol

from flowfabric.core.policies import DURATION_MAX_MS
from flowfabric.errors import InvalidInput


class TimeSpan(Protocol):
    """What is needed of a `datetime.timedelta`."""

    def total_seconds(self) -> float: ...


Duration = str | int | float | TimeSpan

_UNITS_MS: Final = {
    "ms": 1,
    "s": 1_000,
    "m": 60_000,
    "h": 3_600_000,
    "d": 86_400_000,
    "w": 7 * 86_400_000,
}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")
_WHOLE: Final = re.compile(rf"(?:{_PART.pattern})+")


def duration_ms(field: str, value: object) -> int:
    """The duration in milliseconds; anything else is refused by the name of its field."""
    if isinstance(value, str):
        total_ms = _text_ms(field, value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        total_ms = value * 1_000
    elif hasattr(value, "total_seconds"):
        total_ms = float(value.total_seconds()) * 1_000
    else:
        raise InvalidInput(field, _EXPECTED, value)
    if not math.isfinite(total_ms) or not 0 <= total_ms <= DURATION_MAX_MS:
        raise InvalidInput(field, f"must be 0 to {DURATION_MAX_MS} milliseconds", value)
    return math.ceil(total_ms)


def optional_duration_ms(field: str, value: object) -> int | None:
    return None if value is None else duration_ms(field, value)


def _text_ms(field: str, text: str) -> float:
    compact = text.replace(" ", "")
    if _WHOLE.fullmatch(compact) is None:
        raise InvalidInput(field, _EXPECTED, text)
    return sum(float(amount) * _UNITS_MS[unit] for amount, unit in _PART.findall(compact))


_EXPECTED: Final = 'must be a duration such as "90s", "1h30m", a number of seconds or a timedelta'

_UNITS_S: Final = ((86_400, "d"), (3_600, "h"), (60, "m"))


def span(ms: int) -> str:
    """A duration in at most two units: `340ms`, `12.5s`, `3m12s`, `2d4h`."""
    if ms < 1_000:
        return f"{max(0, ms)}ms"
    if ms < 60_000:
        return f"{ms / 1_000:.1f}s"
    seconds, parts = ms // 1_000, list[str]()
    for size, unit in _UNITS_S:
        count, seconds = divmod(seconds, size)
        if count or parts:
            parts.append(f"{count}{unit}")
    parts.append(f"{seconds}s")
    first, second = parts[:2]
    return first if second[0] == "0" else first + second
