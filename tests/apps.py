"""Apps and workers for tests."""

import asyncio
import gc
import itertools
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from flowfabric import App, Run, WorkerSettings
from flowfabric.core.diagnosis import Cause
from flowfabric.core.policies import Duration
from flowfabric.core.states import PublicState
from flowfabric.core.workers import LaneWeights

PATIENCE_S = 20
ASK_AGAIN_S = 0.01
"""Whoever asks without a pause takes the time that the worker needs on the same event loop."""


async def reached(run: Run[object], state: PublicState) -> None:
    """Wait until an execution is in a state, by asking."""
    async with asyncio.timeout(PATIENCE_S):
        for _ in itertools.count():
            if await run.state() is state:
                return
            await asyncio.sleep(ASK_AGAIN_S)


async def blocked(run: Run[object]) -> str:
    """Wait until changed code has blocked an execution; return what `why` says then."""
    async with asyncio.timeout(PATIENCE_S):
        for _ in itertools.count():
            found = await run.why()
            if found.cause is Cause.CODE_CHANGED:
                return found.sentence
            await asyncio.sleep(ASK_AGAIN_S)
    raise AssertionError("unreachable")


@contextmanager
def traced_memory() -> Iterator[Callable[[], int]]:
    """Yields a function that tells how many bytes Python holds beyond what it held before."""

    def held() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = held()
        yield lambda: held() - before
    finally:
        tracemalloc.stop()


@asynccontextmanager
async def working(
    app: App,
    *,
    lanes: LaneWeights | None = None,
    concurrency: int = 10,
    lease_ttl: Duration = "30s",
    drain_timeout: Duration = "5s",
    cancel_grace: Duration = "5s",
    capabilities: tuple[str, ...] = (),
    prefetch: int | None = None,
    processes: int | None = None,
    reconcile: bool = True,
    worker_instance_id: str = "w-1",
) -> AsyncIterator[asyncio.Event]:
    """A worker in the background; the event it yields stops it, as does the end."""
    stop = asyncio.Event()
    settings = WorkerSettings(
        lanes=lanes or app.lanes(),
        concurrency=concurrency,
        lease_ttl=lease_ttl,
        drain_timeout=drain_timeout,
        cancel_grace=cancel_grace,
        capabilities=capabilities,
        prefetch=prefetch,
        processes=processes,
        reconcile=reconcile,
        worker_id="w",
        worker_instance_id=worker_instance_id,
    )
    await app.open()
    worker = asyncio.create_task(app.run_worker(settings=settings, stop=stop, signals=False))
    try:
        yield stop
    finally:
        stop.set()
        await worker
