"""A slow look at the members of all flows, and at all who wait, for what was left behind.

The dispatcher works off what endings queue, in the transaction that wrote them, so this
finds nothing. Should rows ever contradict each other, nobody waits for ever: each look
continues where the last one ended, and whichever process comes first makes it.
"""

from collections.abc import Sequence

from msgspec import Struct

from flowfabric.core.checks import check_int
from flowfabric.core.flow_endings import Ending, next_audit, overlooked, requeued
from flowfabric.core.flow_records import EdgeGroup, FlowAudit, FlowRecord
from flowfabric.core.ids import ExecutionId, FlowId
from flowfabric.core.limits import AUDIT_BATCH
from flowfabric.core.records import Execution, Waiter
from flowfabric.core.states import LifecyclePhase
from flowfabric.core.transitions import NO_CHANGES, Changes
from flowfabric.core.views import recounted
from flowfabric.engine.flow_dispatch import open_edges
from flowfabric.engine.flows import Flows, member_counts
from flowfabric.engine.operators import Swept
from flowfabric.engine.steps import find_stranded, wake_stranded
from flowfabric.engine.unit import MEMBER_CANCEL_TOPIC, execution_key, row_execution_id
from flowfabric.store.base import Row, Transaction

AUDIT_KEY = (1,)


class Suspects(Struct, frozen=True):
    """What a look has found."""

    members: dict[FlowId, list[ExecutionId]] = {}
    waits: tuple[Waiter, ...] = ()
    """For executions that are gone."""


class FlowAudits(Flows):
    async def audit_flows(self, *, limit: int = AUDIT_BATCH) -> Swept:
        """Look at the next members of all flows, if it is time, and free those left behind.

        So are executions that wait for one that is gone.
        """
        check_int("limit", limit, 1, AUDIT_BATCH)

        async def body(tx: Transaction) -> Suspects:
            return await _look(tx, limit)

        suspects = await self.store.transact(body)
        freed = 0
        for flow_id, members in suspects.members.items():
            freed += await self._mend(flow_id, members)
        if suspects.waits:
            freed += await self.store.transact(
                lambda tx: wake_stranded(tx, suspects.waits, self.timing)
            )
        return Swept(acted=freed, full=False)

    async def _mend(self, flow_id: FlowId, member_ids: Sequence[ExecutionId]) -> int:
        """Decide again under the flow's lock, for meanwhile all may be well."""

        async def body(tx: Transaction) -> int:
            flow = await self.find_to_lock(tx, flow_id)
            if flow is None:
                return 0
            keys = [execution_key(each) for each in sorted(member_ids)]
            members = {e.execution_id: e for e in (await tx.get(Execution, keys)).values()}
            queued = await self._requeue(tx, flow, members)
            told = await self._tell(tx, members)
            freed = await self._free(tx, flow, members)
            return queued + told + freed + await self._recount(tx, flow)

        return await self.store.transact(body)

    async def _requeue(
        self, tx: Transaction, flow: FlowRecord, members: dict[ExecutionId, Execution]
    ) -> int:
        """Queue members that are marked for cancellation and are queued no more."""
        now_ms = await tx.now_ms()
        wanted = [
            row for each in members.values() if (row := requeued(flow, each, now_ms)) is not None
        ]
        if not wanted:
            return 0
        tx.hint(MEMBER_CANCEL_TOPIC)
        return len(await tx.insert_new(wanted))

    async def _tell(self, tx: Transaction, members: dict[ExecutionId, Execution]) -> int:
        """Resolve open edges out of members that have ended."""
        ended = [e for e in members.values() if e.lifecycle_phase is LifecyclePhase.TERMINAL]
        untold = await open_edges(tx, {each.execution_id: each.replay_count for each in ended})
        if not untold:
            return 0
        groups = await tx.lock(
            EdgeGroup, sorted({execution_key(edge.downstream_id) for edge in untold})
        )
        endings = {
            each.execution_id: Ending(
                outcome=each.terminal_outcome,
                replay_count=each.replay_count,
                result=each.result,
                result_encoding=each.result_encoding,
            )
            for each in ended
        }
        by_downstream = {group.downstream_id: group for group in groups.values()}
        await self.settle_edges(tx, untold, by_downstream, endings)
        return len(untold)

    async def _free(
        self, tx: Transaction, flow: FlowRecord, members: dict[ExecutionId, Execution]
    ) -> int:
        """Let go members that nothing holds back."""
        keys = [execution_key(each) for each in sorted(members)]
        groups = {g.downstream_id: g for g in (await tx.lock(EdgeGroup, keys)).values()}
        # Some of them may have been let go by now.
        current = await tx.lock(Execution, keys)
        fired = [
            group
            for each in current.values()
            if (group := overlooked(flow, each, groups.get(each.execution_id))) is not None
        ]
        if fired:
            await self.fire(tx, fired, (), NO_CHANGES)
        return len(fired)

    async def _recount(self, tx: Transaction, flow: FlowRecord) -> int:
        counted = recounted(flow, await member_counts(tx, flow.flow_id, "count_told_members"))
        if counted == flow:
            return 0
        settled = self.settled_flow(counted, await tx.now_ms())
        await tx.save(Changes(updates=(settled,)))
        return 1


async def _look(tx: Transaction, limit: int) -> Suspects:
    audit = (await tx.lock(FlowAudit, [AUDIT_KEY]))[AUDIT_KEY]
    now_ms = await tx.now_ms()
    if audit.due_at_ms > now_ms:
        return Suspects()
    rows = await tx.select(
        "audit_members",
        flow_id=audit.next_flow_id,
        execution_id=audit.next_execution_id,
        limit=limit,
    )
    full = bool(rows) and int(str(rows[-1]["place"])) == limit
    last = (str(rows[-1]["flow_id"]), str(rows[-1]["execution_id"])) if full else None
    waits, last_waiter = await find_stranded(tx, audit.after_waiter, limit)
    await tx.save(Changes(updates=(next_audit(audit, last, last_waiter, now_ms),)))
    return Suspects(_by_flow(rows), waits)


def _by_flow(rows: Sequence[Row]) -> dict[FlowId, list[ExecutionId]]:
    found: dict[FlowId, list[ExecutionId]] = {}
    for row in rows:
        if row["suspect"]:
            found.setdefault(FlowId(str(row["flow_id"])), []).append(row_execution_id(row))
    return found
