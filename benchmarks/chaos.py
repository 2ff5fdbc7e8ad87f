"""`make chaos`: faults under load, then an audit of what became of every job.

Two worker processes serve a steady stream of jobs on a durable Postgres while one
thing goes wrong. A scenario passes when every job has completed and no worker has
exited that was not killed; where workers are killed, some job must have been tried
again, or the fault has hit nothing. Time to recover is the longest pause between two
completions from the fault on, or how much longer than the work itself the slowest
job took, whichever is more. Name scenarios to play only those.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
from rich.live import Live
from rich.table import Table

from benchmarks.chaos_worker import WORK_S, job
from benchmarks.report import console
from flowfabric import App, migrate
from flowfabric.errors import FlowFabricError
from tests.postgres import Server, create_database, start_server

ROOT = Path(__file__).parent.parent
LOAD_S = 10.0
FAULT_AT_S = 2.0
JOBS_PER_S = 100
BATCH = 10
BURST = 2_000
WORKERS = 2
PATIENCE_S = 60.0
NEIGHBOURS_MAX = 300

ACTIVITY = """
select pg_terminate_backend(pid) from pg_stat_activity
 where datname = current_database() and pid <> pg_backend_pid()
   and application_name = 'flowfabric'"""

PAUSE = """
select greatest(coalesce(max(pause), 0), coalesce(max(taken), 0) - $2) from (
    select completed_at_ms - lag(completed_at_ms) over (order by completed_at_ms) as pause,
           completed_at_ms - created_at_ms as taken, completed_at_ms
      from flowfabric.execution where public_state = 'completed'
) as pauses where completed_at_ms > $1"""


@dataclass
class Arena:
    """One scenario's database, workers and jobs."""

    server: Server
    url: str
    app: App
    workers: list[asyncio.subprocess.Process] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    submitted: int = 0

    async def start_worker(self) -> None:
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.chaos_worker",
            self.url,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
            stderr=asyncio.subprocess.DEVNULL,
        )
        self.workers.append(worker)

    async def kill_worker(self) -> None:
        victim = next(each for each in self.workers if each.returncode is None)
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
                    await self.app.submit(job(number), idempotency_key=f"job-{number}")
            except FlowFabricError:
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(0.1)
            else:
                return

    async def completed(self) -> int:
        return int(
            str(
                await self.ask(
                    "select count(*) from flowfabric.execution where public_state = 'completed'"
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


async def nothing(arena: Arena) -> None:
    """No fault at all."""


async def restart(arena: Arena) -> None:
    assert arena.server.restart is not None
    await asyncio.to_thread(arena.server.restart, "immediate")


async def kill_backends(arena: Arena) -> None:
    await arena.ask(ACTIVITY)


async def exhaust_connections(arena: Arena) -> None:
    """Take every connection the server has, then kill the workers' own."""
    async with AsyncExitStack() as stack:
        for _ in range(NEIGHBOURS_MAX):
            try:
                neighbour = await asyncpg.connect(arena.url)
            except (OSError, asyncpg.PostgresError):
                break
            stack.push_async_callback(neighbour.close)
        killer: asyncpg.Connection = neighbour
        await killer.execute(ACTIVITY)
        await asyncio.sleep(1)


async def kill_worker(arena: Arena) -> None:
    await arena.kill_worker()


async def kill_workers_again_and_again(arena: Arena) -> None:
    for _ in range(4):
        await arena.kill_worker()
        await asyncio.sleep(1)


async def idle_in_transaction(arena: Arena) -> None:
    """A neighbour that holds a snapshot, and so everything dead, for as long as the load lasts."""
    neighbour = await asyncpg.connect(arena.url)
    try:
        async with neighbour.transaction(isolation="repeatable_read"):
            await neighbour.fetchval("select count(*) from flowfabric.execution")
            await asyncio.sleep(LOAD_S - FAULT_AT_S)
    finally:
        await neighbour.close()


async def active_readers(arena: Arena) -> None:
    async def read(until_s: float) -> None:
        reader = await asyncpg.connect(arena.url)
        try:
            while time.monotonic() < until_s:
                await reader.fetchval("select sum(length(payload)) from flowfabric.execution")
        finally:
            await reader.close()

    until_s = time.monotonic() + LOAD_S - FAULT_AT_S
    await asyncio.gather(*(read(until_s) for _ in range(4)))


async def burst(arena: Arena) -> None:
    await arena.submit(BURST)


async def sustained_load(arena: Arena) -> None:
    """Twice the stream for twice as long."""
    await steady(arena, 2 * LOAD_S)


SCENARIOS: dict[str, Fault] = {
    "clean": nothing,
    "postgres restart": restart,
    "every backend killed": kill_backends,
    "connections exhausted": exhaust_connections,
    "crash recovery": kill_worker,
    "repeated kill -9": kill_workers_again_and_again,
    "idle in transaction": idle_in_transaction,
    "sustained load": sustained_load,
    "active readers": active_readers,
    "burst": burst,
}
KILLS_WORK = ("crash recovery", "repeated kill -9")
"""Scenarios in which jobs lose the process they run in."""


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


@asynccontextmanager
async def arena(server: Server) -> AsyncIterator[Arena]:
    url = await create_database(server.url)
    await migrate(url)
    async with App(url) as app:
        ready = Arena(server, url, app)
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


async def main(names: list[str]) -> bool:
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        sys.exit(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    # Its pool tells of every try to reconnect; that it had to is the point here.
    logging.getLogger("asyncpg").setLevel(logging.CRITICAL)
    table = Table(title="Faults under load", title_justify="left")
    for column in ("scenario", "jobs", "recovered", "time to recover", "tried again", "verdict"):
        table.add_column(column, justify="left" if column in ("scenario", "verdict") else "right")
    verdicts: list[Verdict] = []
    server = start_server(durable=True)
    try:
        with Live(table, console=console):
            for name in names or list(SCENARIOS):
                verdicts.append(await play(server, name, SCENARIOS[name]))
                table.add_row(*row_of(verdicts[-1]))
    finally:
        server.stop()
    return all(verdict.passed for verdict in verdicts)


def row_of(verdict: Verdict) -> tuple[str, ...]:
    return (
        verdict.name,
        f"{verdict.submitted:,}",
        f"{verdict.completed / verdict.submitted:.1%}",
        f"{verdict.pause_ms / 1_000:.1f} s",
        f"{verdict.repeated:,}",
        "passed" if verdict.passed else f"failed, {verdict.exited} workers exited",
    )


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main(sys.argv[1:])) else 1)
