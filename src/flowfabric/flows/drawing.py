"""A flow drawn as a tree of lines, for terminals.

Each node hangs below the one it waits for that is furthest from the start; when it
waits for several, they are named behind it. In a large flow nodes that look alike,
being of one kind and waiting for and awaited by alike ones, share a line that counts
their states.

What does not fit the width is said shorter: names of others become their number, and
chains too long to be indented stand straight below each other, behind arrows.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.text import Text

from flowfabric.core.checks import visible
from flowfabric.core.flow_joins import EdgeDependencyPolicy, JoinAll, JoinAny, JoinQuorum
from flowfabric.core.flow_records import FlowState, OnSatisfied
from flowfabric.core.ids import ExecutionId
from flowfabric.core.states import TERMINAL_STATES, PublicState
from flowfabric.flows.graph import FlowGraph, GraphNode

NODES_APART_MAX: Final = 30
"""Up to here every node has its own line."""
ROUNDS_MAX: Final = 16
"""How far from a node its surroundings make it look different."""
LINES_MAX: Final = 500
NAMES_SHOWN_MAX: Final = 4

BLOCKED: Final = "blocked"
"""What people are told of a delayed node that changed code has stopped."""
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
    if _encodable(drawn.plain, console.encoding):
        for line in drawn.split(allow_blank=True):
            console.print(line, no_wrap=True, overflow="ellipsis")
        return
    plain = drawn.plain.translate(_ASCII).encode(console.encoding, "replace")
    for text in plain.decode(console.encoding).split("\n"):
        console.print(Text(text), no_wrap=True, overflow="crop")


def _encodable(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


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
    # A label far longer than the others pushes its own state aside, and no other.
    column = max((each.cell_len for each in lefts if each.cell_len <= width // 2), default=0)
    for left, (_, branch) in zip(lefts, shown, strict=True):
        left.append(" " * (max(column - left.cell_len, 0) + 2)).append_text(_states(branch))
        lines.append(left.append_text(_after(branch, width - left.cell_len)))
    if len(lines) - heads < len(rows):
        lines.append(Text(f"… and {len(rows) - len(shown)} more lines", style="dim"))
    return Text("\n").join(lines)


def headline(graph: FlowGraph, width: int) -> list[Text]:
    """What the flow is and how it does; its id below where the line is too short for it."""
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
    return Text(state, style=_FLOW_STYLES[state])


def _branches(graph: FlowGraph, *, apart: bool) -> list[Branch]:
    depths = _depths(graph.nodes)
    looks: Mapping[ExecutionId, object] = (
        {each.execution_id: each.execution_id for each in graph.nodes}
        if apart
        else _looks(graph.nodes, depths)
    )
    found: dict[object, Branch] = {}
    for node in graph.nodes:
        look = looks[node.execution_id]
        branch = found.setdefault(look, Branch([], depths[node.execution_id]))
        branch.nodes.append(node)
    for branch in found.values():
        upstreams = {looks[each]: None for node in branch.nodes for each in node.upstreams}
        branch.upstreams = [found[look] for look in upstreams]
        if branch.upstreams:
            # The last of them, so that whatever it waits for stands above it.
            max(reversed(branch.upstreams), key=lambda each: each.depth).below.append(branch)
    return list(found.values())


def _depths(nodes: Sequence[GraphNode]) -> dict[ExecutionId, int]:
    """How many edges the longest way from a start has."""
    downstreams: dict[ExecutionId, list[ExecutionId]] = {}
    open_count = {each.execution_id: len(each.upstreams) for each in nodes}
    for node in nodes:
        for upstream in node.upstreams:
            downstreams.setdefault(upstream, []).append(node.execution_id)
    depths = dict.fromkeys(open_count, 0)
    free = [each for each, count in open_count.items() if count == 0]
    while free:
        node_id = free.pop()
        for downstream in downstreams.get(node_id, ()):
            depths[downstream] = max(depths[downstream], depths[node_id] + 1)
            open_count[downstream] -= 1
            if open_count[downstream] == 0:
                free.append(downstream)
    return depths


def _looks(nodes: Sequence[GraphNode], depths: Mapping[ExecutionId, int]) -> dict[ExecutionId, int]:
    """Numbers that are equal for nodes that look alike.

    Nodes at different depths never do, so that lines cannot wait for each other in a
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

    With `straight`, the only one below another is not indented.
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
    """Which others a line waits for, where the tree does not say it; as much as there is room."""
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
