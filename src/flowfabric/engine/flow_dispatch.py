"""Telling dependents that a flow member has ended.

Each ending of a member leaves a row in the dispatch queue, written with it. The
dispatcher takes the endings of a few flows at a time, resolves the edges they lead
to, and deletes the rows in the same transaction: a crash in between leaves the row
and no effect, or the effect and no row. A member with more dependents than one
transaction handles keeps its row until the last of them is done.
"""

import random
from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from flowfabric.core.checks import check_int
from flowfabric.core.flow_endings import Ending, counts, waits_for_worker
from flowfabric.core.flow_joins import count_endings, is_spared, with_last_end
from flowfabric.core.flow_records import (
    CompletionDispatch,
    DependencyState,
    Edge,
    EdgeGroup,
    EdgeState,
    FlowRecord,
    GroupState,
)
from flowfabric.core.ids import ExecutionId, FlowId, make_execution_id, partition_of, uuid_of
from flowfabric.core.limits import (
    BATCH_MAX,
    DISPATCH_BATCH,
    DISPATCH_EDGES_MAX,
    EDGE_APPLY_AFTER_MS,
    SWEEP_BATCH,
)
from flowfabric.core.records import Execution
from flowfabric.core.results import (
    AlreadyFired,
    AlreadyResolved,
    CascadeOutcome,
    CreateFlowResult,
    FlowExists,
    Impossible,
    Pending,
    ResolveResult,
    Satisfied,
)
from flowfabric.core.states import TerminalOutcome
from flowfabric.core.transitions import Changes
from flowfabric.engine.flows import (
    TROUBLE,
    Flows,
    Settled,
    check_edge_id,
    ending_of,
    endings_of,
    inputs_of,
    lock_edge,
    lock_group,
    skipped_among,
)
from flowfabric.engine.operators import Swept
from flowfabric.engine.unit import DISPATCH_TOPIC, execution_key
from flowfabric.errors import ExecutionNotTerminal, InvalidDependency, InvalidInput
from flowfabric.store.base import Reader, Row, Transaction

FLOWS_PER_BATCH = 64
FLOWS_LOOKED_AT = 256
CASCADE_ROUNDS_MAX = FLOWS_LOOKED_AT


class QueuedEnding(Struct, frozen=True, kw_only=True):
    """An ending from the queue."""

    row: CompletionDispatch
    ending: Ending
    stale: bool
    """The execution was replayed since: this ending no longer means anything."""
    spared: bool
    """Cancelled because a join no longer needed it."""


class Dispatched(Struct, frozen=True, kw_only=True):
    finished: int
    """Endings whose effects are complete."""
    settled: Settled | None
    more: bool
    """Whether dependents are left for another transaction."""


