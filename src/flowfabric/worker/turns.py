"""Lets outcomes reach a handler in the order of `core.journal`.

A handler of which one line alone goes on gets everything at once.
"""

import asyncio
from typing import Final

from flowfabric.core.journal import Order
from flowfabric.worker.parking import Parking

PATIENCE_S: Final = 0.2
"""How long a stored outcome is waited for whose turn it is."""


class Turns:
    """Whose turn it is among the calls of one handler."""

    def __init__(self, parking: Parking) -> None:
        self.order = Order()
        self.tasks = 0
        """Tasks the handler has started that have not ended."""
        self.calls = 0
        """Calls it has made that have not ended."""
        self._parking: Parking | None = parking
        self._rest = parking.rest
        self._settled = True
        """The handler has come to rest since it was given something."""
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._held: list[asyncio.Future[None]] = []
        self._patience: asyncio.TimerHandle | None = None
        self._patient = True
        self._closed = False
        self._rest.tell(self._at_rest)

    @property
    def alone(self) -> bool:
        """Whether nothing of the handler goes on but the call that asks."""
        return self._settled and self.tasks == 0 and self.calls <= 1

    def allot(self) -> "Allotted":
        """A position for a new outcome, which is given up if it does not reach the handler."""
        return Allotted(self)

    async def take(self, position: int) -> None:
        """Wait until it is the turn of an outcome to reach the handler."""
        if self.alone or self._closed:
            self.order.end(position)
            return
        self.order.wait(position)
        turn = self._waiting[position] = asyncio.get_running_loop().create_future()
        self._rest.watch()
        try:
            await turn
        finally:
            del self._waiting[position]
            self.give_up(position)

    def give_up(self, position: int) -> None:
        """An outcome will not reach the handler, or has."""
        self.order.end(position)
        if self._waiting:
            self._rest.watch()

    async def run_new(self) -> None:
        """Wait until a call that is not stored may run."""
        parking = self._parking
        if self.alone or not self.order.replaying or self._closed or parking is None:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held.append(turn)
        self._rest.watch()
        # Not busy meanwhile: nothing new runs if the code turns out not to fit.
        parking.end()
        try:
            await turn
        finally:
            self._held.remove(turn)
            parking.begin()

    def _at_rest(self) -> bool:
        self._settled = True
        if self._closed or self._parking is None:
            return False
        if self.order.expects and (self._waiting or self._held):
            if self._patient:
                self._wait_for_expected()
                return True
            self.order.expect_no_more()
        self._lose_patience(False)
        position = self.order.next()
        runs = self.order.may_run and bool(self._held) and self._parking.mismatch is None
        if runs:
            for turn in self._held:
                _end_turn(turn)
        if position is not None:
            self._settled = False
            self.order.end(position)
            _end_turn(self._waiting[position])
            self._rest.moved()
            self._rest.watch()
        return runs or position is not None

    def _wait_for_expected(self) -> None:
        """For a moment; after that, for one more rest of the handler."""
        if self._patience is None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(PATIENCE_S, self._lose_patience, True)

    def _lose_patience(self, lost: bool) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._patient = not lost
        if lost:
            self._rest.moved()
            self._rest.watch()

    def close(self) -> None:
        """Nothing more reaches the handler."""
        self._closed = True
        self._lose_patience(False)
        for turn in (*self._waiting.values(), *self._held):
            turn.cancel()

    def let_go(self) -> None:
        """Of all that points back to the attempt."""
        self.close()
        self._parking = None


class Allotted:
    """The position of a new outcome, as long as it is on its way. Use as a context."""

    __slots__ = ("_position", "_turns")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __enter__(self) -> int:
        self._position = self._turns.order.allot()
        return self._position

    def __exit__(self, *exc_info: object) -> None:
        self._turns.give_up(self._position)


def _end_turn(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)
