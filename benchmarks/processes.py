"""Two worker processes on one Postgres: what they drain, beside one, and what they wait for.

Workers and server share the cores of one machine, so that two processes cannot drain more than its
CPU allows: that bound is printed beside. Jobs that use the CPU themselves show what a second
process adds where the server is not what the cores are spent on.
"""

import asyncio
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from multiprocessing.synchronize import Barrier
from typing import NamedTuple, TypeAlias

import asyncpg

from benchmarks.bench import Bench
from benchmarks.costs import BUSY_US, JOBS, Jobs
from benchmarks.meter import Cost, Meter
from benchmarks.report import costs, figures
from benchmarks.sdk import CONCURRENCY, worker
from flowfabric.cli.running import exempt_imports_from_collection

SPAWN = multiprocessing.get_context("spawn")
READY_TIMEOUT_S = 30
LOOK_S = 0.01
ROUNDS = 2
BUSY_JOBS = 10_000
ACTIVITY = """
select coalesce(wait_event_type, 'none'), coalesce(wait_event, '')
  from pg_stat_activity
 where datname = current_database() and state = 'active' and pid <> pg_backend_pid()"""

Tally: TypeAlias = "SynchronizedArray[float]"
"""What one process has done: jobs, and microseconds of CPU."""
Waits: TypeAlias = Counter[tuple[str, str]]
"""How often active backends were seen to wait, by the kind of wait and what for."""


class Drains(NamedTuple):
    """The quickest rounds of one and of two processes, and what backends of two waited for."""

    one: Cost
    two: Cost
    waits: Waits

    @property
    def ratio(self) -> float:
        return self.two.rate / self.one.rate


async def measure(bench: Bench) -> None:
    no_ops = await in_turns(bench, JOBS, busy=False)
    tell("Drains of no-op jobs on Postgres", no_ops)
    total = no_ops.waits.total()
    figures("What active backends of two wait for", shares(no_ops.waits))
    locked = sum(count for (kind, _), count in no_ops.waits.items() if kind == "Lock")
    busy = await in_turns(bench, BUSY_JOBS, busy=True)
    tell(f"Drains of jobs that use the CPU for {BUSY_US} µs", busy)
    bench.at_least(1.4, no_ops.ratio, "two worker processes, of one's rate")
    bench.at_most(0.05, locked / total, "two worker processes, waiting for locks")
    bench.at_least(1.4, busy.ratio, f"the same, jobs that use the CPU for {BUSY_US} µs")


async def in_turns(bench: Bench, jobs: int, *, busy: bool) -> Drains:
    drains: Mapping[int, list[Cost]] = {1: [], 2: []}
    waits: Waits = Counter()
    for _ in range(ROUNDS):
        for count, each in drains.items():
            async with bench.database() as url:
                cost, seen = await drain(url, count, jobs, busy=busy)
            each.append(cost)
            if count > 1:
                waits += seen
    one, two = (min(each, key=lambda cost: cost.seconds) for each in drains.values())
    return Drains(one, two, waits)


def tell(title: str, drains: Drains) -> None:
    rows = [
        ("one worker process", drains.one, None),
        ("two worker processes", drains.two, drains.ratio),
    ]
    costs(title, rows, "of one")
    figures("What the cores allow", [bound("one", drains.one), bound("two", drains.two)])


def bound(what: str, cost: Cost) -> tuple[str, str]:
    """Jobs a second if every core were busy with nothing else, and how near the drain came."""
    cores = len(os.sched_getaffinity(0))
    rate = cores * 1_000_000 / cost.each(cost.python_us + cost.postgres_us)
    return f"{what}, on {cores} cores", f"{rate:,.0f} jobs/s, reached {cost.rate / rate:.0%}"


def shares(waits: Waits) -> Sequence[tuple[str, str]]:
    total = waits.total()
    return [
        (" ".join(filter(None, what)), f"{count / total:.1%}")
        for what, count in waits.most_common()
    ]


async def drain(url: str, processes: int, count: int, *, busy: bool) -> tuple[Cost, Waits]:
    """What all of them together cost, and what active backends were seen to wait for."""
    jobs = Jobs(url)
    async with jobs.app:
        if busy:
            await jobs.submit_busy(count)
        else:
            await jobs.submit(count)
    ready, stop = SPAWN.Barrier(processes + 1), SPAWN.Value("b", 0)
    tallies = [SPAWN.Array("d", 2) for _ in range(processes)]
    workers = [
        SPAWN.Process(target=work, args=(url, ready, stop, tally), daemon=True) for tally in tallies
    ]
    for each in workers:
        each.start()
    waits: Waits = Counter()
    connection = await asyncpg.connect(url)
    async with Meter.opened(url) as meter:
        await asyncio.to_thread(ready.wait, READY_TIMEOUT_S)
        async with meter.measuring(count) as cost:
            while sum(tally[0] for tally in tallies) < count:
                await asyncio.sleep(LOOK_S)
                waits.update((row[0], row[1]) for row in await connection.fetch(ACTIVITY))
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
