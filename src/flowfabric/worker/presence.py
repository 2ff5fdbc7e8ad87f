"""Saying which worker is there and what it serves, and that it has gone.

Leases that nobody could renew count as the death of their worker until it is heard of. So after an
outage it says at once that it is there, and before it claims anything again. A worker that starts
may bring code that blocked executions have been waiting for.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from flowfabric.core.workers import STOPPED, Offer, Refreshed
from flowfabric.engine.engine import Engine
from flowfabric.errors import FlowFabricError
from flowfabric.logs import open_log
from flowfabric.outages import first_of, level_of, statements_within
from flowfabric.task import Task

log = open_log(__name__)

RELEASES_MAX: Final = 1_000
"""Batches of blocked executions a starting worker releases; the rest look again later."""
REPORT_TIMEOUT_S: Final = 5.0
BEATS_PER_LIFE: Final = 3
"""How often a worker says that it is alive before it would be taken for dead."""
SAY_AGAIN_S: Final = 0.5
"""How soon it says so again that was not heard."""
WITHDRAW_TIMEOUT_S: Final = 5.0


class Presence:
    """Keeps a worker registered."""

    def __init__(self, engine: Engine, offer: Offer, patience_s: float) -> None:
        """`patience_s` is how long it may take to say so."""
        self._engine = engine
        self._offer = offer
        self._patience_s = min(REPORT_TIMEOUT_S, patience_s)
        self._registered = False
        self._began_s = time.monotonic()
        self._hurry = asyncio.Event()
        self.in_doubt = False
        """Whether others may take it for dead since it was heard of."""

    def doubt(self) -> None:
        """It has lost a lease, or an answer: the next claim waits until it has been heard of."""
        self.in_doubt = True
        self._hurry.set()

    async def say(self) -> None:
        """Be heard of now."""
        with statements_within(self._patience_s):
            self.in_doubt = False
            try:
                await self._say()
            except BaseException:
                self.in_doubt = True
                raise

    async def _say(self) -> None:
        offer, instance_id = self._offer, self._offer.worker.worker_instance_id
        if self._registered:
            alive = await self._engine.heartbeat_worker(instance_id, namespace=offer.namespace)
            self._registered = isinstance(alive, Refreshed)
        if not self._registered:
            await self._engine.register_worker(
                offer.lanes,
                worker_id=offer.worker.worker_id,
                worker_instance_id=instance_id,
                liveness_ttl_ms=offer.liveness_ttl_ms,
                capabilities=offer.capabilities,
                kinds=offer.kinds,
                namespace=offer.namespace,
                uptime_ms=int((time.monotonic() - self._began_s) * 1_000),
            )
            self._registered = True

    async def announce(self) -> None:
        """Until cancelled; then say that it has gone."""
        usual_s = self._offer.liveness_ttl_ms / BEATS_PER_LIFE / 1_000
        try:
            while True:
                self._hurry.clear()
                try:
                    await self.say()
                except FlowFabricError as error:
                    log.log(level_of(error), "could not register the worker: %s", error)
                    await asyncio.sleep(min(usual_s, SAY_AGAIN_S))
                else:
                    await first_of(self._hurry.wait(), timeout_s=usual_s)
        finally:
            with suppress(FlowFabricError, TimeoutError):
                async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                    # It finishes what it has in hand, or hands it back.
                    await self._engine.mark_worker_dead(
                        self._offer.worker.worker_instance_id,
                        namespace=self._offer.namespace,
                        reason=STOPPED,
                        revoke_leases=False,
                    )


async def release_blocked(
    engine: Engine, tasks: Mapping[str, Task[..., object]], namespace: str | None
) -> None:
    """Let executions that other code blocked try the code of this worker."""
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
