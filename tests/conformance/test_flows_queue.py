"""How endings reach dependents: the queue, and edges one by one."""

import pytest

from flowfabric import Engine
from flowfabric.core.flow_joins import JoinQuorum
from flowfabric.core.flow_records import DependencyState, OnSatisfied
from flowfabric.core.results import (
    AlreadyFired,
    AlreadyResolved,
    CascadeOutcome,
    Impossible,
    Pending,
    ResolveResult,
    Satisfied,
)
from flowfabric.core.states import TerminalOutcome
from flowfabric.errors import ExecutionNotTerminal, InvalidDependency, InvalidInput
from flowfabric.testing import SettableClock
from tests.conformance.given import UNKNOWN_ID, Given
from tests.conformance.graphs import Graph, broken, new_graph, new_id, overwrite
from tests.conformance.observed import refused

LET_RUN = OnSatisfied.LET_RUN


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    return await new_graph(engine)


async def test_an_ending_is_told_once_and_before_that_it_is_due(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"b": "a"})
    assert "dispatch" not in await engine.next_due()
    await graph.run("a")
    assert (await engine.next_due())["dispatch"] <= 0

    assert (await engine.dispatch_completions()).acted == 2
    assert (await engine.dispatch_completions()).acted == 0

    assert "dispatch" not in await engine.next_due()


async def test_standalone_executions_leave_nothing_to_tell(engine: Engine, given: Given) -> None:
    await given.completed()
    assert "dispatch" not in await engine.next_due()
    assert (await engine.dispatch_completions()).acted == 0


async def test_an_ending_of_an_earlier_life_is_dropped(engine: Engine, graph: Graph) -> None:
    await graph.build({"b": "a"})
    await graph.fail("a")
    await engine.replay_execution(graph["a"])
    await graph.settle()
    assert await graph.state("b") == "waiting_children"

    await graph.run("a")
    await graph.settle()

    assert await graph.state("b") == "waiting"


async def test_a_fan_out_larger_than_a_batch_is_worked_off_in_several(
    engine: Engine, graph: Graph
) -> None:
    count = 2_600
    names = [f"n{number}" for number in range(count)]
    members = graph.new("a", *names)
    await engine.add_dependencies(graph.flow_id, members=members[:1])
    for start in range(0, count, 1_000):
        batch = names[start : start + 1_000]
        await engine.add_dependencies(
            graph.flow_id,
            [graph.join(name, "a") for name in batch],
            members=members[1 + start : 1 + start + 1_000],
        )
    await graph.run("a")

    assert (await engine.dispatch_completions()).acted == 2_000
    assert (await engine.next_due())["dispatch"] <= 0
    assert (await engine.dispatch_completions()).acted == 601
    assert (await engine.dispatch_completions()).acted == 0

    summary = await engine.read_flow_summary(graph.flow_id)
    assert summary is not None
    assert (summary.members_waiting, summary.members_completed) == (count, 1)


async def test_a_flow_that_cannot_go_on_holds_up_no_other(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    """Its downstream cannot be skipped, for its suspension does not decode."""
    await graph.build({"a": "", "b": ""})
    good = await broken(graph, "b")
    await graph.edge("a", "b")
    others = [await new_graph(engine) for _ in range(3)]
    for other in others:
        await other.build({"d": "c"})
        await other.run("c")
    await graph.fail("a")

    swept = await engine.dispatch_completions()

    assert (swept.acted, len(swept.failures)) == (6, 1)
    assert swept.failures[0].startswith(
        f"dependents in flow {graph.flow_id} were not told: a row of suspension"
    )
    assert [await other.state("d") for other in others] == ["waiting"] * 3
    assert await graph.state("b") == "suspended"
    await overwrite(graph, good)
    await graph.settle()
    assert await graph.state("b") == "skipped"


async def test_cascading_one_completion(engine: Engine, graph: Graph) -> None:
    await graph.build({"b": "a", "c": "a", "d": "x"})
    assert await engine.cascade_completion(graph["a"]) == CascadeOutcome(
        resolved=0, cascaded_children=0
    )
    await graph.fail("a")
    await graph.run("x")

    assert await engine.cascade_completion(graph["a"]) == CascadeOutcome(
        resolved=2, cascaded_children=2
    )

    assert (await graph.state("b"), await graph.state("d")) == ("skipped", "waiting_children")
    assert await engine.cascade_completion(graph["a"]) == CascadeOutcome(
        resolved=0, cascaded_children=0
    )
    assert await engine.cascade_completion(UNKNOWN_ID) == CascadeOutcome(
        resolved=0, cascaded_children=0
    )


# resolve_dependency


async def resolve(graph: Graph, edge_id: str, upstream: str, downstream: str) -> ResolveResult:
    return await graph.engine.resolve_dependency(
        graph.flow_id,
        edge_id,
        upstream_execution_id=graph[upstream],
        downstream_execution_id=graph[downstream],
    )


async def test_edges_can_be_resolved_one_by_one(engine: Engine, graph: Graph) -> None:
    for name in "abcd":
        await graph.member(name)
    await engine.set_edge_group_policy(graph.flow_id, graph["d"], JoinQuorum(2, LET_RUN))
    edges = {name: await graph.edge(name, "d", data_passing_ref=name) for name in "abc"}
    for name in "abc":
        await graph.run(name)

    assert await resolve(graph, edges["a"], "a", "d") == Pending()
    assert await resolve(graph, edges["b"], "b", "d") == Satisfied(data_injected=True)
    assert await resolve(graph, edges["c"], "c", "d") == AlreadyFired()
    assert await resolve(graph, edges["c"], "c", "d") == AlreadyResolved()
    assert (await graph.group("d")).satisfied_count == 3


async def test_an_impossible_edge_skips_its_downstream_for_good(
    engine: Engine, graph: Graph
) -> None:
    await graph.member("a")
    await graph.member("b")
    edge_id = await graph.edge("a", "b")
    await graph.fail("a")

    assert await resolve(graph, edge_id, "a", "b") == Impossible(child_skipped=True)
    assert await resolve(graph, edge_id, "a", "b") == AlreadyResolved()
    edge = await engine.describe_edge(graph.flow_id, edge_id)
    assert edge is not None
    assert (edge.dep_state, edge.resolved_outcome) == (
        DependencyState.IMPOSSIBLE,
        TerminalOutcome.FAILED,
    )


async def test_what_cannot_be_resolved_is_refused(engine: Engine, graph: Graph) -> None:
    for name in "abc":
        await graph.member(name)
    staged = await graph.stage("a", "b")
    applied = await graph.edge("a", "c")

    async with refused(engine, InvalidDependency):
        await resolve(graph, staged, "a", "b")
    async with refused(engine, InvalidDependency):
        await resolve(graph, applied, "b", "c")
    async with refused(engine, InvalidDependency):
        await resolve(graph, new_id(), "a", "c")
    async with refused(engine, ExecutionNotTerminal):
        await resolve(graph, applied, "a", "c")
    await graph.fail("a")
    for outcome in ("success", "none", "gone"):
        async with refused(engine, InvalidInput) as caught:
            await engine.resolve_dependency(
                graph.flow_id,
                applied,
                upstream_execution_id=graph["a"],
                downstream_execution_id=graph["c"],
                upstream_outcome=outcome,
            )
        assert caught.value.field == "upstream_outcome"
