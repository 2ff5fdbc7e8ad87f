"""Why a member of a flow is not running, told from what is so at the time of asking."""

import re

import pytest

from flowfabric import Engine
from flowfabric.core.bounds import CANCEL_BATCH, LIVENESS_TTL_MS_MAX
from flowfabric.core.diagnosis import Cause
from flowfabric.core.flow_joins import JoinQuorum
from flowfabric.flows.graph import draw, read_graph
from tests.conformance.graphs import Graph, new_graph


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    # Without a worker that serves its members, each explanation would say so as well.
    await engine.register_worker(
        ["default"],
        worker_id="w",
        worker_instance_id="w-0",
        liveness_ttl_ms=LIVENESS_TTL_MS_MAX,
    )
    return await new_graph(engine)


async def why(engine: Engine, graph: Graph, name: str = "d") -> tuple[Cause, str]:
    explained = await engine.explain_execution(graph[name])
    return explained.cause, explained.sentence


async def test_what_a_member_waits_for_is_told_as_it_is_now(engine: Engine, graph: Graph) -> None:
    await graph.build({"d": "a b c"})
    explained = await engine.explain_execution(graph["d"])
    assert (explained.cause, explained.detail["unresolved"]) == (Cause.BLOCKED, 3)
    for name in "abc":
        assert f"{graph[name]} (waiting)" in explained.sentence
    await graph.run("a")
    await graph.claimed("b")
    await graph.settle()

    explained = await engine.explain_execution(graph["d"])

    assert explained.sentence.startswith(
        "It waits for all of its 3 dependencies to succeed, 1 so far; 2 not resolved: "
    )
    assert f"{graph['b']} (active)" in explained.sentence
    assert graph["a"] not in explained.sentence
    assert explained.detail == {
        "blocking_reason": "waiting_for_children",
        "blocking_detail": "waiting for the executions it depends on",
        "dependencies": 3,
        "needed": 3,
        "succeeded": 1,
        "unresolved": 2,
        "upstreams": explained.detail["upstreams"],
    }
    assert set(str(explained.detail["upstreams"]).split(",")) == {graph["b"], graph["c"]}


async def test_an_upstream_that_must_be_replayed_is_named(engine: Engine, graph: Graph) -> None:
    await graph.build({"d": "a"})
    await graph.fail("a")
    await graph.settle()
    await engine.replay_execution(graph["d"])
    assert await why(engine, graph) == (
        Cause.BLOCKED,
        "It waits for its only dependency to succeed, 0 so far; 1 not resolved:"
        f" work {graph['a']} (failed: replay it too).",
    )


async def test_a_member_that_changed_code_has_blocked_is_called_so(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"d": "a"})
    claimed = await graph.claimed("a")
    await engine.block_on_code(claimed.handle, "charge", "the code has changed")

    _, sentence = await why(engine, graph)

    assert f"{graph['a']} (blocked by changed code)" in sentence
    members = (await engine.list_flow_members(graph.flow_id)).members
    assert {each.execution_id: each.blocked for each in members} == {
        graph["a"]: True,
        graph["d"]: False,
    }
    found = await read_graph(engine, graph.flow_id)
    assert found is not None
    drawn = draw(found, width=120).plain
    assert re.search(r"✗ work.* blocked", drawn), drawn
    assert "delayed" not in drawn


async def test_a_quorum_that_needs_more_edges_says_so(engine: Engine, graph: Graph) -> None:
    await graph.member("a")
    await graph.member("d")
    await engine.set_edge_group_policy(graph.flow_id, graph["d"], JoinQuorum(3))
    await graph.edge("a", "d")
    assert await why(engine, graph) == (
        Cause.BLOCKED,
        "It waits for 3 dependencies to succeed and has only 1: add 2 more, or cancel it.",
    )


async def test_many_upstreams_are_counted(engine: Engine, graph: Graph) -> None:
    await graph.build({"d": "a b c e f"}, JoinQuorum(2))
    cause, sentence = await why(engine, graph)
    assert cause is Cause.BLOCKED
    assert sentence.startswith("It waits for 2 of its 5 dependencies to succeed, 0 so far; 5 not")
    assert sentence.endswith(" and 2 more.")


async def test_a_member_about_to_be_cancelled_is_not_blocked(engine: Engine, graph: Graph) -> None:
    names = [f"m{number}" for number in range(CANCEL_BATCH + 1)]
    await graph.build(dict.fromkeys(names, ""))
    await engine.cancel_flow(graph.flow_id)
    assert await why(engine, graph, "m7") == (
        Cause.CANCELLING,
        "It is about to be cancelled with its flow: a reconciler does it shortly.",
    )
