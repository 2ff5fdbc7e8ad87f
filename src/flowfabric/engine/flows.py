"""Building a flow step by step: the flow, its members, edges one by one, join policies.

`stage_dependency_edge` already holds the downstream back; `apply_dependency_to_child`
makes the edge count. To fix a whole join at once use `add_dependencies`.
"""

from msgspec import structs

from flowfabric.core.checks import check_int, check_name
from flowfabric.core.flow_endings import block
from flowfabric.core.flow_joins import (
    SUCCESS_ONLY,
    EdgeDependencyPolicy,
    NewEdge,
    check_can_wait,
    check_dependency_kind,
    check_edge,
    check_joinable,
    check_member,
    check_open,
    check_policy,
    check_revision,
    check_same_namespace,
    join_flow,
    new_edge,
    new_flow,
    new_group,
    resolved_count,
    with_edges,
    with_members,
    with_rule,
    with_staged,
)
from flowfabric.core.flow_records import Edge, EdgeGroup, EdgeState, FlowRecord
from flowfabric.core.ids import (
    EdgeId,
    ExecutionId,
    FlowId,
    Namespace,
    parse_namespace,
    parse_uuid,
    uuid_of,
)
from flowfabric.core.limits import SWEEP_BATCH
from flowfabric.core.records import Execution
from flowfabric.core.results import (
    Added,
    AddResult,
    AlreadyApplied,
    AlreadyMember,
    AlreadySet,
    Applied,
    ApplyResult,
    CreateFlowResult,
    FlowCreated,
    FlowExists,
    Set,
    SetPolicyResult,
    Staged,
)
from flowfabric.core.transitions import Changes
from flowfabric.core.views import edge_snapshot
from flowfabric.engine.flow_retention import forget
from flowfabric.engine.flow_unit import FlowOperations, endings_of, forgotten
from flowfabric.engine.unit import execution_key
from flowfabric.errors import (
    CycleDetected,
    DependencyAlreadyExists,
    ExecutionAlreadyInFlow,
    InvalidDependency,
    NotFound,
    RetryExhausted,
)
from flowfabric.store.base import Transaction

FORGET_STEPS_MAX = 2_000
"""More than the largest flow takes to go."""


