"""Flows: what every operation on them works with.

The lock of a flow's row guards its edges and groups, so operations on one flow take
turns and those on different flows do not meet. Members are locked after their flow.

A member's end resolves the edges out of it (`resolve_edges`). Groups that fire by that
release their downstreams (`release_changes`), each as `core.flow_endings.release` decides.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from flowfabric import errors
from flowfabric.core import flow_joins
from flowfabric.core.flow_endings import Ending, Resolution, release, resolve_edges
from flowfabric.core.flow_records import Edge, EdgeGroup, ExecutionInput, FlowRecord, GroupState
from flowfabric.core.ids import (
    EdgeId,
    ExecutionId,
    FlowId,
    flow_partition,
    parse_uuid,
    partition_of,
    uuid_of,
)
from flowfabric.core.records import Execution
from flowfabric.core.states import PublicState, TerminalOutcome
from flowfabric.core.transitions import NO_CHANGES, Changes, Subject, combine
from flowfabric.engine import shell, topics
from flowfabric.engine.executions import Executions
from flowfabric.engine.shell import Shell
from flowfabric.store.base import Reader, Transaction

TROUBLE = (errors.Corruption, errors.Bug, errors.RetryExhausted)
"""How the rows of one member, or a lock on them, can fail a whole batch."""


class ResolvedEdges(Struct, frozen=True, kw_only=True):
    """What resolving some edges did."""

    resolution: Resolution
    children: Changes
    """What became of the executions whose groups fired."""


async def enqueue_siblings(tx: Transaction, fired: Sequence[EdgeGroup]) -> None:
    await tx.select(
        "enqueue_siblings",
        partition_keys=[group.partition_key for group in fired],
        downstream_ids=[uuid_of(group.downstream_id) for group in fired],
        reasons=[group.cancel_reason or "" for group in fired],
        now_ms=await tx.now_ms(),
    )
    tx.hint(topics.MEMBER_CANCEL_TOPIC)


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
    found = await reader.select_records(
        ExecutionInput, "inputs_of_executions", **shell.id_columns(execution_ids)
    )
    inputs: dict[ExecutionId, dict[str, ExecutionInput]] = {}
    for each in found:
        inputs.setdefault(each.execution_id, {})[each.edge_id] = each
    return inputs


async def passed_to(
    reader: Reader, fired: Sequence[EdgeGroup], new_inputs: Sequence[ExecutionInput]
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
        ResultRow,
        "results_of_executions",
        partition_key=partition_key,
        execution_ids=[uuid_of(each) for each in execution_ids],
    )
    return {
        row.execution_id: Ending(
            outcome=row.terminal_outcome,
            replay_count=row.replay_count,
            result=row.result,
            result_encoding=row.result_encoding,
        )
        for row in rows
    }


class ResultRow(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    terminal_outcome: TerminalOutcome
    replay_count: int
    result: bytes | None
    result_encoding: str | None


def skipped_among(changes: Changes) -> list[ExecutionId]:
    return [
        record.execution_id
        for record in changes.updates
        if isinstance(record, Execution) and record.terminal_outcome is TerminalOutcome.SKIPPED
    ]


async def lock_group(tx: Transaction, downstream_id: ExecutionId) -> EdgeGroup | None:
    key = shell.execution_key(downstream_id)
    return await tx.lock_one(EdgeGroup, key)


async def lock_edge(tx: Transaction, flow: FlowRecord, edge_id: EdgeId) -> Edge | None:
    key = (flow.partition_key, flow.flow_id, edge_id)
    return await tx.lock_one(Edge, key)


def check_edge_id(edge_id: object) -> EdgeId:
    return EdgeId(parse_uuid("edge_id", edge_id))


class FlowGroup(shell.Group):
    """Operations on flows."""

    def __init__(self, shell: Shell, executions: Executions) -> None:
        super().__init__(shell)
        self.executions = executions

    # Input

    def check_flow_id(self, flow_id: object) -> FlowId:
        return FlowId(parse_uuid("flow_id", flow_id))

    def flow_key(self, flow_id: FlowId) -> tuple[int, FlowId]:
        return flow_partition(flow_id, self.shell.deployment.partitions), flow_id

    def check_member_id(
        self, flow_id: FlowId, execution_id: object, field: str = "execution_id"
    ) -> ExecutionId:
        """An execution id that can belong to the flow: both live in one partition."""
        asked = self.shell.check_execution_id(execution_id, field)
        partition_key, _ = self.flow_key(flow_id)
        if partition_of(asked) != partition_key:
            raise errors.InvalidInput(
                field,
                f"is in another partition than flow {flow_id}, whose members are"
                f" in {{fp:{partition_key}}}",
                asked,
            )
        return asked

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
        key = self.flow_key(flow_id)
        flow = await tx.lock_one(FlowRecord, key)
        return None if flow is None or forgotten(flow, await tx.now_ms()) else flow

    async def find_flow(self, reader: Reader, flow_id: FlowId) -> FlowRecord | None:
        key = self.flow_key(flow_id)
        flow = await reader.get_one(FlowRecord, key)
        return None if flow is None or forgotten(flow, await reader.now_ms()) else flow

    def with_derived_state(self, flow: FlowRecord, now_ms: int) -> FlowRecord:
        return flow_joins.with_derived_state(flow, now_ms, self.shell.config.retention_ms)

    # Joins

    async def resolve_edges(
        self,
        tx: Transaction,
        edges: Iterable[Edge],
        groups: Mapping[ExecutionId, EdgeGroup],
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
        fired: Sequence[EdgeGroup],
        new_inputs: Sequence[ExecutionInput],
        also: Changes,
    ) -> Changes:
        """Release the downstreams of groups that fired, and have spared upstreams cancelled."""
        sparing = [group for group in fired if group.cancel_reason is not None]
        if sparing:
            # Before any member is locked: cancelling locks in this order, too.
            await tx.save(also)
            also = NO_CHANGES
            await enqueue_siblings(tx, sparing)
        children = await self._load_and_release(tx, fired, new_inputs) if fired else NO_CHANGES
        await tx.save(combine([also, children]))
        topics.hint_about(tx, children, await tx.now_ms())
        return children

    async def _load_and_release(
        self, tx: Transaction, fired: Sequence[EdgeGroup], new_inputs: Sequence[ExecutionInput]
    ) -> Changes:
        inputs = await passed_to(tx, fired, new_inputs)
        subjects = await self._waiting(tx, fired, ending=bool(inputs))
        return self.release_changes(fired, inputs, subjects, await tx.now_ms())

    def release_changes(
        self,
        fired: Sequence[EdgeGroup],
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

    async def _waiting(
        self, tx: Transaction, fired: Sequence[EdgeGroup], *, ending: bool
    ) -> dict[ExecutionId, Subject]:
        """Lock downstreams; their attempts and grants too where one may end."""
        ids = [group.downstream_id for group in fired]
        if ending or any(group.group_state is GroupState.IMPOSSIBLE for group in fired):
            return await shell.lock_subjects(tx, ids)
        found = await tx.lock(Execution, [shell.execution_key(each) for each in sorted(ids)])
        return {each.execution_id: Subject(execution=each, attempt=None) for each in found.values()}
