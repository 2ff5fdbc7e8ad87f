"""Leases as their worker knows and keeps them, and the heartbeat.

The database decides who owns what, never the worker's own clock. That clock only
limits how long the worker relies on a lease: one that was last confirmed longer ago
than it lasts may belong to another worker by now. The time is counted from before
the request was sent, by a clock that cannot be set and that keeps running while the
process or the whole machine is suspended.
"""

import asyncio
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, NoReturn, TypeVar

from flowfabric import errors
from flowfabric.core.bounds import BATCH_MAX, FENCE_MS_MAX
from flowfabric.core.handles import HandleKind
from flowfabric.core.results import Claimed, Renewed
from flowfabric.engine.engine import Engine
from flowfabric.engine.leases import BrokenBy
from flowfabric.logs import open_log
from flowfabric.outages import FOR_NOBODY, level_of, statements_within
from flowfabric.worker.failures import place_of, why_lost

T = TypeVar("T")

UNSETTLED_S: Final = 1.0
"""How long a worker continues after a fence without knowing whether its transaction committed."""
LOST_LEASE: Final = (
    errors.ExecutionNotActive,
    errors.LeaseConflict,
    errors.LeaseExpired,
    errors.LeaseRevoked,
    errors.StaleLease,
)
"""The engine's refusals of a worker that no longer holds the lease."""
STOP_WAIT_S: Final = 1.0
ENDED: Final = "its time is over and it was not renewed"

# The monotonic clock of Linux stands still while the machine is suspended; leases do not.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock_s() -> float:
    """Seconds since some moment, suspended or not."""
    # Looked up in each call: a simulation puts a clock of its own in place of the machine's.
    return time.clock_gettime(_CLOCK)


class HeldLease:
    """What a worker holds, when that was last confirmed, and what to call when it is lost."""

    def __init__(self, claimed: Claimed, asked_at_s: float) -> None:
        """`asked_at_s` is the time by `clock_s` just before the claim was sent."""
        self.claimed = claimed
        self.handle = claimed.handle
        self.ttl_s = claimed.handle.lease_ttl_ms / 1_000
        self.valid_until_s = asked_at_s + self.ttl_s
        self.on_lost: Callable[[str], None] | None = None
        self.lost: str | None = None
        """Why the lease is gone; None while it is believed to be held."""
        self.fenced = 0
        """How many transactions of the handler hold the execution's row: it needs, and gets,
        no renewal while one does, since nobody can take the lease before that one ends."""
        self.unsettled = False
        """Whether such a transaction may still be about to commit, and with it a longer lease."""
        self.renew_soon: Callable[[], None] | None = None
        self.broken_by: BrokenBy | None = None
        """Tells whether an outage ended the transaction of the latest fence."""
        self.met_outage: str | None = None
        """The outage that a fence has met, in words: the handler must not end as if it had not."""
        self._fenced_until_s = 0.0
        self.reported = False
        """Set when the end has been reported: losing the lease no longer matters."""
        self.on_step: Callable[[], None] | None = None
        """Called when a step is stored, of an execution on its last chance."""
        self._store_ms_at_zero = claimed.lease_expires_at_ms - claimed.handle.lease_ttl_ms
        self._zero_s = clock_s()

    @property
    def first_run(self) -> bool:
        """Whether this is the handler's first run, so nothing can be stored yet."""
        return self.handle.kind is HandleKind.FRESH and self.handle.attempt_index == 0

    @property
    def log_fields(self) -> dict[str, object]:
        """What every log record about it carries."""
        claimed = self.claimed
        return {
            "execution_id": claimed.execution_id,
            "attempt_index": claimed.attempt_index,
            "worker_instance_id": claimed.handle.worker_instance_id,
            "task": claimed.execution_kind,
        }

    def stepped(self) -> None:
        """A step has been stored."""
        if self.on_step is not None:
            self.on_step()

    def confirm(self, asked_at_s: float) -> None:
        self.unsettled = False
        self.valid_until_s = max(self.valid_until_s, asked_at_s + self.ttl_s)

    @property
    def left_s(self) -> float:
        """For how much longer the lease may be live."""
        return self._ends_at_s - clock_s()

    @property
    def _ends_at_s(self) -> float:
        return self._fenced_until_s if self.fenced else self.valid_until_s

    def may_be_live(self) -> bool:
        return self.lost is None and self.left_s > 0

    def check(self) -> None:
        """Give it up if its time is over: the process may have been suspended since the renewal."""
        if self._ends_at_s <= clock_s():
            self.lose(ENDED)

    def require(self) -> None:
        """Raise unless it may be live."""
        self.check()
        if self.lost is not None:
            raise errors.LeaseExpired(
                f"the lease of {self.handle.execution_id} is gone: {self.lost}"
            )

    def enter_fence(self, asked_at_s: float, broken_by: BrokenBy) -> None:
        self.fenced += 1
        self.broken_by = broken_by
        self._fenced_until_s = asked_at_s + max(FENCE_MS_MAX / 1_000, self.ttl_s)

    def leave_fence(self) -> None:
        """From here on it is up to the transaction, which commits a longer lease or none."""
        self.fenced -= 1
        self.unsettled = True
        self.still_locked(clock_s())
        if self.renew_soon is not None:
            self.renew_soon()

    def still_locked(self, asked_at_s: float) -> None:
        """The row is locked, maybe by the fence: no worker could take the lease so far."""
        if self.unsettled:
            until_s = min(asked_at_s + UNSETTLED_S, self._fenced_until_s)
            self.valid_until_s = max(self.valid_until_s, until_s)

    def lose(self, reason: str) -> None:
        """Tell the handler, once."""
        if self.reported or self.lost is not None:
            return
        self.lost = reason
        if self.on_lost is not None:
            self.on_lost(reason)

    def store_now_ms(self) -> int:
        """About what the store's clock shows now."""
        return self._store_ms_at_zero + round((clock_s() - self._zero_s) * 1_000)


