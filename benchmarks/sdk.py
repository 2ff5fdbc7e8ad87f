"""The worker itself: what it costs when idle, and its memory."""

import asyncio
import os
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import ParamSpec

import asyncpg

from benchmarks.bench import Bench
from benchmarks.report import figures
from flowfabric import App, WorkerSettings
from flowfabric.store.sqlite import connection as sqlite_connection
from flowfabric.store.sqlite import store as sqlite_store

P = ParamSpec("P")

CONCURRENCY = 200
SLEEPS = 10_000
IDLE_S = 30.0
"""Twice as long as the rarest thing an idle worker does, which is to say that it is there."""
WARM_UP_S = 2.0


async def measure(bench: Bench) -> None:
    async with bench.database() as url:
        urls = {"Postgres": url, "SQLite": f"sqlite:///{bench.file('worker')}"}
        idle = await idle_queries(urls)
        for store, each in urls.items():
            figures(
                f"The worker on {store}",
                [
                    ("queries of an idle worker", f"{idle[store]:.1f} /s"),
                    (f"memory at {SLEEPS:,} running sleeps", await sleeping_memory(each)),
                ],
            )


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


async def idle_queries(urls: Mapping[str, str]) -> dict[str, float]:
    """Statements a second on Postgres, transactions on SQLite, where none of them travels.

    By store, of workers that idle at the same time.
    """
    async with AsyncExitStack() as stack:
        seen = stack.enter_context(counted_statements())
        for url in urls.values():
            app = App(url)

            @app.task
            async def never() -> None: ...

            await stack.enter_async_context(app)
            await stack.enter_async_context(worker(app, CONCURRENCY))
        await asyncio.sleep(WARM_UP_S)
        before = seen.copy()
        await asyncio.sleep(IDLE_S)
        return {store: (seen[store] - before[store]) / IDLE_S for store in urls}


@contextmanager
def counted_statements() -> Iterator[Counter[str]]:
    """Counts the statements of this process, by store."""
    seen: Counter[str] = Counter()
    connect, fetch, execute = (
        sqlite_connection.connect,
        asyncpg.Connection.fetch,
        asyncpg.Connection.execute,
    )

    def noted_begin(statement: str) -> None:
        if statement.startswith("begin"):
            seen["SQLite"] += 1

    def traced(call: Callable[P, sqlite3.Connection]) -> Callable[P, sqlite3.Connection]:
        def tracing(*args: P.args, **kwargs: P.kwargs) -> sqlite3.Connection:
            connection = call(*args, **kwargs)
            connection.set_trace_callback(noted_begin)
            return connection

        return tracing

    def noted(call: Callable[..., object]) -> Callable[..., object]:
        def noting(connection: object, query: str, *args: object, **kwargs: object) -> object:
            seen["Postgres"] += 1
            return call(connection, query, *args, **kwargs)

        return noting

    setattr(sqlite_store, "connect", traced(connect))  # noqa: B010
    setattr(asyncpg.Connection, "fetch", noted(fetch))  # noqa: B010
    setattr(asyncpg.Connection, "execute", noted(execute))  # noqa: B010
    try:
        yield seen
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


def resident_bytes(process: str = "self") -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