class FlowEndings(Flows):
    async def dispatch_completions(self, *, limit: int = DISPATCH_BATCH) -> Swept:
        """Work off endings of flow members that nobody else is working on."""
        check_int("limit", limit, 1, BATCH_MAX)
        # Starting anywhere keeps busy flows from starving those behind them.
        start = random.randrange(self.deployment.partitions.num_flow)

        async def body(tx: Transaction) -> Swept:
            flows = await _flows_with_endings(tx, start)
            if not flows:
                return Swept(acted=0, full=False)
            swept = await self._dispatch_flows(tx, flows, limit)
            full = swept.full or len(flows) == FLOWS_PER_BATCH
            if full:
                tx.hint(DISPATCH_TOPIC)
            return Swept(acted=swept.acted, full=full)

        try:
            swept = await self.store.transact(body)
        except TROUBLE:
            return await self._dispatch_one_by_one(start, limit)
        if swept.full:
            return swept
        # What is left others hold. A dispatcher tells of it; a builder does not.
        return structs.replace(swept, held=bool(await self.store.execute_alone("any_completion")))

    async def _dispatch_flows(
        self, tx: Transaction, flows: Sequence[FlowRecord], limit: int
    ) -> Swept:
        taken = await _take(tx, flows, limit)
        done = await self._dispatch(tx, flows, taken)
        edges = 0 if done.settled is None else len(done.settled.resolution.edges)
        return Swept(acted=done.finished + edges, full=done.more or len(taken) == limit)

    async def _dispatch_one_by_one(self, start: int, limit: int) -> Swept:
        """A flow that fails holds up no other."""

        async def chosen(tx: Transaction) -> Sequence[FlowRecord]:
            return await _flows_with_endings(tx, start)

        acted, full, failures = 0, False, []
        for flow in await self.store.transact(chosen):
            try:
                swept = await self._dispatch_alone(flow.flow_id, limit)
            except TROUBLE as error:
                failures.append(f"dependents in flow {flow.flow_id} were not told: {error}")
            else:
                acted, full = acted + swept.acted, full or swept.full
        return Swept(acted=acted, full=full, failures=tuple(failures))

    async def _dispatch_alone(self, flow_id: FlowId, limit: int) -> Swept:
        async def body(tx: Transaction) -> Swept:
            flow = await self.find_to_lock(tx, flow_id)
            if flow is None:
                return Swept(acted=0, full=False)
            return await self._dispatch_flows(tx, [flow], limit)

        return await self.store.transact(body)

    async def create_flow(
        self, flow_id: str, *, flow_kind: str, namespace: str = "default"
    ) -> CreateFlowResult:
        """Create an empty flow. An id that exists is left as it is.

        The id of one past its keep time is free again; what is left of that one goes first.
        """
        answer = await super().create_flow(flow_id, flow_kind=flow_kind, namespace=namespace)
        if isinstance(answer, FlowExists) and await self._dispatch_left(answer.flow_id):
            # Whether it has ended, and when, is known only now.
            answer = await super().create_flow(flow_id, flow_kind=flow_kind, namespace=namespace)
        return answer

    async def _dispatch_left(self, flow_id: FlowId) -> bool:
        """Work off the endings of a flow that nobody has been there for; whether there were any."""
        acted = False
        for _ in range(CASCADE_ROUNDS_MAX):
            swept = await self._dispatch_alone(flow_id, DISPATCH_BATCH)
            acted = acted or swept.acted > 0
            if not swept.full:
                break
        return acted

    async def cascade_completion(self, execution_id: str) -> CascadeOutcome:
        """Tell the dependents of one ended execution now, if they have not been told.

        Dependents that are skipped have endings of their own, which follow by themselves.
        """
        asked = self.check_execution_id(execution_id)
        resolved = cascaded = 0
        for _ in range(CASCADE_ROUNDS_MAX):
            done = await self._cascade(asked)
            if done.settled is not None:
                resolved += len(done.settled.resolution.edges)
                cascaded += len(skipped_among(done.settled.children))
            if not done.more:
                break
        return CascadeOutcome(resolved=resolved, cascaded_children=cascaded)

    async def _cascade(self, execution_id: ExecutionId) -> Dispatched:
        async def body(tx: Transaction) -> Dispatched:
            nothing = Dispatched(finished=0, settled=None, more=False)
            key = execution_key(execution_id)
            execution = (await tx.get(Execution, [key])).get(key)
            if execution is None or execution.flow_id is None:
                return nothing
            flow = await self.find_to_lock(tx, execution.flow_id)
            if flow is None:
                return nothing
            row_key = (flow.partition_key, flow.flow_id, execution_id, execution.replay_count)
            row = (await tx.lock(CompletionDispatch, [row_key])).get(row_key)
            if row is None:
                return nothing
            endings = await endings_of(tx, flow.partition_key, [execution_id])
            taken = QueuedEnding(
                row=row,
                ending=endings.get(
                    execution_id, Ending(outcome=row.outcome, replay_count=row.replay_count)
                ),
                stale=execution_id not in endings,
                spared=is_spared(row.outcome, execution.cancellation_reason),
            )
            return await self._dispatch(tx, [flow], [taken])

        return await self.store.transact(body)

    async def _dispatch(
        self, tx: Transaction, flows: Sequence[FlowRecord], taken: Sequence[QueuedEnding]
    ) -> Dispatched:
        fresh = {each.row.execution_id: each.ending for each in taken if not each.stale}
        lives = {execution_id: ending.replay_count for execution_id, ending in fresh.items()}
        edges = await open_edges(tx, lives)
        groups = await tx.lock(
            EdgeGroup, sorted({execution_key(edge.downstream_id) for edge in edges})
        )
        more = len(edges) == DISPATCH_EDGES_MAX
        finished = [each for each in taken if not more or _before(each.row, edges[-1])]
        also = Changes(
            updates=await self._count(tx, flows, finished),
            deletes=tuple(each.row for each in finished),
        )
        settled = await self.settle_edges(
            tx, edges, {group.downstream_id: group for group in groups.values()}, fresh, also
        )
        return Dispatched(finished=len(finished), settled=settled, more=more)

    async def _count(
        self, tx: Transaction, flows: Sequence[FlowRecord], finished: Sequence[QueuedEnding]
    ) -> tuple[FlowRecord, ...]:
        ended: dict[FlowId, list[QueuedEnding]] = {}
        for each in finished:
            if not each.stale:
                ended.setdefault(each.row.flow_id, []).append(each)
        now_ms = await tx.now_ms()
        return tuple(
            self.settled_flow(_counted(flow, ended[flow.flow_id]), now_ms)
            for flow in flows
            if flow.flow_id in ended
        )

    # One edge at a time

    async def resolve_dependency(
        self,
        flow_id: str,
        edge_id: str,
        *,
        upstream_execution_id: str,
        downstream_execution_id: str,
        upstream_outcome: str | None = None,
    ) -> ResolveResult:
        """Count one ended upstream into its dependent's join.

        `upstream_outcome` is a check only: the upstream's own record says how it ended.
        """
        asked = self.check_flow_id(flow_id)
        ends = self.check_ends(asked, upstream_execution_id, downstream_execution_id)
        wanted = check_edge_id(edge_id)
        outcome = None if upstream_outcome is None else check_outcome(upstream_outcome)

        async def body(tx: Transaction) -> ResolveResult:
            flow = await self.lock_flow(tx, asked)
            edge = await lock_edge(tx, flow, wanted)
            if (
                edge is None
                or edge.edge_state is not EdgeState.APPLIED
                or (edge.upstream_id, edge.downstream_id) != ends
            ):
                raise InvalidDependency(f"flow {asked} has no applied edge {wanted} between these")
            if edge.dep_state is not DependencyState.UNSATISFIED:
                return AlreadyResolved()
            ending = await self._known_ending(tx, edge, outcome)
            if not counts(edge, ending):
                raise ExecutionNotTerminal(
                    f"{edge.upstream_id} has not ended since {edge.downstream_id} was replayed:"
                    " replay it too"
                )
            return await self._resolve(tx, edge, ending)

        return await self.store.transact(body)

    async def _known_ending(
        self, tx: Transaction, edge: Edge, outcome: TerminalOutcome | None
    ) -> Ending:
        endings = await endings_of(tx, edge.partition_key, [edge.upstream_id])
        ending = endings.get(edge.upstream_id)
        if ending is None:
            raise ExecutionNotTerminal(f"{edge.upstream_id} has not ended")
        if outcome not in (None, ending.outcome):
            raise InvalidInput(
                "upstream_outcome", f"{edge.upstream_id} ended as {ending.outcome}", outcome
            )
        return ending

    async def _resolve(self, tx: Transaction, edge: Edge, ending: Ending) -> ResolveResult:
        group = await lock_group(tx, edge.downstream_id)
        assert group is not None, "an applied edge has a group"
        settled = await self.settle_edges(
            tx, [edge], {edge.downstream_id: group}, {edge.upstream_id: ending}
        )
        if group.group_state is not GroupState.PENDING:
            return AlreadyFired()
        (after,) = settled.resolution.groups
        if after.group_state is GroupState.PENDING:
            return Pending()
        if after.group_state is GroupState.IMPOSSIBLE:
            return Impossible(child_skipped=bool(skipped_among(settled.children)))
        return Satisfied(data_injected=await _injected(tx, settled, edge.downstream_id))

    # Edges nobody applied

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
            flow = await self.find_to_lock(tx, found.flow_id)
            edge = None if flow is None else await lock_edge(tx, flow, found.edge_id)
            if edge is None or edge.edge_state is EdgeState.APPLIED:
                return False
            await self.apply_edge(tx, edge)
            return True

        return await self.store.transact(body)

    # What a worker gets from upstreams

    async def read_execution_inputs(self, execution_id: str) -> dict[str, bytes | None]:
        """Results passed along edges, by name; None for an upstream that left none."""
        asked = self.check_execution_id(execution_id)

        async def body(reader: Reader) -> dict[str, bytes | None]:
            inputs = (await inputs_of(reader, [asked])).get(asked, {})
            return {each.name: each.value for each in inputs.values()}

        return await self.store.read(body)


