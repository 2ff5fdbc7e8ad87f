"""Building flows in bulk: members, edges and policy of a join at once."""

from collections.abc import Callable

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.bounds import BATCH_MAX, JOIN_EDGES_MAX
from flowfabric.core.flow_joins import Dependency, Join, JoinAll, JoinAny, JoinQuorum
from flowfabric.core.flow_records import FlowState
from flowfabric.core.results import DependenciesAdded
from flowfabric.errors import (
    CycleDetected,
    DependencyAlreadyExists,
    ExecutionAlreadyInFlow,
    ExecutionNotInFlow,
    FlowAlreadyTerminal,
    InvalidInput,
    NotFound,
    SelfReferencingEdge,
    Terminal,
)
from tests.conformance.graphs import Graph, graph_elsewhere, neighbour, new_graph, new_id
from tests.conformance.observed import execution_of, refused, refuses, unchanged


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    return await new_graph(engine)


async def test_a_diamond_is_built_in_one_call_and_runs(engine: Engine, graph: Graph) -> None:
    members = graph.new("a", "b", "c", "d")
    joins = [graph.join("b", "a"), graph.join("c", "a"), graph.join("d", "bc")]

    added = await engine.add_dependencies(graph.flow_id, joins, members=members)

    assert added == DependenciesAdded(
        members_added=4, edges_added=4, node_count=4, edge_count=4, graph_revision=8
    )
    for ready in ({"a"}, {"b", "c"}, {"d"}):
        claimed = await graph.claim()
        assert set(claimed) == ready
        for each in claimed.values():
            await engine.complete(each.handle)
        await graph.settle()
    assert (await graph.flow()).state is FlowState.COMPLETED


async def test_repeating_a_bulk_call_adds_nothing(engine: Engine, graph: Graph) -> None:
    members = graph.new("a", "b")
    joins = [graph.join("b", "a", JoinQuorum(1))]
    await engine.add_dependencies(graph.flow_id, joins, members=members)
    await graph.run("a")
    await graph.settle()

    async with unchanged(engine):
        again = await engine.add_dependencies(graph.flow_id, joins, members=members)

    assert again == DependenciesAdded(
        members_added=0, edges_added=0, node_count=2, edge_count=1, graph_revision=3
    )


async def test_a_flow_grows_call_by_call(engine: Engine, graph: Graph) -> None:
    await graph.build({"b": "a"})
    await graph.run("a")
    await graph.settle()

    members = graph.new("c", "d")
    await engine.add_dependencies(
        graph.flow_id, [graph.join("c", "a"), graph.join("d", "bc")], members=members
    )

    assert await graph.states() == {
        "a": "completed",
        "b": "waiting",
        "c": "waiting",
        "d": "waiting_children",
    }


async def test_executions_that_exist_join_with_what_they_wait_for(
    engine: Engine, graph: Graph
) -> None:
    await graph.outsider("a")
    await graph.outsider("b")

    added = await engine.add_dependencies(
        graph.flow_id, [graph.join("b", "a")], members=[graph["a"], graph["b"]]
    )

    assert (added.members_added, added.edges_added) == (2, 1)
    assert set(await graph.claim()) == {"a"}
    async with unchanged(engine):
        await engine.add_dependencies(
            graph.flow_id, [graph.join("b", "a")], members=[graph["a"], graph["b"]]
        )


async def test_joins_on_ended_upstreams_are_settled_at_once(engine: Engine, graph: Graph) -> None:
    await graph.build({"good": "", "bad": "", "open": ""})
    await graph.run("good", result=b"result")
    await graph.fail("bad")

    members = graph.new("all", "any", "none", "later")
    joins = [
        graph.join("all", ["good", "bad"]),
        graph.join("any", ["good", "bad"], JoinAny(), passing=True),
        graph.join("none", ["bad"], JoinAny()),
        graph.join("later", ["good", "open"]),
    ]
    await engine.add_dependencies(graph.flow_id, joins, members=members)

    states = await graph.states()
    assert {name: states[name] for name in ("all", "any", "none", "later")} == {
        "all": "skipped",
        "any": "waiting",
        "none": "skipped",
        "later": "waiting_children",
    }
    assert (await execution_of(engine, graph["any"])).taken_payload == (b"result", None)


async def test_a_policy_set_before_is_kept_when_the_join_names_none(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"a": "", "b": "", "c": ""})
    await engine.set_edge_group_policy(graph.flow_id, graph["c"], JoinQuorum(1))

    await engine.add_dependencies(graph.flow_id, [graph.join("c", "ab")])

    assert (await graph.group("c")).policy == JoinQuorum(1)
    graph.new("d")
    async with refused(engine, InvalidInput):
        await engine.add_dependencies(
            graph.flow_id, [graph.join("c", "d", JoinAll())], members=[graph.request("d")]
        )


Make = Callable[[Graph], Join]


