"""What the operations on flows share: finding and locking a flow, and settling joins.

The lock of a flow's row guards its edges and groups, so operations on one flow take
turns and those on different flows do not meet. Members are locked after their flow.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from flowfabric.core.flow_endings import Ending, Resolution, release, resolve_edges
from flowfabric.core.flow_joins import SIBLING_REASONS, settle_flow
from flowfabric.core.flow_records import Edge, EdgeGroup, ExecutionInput, FlowRecord, GroupState
from flowfabric.core.ids import (
    ExecutionId,
    FlowId,
    flow_partition,
    make_execution_id,
    parse_uuid,
    partition_of,
    uuid_of,
)
from flowfabric.core.records import Execution
from flowfabric.core.states import PublicState, TerminalOutcome
from flowfabric.core.transitions import NO_CHANGES, Changes, Subject, combine
from flowfabric.core.views import MemberCounts
from flowfabric.engine.unit import (
    MEMBER_CANCEL_TOPIC,
    Operations,
    execution_key,
    hint_about,
    load_subjects,
)
from flowfabric.errors import Bug, Corruption, InvalidInput, NotFound, RetryExhausted
from flowfabric.store.base import Reader, Row, Transaction

TROUBLE = (Corruption, Bug, RetryExhausted)
"""What the rows of one member, or whoever holds them, can do to a whole batch."""

CANCELLED = PublicState.CANCELLED.value


class Settled(Struct, frozen=True, kw_only=True):
    """What resolving some edges did."""

    resolution: Resolution
    children: Changes
    """What became of the executions whose groups fired."""


class FlowOperations(Operations):
    # Input

    def check_flow_id(self, flow_id: object) -> FlowId:
        return FlowId(parse_uuid("flow_id", flow_id))

    def flow_key(self, flow_id: FlowId) -> tuple[int, FlowId]:
        return flow_partition(flow_id, self.deployment.partitions), flow_id

    def check_member_id(
        self, flow_id: FlowId, execution_id: object, field: str = "execution_id"
    ) -> ExecutionId:
        """An execution id that can belong to the flow: both live in one partition."""
        asked = self.check_execution_id(execution_id, field)
        partition_key, _ = self.flow_key(flow_id)
        if partition_of(asked) != partition_key:
            raise InvalidInput(
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
        flow = await self.find_to_lock(tx, flow_id)
        if flow is None:
            raise NotFound("flow", flow_id)
        return flow

    async def find_to_lock(self, tx: Transaction, flow_id: FlowId) -> FlowRecord | None:
        key = self.flow_key(flow_id)
        flow = (await tx.lock(FlowRecord, [key])).get(key)
        return None if flow is None or forgotten(flow, await tx.now_ms()) else flow

    async def find_flow(self, reader: Reader, flow_id: FlowId) -> FlowRecord | None:
        key = self.flow_key(flow_id)
        flow = (await reader.get(FlowRecord, [key])).get(key)
        return None if flow is None or forgotten(flow, await reader.now_ms()) else flow

    def settled_flow(self, flow: FlowRecord, now_ms: int) -> FlowRecord:
        return settle_flow(flow, now_ms, self.config.retention_ms)

    # Joins

    async def settle_edges(
        self,
        tx: Transaction,
        edges: Iterable[Edge],
        groups: Mapping[ExecutionId, EdgeGroup],
        endings: Mapping[ExecutionId, Ending],
        also: Changes = NO_CHANGES,
    ) -> Settled:
        """Resolve edges and let go whoever need not wait any longer; `also` is saved with it."""
        resolution = resolve_edges(edges, groups, endings, await tx.now_ms())
        own = Changes(inserts=resolution.inputs, updates=resolution.edges + resolution.groups)
        children = await self.fire(tx, resolution.fired, resolution.inputs, combine([own, also]))
        return Settled(resolution=resolution, children=children)

    async def fire(
        self,
        tx: Transaction,
        fired: Sequence[EdgeGroup],
        new_inputs: Sequence[ExecutionInput],
        also: Changes,
    ) -> Changes:
        """Let go the downstreams of groups that fired, and have what they spare cancelled."""
        sparing = [group for group in fired if group.cancel_reason is not None]
        if sparing:
            # Before any member is locked: whoever cancels them locks in this order too.
            await tx.save(also)
            also = NO_CHANGES
            await enqueue_siblings(tx, sparing)
        children = await self._release(tx, fired, new_inputs) if fired else NO_CHANGES
        await tx.save(combine([also, children]))
        hint_about(tx, children, await tx.now_ms())
        return children

    async def _release(
        self, tx: Transaction, fired: Sequence[EdgeGroup], new_inputs: Sequence[ExecutionInput]
    ) -> Changes:
        passing = [
            group.downstream_id
            for group in fired
            if group.named_inputs and group.group_state is GroupState.SATISFIED
        ]
        inputs = await inputs_of(tx, passing)
        for each in new_inputs:
            inputs.setdefault(each.execution_id, {})[each.edge_id] = each
        subjects = await self._waiting(tx, fired, ending=bool(passing))
        timing = self.timing(await tx.now_ms())
        return combine(
            release(
                subjects[group.downstream_id],
                group,
                list(inputs.get(group.downstream_id, {}).values()),
                timing,
                self.config.payload_bytes_max,
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
            return await load_subjects(tx, ids)
        found = await tx.lock(Execution, [execution_key(each) for each in sorted(ids)])
        return {each.execution_id: Subject(execution=each, attempt=None) for each in found.values()}


async def enqueue_siblings(tx: Transaction, fired: Sequence[EdgeGroup]) -> None:
    await tx.select(
        "enqueue_siblings",
        partition_keys=[group.partition_key for group in fired],
        downstream_ids=[uuid_of(group.downstream_id) for group in fired],
        reasons=[group.cancel_reason or "" for group in fired],
        now_ms=await tx.now_ms(),
    )
    tx.hint(MEMBER_CANCEL_TOPIC)


def forgotten(flow: FlowRecord, now_ms: int) -> bool:
    """Whether the flow is past its keep time: it is gone for everybody, deleted or not."""
    return flow.retain_until_ms is not None and flow.retain_until_ms <= now_ms


async def member_counts(
    reader: Reader, flow_id: FlowId, statement: str = "count_flow_members"
) -> MemberCounts:
    """How many members of a flow are in which state."""
    satisfied, impossible = SIBLING_REASONS
    rows = await reader.select(
        statement, flow_id=flow_id, satisfied=satisfied, impossible=impossible
    )
    return MemberCounts(
        {PublicState(str(row["public_state"])): int(str(row["members"])) for row in rows},
        sum(int(str(row["spared"])) for row in rows if row["public_state"] == CANCELLED),
        tuple(int(str(end)) for row in rows if (end := row.get("last_ended_at_ms")) is not None),
    )


async def inputs_of(
    reader: Reader, execution_ids: Sequence[ExecutionId]
) -> dict[ExecutionId, dict[str, ExecutionInput]]:
    """What upstreams passed to executions, by edge, in the order in which it arrived."""
    if not execution_ids:
        return {}
    found = await reader.select_records(
        ExecutionInput,
        "inputs_of_executions",
        partition_keys=[partition_of(each) for each in execution_ids],
        execution_ids=[uuid_of(each) for each in execution_ids],
    )
    inputs: dict[ExecutionId, dict[str, ExecutionInput]] = {}
    for each in found:
        inputs.setdefault(each.execution_id, {})[each.edge_id] = each
    return inputs


async def endings_of(
    reader: Reader, partition_key: int, execution_ids: Sequence[ExecutionId]
) -> dict[ExecutionId, Ending]:
    """How executions ended, those that have."""
    if not execution_ids:
        return {}
    rows = await reader.select(
        "results_of_executions",
        partition_key=partition_key,
        execution_ids=[uuid_of(each) for each in execution_ids],
    )
    return {
        make_execution_id(partition_key, str(row["execution_id"])): ending_of(
            row, TerminalOutcome(str(row["terminal_outcome"]))
        )
        for row in rows
    }


def ending_of(row: Row, outcome: TerminalOutcome) -> Ending:
    result, encoding = row["result"], row["result_encoding"]
    assert result is None or isinstance(result, bytes)
    return Ending(
        outcome=outcome,
        replay_count=int(str(row["replay_count"])),
        result=result,
        result_encoding=None if encoding is None else str(encoding),
    )


def skipped_among(changes: Changes) -> list[ExecutionId]:
    return [
        record.execution_id
        for record in changes.updates
        if isinstance(record, Execution) and record.terminal_outcome is TerminalOutcome.SKIPPED
    ]
