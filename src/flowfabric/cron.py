"""Due times of a cron expression in a time zone.

Two readings, as people mean them. With `*` for the hour the expression says *every
so often*: every instant whose local time matches is due, so `0 * * * *` is due
every hour, 25 times on the day the clocks go back. Anything else says *at this
time of day*: each matching time of each day is due once. A time that the clocks
skip is due at the moment they skip it; a time they show twice is due the first time.

Either way the due times are one fixed set of instants, no matter when they are computed, so
processes that ask at different moments agree.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from flowfabric.core.schedules import Interval, Recurrence, Schedule, ScheduleKind
from flowfabric.errors import InvalidInput

NICKNAMES: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
FIELDS: Final = "minute hour day-of-month month day-of-week"

_EPOCH: Final = datetime(1970, 1, 1)
_MINUTE: Final = timedelta(minutes=1)
_DAY_S: Final = 24 * 60 * 60
_SKIPPED_MINUTES_MAX: Final = 2 * 24 * 60
"""The most that clocks skip: islands have crossed the date line, which skips a day."""


def recurrence_of(schedule: Schedule) -> Recurrence:
    """The due times a schedule stands for. Raises `InvalidInput` when they make no sense."""
    match schedule.schedule_kind:
        case ScheduleKind.CRON:
            return cron(schedule.expression, schedule.timezone)
        case ScheduleKind.INTERVAL:
            return Interval(int(schedule.expression), schedule.anchor_at_ms)


@lru_cache(maxsize=1024)
def cron(expression: str, timezone: str) -> "Cron":
    """Check and read an expression: five fields, or a nickname such as `@daily`."""
    fields = NICKNAMES.get(expression.lower(), expression)
    if len(fields.split()) != 5:
        raise InvalidInput("cron", f"must have five fields: {FIELDS}", expression)
    try:
        CronSim(fields, _EPOCH)
    except CronSimError as error:
        raise InvalidInput("cron", str(error).lower(), expression) from None
    return Cron(fields, zone(timezone))


def zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        raise InvalidInput("timezone", "is not a known time zone such as Europe/Rome", name) from (
            None
        )


class Cron:
    def __init__(self, expression: str, timezone: ZoneInfo) -> None:
        self._expression = expression
        self._zone = timezone
        self._every_so_often = expression.split()[1] == "*"

    def next_after(self, at_ms: int) -> int | None:
        at_s = at_ms // 1_000
        due_s = self._next_instant(at_s) if self._every_so_often else self._next_time_of_day(at_s)
        return None if due_s is None else due_s * 1_000

    def _next_instant(self, at_s: int) -> int | None:
        """Read the expression with one offset from UTC at a time, up to where it changes."""
        start_s = at_s + 1
        while True:
            offset_s = self._offset_s(start_s)
            due = next(self._matches(_wall(start_s - 1 + offset_s)), None)
            if due is None:
                return None
            due_s = _seconds(due) - offset_s
            change_s = self._offset_change_s(start_s, due_s)
            if change_s is None:
                return due_s
            start_s = change_s

    def _next_time_of_day(self, at_s: int) -> int | None:
        """Read the expression as wall time, and find the instant each match stands for."""
        for due in self._matches(_wall(at_s + self._offset_s(at_s))):
            due_s = self._first_instant_s(due)
            # The second time around, the first matches are of the first time around.
            if due_s > at_s:
                return due_s
        return None

    def _matches(self, after: datetime) -> Iterator[datetime]:
        """Matching times without a zone; ends when there is none for fifty years."""
        return iter(CronSim(self._expression, after))

    def _first_instant_s(self, wall: datetime) -> int:
        for _ in range(_SKIPPED_MINUTES_MAX):
            instant = wall.replace(tzinfo=self._zone).astimezone(UTC)
            if instant.astimezone(self._zone).replace(tzinfo=None) == wall:
                return _seconds(instant.replace(tzinfo=None))
            wall += _MINUTE
        raise AssertionError(f"no instant in {self._zone} near {wall}")

    def _offset_s(self, at_s: int) -> int:
        offset = datetime.fromtimestamp(at_s, self._zone).utcoffset()
        assert offset is not None, "a time in a zone has an offset"
        return offset // timedelta(seconds=1)

    def _offset_change_s(self, start_s: int, end_s: int) -> int | None:
        """The first second after `start_s`, up to `end_s`, with another offset than `start_s`.

        Looks once a day: clocks do not change twice in one.
        """
        offset_s = self._offset_s(start_s)
        for low_s in range(start_s, end_s, _DAY_S):
            high_s = min(low_s + _DAY_S, end_s)
            if self._offset_s(high_s) != offset_s:
                return self._bisect(low_s, high_s, offset_s)
        return None

    def _bisect(self, low_s: int, high_s: int, offset_s: int) -> int:
        while high_s - low_s > 1:
            middle_s = (low_s + high_s) // 2
            if self._offset_s(middle_s) == offset_s:
                low_s = middle_s
            else:
                high_s = middle_s
        return high_s


def _wall(local_s: int) -> datetime:
    return _EPOCH + timedelta(seconds=local_s)


def _seconds(wall: datetime) -> int:
    return (wall - _EPOCH) // timedelta(seconds=1)
