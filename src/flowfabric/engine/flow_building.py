"""Building flows: edge by edge, or many members at once with everything they wait for.

`stage_dependency_edge` already holds the downstream back; `apply_dependency_to_child`
makes the edge count. `add_dependencies` adds members and whole joins in one transaction: a
member created together with its join is never claimable before the join holds, and the join is
never judged by half of its edges. A call costs what it adds, however large the flow is.
"""

from collections.abc import Sequence

from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import checks, flow_joins, results
from flowfabric.core.bounds import BATCH_MAX, EDGE_APPLY_AFTER_MS, JOIN_EDGES_MAX, SWEEP_BATCH
from flowfabric.core.creation import Checked, NewExecution
from flowfabric.core.decisions import Changes
from flowfabric.core.flow_endings import Ending, block
from flowfabric.core.flow_records import Edge, EdgeState, FlowRecord, JoinRecord
from flowfabric.core.ids import (
    ExecutionId,
    FlowId,
    Namespace,
    member_execution_id,
    parse_namespace,
    uuid_of,
)
from flowfabric.core.records import Execution
from flowfabric.core.states import TerminalOutcome
from flowfabric.core.views import edge_snapshot
from flowfabric.engine import shell
from flowfabric.engine.creation import CreateBody
from flowfabric.engine.flow_endings import FlowEndings
from flowfabric.engine.flows import endings_of, forget, forgotten, lock_edge, lock_groups
from flowfabric.engine.shell import Swept, execution_key
from flowfabric.store.base import Reader, Transaction

FORGET_STEPS_MAX = 2_000
"""More than the largest flow takes to go."""


def _still_going(flow_id: FlowId) -> errors.RetryExhausted:
    return errors.RetryExhausted(
        f"flow {flow_id} is past its keep time and is being deleted: try again, or use another id"
    )


def existing(execution: Execution | None, execution_id: ExecutionId) -> Execution:
    if execution is None:
        raise errors.NotFound("execution", execution_id)
    return execution


async def edges_between(
    tx: Transaction, flow: FlowRecord, edges: Sequence[flow_joins.NewEdge]
) -> Sequence[Edge]:
    """The edges that exist between the same executions."""
    return await tx.select_records(
        Edge,
        "edges_between",
        partition_key=flow.partition_key,
        upstream_ids=[uuid_of(edge.upstream_id) for edge in edges],
        downstream_ids=[uuid_of(edge.downstream_id) for edge in edges],
    )


def depends_already(edge: Edge) -> errors.DependencyAlreadyExists:
    return errors.DependencyAlreadyExists(
        f"{edge.downstream_id} depends on {edge.upstream_id} already", existing=edge_snapshot(edge)
    )


async def refuse_cycle(tx: Transaction, flow: FlowRecord, edge: flow_joins.NewEdge) -> None:
    if await tx.select(
        "reaches",
        partition_key=flow.partition_key,
        start=uuid_of(edge.downstream_id),
        target=uuid_of(edge.upstream_id),
    ):
        raise errors.CycleDetected(f"{edge.upstream_id} depends on {edge.downstream_id} already")


class FlowTerms(Struct, frozen=True):
    """A flow to be created with its first members."""

    kind: str
    namespace: str = "default"


class CheckedJoin(Struct, frozen=True, kw_only=True):
    downstream_id: ExecutionId
    rule: flow_joins.JoinRule | None
    """None: the one the group has, or `ALL_OF`."""
    edges: tuple[flow_joins.NewEdge, ...]


