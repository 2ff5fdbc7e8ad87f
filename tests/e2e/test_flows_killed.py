"""Workers and dispatchers are killed again and again; every flow finishes, nothing happens twice.

The work of a node is a row in the application's own table, written in a transaction
that holds the node's fence. The table has no unique constraint: a second effect would
show.
"""

import random
import subprocess
from collections.abc import AsyncIterator
from typing import TypeAlias

import asyncpg
import pytest

from flowfabric import Engine, connect
from flowfabric.core.flow_views import FlowStatus
from flowfabric.engine.unit import COMPLETION_TOPIC
from tests.conformance.graphs import Graph, new_graph
from tests.store.records import start_python

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

FLOWS = 200
DIAMOND = {"b": "a", "c": "a", "d": "b c"}
NODES = FLOWS * 4
WORKERS = 2
KILL_AFTER = (20, 60)
"""How many more nodes are done before the next process dies."""

WORKER = """
import asyncio, sys, uuid
import asyncpg
from flowfabric import FlowFabricError, connect

async def perform(engine, application, claimed):
    try:
        async with application.transaction():
            await engine.check_fence_on(application, claimed.handle)
            await application.execute(
                "insert into effect (node) select $1"
                " where not exists (select 1 from effect where node = $1)",
                claimed.execution_id,
            )
        await engine.complete(claimed.handle)
    except FlowFabricError:
        pass

async def main(url):
    name = uuid.uuid4().hex
    application = await asyncpg.connect(url)
    async with await connect(url, pool_max=3) as engine:
        while True:
            for claimed in await engine.claim_many(
                ["default"], limit=5, worker_id="w", worker_instance_id=name,
                lease_ttl_ms=2_000, max_wait_ms=1_000,
            ):
                await perform(engine, application, claimed)

asyncio.run(main(sys.argv[1]))
"""

DISPATCHER = """
import asyncio, sys
from flowfabric import connect
from flowfabric.reconcilers.supervisor import Supervisor

async def main(url):
    async with await connect(url, pool_max=3) as engine, Supervisor(engine):
        await asyncio.Event().wait()

asyncio.run(main(sys.argv[1]))
"""

SCRIPTS = [WORKER] * WORKERS + [DISPATCHER]


class Fleet:
    """Processes that are replaced when they are killed."""

    def __init__(self, url: str, chance: random.Random) -> None:
        self.url = url
        self.chance = chance
        self.running = [(script, start_python(script, url)) for script in SCRIPTS]
        self.killed = dict.fromkeys(SCRIPTS, 0)

    def kill_one(self) -> None:
        place = self.chance.randrange(len(self.running))
        script, process = self.running[place]
        assert process.poll() is None, "a process ended by itself"
        end(process)
        self.killed[script] += 1
        self.running[place] = (script, start_python(script, self.url))

    def stop(self) -> None:
        for _, process in self.running:
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def chance() -> random.Random:
    return random.Random(20_251_115)


@pytest.fixture
async def effects(postgres_database: str) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(postgres_database)
    await connection.execute("create table effect (place bigserial, node text not null)")
    yield connection
    await connection.close()


async def build(engine: Engine) -> list[Graph]:
    graphs = []
    for _ in range(FLOWS):
        graph = await new_graph(engine)
        await graph.build(DIAMOND, policy={"max_reclaim_count": 1_000})
        graphs.append(graph)
    return graphs


@pytest.mark.timeout(600)
async def test_flows_survive_the_deaths_of_those_who_work_on_them(
    postgres_database: str, effects: Connection, chance: random.Random
) -> None:
    async with await connect(postgres_database) as engine:
        graphs = await build(engine)
        fleet = Fleet(postgres_database, chance)
        try:
            with engine.store.hints([COMPLETION_TOPIC]) as hints:
                next_kill = chance.randint(*KILL_AFTER)
                while (done := await count(effects)) < NODES or await unfinished(engine):
                    if done >= next_kill:
                        fleet.kill_one()
                        next_kill = done + chance.randint(*KILL_AFTER)
                    await hints.wait(1.0)
        finally:
            fleet.stop()

        assert min(fleet.killed.values()) > 0
        assert await statuses(engine) == {FlowStatus.COMPLETED: FLOWS}
        assert await count(effects) == NODES
        assert await engine_completions(engine) == NODES
        await check_order(graphs, effects)


async def count(effects: Connection) -> int:
    return int(await effects.fetchval("select count(*) from effect"))


async def unfinished(engine: Engine) -> bool:
    return (await statuses(engine)).keys() != {FlowStatus.COMPLETED}


async def statuses(engine: Engine) -> dict[FlowStatus, int]:
    page = await engine.list_flows(limit=1_000)
    found = [item.status for item in page.flows]
    return {status: found.count(status) for status in set(found)}


async def engine_completions(engine: Engine) -> int:
    """How many endings the engine told of."""
    cursor = total = 0
    while True:
        page = await engine.read_events(after=cursor, limit=1_000, category="completion")
        total += len(page.events)
        if page.cursor == cursor:
            return total
        cursor = page.cursor


async def check_order(graphs: list[Graph], effects: Connection) -> None:
    rows = await effects.fetch("select node, place from effect")
    places = {str(row["node"]): int(row["place"]) for row in rows}
    for graph in graphs:
        for downstream, upstreams in DIAMOND.items():
            for upstream in upstreams.split():
                assert places[graph[upstream]] < places[graph[downstream]]
