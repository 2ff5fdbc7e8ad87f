"""What should become of a flow, in sets of names. It knows nothing of rows."""

import random

from flowfabric.core.flow_joins import EdgeDependencyPolicy, JoinAll, JoinAny, JoinQuorum
from flowfabric.core.flow_records import OnSatisfied

SUCCESS, FAILED, CANCELLED, SKIPPED = "completed", "failed", "cancelled", "skipped"


class Node:
    def __init__(self, name: int, upstreams: list[int], policy: EdgeDependencyPolicy) -> None:
        self.name = name
        self.upstreams = upstreams
        self.policy = policy


class Model:
    """What should happen, in sets."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.ready: set[int] = set()
        self.running: set[int] = set()
        self.ended: dict[int, str] = {}
        self.untold: set[int] = set()
        self.given_up: set[int] = set()
        self.spared: set[int] = set()
        self.resolved: dict[int, dict[int, str]] = {}
        self.fired: dict[int, str] = {}

    def build(self, nodes: list[Node]) -> None:
        for node in nodes:
            self.nodes[node.name] = node
            self.resolved[node.name] = {}
            if not node.upstreams:
                self.ready.add(node.name)
        # A member skipped by this very step is told of later, like any other ending.
        ended_before = set(self.ended)
        for node in nodes:
            self.resolve(node.name, ended_before & set(node.upstreams))

    def build_slowly(self, node: Node) -> None:
        """The same, edge by edge: each counts when it is applied."""
        self.nodes[node.name] = node
        self.resolved[node.name] = {}
        if not node.upstreams:
            self.ready.add(node.name)
        for upstream in node.upstreams:
            self.resolve(node.name, {upstream} & self.ended.keys())

    def claim(self) -> set[int]:
        claimed, self.ready = self.ready, set()
        self.running |= claimed
        return claimed

    def end(self, name: int, outcome: str) -> None:
        if name not in self.ended:
            self.ready.discard(name)
            self.running.discard(name)
            self.ended[name] = outcome
            self.untold.add(name)

    def tell(self, names: set[int]) -> None:
        self.untold -= names
        for node in list(self.nodes.values()):
            self.resolve(node.name, names & set(node.upstreams))

    def resolve(self, name: int, upstreams: set[int]) -> None:
        fresh = upstreams - self.resolved[name].keys()
        if not fresh:
            return
        self.resolved[name] |= {u: self.ended[u] for u in fresh}
        verdict = judge(self.nodes[name], self.resolved[name])
        if verdict is None or name in self.fired:
            return
        self.fired[name] = verdict
        policy = self.nodes[name].policy
        if not isinstance(policy, JoinAll) and policy.on_satisfied == OnSatisfied.CANCEL_REMAINING:
            self.given_up |= set(self.nodes[name].upstreams) - self.resolved[name].keys()
        if verdict == "impossible":
            self.end(name, SKIPPED)
        elif name not in self.ended and name not in self.running:
            self.ready.add(name)

    def cancel(self, names: set[int]) -> None:
        self.given_up -= names
        self.spared |= names - self.ended.keys()
        for name in names:
            self.end(name, CANCELLED)


def judge(node: Node, resolved: dict[int, str]) -> str | None:
    """Whether a join holds, never will, or is still open."""
    total = len(node.upstreams)
    match node.policy:
        case JoinAll():
            needed = total
        case JoinAny():
            needed = 1
        case JoinQuorum(k=k):
            needed = k
    good = sum(outcome == SUCCESS for outcome in resolved.values())
    bad = len(resolved) - good
    if good >= needed:
        return "satisfied"
    return "impossible" if total - bad < needed else None


def predict(nodes: list[Node], outcomes: dict[int, str]) -> dict[int, str]:
    """How everything ends when nothing is ever cancelled: no order matters then."""
    ends: dict[int, str] = {}
    for node in nodes:
        if not node.upstreams:
            ends[node.name] = outcomes[node.name]
            continue
        verdict = judge(node, {u: ends[u] for u in node.upstreams})
        assert verdict is not None
        ends[node.name] = outcomes[node.name] if verdict == "satisfied" else SKIPPED
    return ends


def random_nodes(chance: random.Random, count: int, on_satisfied: list[OnSatisfied]) -> list[Node]:
    nodes = []
    for name in range(count):
        width = min(name, chance.choice([0, 1, 1, 2, 3, 8]))
        upstreams = chance.sample(range(name), width)
        choice = chance.choice(on_satisfied)
        policies: list[EdgeDependencyPolicy] = [
            JoinAll(),
            JoinAny(choice),
            JoinQuorum(chance.randint(1, max(1, width)), choice),
        ]
        nodes.append(Node(name, upstreams, chance.choice(policies)))
    return nodes
