"""Noticing that a handler has called a verb and not awaited it.

Such a call does nothing, and a handler that returns without it looks as if it had done its work. So
what verbs return is remembered, and looked at when the handler has ended.
"""

import inspect
from collections.abc import Coroutine
from typing import Final, NamedTuple

from flowfabric.errors import NotAwaited

LOOK_AT: Final = 64
"""How many are remembered before those that were awaited are forgotten."""


class Promise(NamedTuple):
    """What a verb has returned, and the call as the code has it."""

    called: str
    coroutine: Coroutine[object, object, object]

    @property
    def is_kept(self) -> bool:
        return inspect.getcoroutinestate(self.coroutine) != inspect.CORO_CREATED


class Promises:
    """What the verbs of one handler have returned."""

    def __init__(self) -> None:
        self._made: list[Promise] = []
        self._look_at = LOOK_AT

    def add(self, called: str, coroutine: Coroutine[object, object, object]) -> None:
        self._made.append(Promise(called, coroutine))
        if len(self._made) > self._look_at:
            self._made = self._open()
            self._look_at = max(LOOK_AT, 2 * len(self._made))

    def check(self) -> None:
        """Raise if some were never awaited: by the handler, or by a task that has begun."""
        found = self._open()
        for promise in found:
            promise.coroutine.close()
        if found:
            raise NotAwaited([promise.called for promise in found])

    def let_go(self) -> None:
        """Of all that points back to the attempt."""
        self._made.clear()

    def _open(self) -> list[Promise]:
        return [promise for promise in self._made if not promise.is_kept]
