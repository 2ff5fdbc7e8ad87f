"""Running what is ready, here and now, for tests: no background, no heartbeat, no waiting."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from flowfabric.core.limits import LEASE_TTL_MS_MAX
from flowfabric.engine.engine import Engine
from flowfabric.submission import Submissions
from flowfabric.task import Task
from flowfabric.worker.attempt import Attempt, Middleware
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
    ) -> None:
        self._engine = engine
        self._namespace = namespace
        self._tasks = tasks
        self._middleware = middleware
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

    async def run_ready(self) -> int:
        """Run one batch of what is ready to its end; return how many there were."""
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
                _nothing,
            )
            for each in claimed
        ]
        if attempts:
            await asyncio.wait([attempt.start() for attempt in attempts])
        return len(attempts)

    async def close(self) -> None:
        await self._reports.close()
        self._functions.close()
        self._unwatch()


def _nothing(attempt: Attempt) -> None:
    """There are no slots to free."""