def check_outcome(outcome: object) -> TerminalOutcome:
    try:
        known = TerminalOutcome(str(outcome))
    except ValueError:
        known = TerminalOutcome.NONE
    if known is TerminalOutcome.NONE:
        raise InvalidInput("upstream_outcome", "must be a terminal outcome", outcome)
    return known


async def _flows_with_endings(tx: Transaction, start: int) -> Sequence[FlowRecord]:
    """A few flows that nobody else is busy with, locked."""
    return await tx.select_records(
        FlowRecord,
        "lock_dispatch_flows",
        start=start,
        candidates=FLOWS_LOOKED_AT,
        limit=FLOWS_PER_BATCH,
    )


async def _take(tx: Transaction, flows: Sequence[FlowRecord], limit: int) -> list[QueuedEnding]:
    rows = await tx.select(
        "take_completions",
        partition_keys=[flow.partition_key for flow in flows],
        flow_ids=[flow.flow_id for flow in flows],
        limit=limit,
    )
    return [_taken(row) for row in rows]


def _taken(row: Row) -> QueuedEnding:
    partition_key = int(str(row["partition_key"]))
    replay_count = int(str(row["replay_count"]))
    outcome = TerminalOutcome(str(row["outcome"]))
    reason = row["cancellation_reason"]
    return QueuedEnding(
        row=CompletionDispatch(
            partition_key=partition_key,
            flow_id=FlowId(str(row["flow_id"])),
            execution_id=make_execution_id(partition_key, str(row["execution_id"])),
            replay_count=replay_count,
            outcome=outcome,
            enqueued_at_ms=int(str(row["enqueued_at_ms"])),
        ),
        ending=ending_of(row, outcome),
        stale=int(str(row["current_replay_count"])) != replay_count,
        spared=is_spared(outcome, None if reason is None else str(reason)),
    )


