"""What became of every job of a scenario."""

import asyncio
import time
from dataclasses import dataclass

from benchmarks.chaos.arena import BATCH, FAULT_AT_S, LOAD_S, WORKERS, Fault, arena, steady
from benchmarks.chaos.faults import KILLS_WORK
from benchmarks.chaos.worker import WORK_S
from tests.postgres import Server

PAUSE = """
select greatest(coalesce(max(pause), 0), coalesce(max(taken), 0) - $2) from (
    select completed_at_ms - lag(completed_at_ms) over (order by completed_at_ms) as pause,
           completed_at_ms - created_at_ms as taken, completed_at_ms
      from flowfabric.execution where public_state = 'completed'
) as pauses where completed_at_ms > $1"""


@dataclass(frozen=True)
class Verdict:
    name: str
    submitted: int
    completed: int
    pause_ms: int
    repeated: int
    exited: int

    @property
    def passed(self) -> bool:
        hit = self.repeated > 0 or self.name not in KILLS_WORK
        return self.completed == self.submitted and self.exited == 0 and hit


async def play(server: Server, name: str, fault: Fault) -> Verdict:
    async with arena(server) as within:
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
        )


def row_of(verdict: Verdict) -> tuple[str, ...]:
    return (
        verdict.name,
        f"{verdict.submitted:,}",
        f"{verdict.completed / verdict.submitted:.1%}",
        f"{verdict.pause_ms / 1_000:.1f} s",
        f"{verdict.repeated:,}",
        "passed" if verdict.passed else f"failed, {verdict.exited} workers exited",
    )
