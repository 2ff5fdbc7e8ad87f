"""When cron is due, found by looking at every single minute."""

from datetime import datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

MINUTE = timedelta(minutes=1)


def slow_truth(expression: str, zone: ZoneInfo, start: datetime, days: int) -> list[int]:
    """Due times in milliseconds from `start` on; of the date, only the day of week counts."""
    minute, hour, _, _, weekday = expression.split()
    instants = [start + n * MINUTE for n in range(days * 24 * 60)]
    found: list[int] = []
    shown: set[datetime] = set()
    before = (start - MINUTE).astimezone(zone).replace(tzinfo=None)
    for at in instants:
        wall = at.astimezone(zone).replace(tzinfo=None)
        candidates = [wall]
        if hour != "*":
            # Wall times between the last minute and this one were skipped, and are due now.
            skipped = [before + n * MINUTE for n in range(1, (wall - before) // MINUTE)]
            candidates = [each for each in (*skipped, wall) if each not in shown]
            shown.update(candidates)
            before = max(before, wall)
        if any(_matches(each, minute, hour, weekday) for each in candidates):
            found.append(round(at.timestamp()) * 1_000)
    return found


def _matches(wall: datetime, minute: str, hour: str, weekday: str) -> bool:
    return (
        wall.minute in _field(minute, 60)
        and wall.hour in _field(hour, 24)
        and wall.isoweekday() % 7 in _field(weekday, 7)
    )


@cache
def _field(text: str, size: int) -> frozenset[int]:
    chosen: set[int] = set()
    for part in text.split(","):
        span, _, step = part.partition("/")
        low, _, high = (f"0-{size - 1}" if span == "*" else span).partition("-")
        chosen |= set(range(int(low), int(high or low) + 1, int(step or 1)))
    return frozenset(chosen)
