"""In which order outcomes reach a durable function, in its first run and in every later one.

A function that goes on in order of arrival, as a loop over `asyncio.as_completed` does,
calls what it calls because of the order in which it saw the outcomes of earlier calls. So
each outcome has a *position*, which is stored with its step, and every run delivers by
these rules:

1. Outcomes reach the function one at a time: the next one when the function has come to rest
   after the one before, that is, when it has asked for all it asks for without another.
2. The lowest position goes first. A position is allotted when an outcome is about to be stored;
   while that is under way, no later one is delivered.
3. A call that is not stored runs when every stored outcome was delivered: by then the function
   has come as far as the run before had come.
4. A stored outcome whose turn it is, but which nobody asks for, is waited for only a moment. The
   function may do something outside of steps before it asks, or may not ask at all.

So the function sees one sequence of outcomes, however often it runs, and makes the same
calls.
"""

import heapq
from collections import deque
from collections.abc import Iterable


class Order:
    """The outcomes of one run that have not reached the function yet."""

    def __init__(self) -> None:
        self._last = 0
        self._stored: set[int] = set()
        """Stored by earlier runs, and not delivered in this one."""
        self._expected: deque[int] = deque()
        """The same in order, without those that were waited for in vain."""
        self._asked_for: list[int] = []
        """Those of them the function waits for; a heap."""
        self._allotted: dict[int, bool] = {}
        """New ones in order, and whether they are stored by now."""
        self.whole = True
        """Whether all outcomes are stored that have reached the function before the last one."""
        self.reached: int | None = 0
        """The position of the last outcome delivered; none once one before it was left out, since
        the function has seen another sequence then."""

    def take_in(self, positions: Iterable[int]) -> None:
        """Know what earlier runs have stored."""
        self._stored.update(positions)
        self._expected.extend(sorted(self._stored))
        self._last = max(self._stored, default=0)
        self.whole = self._last == len(self._stored)

    def allot(self) -> int:
        """A position for a new outcome, which is about to be stored."""
        self._last += 1
        self._allotted[self._last] = False
        return self._last

    def wait(self, position: int) -> None:
        """The function can have this outcome: it was stored before, or is stored now."""
        if position in self._stored:
            heapq.heappush(self._asked_for, position)
        else:
            self._allotted[position] = True

    def deliver(self, position: int) -> None:
        """It reaches the function now."""
        self.reached = position if self.reached == position - 1 else None
        self.end(position)

    def end(self, position: int) -> None:
        """Nobody waits for it any more, or it has reached the function."""
        self._stored.discard(position)
        self._allotted.pop(position, None)

    def next(self, *, patient: bool = True) -> int | None:
        """What reaches the function now that it is at rest; `patient`, in its order."""
        if patient and self.expects:
            return None
        asked_for = self._first_asked_for()
        if asked_for is not None:
            return asked_for
        first = next(iter(self._allotted), None)
        return first if first is not None and self._allotted[first] else None

    @property
    def replaying(self) -> bool:
        """Whether some stored outcomes have not been delivered: they may be asked for yet."""
        return bool(self._stored)

    @property
    def may_run(self) -> bool:
        """Whether a call that is not stored runs now that the function is at rest."""
        return self._first_asked_for() is None and not self.expects

    @property
    def expects(self) -> bool:
        """Whether it is the turn of a stored outcome that nobody asks for."""
        while self._expected and self._expected[0] not in self._stored:
            self._expected.popleft()
        asked_for = self._first_asked_for()
        return bool(self._expected) and (asked_for is None or self._expected[0] < asked_for)

    def expect_no_more(self) -> None:
        """It was waited for long enough: others go first."""
        while self.expects:
            self._expected.popleft()

    def _first_asked_for(self) -> int | None:
        while self._asked_for and self._asked_for[0] not in self._stored:
            heapq.heappop(self._asked_for)
        return self._asked_for[0] if self._asked_for else None
