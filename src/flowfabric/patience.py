"""How long a statement may take, as whoever asks for it says.

A network can swallow a statement or its answer without a word. Whoever must know in
time, as a worker about its leases, says how long it can wait; everybody else waits
for as long as the store allows. A statement that takes longer has timed out, and its
connection is given up.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

LEFT_MIN_S: Final = 0.001


class _Whole:
    """What everything within a block may take together.

    Tasks that the block starts and leaves behind are not held to it.
    """

    def __init__(self, seconds: float) -> None:
        self.is_over = False
        self._until_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float | None:
        return None if self.is_over else max(self._until_s - time.monotonic(), LEFT_MIN_S)


_patience_s: ContextVar[float | None] = ContextVar("flowfabric_patience_s", default=None)
_whole: ContextVar[_Whole | None] = ContextVar("flowfabric_whole_patience", default=None)


def patience_s(at_most_s: float | None = None) -> float | None:
    """How long a statement may take here; None leaves it to the store."""
    whole = _whole.get()
    left_s = None if whole is None else whole.left_s
    said = [each for each in (_patience_s.get(), left_s, at_most_s) if each is not None]
    return min(said, default=None)


def statements_within(seconds: float) -> "_Each":
    """Each statement of this block, and each connection made for it, in so many seconds."""
    return _Each(seconds)


class _Each:
    __slots__ = ("_before", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._before = _patience_s.set(self._seconds)

    def __exit__(self, *exc_info: object) -> None:
        _patience_s.reset(self._before)


@contextmanager
def everything_within(seconds: float) -> Iterator[None]:
    """All statements of this block and the wait for their connection, together."""
    whole = _Whole(seconds)
    before = _whole.set(whole)
    try:
        yield
    finally:
        whole.is_over = True
        _whole.reset(before)
