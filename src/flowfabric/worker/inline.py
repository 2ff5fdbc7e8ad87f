"""A worker for tests: it runs what is ready when called, without background work or heartbeats."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from flowfabric.core.bounds import LEASE_TTL_MS_MAX, LIVENESS_TTL_MS_MAX
from flowfabric.engine.engine import Engine
from flowfabric.errors import OperationTimeout
from flowfabric.outages import first_of
from flowfabric.submission import Submissions
from flowfabric.task import Task
from flowfabric.worker.asyncio_tasks import watch_tasks
from flowfabric.worker.attempt import Middleware, RunningAttempt, Stop
from flowfabric.worker.functions import Functions
from flowfabric.worker.leases import HeldLease
from flowfabric.worker.reports import Reports
from flowfabric.worker.resources import Resources
from flowfabric.worker.services import Shared

NAME: Final = "inline"
BATCH: Final = 100
THREADS: Final = 8
PROCESSES: Final = 1
PATIENCE_S: Final = 30.0
GRACE_S: Final = 1.0
"""How long a stopping handler may take."""


def _stay(at_ms: int) -> None:
    """For a clock that runs on its own."""


class InlineWorker:
    """Claims and runs on demand. Every sleep of a handler releases the worker, however short."""

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
        settings = [task.settings for task in tasks.values()]
        self._lanes = sorted({each.lane for each in settings})
        self._capabilities = sorted({need for each in settings for need in each.capabilities})
        self.middleware = middleware
        self._move_to = move_to
        self._left: set[RunningAttempt] = set()
        self._one_ended = asyncio.Event()
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

    async def register(self) -> None:
        """Register the worker, so that `why` can say what work that has not run waits for."""
        if self._tasks:
            await self._engine.register_worker(
                self._lanes,
                worker_id=NAME,
                worker_instance_id=NAME,
                liveness_ttl_ms=LIVENESS_TTL_MS_MAX,
                capabilities=self._capabilities,
                kinds=list(self._tasks),
                namespace=self._namespace,
            )

    async def run_ready(self, patience_s: float = PATIENCE_S) -> int:
        """Run one batch of what is ready to its end; return how many executions it had.

        Handlers that take longer than `patience_s` time out by the clock if they have a timeout;
        others are stopped and handed back, and `OperationTimeout` names them.
        """
        if not self._tasks:
            return 0
        claimed = await self._engine.claim_many(
            self._lanes,
            limit=BATCH,
            worker_id=NAME,
            worker_instance_id=NAME,
            kinds=list(self._tasks),
            namespace=self._namespace,
            lease_ttl_ms=LEASE_TTL_MS_MAX,
            capabilities=self._capabilities,
        )
        # No other worker can take a lease, and hardly any time passes while one is held.
        attempts = [
            RunningAttempt(
                self._shared, HeldLease(each, math.inf), self._tasks[each.execution_kind], self
            )
            for each in claimed
        ]
        self._left = set(attempts)
        for attempt in attempts:
            attempt.start()
        if claimed:
            await self._run(patience_s)
        return len(claimed)

    async def _run(self, patience_s: float) -> None:
        try:
            await self._until_ended(self._left, patience_s)
            timed = {each for each in self._left if each.lease.claimed.attempt_deadline_ms}
            for attempt in timed:
                attempt.stop(Stop.TIMEOUT, "the timeout is over")
            await self._until_ended(timed, GRACE_S)
            stuck = tuple(self._left)
        finally:
            # Even if this is cancelled, nothing outlives it.
            await self._end_all()
        if stuck:
            named = ", ".join(f"{e.task.name} {e.lease.claimed.execution_id}" for e in stuck)
            raise OperationTimeout(
                f"drain: {named} waits for something outside; give the task a timeout, or raise"
                " drain(patience=…): it",
                round(patience_s * 1_000),
            )

    async def _end_all(self) -> None:
        """Stop handlers, and abandon those that do not stop."""
        for attempt in tuple(self._left):
            attempt.stop(Stop.DRAIN, "the drain is over")
        await self._until_ended(self._left, GRACE_S)
        for attempt in tuple(self._left):
            attempt.abandon("the drain is over")
        await self._until_ended(self._left, GRACE_S)

    async def _until_ended(self, attempts: set[RunningAttempt], timeout_s: float) -> None:
        deadline_s, left_s = time.monotonic() + timeout_s, timeout_s
        while attempts & self._left and left_s >= 0:
            self._one_ended.clear()
            await first_of(self._one_ended.wait(), timeout_s=left_s)
            left_s = deadline_s - time.monotonic()

    # Called by attempts

    def handler_ended(self, attempt: RunningAttempt) -> None:
        """There are no slots to free."""

    def attempt_ended(self, attempt: RunningAttempt) -> None:
        self._left.discard(attempt)
        self._one_ended.set()

    def stop_asked(self, attempt: RunningAttempt) -> None:
        """Move the engine's clock to the timeout as well."""
        deadline_ms = attempt.lease.claimed.attempt_deadline_ms
        if attempt.stopping is Stop.TIMEOUT and deadline_ms is not None:
            self._move_to(deadline_ms)

    async def close(self) -> None:
        await self._reports.close()
        self._functions.close()
        self._unwatch()
