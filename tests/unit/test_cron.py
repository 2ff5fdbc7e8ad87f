"""Due times of cron expressions on days when the clocks change."""

from datetime import datetime
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest

from flowfabric.core.schedules import between
from flowfabric.cron import cron
from flowfabric.errors import InvalidInput


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp()) * 1_000


def due(expression: str, zone: str, start: str, end: str) -> list[str]:
    """Due times after `start`, up to `end`, as local times with their offset."""
    found = between(cron(expression, zone), ms(start), ms(end))
    return [
        datetime.fromtimestamp(due_ms // 1_000, ZoneInfo(zone)).isoformat(timespec="minutes")
        for due_ms in islice(found, 1_000)
    ]


ROME_FORWARD = ("Europe/Rome", "2026-03-28T12:00+01:00", "2026-03-30T12:00+02:00")
ROME_BACK = ("Europe/Rome", "2026-10-24T12:00+02:00", "2026-10-26T12:00+01:00")
LORD_HOWE_FORWARD = ("Australia/Lord_Howe", "2026-10-03T12:00+10:30", "2026-10-04T12:00+11:00")
LORD_HOWE_BACK = ("Australia/Lord_Howe", "2026-04-04T12:00+11:00", "2026-04-05T12:00+10:30")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("30 2 * * *", ["2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"]),
        ("*/20 2 29 3 *", ["2026-03-29T03:00+02:00"]),
        ("0 2,3 29 3 *", ["2026-03-29T03:00+02:00"]),
        ("30 */2 29 3 0", ["2026-03-29T00:30+01:00", "2026-03-29T03:00+02:00"]),
    ],
)
def test_a_time_the_clocks_skip_is_due_when_they_skip_it(
    expression: str, expected: list[str]
) -> None:
    assert due(expression, *ROME_FORWARD)[: len(expected)] == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("30 2 * * *", ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]),
        ("*/30 2 25 * *", ["2026-10-25T02:00+02:00", "2026-10-25T02:30+02:00"]),
        (
            "0 1-3 25 * *",
            ["2026-10-25T01:00+02:00", "2026-10-25T02:00+02:00", "2026-10-25T03:00+01:00"],
        ),
    ],
)
def test_a_time_the_clocks_show_twice_is_due_the_first_time(
    expression: str, expected: list[str]
) -> None:
    assert due(expression, *ROME_BACK) == expected


def test_asking_in_the_second_hour_does_not_bring_back_the_first() -> None:
    second_time_round = ms("2026-10-25T02:10+01:00")
    assert cron("30 2 * * *", "Europe/Rome").next_after(second_time_round) == ms(
        "2026-10-26T02:30+01:00"
    )


def test_an_hourly_schedule_is_due_every_hour_whatever_the_clocks_show() -> None:
    for window, hours in ((ROME_FORWARD, 47), (ROME_BACK, 49)):
        found = list(between(cron("15 * * * *", window[0]), ms(window[1]), ms(window[2])))
        assert len(found) == hours
        assert {later - earlier for earlier, later in pairwise(found)} == {3_600_000}


def test_clocks_that_move_by_half_an_hour() -> None:
    assert due("15 2 * * *", *LORD_HOWE_FORWARD) == ["2026-10-04T02:30+11:00"]
    assert due("45 1 * * *", *LORD_HOWE_BACK) == ["2026-04-05T01:45+11:00"]
    assert due("45 * 5 4 *", *LORD_HOWE_BACK)[:4] == [
        "2026-04-05T00:45+11:00",
        "2026-04-05T01:45+11:00",
        "2026-04-05T01:45+10:30",
        "2026-04-05T02:45+10:30",
    ]


def test_a_day_that_an_island_skipped() -> None:
    window = ("Pacific/Apia", "2011-12-29T12:00-10:00", "2012-01-02T00:00+14:00")
    assert due("0 6 30 12 *", *window) == ["2011-12-31T00:00+14:00"]


def test_nicknames() -> None:
    assert cron("@daily", "UTC").next_after(ms("2026-01-01T00:00+00:00")) == ms(
        "2026-01-02T00:00+00:00"
    )


def test_days_that_do_not_come_for_years() -> None:
    assert cron("0 0 29 2 *", "UTC").next_after(ms("2096-03-01T00:00+00:00")) == ms(
        "2104-02-29T00:00+00:00"
    )


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("", "must have five fields: minute hour day-of-month month day-of-week"),
        ("* * * *", "must have five fields: minute hour day-of-month month day-of-week"),
        ("* * * * * *", "must have five fields: minute hour day-of-month month day-of-week"),
        ("@reboot", "must have five fields: minute hour day-of-month month day-of-week"),
        ("60 * * * *", "bad minute"),
        ("* 24 * * *", "bad hour"),
        ("0 0 31 2 *", "bad day-of-month"),
        ("0 0 * 13 *", "bad month"),
        ("0 0 * * FRY", "bad day-of-week"),
    ],
)
def test_nonsense_is_refused_with_its_field(expression: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        cron(expression, "UTC")
    assert (caught.value.field, caught.value.problem) == ("cron", problem)


@pytest.mark.parametrize("name", ["Mars/Olympus", "../etc/passwd", "", "Europe", "/etc/hosts"])
def test_an_unknown_zone_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        cron("* * * * *", name)
    assert caught.value.field == "timezone"
