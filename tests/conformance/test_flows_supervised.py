"""Flows move on by themselves, woken and not polled."""

import asyncio

import pytest

from flowfabric import Engine
from flowfabric.core.flow_joins import JoinAny
from flowfabric.core.results import CancellationScheduled, Claimed
from flowfabric.engine.topics import COMPLETION_TOPIC
from flowfabric.reconcilers import LONGEST_SLEEP_S, Supervisor
from tests.conformance.graphs import LEASE_MS, Graph, new_graph

WAIT_MS = 4_000
"""Less than the supervisor sleeps, so that only a hint can be in time."""

assert WAIT_MS < LONGEST_SLEEP_S * 1_000


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    return await new_graph(engine)


async def next_claim(graph: Graph) -> Claimed:
    claimed = await graph.engine.claim(
        worker_id="w",
        worker_instance_id="w-1",
        lease_ttl_ms=LEASE_MS,
        max_wait_ms=WAIT_MS,
    )
    assert claimed is not None, "nobody told the dependents in time"
    return claimed


async def ended(graph: Graph, count: int, wait_ms: int = WAIT_MS) -> None:
    """Wait until that many members have ended."""
    with graph.engine.store.hints([COMPLETION_TOPIC]) as hints:
        async with asyncio.timeout(wait_ms / 1_000):
            while sum(state in ENDED for state in (await graph.states()).values()) < count:
                await hints.wait(WAIT_MS / 1_000)


ENDED = ("completed", "failed", "cancelled", "skipped")


async def test_a_chain_runs_as_fast_as_its_worker(engine: Engine, graph: Graph) -> None:
    await graph.build({"b": "a", "c": "b", "d": "c"})
    async with Supervisor(engine):
        order = []
        for _ in range(4):
            claimed = await next_claim(graph)
            order.append(graph.name(claimed.execution_id))
            await engine.complete(claimed.handle)
    assert order == ["a", "b", "c", "d"]


async def test_failures_run_down_the_chain(engine: Engine, graph: Graph) -> None:
    await graph.build({"b": "a", "c": "b", "d": "c"})
    async with Supervisor(engine):
        await graph.fail("a")
        await ended(graph, 4)
    assert (await graph.state("d")) == "skipped"


async def test_what_a_join_gives_up_is_cancelled(engine: Engine, graph: Graph) -> None:
    await graph.build({"d": "a b c"}, JoinAny())
    async with Supervisor(engine):
        await graph.run("b")
        await ended(graph, 3)
    assert await graph.states() == {
        "d": "waiting",
        "a": "cancelled",
        "b": "completed",
        "c": "cancelled",
    }


async def test_a_large_flows_members_are_cancelled(engine: Engine, graph: Graph) -> None:
    names = [f"m{number}" for number in range(220)]
    await graph.build(dict.fromkeys(names, ""))
    # Before there is a supervisor, which might have cancelled them all by the time of the answer.
    scheduled = await engine.cancel_flow(graph.flow_id)
    assert isinstance(scheduled, CancellationScheduled)
    async with Supervisor(engine):
        # That hints are heard is shown elsewhere; so much work takes as long as it takes.
        await ended(graph, 220, wait_ms=60_000)
    assert set((await graph.states()).values()) == {"cancelled"}


async def test_endings_left_by_a_dead_process_are_told_on_start(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"b": "a"})
    await graph.run("a")
    async with Supervisor(engine):
        claimed = await next_claim(graph)
    assert graph.name(claimed.execution_id) == "b"


async def test_draining_ends_every_part_of_the_supervisor(engine: Engine) -> None:
    supervisor = Supervisor(engine)
    supervisor.start()
    await supervisor.drain()
    await supervisor.stop()