@pytest.mark.parametrize(
    ("error", "make"),
    [
        (SelfReferencingEdge, lambda graph: graph.join("a", "a")),
        (CycleDetected, lambda graph: graph.join("a", "b")),
        (CycleDetected, lambda graph: graph.join("a", "c")),
        (ExecutionNotInFlow, lambda graph: graph.join("c", "x")),
        (ExecutionNotInFlow, lambda graph: graph.join("x", "c")),
        (Terminal, lambda graph: graph.join("ended", "c")),
        (
            DependencyAlreadyExists,
            lambda graph: Join(
                downstream_execution_id=graph["b"],
                dependencies=[Dependency(upstream_execution_id=graph["a"], edge_id=new_id())],
            ),
        ),
        (InvalidInput, lambda graph: graph.join("c", "aa")),
        (InvalidInput, lambda graph: graph.join("c", "a", JoinQuorum(2))),
        (InvalidInput, lambda graph: graph.join("c", "")),
        (
            InvalidInput,
            lambda graph: Join(
                downstream_execution_id=graph["c"],
                dependencies=[
                    Dependency(upstream_execution_id=graph[name], data_passing_ref="same")
                    for name in "ab"
                ],
            ),
        ),
    ],
)
async def test_a_join_that_cannot_be_is_refused_with_everything_else_in_the_call(
    engine: Engine, graph: Graph, error: type[Exception], make: Make
) -> None:
    await graph.build({"b": "a", "c": "b", "ended": ""})
    await graph.outsider("x")
    await graph.run("ended")
    await graph.settle()
    before = await graph.flow()
    members = graph.new("fresh")

    async with unchanged(engine):
        with pytest.raises(error):
            await engine.add_dependencies(
                graph.flow_id, [graph.join("fresh", "a"), make(graph)], members=members
            )

    assert await graph.flow() == before


async def test_a_cycle_within_one_call_is_seen(engine: Engine, graph: Graph) -> None:
    await graph.member("known")
    members = graph.new("a", "b", "c")
    joins = [graph.join("b", "a"), graph.join("c", "b"), graph.join("a", "c")]
    async with refused(engine, CycleDetected):
        await engine.add_dependencies(graph.flow_id, joins, members=members)


async def test_new_members_name_an_id_of_the_flows_partition(engine: Engine, graph: Graph) -> None:
    (request,) = graph.new("a")
    for field, fields in (
        ("execution_id", {"execution_id": None}),
        ("idempotency_key", {"idempotency_key": "key"}),
        ("input_payload", {"input_payload": "text"}),
    ):
        with pytest.raises(InvalidInput) as caught:
            await engine.add_dependencies(graph.flow_id, members=[graph.request("a", **fields)])
        assert caught.value.field == field
    other = await graph_elsewhere(graph)
    other.new("x")
    with pytest.raises(InvalidInput, match="partition"):
        await engine.add_dependencies(graph.flow_id, members=[other.request("x")])
    assert (await graph.flow()).node_count == 0
    assert request.execution_id == graph["a"]


async def test_new_members_may_be_checked_before(engine: Engine, graph: Graph) -> None:
    members = [engine.check_request(request) for request in graph.new("a", "b")]
    for count in (2, 0):
        added = await engine.add_dependencies(
            graph.flow_id, [graph.join("b", "a")], members=members
        )
        assert added.members_added == count
    assert set(await graph.claim()) == {"a"}
    other = await graph_elsewhere(graph)
    other.new("x")
    with pytest.raises(InvalidInput, match="partition"):
        await engine.add_dependencies(
            graph.flow_id, members=[engine.check_request(other.request("x"))]
        )


async def test_a_call_has_limits(engine: Engine, graph: Graph) -> None:
    graph.new("a", "b")
    with pytest.raises(InvalidInput) as caught:
        await engine.add_dependencies(graph.flow_id, members=[graph["a"]] * (BATCH_MAX + 1))
    assert caught.value.field == "members"
    edges = [Dependency(upstream_execution_id=graph["a"])] * (JOIN_EDGES_MAX + 1)
    with pytest.raises(InvalidInput) as caught:
        await engine.add_dependencies(
            graph.flow_id, [Join(downstream_execution_id=graph["b"], dependencies=edges)]
        )
    assert caught.value.field == "edges"


async def test_a_call_takes_lists_of_joins_and_dependencies(engine: Engine, graph: Graph) -> None:
    graph.new("a", "b")
    malformed = structs.replace(graph.join("b", "a"), dependencies=[graph["a"]])
    bad: list[tuple[str, object]] = [
        ("joins", "ab"),
        ("joins", ["ab"]),
        ("dependencies", [malformed]),
        ("dependencies", [structs.replace(malformed, dependencies="ab")]),
    ]
    async with unchanged(engine):
        for field, joins in bad:
            await refuses(engine, field, "add_dependencies", graph.flow_id, joins)


async def test_members_come_from_nowhere_else(engine: Engine, graph: Graph) -> None:
    ghost = engine.new_member_id(graph.flow_id)
    async with refused(engine, NotFound):
        await engine.add_dependencies(graph.flow_id, members=[ghost])

    await graph.outsider("x")
    async with refused(engine, ExecutionNotInFlow):
        await engine.add_dependencies(graph.flow_id, members=[graph.request("x")])

    await engine.add_execution_to_flow(graph.flow_id, graph["x"])
    other = await neighbour(graph)
    async with refused(engine, ExecutionAlreadyInFlow):
        await engine.add_dependencies(other.flow_id, members=[graph["x"]])


async def test_a_closed_or_missing_flow_does_not_grow(engine: Engine, graph: Graph) -> None:
    await graph.member("known")
    members = graph.new("a")
    await engine.cancel_flow(graph.flow_id)
    async with refused(engine, FlowAlreadyTerminal):
        await engine.add_dependencies(graph.flow_id, members=members)
    with pytest.raises(NotFound):
        await engine.add_dependencies(new_id())
