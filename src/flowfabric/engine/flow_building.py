"""Flows: finding and locking one, building it step by step, and forgetting it.

The lock of a flow's row guards its edges and groups, so operations on one flow take
turns and those on different flows do not meet. Members are locked after their flow.

`stage_dependency_edge` already holds the downstream back; `apply_dependency_to_child`
makes the edge count. To fix a whole join at once use `add_dependencies`.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import flow_joins, results
from flowfabric.core.bounds import BATCH_MAX, SWEEP_BATCH
from flowfabric.core.checks import check_int, check_optional_int
from flowfabric.core.flow_endings import Ending, Resolution, block, release, resolve_edges
from flowfabric.core.flow_records import (
    Edge,
    EdgeGroup,
    EdgeState,
    ExecutionInput,
    FlowRecord,
    GroupState,
)
from flowfabric.core.ids import (
    EdgeId,
    ExecutionId,
    FlowId,
    Namespace,
    flow_partition,
    parse_uuid,
    partition_of,
    uuid_of,
)
from flowfabric.core.records import Execution
from flowfabric.core.states import PublicState, TerminalOutcome
from flowfabric.core.transitions import NO_CHANGES, Changes, Subject, combine, held_until_ms
from flowfabric.core.views import MemberCounts, edge_snapshot
from flowfabric.engine import unit
from flowfabric.engine.operators import trim_executions
from flowfabric.engine.unit import Swept
from flowfabric.engine.work import Work
from flowfabric.store.base import Parameter, Reader, Transaction

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
    tx.hint(unit.MEMBER_CANCEL_TOPIC)


def forgotten(flow: FlowRecord, now_ms: int) -> bool:
    """Whether the flow is past its keep time: it is gone for everybody, deleted or not."""
    return flow.retain_until_ms is not None and flow.retain_until_ms <= now_ms


async def member_counts(
    reader: Reader, flow_id: FlowId, statement: str = "count_flow_members"
) -> MemberCounts:
    """How many members of a flow are in which state."""
    satisfied, impossible = flow_joins.SIBLING_REASONS
    rows = await reader.select_as(
        CountRow, statement, flow_id=flow_id, satisfied=satisfied, impossible=impossible
    )
    return MemberCounts(
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
        ExecutionInput, "inputs_of_executions", **unit.id_columns(execution_ids)
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


FORGET_STEPS_MAX = 2_000
"""More than the largest flow takes to go."""


def _still_going(flow_id: FlowId) -> errors.RetryExhausted:
    return errors.RetryExhausted(
        f"flow {flow_id} is past its keep time and is being deleted: try again, or use another id"
    )


async def lock_execution(tx: Transaction, execution_id: ExecutionId) -> Execution:
    key = unit.execution_key(execution_id)
    execution = await tx.lock_one(Execution, key)
    if execution is None:
        raise errors.NotFound("execution", execution_id)
    return execution


async def find_execution(tx: Transaction, execution_id: ExecutionId) -> Execution:
    key = unit.execution_key(execution_id)
    execution = await tx.get_one(Execution, key)
    if execution is None:
        raise errors.NotFound("execution", execution_id)
    return execution


async def lock_group(tx: Transaction, downstream_id: ExecutionId) -> EdgeGroup | None:
    key = unit.execution_key(downstream_id)
    return await tx.lock_one(EdgeGroup, key)


async def lock_edge(tx: Transaction, flow: FlowRecord, edge_id: EdgeId) -> Edge | None:
    key = (flow.partition_key, flow.flow_id, edge_id)
    return await tx.lock_one(Edge, key)


async def refuse_existing(tx: Transaction, flow: FlowRecord, edge_id: EdgeId) -> None:
    """Looked at before the revision, so that a repeat after a lost answer is told apart."""
    edge = await lock_edge(tx, flow, edge_id)
    if edge is not None:
        raise errors.DependencyAlreadyExists(
            f"flow {flow.flow_id} has edge {edge_id} already", existing=edge_snapshot(edge)
        )


async def refuse_pair(tx: Transaction, flow: FlowRecord, wanted: flow_joins.NewEdge) -> None:
    found = await tx.select_records(
        Edge,
        "edges_between",
        partition_key=flow.partition_key,
        upstream_ids=[uuid_of(wanted.upstream_id)],
        downstream_ids=[uuid_of(wanted.downstream_id)],
    )
    for edge in found:
        raise errors.DependencyAlreadyExists(
            f"{edge.downstream_id} depends on {edge.upstream_id} already",
            existing=edge_snapshot(edge),
        )


async def refuse_cycle(tx: Transaction, flow: FlowRecord, wanted: flow_joins.NewEdge) -> None:
    found = await tx.select(
        "reaches",
        partition_key=flow.partition_key,
        start=uuid_of(wanted.downstream_id),
        target=uuid_of(wanted.upstream_id),
    )
    if found:
        raise errors.CycleDetected(
            f"{wanted.upstream_id} depends on {wanted.downstream_id} already"
        )


def check_same(edge: Edge, wanted: flow_joins.NewEdge) -> None:
    same_ends = (edge.upstream_id, edge.downstream_id) == wanted.pair
    if not same_ends or wanted.data_passing_ref not in ("", edge.data_passing_ref):
        raise errors.InvalidDependency(
            f"edge {edge.edge_id} leads from {edge.upstream_id} to {edge.downstream_id}"
            f" and passes {edge.data_passing_ref!r}"
        )


def check_edge_id(edge_id: object) -> EdgeId:
    return EdgeId(parse_uuid("edge_id", edge_id))


FLOWS_PER_TRIM = 50


class FlowBuilding(unit.Group):
    def __init__(self, shell: unit.Shell, work: Work) -> None:
        super().__init__(shell)
        self.work = work

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
        """Let go the downstreams of groups that fired, and have what they spare cancelled."""
        sparing = [group for group in fired if group.cancel_reason is not None]
        if sparing:
            # Before any member is locked: cancelling locks in this order, too.
            await tx.save(also)
            also = NO_CHANGES
            await enqueue_siblings(tx, sparing)
        children = await self._load_and_release(tx, fired, new_inputs) if fired else NO_CHANGES
        await tx.save(combine([also, children]))
        unit.hint_about(tx, children, await tx.now_ms())
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
            return await unit.lock_subjects(tx, ids)
        found = await tx.lock(Execution, [unit.execution_key(each) for each in sorted(ids)])
        return {each.execution_id: Subject(execution=each, attempt=None) for each in found.values()}

    async def insert_flow(
        self, flow_id: FlowId, flow_kind: str, namespace: Namespace
    ) -> results.CreateFlowResult:
        """Create an empty flow, or find the one that has the id and is not past its keep time."""
        partition_key, _ = self.flow_key(flow_id)

        async def body(tx: Transaction) -> results.CreateFlowResult | None:
            flow = flow_joins.new_flow(
                flow_id, partition_key, flow_kind, namespace, await tx.now_ms()
            )
            if await tx.insert_new([flow]):
                return results.FlowCreated(flow_id=flow_id)
            return await self._found(tx, flow_id, namespace)

        for _ in range(FORGET_STEPS_MAX):
            answer = await self.store.transact(body)
            if answer is not None:
                return answer
        raise _still_going(flow_id)

    async def _found(
        self, tx: Transaction, flow_id: FlowId, namespace: Namespace
    ) -> results.FlowExists | None:
        """The flow that has the id; none if it went, or a part of what is past its time did."""
        key = self.flow_key(flow_id)
        flow = await tx.lock_one(FlowRecord, key)
        if flow is None:
            return None
        if not forgotten(flow, await tx.now_ms()):
            flow_joins.check_same_namespace(flow, namespace)
            return results.FlowExists(flow_id=flow_id)
        forgot = await forget(tx, [flow], SWEEP_BATCH)
        if forgot.acted == 0 and not forgot.complete:
            raise _still_going(flow_id)
        return None

    async def add_execution_to_flow(self, flow_id: str, execution_id: str) -> results.AddResult:
        """Make an execution a member, for life. Adding it again changes nothing."""
        asked = self.check_flow_id(flow_id)
        member_id = self.check_member_id(asked, execution_id)

        async def body(tx: Transaction) -> results.AddResult:
            flow = await self.lock_flow(tx, asked)
            flow_joins.check_open(flow)
            execution = await lock_execution(tx, member_id)
            flow_joins.check_joinable(execution, flow)
            if execution.flow_id is not None:
                return results.AlreadyMember(execution_id=member_id, node_count=flow.node_count)
            now_ms = await tx.now_ms()
            grown = self.with_derived_state(
                flow_joins.with_members(flow, [execution], now_ms), now_ms
            )
            member = flow_joins.join_flow(execution, flow, now_ms)
            await tx.save(Changes(updates=(grown, member)))
            return results.Added(execution_id=member_id, new_node_count=grown.node_count)

        return await self.store.transact(body)

    # Edges

    async def stage_dependency_edge(
        self,
        flow_id: str,
        edge_id: str,
        *,
        upstream_execution_id: str,
        downstream_execution_id: str,
        dependency_kind: str = flow_joins.SUCCESS_ONLY,
        data_passing_ref: str | None = None,
        expected_graph_revision: int | None = None,
    ) -> results.Staged:
        """Add an edge. It holds the downstream back at once and counts once it is applied.

        With `expected_graph_revision` the edge is refused if the graph has changed since.
        """
        asked = self.check_flow_id(flow_id)
        flow_joins.check_dependency_kind(dependency_kind)
        wanted = flow_joins.check_edge(
            edge_id,
            *self.check_ends(asked, upstream_execution_id, downstream_execution_id),
            data_passing_ref,
        )
        check_optional_int("expected_graph_revision", expected_graph_revision, 0, 2**62)

        async def body(tx: Transaction) -> results.Staged:
            flow = await self.lock_flow(tx, asked)
            flow_joins.check_open(flow)
            await refuse_existing(tx, flow, wanted.edge_id)
            flow_joins.check_revision(flow, expected_graph_revision)
            return await self._stage(tx, flow, wanted)

        return await self.store.transact(body)

    async def _stage(
        self, tx: Transaction, flow: FlowRecord, wanted: flow_joins.NewEdge
    ) -> results.Staged:
        ends = [unit.execution_key(wanted.upstream_id), unit.execution_key(wanted.downstream_id)]
        found = await tx.get(Execution, ends[:1]) | await tx.lock(Execution, ends[1:])
        for key, end_id in zip(ends, wanted.pair, strict=True):
            flow_joins.check_member(flow, end_id, found[key].flow_id if key in found else None)
        downstream = found[ends[1]]
        known = await lock_group(tx, wanted.downstream_id)
        flow_joins.check_can_wait(downstream, known)
        await refuse_pair(tx, flow, wanted)
        await refuse_cycle(tx, flow, wanted)
        now_ms = await tx.now_ms()
        group = flow_joins.with_staged(
            known or flow_joins.new_group(flow, wanted.downstream_id), [wanted], applied=False
        )
        grown = flow_joins.with_edges(flow, 1, now_ms)
        blocked, group = block(downstream, group, now_ms)
        await tx.save(
            Changes(
                inserts=(
                    flow_joins.new_edge(flow, wanted, now_ms, applied=False),
                    *(() if known else (group,)),
                ),
                updates=(grown, blocked, *((group,) if known else ())),
            )
        )
        return results.Staged(edge_id=wanted.edge_id, new_graph_revision=grown.graph_revision)

    async def apply_dependency_to_child(
        self,
        flow_id: str,
        edge_id: str,
        *,
        upstream_execution_id: str,
        downstream_execution_id: str,
        graph_revision: int | None = None,
        dependency_kind: str = flow_joins.SUCCESS_ONLY,
        data_passing_ref: str | None = None,
    ) -> results.ApplyResult:
        """Make a staged edge count. If its upstream has ended already, it resolves at once."""
        asked = self.check_flow_id(flow_id)
        flow_joins.check_dependency_kind(dependency_kind)
        wanted = flow_joins.check_edge(
            edge_id,
            *self.check_ends(asked, upstream_execution_id, downstream_execution_id),
            data_passing_ref,
        )
        check_optional_int("graph_revision", graph_revision, 0, 2**62)

        async def body(tx: Transaction) -> results.ApplyResult:
            flow = await self.lock_flow(tx, asked)
            downstream = await find_execution(tx, wanted.downstream_id)
            if downstream.flow_id not in (None, asked):
                raise errors.ExecutionAlreadyInFlow(
                    f"{wanted.downstream_id} belongs to flow {downstream.flow_id}"
                )
            edge = await lock_edge(tx, flow, wanted.edge_id)
            if edge is None:
                raise errors.InvalidDependency(f"flow {asked} has no edge {wanted.edge_id}")
            check_same(edge, wanted)
            return await self.apply_edge(tx, edge)

        return await self.store.transact(body)

    async def apply_edge(self, tx: Transaction, edge: Edge) -> results.ApplyResult:
        """Make one staged edge count. The caller has locked its flow."""
        if edge.edge_state is EdgeState.APPLIED:
            return results.AlreadyApplied()
        now_ms = await tx.now_ms()
        group = await lock_group(tx, edge.downstream_id)
        assert group is not None, "a staged edge has a group"
        group = structs.replace(group, applied=group.applied + 1)
        edge = structs.replace(edge, edge_state=EdgeState.APPLIED, applied_at_ms=now_ms)
        await tx.save(Changes(updates=(edge, group)))
        endings = await endings_of(tx, edge.partition_key, [edge.upstream_id])
        if endings:
            resolved = await self.resolve_edges(tx, [edge], {edge.downstream_id: group}, endings)
            group = next(iter(resolved.resolution.groups), group)
        return results.Applied(unsatisfied_count=group.applied - flow_joins.resolved_count(group))

    # Policies

    async def set_edge_group_policy(
        self, flow_id: str, downstream_execution_id: str, policy: flow_joins.EdgeDependencyPolicy
    ) -> results.SetPolicyResult:
        """Say when a member's join is satisfied. Possible until it has its first edge."""
        asked = self.check_flow_id(flow_id)
        downstream_id = self.check_member_id(
            asked, downstream_execution_id, "downstream_execution_id"
        )
        rule = flow_joins.check_policy(policy)

        async def body(tx: Transaction) -> results.SetPolicyResult:
            flow = await self.lock_flow(tx, asked)
            flow_joins.check_open(flow)
            downstream = await lock_execution(tx, downstream_id)
            flow_joins.check_member(flow, downstream_id, downstream.flow_id)
            known = await lock_group(tx, downstream_id)
            if known is None:
                await tx.save(Changes(inserts=(flow_joins.new_group(flow, downstream_id, rule),)))
                return results.Set()
            changed = flow_joins.with_rule(known, rule)
            if changed is known:
                return results.AlreadySet()
            await tx.save(Changes(updates=(changed,)))
            return results.Set()

        return await self.store.transact(body)

    # Forgetting flows. A flow goes as a whole, once all its members have ended
    #
    # Members carry no keep time of their own, so none is deleted while others may still
    # ask how it ended; when the flow's time is over they are given it, and go like any
    # execution. A flow with a member that is still needed outside stays as a whole.
    # Past its keep time a flow is gone for every operation, also while a large one is still
    # being deleted batch by batch.

    async def trim_flows(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Delete ended flows past their keep time, with all that belongs to them."""
        check_int("limit", limit, 1, BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            now_ms = await tx.now_ms()
            flows = await tx.select_records(
                FlowRecord, "due_flows", before_ms=now_ms, limit=FLOWS_PER_TRIM
            )
            forgot = await forget(tx, flows, limit)
            more = len(flows) == FLOWS_PER_TRIM and forgot.complete
            return Swept(acted=forgot.acted, full=forgot.more or more)

        return await self.store.transact(body)


class Forgot(Struct, frozen=True, kw_only=True):
    """What a step of deleting flows did."""

    acted: int
    more: bool = False
    """Whether the next step will do more."""
    complete: bool = False
    """Whether of all flows there is nothing left that may go."""


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
    """The flows that may go. One with a member that is still needed stays as a whole."""
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
