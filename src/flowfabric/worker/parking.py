"""Letting go of the worker in the middle of a handler.

A branch that has to wait long says so and stops there. The handler is parked once
nothing else runs in it: no call of another branch is under way, no branch works outside
calls, and it is at rest. So a result on its way to another branch is still used, and an exception
on its way out of the handler ends the run: it takes precedence over a wait. Until the handler is
parked, each wait checks for itself whether it is over.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from msgspec import Struct

from flowfabric.core.conditions import Condition
from flowfabric.core.ids import ExecutionId
from flowfabric.core.waitpoints import FreshWaitpoint
from flowfabric.errors import CodecFailed, CodeMismatch, InvalidInput, Unsuccessful
from flowfabric.json_values import UNREADABLE
from flowfabric.worker.asyncio_tasks import current_line
from flowfabric.worker.branches import Line
from flowfabric.worker.failures import text_of
from flowfabric.worker.turns import Rest, Turns, end_turn

LOOK_AGAIN_S: Final = 1.0
"""How often to look again at a branch that works: by then it may wait for another."""


class Pause(Struct, frozen=True, kw_only=True):
    """A suspension as a handler wants it."""

    suspension_id: str
    condition: Condition
    timeout_in_ms: int | None
    fresh: tuple[FreshWaitpoint, ...]
    """A waitpoint for each name it waits for that has none yet."""


class LongWaits:
    """What the branches of one handler wait for while they are idle."""

    __slots__ = ("executions", "mismatches", "pause", "stopped", "until_ms")

    def __init__(self) -> None:
        self.until_ms: list[tuple[int, str | None]] = []
        """The times that branches wait for, each with the reason that people are told."""
        self.executions: list[ExecutionId] = []
        self.pause: Pause | None = None
        self.mismatches: list[CodeMismatch] = []
        """Why the code does not fit what is stored; nothing else is waited for then."""
        self.stopped: set[asyncio.Future[None]] = set()

    def __bool__(self) -> bool:
        """Whether they end a run of the handler."""
        return bool(self.until_ms or self.executions or self.pause or self.mismatches)


class Parking:
    """Whether the handler is busy, and what its branches wait for."""

    turns: Turns
    """Whose turn it is in the same handler."""

    def __init__(self, park: Callable[[], None]) -> None:
        self._park = park
        self._busy = 0
        self._ended = False
        self._look: asyncio.TimerHandle | None = None
        self._decided = False
        self._rest: Rest | None = None
        self._waits: LongWaits | None = None

    @property
    def waits(self) -> LongWaits:
        if self._waits is None:
            self._waits = LongWaits()
        return self._waits

    @property
    def rest(self) -> Rest:
        if self._rest is None:
            turns = self.turns
            self._rest = Rest(turns.look, turns.at_rest, self._at_rest)
        return self._rest

    @property
    def mismatch(self) -> CodeMismatch | None:
        """Why the code does not fit what is stored, from the branch that knows best."""
        found = None if self._waits is None else self._waits.mismatches
        return found[0] if found else None

    def working(self) -> "Working":
        """Enclose work that must not be cut off."""
        return Working(self)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Enclose a wait for other branches: those that continue are busy themselves."""
        self.end()
        try:
            yield
        finally:
            self.begin()

    def begin(self) -> None:
        self._busy += 1
        self.moved()

    def end(self) -> None:
        self._busy -= 1
        self.moved()

    def moved(self) -> None:
        """Something in the handler began or ended: check again whether it is at rest."""
        if self._rest is not None:
            self._rest.moved()
        if self._waits and not self._ended:
            self.rest.watch()

    def _at_rest(self, rest: Rest) -> bool:
        # A branch that is busy says so when it ends.
        idle = bool(self._waits) and self._busy == 0 and not self._ended
        parked = idle and rest.reached
        if idle and not parked:
            rest.watch()
        # Code that does not fit what is stored runs no further, in any branch.
        if parked and self.mismatch is None and self.turns.at_work:
            self._look_again()
            return False
        if parked:
            # From here on, unwinding the branches must not change what they wait for.
            self._decided = True
            self._park()
        return parked

    def _look_again(self) -> None:
        if self._look is None:
            loop = asyncio.get_running_loop()
            self._look = loop.call_later(LOOK_AGAIN_S, self._looked)

    def _looked(self) -> None:
        self._look = None
        self.moved()

    async def until(self, time_ms: int, for_s: float, *, why: str | None = None) -> None:
        """Stop here until a time, which is in `for_s`: the handler is unwound and runs again.

        Returns if it is not parked by then.
        """
        self.check_free()
        self.waits.until_ms.append((time_ms, why))
        try:
            await self.stop_here(for_s)
        finally:
            if not self._decided:
                self.waits.until_ms.remove((time_ms, why))

    async def until_ended(self, execution_id: ExecutionId) -> None:
        """Stop here until another execution has ended.

        Returns after a moment if the handler is not parked by then: look again.
        """
        self.check_free()
        self.waits.executions.append(execution_id)
        try:
            await self.stop_here(LOOK_AGAIN_S)
        finally:
            if not self._decided:
                self.waits.executions.remove(execution_id)

    async def until_signalled(self, pause: Pause) -> None:
        """Stop here until signals end the pause. Does not return."""
        waits = self.waits
        self._refuse(bool(waits.until_ms or waits.executions or waits.pause))
        waits.pause = pause
        try:
            await self.stop_here()
        finally:
            if not self._decided:
                waits.pause = None

    async def until_code_fits(self, mismatch: CodeMismatch, *, likely: bool = False) -> None:
        """Stop here until other code is deployed, or this code is accepted. Does not return either.

        Of several, people are told the one that is `likely` the change itself.
        """
        found = self.waits.mismatches
        found.insert(0 if likely else len(found), mismatch)
        try:
            await self.stop_here()
        finally:
            if not self._decided:
                found.remove(mismatch)
                self.rest.watch()

    def check_free(self) -> None:
        """Refuse to wait long for anything but signals while another branch waits for those."""
        self._refuse(self._waits is not None and self._waits.pause is not None)

    @staticmethod
    def _refuse(taken: bool) -> None:
        # An execution has one open suspension, which ends for one reason.
        if taken:
            raise InvalidInput(
                "wait",
                "while one branch of a handler waits for signals, no other can wait long;"
                " wait for several signals with ctx.wait_for(all_of(…)), or submit a child",
            )

    async def stop_here(self, for_s: float | None = None) -> None:
        """Wait idle until the handler is unwound, or for this long."""
        loop, stopped = asyncio.get_running_loop(), self.waits.stopped
        forever: asyncio.Future[None] = loop.create_future()
        timer = None if for_s is None else loop.call_later(for_s, end_turn, forever)
        stopped.add(forever)
        line = current_line.get()
        self._stop(line, 1)
        try:
            await forever
        finally:
            if timer is not None:
                timer.cancel()
            self._stop(line, -1)
            stopped.discard(forever)

    def _stop(self, line: Line | None, calls: int) -> None:
        if line is not None:
            line.work.stopped += calls
        self._busy -= calls
        self.moved()

    def let_go(self) -> None:
        """End what still waits here after the handler has ended."""
        self._ended = True
        if self._look is not None:
            self._look.cancel()
        if self._rest is not None:
            self._rest.let_go()
        if self._waits is not None:
            for forever in self._waits.stopped:
                forever.cancel()