class Flows(FlowOperations):
    async def create_flow(
        self, flow_id: str, *, flow_kind: str, namespace: str = "default"
    ) -> CreateFlowResult:
        """Create an empty flow. An id that exists is left as it is.

        The id of one past its keep time is free again; what is left of that one goes first.
        """
        asked = self.check_flow_id(flow_id)
        kind = check_name("flow_kind", flow_kind)
        checked_namespace = parse_namespace(namespace)
        partition_key, _ = self.flow_key(asked)

        async def body(tx: Transaction) -> CreateFlowResult | None:
            flow = new_flow(asked, partition_key, kind, checked_namespace, await tx.now_ms())
            if await tx.insert_new([flow]):
                return FlowCreated(flow_id=asked)
            return await self._found(tx, asked, checked_namespace)

        for _ in range(FORGET_STEPS_MAX):
            answer = await self.store.transact(body)
            if answer is not None:
                return answer
        raise _still_going(asked)

    async def _found(
        self, tx: Transaction, flow_id: FlowId, namespace: Namespace
    ) -> FlowExists | None:
        """The flow that has the id; none if it went, or a part of what is past its time did."""
        key = self.flow_key(flow_id)
        flow = (await tx.lock(FlowRecord, [key])).get(key)
        if flow is None:
            return None
        if not forgotten(flow, await tx.now_ms()):
            check_same_namespace(flow, namespace)
            return FlowExists(flow_id=flow_id)
        forgot = await forget(tx, [flow], SWEEP_BATCH)
        if forgot.acted == 0 and not forgot.complete:
            raise _still_going(flow_id)
        return None

    async def add_execution_to_flow(self, flow_id: str, execution_id: str) -> AddResult:
        """Make an execution a member, for life. Adding it again changes nothing."""
        asked = self.check_flow_id(flow_id)
        member_id = self.check_member_id(asked, execution_id)

        async def body(tx: Transaction) -> AddResult:
            flow = await self.lock_flow(tx, asked)
            check_open(flow)
            execution = await lock_execution(tx, member_id)
            check_joinable(execution, flow)
            if execution.flow_id is not None:
                return AlreadyMember(execution_id=member_id, node_count=flow.node_count)
            now_ms = await tx.now_ms()
            grown = self.settled_flow(with_members(flow, [execution], now_ms), now_ms)
            member = join_flow(execution, flow, now_ms)
            await tx.save(Changes(updates=(grown, member)))
            return Added(execution_id=member_id, new_node_count=grown.node_count)

        return await self.store.transact(body)

    # Edges

    async def stage_dependency_edge(
        self,
        flow_id: str,
        edge_id: str,
        *,
        upstream_execution_id: str,
        downstream_execution_id: str,
        dependency_kind: str = SUCCESS_ONLY,
        data_passing_ref: str | None = None,
        expected_graph_revision: int | None = None,
    ) -> Staged:
        """Add an edge. It holds the downstream back at once and counts once it is applied.

        With `expected_graph_revision` the edge is refused if the graph has changed since.
        """
        asked = self.check_flow_id(flow_id)
        check_dependency_kind(dependency_kind)
        wanted = check_edge(
            edge_id,
            *self.check_ends(asked, upstream_execution_id, downstream_execution_id),
            data_passing_ref,
        )
        if expected_graph_revision is not None:
            check_int("expected_graph_revision", expected_graph_revision, 0, 2**62)

        async def body(tx: Transaction) -> Staged:
            flow = await self.lock_flow(tx, asked)
            check_open(flow)
            await refuse_existing(tx, flow, wanted.edge_id)
            check_revision(flow, expected_graph_revision)
            return await self._stage(tx, flow, wanted)

        return await self.store.transact(body)

    async def _stage(self, tx: Transaction, flow: FlowRecord, wanted: NewEdge) -> Staged:
        ends = [execution_key(wanted.upstream_id), execution_key(wanted.downstream_id)]
        found = await tx.get(Execution, ends[:1]) | await tx.lock(Execution, ends[1:])
        for key, end_id in zip(ends, wanted.pair, strict=True):
            check_member(flow, end_id, found[key].flow_id if key in found else None)
        downstream = found[ends[1]]
        known = await lock_group(tx, wanted.downstream_id)
        check_can_wait(downstream, known)
        await refuse_pair(tx, flow, wanted)
        await refuse_cycle(tx, flow, wanted)
        now_ms = await tx.now_ms()
        group = with_staged(known or new_group(flow, wanted.downstream_id), [wanted], applied=False)
        grown = with_edges(flow, 1, now_ms)
        blocked, group = block(downstream, group, now_ms)
        await tx.save(
            Changes(
                inserts=(
                    new_edge(flow, wanted, now_ms, applied=False),
                    *(() if known else (group,)),
                ),
                updates=(grown, blocked, *((group,) if known else ())),
            )
        )
        return Staged(edge_id=wanted.edge_id, new_graph_revision=grown.graph_revision)

    async def apply_dependency_to_child(
        self,
        flow_id: str,
        edge_id: str,
        *,
        upstream_execution_id: str,
        downstream_execution_id: str,
        graph_revision: int | None = None,
        dependency_kind: str = SUCCESS_ONLY,
        data_passing_ref: str | None = None,
    ) -> ApplyResult:
        """Make a staged edge count. If its upstream has ended already, it resolves at once."""
        asked = self.check_flow_id(flow_id)
        check_dependency_kind(dependency_kind)
        wanted = check_edge(
            edge_id,
            *self.check_ends(asked, upstream_execution_id, downstream_execution_id),
            data_passing_ref,
        )
        if graph_revision is not None:
            check_int("graph_revision", graph_revision, 0, 2**62)

        async def body(tx: Transaction) -> ApplyResult:
            flow = await self.lock_flow(tx, asked)
            downstream = await find_execution(tx, wanted.downstream_id)
            if downstream.flow_id not in (None, asked):
                raise ExecutionAlreadyInFlow(
                    f"{wanted.downstream_id} belongs to flow {downstream.flow_id}"
                )
            edge = await lock_edge(tx, flow, wanted.edge_id)
            if edge is None:
                raise InvalidDependency(f"flow {asked} has no edge {wanted.edge_id}")
            check_same(edge, wanted)
            return await self.apply_edge(tx, edge)

        return await self.store.transact(body)

    async def apply_edge(self, tx: Transaction, edge: Edge) -> ApplyResult:
        """Make one staged edge count. The caller has locked its flow."""
        if edge.edge_state is EdgeState.APPLIED:
            return AlreadyApplied()
        now_ms = await tx.now_ms()
        group = await lock_group(tx, edge.downstream_id)
        assert group is not None, "a staged edge has a group"
        group = structs.replace(group, applied=group.applied + 1)
        edge = structs.replace(edge, edge_state=EdgeState.APPLIED, applied_at_ms=now_ms)
        await tx.save(Changes(updates=(edge, group)))
        endings = await endings_of(tx, edge.partition_key, [edge.upstream_id])
        if endings:
            settled = await self.settle_edges(tx, [edge], {edge.downstream_id: group}, endings)
            group = next(iter(settled.resolution.groups), group)
        return Applied(unsatisfied_count=group.applied - resolved_count(group))

    # Policies

    async def set_edge_group_policy(
        self, flow_id: str, downstream_execution_id: str, policy: EdgeDependencyPolicy
    ) -> SetPolicyResult:
        """Say when a member's join is satisfied. Possible until it has its first edge."""
        asked = self.check_flow_id(flow_id)
        downstream_id = self.check_member_id(
            asked, downstream_execution_id, "downstream_execution_id"
        )
        rule = check_policy(policy)

        async def body(tx: Transaction) -> SetPolicyResult:
            flow = await self.lock_flow(tx, asked)
            check_open(flow)
            downstream = await lock_execution(tx, downstream_id)
            check_member(flow, downstream_id, downstream.flow_id)
            known = await lock_group(tx, downstream_id)
            if known is None:
                await tx.save(Changes(inserts=(new_group(flow, downstream_id, rule),)))
                return Set()
            changed = with_rule(known, rule)
            if changed is known:
                return AlreadySet()
            await tx.save(Changes(updates=(changed,)))
            return Set()

        return await self.store.transact(body)


