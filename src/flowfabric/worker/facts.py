"""What a handler may ask about its own execution."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from flowfabric.core.ids import AttemptId
from flowfabric.core.schedules import DUE_TAG
from flowfabric.worker.services import Verbs, on_loop


class Facts(Verbs):
    """The part of a context that only tells."""

    @property
    def attempt_id(self) -> AttemptId:
        """Another one in every attempt; the same after a sleep or a wait."""
        return self._services.lease.claimed.attempt_id

    @property
    def lease_remaining(self) -> timedelta:
        """How long the lease is known to last. It is renewed all the time: a number that shrinks
        towards zero means that the database does not answer."""
        left_s = self._services.lease.left_s
        return timedelta.max if math.isinf(left_s) else timedelta(seconds=max(0.0, left_s))

    @on_loop
    async def tags(self) -> Mapping[str, str]:
        """The tags of the execution as they are now."""
        return await self._services.tags()

    @on_loop
    async def scheduled_for(self) -> datetime | None:
        """The due time it was created for, if a schedule has created it."""
        due_ms = (await self._services.tags()).get(DUE_TAG)
        return None if due_ms is None else datetime.fromtimestamp(int(due_ms) / 1_000, UTC)


class BlockingFacts:
    """The same for plain functions, which run in a thread."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def tags(self) -> Mapping[str, str]:
        return self._facts._services.wait(self._facts.tags())

    def scheduled_for(self) -> datetime | None:
        return self._facts._services.wait(self._facts.scheduled_for())
