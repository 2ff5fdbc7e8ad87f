"""A flow's nodes and edges as they are in the database."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Final

from msgspec import Struct
from rich.console import Console
from rich.text import Text

from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.checks import visible
from flowfabric.core.flow_joins import EdgeDependencyPolicy, JoinAll, JoinAny, JoinQuorum
from flowfabric.core.flow_records import DependencyState, FlowState, OnSatisfied
from flowfabric.core.ids import ExecutionId
from flowfabric.core.states import TERMINAL_STATES, PublicState, TerminalOutcome
from flowfabric.core.views import EdgeSnapshot, ExecutionSnapshot, FlowMember, FlowSnapshot
from flowfabric.engine.engine import Engine
from flowfabric.engine.flow_reads import Incoming
from flowfabric.engine.paging import pages
from flowfabric.flows.nodes import NAME_TAG, NodeNames

STEPS_UP_MAX: Final = 1_000
"""How far up to look for the reason why a node was skipped."""


class GraphNode(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    name: str
    execution_kind: str
    public_state: PublicState
    blocked: bool
    """Whether changed code has stopped it."""
    policy: EdgeDependencyPolicy | None
    """When it may run; None for a node that waits for nothing."""
    upstreams: tuple[ExecutionId, ...]
    """The nodes it waits for, in the order of the graph's nodes."""


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
    """Which member caused another to be skipped: the nearest one upstream that really ran."""
    for _ in range(STEPS_UP_MAX):
        edges = await engine.list_edges(flow_id, Incoming(execution_id))
        bad = [each for each in edges if each.dep_state is DependencyState.IMPOSSIBLE]
        if not bad:
            return ""
        ran = [each for each in bad if each.resolved_outcome is not TerminalOutcome.SKIPPED]
        execution_id = (ran or bad)[0].upstream_execution_id
        if ran:
            culprit = await engine.describe_execution(execution_id)
            if culprit is None:
                return ""
            return _blamed(culprit, await _name_of(engine, flow_id, culprit))
    return ""


async def _name_of(engine: Engine, flow_id: str, member: ExecutionSnapshot) -> str:
    """What the graph calls a member. Names that nobody chose depend on all members."""
    if NAME_TAG in member.tags:
        return member.tags[NAME_TAG]
    return _names(await _members(engine, flow_id)).get(member.execution_id, member.execution_kind)


def _blamed(culprit: ExecutionSnapshot, name: str) -> str:
    why = culprit.failure_reason or culprit.cancellation_reason
    ended = f"{name} ({culprit.execution_id}) {culprit.public_state}"
    return f"skipped, because {ended}{f': {why}' if why else ''}"


def _names(members: list[FlowMember]) -> dict[ExecutionId, str]:
    chosen = {each.execution_id: each.tags[NAME_TAG] for each in members if NAME_TAG in each.tags}
    names = NodeNames()
    names.taken.update(chosen.values())
    return {
        each.execution_id: chosen.get(each.execution_id) or names.next_for(each.execution_kind)
        for each in members
    }


async def _members(engine: Engine, flow_id: str) -> list[FlowMember]:
    read = pages(lambda at: engine.list_flow_members(flow_id, cursor=at, limit=PAGE_MAX))
    return [member async for page in read for member in page.members]


# A flow drawn as a tree of lines, for terminals -----------------------------
#
# Each node hangs below the node it waits for that is furthest from the start; if it waits
# for several, they are listed after it. In a large flow, nodes that look alike (the same
# kind, and the same kinds of neighbours) share a line that counts their states.
#
# If the terminal is too narrow, lists of names become numbers, and chains too long to be
# indented continue straight down, with arrows.

NODES_APART_MAX: Final = 30
"""Up to this size every node has its own line."""
ROUNDS_MAX: Final = 16
"""How far from a node its neighbours matter for whether it looks like another."""
LINES_MAX: Final = 500
NAMES_SHOWN_MAX: Final = 4

BLOCKED: Final = "blocked"
"""The state shown for a delayed node that changed code has stopped."""
_MARKS: Final[dict[str, tuple[str, str]]] = {
    PublicState.WAITING: ("○", "yellow"),
    PublicState.DELAYED: ("○", "blue"),
    BLOCKED: ("✗", "bold red"),
    PublicState.RATE_LIMITED: ("○", "yellow"),
    PublicState.WAITING_CHILDREN: ("·", "blue"),
    PublicState.ACTIVE: ("●", "bold cyan"),
    PublicState.SUSPENDED: ("◌", "magenta"),
    PublicState.RESUMABLE: ("○", "yellow"),
    PublicState.COMPLETED: ("✓", "green"),
    PublicState.FAILED: ("✗", "bold red"),
    PublicState.CANCELLED: ("⊘", "dim"),
    PublicState.EXPIRED: ("✗", "red"),
    PublicState.SKIPPED: ("↷", "dim"),
}
_FLOW_STYLES: Final = {
    FlowState.OPEN: "yellow",
    FlowState.RUNNING: "bold cyan",
    FlowState.BLOCKED: "blue",
    FlowState.COMPLETED: "green",
    FlowState.FAILED: "bold red",
    FlowState.CANCELLED: "dim",
}
_ASCII: Final = str.maketrans(
    {"✓": "+", "✗": "x", "●": "*", "○": "o", "◌": "~", "·": ".", "⊘": "-", "↷": ">", "×": "x"}
    | {"└": "`", "├": "|", "─": "-", "│": "|", "↓": "v", "←": "<", "…": "..."}
)
"""For terminals and files that have no other characters."""
_ORDER: Final = {state: place for place, state in enumerate(_MARKS)}


