"""Telling dependents that a flow member has ended.

Each ending of a member leaves a row in the dispatch queue, written with it. The
dispatcher takes the endings of a few flows at a time, resolves the edges they lead
to, and deletes the rows in the same transaction: a crash in between leaves the row
and no effect, or the effect and no row. A member with more dependents than one
transaction handles keeps its row until the last of them is done. `completions` has
the short way, which leaves no row.
"""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct, structs

from flowfabric.core import bounds, flow_endings, flow_records, results
from flowfabric.core.checks import check_int
from flowfabric.core.decisions import Changes, combine
from flowfabric.core.flow_joins import is_spared
from flowfabric.core.ids import ExecutionId, FlowId, uuid_of
from flowfabric.core.records import Execution
from flowfabric.core.states import TerminalOutcome
from flowfabric.engine import flow_queue, shell, topics
from flowfabric.engine.flows import (
    TROUBLE,
    FlowGroup,
    ResolvedEdges,
    check_edge_id,
    endings_of,
    inputs_of,
    lock_edge,
    lock_groups,
    passed_to,
    skipped_among,
)
from flowfabric.engine.shell import Swept
from flowfabric.errors import ExecutionNotTerminal, InvalidDependency, InvalidInput
from flowfabric.store.base import Transaction, Unlocked

CASCADE_ROUNDS_MAX = flow_queue.FLOWS_LOOKED_AT
FEW = 8
"""Up to this many endings are dispatched without taking locks first."""


class Dispatched(Struct, frozen=True, kw_only=True):
    finished: int
    """Endings whose effects are complete."""
    resolved: ResolvedEdges | None
    more: bool
    """Whether dependents are left for another transaction."""


