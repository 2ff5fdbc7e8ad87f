"""What limits cost that do not bind: none, one for all, and one for each of many keys."""

import asyncio

from benchmarks.bench import Bench
from benchmarks.meter import Cost, Meter
from benchmarks.report import costs
from benchmarks.sdk import worker
from flowfabric import App, Limit

JOBS = 20_000
KEYS = 10_000
IN_HAND = 1_000
TURNS = 2
LIMITS = {
    "no limit": None,
    "one limit for all": Limit("all", rate="1000000/s", concurrency=1_000_000),
    f"a cap for each of {KEYS:,} keys": Limit("key", concurrency=100, key="{key}"),
}


async def measure(bench: Bench) -> None:
    """They take turns: whatever else the machine does hits all of them."""
    submitted = dict.fromkeys(LIMITS, Cost(0))
    drained = dict.fromkeys(LIMITS, Cost(0))
    for _ in range(TURNS):
        for what, limit in LIMITS.items():
            async with bench.database() as url:
                submitting, draining = await submit_and_drain(url, limit)
            submitted[what] += submitting
            drained[what] += draining
    free, shared, keyed = LIMITS
    times = {what: _cpu_us(cost) / _cpu_us(drained[free]) for what, cost in drained.items()}
    costs(
        f"Claim, run and complete no-ops under limits, {IN_HAND:,} in hand",
        [(what, cost, times[what]) for what, cost in drained.items()],
        "CPU, times unlimited",
    )
    costs(
        "Submit them in bulk",
        [(what, cost, None) for what, cost in submitted.items()],
        "CPU, times unlimited",
    )
    bench.at_most(1.3, times[shared], "drain under one limit, times the CPU of unlimited")
    bench.at_most(2, times[keyed], f"drain under {KEYS:,} keys, times the CPU of unlimited")


def _cpu_us(cost: Cost) -> float:
    return cost.python_us + cost.postgres_us


async def submit_and_drain(url: str, limit: Limit | None) -> tuple[Cost, Cost]:
    app, done, all_done = App(url), 0, asyncio.Event()

    @app.task(limits=[] if limit is None else [limit])
    async def nothing(key: str) -> None:
        nonlocal done
        done += 1
        if done == JOBS:
            all_done.set()

    async with Meter.opened(url) as meter, app:
        async with meter.measuring(JOBS) as submitting:
            await app.submit_many([nothing(f"key-{n % KEYS}") for n in range(JOBS)])
        async with meter.measuring(JOBS) as draining, worker(app, IN_HAND):
            await all_done.wait()
    return submitting, draining