class Working:
    """The handler is busy while this lasts. Use as a context."""

    __slots__ = ("_parking",)

    def __init__(self, parking: Parking) -> None:
        self._parking = parking

    def __enter__(self) -> None:
        self._parking.begin()

    def __exit__(self, *exc_info: object) -> None:
        self._parking.end()


# Reading what a run has stored by the types that the code has today ---------
#
# It fitted the types of the code that stored it. If it no longer does, because a model has got a
# new field or a function a new annotation, the run is blocked, as by any other changed code.

MEND_CODEC: Final = "mend the codec or bring back what it needs"

T = TypeVar("T")


async def fitting(parking: Parking, read: Callable[[], T]) -> T:
    """What `read` returns; if it fails, the handler is parked here, inside a call."""
    try:
        return read()
    except Unsuccessful:
        raise
    except Exception as error:
        # Whatever it raises: reading runs the program's own code, which has changed.
        await parking.until_code_fits(unfitting(error))
        raise


def unfitting(error: Exception) -> CodeMismatch:
    """Why a run is blocked: changed code, or a codec that cannot read what is stored."""
    unread = isinstance(error, InvalidInput) and error.problem == UNREADABLE
    codec = unread or isinstance(error, CodecFailed)
    return CodeMismatch(None, text_of(error), MEND_CODEC if codec else None)
