"""Workers and dispatchers die again and again; every flow finishes, and nothing happens twice."""

import random
import signal
import time
from collections.abc import AsyncIterator
from typing import TypeAlias

import asyncpg
import pytest

from flowfabric import App, Engine, FlowRun
from flowfabric.core.events import START
from flowfabric.core.ids import ExecutionId
from flowfabric.core.states import TERMINAL_STATES, PublicState
from flowfabric.core.views import ExecutionSnapshot, FlowStatus
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.engine.topics import COMPLETION_TOPIC
from flowfabric.flows.nodes import Node
from tests.e2e.conftest import PATIENCE_S
from tests.e2e.diamonds import begin, diamonds, finish, middle
from tests.e2e.programs import NOWHERE, STDERR, STDOUT, fork

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

FLOWS = 200
NODES = FLOWS * 4
ROLES = ("worker", "worker", "dispatcher")
ACTIVE = ExecutionFilter(states=(PublicState.ACTIVE,))
FAILED = ExecutionFilter(states=(PublicState.FAILED,))
KILL_AFTER = (15, 45)
"""How many more nodes are done before the next process dies."""
STALLED_S = 120
"""Without anything done for so long, something waits for what never comes."""
LOST_MIN = 10
"""Executions whose worker must have died with their lease, for the test to show anything."""


class Member:
    """A process, and the name under which it claims."""

    def __init__(self, url: str, role: str, number: int) -> None:
        self.role = role
        self.name = f"{role}-{number}"
        streams = NOWHERE, STDOUT, STDERR
        self.process = fork("tests.e2e.diamonds", (role, url, self.name), streams)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


