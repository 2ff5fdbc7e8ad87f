"""Who held a job, and who was in a fence for it, from when to when.

Each worker process appends to one file, in single writes: what it says survives it.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Final

from msgspec import Struct

HELD: Final = "held"
FENCED: Final = "fenced"


class Hold(Struct, frozen=True):
    job: str
    process: str
    began_s: float
    ended_s: float | None
    """None for one that was killed."""


@contextmanager
def noted(file: Path, kind: str, job: str) -> Iterator[None]:
    """Around the time in which this process holds a job."""
    place = f"{kind} {job} {os.getpid()} {os.urandom(8).hex()}"
    _append(file, f"{place} began {time.monotonic()}")
    try:
        yield
    finally:
        _append(file, f"{place} ended {time.monotonic()}")


def _append(file: Path, line: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def read(file: Path, kind: str) -> list[Hold]:
    began: dict[str, tuple[str, str, float]] = {}
    ended: dict[str, float] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        found, job, process, own, what, at_s = line.split(" ")
        if found != kind:
            continue
        if what == "began":
            began[own] = (job, process, float(at_s))
        else:
            ended[own] = float(at_s)
    return [Hold(*each, ended.get(own)) for own, each in began.items()]


def longest_overlap_s(holds: Iterable[Hold]) -> float:
    """How long two processes held one job at the same time, at the worst."""
    by_job: dict[str, list[Hold]] = {}
    for hold in holds:
        by_job.setdefault(hold.job, []).append(hold)
    longest_s = 0.0
    for several in by_job.values():
        for first, second in permutations(several, 2):
            if first.process == second.process or first.ended_s is None:
                continue
            if first.began_s <= second.began_s:
                until_s = min(first.ended_s, second.ended_s or first.ended_s)
                longest_s = max(longest_s, until_s - second.began_s)
    return longest_s
