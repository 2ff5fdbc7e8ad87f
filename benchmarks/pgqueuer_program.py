"""PgQueuer doing what FlowFabric is measured at. Runs in an environment of its own.

Prints its figures as JSON. It runs as its command line would run it: on uvloop, durable tables,
continuous mode. Nothing is imported here that its environment does not have.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

import asyncpg
import uvloop
from pgqueuer import AsyncpgPoolDriver, Job, PgQueuer, Queries

from benchmarks.meter import Meter

ENQUEUE_BATCH = 1_000
WARM_UPS = 100
ENTRYPOINT = "nothing"
PAUSE_S = 0.02


async def submit_and_drain(url: str, jobs: int, batch: int) -> object:
    """Costs of enqueuing in bulk, and of a worker from its start until it has stopped."""
    left = WARM_UPS + jobs
    async with asyncpg.create_pool(url) as pool, Meter.opened(url) as meter:
        queuer = PgQueuer.from_asyncpg_pool(pool)
        queries = Queries(AsyncpgPoolDriver(pool))
        await queries.install()

        @queuer.entrypoint(ENTRYPOINT)
        async def nothing(job: Job) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                queuer.shutdown.set()

        await enqueue(queries, WARM_UPS)
        async with meter.measuring(jobs) as submitting:
            await enqueue(queries, jobs)
        async with meter.measuring(WARM_UPS + jobs) as draining:
            await queuer.run(batch_size=batch)
    return [asdict(submitting), asdict(draining)]


async def enqueue(queries: Queries, count: int) -> None:
    for start in range(0, count, ENQUEUE_BATCH):
        numbers = range(start, min(start + ENQUEUE_BATCH, count))
        payloads = [json.dumps([number]).encode() for number in numbers]
        await queries.enqueue([ENTRYPOINT] * len(numbers), payloads, [0] * len(numbers))


async def start_latencies(url: str, samples: int) -> object:
    """Milliseconds from the call of `enqueue` to the first line of the handler."""
    started: asyncio.Queue[float] = asyncio.Queue()
    taken_ms: list[float] = []
    async with asyncpg.create_pool(url) as pool:
        queuer = PgQueuer.from_asyncpg_pool(pool)
        queries = Queries(AsyncpgPoolDriver(pool))
        await queries.install()

        @queuer.entrypoint(ENTRYPOINT)
        async def note(job: Job) -> None:
            started.put_nowait(time.perf_counter())

        async with running(queuer):
            for _ in range(samples):
                # The worker should be idle again, and not expect the next one.
                await asyncio.sleep(PAUSE_S)
                asked_s = time.perf_counter()
                await queries.enqueue(ENTRYPOINT, b"")
                taken_ms.append((await started.get() - asked_s) * 1_000)
    return taken_ms


@asynccontextmanager
async def running(queuer: PgQueuer) -> AsyncIterator[None]:
    task = asyncio.create_task(queuer.run())
    try:
        yield
    finally:
        queuer.shutdown.set()
        await task


async def main(what: str, url: str, *numbers: str) -> None:
    asked = [int(number) for number in numbers]
    if what == "drain":
        print(json.dumps(await submit_and_drain(url, *asked)))
    else:
        print(json.dumps(await start_latencies(url, *asked)))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
