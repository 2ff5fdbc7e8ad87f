"""The clock users set in their tests."""

import pytest

from flowfabric.errors import InvalidInput
from flowfabric.testing import SettableClock


def test_a_settable_clock_stands_still_until_it_is_moved() -> None:
    clock = SettableClock(5_000)
    assert (clock.now_ms(), clock.now_ms()) == (5_000, 5_000)
    clock.set_ms(1_000)
    assert clock.now_ms() == 1_000


@pytest.mark.parametrize(
    ("duration", "units", "step_ms"),
    [
        ("", {}, 0),
        ("250ms", {}, 250),
        ("1h30m", {}, 5_400_000),
        ("2d", {}, 172_800_000),
        ("10s", {"ms": 1}, 10_001),
        ("", {"ms": 1, "seconds": 2, "minutes": 3, "hours": 4, "days": 5}, 446_582_001),
    ],
)
def test_a_settable_clock_moves_by_text_and_by_units(
    duration: str, units: dict[str, int], step_ms: int
) -> None:
    clock = SettableClock(1_000)
    assert clock.advance(duration, **units) == 1_000 + step_ms
    assert clock.now_ms() == 1_000 + step_ms


@pytest.mark.parametrize("duration", ["soon", "-1s", "1h30", "5 parsecs"])
def test_a_settable_clock_refuses_what_is_no_duration(duration: str) -> None:
    clock = SettableClock(1_000)
    with pytest.raises(InvalidInput, match="duration"):
        clock.advance(duration)
    with pytest.raises(InvalidInput, match="seconds"):
        clock.advance(seconds=-1)
    with pytest.raises(InvalidInput, match="now_ms"):
        clock.set_ms(-1)
    assert clock.now_ms() == 1_000