class FlowEndings(FlowGroup):
    async def dispatch_completions(self, *, limit: int = bounds.DISPATCH_BATCH) -> Swept:
        """Dispatch endings of flow members that no other process is dispatching."""
        check_int("limit", limit, 1, bounds.BATCH_MAX)
        few = min(limit, FEW)
        swept = await self.store.try_unlocked(lambda tx: self._dispatch_few(tx, few))
        return await self._dispatch_locked(limit) if swept is None else swept

    async def _dispatch_few(self, tx: Unlocked, limit: int) -> Swept | None:
        """Read all endings there are without locks, and write if nothing has changed since.

        None if there are more, or if deciding needs rows that are not read here.
        """
        rows = await tx.select_joined(flow_queue.FOUND, "read_for_dispatch", limit=limit + 1)
        found = flow_queue.found_in(rows) if len(rows) <= limit else None
        if found is None:
            return None
        if not rows:
            return Swept(acted=0, full=False)
        told = await self.changes_for_dependents(tx, found)
        if told is None:
            return None
        topics.hint_about(tx, told, await tx.now_ms())
        await tx.save(told)
        edges = sum(isinstance(each, flow_records.Edge) for each in told.updates)
        return Swept(acted=len(found.endings) + edges, full=False)

    async def changes_for_dependents(
        self, tx: Unlocked, found: flow_queue.FoundEndings
    ) -> Changes | None:
        """What endings change in their dependents; None if siblings have to be cancelled."""
        now_ms = await tx.now_ms()
        endings = {key: each.ending for key, each in found.endings.items()}
        resolution = flow_endings.resolve_edges(found.edges, found.groups, endings, now_ms)
        if any(group.cancel_reason is not None for group in resolution.fired):
            return None
        inputs = await passed_to(tx, resolution.fired, resolution.inputs)
        children = self.release_changes(resolution.fired, inputs, found.subjects, now_ms)
        own = Changes(inserts=resolution.inputs, updates=resolution.edges + resolution.groups)
        counted = self._counted(found.flows.values(), found.endings.values(), now_ms)
        return combine([own, counted, children])

    async def _dispatch_locked(self, limit: int) -> Swept:
        # Starting anywhere keeps busy flows from starving those behind them.
        start = random.randrange(self.shell.deployment.partitions.num_flow)

        async def body(tx: Transaction) -> Swept:
            flows = await flow_queue.flows_with_endings(tx, start)
            if not flows:
                return Swept(acted=0, full=False)
            swept = await self._dispatch_flows(tx, flows, limit)
            full = swept.full or len(flows) == flow_queue.FLOWS_PER_BATCH
            if full:
                tx.hint(topics.DISPATCH_TOPIC)
            return Swept(acted=swept.acted, full=full)

        try:
            swept = await self.store.transact(body)
        except TROUBLE:
            return await self._dispatch_one_by_one(start, limit)
        if swept.full:
            return swept
        # Other transactions have locked the rest. A dispatcher hints when it is done; a flow
        # builder does not.
        return structs.replace(swept, held=bool(await self.store.execute_alone("any_ending")))

    async def _dispatch_flows(
        self, tx: Transaction, flows: Sequence[flow_records.FlowRecord], limit: int
    ) -> Swept:
        taken = await flow_queue.take(tx, flows, limit)
        done = await self._dispatch(tx, flows, taken)
        edges = 0 if done.resolved is None else len(done.resolved.resolution.edges)
        return Swept(acted=done.finished + edges, full=done.more or len(taken) == limit)

    async def _dispatch_one_by_one(self, start: int, limit: int) -> Swept:
        """A flow that fails delays no other."""
        flows = await self.store.transact(lambda tx: flow_queue.flows_with_endings(tx, start))
        acted, full, failures = 0, False, []
        for flow in flows:
            try:
                swept = await self._dispatch_alone(flow.flow_id, limit)
            except TROUBLE as error:
                failures.append(f"dependents in flow {flow.flow_id} were not told: {error}")
            else:
                acted, full = acted + swept.acted, full or swept.full
        return Swept(acted=acted, full=full, failures=tuple(failures))

    async def _dispatch_alone(self, flow_id: FlowId, limit: int) -> Swept:
        async def body(tx: Transaction) -> Swept:
            flow = await self.lock_flow_or_none(tx, flow_id)
            if flow is None:
                return Swept(acted=0, full=False)
            return await self._dispatch_flows(tx, [flow], limit)

        return await self.store.transact(body)

    async def dispatch_left(self, flow_id: FlowId) -> bool:
        """Work off the endings that are left of a flow; whether there were any."""
        acted = False
        for _ in range(CASCADE_ROUNDS_MAX):
            swept = await self._dispatch_alone(flow_id, bounds.DISPATCH_BATCH)
            acted = acted or swept.acted > 0
            if not swept.full:
                break
        return acted

    async def cascade_completion(self, execution_id: str) -> results.CascadeOutcome:
        """Tell the dependents of one ended execution now, if they have not been told.

        Dependents that are skipped have endings of their own, which the dispatcher handles.
        """
        execution_id = self.shell.check_execution_id(execution_id)
        resolved = cascaded = 0
        for _ in range(CASCADE_ROUNDS_MAX):
            done = await self.store.transact(lambda tx: self._cascade(tx, execution_id))
            if done.resolved is not None:
                resolved += len(done.resolved.resolution.edges)
                cascaded += len(skipped_among(done.resolved.children))
            if not done.more:
                break
        return results.CascadeOutcome(resolved=resolved, cascaded_children=cascaded)

    async def _cascade(self, tx: Transaction, execution_id: ExecutionId) -> Dispatched:
        nothing = Dispatched(finished=0, resolved=None, more=False)
        execution = await tx.get_one(Execution, shell.execution_key(execution_id))
        if execution is None or execution.flow_id is None:
            return nothing
        flow = await self.lock_flow_or_none(tx, execution.flow_id)
        if flow is None:
            return nothing
        row_key = (flow.partition_key, flow.flow_id, execution_id, execution.replay_count)
        row = await tx.lock_one(flow_records.CompletionDispatch, row_key)
        if row is None:
            return nothing
        endings = await endings_of(tx, flow.partition_key, [execution_id])
        taken = flow_queue.QueuedEnding(
            row=row,
            ending=endings.get(
                execution_id,
                flow_endings.Ending(outcome=row.outcome, replay_count=row.replay_count),
            ),
            stale=execution_id not in endings,
            spared=is_spared(row.outcome, execution.cancellation_reason),
        )
        return await self._dispatch(tx, [flow], [taken])

    async def _dispatch(
        self,
        tx: Transaction,
        flows: Sequence[flow_records.FlowRecord],
        taken: Sequence[flow_queue.QueuedEnding],
    ) -> Dispatched:
        fresh = {each.row.execution_id: each.ending for each in taken if not each.stale}
        lives = {execution_id: ending.replay_count for execution_id, ending in fresh.items()}
        edges = await open_edges(tx, lives)
        groups = await lock_groups(tx, (edge.downstream_id for edge in edges))
        more = len(edges) == bounds.DISPATCH_EDGES_MAX
        finished = [each for each in taken if not more or _before(each.row, edges[-1])]
        also = self._counted(flows, finished, await tx.now_ms())
        resolved = await self.resolve_edges(tx, edges, groups, fresh, also)
        return Dispatched(finished=len(finished), resolved=resolved, more=more)

    def _counted(
        self,
        flows: Iterable[flow_records.FlowRecord],
        finished: Collection[flow_queue.QueuedEnding],
        now_ms: int,
    ) -> Changes:
        """Endings counted into their flows, and taken off the queue."""
        ended: dict[FlowId, list[flow_queue.QueuedEnding]] = {}
        for each in finished:
            if not each.stale:
                ended.setdefault(each.row.flow_id, []).append(each)
        counted = tuple(
            self.with_derived_state(flow_queue.counted_in(flow, ended[flow.flow_id]), now_ms)
            for flow in flows
            if flow.flow_id in ended
        )
        return Changes(updates=counted, deletes=tuple(each.row for each in finished))

    # One edge at a time

    async def resolve_dependency(
        self,
        flow_id: str,
        edge_id: str,
        *,
        upstream_execution_id: str,
        downstream_execution_id: str,
        upstream_outcome: str | None = None,
    ) -> results.ResolveResult:
        """Count one ended upstream into its dependent's join.

        `upstream_outcome` is a check only: the upstream's own record says how it ended.
        """
        flow_id = self.check_flow_id(flow_id)
        ends = self.check_ends(flow_id, upstream_execution_id, downstream_execution_id)
        checked_edge_id = check_edge_id(edge_id)
        outcome = None if upstream_outcome is None else check_outcome(upstream_outcome)

        async def body(tx: Transaction) -> results.ResolveResult:
            flow = await self.lock_flow(tx, flow_id)
            edge = await lock_edge(tx, flow, checked_edge_id)
            if (
                edge is None
                or edge.edge_state is not flow_records.EdgeState.APPLIED
                or (edge.upstream_id, edge.downstream_id) != ends
            ):
                raise InvalidDependency(
                    f"flow {flow_id} has no applied edge {edge_id} between these"
                )
            if edge.dep_state is not flow_records.DependencyState.UNSATISFIED:
                return results.AlreadyResolved()
            ending = await self._known_ending(tx, edge, outcome)
            if not flow_endings.counts(edge, ending):
                raise ExecutionNotTerminal(
                    f"{edge.upstream_id} has not ended since {edge.downstream_id} was replayed:"
                    " replay it too"
                )
            return await self._resolve(tx, edge, ending)

        return await self.store.transact(body)

    async def _known_ending(
        self, tx: Transaction, edge: flow_records.Edge, outcome: TerminalOutcome | None
    ) -> flow_endings.Ending:
        endings = await endings_of(tx, edge.partition_key, [edge.upstream_id])
        ending = endings.get(edge.upstream_id)
        if ending is None:
            raise ExecutionNotTerminal(f"{edge.upstream_id} has not ended")
        if outcome not in (None, ending.outcome):
            raise InvalidInput(
                "upstream_outcome", f"{edge.upstream_id} ended as {ending.outcome}", outcome
            )
        return ending

    async def _resolve(
        self, tx: Transaction, edge: flow_records.Edge, ending: flow_endings.Ending
    ) -> results.ResolveResult:
        groups = await lock_groups(tx, [edge.downstream_id])
        resolved = await self.resolve_edges(tx, [edge], groups, {edge.upstream_id: ending})
        if groups[edge.downstream_id].group_state is not flow_records.GroupState.PENDING:
            return results.AlreadyFired()
        (after,) = resolved.resolution.groups
        if after.group_state is flow_records.GroupState.PENDING:
            return results.Pending()
        if after.group_state is flow_records.GroupState.IMPOSSIBLE:
            return results.Impossible(child_skipped=bool(skipped_among(resolved.children)))
        return results.Satisfied(data_injected=await _injected(tx, resolved, edge.downstream_id))


