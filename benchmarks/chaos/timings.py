"""How long jobs took, and how long none was done."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from msgspec import Struct

COLUMNS = "created_at_ms, started_at_ms, completed_at_ms, total_attempt_count"


class Timing(Struct, frozen=True):
    """One completed job."""

    created_at_ms: int
    started_at_ms: int
    completed_at_ms: int
    attempts: int


def longest_pause_ms(timings: Sequence[Timing], since_ms: int, work_ms: int) -> int:
    """Between two completions from then on, or what the slowest job took beyond its work."""
    completed = sorted(each.completed_at_ms for each in timings)
    pauses = [later - before for before, later in pairwise(completed) if later > since_ms]
    taken = [
        each.completed_at_ms - each.created_at_ms - work_ms
        for each in timings
        if each.completed_at_ms > since_ms
    ]
    return max([0, *pauses, *taken])


def start_ms(timings: Sequence[Timing]) -> int:
    """From being submitted to being started, at the median."""
    return round(median([each.started_at_ms - each.created_at_ms for each in timings] or [0]))


def repeated(timings: Sequence[Timing]) -> int:
    return sum(each.attempts > 1 for each in timings)
