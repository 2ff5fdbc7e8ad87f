"""What became of every job of a scenario."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.chaos import network, strangers
from benchmarks.chaos.arena import (
    Arena,
    Fault,
    arena,
    directly,
    under_load,
)
from benchmarks.chaos.faults import KILLS_WORK
from benchmarks.chaos.holds import FENCED, HELD, longest_overlap_s, read
from benchmarks.chaos.timings import longest_pause_ms, repeated, start_ms
from benchmarks.chaos.worker import LEASE_S, WORK_S
from tests.postgres import Server

NOTHING_HIT = "nothing was hit"
FORGETS_HOLDERS = ("lagging failover",)
"""Scenarios after which the database does not know who held what."""
OVERLAP_MAX_S = 1.0
RECOVERY_MAX_MS = round((LEASE_S + 5) * 1_000)
PAUSE_SEEN_MS = 500
"""A pause that without a fault is not seen."""


@dataclass(frozen=True)
class Verdict:
    name: str
    submitted: int
    completed: int
    pause_ms: int
    repeated: int
    exited: int
    overlap_s: float
    """How long two processes held one job at the same time, at the worst."""
    fenced_overlap_s: float
    """How long both of them were in a fence for it."""
    start_ms: int
    """From being submitted to being started, at the median."""
    lost: int = 0
    """Acknowledged jobs that were gone afterwards."""
    found: tuple[str, ...] = ()
    """What else is wrong."""
    recovery_max_ms: int | None = None
    remark: str = ""

    @property
    def problems(self) -> list[str]:
        found = {
            "jobs are missing": self.completed != self.submitted,
            f"{self.exited} workers exited": self.exited > 0,
            NOTHING_HIT: not self._has_hit,
            "two holders for too long": self.overlap_s > OVERLAP_MAX_S
            and self.name not in FORGETS_HOLDERS,
            "two in a fence": self.fenced_overlap_s > 0,
            "recovered too late": self.recovery_max_ms is not None
            and self.pause_ms > self.recovery_max_ms,
        }
        return [*(problem for problem, is_so in found.items() if is_so), *self.found]

    @property
    def _has_hit(self) -> bool:
        if self.name in KILLS_WORK:
            return self.repeated > 0
        if self.name in network.SCENARIOS or self.name in strangers.SCENARIOS:
            return self.repeated > 0 or self.pause_ms >= PAUSE_SEEN_MS
        return True

    @property
    def passed(self) -> bool:
        return not self.problems


async def play(server: Server, name: str, fault: Fault) -> Verdict:
    async with arena(server, network.ROUTES.get(name, directly)) as within:
        load = await under_load(within)
        fault_ms = time.time_ns() // 1_000_000
        await fault(within)
        await load
        await within.reach(within.submitted)
        bound_ms = RECOVERY_MAX_MS if name in network.SCENARIOS else None
        return await judge(within, name, fault_ms, recovery_max_ms=bound_ms)


async def judge(
    within: Arena,
    name: str,
    fault_ms: int,
    *,
    lost: int = 0,
    found: Sequence[str] = (),
    recovery_max_ms: int | None = None,
    remark: str = "",
) -> Verdict:
    """What became of the jobs, now that they had the time to complete."""
    timings = await within.timings()
    return Verdict(
        name=name,
        submitted=within.submitted,
        completed=len(timings),
        pause_ms=longest_pause_ms(timings, fault_ms, round(WORK_S * 1_000)),
        repeated=repeated(timings),
        exited=sum(
            worker.returncode is not None and worker.pid not in within.killed
            for worker in within.workers
        ),
        overlap_s=longest_overlap_s(read(within.holds, HELD)),
        fenced_overlap_s=longest_overlap_s(read(within.holds, FENCED)),
        start_ms=start_ms(timings),
        lost=lost,
        found=tuple(found),
        recovery_max_ms=recovery_max_ms,
        remark=remark,
    )


def row_of(verdict: Verdict) -> tuple[str, ...]:
    return (
        verdict.name,
        f"{verdict.submitted:,}",
        f"{verdict.completed / verdict.submitted:.1%}",
        f"{verdict.lost:,}",
        f"{verdict.pause_ms / 1_000:.1f} s",
        f"{verdict.repeated:,}",
        f"{verdict.start_ms} ms",
        f"{verdict.overlap_s:.2f} s",
        f"{verdict.fenced_overlap_s:.2f} s",
        "; ".join((", ".join(verdict.problems) or "passed", *filter(None, [verdict.remark]))),
    )
