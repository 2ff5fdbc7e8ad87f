"""Cron against the slow truth: looking at every minute of a fortnight."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from hypothesis import given, settings
from hypothesis.strategies import integers, lists, sampled_from

from flowfabric.core.schedules import between, latest_due
from flowfabric.cron import cron
from tests.properties.slow_cron import slow_truth

ZONES = ["Europe/Rome", "America/New_York", "Australia/Lord_Howe", "Africa/Cairo", "UTC"]
CHANGES = {
    "Europe/Rome": ("2026-03-29", "2026-10-25"),
    "America/New_York": ("2026-03-08", "2026-11-01"),
    "Australia/Lord_Howe": ("2026-04-05", "2026-10-04"),
    "Africa/Cairo": ("2026-04-24", "2026-10-30"),
    "UTC": ("2026-03-29", "2026-10-25"),
}
MINUTES = ["*", "*/15", "0", "30", "7,37", "45-50"]
HOURS = ["*", "*/3", "0", "1", "2", "2,3", "0-4"]
WEEKDAYS = ["*", "0", "1-5"]
DAYS = 3


@settings(deadline=None, max_examples=150)
@given(
    sampled_from(ZONES),
    sampled_from([0, 1]),
    sampled_from(MINUTES),
    sampled_from(HOURS),
    sampled_from(WEEKDAYS),
    lists(integers(0, DAYS * 24 * 60 * 60 * 1_000 - 1), max_size=20),
)
def test_due_times_are_those_that_looking_at_every_minute_finds(
    zone_name: str, change: int, minute: str, hour: str, weekday: str, asked_from: list[int]
) -> None:
    zone = ZoneInfo(zone_name)
    day = datetime.fromisoformat(CHANGES[zone_name][change]).replace(tzinfo=zone)
    start = (day - timedelta(days=1)).astimezone(UTC)
    start_ms = round(start.timestamp()) * 1_000
    end_ms = start_ms + DAYS * 24 * 60 * 60 * 1_000
    expression = f"{minute} {hour} * * {weekday}"
    truth = slow_truth(expression, zone, start, DAYS)
    recurrence = cron(expression, zone_name)

    assert list(between(recurrence, start_ms - 1, end_ms - 1)) == truth
    for offset_ms in asked_from:
        at_ms = start_ms + offset_ms
        later = [due_ms for due_ms in truth if due_ms > at_ms]
        if later:
            assert recurrence.next_after(at_ms) == later[0]
        passed = [due_ms for due_ms in truth if due_ms <= at_ms]
        if passed:
            assert latest_due(recurrence, passed[0], at_ms) == passed[-1]
