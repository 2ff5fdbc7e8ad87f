"""Random flows, run in random order with random crashes, end as a simple model says.

The model knows nothing of rows: it keeps sets of names. The driver applies the same
steps to the model and to an engine, and compares what is ready after every step and
everything at the end. A crash loses the process before or after the commit of a
transaction; what comes next runs on a fresh engine.
"""

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowfabric import Engine
from flowfabric.config import EngineConfig
from flowfabric.core.creation import NewExecution
from flowfabric.core.flow_build import Dependency, Join
from flowfabric.core.flow_model import FlowState, OnSatisfied
from flowfabric.core.flow_policy import AllOf, AnyOf, EdgeDependencyPolicy, Quorum
from flowfabric.core.ids import ExecutionId, FlowId, flow_execution_id, uuid4_from
from flowfabric.core.results import Claimed
from flowfabric.core.states import FailureClass
from flowfabric.store.base import Body, Parameter, Row
from flowfabric.store.sqlite.store import SqliteStore
from tests.properties.asyncio_runner import run

T = TypeVar("T")

LEASE_MS = 24 * 60 * 60 * 1_000
STEPS_MAX = 20_000

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
        if not isinstance(policy, AllOf) and policy.on_satisfied == OnSatisfied.CANCEL_REMAINING:
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
        case AllOf():
            needed = total
        case AnyOf():
            needed = 1
        case Quorum(k=k):
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


class Crash(Exception):
    """The process is gone."""


class CrashingStore(SqliteStore):
    """Loses the process around the commit of a transaction to come."""

    crash: tuple[int, bool] | None = None
    """After how many transactions, and whether that one still commits."""

    async def transact(self, body: Body[T]) -> T:
        return await self._around(lambda: super(CrashingStore, self).transact(body))

    async def execute_alone(self, name: str, **parameters: Parameter) -> list[Row]:
        async def once() -> list[Row]:
            return list(await super(CrashingStore, self).execute_alone(name, **parameters))

        return await self._around(once)

    async def _around(self, once: Callable[[], Awaitable[T]]) -> T:
        if self.crash is None:
            return await once()
        countdown, commits = self.crash
        if countdown > 0:
            self.crash = (countdown - 1, commits)
            return await once()
        self.crash = None
        if commits:
            await once()
        raise Crash


