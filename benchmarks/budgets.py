"""One hot budget: reports per second, one at a time, many at once, and by handlers that reserve."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from benchmarks.bench import Bench
from benchmarks.report import figures
from benchmarks.sdk import CONCURRENCY, worker
from flowfabric import App, Context

ALONE = 500
TOGETHER = 20_000
AT_ONCE = 500
RESERVED = 2_000
APPS = 4


async def measure(bench: Bench) -> None:
    async with bench.database() as url:
        per_s = await reports("Postgres", url)
        bench.at_least(3_000, per_s, "usage reports per second on one hot budget, on Postgres")
        await reservations("Postgres", url)
    await reports("SQLite", f"sqlite:///{bench.file('reports')}")
    await reservations("SQLite", f"sqlite:///{bench.file('reservations')}")


async def reports(store: str, url: str) -> float:
    """Reports of distinct keys to one budget, all of them counted."""
    async with App(url) as app:
        await app.budgets.create("hot", hard={"tokens": 10**9})
        started = time.perf_counter()
        for number in range(ALONE):
            await app.budgets.report("hot", {"tokens": 1}, key=f"alone-{number}")
        alone_s = time.perf_counter() - started
        together_s = await _together(app, "one", TOGETHER)
        plain_s = await _together(app, None, TOGETHER)
        others = [App(url) for _ in range(APPS)]
        try:
            started = time.perf_counter()
            await asyncio.gather(
                *(_together(other, f"app-{n}", TOGETHER // APPS) for n, other in enumerate(others))
            )
            apart_s = time.perf_counter() - started
        finally:
            for other in others:
                await other.close()
        status = await app.budgets.status("hot")
        assert status.usage["tokens"] == ALONE + 3 * TOGETHER
    figures(
        f"Usage reports to one hot budget on {store}",
        [
            ("one at a time", f"{ALONE / alone_s:,.0f} /s"),
            (f"{AT_ONCE} at once, in one process", f"{TOGETHER / together_s:,.0f} /s"),
            ("the same without keys", f"{TOGETHER / plain_s:,.0f} /s"),
            (f"{AT_ONCE} at once in each of {APPS} apps", f"{TOGETHER / apart_s:,.0f} /s"),
        ],
    )
    return TOGETHER / together_s


async def _together(app: App, prefix: str | None, count: int) -> float:
    numbers = iter(range(count))

    async def report() -> None:
        for number in numbers:
            key = None if prefix is None else f"{prefix}-{number}"
            await app.budgets.report("hot", {"tokens": 1}, key=key)

    return await _timed(lambda: asyncio.gather(*(report() for _ in range(AT_ONCE))))


async def reservations(store: str, url: str) -> None:
    """Runs that reserve, settle and end, beside the same runs without a budget."""
    app = App(url)

    @app.task(name="plain")
    async def plain(ctx: Context) -> None:
        return

    @app.task(name="reserving")
    async def reserving(ctx: Context) -> None:
        async with ctx.reserve("hot", tokens=10) as call:
            call.settle(tokens=7)

    async def run(name: str) -> None:
        task = app.tasks[name]
        for each in await app.submit_many([task() for _ in range(RESERVED)]):
            await each.result()

    async with app, worker(app, CONCURRENCY):
        plain_s = await _timed(lambda: run("plain"))
        reserving_s = await _timed(lambda: run("reserving"))
    figures(
        f"Runs that reserve of one hot budget, on {store}",
        [
            ("without a budget", f"{RESERVED / plain_s:,.0f} /s"),
            ("reserve, settle and end", f"{RESERVED / reserving_s:,.0f} /s"),
        ],
    )


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started