def check_outcome(outcome: object) -> TerminalOutcome:
    try:
        known = TerminalOutcome(str(outcome))
    except ValueError:
        known = TerminalOutcome.NONE
    if known is TerminalOutcome.NONE:
        raise InvalidInput("upstream_outcome", "must be a terminal outcome", outcome)
    return known


async def open_edges(
    tx: Transaction, lives: Mapping[ExecutionId, int]
) -> Sequence[flow_records.Edge]:
    """Applied edges that the ends of these lives resolve, locked; a limited number at a time.

    `lives` says how often each of the upstreams was replayed.
    """
    if not lives:
        return []
    return await tx.select_records(
        flow_records.Edge,
        "open_edges",
        **shell.id_columns(lives),
        replay_counts=list(lives.values()),
        limit=bounds.DISPATCH_EDGES_MAX,
    )


def _before(row: flow_records.CompletionDispatch, last: flow_records.Edge) -> bool:
    """Whether all edges of this ending come before `last`, in the order they are read."""
    return (row.partition_key, uuid_of(row.execution_id)) < (
        last.partition_key,
        uuid_of(last.upstream_id),
    )


async def _injected(tx: Transaction, resolved: ResolvedEdges, child_id: ExecutionId) -> bool:
    """Whether the child, now free to run, got its payload from an upstream."""
    if not any(
        isinstance(e, Execution) and flow_endings.waits_for_worker(e)
        for e in resolved.children.updates
    ):
        return False
    inputs = (await inputs_of(tx, [child_id])).get(child_id, {})
    return any(each.replaces_payload and each.value is not None for each in inputs.values())
