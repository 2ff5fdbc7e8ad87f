"""Running what is ready, here and now, for tests: no background, no heartbeat, no waiting."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from flowfabric.core.limits import LEASE_TTL_MS_MAX
from flowfabric.engine.engine import Engine
from flowfabric.errors import OperationTimeout
from flowfabric.submission import Submissions
from flowfabric.task import Task
from flowfabric.worker.attempt import Attempt, Middleware, Stop
from flowfabric.worker.functions import Functions
from flowfabric.worker.held import HeldLease
from flowfabric.worker.reports import Reports
from flowfabric.worker.resources import Resources
from flowfabric.worker.services import Shared
from flowfabric.worker.watching import watch_tasks

BATCH: Final = 100
THREADS: Final = 8
PROCESSES: Final = 1
PATIENCE_S: Final = 30.0
GRACE_S: Final = 1.0
"""How long a handler that is told to stop may take."""


Running = Mapping["asyncio.Task[None]", Attempt]


def _stay(at_ms: int) -> None:
    """For a clock that goes by itself."""


class InlineWorker:
    """Claims and runs on demand. Every sleep of a handler releases it, however short."""

    def __init__(
        self,
        engine: Engine,
        tasks: Mapping[str, Task[..., object]],
        submissions: Submissions,
        resources: Resources,
        middleware: Sequence[Middleware],
        namespace: str,
        pause: Callable[[float], Awaitable[None]],
        move_to: Callable[[int], None] = _stay,
    ) -> None:
        """`move_to` moves the clock forward to a time."""
        self._engine = engine
        self._namespace = namespace
        self._tasks = tasks
        self._middleware = middleware
        self._move_to = move_to
        self._functions = Functions(THREADS, PROCESSES)
        self._unwatch = watch_tasks(asyncio.get_running_loop())
        self._reports = Reports(engine, PATIENCE_S)
        self._shared = Shared(
            engine,
            self._reports,
            submissions,
            self._functions,
            resources,
            in_process_sleep_ms=0,
            pause=pause,
        )

    async def run_ready(self, patience_s: float = PATIENCE_S) -> int:
        """Run one batch of what is ready to its end; return how many there were.

        Of handlers that take longer than `patience_s`, those with a timeout meet it by the
        clock; the others are stopped and handed back, and `OperationTimeout` names them.
        """
        settings = [task.settings for task in self._tasks.values()]
        if not settings:
            return 0
        claimed = await self._engine.claim_many(
            sorted({each.lane for each in settings}),
            limit=BATCH,
            worker_id="inline",
            worker_instance_id="inline",
            kinds=list(self._tasks),
            namespace=self._namespace,
            lease_ttl_ms=LEASE_TTL_MS_MAX,
            capabilities=sorted({need for each in settings for need in each.capabilities}),
        )
        # Nobody else is there to take a lease, and hardly any time passes while one is held.
        attempts = [
            Attempt(
                self._shared,
                HeldLease(each, math.inf),
                self._tasks[each.execution_kind],
                self._middleware,
                _nothing,
                self._on_stop,
            )
            for each in claimed
        ]
        if attempts:
            await self._run({attempt.start(): attempt for attempt in attempts}, patience_s)
        return len(attempts)

    async def _run(self, running: Running, patience_s: float) -> None:
        try:
            _, left = await asyncio.wait(running, timeout=patience_s)
            timed = {task for task in left if running[task].lease.claimed.attempt_deadline_ms}
            for task in timed:
                running[task].stop(Stop.TIMEOUT, "the timeout is over")
            if timed:
                await asyncio.wait(timed, timeout=GRACE_S)
            stuck = [running[task] for task in left if not task.done()]
        finally:
            # Also when this was cancelled: nothing outlives it.
            await _end({task: each for task, each in running.items() if not task.done()})
        if stuck:
            named = ", ".join(f"{e.task.name} {e.lease.claimed.execution_id}" for e in stuck)
            raise OperationTimeout(
                f"drain: {named} waits for something outside; give the task a timeout, or raise"
                " drain(patience=…): it",
                round(patience_s * 1_000),
            )

    def _on_stop(self, attempt: Attempt) -> None:
        """A timeout has passed by the clock that decides, too."""
        deadline_ms = attempt.lease.claimed.attempt_deadline_ms
        if attempt.stopping is Stop.TIMEOUT and deadline_ms is not None:
            self._move_to(deadline_ms)

    async def close(self) -> None:
        await self._reports.close()
        self._functions.close()
        self._unwatch()


async def _end(running: Running) -> None:
    """Tell handlers to stop, and let go of those that do not."""
    if not running:
        return
    for attempt in running.values():
        attempt.stop(Stop.DRAIN, "the drain is over")
    _, left = await asyncio.wait(running, timeout=GRACE_S)
    for task in left:
        running[task].abandon("the drain is over")
    if left:
        await asyncio.wait(left, timeout=GRACE_S)


def _nothing(attempt: Attempt) -> None:
    """There are no slots to free."""
