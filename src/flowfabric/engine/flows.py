"""Flows: what every operation on them works with.

The lock of a flow's row guards its edges and groups, so operations on one flow take
turns and those on different flows do not meet. Members are locked after their flow.

A member's end resolves the edges out of it (`resolve_edges`). Groups that fire by that
release their downstreams (`release_changes`), each as `core.flow_endings.release` decides.
Past its keep time, a flow is deleted with all its members (`forget`).
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import flow_joins
from flowfabric.core.decisions import NO_CHANGES, Changes, Subject, combine, held_until_ms
from flowfabric.core.flow_endings import Ending, Resolution, release, resolve_edges
from flowfabric.core.flow_records import Edge, ExecutionInput, FlowRecord, GroupState, JoinRecord
from flowfabric.core.ids import (
    EdgeId,
    ExecutionId,
    FlowId,
    parse_uuid,
    partition_for,
    partition_of,
    uuid_of,
)
from flowfabric.core.records import Execution
from flowfabric.core.states import PublicState, TerminalOutcome
from flowfabric.engine import shell, topics
from flowfabric.engine.executions import Executions
from flowfabric.engine.shell import Shell
from flowfabric.engine.sweeps import trim_executions
from flowfabric.store.base import Parameter, Reader, Transaction

TROUBLE = (errors.Corruption, errors.Bug, errors.RetryExhausted)
"""How the rows of one member, or a lock on them, can fail a whole batch."""


class ResolvedEdges(Struct, frozen=True, kw_only=True):
    """What resolving some edges did."""

    resolution: Resolution
    children: Changes
    """What became of the executions whose groups fired."""


def forgotten(flow: FlowRecord, now_ms: int) -> bool:
    """Whether the flow is past its keep time: it counts as gone, deleted or not."""
    return flow.retain_until_ms is not None and flow.retain_until_ms <= now_ms


async def member_counts(
    reader: Reader, flow_id: FlowId, statement: str = "count_flow_members"
) -> flow_joins.MemberCounts:
    """How many members of a flow are in which state."""
    satisfied, impossible = flow_joins.SIBLING_REASONS
    rows = await reader.select_as(
        CountRow, statement, flow_id=flow_id, satisfied=satisfied, impossible=impossible
    )
    return flow_joins.MemberCounts(
        {row.public_state: row.members for row in rows},
        sum(row.spared for row in rows if row.public_state is PublicState.CANCELLED),
        tuple(row.last_ended_at_ms for row in rows if row.last_ended_at_ms is not None),
    )


class CountRow(Struct, frozen=True, kw_only=True):
    public_state: PublicState
    members: int
    spared: int
    last_ended_at_ms: int | None = None


async def inputs_of(
    reader: Reader, execution_ids: Sequence[ExecutionId]
) -> dict[ExecutionId, dict[str, ExecutionInput]]:
    """What upstreams passed to executions, by edge, in the order in which it arrived."""
    if not execution_ids:
        return {}
    inputs: dict[ExecutionId, dict[str, ExecutionInput]] = {}
    for each in await reader.select_records(
        ExecutionInput, "inputs_of_executions", **shell.id_columns(execution_ids)
    ):
        inputs.setdefault(each.execution_id, {})[each.edge_id] = each
    return inputs


async def passed_to(
    reader: Reader, fired: Sequence[JoinRecord], new_inputs: Sequence[ExecutionInput]
) -> dict[ExecutionId, dict[str, ExecutionInput]]:
    """What upstreams pass to the downstreams of groups that fired: stored before, and new."""
    passing = {
        group.downstream_id: group.named_inputs
        for group in fired
        if group.named_inputs and group.group_state is GroupState.SATISFIED
    }
    inputs: dict[ExecutionId, dict[str, ExecutionInput]] = {each: {} for each in passing}
    for each in new_inputs:
        if each.execution_id in passing:
            inputs[each.execution_id][each.edge_id] = each
    # Where all are new there is nothing to look for.
    stored = await inputs_of(reader, [i for i, named in passing.items() if named > len(inputs[i])])
    return inputs | {each: stored.get(each, {}) | inputs[each] for each in stored}


async def endings_of(
    reader: Reader, partition_key: int, execution_ids: Sequence[ExecutionId]
) -> dict[ExecutionId, Ending]:
    """How executions ended, those that have."""
    if not execution_ids:
        return {}
    rows = await reader.select_as(
        KnownEnding,
        "results_of_executions",
        partition_key=partition_key,
        execution_ids=[uuid_of(each) for each in execution_ids],
    )
    return {row.execution_id: row for row in rows}


class KnownEnding(Ending, frozen=True, kw_only=True):
    execution_id: ExecutionId


def skipped_among(changes: Changes) -> list[ExecutionId]:
    return [
        record.execution_id
        for record in changes.updates
        if isinstance(record, Execution) and record.terminal_outcome is TerminalOutcome.SKIPPED
    ]


async def lock_groups(
    tx: Transaction, downstream_ids: Iterable[ExecutionId]
) -> dict[ExecutionId, JoinRecord]:
    keys = [shell.execution_key(each) for each in sorted(set(downstream_ids))]
    return {each.downstream_id: each for each in (await tx.lock(JoinRecord, keys)).values()}


async def lock_edge(tx: Transaction, flow: FlowRecord, edge_id: EdgeId) -> Edge | None:
    return await tx.lock_one(Edge, (flow.partition_key, flow.flow_id, edge_id))


def check_edge_id(edge_id: object) -> EdgeId:
    return EdgeId(parse_uuid("edge_id", edge_id))


# Forgetting a flow as a whole, once all its members have ended
#
# Members carry no keep time of their own, so none is deleted while others may still ask how it
# ended. When the flow's time is over they get it, and go like any execution; a member that is
# still needed outside keeps the whole flow. Past its keep time a flow is gone for every
# operation, also while a large one is still being deleted batch by batch.


class Forgot(Struct, frozen=True, kw_only=True):
    """What a step of deleting flows did."""

    acted: int
    more: bool = False
    """Whether the next step will do more."""
    complete: bool = False
    """Whether nothing deletable is left of any of the flows."""


async def forget(tx: Transaction, due: Sequence[FlowRecord], limit: int) -> Forgot:
    """Delete the next rows of flows past their keep time; the caller has locked them."""
    now_ms = await tx.now_ms()
    flows = await _let_go(tx, due, now_ms)
    if not flows:
        return Forgot(acted=0, complete=True)
    which = _which(flows)
    (released,) = await tx.select_as(
        int, "release_flow_members", now_ms=now_ms, limit=limit, **which
    )
    if released or await tx.select("any_flow_member", **which):
        trimmed = (await trim_executions(tx, now_ms, limit)).trimmed
        return Forgot(acted=max(released, trimmed), more=bool(released or trimmed))
    (trimmed,) = await tx.select_as(int, "trim_flow_edges", limit=limit, **which)
    if trimmed == limit:
        return Forgot(acted=trimmed, more=True)
    await tx.select("delete_flows", **which)
    return Forgot(acted=trimmed + len(flows), complete=True)


async def _let_go(tx: Transaction, flows: Sequence[FlowRecord], now_ms: int) -> list[FlowRecord]:
    """The flows that can be deleted. A flow with a member that is still needed is kept entirely."""
    fresh = [flow for flow in flows if not flow.going]
    needed = set(await tx.select_as(FlowId, "needed_flows", **_which(fresh)) if fresh else [])
    held = tuple(
        structs.replace(
            flow, retain_until_ms=held_until_ms(flow.ended_at_ms or flow.created_at_ms, now_ms)
        )
        for flow in fresh
        if flow.flow_id in needed
    )
    going = tuple(structs.replace(flow, going=True) for flow in fresh if flow.flow_id not in needed)
    await tx.save(Changes(updates=(*held, *going)))
    return [flow for flow in flows if flow.flow_id not in needed]


def _which(flows: Sequence[FlowRecord]) -> dict[str, Parameter]:
    return {
        "partition_keys": [flow.partition_key for flow in flows],
        "flow_ids": [flow.flow_id for flow in flows],
    }


class FlowGroup(shell.Group):
    """Operations on flows."""

    def __init__(self, shell: Shell, executions: Executions) -> None:
        super().__init__(shell)
        self.executions = executions

    # Input

    def check_flow_id(self, flow_id: object) -> FlowId:
        return FlowId(parse_uuid("flow_id", flow_id))

    def flow_key(self, flow_id: FlowId) -> tuple[int, FlowId]:
        return partition_for(flow_id, self.shell.deployment.partitions), flow_id

    def check_member_id(
        self, flow_id: FlowId, execution_id: object, field: str = "execution_id"
    ) -> ExecutionId:
        """An execution id that can belong to the flow: both live in one partition."""
        member_id = self.shell.check_execution_id(execution_id, field)
        partition_key, _ = self.flow_key(flow_id)
        if partition_of(member_id) != partition_key:
            raise errors.InvalidInput(
                field,
                f"is in another partition than flow {flow_id}, whose members are"
                f" in {{fp:{partition_key}}}",
                member_id,
            )
        return member_id

    def check_ends(
        self, flow_id: FlowId, upstream_id: object, downstream_id: object
    ) -> tuple[ExecutionId, ExecutionId]:
        """The two ends of an edge."""
        return (
            self.check_member_id(flow_id, upstream_id, "upstream_execution_id"),
            self.check_member_id(flow_id, downstream_id, "downstream_execution_id"),
        )

    # Rows

    async def lock_flow(self, tx: Transaction, flow_id: FlowId) -> FlowRecord:
        flow = await self.lock_flow_or_none(tx, flow_id)
        if flow is None:
            raise errors.NotFound("flow", flow_id)
        return flow

    async def lock_flow_or_none(self, tx: Transaction, flow_id: FlowId) -> FlowRecord | None:
        flow = await tx.lock_one(FlowRecord, self.flow_key(flow_id))
        return None if flow is None or forgotten(flow, await tx.now_ms()) else flow

    async def find_flow(self, reader: Reader, flow_id: FlowId) -> FlowRecord | None:
        flow = await reader.get_one(FlowRecord, self.flow_key(flow_id))
        return None if flow is None or forgotten(flow, await reader.now_ms()) else flow

    def with_derived_state(self, flow: FlowRecord, now_ms: int) -> FlowRecord:
        return flow_joins.with_derived_state(flow, now_ms, self.shell.config.retention_ms)

    # Joins

    async def resolve_edges(
        self,
        tx: Transaction,
        edges: Iterable[Edge],
        groups: Mapping[ExecutionId, JoinRecord],
        endings: Mapping[ExecutionId, Ending],
        also: Changes = NO_CHANGES,
    ) -> ResolvedEdges:
        """Resolve edges and release what need not wait any longer; saves `also` along."""
        resolution = resolve_edges(edges, groups, endings, await tx.now_ms())
        own = Changes(inserts=resolution.inputs, updates=resolution.edges + resolution.groups)
        children = await self.fire(tx, resolution.fired, resolution.inputs, combine([own, also]))
        return ResolvedEdges(resolution=resolution, children=children)

    async def fire(
        self,
        tx: Transaction,
        fired: Sequence[JoinRecord],
        new_inputs: Sequence[ExecutionInput],
        also: Changes,
    ) -> Changes:
        """Release the downstreams of groups that fired, and have spared upstreams cancelled."""
        sparing = [group for group in fired if group.cancel_reason is not None]
        if sparing:
            # Before any member is locked: cancelling locks in this order, too.
            await tx.save(also)
            also = NO_CHANGES
            await tx.select(
                "enqueue_siblings",
                partition_keys=[group.partition_key for group in sparing],
                downstream_ids=[uuid_of(group.downstream_id) for group in sparing],
                reasons=[group.cancel_reason for group in sparing],
                now_ms=await tx.now_ms(),
            )
            tx.hint(topics.MEMBER_CANCEL_TOPIC)
        now_ms = await tx.now_ms()
        children = NO_CHANGES
        if fired:
            inputs = await passed_to(tx, fired, new_inputs)
            downstreams = await self._lock_downstreams(tx, fired, may_end=bool(inputs))
            children = self.release_changes(fired, inputs, downstreams, now_ms)
        await tx.save(combine([also, children]))
        topics.hint_about(tx, children, now_ms)
        return children

    def release_changes(
        self,
        fired: Sequence[JoinRecord],
        inputs: Mapping[ExecutionId, Mapping[str, ExecutionInput]],
        subjects: Mapping[ExecutionId, Subject],
        now_ms: int,
    ) -> Changes:
        """What groups that fired do to their downstreams."""
        timing = self.shell.timing(now_ms)
        return combine(
            release(
                subjects[group.downstream_id],
                group,
                list(inputs.get(group.downstream_id, {}).values()),
                timing,
                self.shell.config.payload_bytes_max,
            )
            for group in fired
            if group.downstream_id in subjects
        )

    async def _lock_downstreams(
        self, tx: Transaction, fired: Sequence[JoinRecord], *, may_end: bool
    ) -> dict[ExecutionId, Subject]:
        """Lock downstreams; their attempts and grants too where one may end."""
        ids = [group.downstream_id for group in fired]
        if may_end or any(group.group_state is GroupState.IMPOSSIBLE for group in fired):
            return await shell.lock_subjects(tx, ids)
        locked = await tx.lock(Execution, [shell.execution_key(each) for each in sorted(ids)])
        return {e.execution_id: Subject(execution=e, attempt=None) for e in locked.values()}
