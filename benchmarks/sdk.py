"""What the worker adds: throughput, latency, what it costs when idle, and its memory."""

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import asyncpg

from benchmarks.report import figures, percentile
from flowfabric import App, WorkerSettings
from flowfabric.store.sqlite import connection as sqlite_connection
from flowfabric.store.sqlite import store as sqlite_store
from flowfabric.store.sqlite.connection import BUSY_TIMEOUT_MS, Synchronous

DRAINED = 20_000
CONCURRENCY = 200
SAMPLES = 200
SLEEPS = 10_000
WARM_UPS = 10
IDLE_S = 30.0
"""Twice as long as the rarest thing an idle worker does, which is to say that it is there."""
WARM_UP_S = 2.0


async def measure(store: str, url: str) -> None:
    """One table for one store; `url` names an empty database with the current schema."""
    rows = [(f"no-op tasks drained at concurrency {CONCURRENCY}", await drain_rate(url))]
    rows += await start_latency(url)
    rows.append(("queries of an idle worker", await idle_queries(url)))
    rows.append((f"memory at {SLEEPS:,} running sleeps", await sleeping_memory(url)))
    figures(f"The worker on {store}", rows)


@asynccontextmanager
async def worker(app: App, concurrency: int) -> AsyncIterator[None]:
    stop = asyncio.Event()
    settings = WorkerSettings(concurrency=concurrency, drain_timeout=0, cancel_grace="60s")
    running = asyncio.create_task(app.run_worker(settings=settings, stop=stop, signals=False))
    try:
        yield
    finally:
        stop.set()
        await running


async def drain_rate(url: str) -> str:
    """From the start of a worker with a full queue to the end of the last handler."""
    app, left = App(url), DRAINED
    drained = asyncio.Event()

    @app.task
    async def nothing(number: int) -> int:
        nonlocal left
        left -= 1
        if left == 0:
            drained.set()
        return number

    async with app:
        await app.submit_many([nothing(number) for number in range(DRAINED)])
        started_s = time.perf_counter()
        async with worker(app, CONCURRENCY):
            await drained.wait()
            rate = DRAINED / (time.perf_counter() - started_s)
    return f"{rate:,.0f} /s"


async def start_latency(url: str) -> list[tuple[str, str]]:
    """From the call of `submit` to the first line of the handler, one at a time."""
    submitting, working = App(url), App(url)
    started: asyncio.Queue[float] = asyncio.Queue()

    @working.task
    async def note() -> None:
        started.put_nowait(time.perf_counter())

    samples: list[float] = []
    async with submitting, working, worker(working, CONCURRENCY):
        await asyncio.sleep(WARM_UP_S)
        for _ in range(WARM_UPS + SAMPLES):
            asked_s = time.perf_counter()
            await submitting.submit(note)
            samples.append((await started.get() - asked_s) * 1_000)
            # The worker should be idle again, and not expect the next one.
            await asyncio.sleep(0.02)
    return [
        (f"submit → start, idle worker, p{round(share * 100)}", f"{value:.1f} ms")
        for share in (0.5, 0.99)
        # On the first few the statements are still to be prepared.
        for value in [percentile(samples[WARM_UPS:], share)]
    ]


async def idle_queries(url: str) -> str:
    """Statements a second on Postgres, transactions on SQLite, where none of them travels."""
    app = App(url)

    @app.task
    async def never() -> None: ...

    with counted_statements() as count:
        async with app, worker(app, CONCURRENCY):
            await asyncio.sleep(WARM_UP_S)
            before = count()
            await asyncio.sleep(IDLE_S)
            rate = (count() - before) / IDLE_S
    return f"{rate:.1f} /s"


@contextmanager
def counted_statements() -> Iterator[Callable[[], int]]:
    """Counts the statements of this process, whichever driver it uses."""
    seen: list[str] = []
    connect, fetch, execute = (
        sqlite_connection.connect,
        asyncpg.Connection.fetch,
        asyncpg.Connection.execute,
    )

    def traced(
        path: str, synchronous: Synchronous, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS
    ) -> sqlite3.Connection:
        connection = connect(path, synchronous, busy_timeout_ms=busy_timeout_ms)
        connection.set_trace_callback(noted_begin)
        return connection

    def noted_begin(statement: str) -> None:
        if statement.startswith("begin"):
            seen.append(statement)

    def noted(call: Callable[..., object]) -> Callable[..., object]:
        def noting(connection: object, query: str, *args: object, **kwargs: object) -> object:
            seen.append(query)
            return call(connection, query, *args, **kwargs)

        return noting

    setattr(sqlite_store, "connect", traced)  # noqa: B010
    setattr(asyncpg.Connection, "fetch", noted(fetch))  # noqa: B010
    setattr(asyncpg.Connection, "execute", noted(execute))  # noqa: B010
    try:
        yield lambda: len(seen)
    finally:
        setattr(sqlite_store, "connect", connect)  # noqa: B010
        setattr(asyncpg.Connection, "fetch", fetch)  # noqa: B010
        setattr(asyncpg.Connection, "execute", execute)  # noqa: B010


async def sleeping_memory(url: str) -> str:
    app, left = App(url), SLEEPS
    all_asleep = asyncio.Event()

    @app.task
    async def sleep() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            all_asleep.set()
        await asyncio.Event().wait()

    async with app:
        await app.submit_many([sleep() for _ in range(SLEEPS)])
        before = resident_bytes()
        async with worker(app, SLEEPS):
            await all_asleep.wait()
            grown = resident_bytes() - before
    return f"{grown / 1024**2:.0f} MiB, {grown / SLEEPS / 1024:.1f} KiB each"


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
