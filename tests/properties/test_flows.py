"""Random flows, run in random order with random crashes, end as a simple model says.

The driver applies the same steps to the model and to an engine, and compares what is
ready after every step and everything at the end. A crash loses the process before or
after the commit of a transaction; what comes next runs on a fresh engine. Operations of
several transactions are lost between any two of them and begun again.
"""

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowfabric import Engine
from flowfabric.config import EngineConfig
from flowfabric.core.creation import NewExecution
from flowfabric.core.flow_endings import WaitIndefinite
from flowfabric.core.flow_joins import Dependency, Join
from flowfabric.core.flow_records import FlowState, OnSatisfied
from flowfabric.core.ids import ExecutionId, FlowId, flow_execution_id, uuid4_from
from flowfabric.core.results import Claimed
from flowfabric.core.states import FailureClass
from flowfabric.errors import DependencyAlreadyExists
from flowfabric.store.base import Store
from tests import postgres
from tests.properties.asyncio_runner import run
from tests.properties.crashes import Crash, Crashes, CrashingPostgres, CrashingSqlite
from tests.properties.flow_model import (
    CANCELLED,
    FAILED,
    SUCCESS,
    Model,
    Node,
    predict,
    random_nodes,
)

LEASE_MS = 24 * 60 * 60 * 1_000
STEPS_MAX = 20_000
POLICIES = ("flow_only", "cancel_pending", "cancel_all")


class Driver:
    def __init__(
        self, chance: random.Random, nodes: list[Node], store: Store, crashes: Crashes
    ) -> None:
        self.chance = chance
        self.waiting = list(nodes)
        self.store = store
        self.crashes = crashes
        self.model = Model()
        self.handles: dict[int, Claimed] = {}
        self.outcomes = {n.name: chance.choice([SUCCESS, SUCCESS, FAILED]) for n in nodes}
        self.interfered = False
        self.reach = -1
        """How far the flow was cancelled: an index of `POLICIES`."""

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
            self.crashes.next = (0, commits)
        try:
            await operation()
        except Crash:
            self.engine = Engine(self.store, self.engine.config, self.engine.deployment)
            return commits
        return True

    async def go_on(self, operation: Callable[[], Awaitable[object]]) -> None:
        """Repeat an operation of many transactions until it is done, losing the process
        between any two of them."""
        while True:
            if self.chance.random() < 0.5:
                self.crashes.next = (self.chance.randint(0, 4), self.chance.random() < 0.5)
            try:
                await operation()
            except Crash:
                self.engine = Engine(self.store, self.engine.config, self.engine.deployment)
            else:
                self.crashes.next = None
                return

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

        await self.go_on(add)
        if self.chance.random() < 0.2:
            await add()
        self.model.build(nodes)

    async def build_slowly(self) -> None:
        """One node, edge by edge."""
        node = self.waiting.pop(0)
        member = NewExecution(execution_kind="work", execution_id=self.ids[node.name])
        await self.go_on(lambda: self.engine.add_dependencies(self.flow_id, members=[member]))
        if node.upstreams:
            await self.go_on(
                lambda: self.engine.set_edge_group_policy(
                    self.flow_id, self.ids[node.name], node.policy
                )
            )
        edges = [(self.new_uuid(), self.ids[each]) for each in node.upstreams]
        for step in (self.stage, self.apply):
            for edge_id, upstream in edges:
                await self.go_on(partial(step, edge_id, upstream, self.ids[node.name]))
        self.model.build_slowly(node)

    async def stage(self, edge_id: str, upstream: ExecutionId, downstream: ExecutionId) -> None:
        with suppress(DependencyAlreadyExists):
            await self.engine.stage_dependency_edge(
                self.flow_id,
                edge_id,
                upstream_execution_id=upstream,
                downstream_execution_id=downstream,
            )

    async def apply(self, edge_id: str, upstream: ExecutionId, downstream: ExecutionId) -> None:
        await self.engine.apply_dependency_to_child(
            self.flow_id,
            edge_id,
            upstream_execution_id=upstream,
            downstream_execution_id=downstream,
        )

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
        """An operator cancels the flow; again means something only if it reaches further."""
        self.interfered = True
        policy = self.chance.choice(POLICIES)
        waits = self.chance.random() < 0.5
        if waits:
            await self.go_on(
                lambda: self.engine.cancel_flow(
                    self.flow_id, cancellation_policy=policy, wait=WaitIndefinite()
                )
            )
        elif not await self.attempt(
            lambda: self.engine.cancel_flow_header(self.flow_id, cancellation_policy=policy)
        ):
            return
        if waits:
            # What joins had given up is queued with the flow's own members.
            self.model.cancel(set(self.model.given_up))
        if POLICIES.index(policy) <= self.reach:
            return
        self.reach = POLICIES.index(policy)
        self.waiting = []
        spared = {"cancel_all": set(), "cancel_pending": self.model.running}.get(policy)
        if spared is not None:
            names = self.model.nodes.keys() - self.model.ended.keys() - spared
            for name in names:
                self.model.end(name, CANCELLED)

    def possible(self) -> list[Callable[[], Awaitable[None]]]:
        model = self.model
        steps: list[Callable[[], Awaitable[None]]] = (
            [self.build, self.build_slowly] if self.waiting else []
        )
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
        if self.reach >= 0:
            return FlowState.CANCELLED
        ends = {end for name, end in self.model.ended.items() if name not in self.model.spared}
        return FlowState.FAILED if ends & {FAILED, CANCELLED} else FlowState.COMPLETED


def play(driver: Driver, meddling: float) -> None:
    async def go() -> None:
        await driver.open()
        try:
            await driver.run(meddling)
        finally:
            await driver.engine.close()

    run(go())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), count=st.integers(1, 200), meddles=st.booleans())
def test_every_member_ends_as_the_model_says(seed: int, count: int, meddles: bool) -> None:
    chance, crashes = random.Random(seed), Crashes()
    nodes = random_nodes(chance, count, list(OnSatisfied))
    play(Driver(chance, nodes, CrashingSqlite(crashes), crashes), 0.03 if meddles else 0.0)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), count=st.integers(1, 200))
def test_where_nothing_is_cancelled_the_order_makes_no_difference(seed: int, count: int) -> None:
    chance, crashes = random.Random(seed), Crashes()
    nodes = random_nodes(chance, count, [OnSatisfied.LET_RUN])
    driver = Driver(chance, nodes, CrashingSqlite(crashes), crashes)
    play(driver, 0.0)
    assert driver.model.ended == predict(nodes, driver.outcomes)


@pytest.fixture
def fresh_database(
    postgres_server: str,
    postgres_template: str,
    postgres_version: str,
    exercised_store: Callable[[str], None],
) -> Callable[[], AbstractContextManager[str]]:
    """A database for each example."""
    exercised_store(f"postgres {postgres_version}")

    @contextmanager
    def fresh() -> Iterator[str]:
        url = run(postgres.create_database(postgres_server, template=postgres_template))
        yield url
        run(postgres.drop_database(postgres_server, url))

    return fresh


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32), count=st.integers(50, 200), meddles=st.booleans())
def test_every_member_ends_as_the_model_says_on_postgres(
    fresh_database: Callable[[], AbstractContextManager[str]],
    seed: int,
    count: int,
    meddles: bool,
) -> None:
    chance, crashes = random.Random(seed), Crashes()
    nodes = random_nodes(chance, count, list(OnSatisfied))
    with fresh_database() as url:
        store = CrashingPostgres(url, crashes)
        play(Driver(chance, nodes, store, crashes), 0.03 if meddles else 0.0)
