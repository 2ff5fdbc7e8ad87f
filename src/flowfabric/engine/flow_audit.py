"""A slow audit of all flow members and waiters, for any that were missed.

The dispatcher works off what endings queue, in the transaction that wrote them, so this
finds nothing. Should rows ever contradict each other, no member waits for ever: each look
continues where the last one ended, and whichever process comes first makes it.
"""

from collections.abc import Sequence

from msgspec import Struct

from flowfabric.core import bounds, flow_records
from flowfabric.core import flow_audit as rules
from flowfabric.core.checks import check_int
from flowfabric.core.decisions import NO_CHANGES, Changes
from flowfabric.core.flow_joins import recounted
from flowfabric.core.ids import ExecutionId, FlowId, uuid_of
from flowfabric.core.records import Execution, Waiter
from flowfabric.engine import shell, topics
from flowfabric.engine.flow_endings import open_edges
from flowfabric.engine.flows import FlowGroup, endings_of, lock_groups, member_counts
from flowfabric.engine.parking import find_stranded, wake_stranded
from flowfabric.engine.shell import Swept
from flowfabric.store.base import Transaction

AUDIT_KEY = (1,)


class Suspects(Struct, frozen=True):
    """What a look shows to be left behind."""

    members: dict[FlowId, list[ExecutionId]] = {}
    waits: tuple[Waiter, ...] = ()
    """For executions that are gone."""


class FlowAudits(FlowGroup):
    async def audit_flows(self, *, limit: int = bounds.AUDIT_BATCH) -> Swept:
        """Look at the next members of all flows, if it is time, and free those left behind.

        So are executions that wait for one that is gone.
        """
        check_int("limit", limit, 1, bounds.AUDIT_BATCH)
        suspects = await self.store.transact(lambda tx: _take_turn(tx, limit))
        freed = 0
        for flow_id, members in suspects.members.items():
            freed += await self._mend(flow_id, members)
        if suspects.waits:
            freed += await self.store.transact(
                lambda tx: wake_stranded(tx, suspects.waits, self.shell.timing)
            )
        return Swept(acted=freed, full=False)

    async def _mend(self, flow_id: FlowId, member_ids: Sequence[ExecutionId]) -> int:
        """Decide again under the flow's lock: the problem may have resolved itself since."""

        async def body(tx: Transaction) -> int:
            flow = await self.lock_flow_or_none(tx, flow_id)
            if flow is None:
                return 0
            keys = [shell.execution_key(each) for each in sorted(member_ids)]
            members = {e.execution_id: e for e in (await tx.get(Execution, keys)).values()}
            queued = await self._requeue(tx, flow, members)
            resolved = await self._tell(tx, flow, member_ids)
            freed = await self._free(tx, flow, members)
            return queued + resolved + freed + await self._recount(tx, flow)

        return await self.store.transact(body)

    async def _requeue(
        self, tx: Transaction, flow: flow_records.FlowRecord, members: dict[ExecutionId, Execution]
    ) -> int:
        """Queue members again that are marked for cancellation but not queued."""
        now_ms = await tx.now_ms()
        wanted = [
            row
            for each in members.values()
            if (row := rules.requeued(flow, each, now_ms)) is not None
        ]
        if not wanted:
            return 0
        tx.hint(topics.MEMBER_CANCEL_TOPIC)
        return len(await tx.insert_new(wanted))

    async def _tell(
        self, tx: Transaction, flow: flow_records.FlowRecord, member_ids: Sequence[ExecutionId]
    ) -> int:
        """Resolve open edges out of members that have ended."""
        endings = await endings_of(tx, flow.partition_key, member_ids)
        untold = await open_edges(tx, {key: each.replay_count for key, each in endings.items()})
        if untold:
            groups = await lock_groups(tx, (edge.downstream_id for edge in untold))
            await self.resolve_edges(tx, untold, groups, endings)
        return len(untold)

    async def _free(
        self, tx: Transaction, flow: flow_records.FlowRecord, members: dict[ExecutionId, Execution]
    ) -> int:
        """Release members that nothing holds back."""
        groups = await lock_groups(tx, members)
        # Some of them may have been released by now.
        current = await tx.lock(Execution, [shell.execution_key(each) for each in sorted(members)])
        fired = [
            group
            for each in current.values()
            if (group := rules.overlooked(flow, each, groups.get(each.execution_id))) is not None
        ]
        if fired:
            await self.fire(tx, fired, (), NO_CHANGES)
        return len(fired)

    async def _recount(self, tx: Transaction, flow: flow_records.FlowRecord) -> int:
        counted = recounted(flow, await member_counts(tx, flow.flow_id, "count_told_members"))
        if counted == flow:
            return 0
        derived = self.with_derived_state(counted, await tx.now_ms())
        await tx.save(Changes(updates=(derived,)))
        return 1


async def _take_turn(tx: Transaction, limit: int) -> Suspects:
    audit = (await tx.lock(flow_records.FlowAudit, [AUDIT_KEY]))[AUDIT_KEY]
    now_ms = await tx.now_ms()
    if audit.due_at_ms > now_ms:
        return Suspects()
    rows = await tx.select_as(
        SuspectRow,
        "audit_members",
        flow_id=audit.next_flow_id,
        execution_id=audit.next_execution_id,
        limit=limit,
    )
    full = bool(rows) and rows[-1].place == limit
    last = (rows[-1].flow_id, uuid_of(rows[-1].execution_id)) if full else None
    waits, last_waiter = await find_stranded(tx, audit.after_waiter, limit)
    await tx.save(Changes(updates=(rules.next_audit(audit, last, last_waiter, now_ms),)))
    members: dict[FlowId, list[ExecutionId]] = {}
    for row in rows:
        if row.suspect:
            members.setdefault(row.flow_id, []).append(row.execution_id)
    return Suspects(members, waits)


class SuspectRow(Struct, frozen=True, kw_only=True):
    place: int
    flow_id: FlowId
    execution_id: ExecutionId
    suspect: bool
