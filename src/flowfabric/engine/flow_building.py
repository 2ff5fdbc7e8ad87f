"""Building flows step by step, and forgetting them.

`stage_dependency_edge` already holds the downstream back; `apply_dependency_to_child`
makes the edge count. To fix a whole join at once use `add_dependencies`.
"""

from collections.abc import Sequence

from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import flow_joins, results
from flowfabric.core.bounds import BATCH_MAX, EDGE_APPLY_AFTER_MS, SWEEP_BATCH
from flowfabric.core.checks import check_int, check_name, check_optional_int
from flowfabric.core.flow_endings import block
from flowfabric.core.flow_records import Edge, EdgeState, FlowRecord
from flowfabric.core.ids import EdgeId, ExecutionId, FlowId, Namespace, parse_namespace, uuid_of
from flowfabric.core.records import Execution
from flowfabric.core.transitions import Changes, held_until_ms
from flowfabric.core.views import edge_snapshot
from flowfabric.engine import shell
from flowfabric.engine.flow_endings import FlowEndings
from flowfabric.engine.flows import endings_of, forgotten, lock_edge, lock_group
from flowfabric.engine.operators import trim_executions
from flowfabric.engine.shell import Swept
from flowfabric.store.base import Parameter, Reader, Transaction

FORGET_STEPS_MAX = 2_000
"""More than the largest flow takes to go."""


def _still_going(flow_id: FlowId) -> errors.RetryExhausted:
    return errors.RetryExhausted(
        f"flow {flow_id} is past its keep time and is being deleted: try again, or use another id"
    )


async def lock_execution(tx: Transaction, execution_id: ExecutionId) -> Execution:
    key = shell.execution_key(execution_id)
    execution = await tx.lock_one(Execution, key)
    if execution is None:
        raise errors.NotFound("execution", execution_id)
    return execution


async def find_execution(tx: Transaction, execution_id: ExecutionId) -> Execution:
    key = shell.execution_key(execution_id)
    execution = await tx.get_one(Execution, key)
    if execution is None:
        raise errors.NotFound("execution", execution_id)
    return execution


async def refuse_existing(tx: Transaction, flow: FlowRecord, edge_id: EdgeId) -> None:
    """Checked before the revision, so that a repeat after a lost answer is recognized."""
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


FLOWS_PER_TRIM = 50


class FlowBuilding(FlowEndings):
    async def create_flow(
        self, flow_id: str, *, flow_kind: str, namespace: str = "default"
    ) -> results.CreateFlowResult:
        """Create an empty flow. An existing one is left unchanged.

        An id is free again after the keep time of its flow, whose remains are deleted first.
        """
        asked = self.check_flow_id(flow_id)
        kind = check_name("flow_kind", flow_kind)
        checked_namespace = parse_namespace(namespace)
        answer = await self._insert_flow(asked, kind, checked_namespace)
        if isinstance(answer, results.FlowExists) and await self.dispatch_left(asked):
            # Whether it has ended, and when, is known only now.
            answer = await self._insert_flow(asked, kind, checked_namespace)
        return answer

    async def _insert_flow(
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
        asked, wanted = self._check_edge(
            flow_id,
            edge_id,
            (upstream_execution_id, downstream_execution_id),
            dependency_kind,
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

    def _check_edge(
        self,
        flow_id: str,
        edge_id: str,
        ends: tuple[str, str],
        dependency_kind: str,
        data_passing_ref: str | None,
    ) -> tuple[FlowId, flow_joins.NewEdge]:
        asked = self.check_flow_id(flow_id)
        flow_joins.check_dependency_kind(dependency_kind)
        pair = self.check_ends(asked, *ends)
        return asked, flow_joins.check_edge(edge_id, *pair, data_passing_ref)

    async def _stage(
        self, tx: Transaction, flow: FlowRecord, wanted: flow_joins.NewEdge
    ) -> results.Staged:
        ends = [shell.execution_key(wanted.upstream_id), shell.execution_key(wanted.downstream_id)]
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
        asked, wanted = self._check_edge(
            flow_id,
            edge_id,
            (upstream_execution_id, downstream_execution_id),
            dependency_kind,
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

    # Edges that were never applied

    async def apply_due_edges(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Apply edges that were staged a while ago and then forgotten."""
        check_int("limit", limit, 1, BATCH_MAX)

        async def due(reader: Reader) -> Sequence[Edge]:
            before_ms = await reader.now_ms() - EDGE_APPLY_AFTER_MS
            return await reader.select_records(Edge, "due_edges", before_ms=before_ms, limit=limit)

        edges = await self.store.read(due)
        acted = 0
        for edge in edges:
            acted += await self._apply_late(edge)
        return Swept(acted=acted, full=len(edges) == limit)

    async def _apply_late(self, found: Edge) -> bool:
        async def body(tx: Transaction) -> bool:
            flow = await self.lock_flow_or_none(tx, found.flow_id)
            edge = None if flow is None else await lock_edge(tx, flow, found.edge_id)
            if edge is None or edge.edge_state is EdgeState.APPLIED:
                return False
            await self.apply_edge(tx, edge)
            return True

        return await self.store.transact(body)

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
