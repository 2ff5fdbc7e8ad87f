"""How long a statement may take, as whoever asks for it says.

A network can swallow a statement or its answer without a word. Whoever must know in
time, as a worker about its leases, says how long it can wait; everybody else waits
for as long as the store allows. A statement that takes longer has timed out, and its
connection is given up.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_patience_s: ContextVar[float | None] = ContextVar("flowfabric_patience_s", default=None)


def patience_s(at_most_s: float | None = None) -> float | None:
    """How long a statement may take here; None leaves it to the store."""
    said_s = _patience_s.get()
    if said_s is None or at_most_s is None:
        return at_most_s if said_s is None else said_s
    return min(said_s, at_most_s)


@contextmanager
def statements_within(seconds: float) -> Iterator[None]:
    """Each statement of this block, and each connection made for it, in so many seconds."""
    before = _patience_s.set(seconds)
    try:
        yield
    finally:
        _patience_s.reset(before)
