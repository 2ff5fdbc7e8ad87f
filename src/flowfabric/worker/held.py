"""A lease as its worker knows it.

The worker's own clock never decides who owns what; the database does. It only
bounds how long the worker may believe: a lease that was last confirmed longer
ago than it lasts may belong to somebody else by now.
"""

import time
from collections.abc import Callable

from flowfabric.core.handles import Handle
from flowfabric.core.results import Claimed


class HeldLease:
    """What a worker holds, when that was last confirmed, and whom to tell when it is gone."""

    def __init__(self, claimed: Claimed, asked_at_s: float) -> None:
        """`asked_at_s` is the monotonic time just before the claim was sent."""
        self.claimed = claimed
        self.ttl_s = claimed.handle.lease_ttl_ms / 1_000
        self.valid_until_s = asked_at_s + self.ttl_s
        self.on_lost: Callable[[str], None] | None = None
        self.lost: str | None = None
        """Why the lease is gone; None while it is believed to be held."""
        self.fenced = 0
        """How many transactions of the handler hold the execution's row: it needs, and gets,
        no renewal while one does, since nobody can take the lease before that one ends."""
        self.settled = False
        """Set when the end has been reported: losing the lease means nothing any more."""
        self._store_ms_at_zero = claimed.lease_expires_at_ms - claimed.handle.lease_ttl_ms
        self._zero_s = time.monotonic()

    @property
    def handle(self) -> Handle:
        return self.claimed.handle

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
        self.valid_until_s = max(self.valid_until_s, asked_at_s + self.ttl_s)

    def may_be_live(self) -> bool:
        return self.lost is None and time.monotonic() < self.valid_until_s

    def lose(self, reason: str) -> None:
        """Tell the handler, once."""
        if self.settled or self.lost is not None:
            return
        self.lost = reason
        if self.on_lost is not None:
            self.on_lost(reason)

    def store_now_ms(self) -> int:
        """About what the store's clock shows now."""
        return self._store_ms_at_zero + round((time.monotonic() - self._zero_s) * 1_000)
