"""Forgetting: ended executions after their keep time, old events, used-up guards, unused kinds.

When an execution ends it gets the time after which it may go, so that the scan
for it is one index and a policy's own retention needs no special case. What somebody
waits for, and what a parent that has not ended may still ask for, is kept beyond it.
"""

from flowfabric.core.checks import check_int
from flowfabric.core.limits import BATCH_MAX, HELD_MS_MAX, HELD_MS_MIN, ROUTE_KEEP_MS, SWEEP_BATCH
from flowfabric.engine.operators import Swept
from flowfabric.engine.unit import Operations
from flowfabric.store.base import Transaction


class Retention(Operations):
    async def trim_retention(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Delete ended executions past their keep time, with all that belongs to them."""
        check_int("limit", limit, 1, BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            trimmed, looked_at = await trim_executions(tx, await tx.now_ms(), limit)
            return Swept(acted=trimmed, full=looked_at == limit)

        return await self.store.transact(body)

    async def trim_events(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Delete events as old as the event log reaches back."""
        return await self._trim("trim_events", self.config.event_retention_ms, limit)

    async def trim_guards(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Delete idempotency guards that have expired."""
        return await self._trim("trim_guards", 0, limit)

    async def trim_routes(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Forget kinds that no execution has and nobody has submitted lately."""
        check_int("limit", limit, 1, BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            now_ms = await tx.now_ms()
            due = await tx.select("due_routes", now_ms=now_ms, limit=limit)
            if not due:
                return Swept(acted=0, full=False)
            (row,) = await tx.select(
                "trim_routes",
                route_ids=[int(str(each["route_id"])) for each in due],
                retain_until_ms=now_ms + ROUTE_KEEP_MS,
            )
            return Swept(acted=int(str(row["trimmed"])), full=len(due) == limit)

        return await self.store.transact(body)

    async def _trim(self, name: str, age_ms: int, limit: int) -> Swept:
        check_int("limit", limit, 1, BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            before_ms = await tx.now_ms() - age_ms
            (row,) = await tx.select(name, before_ms=before_ms, limit=limit)
            trimmed = int(str(row["trimmed"]))
            # Events go as they were stored, several in a row: there may be more of them.
            return Swept(acted=trimmed, full=trimmed >= limit)

        return await self.store.transact(body)


async def trim_executions(tx: Transaction, before_ms: int, limit: int) -> tuple[int, int]:
    """Delete what is past its keep time and needed by nobody; tell how many of how many."""
    (row,) = await tx.select(
        "trim_executions",
        before_ms=before_ms,
        limit=limit,
        held_ms_min=HELD_MS_MIN,
        held_ms_max=HELD_MS_MAX,
    )
    return int(str(row["trimmed"])), int(str(row["looked_at"]))
