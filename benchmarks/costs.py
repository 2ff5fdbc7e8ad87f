"""What a job costs through the public API, with one worker process and everything on.

Beside PgQueuer, which keeps no results and has no leases. Both take turns with so many jobs in
hand, and of both the quickest round counts.
"""

import asyncio
import time
from collections.abc import Mapping

from benchmarks.baseline import WORKFLOW, Figure
from benchmarks.bench import Bench
from benchmarks.floor import PostgresFloor
from benchmarks.meter import Cost, Meter
from benchmarks.report import compared, costs, figures
from benchmarks.sdk import CONCURRENCY, worker
from flowfabric import App, Context, Run

JOBS = 50_000
"""So many that the start of a worker hardly counts."""
WARM_UPS = 100
BUSY_US = 200
"""CPU that the handler of a busy job uses."""
IN_HAND = (300, 1_000, 2_000)
"""Jobs a worker has in hand: our concurrency, PgQueuer's batch size."""
WORKFLOWS = 4_000
TURNS = 4
FLOOR_BATCH = 100

Round = tuple[Cost, Cost]
"""Of submitting in bulk, and of a worker from its start until it has stopped."""


class Jobs:
    """An app with tasks that do nothing, nothing in three steps, and nothing but use the CPU."""

    def __init__(self, url: str) -> None:
        self.app = App(url)
        self.done = 0
        self._wanted = 0
        self._all_done = asyncio.Event()

        @self.app.task
        async def nothing(number: int) -> int:
            self._count()
            return number

        @self.app.task
        async def three_steps(ctx: Context, number: int) -> int:
            for step in ("first", "second", "third"):
                number = await ctx.step(step, lambda before=number: before + 1)
            self._count()
            return number

        @self.app.task
        async def busy(number: int) -> int:
            until_ns = time.thread_time_ns() + BUSY_US * 1_000
            while time.thread_time_ns() < until_ns:
                pass
            self._count()
            return number

        self.nothing, self.three_steps, self.busy = nothing, three_steps, busy

    def _count(self) -> None:
        self.done += 1
        if self.done == self._wanted:
            self._all_done.set()

    async def submit(self, count: int, *, steps: bool = False) -> list[Run[int]]:
        self._wanted += count
        task = self.three_steps if steps else self.nothing
        return await self.app.submit_many([task(number) for number in range(count)])

    async def submit_busy(self, count: int) -> None:
        self._wanted += count
        await self.app.submit_many([self.busy(number) for number in range(count)])

    async def drain(self, concurrency: int = CONCURRENCY) -> None:
        """With a worker that starts now; returns when it has stopped."""
        async with worker(self.app, concurrency):
            await self._all_done.wait()


async def measure(bench: Bench) -> None:
    await no_ops(bench)
    await no_ops_on_sqlite(bench)
    await workflows(bench)


async def no_ops(bench: Bench) -> None:
    ours: dict[int, Round] = {}
    theirs: dict[int, Round] = {}
    for in_hand in IN_HAND:
        async with bench.database() as url:
            ours[in_hand] = await submit_and_drain(url, JOBS, in_hand)
        if bench.peer is not None:
            async with bench.database(migrated=False) as url:
                theirs[in_hand] = await bench.peer.submit_and_drain(url, JOBS, in_hand)
    submitting, draining, best = quickest(ours)
    rates: tuple[float, float] | tuple[None, None] = (None, None)
    rows: list[tuple[str, Cost, float | None]] = []
    if theirs:
        enqueuing, dequeuing, their_best = quickest(theirs)
        rates = submitting.rate / enqueuing.rate, draining.rate / dequeuing.rate
        bench.at_least(1.5, rates[1], "no-op drain, of PgQueuer's rate")
        bench.at_least(1, rates[0], "bulk submit, of PgQueuer's rate")
        rows = [
            ("PgQueuer: enqueue", enqueuing, None),
            (f"PgQueuer: dequeue, run, log; {their_best:,} in hand", dequeuing, None),
        ]
    rows = [
        ("submit in bulk", submitting, rates[0]),
        (f"claim, run, complete; {best:,} in hand", draining, rates[1]),
        *rows,
    ]
    costs("A no-op job on Postgres", rows, "of PgQueuer's")
    bench.at_most(45, draining.each(draining.python_us), "no-op drain, Python µs")
    bench.at_most(35, draining.each(draining.postgres_us), "no-op drain, Postgres µs")
    wal_bytes = submitting.each(submitting.wal_bytes) + draining.each(draining.wal_bytes)
    bench.at_most(1_600, wal_bytes, "no-op job from submission to end, WAL bytes")
    bench.at_most(20, submitting.each(submitting.python_us), "bulk submit, Python µs")


def quickest(rounds: Mapping[int, Round]) -> tuple[Cost, Cost, int]:
    """Of submitting and of draining, and with how many in hand the latter was."""
    best = min(rounds, key=lambda in_hand: rounds[in_hand][1].seconds)
    submitting = min((each for each, _ in rounds.values()), key=lambda cost: cost.seconds)
    return submitting, rounds[best][1], best


async def no_ops_on_sqlite(bench: Bench) -> None:
    submitting, draining = await submit_and_drain(f"sqlite:///{bench.file('jobs')}", JOBS)
    figures(
        "A no-op job on SQLite",
        [
            (what, f"{cost.each(cost.python_us):.1f} µs, {cost.rate:,.0f} /s")
            for what, cost in (("submit in bulk", submitting), ("claim, run, complete", draining))
        ],
    )


async def submit_and_drain(
    url: str, jobs: int, concurrency: int = CONCURRENCY, *, steps: bool = False
) -> Round:
    work = Jobs(url)
    async with Meter.opened(url) as meter, work.app:
        await work.submit(WARM_UPS, steps=steps)
        async with meter.measuring(jobs) as submitting:
            await work.submit(jobs, steps=steps)
        async with meter.measuring(WARM_UPS + jobs) as draining:
            await work.drain(concurrency)
    return submitting, draining


async def workflows(bench: Bench) -> None:
    """Tasks of three steps, each of which is stored. They take turns with the floor."""
    total, floor_s = Cost(0), 0.0
    async with bench.database() as url, PostgresFloor.opened(url) as floor:
        for _ in range(TURNS):
            await floor.create(JOBS // TURNS, FLOOR_BATCH)
            floor_s += await floor.claim_and_complete(JOBS // TURNS, FLOOR_BATCH)
            _, draining = await submit_and_drain(url, WORKFLOWS // TURNS, steps=True)
            total += draining
    now = Figure(
        python_us=total.each(total.python_us),
        postgres_us=total.each(total.postgres_us),
        floors=total.rate / (JOBS / floor_s),
    )
    compared(
        f"Tasks of three steps on Postgres, by the floor's rate in batches of {FLOOR_BATCH}",
        [("drain", f"{total.rate:,.0f} /s", now, WORKFLOW)],
    )
    bench.at_least(
        1.5, now.floors / WORKFLOW.floors, "three-step workflows, of the baseline's rate"
    )
