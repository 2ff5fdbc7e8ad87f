"""How `make chaos` judges."""

import pytest
from msgspec.structs import replace

from benchmarks.chaos.timings import Timing, longest_pause_ms, repeated, start_ms
from benchmarks.chaos.verdict import NOTHING_HIT, PAUSE_SEEN_MS, Verdict

FIRST = Timing(created_at_ms=0, started_at_ms=10, completed_at_ms=500, attempts=1)
SECOND = Timing(created_at_ms=100, started_at_ms=130, completed_at_ms=700, attempts=1)
LATE = Timing(created_at_ms=200, started_at_ms=220, completed_at_ms=5_000, attempts=2)


def test_the_longest_pause_is_between_completions_or_in_the_slowest_job() -> None:
    assert longest_pause_ms([], 0, 500) == 0
    assert longest_pause_ms([SECOND, FIRST], 0, 500) == 200
    assert longest_pause_ms([FIRST, LATE, SECOND], 600, 500) == 4_300
    assert longest_pause_ms([replace(LATE, created_at_ms=-2_000), SECOND], 0, 500) == 6_500
    assert longest_pause_ms([FIRST, SECOND, LATE], 6_000, 500) == 0


def test_starts_are_told_at_the_median_and_repeats_counted() -> None:
    assert (start_ms([]), start_ms([FIRST, SECOND, LATE])) == (0, 20)
    assert repeated([FIRST, SECOND, LATE]) == 1


def verdict(name: str, *, pause_ms: int, repeated: int) -> Verdict:
    return Verdict(
        name=name,
        submitted=10,
        completed=10,
        pause_ms=pause_ms,
        repeated=repeated,
        exited=0,
        overlap_s=0.0,
        fenced_overlap_s=0.0,
        start_ms=1,
    )


@pytest.mark.parametrize(
    ("name", "pause_ms", "repeated", "has_hit"),
    [
        ("clean", 0, 0, True),
        ("crash recovery", PAUSE_SEEN_MS, 0, False),
        ("crash recovery", 0, 1, True),
        ("swallowed packets", PAUSE_SEEN_MS - 1, 0, False),
        ("swallowed packets", PAUSE_SEEN_MS, 0, True),
        ("swallowed packets", 0, 1, True),
        ("open foreign transaction", 0, 0, False),
    ],
)
def test_a_fault_that_hit_nothing_has_not_passed(
    name: str, pause_ms: int, repeated: int, has_hit: bool
) -> None:
    problems = verdict(name, pause_ms=pause_ms, repeated=repeated).problems
    assert problems == ([] if has_hit else [NOTHING_HIT])