class Driver:
    def __init__(self, chance: random.Random, nodes: list[Node], store: CrashingStore) -> None:
        self.chance = chance
        self.waiting = list(nodes)
        self.store = store
        self.model = Model()
        self.handles: dict[int, Claimed] = {}
        self.outcomes = {n.name: chance.choice([SUCCESS, SUCCESS, FAILED]) for n in nodes}
        self.interfered = False
        self.closed = False

    async def open(self) -> None:
        self.engine = await Engine.open(self.store, EngineConfig())
        self.flow_id = FlowId(self.new_uuid())
        await self.engine.create_flow(self.flow_id, flow_kind="random")
        self.ids: dict[int, ExecutionId] = {node.name: self.new_id() for node in self.waiting}
        self.names = {execution_id: name for name, execution_id in self.ids.items()}

    def new_id(self) -> ExecutionId:
        return flow_execution_id(self.flow_id, self.new_uuid(), self.engine.deployment.partitions)

    def new_uuid(self) -> str:
        return uuid4_from(self.chance.randbytes(16))

    async def attempt(self, operation: Callable[[], Awaitable[object]]) -> bool:
        """Run one operation, perhaps losing the process; tell whether it happened.

        What a lost process was asked to do is sometimes asked again.
        """
        commits = self.chance.random() < 0.5
        if self.chance.random() < 0.15:
            self.store.crash = (0, commits)
        try:
            await operation()
        except Crash:
            self.engine = Engine(self.store, self.engine.config, self.engine.deployment)
            return commits
        return True

    def ordered(self, names: set[int]) -> list[int]:
        """In the order in which queues are worked off."""
        return sorted(names, key=lambda name: self.ids[name])

    # Steps

    async def build(self) -> None:
        count = self.chance.randint(1, 25)
        nodes, self.waiting = self.waiting[:count], self.waiting[count:]
        members = [
            NewExecution(execution_kind="work", execution_id=self.ids[node.name]) for node in nodes
        ]
        joins = [
            Join(
                downstream_execution_id=self.ids[node.name],
                dependencies=[
                    Dependency(upstream_execution_id=self.ids[each]) for each in node.upstreams
                ],
                policy=node.policy,
            )
            for node in nodes
            if node.upstreams
        ]

        async def add() -> None:
            await self.engine.add_dependencies(self.flow_id, joins, members=members)

        while not await self.attempt(add):
            pass
        if self.chance.random() < 0.2:
            await add()
        self.model.build(nodes)

    async def claim(self) -> None:
        claimed = await self.engine.claim_many(
            ["default"],
            limit=1_000,
            worker_id="w",
            worker_instance_id="w-1",
            lease_ttl_ms=LEASE_MS,
        )
        handles = {self.names[each.execution_id]: each for each in claimed}
        assert set(handles) == self.model.claim()
        self.handles |= handles

    async def finish(self) -> None:
        name = self.chance.choice(sorted(self.model.running))
        handle = self.handles[name].handle
        outcome = self.outcomes[name]

        async def report() -> None:
            if outcome == SUCCESS:
                await self.engine.complete(handle, b"done")
            else:
                await self.engine.fail(handle, "no", failure_class=FailureClass.PERMANENT)

        if await self.attempt(report):
            if self.chance.random() < 0.2:
                await report()
            self.model.end(name, outcome)

    async def tell_one(self) -> None:
        name = self.chance.choice(sorted(self.model.untold))
        if await self.attempt(lambda: self.engine.cascade_completion(self.ids[name])):
            self.model.tell({name})

    async def tell_some(self) -> None:
        limit = self.chance.choice([1, 3, 500])
        told = self.ordered(self.model.untold)[:limit]
        if await self.attempt(lambda: self.engine.dispatch_completions(limit=limit)):
            self.model.tell(set(told))

    async def cancel_given_up(self) -> None:
        limit = self.chance.choice([1, 3, 200])
        cancelled = self.ordered(self.model.given_up)[:limit]
        if await self.attempt(lambda: self.engine.cancel_pending_members(limit=limit)):
            self.model.cancel(set(cancelled))

    async def interfere(self) -> None:
        """An operator cancels something."""
        self.interfered = True
        open_names = sorted(self.model.nodes.keys() - self.model.ended.keys())
        name = self.chance.choice(open_names)
        target = self.ids[name]
        if await self.attempt(lambda: self.engine.cancel_execution(target, reason="enough")):
            self.model.end(name, CANCELLED)

    async def close(self) -> None:
        """An operator cancels the flow; only the first time means anything."""
        self.interfered = True
        policy = self.chance.choice(["cancel_all", "cancel_pending", "flow_only"])
        if not await self.attempt(
            lambda: self.engine.cancel_flow_header(self.flow_id, cancellation_policy=policy)
        ):
            return
        if self.closed:
            return
        self.closed = True
        self.waiting = []
        spared = {"cancel_all": set(), "cancel_pending": self.model.running}.get(policy)
        if spared is not None:
            names = self.model.nodes.keys() - self.model.ended.keys() - spared
            for name in names:
                self.model.end(name, CANCELLED)

    def possible(self) -> list[Callable[[], Awaitable[None]]]:
        model = self.model
        steps: list[Callable[[], Awaitable[None]]] = [self.build] * 2 if self.waiting else []
        if model.ready:
            steps.append(self.claim)
        steps += [self.finish] * 3 if model.running else []
        if model.untold:
            steps += [self.tell_one, self.tell_some]
        if model.given_up:
            steps.append(self.cancel_given_up)
        return steps

    async def run(self, meddling: float) -> None:
        for _ in range(STEPS_MAX):
            steps = self.possible()
            if not steps:
                break
            await self.chance.choice(steps)()
            if self.chance.random() < meddling and self.model.nodes.keys() - self.model.ended:
                await (self.interfere if self.chance.random() < 0.9 else self.close)()
        assert self.possible() == [], "it never comes to an end"
        await self.compare()

    async def compare(self) -> None:
        states = {
            name: str(await self.engine.read_execution_state(self.ids[name]))
            for name in self.model.nodes
        }
        assert states == self.model.ended
        due = await self.engine.next_due()
        assert not {"dispatch", "member_cancel"} & due.keys()
        flow = await self.engine.describe_flow(self.flow_id)
        assert flow is not None
        assert flow.state is self.expected_state()
        groups = {self.names[g.downstream_execution_id]: g for g in flow.edge_groups}
        joined = {name for name, node in self.model.nodes.items() if node.upstreams}
        assert groups.keys() == joined
        for name, group in groups.items():
            assert group.running_count == 0
            assert group.group_state == self.model.fired[name]

    def expected_state(self) -> FlowState:
        if self.closed:
            return FlowState.CANCELLED
        ends = {end for name, end in self.model.ended.items() if name not in self.model.spared}
        return FlowState.FAILED if ends & {FAILED, CANCELLED} else FlowState.COMPLETED


def random_nodes(chance: random.Random, count: int, on_satisfied: list[OnSatisfied]) -> list[Node]:
    nodes = []
    for name in range(count):
        width = min(name, chance.choice([0, 1, 1, 2, 3, 8]))
        upstreams = chance.sample(range(name), width)
        choice = chance.choice(on_satisfied)
        policies: list[EdgeDependencyPolicy] = [
            AllOf(),
            AnyOf(choice),
            Quorum(chance.randint(1, max(1, width)), choice),
        ]
        nodes.append(Node(name, upstreams, chance.choice(policies)))
    return nodes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), count=st.integers(1, 200), meddles=st.booleans())
def test_every_member_ends_as_the_model_says(seed: int, count: int, meddles: bool) -> None:
    chance = random.Random(seed)
    nodes = random_nodes(chance, count, list(OnSatisfied))

    async def go() -> None:
        store = CrashingStore(":memory:")
        driver = Driver(chance, nodes, store)
        await driver.open()
        try:
            await driver.run(meddling=0.03 if meddles else 0.0)
        finally:
            await driver.engine.close()

    run(go())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), count=st.integers(1, 200))
def test_where_nothing_is_cancelled_the_order_makes_no_difference(seed: int, count: int) -> None:
    chance = random.Random(seed)
    nodes = random_nodes(chance, count, [OnSatisfied.LET_RUN])

    async def go() -> None:
        store = CrashingStore(":memory:")
        driver = Driver(chance, nodes, store)
        await driver.open()
        try:
            await driver.run(meddling=0.0)
            assert driver.model.ended == predict(nodes, driver.outcomes)
        finally:
            await driver.engine.close()

    run(go())
