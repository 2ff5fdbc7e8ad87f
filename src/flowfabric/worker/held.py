"""A lease as its worker knows it.

The worker's own clock never decides who owns what; the database does. It only
bounds how long the worker may believe: a lease that was last confirmed longer
ago than it lasts may belong to somebody else by now. That is counted from before
the question was sent, by a clock that nobody sets and that goes on while the
process or the whole machine stands still.
"""

import time
from collections.abc import Callable
from typing import Final

from flowfabric.core.handles import Handle, HandleKind
from flowfabric.core.limits import FENCE_MS_MAX
from flowfabric.core.results import Claimed
from flowfabric.engine.creation import BrokenBy
from flowfabric.errors import LeaseExpired

UNSETTLED_S: Final = 1.0
"""How long a worker goes on after a fence without knowing whether its transaction committed."""
ENDED: Final = "its time is over and it was not renewed"

# The monotonic clock of Linux stands still while the machine is suspended; leases do not.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock_s() -> float:
    """Seconds since some moment, suspended or not."""
    return time.clock_gettime(_CLOCK)


class HeldLease:
    """What a worker holds, when that was last confirmed, and whom to tell when it is gone."""

    def __init__(self, claimed: Claimed, asked_at_s: float) -> None:
        """`asked_at_s` is the time by `clock_s` just before the claim was sent."""
        self.claimed = claimed
        self.ttl_s = claimed.handle.lease_ttl_ms / 1_000
        self.valid_until_s = asked_at_s + self.ttl_s
        self.on_lost: Callable[[str], None] | None = None
        self.lost: str | None = None
        """Why the lease is gone; None while it is believed to be held."""
        self.fenced = 0
        """How many transactions of the handler hold the execution's row: it needs, and gets,
        no renewal while one does, since nobody can take the lease before that one ends."""
        self.unsettled = False
        """Whether such a transaction may still be about to commit, and with it a longer lease."""
        self.renew_soon: Callable[[], None] | None = None
        self.broken_by: BrokenBy | None = None
        """Tells whether an outage ended the transaction of the latest fence."""
        self._fenced_until_s = 0.0
        self.settled = False
        """Set when the end has been reported: losing the lease means nothing any more."""
        self._store_ms_at_zero = claimed.lease_expires_at_ms - claimed.handle.lease_ttl_ms
        self._zero_s = clock_s()

    @property
    def handle(self) -> Handle:
        return self.claimed.handle

    @property
    def first_run(self) -> bool:
        """Whether no run of the handler came before this one, and has left something behind."""
        return self.handle.kind is HandleKind.FRESH and self.handle.attempt_index == 0

    @property
    def log_fields(self) -> dict[str, object]:
        """What every log record about it carries."""
        claimed = self.claimed
        return {
            "execution_id": claimed.execution_id,
            "attempt_index": claimed.attempt_index,
            "worker_instance_id": claimed.handle.worker_instance_id,
            "task": claimed.execution_kind,
        }

    def confirm(self, asked_at_s: float) -> None:
        self.unsettled = False
        self.valid_until_s = max(self.valid_until_s, asked_at_s + self.ttl_s)

    @property
    def left_s(self) -> float:
        """How long the lease may still be live."""
        ends_at_s = self._fenced_until_s if self.fenced else self.valid_until_s
        return ends_at_s - clock_s()

    def may_be_live(self) -> bool:
        return self.lost is None and self.left_s > 0

    def check(self) -> None:
        """Give it up if its time is over: the process may have stood still since it was renewed."""
        if self.left_s <= 0:
            self.lose(ENDED)

    def require(self) -> None:
        """Raise unless it may be live."""
        self.check()
        if self.lost is not None:
            raise LeaseExpired(f"the lease of {self.handle.execution_id} is gone: {self.lost}")

    def enter_fence(self, asked_at_s: float, broken_by: BrokenBy) -> None:
        self.fenced += 1
        self.broken_by = broken_by
        self._fenced_until_s = asked_at_s + max(FENCE_MS_MAX / 1_000, self.ttl_s)

    def leave_fence(self) -> None:
        """From here on it is up to the transaction, which commits a longer lease or none."""
        self.fenced -= 1
        self.unsettled = True
        self.still_locked(clock_s())
        if self.renew_soon is not None:
            self.renew_soon()

    def still_locked(self, asked_at_s: float) -> None:
        """Somebody has the row locked, maybe the fence: nobody could take the lease so far."""
        if self.unsettled:
            until_s = min(asked_at_s + UNSETTLED_S, self._fenced_until_s)
            self.valid_until_s = max(self.valid_until_s, until_s)

    def lose(self, reason: str) -> None:
        """Tell the handler, once."""
        if self.settled or self.lost is not None:
            return
        self.lost = reason
        if self.on_lost is not None:
            self.on_lost(reason)

    def store_now_ms(self) -> int:
        """About what the store's clock shows now."""
        return self._store_ms_at_zero + round((clock_s() - self._zero_s) * 1_000)
