"""Durations as people write them."""

import re
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.core.policies import check_duration, duration_ms, optional_duration_ms
from flowfabric.errors import InvalidInput


@pytest.mark.parametrize(
    ("value", "milliseconds"),
    [
        ("2m", 120_000),
        ("1h30m", 5_400_000),
        ("1h 30m", 5_400_000),
        ("500ms", 500),
        ("1.5d", 129_600_000),
        ("1w", 604_800_000),
        (0, 0),
        (3, 3_000),
        (0.25, 250),
        (0.0001, 1),
        (timedelta(minutes=2), 120_000),
    ],
)
def test_a_duration_is_milliseconds(value: object, milliseconds: int) -> None:
    assert duration_ms("timeout", value) == milliseconds


@pytest.mark.parametrize(
    "value", ["", "2", "m", "2 minutes", "-2m", "1h,2m", None, True, [], -1, float("nan")]
)
def test_anything_else_is_refused_by_the_name_of_its_field(value: object) -> None:
    with pytest.raises(InvalidInput) as refusal:
        duration_ms("timeout", value)
    assert refusal.value.field == "timeout"


def test_more_than_ten_years_is_no_duration() -> None:
    with pytest.raises(InvalidInput, match="must be at "):
        duration_ms("timeout", "4000d")
    assert optional_duration_ms("timeout", None) is None


@given(st.integers(0, 365), st.integers(0, 23), st.integers(0, 59))
def test_text_and_timedelta_agree(days: int, hours: int, minutes: int) -> None:
    span = timedelta(days=days, hours=hours, minutes=minutes)
    assert duration_ms("d", f"{days}d{hours}h{minutes}m") == duration_ms("d", span)


@pytest.mark.parametrize(
    ("value", "problem"),
    [(-1, "must be at least 0 s (got -1)"), ("99999999d", "must be at most ")],
)
def test_a_duration_out_of_bounds_is_refused_in_units(value: object, problem: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(problem)):
        duration_ms("delay", value)
    with pytest.raises(InvalidInput, match=re.escape("must be 1s to 1d (got '10ms')")):
        check_duration("lease_ttl", "10ms", 1_000, 86_400_000)
