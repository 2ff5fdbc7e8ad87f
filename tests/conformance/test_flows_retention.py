"""Flows are forgotten as a whole, after they have ended."""

import pytest

from flowfabric import Engine, EngineConfig
from flowfabric.core.flow_joins import JoinAny
from flowfabric.core.results import FlowCreated, FlowExists
from flowfabric.errors import NotFound
from flowfabric.reconcilers import run_due
from flowfabric.testing import SettableClock
from tests.conformance.graphs import Graph, new_graph

DAY_MS = 24 * 60 * 60 * 1_000
WEEK_MS = 7 * DAY_MS


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    return await new_graph(engine)


async def test_ended_members_of_an_unfinished_flow_are_kept(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.build({"b": "a"})
    await graph.run("a")
    await graph.settle()
    clock.advance(days=3)

    assert (await engine.trim_retention()).acted == 0
    assert "retention" not in await engine.next_due()
    assert "flow_retention" not in await engine.next_due()

    await graph.run("b")
    assert await graph.states() == {"a": "completed", "b": "completed"}


async def test_an_ending_nobody_was_told_of_keeps_the_flow(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.build({"a": ""})
    await graph.run("a")
    clock.advance(days=3)
    assert (await engine.trim_flows()).acted == 0
    await graph.settle()
    # Counted from the end, not from when it was told.
    assert (await engine.next_due())["flow_retention"] == WEEK_MS - 3 * DAY_MS


async def test_an_ended_flow_goes_with_everything_that_belongs_to_it(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.build({"d": "a b"}, JoinAny(), passing=True, tags={"app.kind": "x"})
    await engine.set_flow_tag(graph.flow_id, "app.run", "1")
    await graph.run("a")
    await graph.settle()
    await graph.run("d")
    await graph.settle()
    other = await new_graph(engine)
    await other.build({"b": "a"})

    clock.advance(ms=WEEK_MS - 1)
    assert (await engine.trim_flows()).acted == 0
    clock.advance(ms=1)
    assert await engine.describe_flow(graph.flow_id) is None
    acted = await run_due(engine)

    assert acted["flow_retention"] == 3 + 2 + 1
    assert await engine.list_edges(graph.flow_id) == ()
    assert (await engine.list_flow_members(graph.flow_id)).members == ()
    assert await engine.get_flow_tag(graph.flow_id, "app.run") is None
    assert await engine.read_execution_inputs(graph["d"]) == {}
    assert await engine.describe_execution(graph["a"]) is None
    assert (await engine.trim_flows()).acted == 0
    assert set((await other.states()).values()) == {"waiting", "waiting_children"}


async def test_a_large_flow_goes_in_batches_and_is_gone_from_the_first(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    names = [f"m{number}" for number in range(25)]
    await graph.build({"last": " ".join(names)})
    await engine.cancel_flow(graph.flow_id)
    await graph.settle()
    clock.advance(days=30)

    assert (await engine.trim_flows(limit=10)).acted == 10

    assert await engine.describe_flow(graph.flow_id) is None
    assert (await engine.list_flows()).flows == ()
    with pytest.raises(NotFound):
        await engine.add_dependencies(graph.flow_id, members=graph.new("more"))
    while (await engine.trim_flows(limit=10)).full:
        pass
    assert await engine.create_flow(graph.flow_id, flow_kind="again") != FlowExists(
        flow_id=graph.flow_id
    )


async def test_a_flow_that_opens_again_is_kept(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.build({"a": ""})
    await graph.run("a")
    await graph.settle()
    await graph.member("b")
    clock.advance(days=2)
    assert (await engine.trim_flows()).acted == 0
    assert await graph.states() == {"a": "completed", "b": "waiting"}


@pytest.mark.parametrize("config", [EngineConfig(keep=1)])
async def test_the_longest_keep_time_a_member_asks_for_holds_for_the_flow(
    engine: Engine, graph: Graph, clock: SettableClock, config: EngineConfig
) -> None:
    await graph.build({"a": ""}, policy={"stream_policy": {"retention_ttl_ms": 5_000}})
    await graph.run("a")
    await graph.settle()
    assert (await engine.next_due())["flow_retention"] == 5_000


async def test_a_flow_that_failed_is_kept_longer_than_one_that_completed(
    engine: Engine, graph: Graph
) -> None:
    await graph.build(
        {"a": ""}, policy={"retention_policy": {"completed_ms": 10, "failed_ms": 60 * WEEK_MS}}
    )
    await engine.cancel_execution(graph["a"], reason="no use")
    await graph.settle()
    assert (await engine.next_due())["flow_retention"] == 60 * WEEK_MS


async def test_the_id_is_free_again_also_if_nobody_was_there_to_count_the_last_ending(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.build({"b": "a"})
    await graph.run("a")
    await graph.settle()
    await graph.run("b")
    exists = FlowExists(flow_id=graph.flow_id)
    assert await engine.create_flow(graph.flow_id, flow_kind="again") == exists
    await engine.replay_execution(graph["b"])
    await graph.run("b")
    clock.advance(ms=WEEK_MS)

    created = await engine.create_flow(graph.flow_id, flow_kind="again")

    assert created == FlowCreated(flow_id=graph.flow_id)
    assert (await engine.list_flow_members(graph.flow_id)).members == ()


async def test_a_flow_that_never_got_a_member_goes_once_it_is_cancelled(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    clock.advance(ms=60 * WEEK_MS)
    assert (await engine.trim_flows()).acted == 0
    await engine.cancel_flow(graph.flow_id)
    clock.advance(ms=60 * WEEK_MS)
    assert (await engine.trim_flows()).acted == 1
    assert await engine.describe_flow(graph.flow_id) is None


@pytest.mark.parametrize("trims", [0, 1, 2])
async def test_the_id_of_a_forgotten_flow_is_free_again(
    engine: Engine, graph: Graph, clock: SettableClock, trims: int
) -> None:
    """Whether deletion has not begun, is under way, or is done."""
    await graph.build({"b": "a"}, passing=True)
    await graph.run("a")
    await graph.settle()
    await graph.run("b")
    await graph.settle()
    clock.advance(ms=WEEK_MS)
    for _ in range(trims):
        await engine.trim_flows(limit=1)

    created = await engine.create_flow(graph.flow_id, flow_kind="again")

    assert created == FlowCreated(flow_id=graph.flow_id)
    flow = await graph.flow()
    assert (flow.flow_kind, flow.node_count, flow.edge_count) == ("again", 0, 0)
    assert (await engine.list_flow_members(graph.flow_id)).members == ()
    assert await engine.list_edges(graph.flow_id) == ()
    assert await engine.create_flow(graph.flow_id, flow_kind="again") == FlowExists(
        flow_id=graph.flow_id
    )
    again = Graph(engine, graph.flow_id)
    await again.build({"b": "a"})
    await again.run("a")
    await again.settle()
    assert await again.states() == {"a": "completed", "b": "waiting"}
