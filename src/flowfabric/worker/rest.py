"""When a handler has come to rest: it has reacted to all it was given, and waits for more.

There is no asking a handler for that. It is taken to be at rest when, for some turns of the
event loop, no task of it has begun or ended and no call of it was made or has ended. What it does
outside of steps, a request to somewhere, leaves no such sign; it counts as rest. One that never
rests, since it starts task after task, is given what it waits for all the same.
"""

import asyncio
from collections.abc import Callable
from typing import Final

QUIET_TURNS: Final = 20
"""Turns of the event loop without a sign of the handler, after which it is at rest."""
TURNS_MAX: Final = 2_000
"""Turns after which a handler that is not at rest is treated as if it were."""


class Rest:
    """Tells whoever watches that the handler is at rest."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._quiet_turns = 0
        self._turns = 0
        self._watching = False
        self._told: list[Callable[[], bool]] = []

    def tell(self, at_rest: Callable[[], bool]) -> None:
        """Call this at rest, before those given earlier; whoever acts says so and is the last."""
        self._told.insert(0, at_rest)

    @property
    def reached(self) -> bool:
        """Whether the handler is at rest, as far as somebody has watched."""
        return self._quiet_turns >= QUIET_TURNS

    def moved(self) -> None:
        """There was a sign of the handler."""
        self._quiet_turns = 0

    def watch(self) -> None:
        """Somebody wants to be told when it is at rest."""
        if not self._watching:
            self._watching = True
            self._turns = 0
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        if not self.reached and self._turns < TURNS_MAX:
            self._quiet_turns += 1
            self._turns += 1
            self._loop.call_soon(self._look)
            return
        self._watching = False
        for at_rest in self._told:
            if at_rest():
                return

    def let_go(self) -> None:
        """Of all that points back here."""
        self._told.clear()
