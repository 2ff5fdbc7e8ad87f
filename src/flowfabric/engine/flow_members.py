"""Building a flow in bulk: new members with everything they wait for, in one transaction.

A member that is created together with its join is never claimable before the join
holds, and its join is never judged by half of its edges. What a call costs depends on
what it adds, not on how large the flow is.
"""

from collections.abc import Sequence

from msgspec import Struct, structs

from flowfabric.core import flow_joins
from flowfabric.core.bounds import BATCH_MAX, JOIN_EDGES_MAX
from flowfabric.core.checks import check_bool, check_int, check_list, check_name
from flowfabric.core.creation import Checked, NewExecution
from flowfabric.core.flow_endings import Ending, block
from flowfabric.core.flow_records import Edge, EdgeGroup, FlowRecord
from flowfabric.core.ids import (
    ExecutionId,
    FlowId,
    member_execution_id,
    parse_namespace,
    uuid_of,
)
from flowfabric.core.records import Execution
from flowfabric.core.results import Created, DependenciesAdded
from flowfabric.core.states import TerminalOutcome
from flowfabric.core.transitions import Changes
from flowfabric.core.views import edge_snapshot
from flowfabric.engine.creation import CreateBody
from flowfabric.engine.flows import FlowGroup, endings_of
from flowfabric.engine.shell import execution_key, new_uuid
from flowfabric.errors import DependencyAlreadyExists, InvalidInput, NotFound
from flowfabric.store.base import Transaction


class FlowTerms(Struct, frozen=True):
    """A flow to be created with its first members."""

    kind: str
    namespace: str = "default"


class CheckedJoin(Struct, frozen=True, kw_only=True):
    downstream_id: ExecutionId
    rule: flow_joins.JoinRule | None
    """None: the one the group has, or `ALL_OF`."""
    edges: tuple[flow_joins.NewEdge, ...]


class JoinPlan(Struct, frozen=True, kw_only=True):
    """A call with every field valid."""

    flow_id: FlowId
    created: tuple[Checked, ...]
    adopted: tuple[ExecutionId, ...]
    """Executions that exist and become members."""
    joins: dict[ExecutionId, CheckedJoin]
    opens: FlowTerms | None
    """The flow, if it is to be created unless it exists."""