class Fleet:
    """Processes that are replaced when they are killed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.started = 0
        self.members = [self.start(role) for role in ROLES]
        self.killed: list[Member] = []

    def start(self, role: str) -> Member:
        self.started += 1
        return Member(self.url, role, self.started)

    def check(self) -> None:
        ended = [each.name for each in self.members if each.process.poll() is not None]
        assert not ended, f"ended by themselves: {ended}"

    def kill(self, member: Member) -> None:
        member.kill()
        assert member.process.returncode == -signal.SIGKILL
        self.killed.append(member)
        self.members[self.members.index(member)] = self.start(member.role)

    def stop(self) -> None:
        for member in self.members:
            member.kill()


class Progress:
    """Whether anything was done lately."""

    def __init__(self) -> None:
        self.done = -1
        self.since_s = 0.0

    def has_stalled(self, done: int) -> bool:
        if done > self.done:
            self.done, self.since_s = done, time.monotonic()
        return time.monotonic() - self.since_s > STALLED_S


@pytest.fixture
def chance() -> random.Random:
    return random.Random(20_251_115)


@pytest.fixture
async def effects(postgres_database: str) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(postgres_database)
    await connection.execute("create table effect (place bigserial, node text not null)")
    yield connection
    await connection.close()


@pytest.fixture
async def app(postgres_database: str) -> AsyncIterator[App]:
    made = App(postgres_database)
    made.adopt(diamonds)
    async with made:
        yield made


class Diamond:
    def __init__(self, run: FlowRun, nodes: list[Node[list[str]]], number: int) -> None:
        self.run = run
        self.nodes = nodes
        self.number = number

    @property
    def ids(self) -> list[ExecutionId]:
        return [self.run.run(node).execution_id for node in self.nodes]


async def build(app: App) -> list[Diamond]:
    built = []
    for number in range(FLOWS):
        flow = app.flow("diamond")
        first = flow.add(begin, number)
        left, right = (flow.add(middle, first, name) for name in ("left", "right"))
        last = flow.add(finish, left, right)
        built.append(Diamond(await flow.start(), [first, left, right, last], number))
    return built


@pytest.mark.timeout(600)
async def test_flows_survive_the_deaths_of_those_who_work_on_them(
    postgres_database: str, app: App, effects: Connection, chance: random.Random
) -> None:
    built = await build(app)
    fleet = Fleet(postgres_database)
    try:
        lost = await kill_until_done(app.engine, effects, fleet, chance)
    finally:
        fleet.stop()

    assert {member.role for member in fleet.killed} == set(ROLES)
    assert len(lost) >= LOST_MIN
    assert await statuses(app.engine) == {FlowStatus.COMPLETED: FLOWS}
    assert await count(effects) == NODES
    assert await engine_completions(app.engine) == NODES
    await check_lost(app.engine, lost)
    await check_order(built, effects)
    for diamond in built:
        number = str(diamond.number)
        assert await diamond.run.result(diamond.nodes[-1]) == [number, "left", number, "right"]


async def kill_until_done(
    engine: Engine, effects: Connection, fleet: Fleet, chance: random.Random
) -> set[ExecutionId]:
    """Kill one process after the other; tell what they held leases on when they died."""
    lost: set[ExecutionId] = set()
    next_kill = chance.randint(*KILL_AFTER)
    progress = Progress()
    with engine.store.hints([COMPLETION_TOPIC]) as hints:
        while (done := await count(effects)) < NODES or await unfinished(engine):
            fleet.check()
            if progress.has_stalled(done):
                raise AssertionError([describe(each) for each in await open_nodes(engine)])
            if done >= next_kill:
                victim = chance.choice(fleet.members)
                if victim.role == "dispatcher" or await leased(engine, victim):
                    fleet.kill(victim)
                    lost |= await leased(engine, victim)
                    next_kill = done + chance.randint(*KILL_AFTER)
            await hints.wait(1.0)
    return lost


async def open_nodes(engine: Engine) -> list[ExecutionSnapshot]:
    found = (await engine.find_executions(limit=1_000)).executions
    return [each for each in found if each.public_state not in TERMINAL_STATES][:10]


def describe(node: ExecutionSnapshot) -> tuple[object, ...]:
    return (node.public_state, node.blocking_detail, node.current_lease, node.lease_reclaim_count)


async def leased(engine: Engine, member: Member) -> set[ExecutionId]:
    """What a process has claimed and not ended."""
    page = await engine.find_executions(ACTIVE, limit=1_000)
    return {
        each.execution_id
        for each in page.executions
        if each.current_lease is not None and each.current_lease.worker_instance_id == member.name
    }


async def check_lost(engine: Engine, lost: set[ExecutionId]) -> None:
    """Each was taken over by another worker, and ended well."""
    for execution_id in lost:
        found = await engine.describe_execution(execution_id)
        assert found is not None
        assert found.public_state is PublicState.COMPLETED
        assert found.lease_reclaim_count > 0


async def count(effects: Connection) -> int:
    return int(await effects.fetchval("select count(*) from effect"))


async def unfinished(engine: Engine) -> bool:
    found = await statuses(engine)
    if FlowStatus.FAILED in found:
        page = await engine.find_executions(FAILED, limit=5)
        raise AssertionError([each.failure_reason for each in page.executions])
    return found.keys() != {FlowStatus.COMPLETED}


async def statuses(engine: Engine) -> dict[FlowStatus, int]:
    page = await engine.list_flows(limit=1_000)
    found = [item.status for item in page.flows]
    return {status: found.count(status) for status in set(found)}


async def engine_completions(engine: Engine) -> int:
    """How many endings the engine told of."""
    cursor, total = START, 0
    while True:
        page = await engine.read_events(after=cursor, limit=1_000, category="completion")
        total += len(page.events)
        if page.cursor == cursor:
            return total
        cursor = page.cursor


async def check_order(built: list[Diamond], effects: Connection) -> None:
    """One effect of each node, and those of a node after those it waits for."""
    rows = await effects.fetch("select node, place from effect")
    places = {str(row["node"]): int(row["place"]) for row in rows}
    assert len(places) == len(rows)
    for diamond in built:
        first, left, right, last = (places[each] for each in diamond.ids)
        assert first < min(left, right)
        assert max(left, right) < last
