"""Letting go of the worker in the middle of a handler.

A branch that has to wait long says so and stops there. The handler is parked when
nothing else of it goes on: no call of another branch is under way, no branch works outside of
calls, and it is at rest. So a result on its way to another branch is used, and an exception on its
way out of the handler ends the run: it counts for more than a wait. As long as it is not parked,
whoever waits looks for itself whether the wait is over.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from flowfabric.core.conditions import Condition
from flowfabric.core.ids import ExecutionId
from flowfabric.core.waitpoints import FreshWaitpoint
from flowfabric.errors import CodeMismatch, InvalidInput
from flowfabric.worker.rest import Rest

LOOK_AGAIN_S: Final = 1.0
"""How often a branch that works is looked at again: it may have come to wait for another."""


class Pause(Struct, frozen=True, kw_only=True):
    """A suspension as a handler wants it."""

    suspension_id: str
    condition: Condition
    timeout_in_ms: int | None
    fresh: tuple[FreshWaitpoint, ...]
    """A waitpoint for each name it waits for, where none was made beforehand."""


class Parking:
    """What the branches of one handler wait for."""

    def __init__(self, park: Callable[[], None]) -> None:
        self._park = park
        self._busy = 0
        self._ended = False
        self.at_work: Callable[[], bool] = _nobody
        """Whether a branch works outside of calls."""
        self._look: asyncio.TimerHandle | None = None
        self._decided = False
        self._stopped: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        self.rest = Rest()
        self.rest.tell(self._at_rest)
        self.until_ms: list[int] = []
        self.executions: list[ExecutionId] = []
        self.pause: Pause | None = None
        self.mismatch: CodeMismatch | None = None
        """Why the code does not fit what is stored; nothing else is waited for then."""

    @property
    def wanted(self) -> bool:
        return bool(self.until_ms or self.executions or self.pause or self.mismatch)

    def working(self) -> "Working":
        """Around whatever must not be cut off."""
        return Working(self)

    def begin(self) -> None:
        self._busy += 1
        self.moved()

    def end(self) -> None:
        self._busy -= 1
        self.moved()

    def moved(self) -> None:
        """Something of the handler began or ended: look again whether it is at rest."""
        self.rest.moved()
        if self.wanted:
            self.rest.watch()

    def _at_rest(self) -> bool:
        # Whoever is busy says so when it ends.
        idle = self.wanted and self._busy == 0 and not self._ended
        parked = idle and self.rest.reached
        if idle and not parked:
            self.rest.watch()
        # Code that does not fit what is stored is not run any further, nowhere.
        if parked and self.mismatch is None and self.at_work():
            self._look_again()
            return False
        if parked:
            # From now on what is wanted stays as it is, although the branches are unwound.
            self._decided = True
            self._park()
        return parked

    def _look_again(self) -> None:
        if self._look is None:
            self._look = self._loop.call_later(LOOK_AGAIN_S, self._looked)

    def _looked(self) -> None:
        self._look = None
        self.moved()

    async def until(self, time_ms: int, for_s: float) -> None:
        """Stop here until a time, which is in `for_s`: the handler is unwound and runs again.

        Returns if it is not parked by then.
        """
        self.check_free()
        self.until_ms.append(time_ms)
        try:
            await self.stop_here(for_s)
        finally:
            if not self._decided:
                self.until_ms.remove(time_ms)

    async def until_ended(self, execution_id: ExecutionId) -> None:
        """Stop here until another execution has ended.

        Returns after a moment if the handler is not parked by then: look again.
        """
        self.check_free()
        self.executions.append(execution_id)
        try:
            await self.stop_here(LOOK_AGAIN_S)
        finally:
            if not self._decided:
                self.executions.remove(execution_id)

    async def until_signalled(self, pause: Pause) -> None:
        """Stop here until signals end the pause. Does not return."""
        self._refuse(bool(self.until_ms or self.executions or self.pause))
        self.pause = pause
        try:
            await self.stop_here()
        finally:
            if not self._decided:
                self.pause = None

    async def until_code_fits(self, mismatch: CodeMismatch) -> None:
        """Stop here until other code is deployed, or this one accepted. Does not return either."""
        self.mismatch = self.mismatch or mismatch
        try:
            await self.stop_here()
        finally:
            if not self._decided:
                self.mismatch = None
                self.rest.watch()

    def check_free(self) -> None:
        """Refuse to wait long for anything but signals while another branch waits for those."""
        self._refuse(self.pause is not None)

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
        """Wait without being busy, until the handler is unwound, or for so long."""
        forever: asyncio.Future[None] = self._loop.create_future()
        timer = None if for_s is None else self._loop.call_later(for_s, _end, forever)
        self._stopped.add(forever)
        self.end()
        try:
            await forever
        finally:
            if timer is not None:
                timer.cancel()
            self.begin()
            self._stopped.discard(forever)

    def let_go(self) -> None:
        """End what still waits here after the handler has ended."""
        self._ended = True
        self.at_work = _nobody
        if self._look is not None:
            self._look.cancel()
        self.rest.let_go()
        for forever in self._stopped:
            forever.cancel()


class Working:
    """As long as it lasts the handler is busy. Use as a context."""

    __slots__ = ("_parking",)

    def __init__(self, parking: Parking) -> None:
        self._parking = parking

    def __enter__(self) -> None:
        self._parking.begin()

    def __exit__(self, *exc_info: object) -> None:
        self._parking.end()


def _nobody() -> bool:
    return False


def _end(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)