class FlowMembers(FlowGroup):
    def new_member_id(self, flow_id: str) -> ExecutionId:
        """A fresh id for a new member of the flow."""
        return member_execution_id(
            self.check_flow_id(flow_id), new_uuid(), self.shell.deployment.partitions
        )

    async def add_dependencies(
        self,
        flow_id: str,
        joins: Sequence[flow_joins.Join] = (),
        *,
        members: Sequence[NewExecution | Checked | str] = (),
        opens: FlowTerms | None = None,
    ) -> DependenciesAdded:
        """Add members and everything they wait for, all at once or not at all.

        With `opens` the flow is created, too, unless it exists.

        `members` are executions to create, under ids of `new_member_id`, the same once
        `check_request` has passed them, or ids of executions that exist. Repeating a call
        adds nothing.
        """
        plan = self._check_plan(flow_id, joins, members, opens)
        await self.shell.know_routes(plan.created)
        return await self.store.transact(_Building(self, plan).run)

    def _check_plan(
        self,
        flow_id: object,
        joins: Sequence[flow_joins.Join],
        members: Sequence[NewExecution | Checked | str],
        opens: FlowTerms | None,
    ) -> JoinPlan:
        asked = self.check_flow_id(flow_id)
        if opens is not None:
            check_name("flow_kind", opens.kind)
            parse_namespace(opens.namespace)
        check_list("members", members, 0, BATCH_MAX)
        check_list("joins", joins, 0, JOIN_EDGES_MAX)
        edges = sum(len(check_join(join).dependencies) for join in joins)
        check_int("edges", edges, 0, JOIN_EDGES_MAX)
        checked = [self._check_join(asked, join) for join in joins]
        by_downstream = {join.downstream_id: join for join in checked}
        if len(by_downstream) < len(checked):
            raise InvalidInput("joins", "must name each downstream execution once")
        return JoinPlan(
            flow_id=asked,
            created=tuple(
                self._check_new_member(asked, each)
                for each in members
                if isinstance(each, NewExecution | Checked)
            ),
            adopted=tuple(
                self.check_member_id(asked, each)
                for each in members
                if not isinstance(each, NewExecution | Checked)
            ),
            joins=by_downstream,
            opens=opens,
        )

    def _check_join(self, flow_id: FlowId, join: flow_joins.Join) -> CheckedJoin:
        downstream_id = self.check_member_id(
            flow_id, join.downstream_execution_id, "downstream_execution_id"
        )
        if not join.dependencies:
            raise InvalidInput("dependencies", "must not be empty")
        rule = None if join.policy is None else flow_joins.check_policy(join.policy)
        if rule is not None and rule.k > len(join.dependencies):
            raise InvalidInput(
                "policy.k", f"must be at most {len(join.dependencies)}, the dependencies", rule.k
            )
        edges = tuple(self._check_dependency(flow_id, downstream_id, d) for d in join.dependencies)
        _check_distinct("upstream_execution_id", [edge.upstream_id for edge in edges])
        _check_distinct("edge_id", [edge.edge_id for edge in edges])
        _check_distinct(
            "data_passing_ref", [e.data_passing_ref for e in edges if e.data_passing_ref]
        )
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
            check_bool("replaces_payload", dependency.replaces_payload),
        )

    def _check_new_member(self, flow_id: FlowId, request: NewExecution | Checked) -> Checked:
        if request.idempotency_key:
            raise InvalidInput(
                "idempotency_key", "does not apply: a flow's member is known by its execution_id"
            )
        if request.execution_id is None:
            raise InvalidInput("execution_id", "must be given: see new_member_id")
        self.check_member_id(flow_id, request.execution_id)
        return request if isinstance(request, Checked) else self.executions.check_request(request)


def check_join(join: object) -> flow_joins.Join:
    if not isinstance(join, flow_joins.Join):
        raise InvalidInput("joins", "must be a list of Join", join)
    for each in check_list("dependencies", join.dependencies, 0, JOIN_EDGES_MAX + 1):
        if not isinstance(each, flow_joins.Dependency):
            raise InvalidInput("dependencies", "must be a list of Dependency", each)
    return join


def _check_distinct(field: str, values: Sequence[str]) -> None:
    if len(set(values)) < len(values):
        repeated = next(value for value in values if values.count(value) > 1)
        raise InvalidInput(field, "must not repeat within a join", repeated)


class MemberFacts(Struct, frozen=True):
    execution_id: ExecutionId
    flow_id: FlowId | None
    terminal_outcome: TerminalOutcome


class Reached(Struct, frozen=True):
    upstream_id: ExecutionId
    downstream_id: ExecutionId