class FlowBuilding(FlowEndings):
    async def create_flow(
        self, flow_id: str, *, flow_kind: str, namespace: str = "default"
    ) -> results.CreateFlowResult:
        """Create an empty flow. An existing one is left unchanged.

        An id is free again after the keep time of its flow, whose remains are deleted first.
        """
        flow_id = self.check_flow_id(flow_id)
        kind = checks.check_name("flow_kind", flow_kind)
        checked_namespace = parse_namespace(namespace)
        answer = await self._insert_flow(flow_id, kind, checked_namespace)
        if isinstance(answer, results.FlowExists) and await self.dispatch_left(flow_id):
            # Whether it has ended, and when, is known only now.
            answer = await self._insert_flow(flow_id, kind, checked_namespace)
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
            return await self._existing_flow(tx, flow_id, namespace)

        for _ in range(FORGET_STEPS_MAX):
            answer = await self.store.transact(body)
            if answer is not None:
                return answer
        raise _still_going(flow_id)

    async def _existing_flow(
        self, tx: Transaction, flow_id: FlowId, namespace: Namespace
    ) -> results.FlowExists | None:
        """The flow with this id. None if it is gone, or past its keep time and shrinking."""
        flow = await tx.lock_one(FlowRecord, self.flow_key(flow_id))
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
        flow_id = self.check_flow_id(flow_id)
        member_id = self.check_member_id(flow_id, execution_id)

        async def body(tx: Transaction) -> results.AddResult:
            flow = await self.lock_flow(tx, flow_id)
            flow_joins.check_open(flow)
            key = execution_key(member_id)
            execution = existing(await tx.lock_one(Execution, key), member_id)
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
        flow_id = self.check_flow_id(flow_id)
        ends = (upstream_execution_id, downstream_execution_id)
        new = self._check_edge(flow_id, edge_id, ends, dependency_kind, data_passing_ref)
        checks.check_optional_int("expected_graph_revision", expected_graph_revision, 0, 2**62)

        async def body(tx: Transaction) -> results.Staged:
            flow = await self.lock_flow(tx, flow_id)
            flow_joins.check_open(flow)
            # Before the revision, so that a repeat after a lost answer is recognized.
            known = await lock_edge(tx, flow, new.edge_id)
            if known is not None:
                raise errors.DependencyAlreadyExists(
                    f"flow {flow_id} has edge {new.edge_id} already", existing=edge_snapshot(known)
                )
            flow_joins.check_revision(flow, expected_graph_revision)
            return await self._stage(tx, flow, new)

        return await self.store.transact(body)

    def _check_edge(
        self,
        flow_id: FlowId,
        edge_id: str,
        ends: tuple[str, str],
        dependency_kind: str,
        data_passing_ref: str | None,
    ) -> flow_joins.NewEdge:
        flow_joins.check_dependency_kind(dependency_kind)
        pair = self.check_ends(flow_id, *ends)
        return flow_joins.check_edge(edge_id, *pair, data_passing_ref)

    async def _stage(
        self, tx: Transaction, flow: FlowRecord, new: flow_joins.NewEdge
    ) -> results.Staged:
        keys = [execution_key(each) for each in new.pair]
        ends = await tx.get(Execution, keys[:1]) | await tx.lock(Execution, keys[1:])
        for key, end_id in zip(keys, new.pair, strict=True):
            flow_joins.check_member(flow, end_id, ends[key].flow_id if key in ends else None)
        downstream = ends[keys[1]]
        known = (await lock_groups(tx, [new.downstream_id])).get(new.downstream_id)
        flow_joins.check_can_wait(downstream, known)
        for edge in await edges_between(tx, flow, [new]):
            raise depends_already(edge)
        await refuse_cycle(tx, flow, new)
        now_ms = await tx.now_ms()
        group = flow_joins.with_staged(
            known or flow_joins.new_group(flow, new.downstream_id), [new], applied=False
        )
        grown = flow_joins.with_edges(flow, 1, now_ms)
        blocked, group = block(downstream, group, now_ms)
        await tx.save(
            Changes(
                inserts=(
                    flow_joins.new_edge(flow, new, now_ms, applied=False),
                    *(() if known else (group,)),
                ),
                updates=(grown, blocked, *((group,) if known else ())),
            )
        )
        return results.Staged(edge_id=new.edge_id, new_graph_revision=grown.graph_revision)

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
        flow_id = self.check_flow_id(flow_id)
        ends = (upstream_execution_id, downstream_execution_id)
        new = self._check_edge(flow_id, edge_id, ends, dependency_kind, data_passing_ref)
        checks.check_optional_int("graph_revision", graph_revision, 0, 2**62)

        async def body(tx: Transaction) -> results.ApplyResult:
            flow = await self.lock_flow(tx, flow_id)
            downstream_id = new.downstream_id
            downstream = existing(
                await tx.get_one(Execution, execution_key(downstream_id)), downstream_id
            )
            if downstream.flow_id not in (None, flow_id):
                raise errors.ExecutionAlreadyInFlow(
                    f"{downstream_id} belongs to flow {downstream.flow_id}"
                )
            edge = await lock_edge(tx, flow, new.edge_id)
            if edge is None:
                raise errors.InvalidDependency(f"flow {flow_id} has no edge {new.edge_id}")
            same_ends = (edge.upstream_id, edge.downstream_id) == new.pair
            if not same_ends or new.data_passing_ref not in ("", edge.data_passing_ref):
                raise errors.InvalidDependency(
                    f"edge {edge.edge_id} leads from {edge.upstream_id} to {edge.downstream_id}"
                    f" and passes {edge.data_passing_ref!r}"
                )
            return await self.apply_edge(tx, edge)

        return await self.store.transact(body)

    async def apply_edge(self, tx: Transaction, edge: Edge) -> results.ApplyResult:
        """Make one staged edge count. The caller has locked its flow."""
        if edge.edge_state is EdgeState.APPLIED:
            return results.AlreadyApplied()
        now_ms = await tx.now_ms()
        group = (await lock_groups(tx, [edge.downstream_id]))[edge.downstream_id]
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
        checks.check_int("limit", limit, 1, BATCH_MAX)

        async def due(reader: Reader) -> Sequence[Edge]:
            before_ms = await reader.now_ms() - EDGE_APPLY_AFTER_MS
            return await reader.select_records(Edge, "due_edges", before_ms=before_ms, limit=limit)

        edges = await self.store.read(due)
        acted = 0
        for edge in edges:
            acted += await self._apply_late(edge)
        return Swept(acted=acted, full=len(edges) == limit)

    async def _apply_late(self, forgotten_edge: Edge) -> bool:
        async def body(tx: Transaction) -> bool:
            flow = await self.lock_flow_or_none(tx, forgotten_edge.flow_id)
            edge = None if flow is None else await lock_edge(tx, flow, forgotten_edge.edge_id)
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
        flow_id = self.check_flow_id(flow_id)
        downstream_id = self.check_member_id(
            flow_id, downstream_execution_id, "downstream_execution_id"
        )
        rule = flow_joins.check_policy(policy)

        async def body(tx: Transaction) -> results.SetPolicyResult:
            flow = await self.lock_flow(tx, flow_id)
            flow_joins.check_open(flow)
            key = execution_key(downstream_id)
            downstream = existing(await tx.lock_one(Execution, key), downstream_id)
            flow_joins.check_member(flow, downstream_id, downstream.flow_id)
            known = (await lock_groups(tx, [downstream_id])).get(downstream_id)
            if known is None:
                await tx.save(Changes(inserts=(flow_joins.new_group(flow, downstream_id, rule),)))
                return results.Set()
            changed = flow_joins.with_rule(known, rule)
            if changed is known:
                return results.AlreadySet()
            await tx.save(Changes(updates=(changed,)))
            return results.Set()

        return await self.store.transact(body)

    # Many members at once

    def new_member_id(self, flow_id: str) -> ExecutionId:
        """A fresh id for a new member of the flow."""
        return member_execution_id(
            self.check_flow_id(flow_id), shell.new_uuid(), self.shell.deployment.partitions
        )

    async def add_dependencies(
        self,
        flow_id: str,
        joins: Sequence[flow_joins.Join] = (),
        *,
        members: Sequence[NewExecution | Checked | str] = (),
        opens: FlowTerms | None = None,
    ) -> results.DependenciesAdded:
        """Add members and everything they wait for, all at once or not at all.

        With `opens` the flow is created, too, unless it exists.

        `members` are executions to create, under ids of `new_member_id`, the same once
        `check_request` has passed them, or ids of executions that exist. Repeating a call
        adds nothing.
        """
        building = _Building(self, self.check_flow_id(flow_id), joins, members, opens)
        await self.shell.know_routes(building.new_members)
        return await self.store.transact(building.run)

    def check_join(self, flow_id: FlowId, join: flow_joins.Join) -> CheckedJoin:
        downstream_id = self.check_member_id(
            flow_id, join.downstream_execution_id, "downstream_execution_id"
        )
        if not join.dependencies:
            raise errors.InvalidInput("dependencies", "must not be empty")
        rule = None if join.policy is None else flow_joins.check_policy(join.policy)
        if rule is not None and rule.k > len(join.dependencies):
            raise errors.InvalidInput(
                "policy.k", f"must be at most {len(join.dependencies)}, the dependencies", rule.k
            )
        edges = tuple(self._check_dependency(flow_id, downstream_id, d) for d in join.dependencies)
        names = [edge.data_passing_ref for edge in edges if edge.data_passing_ref]
        _check_distinct("upstream_execution_id", [edge.upstream_id for edge in edges])
        _check_distinct("edge_id", [edge.edge_id for edge in edges])
        _check_distinct("data_passing_ref", names)
        return CheckedJoin(downstream_id=downstream_id, rule=rule, edges=edges)

    def _check_dependency(
        self, flow_id: FlowId, downstream_id: ExecutionId, dependency: flow_joins.Dependency
    ) -> flow_joins.NewEdge:
        upstream_id = self.check_member_id(
            flow_id, dependency.upstream_execution_id, "upstream_execution_id"
        )
        edge_id = dependency.edge_id
        if edge_id is None:
            edge_id = flow_joins.derived_edge_id(flow_id, upstream_id, downstream_id)
        return flow_joins.check_edge(
            edge_id,
            upstream_id,
            downstream_id,
            dependency.data_passing_ref,
            checks.check_bool("replaces_payload", dependency.replaces_payload),
        )

    def check_new_member(self, flow_id: FlowId, request: NewExecution | Checked) -> Checked:
        if request.idempotency_key:
            raise errors.InvalidInput(
                "idempotency_key", "does not apply: a flow's member is known by its execution_id"
            )
        if request.execution_id is None:
            raise errors.InvalidInput("execution_id", "must be given: see new_member_id")
        self.check_member_id(flow_id, request.execution_id)
        return request if isinstance(request, Checked) else self.executions.check_request(request)


