"""What runs say: how fast it is stored, how soon it is heard, and what listening costs.

Two apps on one database are two processes as far as the database knows; one app is one.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.bench import Bench
from benchmarks.latency import PAUSE_S, SAMPLES, WARM_UPS
from benchmarks.report import figures, median, percentile
from benchmarks.sdk import CONCURRENCY, IDLE_S, counted_statements, worker
from flowfabric import App, Context, Run

ALONE = 20_000
HANDLERS, EACH = 100, 500
AT_ONCE = 5_000
"""Tokens that are emitted without waiting for the store, to see what an emit costs by itself."""
TAILS, TOKENS = 1_000, 100
CALM_S = 30.0
"""After which a process looks as rarely as it ever does."""


async def measure(bench: Bench) -> None:
    async with bench.database() as url:
        await rates("Postgres", url)
        await fan_out("Postgres", url)
        within_ms = await latencies("Postgres", url, apart=False)
        across_ms = await latencies("Postgres", url, apart=True)
        bench.at_most(5, within_ms, "emit → tail p50 on Postgres, in ms")
        bench.at_most(5, across_ms, "emit → tail p50 across processes, in ms")
        bench.at_most(1, await idle(url), "queries per second of an idle process that listens")
    await rates("SQLite", f"sqlite:///{bench.file('rates')}")
    await fan_out("SQLite", f"sqlite:///{bench.file('fan_out')}")
    await latencies("SQLite", f"sqlite:///{bench.file('latency')}", apart=False)


@asynccontextmanager
async def speaking(url: str) -> AsyncIterator[App]:
    """An app with a worker, and a task that says so many tokens and how long each took, in µs."""
    app = App(url)

    @app.task(name="speak")
    async def speak(ctx: Context, tokens: int) -> float:
        started = time.perf_counter()
        for _ in range(tokens):
            await ctx.emit("token ")
        return (time.perf_counter() - started) * 1e6 / tokens

    async with app, worker(app, CONCURRENCY):
        yield app


async def rates(store: str, url: str) -> None:
    async with speaking(url) as app:
        speak = app.tasks["speak"]
        await (await app.submit(speak(100))).result()
        each_us = await (await app.submit(speak(AT_ONCE))).result()
        started = time.perf_counter()
        await (await app.submit(speak(ALONE))).result()
        alone_s = time.perf_counter() - started
        started = time.perf_counter()
        runs = await app.submit_many([speak(EACH) for _ in range(HANDLERS)])
        for run in runs:
            await run.result()
        together_s = time.perf_counter() - started
    figures(
        f"Tokens on {store}, from emit to disk",
        [
            ("an emit, as the handler sees it", f"{each_us:.1f} µs"),
            ("one handler", f"{ALONE / alone_s:,.0f} /s"),
            (f"{HANDLERS} handlers at once", f"{HANDLERS * EACH / together_s:,.0f} /s"),
        ],
    )


async def fan_out(store: str, url: str) -> None:
    """One run that says a token now and then, to a thousand who listen in one process."""
    app = App(url)
    said: list[float] = []
    heard_ms: list[float] = []
    go = asyncio.Event()

    @app.task(name="tell")
    async def tell(ctx: Context) -> None:
        await go.wait()
        for _ in range(TOKENS):
            said.append(time.perf_counter())
            await ctx.emit(str(len(said) - 1))
            await asyncio.sleep(PAUSE_S)

    async def listen(run: Run[None]) -> int:
        count = 0
        async for frame in run.stream():
            heard_ms.append((time.perf_counter() - said[int(frame.text)]) * 1_000)
            count += 1
        return count

    async with app, worker(app, CONCURRENCY):
        run = await app.submit(tell)
        listeners = [asyncio.create_task(listen(run)) for _ in range(TAILS)]
        await everybody_listens(app)
        go.set()
        counts = await asyncio.gather(*listeners)
        assert set(counts) == {TOKENS}
    figures(
        f"A token on {store} to {TAILS:,} tails of one process, until the last has it",
        [
            (f"p{round(share * 100)}", f"{percentile(heard_ms, share):.1f} ms")
            for share in (0.5, 0.99)
        ],
    )


async def everybody_listens(app: App) -> None:
    parked = 0
    while parked < TAILS:
        await asyncio.sleep(PAUSE_S)
        parked = app.engine.waiting_tails


async def latencies(store: str, url: str, *, apart: bool) -> float:
    """From the call of `emit` to the loop of the follower; the p50 in milliseconds."""
    working, listening = App(url), App(url)
    cues: asyncio.Queue[bool] = asyncio.Queue()

    @working.task(name="say")
    async def say(ctx: Context) -> None:
        while await cues.get():
            await ctx.emit(str(time.perf_counter()))

    taken_ms: list[float] = []
    async with working, listening, worker(working, CONCURRENCY):
        run = await working.submit(say)
        heard = listening.run(say, run.execution_id) if apart else run
        stream = heard.stream()
        for _ in range(WARM_UPS + SAMPLES):
            await asyncio.sleep(PAUSE_S)
            cues.put_nowait(True)
            frame = await anext(stream)
            taken_ms.append((time.perf_counter() - float(frame.text)) * 1_000)
        cues.put_nowait(False)
        await run.result()
    where = "across processes" if apart else "within a process"
    figures(
        f"Emit → tail on {store}, {where}",
        [
            (f"p{round(share * 100)}", f"{percentile(taken_ms[WARM_UPS:], share):.1f} ms")
            for share in (0.5, 0.99)
        ],
    )
    return median(taken_ms[WARM_UPS:])


async def idle(url: str) -> float:
    """Statements per second of a process with a worker, a subscription and a tail, and no work."""
    app = App(url)

    @app.task(name="wait")
    async def wait(ctx: Context) -> None:
        await ctx.wait_for_signal("never")

    async def follow(run: Run[None]) -> None:
        async for _ in run.stream():
            pass

    async def subscribe() -> None:
        async for _ in app.events(category="operator"):
            pass

    with counted_statements() as seen:
        async with app, worker(app, CONCURRENCY):
            run = await app.submit(wait)
            tasks = [asyncio.create_task(follow(run)), asyncio.create_task(subscribe())]
            await asyncio.sleep(CALM_S)
            before = seen["Postgres"]
            await asyncio.sleep(IDLE_S)
            rate = (seen["Postgres"] - before) / IDLE_S
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    figures(
        "An idle process that runs work, follows a run and subscribes",
        [("statements", f"{rate:.2f} /s")],
    )
    return rate