@dataclass
class Branch:
    """One line: a node, or several that look alike."""

    nodes: list[GraphNode]
    depth: int
    upstreams: list["Branch"] = field(default_factory=list)
    below: list["Branch"] = field(default_factory=list)

    @property
    def label(self) -> str:
        if len(self.nodes) == 1:
            return visible(self.nodes[0].name)
        return f"{visible(self.nodes[0].execution_kind)} ×{len(self.nodes)}"


def print_graph(console: Console, graph: FlowGraph, *, every_node: bool = False) -> None:
    """Print the flow as wide as the console is, in characters it has."""
    drawn = draw(graph, every_node=every_node, width=console.width)
    try:
        drawn.plain.encode(console.encoding)
    except UnicodeEncodeError:
        plain = drawn.plain.translate(_ASCII).encode(console.encoding, "replace")
        for text in plain.decode(console.encoding).split("\n"):
            console.print(Text(text), no_wrap=True, overflow="crop")
    else:
        for line in drawn.split(allow_blank=True):
            console.print(line, no_wrap=True, overflow="ellipsis")


def draw(graph: FlowGraph, *, every_node: bool = False, width: int) -> Text:
    """The flow's headline and its tree."""
    apart = every_node or len(graph.nodes) <= NODES_APART_MAX
    lines = headline(graph, width)
    heads = len(lines)
    branches = _branches(graph, apart=apart)
    roots = [each for each in branches if not each.upstreams]
    rows = _lay_out(roots, straight=False)
    if any(len(guide) > width // 3 for guide, _ in rows):
        rows = _lay_out(roots, straight=True)
    shown = rows[: None if every_node else LINES_MAX]
    lefts = [_left(guide, branch) for guide, branch in shown]
    # A label far longer than the others moves only its own state to the right.
    column = max((each.cell_len for each in lefts if each.cell_len <= width // 2), default=0)
    for left, (_, branch) in zip(lefts, shown, strict=True):
        left.append(" " * (max(column - left.cell_len, 0) + 2)).append_text(_states(branch))
        lines.append(left.append_text(_after(branch, width - left.cell_len)))
    if len(lines) - heads < len(rows):
        lines.append(Text(f"… and {len(rows) - len(shown)} more lines", style="dim"))
    return Text("\n").join(lines)


def headline(graph: FlowGraph, width: int) -> list[Text]:
    """The flow's name and progress; its id goes below if the line is too short."""
    flow = graph.flow
    ended = sum(each.public_state in TERMINAL_STATES for each in graph.nodes)
    line = Text.assemble(
        (visible(flow.flow_kind), "bold"),
        "  ",
        flow_state(flow.state),
        f"  {ended} of {len(graph.nodes)} ended",
    )
    if line.cell_len + 2 + len(flow.flow_id) > width:
        return [line, Text(flow.flow_id, style="dim")]
    return [line.append(f"  {flow.flow_id}", style="dim")]


def flow_state(state: FlowState) -> Text:
    # People call only what changed code has stopped blocked.
    shown = "waiting" if state is FlowState.BLOCKED else state.value
    return Text(shown, style=_FLOW_STYLES[state])


def _branches(graph: FlowGraph, *, apart: bool) -> list[Branch]:
    depths = _depths(graph.nodes)
    looks: Mapping[ExecutionId, object] = (
        {each.execution_id: each.execution_id for each in graph.nodes}
        if apart
        else _looks(graph.nodes, depths)
    )
    by_look: dict[object, Branch] = {}
    for node in graph.nodes:
        look = looks[node.execution_id]
        branch = by_look.setdefault(look, Branch([], depths[node.execution_id]))
        branch.nodes.append(node)
    for branch in by_look.values():
        upstreams = {looks[each]: None for node in branch.nodes for each in node.upstreams}
        branch.upstreams = [by_look[look] for look in upstreams]
        if branch.upstreams:
            # The last of them, so that everything it waits for is above it.
            max(reversed(branch.upstreams), key=lambda each: each.depth).below.append(branch)
    return list(by_look.values())


def _depths(nodes: Sequence[GraphNode]) -> dict[ExecutionId, int]:
    """The number of edges of the longest path from a start."""
    upstreams = {each.execution_id: each.upstreams for each in nodes}
    depths: dict[ExecutionId, int] = {}
    for node_id in TopologicalSorter(upstreams).static_order():
        above = (depths[each] + 1 for each in upstreams.get(node_id, ()))
        depths[node_id] = max(above, default=0)
    return depths


def _looks(nodes: Sequence[GraphNode], depths: Mapping[ExecutionId, int]) -> dict[ExecutionId, int]:
    """Give nodes that look alike the same number.

    Nodes at different depths never look alike, so that lines cannot wait for each other in a
    circle.
    """
    keys: dict[ExecutionId, object] = {
        each.execution_id: (depths[each.execution_id], each.execution_kind, each.policy)
        for each in nodes
    }
    looks = _numbered(keys)
    for _ in range(ROUNDS_MAX):
        above: dict[ExecutionId, set[int]] = {each.execution_id: set() for each in nodes}
        below: dict[ExecutionId, set[int]] = {each.execution_id: set() for each in nodes}
        for node in nodes:
            for upstream in node.upstreams:
                above[node.execution_id].add(looks[upstream])
                below[upstream].add(looks[node.execution_id])
        finer = _numbered(
            {each: (looks[each], frozenset(above[each]), frozenset(below[each])) for each in looks}
        )
        if len(set(finer.values())) == len(set(looks.values())):
            break
        looks = finer
    return looks


def _numbered(keys: Mapping[ExecutionId, object]) -> dict[ExecutionId, int]:
    numbers: dict[object, int] = {}
    return {each: numbers.setdefault(key, len(numbers)) for each, key in keys.items()}


DrawnRow = tuple[str, Branch]
"""A line's guide, and what stands behind it."""


def _lay_out(roots: Sequence[Branch], *, straight: bool) -> list[DrawnRow]:
    """Lines in the order they are read. A flow may be deeper than Python's stack.

    With `straight`, an only child is not indented.
    """
    rows: list[DrawnRow] = []
    stack = [("", "", each) for each in reversed(roots)]
    while stack:
        guide, below_guide, branch = stack.pop()
        rows.append((guide, branch))
        if straight and len(branch.below) == 1:
            stack.append((below_guide + "↓ ", below_guide, branch.below[0]))
            continue
        last = branch.below[-1:]
        for each in reversed(branch.below):
            end = each in last
            stack.append(
                (
                    below_guide + ("└─ " if end else "├─ "),
                    below_guide + ("   " if end else "│  "),
                    each,
                )
            )
    return rows


def _left(guide: str, branch: Branch) -> Text:
    mark, style = _MARKS[_telling(branch)]
    return Text.assemble((guide, "dim"), (f"{mark} ", style), branch.label)


def _shown(node: GraphNode) -> str:
    return BLOCKED if node.blocked else node.public_state


def _telling(branch: Branch) -> str:
    """The state whose mark a line shows: trouble before work before rest."""
    states = {_shown(each) for each in branch.nodes}
    for state in (PublicState.FAILED, PublicState.EXPIRED, BLOCKED, PublicState.ACTIVE):
        if state in states:
            return state
    return min(states, key=_ORDER.__getitem__)


def _states(branch: Branch) -> Text:
    counts = Counter(map(_shown, branch.nodes))
    text = Text()
    for state in sorted(counts, key=_ORDER.__getitem__):
        number = f"{counts[state]} " if len(branch.nodes) > 1 else ""
        text.append(", " if text else "")
        text.append(number + state.replace("_", " "), style=_MARKS[state][1])
    return text


def _after(branch: Branch, room: int) -> Text:
    """The other lines that a line waits for and the tree does not show, as far as they fit."""
    policy = branch.nodes[0].policy
    if policy is None:
        return Text()
    alone = len(branch.upstreams) == 1 and len(branch.upstreams[0].nodes) == 1
    if isinstance(policy, JoinAll) and (alone or len(branch.nodes[0].upstreams) == 1):
        return Text()
    fitting = (each for each in _wordings(branch, policy) if len(each) <= room)
    return Text(next(fitting, ""), style="dim")


def _wordings(branch: Branch, policy: EdgeDependencyPolicy) -> Iterator[str]:
    """The same in ever fewer words."""
    spares = not isinstance(policy, JoinAll) and policy.on_satisfied is OnSatisfied.CANCEL_REMAINING
    end = "; cancels the rest" if spares else ""
    total = len(branch.nodes[0].upstreams)
    match policy:
        case JoinAll():
            needed, of_them, counted = "", "", f"all {total}"
        case JoinAny():
            needed, of_them, counted = "1 of ", f"1 of {total}: ", f"1 of {total}"
        case JoinQuorum(k=k):
            needed, of_them, counted = f"{k} of ", f"{k} of {total}: ", f"{k} of {total}"
    labels = [each.label for each in branch.upstreams]
    for count in range(min(len(labels), NAMES_SHOWN_MAX), 0, -1):
        names = ", ".join(labels[:count])
        if count == len(labels):
            yield f"  ← {needed}{names}{end}"
        else:
            yield f"  ← {of_them}{names} and {len(labels) - count} more{end}"
    yield f"  ← {counted}{end}"
    yield f"  ← {counted}"