def _counted(flow: FlowRecord, ended: Sequence[QueuedEnding]) -> FlowRecord:
    counted = count_endings(
        flow, (each.row.outcome for each in ended), spared=sum(each.spared for each in ended)
    )
    return with_last_end(counted, (each.row.enqueued_at_ms for each in ended))


async def open_edges(tx: Transaction, lives: Mapping[ExecutionId, int]) -> Sequence[Edge]:
    """Applied edges that the ends of these lives resolve, locked; only so many at a time.

    `lives` says how often each of the upstreams was replayed.
    """
    if not lives:
        return []
    return await tx.select_records(
        Edge,
        "open_edges",
        partition_keys=[partition_of(each) for each in lives],
        execution_ids=[uuid_of(each) for each in lives],
        replay_counts=list(lives.values()),
        limit=DISPATCH_EDGES_MAX,
    )


def _before(row: CompletionDispatch, last: Edge) -> bool:
    """Whether all edges of this ending come before `last`, in the order they are read."""
    return (row.partition_key, uuid_of(row.execution_id)) < (
        last.partition_key,
        uuid_of(last.upstream_id),
    )


async def _injected(tx: Transaction, settled: Settled, child_id: ExecutionId) -> bool:
    """Whether the child, now free to run, got its payload from an upstream."""
    if not any(isinstance(e, Execution) and waits_for_worker(e) for e in settled.children.updates):
        return False
    inputs = (await inputs_of(tx, [child_id])).get(child_id, {})
    return any(each.replaces_payload and each.value is not None for each in inputs.values())
