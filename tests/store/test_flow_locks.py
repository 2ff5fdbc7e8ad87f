"""What happens on Postgres when several processes work on one flow."""

import asyncio

import asyncpg
import pytest

from flowfabric import Engine, connect
from flowfabric.core.flow_joins import JoinAny
from flowfabric.reconcilers import Supervisor
from tests.conformance.graphs import Graph, new_graph

HELD = "select 1 from flowfabric.flow where flow_id = $1 for update"


@pytest.fixture
async def graph(postgres_database: str) -> Graph:
    engine = await connect(postgres_database)
    return await new_graph(engine)


async def test_a_flow_somebody_holds_is_passed_over_and_told_of_later(
    postgres_database: str, graph: Graph
) -> None:
    engine = graph.engine
    await graph.build({"b": "a"})
    other = await new_graph(engine)
    await other.build({"d": "c"})
    holder = await asyncpg.connect(postgres_database)
    async with engine, Supervisor(engine):
        async with holder.transaction():
            await holder.execute(HELD, graph.flow_id)
            await graph.run("a")
            await other.run("c")
            claimed = await engine.claim(worker_id="w", worker_instance_id="1", max_wait_ms=4_000)
            assert claimed is not None
            assert claimed.execution_id == other["d"]
        claimed = await engine.claim(worker_id="w", worker_instance_id="1", max_wait_ms=4_000)
        assert claimed is not None
        assert claimed.execution_id == graph["b"]
    await holder.close()


async def test_many_dispatchers_agree_on_a_wide_join(postgres_database: str, graph: Graph) -> None:
    await graph.build({"all": " ".join(f"n{number}" for number in range(200))})
    engines = [await connect(postgres_database, pool_max=2) for _ in range(3)]
    claimed = await graph.claim()

    async def work(place: int) -> None:
        engine = engines[place]
        for name in sorted(claimed)[place::3]:
            await engine.complete(claimed[name].handle)
            await engine.dispatch_completions()

    await asyncio.gather(*(work(place) for place in range(3)))
    await graph.settle()

    group = await graph.group("all")
    assert (group.satisfied_count, group.running_count) == (200, 0)
    assert await graph.state("all") == "waiting"
    await close(graph.engine, *engines)


async def test_cancelling_and_completing_at_once_leaves_everything_ended(
    postgres_database: str, graph: Graph
) -> None:
    names = [f"n{number}" for number in range(400)]
    await graph.build({"last": " ".join(names)}, JoinAny())
    worker, canceller = [await connect(postgres_database, pool_max=4) for _ in range(2)]
    claimed = await graph.claim()

    async def complete() -> None:
        for each in list(claimed.values())[:50]:
            await worker.cancel_execution(each.execution_id, reason="race")
            await worker.dispatch_completions()

    async def cancel() -> None:
        await canceller.cancel_flow(graph.flow_id)
        while (await canceller.cancel_pending_members(limit=20)).acted:
            await canceller.dispatch_completions()

    await asyncio.gather(complete(), cancel())
    await graph.settle()

    assert set((await graph.states()).values()) == {"cancelled"}
    assert (await graph.flow()).state == "cancelled"
    await close(graph.engine, worker, canceller)


async def close(*engines: Engine) -> None:
    for engine in engines:
        await engine.close()
