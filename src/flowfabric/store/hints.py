"""Wake-ups inside one process.

A hint says "look again": that something may have changed, never what. Hints are
sets of topics, so any number of them collapse into one. A listener remembers
that it was hinted until it is asked, so nothing is lost between two waits.
Everything here runs on one event loop.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Self
from weakref import WeakKeyDictionary

from flowfabric.store.base import FetchedRows

EVERY_TOPIC: Final = "*"
"""Hints every listener, whatever it listens to."""
ANYBODY: Final = "any:"
"""Prefix of topics whose work any process may do: if one listens here, the others sleep on."""

POLL_FIRST_S: Final = 0.005
POLL_MAX_S: Final = 1.0
POLLS_PER_IDLE_TIME: Final = 8
"""After a second without work, look again after an eighth of that."""
LOOKS_PER_IDLE_TIME: Final = 4
TOPIC: Final = "topic"
"""The column in which a statement says whom else to wake."""


def topics_in(rows: Sequence[Mapping[str, object]]) -> set[str]:
    """What a statement has found to be hinted at, if it looks for that."""
    columns = rows.columns if isinstance(rows, FetchedRows) else rows[0] if rows else ()
    return {str(row[TOPIC]) for row in rows} if TOPIC in columns else set()


def poll_s(idle_s: float) -> float:
    """How long to wait before looking again, without hints, after so long without work."""
    return max(POLL_FIRST_S, min(idle_s / POLLS_PER_IDLE_TIME, POLL_MAX_S))


def look_s(idle_s: float, first_s: float, max_s: float) -> float:
    """The same where hints arrive: for what was not hinted, or whose hint was lost."""
    return max(first_s, min(idle_s / LOOKS_PER_IDLE_TIME, max_s))


class HintBoard:
    """Who listens to what."""

    def __init__(self) -> None:
        self._listeners: dict[str, WeakKeyDictionary[Listener, None]] = {}
        self.live = True
        """Whether hints from other processes arrive here by themselves."""
        self.has_waiting = asyncio.Event()
        """Set while a listener waits: there is no need to look for foreign hints otherwise."""
        self._waiting = 0
        self._waited_s = 0.0
        self._waiting_since_s = 0.0

    @property
    def waited_s(self) -> float:
        """How long listeners have waited in total."""
        now_s = time.monotonic() - self._waiting_since_s if self._waiting else 0.0
        return self._waited_s + now_s

    def publish(self, topics: Iterable[str]) -> None:
        for topic in topics:
            if topic == EVERY_TOPIC:
                for listeners in self._listeners.values():
                    _wake(listeners)
            elif topic in self._listeners:
                _wake(self._listeners[topic])

    def for_others(self, topics: Iterable[str]) -> set[str]:
        """Those topics that other processes have to hear of too."""
        return {
            topic for topic in topics if not (topic.startswith(ANYBODY) and self.is_awaited(topic))
        }

    def is_awaited(self, topic: str) -> bool:
        """Whether anyone here listens for the topic."""
        return bool(self._listeners.get(topic))

    def listen(self, topics: Sequence[str]) -> "Listener":
        listener = Listener(self, topics)
        for topic in topics:
            self._listeners.setdefault(topic, WeakKeyDictionary())[listener] = None
        return listener

    def count_waiting(self, change: int) -> None:
        self._waited_s, self._waiting_since_s = self.waited_s, time.monotonic()
        self._waiting += change
        if self._waiting:
            self.has_waiting.set()
        else:
            self.has_waiting.clear()

    def forget(self, listener: "Listener") -> None:
        for topic in listener.topics:
            listeners = self._listeners.get(topic)
            if listeners is not None:
                listeners.pop(listener, None)
                if not listeners:
                    del self._listeners[topic]


class HintingStore:
    """What stores have in common whose hints arrive on a board."""

    def __init__(self) -> None:
        self._board = HintBoard()

    def hints(self, topics: Sequence[str]) -> "Listener":
        return self._board.listen(topics)

    def is_awaited(self, topic: str) -> bool:
        return self._board.is_awaited(topic)

    @property
    def hints_are_live(self) -> bool:
        return self._board.live


class Listener:
    """Waits for hints on its topics. While the board is not live it polls, in step with the load:
    at once where there was just something to do, rarely where there is never anything."""

    def __init__(self, board: HintBoard, topics: Sequence[str]) -> None:
        self.topics = tuple(topics)
        self._board = board
        self._hinted = asyncio.Event()
        self._busy_at_s = time.monotonic()

    async def wait(self, timeout_s: float) -> bool:
        if not self._board.live:
            timeout_s = min(timeout_s, poll_s(time.monotonic() - self._busy_at_s))
        hinted = await self._wait(timeout_s)
        if hinted:
            self.found_work()
        return hinted

    async def look_out(self, first_s: float, max_s: float) -> bool:
        return await self.wait(look_s(time.monotonic() - self._busy_at_s, first_s, max_s))

    def take(self) -> bool:
        hinted = self._hinted.is_set()
        self._hinted.clear()
        return hinted

    def found_work(self) -> None:
        self._busy_at_s = time.monotonic()

    def wake(self) -> None:
        self._hinted.set()

    def close(self) -> None:
        self._board.forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def _wait(self, timeout_s: float) -> bool:
        self._board.count_waiting(+1)
        try:
            async with asyncio.timeout(timeout_s):
                await self._hinted.wait()
        except TimeoutError:
            return False
        finally:
            self._board.count_waiting(-1)
        self._hinted.clear()
        return True


def _wake(listeners: Iterable[Listener]) -> None:
    for listener in list(listeners):
        listener.wake()
