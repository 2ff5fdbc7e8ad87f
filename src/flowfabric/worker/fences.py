"""The lease, kept inside the handler's own database transaction.

While that transaction is open it keeps the execution's row locked: nobody can take the lease
or renew it. So the transaction extends the lease for as long as a fence may last, and gives it
its usual time again just before the commit; a transaction that took longer is refused there.
Anything else that needs the row waits for the commit. A verb of the same branch would wait for
itself, and is refused at once. Fences of several branches take turns before they ask the
database, whose answers have to come in time. A handler whose fence has met an outage does not
end as if it had not, whatever it makes of the error.
"""

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from flowfabric import errors
from flowfabric.core.ids import LeaseId
from flowfabric.engine.engine import Engine
from flowfabric.engine.leases import BrokenBy
from flowfabric.outages import outage_behind, statements_within
from flowfabric.worker.failures import text_of, why_lost
from flowfabric.worker.leases import LOST_LEASE, HeldLease, clock_s, fenced
from flowfabric.worker.parking import Parking

FENCE_PATIENCE_MIN_S: Final = 1.0
LOOK_AGAIN_S: Final = 1.0
"""How often a thread that waits for its turn looks whether the lease is still held."""

_inside: ContextVar[LeaseId | None] = ContextVar("flowfabric_fence", default=None)


def check_outside(lease: HeldLease) -> None:
    """Refuse calls that would wait for the row that this branch itself keeps locked."""
    if _inside.get() == lease.handle.lease_id:
        raise errors.InvalidInput(
            "ctx",
            "cannot be used inside a fence: its verbs would wait for your transaction,"
            " and it for them. Leave `with ctx.fence(…)` first; what belongs into the"
            " transaction is submitted with app.submit(…, connection=…)",
        )


FenceTurn = concurrent.futures.Future[None]
"""Done when it has come."""


class FenceQueue:
    """Lets the fences of one attempt in one after another, whatever threads they are on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[FenceTurn] = deque()

    def ask(self) -> FenceTurn:
        """Whoever asks leaves in any case, also if the turn has not come."""
        turn = FenceTurn()
        with self._lock:
            if self._is_taken:
                self._waiting.append(turn)
                return turn
            self._is_taken = True
        turn.set_result(None)
        return turn

    def leave(self, turn: FenceTurn) -> None:
        with self._lock:
            if turn in self._waiting:
                self._waiting.remove(turn)
                return
            following = self._waiting.popleft() if self._waiting else None
            self._is_taken = following is not None
        if following is not None:
            following.set_result(None)


class Inside:
    """What a fence does to the branch it is in."""

    def __init__(self, lease: HeldLease) -> None:
        self._lease = lease
        self._asked_at_s = 0.0

    def check(self) -> None:
        self._lease.require()
        if _inside.get() == self._lease.handle.lease_id:
            raise errors.InvalidInput("fence", "is already open; use one transaction at a time")

    def approach(self) -> None:
        """Prepare to ask the store."""
        self._lease.require()
        self._asked_at_s = clock_s()

    def enter(self, broken_by: BrokenBy) -> None:
        self._lease.enter_fence(self._asked_at_s, broken_by)
        _inside.set(self._lease.handle.lease_id)

    def leave(self) -> None:
        _inside.set(None)
        self._lease.leave_fence()


class FencedTransaction:
    """Keeps the lease for as long as the transaction of `connection` lasts."""

    def __init__(
        self,
        engine: Engine,
        lease: HeldLease,
        connection: object,
        loop: asyncio.AbstractEventLoop,
        queue: FenceQueue,
        parking: Parking,
    ) -> None:
        self._engine = engine
        self._lease = lease
        self._connection = connection
        self._loop = loop
        self._queue = queue
        self._turn: FenceTurn | None = None
        self._parking = parking
        self._inside = Inside(lease)
        self._patience_s = max(lease.ttl_s / 6, FENCE_PATIENCE_MIN_S)
        """How long a statement may take, without the wait for the row: another branch may hold its
        fence for long, so a lock timeout is retried."""

    def __enter__(self) -> None:
        with self._refusing(), statements_within(self._patience_s):
            self._inside.check()
            turn = self._turn = self._queue.ask()
            try:
                self._wait_in_thread(turn)
                self._inside.enter(self._ask_in_thread())
            except BaseException as error:
                self._queue.leave(turn)
                self._note(error)
                raise

    def _wait_in_thread(self, turn: FenceTurn) -> None:
        if not turn.done() and _running_loop() is self._loop:
            raise errors.InvalidInput(
                "fence", "of another branch is open, and waiting for it here would stop it, too"
            )
        while True:
            self._lease.require()
            try:
                return turn.result(timeout=LOOK_AGAIN_S)
            except TimeoutError:
                continue

    def _ask_in_thread(self) -> BrokenBy:
        while True:
            self._inside.approach()
            try:
                return self._engine.enter_fence_on_sync(self._connection, self._lease.handle)
            except errors.LockTimeout:
                continue

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *rest: object
    ) -> None:
        try:
            if error is None:
                with self._refusing(), statements_within(self._patience_s):
                    self._engine.leave_fence_on_sync(self._connection, self._lease.handle)
        except Exception as refusal:
            self._note(refusal)
            raise
        finally:
            self._leave(error)

    async def __aenter__(self) -> None:
        await fenced(self._lease, self._enter())

    async def _enter(self) -> None:
        self._inside.check()
        turn = self._turn = self._queue.ask()
        try:
            if not turn.done():
                with self._parking.working():
                    # Shielded: a turn that nobody waits for any more is passed on below.
                    await asyncio.shield(asyncio.wrap_future(turn))
            self._inside.enter(await self._ask())
        except BaseException as error:
            self._queue.leave(turn)
            self._note(error)
            raise

    async def _ask(self) -> BrokenBy:
        with statements_within(self._patience_s):
            while True:
                self._inside.approach()
                try:
                    return await self._engine.enter_fence_on(self._connection, self._lease.handle)
                except errors.LockTimeout:
                    continue

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *rest: object
    ) -> None:
        try:
            if error is None:
                await fenced(self._lease, self._end())
        except Exception as refusal:
            self._note(refusal)
            raise
        finally:
            self._leave(error)

    async def _end(self) -> None:
        with statements_within(self._patience_s):
            await self._engine.leave_fence_on(self._connection, self._lease.handle)

    def _leave(self, error: BaseException | None) -> None:
        if error is not None:
            self._note(error)
        self._inside.leave()
        if self._turn is not None:
            self._queue.leave(self._turn)

    def _note(self, error: BaseException) -> None:
        """Remember an outage, which the handler may take for something else, or not look at."""
        if isinstance(error, Exception) and outage_behind(error, self._lease.broken_by):
            self._lease.met_outage = f"{type(error).__name__}: {text_of(error)}"
            _expect_an_error()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """The same as `fenced`, for a handler's thread."""
        try:
            yield
        except LOST_LEASE as error:
            self._loop.call_soon_threadsafe(self._lease.lose, why_lost(error))
            raise asyncio.CancelledError(why_lost(error)) from None


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _expect_an_error() -> None:
    """The branch ends with an error the attempt knows of: asyncio need not log that nobody asks."""
    branch = None if _running_loop() is None else asyncio.current_task()
    if branch is not None:
        branch.add_done_callback(_ask_for_its_error)


def _ask_for_its_error(branch: "asyncio.Task[object]") -> None:
    if not branch.cancelled():
        branch.exception()
