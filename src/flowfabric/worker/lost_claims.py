"""Claims whose answers were lost: what they were granted is looked for and taken up.

A claim marks the ids of its leases, so those that it was granted are found again by who sent it,
and by nobody else. The database may carry a claim out after its connection is gone, so it is
asked again a little later.
"""

import os
from typing import Final

from flowfabric.core.ids import MARK_BYTES, LeaseId
from flowfabric.core.results import Renewed
from flowfabric.core.workers import Offer
from flowfabric.engine.engine import Engine
from flowfabric.outages import statements_within
from flowfabric.worker.leases import HeldLease, clock_s

LOOKS_AFTER_S: Final = (0.5, 2.0)
"""How long after the first look the others come."""


class _Lost:
    """One mark, of claims that were not answered."""

    def __init__(self) -> None:
        self.due_s = 0.0
        self.looks = list(LOOKS_AFTER_S)
        self.taken: set[LeaseId] = set()


class LostClaims:
    """What a worker was given and does not know of."""

    def __init__(
        self, engine: Engine, offer: Offer, *, lease_ttl_ms: int, patience_s: float
    ) -> None:
        self._engine = engine
        self._offer = offer
        self._lease_ttl_ms = lease_ttl_ms
        self._patience_s = patience_s
        self._lost: dict[str, _Lost] = {}

    def note(self, mark: str) -> None:
        """The claim with this mark was not answered."""
        self._lost[mark] = _Lost()

    @property
    def due_in_s(self) -> float | None:
        """When to look next; None if nothing is missing."""
        if not self._lost:
            return None
        return max(0.0, min(each.due_s for each in self._lost.values()) - clock_s())

    async def find(self, *, all_now: bool = False) -> list[HeldLease]:
        """What has been granted, as far as it is time to look, renewed."""
        found: list[HeldLease] = []
        for mark, lost in list(self._lost.items()):
            if all_now or lost.due_s <= clock_s():
                found += await self._find(mark, lost)
                if not lost.looks:
                    del self._lost[mark]
                    continue
                lost.due_s = clock_s() + lost.looks.pop(0)
        return found

    async def _find(self, mark: str, lost: _Lost) -> list[HeldLease]:
        worker = self._offer.worker
        with statements_within(self._patience_s):
            granted = await self._engine.find_claimed(
                mark,
                worker_id=worker.worker_id,
                worker_instance_id=worker.worker_instance_id,
                namespace=self._offer.namespace,
                lease_ttl_ms=self._lease_ttl_ms,
            )
            new = [each for each in granted if each.handle.lease_id not in lost.taken]
            asked_at_s = clock_s()
            answers = await self._engine.renew_many([each.handle for each in new])
        held = [
            HeldLease(each, asked_at_s)
            for each, answer in zip(new, answers, strict=True)
            if isinstance(answer, Renewed)
        ]
        lost.taken.update(lease.handle.lease_id for lease in held)
        return held


def new_mark() -> str:
    """For one claim: what an answered claim was granted must not be found a second time."""
    return os.urandom(MARK_BYTES).hex()
