"""What a no-op job costs through the public API, with one worker process and everything on."""

import asyncio

from benchmarks.meter import Cost, Meter
from benchmarks.report import costs
from benchmarks.sdk import CONCURRENCY, worker
from flowfabric import App

JOBS = 20_000
WARM_UPS = 100


class NoOps:
    """An app with a task that does nothing but count."""

    def __init__(self, url: str) -> None:
        self.app = App(url)
        self.done = 0
        self._wanted = 0
        self._all_done = asyncio.Event()

        @self.app.task
        async def nothing(number: int) -> int:
            self.done += 1
            if self.done == self._wanted:
                self._all_done.set()
            return number

        self._nothing = nothing

    async def submit(self, count: int) -> None:
        self._wanted += count
        await self.app.submit_many([self._nothing(number) for number in range(count)])

    async def drain(self) -> None:
        """With a worker that starts now; returns when it has stopped."""
        async with worker(self.app, CONCURRENCY):
            await self._all_done.wait()


async def measure(url: str) -> None:
    """One table; `url` names an empty database with the current schema."""
    submitting, draining = await submit_and_drain(url)
    costs(
        "A no-op job on Postgres",
        [("submit in bulk", submitting), ("claim, run, complete", draining)],
    )


async def submit_and_drain(url: str, jobs: int = JOBS) -> tuple[Cost, Cost]:
    """The costs of submitting in bulk, and of a worker from its start until it has stopped."""
    noops = NoOps(url)
    async with Meter.opened(url) as meter, noops.app:
        await noops.submit(WARM_UPS)
        async with meter.measuring(jobs) as submitting:
            await noops.submit(jobs)
        async with meter.measuring(WARM_UPS + jobs) as draining:
            await noops.drain()
    return submitting, draining
