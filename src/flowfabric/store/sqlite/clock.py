"""The clock of a machine, as all its processes on one file read it.

Its anchor lies in the file. Whoever writes there and finds that the wall clock was set
moves the anchor, and with it the ends of leases and attempts, in the same transaction.
Who only reads counts from the anchor as it is. Where the machine does not tell its
starts apart, which only Linux does, the wall clock is all there is.
"""

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flowfabric.core.clock import Anchor, decide_anchor

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_FIND: Final = "select boot_id, started_at_ms from clock"
_PUT: Final = "insert or replace into clock (singleton, boot_id, started_at_ms) values (1, ?, ?)"
_MOVE: Final = """
update live
   set lease_expires_at_ms = lease_expires_at_ms + :moved_ms,
       lease_renewal_deadline_ms = lease_renewal_deadline_ms + :moved_ms,
       attempt_deadline_ms = attempt_deadline_ms + :moved_ms
 where ownership_state = 'leased'
   and lifecycle_phase = 'active'
"""


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _uptime_ms() -> int:
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", 0)) // 1_000_000


def _boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


@dataclass(frozen=True)
class Machine:
    """What a machine knows of time."""

    boot_id: str | None
    wall_ms: Callable[[], int] = _wall_ms
    uptime_ms: Callable[[], int] = _uptime_ms


THIS_MACHINE: Final = Machine(_boot_id())


class MachineClock:
    """A clock that goes on evenly while the wall clock is set."""

    def __init__(self, machine: Machine = THIS_MACHINE) -> None:
        self._machine = machine

    def now_ms(self) -> int:
        return self._machine.wall_ms()

    def now_on(self, connection: sqlite3.Connection, *, writes: bool) -> int:
        """The time in the file of `connection`; `writes` says whether it may be written to."""
        machine = self._machine
        if machine.boot_id is None:
            return machine.wall_ms()
        row = connection.execute(_FIND).fetchone()
        known = None if row is None else Anchor(boot_id=row[0], started_at_ms=row[1])
        uptime_ms = machine.uptime_ms()
        decided = decide_anchor(
            known, boot_id=machine.boot_id, wall_ms=machine.wall_ms(), uptime_ms=uptime_ms
        )
        anchor = decided.anchor
        if anchor != known:
            if writes:
                connection.execute(_PUT, (anchor.boot_id, anchor.started_at_ms))
                connection.execute(_MOVE, {"moved_ms": decided.moved_ms})
            elif known is not None and known.boot_id == anchor.boot_id:
                anchor = known
        return anchor.started_at_ms + uptime_ms
