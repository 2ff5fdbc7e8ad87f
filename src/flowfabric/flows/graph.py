"""A flow's nodes and edges as they are in the database."""

from typing import Final

from msgspec import Struct

from flowfabric.core.flow_joins import EdgeDependencyPolicy
from flowfabric.core.flow_records import DependencyState
from flowfabric.core.ids import ExecutionId
from flowfabric.core.limits import PAGE_MAX
from flowfabric.core.states import PublicState, TerminalOutcome
from flowfabric.core.views import EdgeSnapshot, ExecutionSnapshot, FlowMember, FlowSnapshot
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow_reads import Incoming
from flowfabric.flows.node import NAME_TAG, NodeNames

STEPS_UP_MAX: Final = 1_000
"""How far up a skipped node's reason is looked for."""


class GraphNode(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    name: str
    execution_kind: str
    public_state: PublicState
    blocked: bool
    """Whether changed code has stopped it."""
    policy: EdgeDependencyPolicy | None
    """When it may run; none for a node that waits for nothing."""
    upstreams: tuple[ExecutionId, ...]
    """Those it waits for, in the order of the graph's nodes."""


class FlowGraph(Struct, frozen=True, kw_only=True):
    flow: FlowSnapshot
    nodes: tuple[GraphNode, ...]
    """In the order they were added, if `App.flow` built them."""
    edges: tuple[EdgeSnapshot, ...]


async def read_graph(engine: Engine, flow_id: str) -> FlowGraph | None:
    """None when there is no such flow."""
    flow = await engine.describe_flow(flow_id)
    if flow is None:
        return None
    members = await _members(engine, flow_id)
    edges = await engine.list_edges(flow_id)
    groups = {each.downstream_execution_id: each for each in flow.edge_groups}
    places = {each.execution_id: place for place, each in enumerate(members)}
    upstreams: dict[ExecutionId, list[ExecutionId]] = {}
    for edge in sorted(edges, key=lambda edge: places.get(edge.upstream_execution_id, -1)):
        upstreams.setdefault(edge.downstream_execution_id, []).append(edge.upstream_execution_id)
    names = _names(members)
    return FlowGraph(
        flow=flow,
        nodes=tuple(
            GraphNode(
                execution_id=each.execution_id,
                name=names[each.execution_id],
                execution_kind=each.execution_kind,
                public_state=each.public_state,
                blocked=each.blocked,
                policy=groups[each.execution_id].policy if each.execution_id in groups else None,
                upstreams=tuple(upstreams.get(each.execution_id, ())),
            )
            for each in members
        ),
        edges=edges,
    )


async def why_skipped(engine: Engine, flow_id: str, execution_id: ExecutionId) -> str:
    """Which member a skipped one was skipped for: the first on the way up that really ran."""
    for _ in range(STEPS_UP_MAX):
        edges = await engine.list_edges(flow_id, Incoming(execution_id))
        bad = [each for each in edges if each.dep_state is DependencyState.IMPOSSIBLE]
        if not bad:
            return ""
        ran = [each for each in bad if each.resolved_outcome is not TerminalOutcome.SKIPPED]
        execution_id = (ran or bad)[0].upstream_execution_id
        if ran:
            found = await engine.describe_execution(execution_id)
            return "" if found is None else _blamed(found)
    return ""


def _blamed(culprit: ExecutionSnapshot) -> str:
    name = culprit.tags.get(NAME_TAG, culprit.execution_kind)
    why = culprit.failure_reason or culprit.cancellation_reason
    ended = f"{name} ({culprit.execution_id}) {culprit.public_state}"
    return f"skipped, because {ended}{f': {why}' if why else ''}"


def _names(members: list[FlowMember]) -> dict[ExecutionId, str]:
    given = {each.execution_id: each.tags[NAME_TAG] for each in members if NAME_TAG in each.tags}
    names = NodeNames()
    names.taken.update(given.values())
    return {
        each.execution_id: given.get(each.execution_id) or names.next_for(each.execution_kind)
        for each in members
    }


async def _members(engine: Engine, flow_id: str) -> list[FlowMember]:
    members: list[FlowMember] = []
    cursor: str | None = None
    while True:
        page = await engine.list_flow_members(flow_id, cursor=cursor, limit=PAGE_MAX)
        members += page.members
        cursor = page.next_cursor
        if cursor is None:
            return members