# One execution on its last chance at a time ---------------------------------
#
# Nothing tells which of a dead worker's executions killed it. Those that the next such death would
# fail are begun one at a time, each until it has made progress or ended, and the others are put
# aside before it begins: if the worker dies then, the suspect is the only last-chance execution
# that it held. Nothing else begins beside it at first, either: where several executions kill their
# workers, the death that a new one causes would be held against it.

ALONE_S: Final = 5.0
"""How long that is: a handler that kills its worker mostly does so at once."""
SUSPECTS_APART_MS: Final = 500
SUSPECTS_BACK_MS_MAX: Final = 30_000


class LastChances:
    """Which last-chance execution a worker has in hand, and when the others come back."""

    def __init__(self, on_free: Callable[[], None]) -> None:
        """`on_free` is called when others may begin again."""
        self._on_free = on_free
        self._in_hand: HeldLease | None = None
        self._alone_until_s = 0.0
        self._next_s = 0.0
        """When the last of those put aside comes back, by `clock_s`."""

    def choose(self, suspects: Sequence[HeldLease]) -> HeldLease | None:
        """The one to begin; none while another is in hand."""
        if self._in_hand is not None:
            return None
        self._in_hand = chosen = suspects[0]
        self._alone_until_s = clock_s() + ALONE_S
        chosen.on_step = partial(self.let_go, chosen)
        return chosen

    def let_go(self, lease: HeldLease) -> None:
        """It has stored a step, was put aside or has ended: the next may begin."""
        if self._in_hand is lease:
            self._in_hand = None
            self._on_free()
        lease.on_step = None

    def begins(self) -> None:
        """The one in hand begins now."""
        self._alone_until_s = clock_s() + ALONE_S

    @property
    def alone_s(self) -> float:
        """For how much longer nothing may begin beside the one in hand."""
        return 0.0 if self._in_hand is None else max(0.0, self._alone_until_s - clock_s())

    def back_in_ms(self) -> int:
        """When the next one that is put aside comes back: one after the other."""
        now_s = clock_s()
        self._next_s = min(
            max(self._next_s, now_s) + SUSPECTS_APART_MS / 1_000,
            now_s + SUSPECTS_BACK_MS_MAX / 1_000,
        )
        return round((self._next_s - now_s) * 1_000)


# Refusals by the database -----------------------------------------------------


async def fenced(lease: HeldLease, work: Awaitable[T]) -> T:
    """A refusal by the fence stops the handler; there is nothing it could do about it."""
    try:
        return await work
    except LOST_LEASE as error:
        return await stop_here(lease, error)


async def stop_here(lease: HeldLease, refusal: errors.FlowFabricError) -> NoReturn:
    """Stop a handler whose lease is gone, as the engine has just said."""
    lease.lose(why_lost(refusal))
    # The cancellation arrives during this sleep, wherever in the handler we are.
    await asyncio.sleep(STOP_WAIT_S)
    raise asyncio.CancelledError(why_lost(refusal)) from None


# Noticing that the worker's event loop stands still, and which line holds it up

log = open_log(__name__)

