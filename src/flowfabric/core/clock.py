"""What time it is where no database server says so.

The processes that share a file run on one machine. They count time since it started,
which nobody can set, from an anchor they share: what the wall clock showed when the
machine started. When the wall clock is set the anchor follows, since schedules
and deadlines are meant by it; what counts time from one moment to another, as a lease
does, moves along and lasts as long as it was to last.
"""

from typing import Final

from msgspec import Struct

JUMP_MS: Final = 1_000
"""Smaller differences are left alone: clocks that are corrected gently stay below."""


class Anchor(Struct, frozen=True, kw_only=True):
    boot_id: str
    """Which start of the machine it belongs to."""
    started_at_ms: int
    """What the wall clock would have shown then."""


class Anchored(Struct, frozen=True, kw_only=True):
    anchor: Anchor
    """The one to count from now on."""
    moved_ms: int
    """By how much to move everything that counts time."""


def decide_anchor(known: Anchor | None, *, boot_id: str, wall_ms: int, uptime_ms: int) -> Anchored:
    """Keep the anchor, make one, or follow a wall clock that was set."""
    seen = Anchor(boot_id=boot_id, started_at_ms=wall_ms - uptime_ms)
    if known is None or known.boot_id != boot_id:
        # Nothing that ran before the machine started is left to hold anything.
        return Anchored(anchor=seen, moved_ms=0)
    moved_ms = seen.started_at_ms - known.started_at_ms
    if abs(moved_ms) <= JUMP_MS:
        return Anchored(anchor=known, moved_ms=0)
    return Anchored(anchor=seen, moved_ms=moved_ms)