class _Building:
    """One call of `add_dependencies` inside its transaction."""

    def __init__(self, engine: FlowMembers, plan: JoinPlan) -> None:
        self.engine = engine
        self.plan = plan

    async def run(self, tx: Transaction) -> DependenciesAdded:
        if self.plan.opens is not None:
            await self._open(tx, self.plan.opens)
        flow = await self.engine.lock_flow(tx, self.plan.flow_id)
        flow_joins.check_open(flow)
        self.groups: dict[ExecutionId, EdgeGroup] = {}
        self.edges: list[Edge] = []
        before = flow
        flow = await self._adopt(tx, flow)
        created = await self._create(tx, flow)
        flow = flow_joins.with_members(flow, created, await tx.now_ms()) if created else flow
        joins = await self._new_joins(tx, flow, {each.execution_id for each in created})
        flow = await self._join(tx, flow, joins)
        now_ms = await tx.now_ms()
        await tx.save(Changes(updates=(self.engine.with_derived_state(flow, now_ms),)))
        return DependenciesAdded(
            members_added=flow.node_count - before.node_count,
            edges_added=flow.edge_count - before.edge_count,
            node_count=flow.node_count,
            edge_count=flow.edge_count,
            graph_revision=flow.graph_revision,
        )

    async def _open(self, tx: Transaction, flow: FlowTerms) -> None:
        key, flow_id = self.engine.flow_key(self.plan.flow_id)
        namespace = parse_namespace(flow.namespace)
        now_ms = await tx.now_ms()
        await tx.insert_new([flow_joins.new_flow(flow_id, key, flow.kind, namespace, now_ms)])

    # Members

    async def _adopt(self, tx: Transaction, flow: FlowRecord) -> FlowRecord:
        found = await tx.lock(Execution, [execution_key(each) for each in self.plan.adopted])
        for each in self.plan.adopted:
            if execution_key(each) not in found:
                raise NotFound("execution", each)
            flow_joins.check_joinable(found[execution_key(each)], flow)
        fresh = [each for each in found.values() if each.flow_id is None]
        if not fresh:
            return flow
        now_ms = await tx.now_ms()
        await tx.save(
            Changes(updates=tuple(flow_joins.join_flow(each, flow, now_ms) for each in fresh))
        )
        return flow_joins.with_members(flow, fresh, now_ms)

    async def _create(self, tx: Transaction, flow: FlowRecord) -> list[Execution]:
        """Create new members, held back from the start where they have something to wait for."""
        if not self.plan.created:
            return []
        for each in self.plan.created:
            flow_joins.check_new_member(flow, each.terms.namespace)
        now_ms = await tx.now_ms()
        made: dict[ExecutionId, Execution] = {}

        def shape(execution: Execution) -> Execution:
            execution = structs.replace(execution, flow_id=flow.flow_id)
            join = self.plan.joins.get(execution.execution_id)
            if join is not None:
                group = flow_joins.new_group(
                    flow, join.downstream_id, join.rule or flow_joins.ALL_OF
                )
                execution, group = block(execution, group, now_ms)
                self.groups[join.downstream_id] = flow_joins.with_staged(
                    group, join.edges, applied=True
                )
            made[execution.execution_id] = execution
            return execution

        body = CreateBody(self.plan.created, self.engine.shell.routes, shape)
        results = await body.run(tx)
        fresh = [each.execution_id for each in results if isinstance(each, Created)]
        for execution_id in made.keys() - set(fresh):
            self.groups.pop(execution_id, None)
        return [made[execution_id] for execution_id in fresh]

    # Joins

    async def _new_joins(
        self, tx: Transaction, flow: FlowRecord, created: set[ExecutionId]
    ) -> list[CheckedJoin]:
        """The joins without the edges that exist, every end checked to be a member."""
        joins = list(self.plan.joins.values())
        old = [join for join in joins if join.downstream_id not in created]
        known = await self._known_edges(tx, flow, old)
        fresh = [join for join in joins if join.downstream_id in created]
        for join in old:
            edges = tuple(edge for edge in join.edges if edge.pair not in known)
            if edges:
                fresh.append(structs.replace(join, edges=edges))
        await self._check_ends(tx, flow, fresh, created)
        await self._check_graph(tx, flow, fresh, created)
        return fresh

    async def _known_edges(
        self, tx: Transaction, flow: FlowRecord, joins: Sequence[CheckedJoin]
    ) -> set[tuple[ExecutionId, ExecutionId]]:
        wanted = {edge.pair: edge for join in joins for edge in join.edges}
        if not wanted:
            return set()
        found = await tx.select_records(
            Edge,
            "edges_between",
            partition_key=flow.partition_key,
            upstream_ids=[uuid_of(pair[0]) for pair in wanted],
            downstream_ids=[uuid_of(pair[1]) for pair in wanted],
        )
        for edge in found:
            same = wanted[(edge.upstream_id, edge.downstream_id)]
            if (edge.edge_id, edge.data_passing_ref) != (same.edge_id, same.data_passing_ref):
                raise DependencyAlreadyExists(
                    f"{edge.downstream_id} depends on {edge.upstream_id} already",
                    existing=edge_snapshot(edge),
                )
        return {(edge.upstream_id, edge.downstream_id) for edge in found}

    async def _check_ends(
        self,
        tx: Transaction,
        flow: FlowRecord,
        joins: Sequence[CheckedJoin],
        created: set[ExecutionId],
    ) -> None:
        ends = {end for join in joins for edge in join.edges for end in edge.pair}
        ends = (ends | {each.execution_id for each in self.plan.created}) - created
        self.outcomes: dict[ExecutionId, TerminalOutcome] = {}
        if not ends:
            return
        rows = await tx.select_as(
            MemberFacts,
            "member_facts",
            partition_key=flow.partition_key,
            execution_ids=[uuid_of(each) for each in sorted(ends)],
        )
        homes = {row.execution_id: row.flow_id for row in rows}
        self.outcomes |= {row.execution_id: row.terminal_outcome for row in rows}
        for end in sorted(ends):
            flow_joins.check_member(flow, end, homes.get(end))

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
        self, tx: Transaction, flow: FlowRecord, joins: Sequence[CheckedJoin]
    ) -> FlowRecord:
        if not joins:
            return flow
        now_ms = await tx.now_ms()
        old_groups, blocked = await self._hold_back(tx, flow, joins)
        edges = tuple(
            flow_joins.new_edge(flow, edge, now_ms, applied=True)
            for join in joins
            for edge in join.edges
        )
        added = {key: g for key, g in self.groups.items() if key not in old_groups}
        await tx.save(
            Changes(
                inserts=(*added.values(), *edges),
                updates=(*blocked, *(self.groups[key] for key in old_groups)),
            )
        )
        await self._settle_ended(tx, flow, edges)
        return flow_joins.with_edges(flow, len(edges), now_ms)

    async def _hold_back(
        self, tx: Transaction, flow: FlowRecord, joins: Sequence[CheckedJoin]
    ) -> tuple[set[ExecutionId], list[Execution]]:
        """Hold back downstreams that existed before; return those whose groups did, too."""
        keys = [execution_key(j.downstream_id) for j in joins if j.downstream_id not in self.groups]
        executions = await tx.lock(Execution, keys)
        known = {g.downstream_id: g for g in (await tx.lock(EdgeGroup, keys)).values()}
        now_ms = await tx.now_ms()
        blocked: list[Execution] = []
        for join in joins:
            execution = executions.get(execution_key(join.downstream_id))
            if execution is None:
                continue
            group = known.get(join.downstream_id)
            flow_joins.check_can_wait(execution, group)
            group = group or flow_joins.new_group(flow, join.downstream_id)
            group = group if join.rule is None else flow_joins.with_rule(group, join.rule)
            group = flow_joins.with_staged(group, join.edges, applied=True)
            execution, self.groups[join.downstream_id] = block(execution, group, now_ms)
            blocked.append(execution)
        return set(known), blocked

    async def _settle_ended(self, tx: Transaction, flow: FlowRecord, edges: Sequence[Edge]) -> None:
        """Resolve at once what waits for members that have ended before."""
        ended = {
            each: Ending(outcome=outcome)
            for each, outcome in self.outcomes.items()
            if outcome is not TerminalOutcome.NONE
        }
        due = [edge for edge in edges if edge.upstream_id in ended]
        if not due:
            return
        passing = {edge.upstream_id for edge in due if edge.data_passing_ref}
        endings = ended | await endings_of(tx, flow.partition_key, sorted(passing))
        groups = {key: self.groups[key] for key in {edge.downstream_id for edge in due}}
        await self.engine.resolve_edges(tx, due, groups, endings)
