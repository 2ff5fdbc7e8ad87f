"""Where a scenario is played: a database, workers, and a steady stream of jobs."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg

from benchmarks.chaos.holds import HELD, read
from benchmarks.chaos.pooler import Pooler
from benchmarks.chaos.timings import COLUMNS, Timing
from benchmarks.chaos.worker import fenced_job, job
from flowfabric import App, migrate
from flowfabric.errors import FlowFabricError
from tests.postgres import Server, create_database
from tests.silence import Network

ROOT = Path(__file__).parent.parent.parent
LOAD_S = 10.0
FAULT_AT_S = 2.0
JOBS_PER_S = 100
BATCH = 10
FENCED_EVERY = 10
"""Every so many jobs write through a fence, each on a connection of its own."""
WORKERS = 2
PATIENCE_S = 60.0
HELD_LOOK_S = 0.02


@dataclass
class Ways:
    """How each of the workers, in turn, and the submitter reach the server."""

    workers: tuple[str, ...]
    submitter: str
    network: Network | None = None
    pooler: Pooler | None = None


Route = Callable[[str], AbstractAsyncContextManager[Ways]]


@asynccontextmanager
async def directly(url: str) -> AsyncIterator[Ways]:
    yield Ways((url,), url)


@dataclass
class Arena:
    """One scenario's database, workers and jobs."""

    server: Server
    url: str
    app: App
    ways: Ways
    holds: Path
    workers: list[asyncio.subprocess.Process] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    submitted: int = 0
    acknowledged: set[str] = field(default_factory=set)
    """Keys of jobs whose submission was answered."""
    refusals: int = 0
    fences: bool = True

    async def start_worker(self) -> None:
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.chaos.worker",
            self.ways.workers[len(self.workers) % len(self.ways.workers)],
            str(self.holds),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
            stderr=asyncio.subprocess.DEVNULL,
        )
        self.workers.append(worker)

    async def kill_worker(self) -> None:
        victim = next(each for each in self.workers if each.returncode is None)
        await self.until_holding(victim)
        self.killed.add(victim.pid)
        victim.kill()
        await victim.wait()
        await self.start_worker()

    async def submit(self, count: int) -> None:
        """Submit, again if need be: an idempotency key per batch keeps it from doubling."""
        first = self.submitted
        self.submitted += count
        for start in range(first, first + count, BATCH):
            await self._submit_batch(range(start, min(start + BATCH, first + count)))

    async def _submit_batch(self, numbers: range) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                for number in numbers:
                    kind = fenced_job if self.fences and not number % FENCED_EVERY else job
                    await self.app.submit(kind(number), idempotency_key=f"job-{number}")
                    self.acknowledged.add(f"job-{number}")
            except FlowFabricError:
                self.refusals += 1
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(0.1)
            else:
                return

    async def completed(self) -> int:
        return int(
            str(
                await self.ask(
                    "select count(*) from flowfabric.execution_now where public_state = 'completed'"
                )
            )
        )

    async def reach(self, count: int) -> None:
        """Wait until so many jobs have completed, but not for ever."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            if await self.completed() >= count:
                return
            await asyncio.sleep(0.1)

    async def timings(self) -> list[Timing]:
        connection = await asyncpg.connect(self.url)
        try:
            rows = await connection.fetch(
                f"select {COLUMNS} from flowfabric.execution_now where public_state = 'completed'"
            )
        finally:
            await connection.close()
        return [Timing(*row) for row in rows]

    async def until_holding(self, worker: asyncio.subprocess.Process) -> None:
        """Wait until this worker has a job under way: what happens to it then hits work."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            held = read(self.holds, HELD)
            if any(each.process == str(worker.pid) and each.ended_s is None for each in held):
                return
            await asyncio.sleep(HELD_LOOK_S)

    async def ask(self, query: str, *args: object) -> object:
        while True:
            try:
                connection = await asyncpg.connect(self.url)
            except (OSError, asyncpg.PostgresError):
                await asyncio.sleep(0.1)
                continue
            try:
                found: object = await connection.fetchval(query, *args)
                return found
            finally:
                await connection.close()


Fault = Callable[[Arena], Awaitable[None]]


@asynccontextmanager
async def arena(server: Server, route: Route = directly) -> AsyncIterator[Arena]:
    url = await create_database(server.url)
    await migrate(url)
    with tempfile.TemporaryDirectory() as folder:
        holds = Path(folder) / "holds"
        async with (
            route(url) as ways,
            App(ways.submitter) as app,
            working(Arena(server, url, app, ways, holds)) as ready,
        ):
            yield ready


@asynccontextmanager
async def working(ready: Arena) -> AsyncIterator[Arena]:
    for _ in range(WORKERS):
        await ready.start_worker()
    try:
        yield ready
    finally:
        for worker in ready.workers:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()


async def steady(within: Arena, seconds: float) -> None:
    """A stream of jobs, a few at a time."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        started_s = time.monotonic()
        await within.submit(BATCH)
        await asyncio.sleep(max(0.0, BATCH / JOBS_PER_S - (time.monotonic() - started_s)))


async def under_load(within: Arena) -> "asyncio.Task[None]":
    """A stream that goes on for as long as a scenario lasts, once every worker has had a job.

    Workers take their time to start on a busy machine; a fault before that would hit nothing.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while len({each.process for each in read(within.holds, HELD)}) < WORKERS:
        assert time.monotonic() < deadline_s, "not every worker has started"
        await within.submit(BATCH)
        await within.reach(within.submitted)
    load = asyncio.create_task(steady(within, LOAD_S))
    await asyncio.sleep(FAULT_AT_S)
    return load
