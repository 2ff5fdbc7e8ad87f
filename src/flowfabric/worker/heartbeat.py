"""One heartbeat for all leases of a process.

It runs on a thread of its own, with its own event loop and database connection,
so that neither a handler that blocks the worker's loop nor an exhausted pool
costs a lease. While it is at it, it notices when the worker's loop stands still
and logs where. A database in memory belongs to the worker's loop alone; there
the heartbeat runs on that loop.

A renewal may hang for as long as it likes: beside it, a watch tells each handler
when its lease ends.
"""

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from flowfabric.core.limits import BATCH_MAX
from flowfabric.core.results import Renewed
from flowfabric.engine.engine import Engine
from flowfabric.errors import DatabaseGone, FlowFabricError, RetryExhausted
from flowfabric.logs import open_log
from flowfabric.outages import level_of
from flowfabric.patience import statements_within
from flowfabric.worker.describing import why_lost
from flowfabric.worker.held import ENDED, HeldLease, clock_s
from flowfabric.worker.standstill import watch_loop

log = open_log(__name__)

Connect = Callable[[], Awaitable[Engine]]

BEATS_PER_LEASE: Final = 3
JITTER: Final = 0.1
RETRY_S: Final = 0.5
WATCH_S: Final = 0.25
"""How often the ends of leases are looked at, at least: timers stand still with the machine."""
LOST_CHECK_GAP_S: Final = 0.2
"""Hints that leases were taken away are answered at most this often."""


class Heartbeat:
    """Renews what the worker holds until it is stopped."""

    def __init__(self, lease_ttl_s: float, connect: Connect | None, engine: Engine) -> None:
        """Without `connect` it shares `engine` and its loop."""
        self.on_gone: Callable[[DatabaseGone], None] | None = None
        """Called on the worker's loop when the database is gone for good."""
        self._interval_s = lease_ttl_s / BEATS_PER_LEASE
        self._connect = connect
        self._engine = engine
        self._held: dict[str, HeldLease] = {}
        self._lock = threading.Lock()
        self._worker_loop = asyncio.get_running_loop()
        self._worker_thread = threading.get_ident()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._renew_at_once = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._connect is None:
            self._task = asyncio.create_task(self._live(), name="flowfabric-heartbeat")
        else:
            self._thread = threading.Thread(
                target=self._run_thread, name="flowfabric-heartbeat", daemon=True
            )
            self._thread.start()

    async def stop(self) -> None:
        self._stopping = True
        self.check_now()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def add(self, lease: HeldLease) -> None:
        lease.renew_soon = self._renew_now
        with self._lock:
            self._held[lease.handle.lease_id] = lease

    def remove(self, lease: HeldLease) -> None:
        with self._lock:
            self._held.pop(lease.handle.lease_id, None)

    def check_now(self) -> None:
        """Look at once whether leases were taken away: somebody says so, or may have.

        Only looking is free of echoes: on SQLite every commit of another connection comes as
        a hint, and the heartbeat's renewals are such commits.
        """
        if self._loop is not None and self._wake is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake.set)

    def _renew_now(self) -> None:
        self._renew_at_once = True
        self.check_now()

    # On the heartbeat's own loop

    def _run_thread(self) -> None:
        while not self._stopping:
            try:
                asyncio.run(self._live())
            except Exception:
                log.exception("the heartbeat failed; it starts again in %s s", RETRY_S)
                time.sleep(RETRY_S)

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        watches = [asyncio.create_task(self._watch_ends())]
        if self._connect is not None:
            standstill = watch_loop(self._worker_loop, self._worker_thread)
            watches.append(asyncio.create_task(standstill))
        try:
            if self._connect is None:
                await self._beat_forever()
            else:
                await self._beat_with_own_engine(self._connect)
        finally:
            for watch in watches:
                watch.cancel()

    async def _beat_with_own_engine(self, connect: Connect) -> None:
        while not self._stopping:
            try:
                with statements_within(self._interval_s):
                    engine = await connect()
            except FlowFabricError as error:
                log.log(level_of(error), "the heartbeat is not connected; trying again: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            async with engine:
                self._engine = engine
                await self._beat_forever()

    async def _beat_forever(self) -> None:
        while not self._stopping:
            self._renew_at_once = False
            pause_s = self._interval_s * random.uniform(1 - JITTER, 1)
            if not await self._beat():
                pause_s = min(RETRY_S, pause_s)
            await self._rest(pause_s)

    async def _rest(self, pause_s: float) -> None:
        """Until the next renewal is due; look meanwhile, when told to, for leases taken away."""
        assert self._wake is not None
        due_s = clock_s() + pause_s
        while not self._renew_at_once and (left_s := due_s - clock_s()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await self._wake.wait()
            except TimeoutError:
                return
            self._wake.clear()
            if self._stopping:
                return
            await asyncio.sleep(min(LOST_CHECK_GAP_S, self._interval_s))
            if not self._renew_at_once:
                await self._look_for_lost()

    async def _beat(self) -> bool:
        """Renew everything once; tell whether there was an answer for each."""
        with self._lock:
            held = [lease for lease in self._held.values() if not lease.fenced]
        answered = True
        for start in range(0, len(held), BATCH_MAX):
            answered &= await self._renew(held[start : start + BATCH_MAX])
        return answered

    async def _look_for_lost(self) -> None:
        """Renew what seems to be taken away, and nothing else: the answer says what became of it.

        A look that fails is made up for by the next renewal.
        """
        with self._lock:
            held = {lease.handle: lease for lease in self._held.values() if not lease.fenced}
        handles = list(held)
        for start in range(0, len(handles), BATCH_MAX):
            try:
                with statements_within(self._interval_s):
                    lost = await self._engine.find_lost_leases(handles[start : start + BATCH_MAX])
            except FlowFabricError as error:
                log.log(level_of(error), "could not look for lost leases: %s", error)
                return
            if lost:
                await self._renew([held[handle] for handle in lost])

    async def _renew(self, held: Sequence[HeldLease]) -> bool:
        asked_at_s = clock_s()
        try:
            # A row that somebody has locked costs its own lease at most.
            with statements_within(self._interval_s):
                outcomes = await self._engine.renew_many(
                    [lease.handle for lease in held], waits=False
                )
        except FlowFabricError as error:
            log.log(level_of(error), "leases could not be renewed; trying again: %s", error)
            if isinstance(error, DatabaseGone) and self.on_gone is not None:
                self._worker_loop.call_soon_threadsafe(self.on_gone, error)
            return False
        answered = True
        for lease, outcome in zip(held, outcomes, strict=True):
            if isinstance(outcome, Renewed):
                lease.confirm(asked_at_s)
            elif isinstance(outcome, RetryExhausted):
                lease.still_locked(asked_at_s)
                answered = False
            else:
                self._tell(lease, why_lost(outcome))
        return answered

    async def _watch_ends(self) -> None:
        """Tell handlers when their leases end, whatever the database or the way to it does."""
        while not self._stopping:
            with self._lock:
                held = list(self._held.values())
            soonest_s = WATCH_S
            for lease in held:
                left_s = lease.left_s
                if left_s <= 0:
                    self._tell(lease, ENDED)
                else:
                    soonest_s = min(soonest_s, left_s)
            await asyncio.sleep(soonest_s)

    def _tell(self, lease: HeldLease, reason: str) -> None:
        with self._lock:
            known = self._held.pop(lease.handle.lease_id, None)
        if known is not None and not self._worker_loop.is_closed():
            self._worker_loop.call_soon_threadsafe(lease.lose, reason)
