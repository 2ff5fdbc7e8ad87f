"""Durations as people write them: `250ms`, `90s`, `10m`, `1h30m`, `2d`."""

import re
from typing import Final

from flowfabric.core.policies import DURATION_MAX_MS
from flowfabric.errors import InvalidInput

_UNIT_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_PART: Final = re.compile(r"(\d{1,15})(ms|s|m|h|d)")
_WHOLE: Final = re.compile(rf"(?:{_PART.pattern})+")


def parse_duration_ms(field: str, value: object) -> int:
    """Whole milliseconds from text, or from a number of seconds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value * 1_000 <= DURATION_MAX_MS:
            raise InvalidInput(field, f"must be 0 to {DURATION_MAX_MS // 1_000} seconds", value)
        return round(value * 1_000)
    if not isinstance(value, str) or _WHOLE.fullmatch(value) is None:
        raise InvalidInput(field, "must be a duration such as 250ms, 90s, 10m, 1h30m or 2d", value)
    total_ms = sum(int(number) * _UNIT_MS[unit] for number, unit in _PART.findall(value))
    if total_ms > DURATION_MAX_MS:
        raise InvalidInput(field, f"must be at most {DURATION_MAX_MS // 86_400_000} days", value)
    return total_ms
