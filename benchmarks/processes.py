"""Two worker processes on one Postgres: what they drain, beside one, and what they wait for."""

import asyncio
import multiprocessing
import time
from collections import Counter
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from multiprocessing.synchronize import Barrier
from typing import TypeAlias

import asyncpg

from benchmarks.bench import Bench
from benchmarks.costs import JOBS, Jobs
from benchmarks.meter import Cost, Meter
from benchmarks.report import costs, figures
from benchmarks.sdk import CONCURRENCY, worker
from flowfabric.cli.worker import exempt_imports_from_collection

SPAWN = multiprocessing.get_context("spawn")
READY_TIMEOUT_S = 30
LOOK_S = 0.01
ROUNDS = 2
ACTIVITY = """
select coalesce(wait_event_type, 'none')
  from pg_stat_activity
 where datname = current_database() and state = 'active' and pid <> pg_backend_pid()"""

Tally: TypeAlias = "SynchronizedArray[float]"
"""What one process has done: jobs, and microseconds of CPU."""


async def measure(bench: Bench) -> None:
    """One and two take turns; the quickest round of each counts."""
    drains: dict[int, list[Cost]] = {1: [], 2: []}
    waits: Counter[str] = Counter()
    for _ in range(ROUNDS):
        for count, each in drains.items():
            async with bench.database() as url:
                cost, seen = await drain(url, count)
            each.append(cost)
            if count > 1:
                waits += seen
    one, two = (min(each, key=lambda cost: cost.seconds) for each in drains.values())
    ratio = two.rate / one.rate
    rows = [("one worker process", one, None), ("two worker processes", two, ratio)]
    costs("Drains of no-op jobs on Postgres", rows, "of one")
    shares = [(kind, f"{count / waits.total():.1%}") for kind, count in waits.most_common()]
    figures("What active backends of two wait for", shares)
    bench.at_least(1.4, ratio, "two worker processes, of one's rate")
    bench.at_most(0.05, waits["Lock"] / waits.total(), "two worker processes, waiting for locks")


async def drain(url: str, processes: int) -> tuple[Cost, Counter[str]]:
    """What all of them together cost, and what active backends were seen to wait for."""
    jobs = Jobs(url)
    async with jobs.app:
        await jobs.submit(JOBS)
    ready, stop = SPAWN.Barrier(processes + 1), SPAWN.Value("b", 0)
    tallies = [SPAWN.Array("d", 2) for _ in range(processes)]
    workers = [
        SPAWN.Process(target=work, args=(url, ready, stop, tally), daemon=True) for tally in tallies
    ]
    for each in workers:
        each.start()
    waits: Counter[str] = Counter()
    connection = await asyncpg.connect(url)
    async with Meter.opened(url) as meter:
        await asyncio.to_thread(ready.wait, READY_TIMEOUT_S)
        async with meter.measuring(JOBS) as cost:
            while sum(tally[0] for tally in tallies) < JOBS:
                await asyncio.sleep(LOOK_S)
                waits.update(row[0] for row in await connection.fetch(ACTIVITY))
        cost.python_us = sum(tally[1] for tally in tallies)
    await connection.close()
    stop.value = 1
    for each in workers:
        await asyncio.to_thread(each.join)
    return cost, waits


def work(url: str, ready: Barrier, stop: "Synchronized[int]", tally: Tally) -> None:
    """One process, as the command line runs it."""
    exempt_imports_from_collection()
    asyncio.run(_work(url, ready, stop, tally))


async def _work(url: str, ready: Barrier, stop: "Synchronized[int]", tally: Tally) -> None:
    jobs = Jobs(url)
    async with jobs.app:
        await asyncio.to_thread(ready.wait, READY_TIMEOUT_S)
        began_us = time.process_time_ns() / 1_000
        async with worker(jobs.app, CONCURRENCY):
            while not stop.value:
                await asyncio.sleep(LOOK_S)
                tally[:] = [jobs.done, time.process_time_ns() / 1_000 - began_us]