def _still_going(flow_id: FlowId) -> RetryExhausted:
    return RetryExhausted(
        f"flow {flow_id} is past its keep time and is being deleted: try again, or use another id"
    )


async def lock_execution(tx: Transaction, execution_id: ExecutionId) -> Execution:
    key = execution_key(execution_id)
    execution = (await tx.lock(Execution, [key])).get(key)
    if execution is None:
        raise NotFound("execution", execution_id)
    return execution


async def find_execution(tx: Transaction, execution_id: ExecutionId) -> Execution:
    key = execution_key(execution_id)
    execution = (await tx.get(Execution, [key])).get(key)
    if execution is None:
        raise NotFound("execution", execution_id)
    return execution


async def lock_group(tx: Transaction, downstream_id: ExecutionId) -> EdgeGroup | None:
    key = execution_key(downstream_id)
    return (await tx.lock(EdgeGroup, [key])).get(key)


async def lock_edge(tx: Transaction, flow: FlowRecord, edge_id: EdgeId) -> Edge | None:
    key = (flow.partition_key, flow.flow_id, edge_id)
    return (await tx.lock(Edge, [key])).get(key)


async def refuse_existing(tx: Transaction, flow: FlowRecord, edge_id: EdgeId) -> None:
    """Looked at before the revision, so that a repeat after a lost answer is told apart."""
    edge = await lock_edge(tx, flow, edge_id)
    if edge is not None:
        raise DependencyAlreadyExists(
            f"flow {flow.flow_id} has edge {edge_id} already", existing=edge_snapshot(edge)
        )


async def refuse_pair(tx: Transaction, flow: FlowRecord, wanted: NewEdge) -> None:
    found = await tx.select_records(
        Edge,
        "edges_between",
        partition_key=flow.partition_key,
        upstream_ids=[uuid_of(wanted.upstream_id)],
        downstream_ids=[uuid_of(wanted.downstream_id)],
    )
    for edge in found:
        raise DependencyAlreadyExists(
            f"{edge.downstream_id} depends on {edge.upstream_id} already",
            existing=edge_snapshot(edge),
        )


async def refuse_cycle(tx: Transaction, flow: FlowRecord, wanted: NewEdge) -> None:
    found = await tx.select(
        "reaches",
        partition_key=flow.partition_key,
        start=uuid_of(wanted.downstream_id),
        target=uuid_of(wanted.upstream_id),
    )
    if found:
        raise CycleDetected(f"{wanted.upstream_id} depends on {wanted.downstream_id} already")


def check_same(edge: Edge, wanted: NewEdge) -> None:
    same_ends = (edge.upstream_id, edge.downstream_id) == wanted.pair
    if not same_ends or wanted.data_passing_ref not in ("", edge.data_passing_ref):
        raise InvalidDependency(
            f"edge {edge.edge_id} leads from {edge.upstream_id} to {edge.downstream_id}"
            f" and passes {edge.data_passing_ref!r}"
        )


def check_edge_id(edge_id: object) -> EdgeId:
    return EdgeId(parse_uuid("edge_id", edge_id))
