"""Two worker processes on one Postgres: what they drain, beside one, and what they wait for.

Workers and server share the cores of one machine, so that two processes cannot drain more than its
CPU allows. Two ceilings are printed beside: what the cores that one worker and its server leave
idle allow, and what a second process adds to a drain of the floor, in bare SQL. Jobs that use the
CPU themselves show what a second process adds where the server is not what the cores are spent on.
"""

import asyncio
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from multiprocessing.synchronize import Barrier
from typing import NamedTuple, TypeAlias

import asyncpg

from benchmarks.bench import Bench
from benchmarks.costs import BUSY_US, FLOOR_BATCH, JOBS, Jobs
from benchmarks.floor import PostgresFloor
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

    @property
    def ceiling(self) -> float:
        """The ratio if two used every core, and as much CPU for a job as one does."""
        return possible_rate(self.one) / self.one.rate


Work: TypeAlias = Callable[[str, Barrier, "Synchronized[int]", Tally], None]
"""What one process does at a URL: wait until all are ready, drain until told to stop."""


async def measure(bench: Bench) -> None:
    floor = await of_floor(bench)
    no_ops = await of_workers(bench, JOBS, busy=False)
    tell("Drains of no-op jobs on Postgres", no_ops)
    costs(
        f"Drains of the floor, in batches of {FLOOR_BATCH}",
        [("one process", floor.one, None), ("two processes", floor.two, floor.ratio)],
        "of one",
    )
    figures(
        "What a second process can add",
        [
            ("to no-op jobs: measured, of one's rate", f"{no_ops.ratio:.2f}"),
            ("at most, on the cores that one leaves idle", f"{no_ops.ceiling:.2f}"),
            ("to the floor: measured, of one's rate", f"{floor.ratio:.2f}"),
        ],
    )
    total = no_ops.waits.total()
    figures("What active backends of two wait for", shares(no_ops.waits))
    locked = sum(count for (kind, _), count in no_ops.waits.items() if kind == "Lock")
    busy = await of_workers(bench, BUSY_JOBS, busy=True)
    tell(f"Drains of jobs that use the CPU for {BUSY_US} µs", busy)
    bench.at_least(1.4, no_ops.ratio, "two worker processes, of one's rate")
    bench.at_most(0.05, locked / total, "two worker processes, waiting for locks")
    bench.at_least(1.4, busy.ratio, f"the same, jobs that use the CPU for {BUSY_US} µs")


async def of_floor(bench: Bench) -> Drains:
    async def one_drain(processes: int) -> tuple[Cost, Waits]:
        async with bench.database(migrated=False) as url, PostgresFloor.opened(url) as floor:
            await floor.create(JOBS, FLOOR_BATCH)
            return await drain(url, processes, JOBS, drain_floor)

    return await in_turns(one_drain)


async def of_workers(bench: Bench, jobs: int, *, busy: bool) -> Drains:
    async def one_drain(processes: int) -> tuple[Cost, Waits]:
        async with bench.database() as url:
            await submit(url, jobs, busy=busy)
            return await drain(url, processes, jobs, work)

    return await in_turns(one_drain)


async def in_turns(one_drain: Callable[[int], Awaitable[tuple[Cost, Waits]]]) -> Drains:
    drains: Mapping[int, list[Cost]] = {1: [], 2: []}
    waits: Waits = Counter()
    for _ in range(ROUNDS):
        for count, each in drains.items():
            cost, seen = await one_drain(count)
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
    """The possible rate, and how near the drain came."""
    rate, cores = possible_rate(cost), len(os.sched_getaffinity(0))
    return f"{what}, on {cores} cores", f"{rate:,.0f} jobs/s, reached {cost.rate / rate:.0%}"


def possible_rate(cost: Cost) -> float:
    """Jobs a second if every core were busy with nothing else."""
    cores = len(os.sched_getaffinity(0))
    return cores * 1_000_000 / cost.each(cost.python_us + cost.postgres_us)


def shares(waits: Waits) -> Sequence[tuple[str, str]]:
    total = waits.total()
    return [
        (" ".join(filter(None, what)), f"{count / total:.1%}")
        for what, count in waits.most_common()
    ]


async def submit(url: str, count: int, *, busy: bool) -> None:
    jobs = Jobs(url)
    async with jobs.app:
        if busy:
            await jobs.submit_busy(count)
        else:
            await jobs.submit(count)


async def drain(url: str, processes: int, count: int, work: Work) -> tuple[Cost, Waits]:
    """What all of them together cost, and what active backends were seen to wait for."""
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


def drain_floor(url: str, ready: Barrier, stop: "Synchronized[int]", tally: Tally) -> None:
    """One process without a worker: nothing but two statements for each batch."""
    exempt_imports_from_collection()
    asyncio.run(_drain_floor(url, ready, stop, tally))


async def _drain_floor(url: str, ready: Barrier, stop: "Synchronized[int]", tally: Tally) -> None:
    async with PostgresFloor.joined(url) as floor:
        await asyncio.to_thread(ready.wait, READY_TIMEOUT_S)
        began_us, done = time.process_time_ns() / 1_000, 0
        while not stop.value:
            taken = await floor.turn(FLOOR_BATCH)
            done += taken
            tally[:] = [done, time.process_time_ns() / 1_000 - began_us]
            if not taken:
                await asyncio.sleep(LOOK_S)
