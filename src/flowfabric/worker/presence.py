"""Saying which worker is there and what it serves, and that it has gone.

A worker that starts may bring code that blocked executions have been waiting for.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from flowfabric.engine.engine import Engine
from flowfabric.errors import FlowFabricError
from flowfabric.logs import open_log
from flowfabric.outages import level_of
from flowfabric.patience import statements_within
from flowfabric.task import Task
from flowfabric.worker.settings import WorkerSettings

log = open_log(__name__)

INTERVAL_S: Final = 15.0
RELEASES_MAX: Final = 1_000
"""Batches of blocked executions a starting worker releases; the rest look again by themselves."""
REPORT_TIMEOUT_S: Final = 5.0
WITHDRAW_TIMEOUT_S: Final = 5.0


async def announce(
    engine: Engine,
    settings: WorkerSettings,
    lanes: Sequence[str],
    tasks: Mapping[str, Task[..., object]],
    namespace: str | None,
) -> None:
    """Report presence now and then until cancelled, then withdraw it."""
    try:
        while True:
            try:
                with statements_within(REPORT_TIMEOUT_S):
                    await engine.report_presence(
                        lanes,
                        worker_id=settings.worker_id,
                        worker_instance_id=settings.worker_instance_id,
                        capabilities=settings.capabilities,
                        kinds=list(tasks),
                        namespace=namespace,
                    )
            except FlowFabricError as error:
                log.log(level_of(error), "could not report presence: %s", error)
            await asyncio.sleep(INTERVAL_S)
    finally:
        with suppress(FlowFabricError, TimeoutError):
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await engine.withdraw_presence(settings.worker_instance_id)


async def release_blocked(
    engine: Engine, tasks: Mapping[str, Task[..., object]], namespace: str | None
) -> None:
    """Let executions that other code has blocked look at the code of this worker."""
    if not tasks:
        return
    try:
        started_ms = await engine.server_time_ms()
        for _ in range(RELEASES_MAX):
            swept = await engine.release_blocked(
                list(tasks), namespace=namespace, blocked_before_ms=started_ms
            )
            if not swept.full:
                return
    except FlowFabricError as error:
        log.log(
            level_of(error),
            "could not release blocked executions; they look again later: %s",
            error,
        )