def count_dependencies(join: object) -> int:
    if not isinstance(join, flow_joins.Join):
        raise errors.InvalidInput("joins", "must be a list of Join", join)
    dependencies = checks.check_list("dependencies", join.dependencies, 0, JOIN_EDGES_MAX + 1)
    for each in dependencies:
        if not isinstance(each, flow_joins.Dependency):
            raise errors.InvalidInput("dependencies", "must be a list of Dependency", each)
    return len(dependencies)


def _check_distinct(field: str, values: Sequence[str]) -> None:
    if len(set(values)) < len(values):
        repeated = next(value for value in values if values.count(value) > 1)
        raise errors.InvalidInput(field, "must not repeat within a join", repeated)


class MemberFacts(Struct, frozen=True):
    execution_id: ExecutionId
    flow_id: FlowId | None
    terminal_outcome: TerminalOutcome


class Reached(Struct, frozen=True):
    upstream_id: ExecutionId
    downstream_id: ExecutionId


class _Building:
    """One call of `add_dependencies`: checked when it is made, then inside its transaction."""

    def __init__(
        self,
        engine: FlowBuilding,
        flow_id: FlowId,
        joins: Sequence[flow_joins.Join],
        members: Sequence[NewExecution | Checked | str],
        opens: FlowTerms | None,
    ) -> None:
        if opens is not None:
            checks.check_name("flow_kind", opens.kind)
            parse_namespace(opens.namespace)
        checks.check_list("members", members, 0, BATCH_MAX)
        checks.check_list("joins", joins, 0, JOIN_EDGES_MAX)
        checks.check_int("edges", sum(map(count_dependencies, joins)), 0, JOIN_EDGES_MAX)
        checked = [engine.check_join(flow_id, join) for join in joins]
        self.engine, self.flow_id, self.opens = engine, flow_id, opens
        self.joins = {join.downstream_id: join for join in checked}
        if len(self.joins) < len(checked):
            raise errors.InvalidInput("joins", "must name each downstream execution once")
        self.new_members: list[Checked] = []
        self.adopted: list[ExecutionId] = []
        """Executions that exist and become members."""
        for each in members:
            if isinstance(each, NewExecution | Checked):
                self.new_members.append(engine.check_new_member(flow_id, each))
            else:
                self.adopted.append(engine.check_member_id(flow_id, each))

    async def run(self, tx: Transaction) -> results.DependenciesAdded:
        if self.opens is not None:
            partition_key, _ = self.engine.flow_key(self.flow_id)
            kind, namespace = self.opens.kind, parse_namespace(self.opens.namespace)
            opened_at_ms = await tx.now_ms()
            await tx.insert_new(
                [flow_joins.new_flow(self.flow_id, partition_key, kind, namespace, opened_at_ms)]
            )
        before = await self.engine.lock_flow(tx, self.flow_id)
        now_ms = await tx.now_ms()
        flow_joins.check_open(before)
        self.groups: dict[ExecutionId, JoinRecord] = {}
        """The groups of downstreams, with their new edges."""
        flow = await self._adopt(tx, before, now_ms) if self.adopted else before
        created = await self._create(tx, flow, now_ms) if self.new_members else []
        flow = flow_joins.with_members(flow, created, now_ms) if created else flow
        joins = await self._new_joins(tx, flow, {each.execution_id for each in created})
        if joins:
            flow = await self._join(tx, flow, joins, now_ms)
        await tx.save(Changes(updates=(self.engine.with_derived_state(flow, now_ms),)))
        return results.DependenciesAdded(
            members_added=flow.node_count - before.node_count,
            edges_added=flow.edge_count - before.edge_count,
            node_count=flow.node_count,
            edge_count=flow.edge_count,
            graph_revision=flow.graph_revision,
        )

    # Members

    async def _adopt(self, tx: Transaction, flow: FlowRecord, now_ms: int) -> FlowRecord:
        known = await tx.lock(Execution, [execution_key(each) for each in self.adopted])
        for each in self.adopted:
            flow_joins.check_joinable(existing(known.get(execution_key(each)), each), flow)
        fresh = [each for each in known.values() if each.flow_id is None]
        if not fresh:
            return flow
        await tx.save(
            Changes(updates=tuple(flow_joins.join_flow(each, flow, now_ms) for each in fresh))
        )
        return flow_joins.with_members(flow, fresh, now_ms)

    async def _create(self, tx: Transaction, flow: FlowRecord, now_ms: int) -> list[Execution]:
        """Create new members, held back from the start where they have something to wait for."""
        for each in self.new_members:
            flow_joins.check_new_member(flow, each.terms.namespace)
        shaped: dict[ExecutionId, Execution] = {}

        def shape(execution: Execution) -> Execution:
            execution = structs.replace(execution, flow_id=flow.flow_id)
            join = self.joins.get(execution.execution_id)
            if join is not None:
                execution = self._hold_back(flow, join, execution, None, now_ms)
            shaped[execution.execution_id] = execution
            return execution

        answers = await CreateBody(self.new_members, self.engine.shell.routes, shape).run(tx)
        created = [each.execution_id for each in answers if isinstance(each, results.Created)]
        for execution_id in shaped.keys() - set(created):
            self.groups.pop(execution_id, None)
        return [shaped[execution_id] for execution_id in created]

    def _hold_back(
        self,
        flow: FlowRecord,
        join: CheckedJoin,
        execution: Execution,
        group: JoinRecord | None,
        now_ms: int,
    ) -> Execution:
        """The downstream as it waits for its join, whose group has the new edges."""
        group = group or flow_joins.new_group(flow, join.downstream_id)
        group = group if join.rule is None else flow_joins.with_rule(group, join.rule)
        group = flow_joins.with_staged(group, join.edges, applied=True)
        execution, self.groups[join.downstream_id] = block(execution, group, now_ms)
        return execution

    # Joins

    async def _new_joins(
        self, tx: Transaction, flow: FlowRecord, created: set[ExecutionId]
    ) -> list[CheckedJoin]:
        """The joins without the edges that exist, every end checked to be a member."""
        old = [join for join in self.joins.values() if join.downstream_id not in created]
        known = await self._known_edges(tx, flow, old) if old else {}
        fresh = [join for join in self.joins.values() if join.downstream_id in created]
        for join in old:
            edges = tuple(edge for edge in join.edges if edge.pair not in known)
            if edges:
                fresh.append(structs.replace(join, edges=edges))
        await self._check_ends(tx, flow, fresh, created)
        await self._check_graph(tx, flow, fresh, created)
        return fresh

    async def _known_edges(
        self, tx: Transaction, flow: FlowRecord, joins: Sequence[CheckedJoin]
    ) -> dict[tuple[ExecutionId, ExecutionId], Edge]:
        """Those of the joins' edges that exist already, and are the same."""
        new = {edge.pair: edge for join in joins for edge in join.edges}
        known = {
            (edge.upstream_id, edge.downstream_id): edge
            for edge in await edges_between(tx, flow, list(new.values()))
        }
        for pair, edge in known.items():
            same = new[pair]
            if (edge.edge_id, edge.data_passing_ref) != (same.edge_id, same.data_passing_ref):
                raise depends_already(edge)
        return known

    async def _check_ends(
        self,
        tx: Transaction,
        flow: FlowRecord,
        joins: Sequence[CheckedJoin],
        created: set[ExecutionId],
    ) -> None:
        ends = {end for join in joins for edge in join.edges for end in edge.pair}
        ends = (ends | {each.execution_id for each in self.new_members}) - created
        self.endings: dict[ExecutionId, Ending] = {}
        """How old upstreams ended, those that have."""
        if not ends:
            return
        rows = await tx.select_as(
            MemberFacts,
            "member_facts",
            partition_key=flow.partition_key,
            execution_ids=[uuid_of(each) for each in sorted(ends)],
        )
        homes = {row.execution_id: row.flow_id for row in rows}
        for end in sorted(ends):
            flow_joins.check_member(flow, end, homes.get(end))
        for row in rows:
            if row.terminal_outcome is not TerminalOutcome.NONE:
                self.endings[row.execution_id] = Ending(outcome=row.terminal_outcome)

    async def _check_graph(
        self,
        tx: Transaction,
        flow: FlowRecord,
        joins: Sequence[CheckedJoin],
        created: set[ExecutionId],
    ) -> None:
        """A cycle can only close through new edges and what is reached from old downstreams."""
        pairs: list[tuple[str, str]] = [edge.pair for join in joins for edge in join.edges]
        starts = [join.downstream_id for join in joins if join.downstream_id not in created]
        if starts:
            rows = await tx.select_as(
                Reached,
                "reachable_edges",
                partition_key=flow.partition_key,
                starts=[uuid_of(each) for each in starts],
            )
            pairs += [(row.upstream_id, row.downstream_id) for row in rows]
        flow_joins.check_acyclic(pairs)

    async def _join(
        self, tx: Transaction, flow: FlowRecord, joins: Sequence[CheckedJoin], now_ms: int
    ) -> FlowRecord:
        old = {j.downstream_id: j for j in joins if j.downstream_id not in self.groups}
        downstreams = await tx.lock(Execution, [execution_key(each) for each in old])
        known = await lock_groups(tx, old)
        blocked = []
        for downstream_id, join in old.items():
            downstream = downstreams[execution_key(downstream_id)]
            group = known.get(downstream_id)
            flow_joins.check_can_wait(downstream, group)
            blocked.append(self._hold_back(flow, join, downstream, group, now_ms))
        edges = tuple(
            flow_joins.new_edge(flow, edge, now_ms, applied=True)
            for join in joins
            for edge in join.edges
        )
        added = [group for key, group in self.groups.items() if key not in known]
        changed = [self.groups[key] for key in known]
        await tx.save(Changes(inserts=(*added, *edges), updates=(*blocked, *changed)))
        if self.endings:
            await self._settle_ended(tx, flow, edges)
        return flow_joins.with_edges(flow, len(edges), now_ms)

    async def _settle_ended(self, tx: Transaction, flow: FlowRecord, edges: Sequence[Edge]) -> None:
        """Resolve at once what waits for members that have ended before."""
        due = [edge for edge in edges if edge.upstream_id in self.endings]
        passing = {edge.upstream_id for edge in due if edge.data_passing_ref}
        endings = self.endings | await endings_of(tx, flow.partition_key, sorted(passing))
        groups = {edge.downstream_id: self.groups[edge.downstream_id] for edge in due}
        await self.engine.resolve_edges(tx, due, groups, endings)