BLOCKED_AFTER_S: Final = 5.0
LOOK_S: Final = 0.5


async def watch_loop(
    loop: asyncio.AbstractEventLoop,
    thread_id: int,
    *,
    after_s: float = BLOCKED_AFTER_S,
    every_s: float = LOOK_S,
) -> None:
    """Log an error when a loop, which runs in the given thread, does nothing for `after_s`.

    Logs once per stall. Runs on another loop, in another thread.
    """
    while not loop.is_closed():
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)
        # Looks are counted, not time: the whole process may have stood still.
        looks = 0
        await asyncio.sleep(every_s)
        while not answered.is_set() and not loop.is_closed():
            looks += 1
            if looks == round(after_s / every_s):
                _tell(thread_id, after_s)
            await asyncio.sleep(every_s)


def _tell(thread_id: int, after_s: float) -> None:
    frame = sys._current_frames().get(thread_id)
    log.error(
        "a handler blocks the event loop for more than %s s; its leases are kept, but nothing else"
        " runs meanwhile. Make it a plain function, which runs in a thread. It is here: %s",
        after_s,
        "it has moved on" if frame is None else place_of(frame),
    )


# One heartbeat for all leases of a process ----------------------------------
#
# It runs on a thread of its own, with its own event loop and database connection,
# so that neither a handler that blocks the worker's loop nor an exhausted pool
# costs a lease. It also notices when the worker's loop stands still, and logs
# where. A database in memory belongs to the worker's loop alone; there
# the heartbeat runs on that loop.
#
# A renewal may hang for any length of time: a separate watch tells each handler
# when its lease ends.
#
# All leases are renewed at once, without waiting for rows that are locked. A
# handler that asks the store for one thing after another has its row locked nearly all
# the time. Those that were locked are renewed once more together, since most locks last for
# a moment only, and then each by itself, queueing for the row.

Connect = Callable[[], Awaitable[Engine]]

BEATS_PER_LEASE: Final = 3
JITTER: Final = 0.1
RETRY_S: Final = 0.5
WATCH_S: Final = 0.25
"""The longest time between two looks at the ends of leases: timers stop with the machine."""
LOCK_WAIT_S: Final = 1.0
"""How long a renewal queues for a row that is locked, before others may queue for theirs."""
LOCK_WAIT_MIN_S: Final = 0.01
LOCKED_AGAIN_S: Final = 0.05
"""When rows that were locked are looked at again, all of them at once."""
QUEUES_MAX: Final = 4
"""How many leases may queue at the same time, each on its own connection."""
CONNECTIONS_MAX: Final = 1 + QUEUES_MAX
LOST_CHECK_GAP_S: Final = 0.2
"""Hints that leases were taken away are answered at most this often."""


class Renewal(NamedTuple):
    """The outcome of one renewal."""

    answered: bool
    """Whether there was an answer for each lease."""
    locked: Sequence[HeldLease] = ()
    """Leases whose row another transaction has locked."""


