"""One job at a time on an idle worker: submit → start, parent → child, signal → next line.

Each beside the floor, which claims and completes one job alone.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from benchmarks.baseline import HOP, SIGNAL, Figure
from benchmarks.bench import Bench
from benchmarks.floor import PostgresFloor, one_at_a_time_ms
from benchmarks.flows import LANE, WORKER, member, new_flow
from benchmarks.meter import Cost, Meter
from benchmarks.report import compared, figures, median, percentile
from benchmarks.sdk import CONCURRENCY, worker
from flowfabric import App, Context, connect
from flowfabric.core.flow_joins import Dependency, Join
from flowfabric.reconcilers import Supervisor

SAMPLES = 150
WARM_UPS = 10
"""On the first few, statements are still to be prepared."""
TURNS = 10
"""In which we and the floor take the samples, so that both meet the machine in the same moods."""
PEER_TURNS = 3
"""In which PgQueuer and we do; it starts anew in each."""
PAUSE_S = 0.02
"""After which a worker is idle again and does not expect the next one."""

Once = Callable[[], Awaitable[float]]
"""One sample, in milliseconds."""


async def measure(bench: Bench) -> None:
    await on_postgres(bench)
    await on_sqlite(bench)


async def on_postgres(bench: Bench) -> None:
    taken_ms: dict[str, list[float]] = {}
    now: dict[str, Figure] = {}
    for what, prepared in (("hop", hops), ("signal", signals)):
        async with (
            bench.database() as url,
            PostgresFloor.opened(url) as floor,
            Meter.opened(url) as meter,
            prepared(url) as once,
        ):
            await sampled(once, WARM_UPS)
            total, taken_ms[what], floor_ms = Cost(0), [], []
            for _ in range(TURNS):
                floor_ms += await one_at_a_time_ms(floor, SAMPLES // TURNS)
                async with meter.measuring(SAMPLES // TURNS) as cost:
                    taken_ms[what] += await sampled(once, SAMPLES // TURNS)
                total += cost
        floors = median(taken_ms[what]) / median(floor_ms)
        now[what] = Figure(total.each(total.python_us), total.each(total.postgres_us), floors)
    compared(
        "Latency on Postgres, p50, by the floor's time for a job alone",
        [
            ("hop from parent to child", f"{median(taken_ms['hop']):.1f} ms", now["hop"], HOP),
            ("signal to handler", f"{median(taken_ms['signal']):.1f} ms", now["signal"], SIGNAL),
        ],
    )
    bench.at_most(0.7, now["hop"].floors / HOP.floors, "flow hop p50, of the baseline's")
    bench.at_most(0.7, now["signal"].floors / SIGNAL.floors, "signal p50, of the baseline's")
    await started_on_postgres(bench)


async def started_on_postgres(bench: Bench) -> None:
    """Ours and PgQueuer's in turns, each on an idle worker that has the machine for itself."""
    ours_ms: list[float] = []
    theirs_ms: list[float] = []
    for _ in range(PEER_TURNS):
        async with bench.database() as url, starts(url) as once:
            await sampled(once, WARM_UPS)
            ours_ms += await sampled(once, SAMPLES // PEER_TURNS)
        if bench.peer is not None:
            async with bench.database(migrated=False) as url:
                found = await bench.peer.start_latencies(url, WARM_UPS + SAMPLES // PEER_TURNS)
            theirs_ms += found[WARM_UPS:]
    rows = _rows("submit → start", ours_ms)
    if theirs_ms:
        rows += _rows("PgQueuer, enqueue → start", theirs_ms)
        ratio = median(ours_ms) / median(theirs_ms)
        bench.at_most(1, ratio, "submit → start p50, of PgQueuer's")
    figures("An idle worker on Postgres", rows)


async def on_sqlite(bench: Bench) -> None:
    rows: list[tuple[str, str]] = []
    for what, prepared in (
        ("submit → start", starts),
        ("hop from parent to child", hops),
        ("signal to handler", signals),
    ):
        path = bench.file(prepared.__name__)
        async with prepared(f"sqlite:///{path}") as once:
            await sampled(once, WARM_UPS)
            rows += _rows(what, await sampled(once, SAMPLES))
    figures("An idle worker on SQLite", rows)


def _rows(what: str, taken_ms: list[float]) -> list[tuple[str, str]]:
    return [
        (f"{what}, p{round(share * 100)}", f"{percentile(taken_ms, share):.1f} ms")
        for share in (0.5, 0.99)
    ]


async def sampled(once: Once, count: int) -> list[float]:
    taken_ms: list[float] = []
    for _ in range(count):
        await asyncio.sleep(PAUSE_S)
        taken_ms.append(await once())
    return taken_ms


# What is sampled. All end with another process than they begin with, as far as the database knows.


@asynccontextmanager
async def starts(url: str) -> AsyncIterator[Once]:
    """From the call of `submit` to the first line of the handler."""
    submitting, working = App(url), App(url)
    started: asyncio.Queue[float] = asyncio.Queue()

    @working.task
    async def note() -> None:
        started.put_nowait(time.perf_counter())

    async def once() -> float:
        asked_s = time.perf_counter()
        await submitting.submit(note)
        return (await started.get() - asked_s) * 1_000

    async with submitting, working, worker(working, CONCURRENCY):
        yield once


@asynccontextmanager
async def hops(url: str) -> AsyncIterator[Once]:
    """From the report of a parent's end to the claim of its child."""
    async with await connect(url) as engine, Supervisor(engine):
        flow_id = await new_flow(engine)
        chain = [engine.new_member_id(flow_id) for _ in range(WARM_UPS + SAMPLES + 1)]
        joins = [
            Join(
                downstream_execution_id=child,
                dependencies=[Dependency(upstream_execution_id=parent)],
            )
            for parent, child in itertools.pairwise(chain)
        ]
        await engine.add_dependencies(flow_id, joins, members=[member(each) for each in chain])
        claimed = await engine.claim(LANE, **WORKER, max_wait_ms=10_000)

        async def once() -> float:
            nonlocal claimed
            assert claimed is not None, "the child never became ready"
            started = time.perf_counter()
            await engine.complete(claimed.handle)
            claimed = await engine.claim(LANE, **WORKER, max_wait_ms=10_000)
            return (time.perf_counter() - started) * 1_000

        yield once


@asynccontextmanager
async def signals(url: str) -> AsyncIterator[Once]:
    """From the call of `send`, as in a web process, to the line of the handler after its wait."""
    sending, working = App(url), App(url)
    went_on: asyncio.Queue[float] = asyncio.Queue()

    @working.task
    async def gate(ctx: Context) -> object:
        signal = await ctx.wait_for_signal("go")
        went_on.put_nowait(time.perf_counter())
        return signal.payload

    async with sending, working, worker(working, CONCURRENCY):
        runs = iter(await working.submit_many([gate() for _ in range(WARM_UPS + SAMPLES)]))
        await _all_wait(working, WARM_UPS + SAMPLES)

        async def once() -> float:
            asked_s = time.perf_counter()
            await sending.signals.send(next(runs).execution_id, "go", {"by": "ada"})
            return (await went_on.get() - asked_s) * 1_000

        yield once


async def _all_wait(app: App, count: int) -> None:
    waiting = 0
    while waiting < count:
        await asyncio.sleep(0.05)
        waiting = len((await app.signals.pending(limit=1_000)).entries)
