"""What became of every job of a scenario."""

import asyncio
import time
from dataclasses import dataclass

from benchmarks.chaos import network
from benchmarks.chaos.arena import (
    BATCH,
    FAULT_AT_S,
    LOAD_S,
    WORKERS,
    Fault,
    arena,
    directly,
    steady,
)
from benchmarks.chaos.faults import KILLS_WORK
from benchmarks.chaos.holds import FENCED, HELD, longest_overlap_s, read
from benchmarks.chaos.worker import LEASE_S, WORK_S
from tests.postgres import Server

PAUSE = """
select greatest(coalesce(max(pause), 0), coalesce(max(taken), 0) - $2) from (
    select completed_at_ms - lag(completed_at_ms) over (order by completed_at_ms) as pause,
           completed_at_ms - created_at_ms as taken, completed_at_ms
      from flowfabric.execution where public_state = 'completed'
) as pauses where completed_at_ms > $1"""


START = """
select percentile_disc(0.5) within group (order by started_at_ms - created_at_ms)
  from flowfabric.execution where started_at_ms is not null"""

OVERLAP_MAX_S = 1.0
RECOVERY_MAX_MS = round((LEASE_S + 5) * 1_000)


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

    @property
    def problems(self) -> list[str]:
        found = {
            "jobs are missing": self.completed != self.submitted,
            f"{self.exited} workers exited": self.exited > 0,
            "nothing was hit": self.repeated == 0 and self.name in KILLS_WORK,
            "two holders for too long": self.overlap_s > OVERLAP_MAX_S,
            "two in a fence": self.fenced_overlap_s > 0,
            "recovered too late": self.name in network.SCENARIOS
            and self.pause_ms > RECOVERY_MAX_MS,
        }
        return [problem for problem, is_so in found.items() if is_so]

    @property
    def passed(self) -> bool:
        return not self.problems


async def play(server: Server, name: str, fault: Fault) -> Verdict:
    async with arena(server, network.ROUTES.get(name, directly)) as within:
        load = asyncio.create_task(steady(within, LOAD_S))
        await within.reach(BATCH * WORKERS)
        await asyncio.sleep(FAULT_AT_S)
        fault_ms = time.time_ns() // 1_000_000
        await fault(within)
        await load
        await within.reach(within.submitted)
        return Verdict(
            name=name,
            submitted=within.submitted,
            completed=await within.completed(),
            pause_ms=int(str(await within.ask(PAUSE, fault_ms, round(WORK_S * 1_000)))),
            repeated=int(
                str(
                    await within.ask(
                        "select count(*) from flowfabric.execution where total_attempt_count > 1"
                    )
                )
            ),
            exited=sum(
                worker.returncode is not None and worker.pid not in within.killed
                for worker in within.workers
            ),
            overlap_s=longest_overlap_s(read(within.holds, HELD)),
            fenced_overlap_s=longest_overlap_s(read(within.holds, FENCED)),
            start_ms=int(str(await within.ask(START))),
        )


def row_of(verdict: Verdict) -> tuple[str, ...]:
    return (
        verdict.name,
        f"{verdict.submitted:,}",
        f"{verdict.completed / verdict.submitted:.1%}",
        f"{verdict.pause_ms / 1_000:.1f} s",
        f"{verdict.repeated:,}",
        f"{verdict.start_ms} ms",
        f"{verdict.overlap_s:.2f} s",
        f"{verdict.fenced_overlap_s:.2f} s",
        ", ".join(verdict.problems) or "passed",
    )