class Heartbeat:
    """Renews what the worker holds until it is stopped."""

    def __init__(self, lease_ttl_s: float, connect: Connect | None, engine: Engine) -> None:
        """Without `connect` it shares `engine` and its loop."""
        self.on_gone: Callable[[errors.FlowFabricError], None] | None = None
        """Called on the worker's loop when no leases are left to renew."""
        self._interval_s = lease_ttl_s / BEATS_PER_LEASE
        self._connect = connect
        self._engine = engine
        self._held: dict[str, HeldLease] = {}
        self._queueing: dict[str, asyncio.Task[None]] = {}
        """Renewals that wait for a locked row, by lease."""
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

    def add(self, *leases: HeldLease) -> None:
        renew_soon = self._renew_now
        for lease in leases:
            lease.renew_soon = renew_soon
        with self._lock:
            self._held.update((lease.handle.lease_id, lease) for lease in leases)

    def remove(self, lease: HeldLease) -> None:
        with self._lock:
            self._held.pop(lease.handle.lease_id, None)

    def check_now(self) -> None:
        """Look at once whether leases were taken away: a hint says so, or was lost.

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
        self._queues = asyncio.Semaphore(QUEUES_MAX)
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
            except errors.FlowFabricError as error:
                log.log(level_of(error), "the heartbeat is not connected; trying again: %s", error)
                self._tell_if_gone(error)
                await asyncio.sleep(RETRY_S)
                continue
            async with engine:
                self._engine = engine
                await self._beat_forever()

    async def _beat_forever(self) -> None:
        try:
            while not self._stopping:
                self._renew_at_once = False
                pause_s = self._interval_s * random.uniform(1 - JITTER, 1)
                if not await self._beat():
                    pause_s = min(RETRY_S, pause_s)
                await self._wait_for_next_beat(pause_s)
        finally:
            # They need the engine, which may be closed next.
            queueing = list(self._queueing.values())
            for each in queueing:
                each.cancel()
            await asyncio.gather(*queueing, return_exceptions=True)

    async def _wait_for_next_beat(self, pause_s: float) -> None:
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
        """Renew everything once; return whether each got an answer."""
        with self._lock:
            held = [lease for lease in self._held.values() if not lease.fenced]
        answered = True
        for start in range(0, len(held), BATCH_MAX):
            renewal = await self._renew(held[start : start + BATCH_MAX])
            self._queue(renewal.locked)
            answered &= renewal.answered
        return answered

    async def _look_for_lost(self) -> None:
        """Renew only the leases that seem to be taken away: the answer says what happened to each.

        If the look fails, the next renewal finds out.
        """
        with self._lock:
            held = {lease.handle: lease for lease in self._held.values() if not lease.fenced}
        handles = list(held)
        for start in range(0, len(handles), BATCH_MAX):
            try:
                with statements_within(self._interval_s):
                    lost = await self._engine.find_lost_leases(handles[start : start + BATCH_MAX])
            except errors.FlowFabricError as error:
                log.log(level_of(error), "could not look for lost leases: %s", error)
                return
            if lost:
                self._queue((await self._renew([held[handle] for handle in lost])).locked)

    async def _renew(self, held: Sequence[HeldLease], lock_wait_s: float = 0.0) -> Renewal:
        asked_at_s = clock_s()
        try:
            # A locked row delays at most its own lease. We wait for its lock twice: behind those
            # who wait already, and then for its holder.
            with statements_within(self._interval_s + 2 * lock_wait_s):
                outcomes = await self._engine.renew_many(
                    [lease.handle for lease in held], lock_wait_ms=round(lock_wait_s * 1_000)
                )
        except errors.LockTimeout:
            return Renewal(False)
        except errors.FlowFabricError as error:
            log.log(level_of(error), "leases could not be renewed; trying again: %s", error)
            self._tell_if_gone(error)
            return Renewal(False)
        locked: list[HeldLease] = []
        for lease, outcome in zip(held, outcomes, strict=True):
            if isinstance(outcome, Renewed):
                lease.confirm(asked_at_s)
            elif isinstance(outcome, errors.RetryExhausted):
                lease.still_locked(asked_at_s)
                locked.append(lease)
            else:
                self._tell(lease, why_lost(outcome))
        return Renewal(not locked, locked)

    def _tell_if_gone(self, error: errors.FlowFabricError) -> None:
        if isinstance(error, FOR_NOBODY) and self.on_gone is not None:
            self._worker_loop.call_soon_threadsafe(self.on_gone, error)

    def _queue(self, locked: Sequence[HeldLease]) -> None:
        new = [lease for lease in locked if lease.handle.lease_id not in self._queueing]
        if new:
            renewing = asyncio.create_task(self._renew_locked(new))
            self._queueing |= {lease.handle.lease_id: renewing for lease in new}

    async def _renew_locked(self, leases: Sequence[HeldLease]) -> None:
        """Renew all that are free after a moment; each of the others waits for its row."""
        try:
            await asyncio.sleep(LOCKED_AGAIN_S)
            left = [lease for lease in leases if self._needs(lease)]
            if left:
                renewal = await self._renew(left)
                await asyncio.gather(*map(self._renew_in_turn, renewal.locked))
        finally:
            for lease in leases:
                del self._queueing[lease.handle.lease_id]

    async def _renew_in_turn(self, lease: HeldLease) -> None:
        """Queue for the row like every other transaction that needs it."""
        valid_until_s = lease.valid_until_s
        async with self._queues:
            # A later beat may have found it free.
            if self._needs(lease) and lease.valid_until_s == valid_until_s:
                await self._renew([lease], max(min(LOCK_WAIT_S, lease.left_s), LOCK_WAIT_MIN_S))

    def _needs(self, lease: HeldLease) -> bool:
        """Whether it is still to be renewed. While it is fenced, its handler has locked it."""
        with self._lock:
            held = lease.handle.lease_id in self._held
        return held and not lease.fenced and lease.may_be_live()

    async def _watch_ends(self) -> None:
        """Tell handlers when their leases end, whatever happens to the database or the network."""
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
