"""What the end of a member does to those that wait for it."""

import pytest

from flowfabric import Engine
from flowfabric.core.flow_joins import EdgeDependencyPolicy, JoinAll, JoinAny, JoinQuorum
from flowfabric.core.flow_records import FlowState, GroupState, OnSatisfied
from flowfabric.core.states import AttemptLifecycle
from flowfabric.testing import SettableClock
from tests.conformance.graphs import Graph, new_graph
from tests.conformance.observed import cursor_of, events_since, execution_of

LET_RUN = OnSatisfied.LET_RUN


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    return await new_graph(engine)


async def end(graph: Graph, endings: str) -> None:
    """`a+ b- c?`: a succeeds, b fails, c is cancelled; dependents are told after each."""
    for each in endings.split():
        name, how = each[0], each[1]
        if how == "+":
            await graph.run(name)
        elif how == "-":
            await graph.fail(name)
        else:
            await graph.engine.cancel_execution(graph[name], reason="not needed")
        await graph.engine.dispatch_completions()


# Policies

POLICIES: list[tuple[EdgeDependencyPolicy, str, str, GroupState]] = [
    (JoinAll(), "a+ b+", "waiting_children", GroupState.PENDING),
    (JoinAll(), "a+ b+ c+", "waiting", GroupState.SATISFIED),
    (JoinAll(), "a-", "skipped", GroupState.IMPOSSIBLE),
    (JoinAll(), "a+ b?", "skipped", GroupState.IMPOSSIBLE),
    (JoinAny(LET_RUN), "a- b-", "waiting_children", GroupState.PENDING),
    (JoinAny(LET_RUN), "a+", "waiting", GroupState.SATISFIED),
    (JoinAny(LET_RUN), "a- b- c-", "skipped", GroupState.IMPOSSIBLE),
    (JoinQuorum(2, LET_RUN), "a+", "waiting_children", GroupState.PENDING),
    (JoinQuorum(2, LET_RUN), "a+ b- c+", "waiting", GroupState.SATISFIED),
    (JoinQuorum(2, LET_RUN), "a- b-", "skipped", GroupState.IMPOSSIBLE),
    (JoinQuorum(3, LET_RUN), "a+ b-", "skipped", GroupState.IMPOSSIBLE),
]


@pytest.mark.parametrize(("policy", "endings", "state", "group"), POLICIES)
async def test_a_join_fires_by_its_policy(
    graph: Graph, policy: EdgeDependencyPolicy, endings: str, state: str, group: GroupState
) -> None:
    await graph.build({"d": "a b c"}, policy)

    await end(graph, endings)

    assert await graph.state("d") == state
    assert (await graph.group("d")).group_state is group


async def test_a_fired_join_counts_on_but_fires_no_more(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.build({"d": "a b c"}, JoinAny(LET_RUN))
    await end(graph, "a+")
    fired = await graph.group("d")
    await engine.complete((await graph.claimed("d")).handle)
    clock.advance(seconds=1)

    await end(graph, "b+ c-")

    after = await graph.group("d")
    assert (after.satisfied_count, after.failed_count, after.running_count) == (2, 1, 0)
    assert (after.group_state, after.fired_at_ms) == (GroupState.SATISFIED, fired.fired_at_ms)
    assert await graph.state("d") == "completed"


async def test_a_skip_is_an_ending_of_its_own_and_runs_down_the_chain(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"b": "a", "c": "b", "d": "c"})
    cursor = await cursor_of(engine)

    await graph.fail("a")
    await graph.settle()

    assert await graph.states() == {
        "a": "failed",
        "b": "skipped",
        "c": "skipped",
        "d": "skipped",
    }
    told = [
        (graph.name(event.execution_id), event.event_type)
        for event in await events_since(engine, cursor)
        if event.category == "completion"
    ]
    assert told == [("a", "failed"), ("b", "skipped"), ("c", "skipped"), ("d", "skipped")]
    assert (await graph.flow()).state is FlowState.FAILED


async def test_a_chain_deeper_than_any_recursion_is_skipped_whole(graph: Graph) -> None:
    names = [f"n{number}" for number in range(80)]
    await graph.build(dict(zip(names[1:], names, strict=False)))

    await graph.fail("n0")
    await graph.settle()

    assert set((await graph.states()).values()) == {"failed", "skipped"}
    assert (await graph.flow()).state is FlowState.FAILED


async def test_running_work_whose_join_became_impossible_is_fenced_and_skipped(
    engine: Engine, graph: Graph
) -> None:
    await graph.member("a")
    await graph.member("parent")
    claimed = await graph.claimed("parent")
    await graph.edge("a", "parent")

    await end(graph, "a-")

    assert await graph.state("parent") == "skipped"
    with pytest.raises(Exception, match="terminal"):
        await engine.complete(claimed.handle)
    (attempt,) = await engine.list_attempts(graph["parent"])
    assert attempt.attempt_state is AttemptLifecycle.ENDED_CANCELLED
    assert attempt.failure_reason == "dependency_impossible"


# Cancelling what is no longer needed


async def test_any_of_cancels_the_others(engine: Engine, graph: Graph) -> None:
    await graph.build({"d": "a b c"}, JoinAny())
    running = await graph.claimed("b")

    await graph.run("a")
    await graph.settle()

    assert await graph.states() == {
        "d": "waiting",
        "a": "completed",
        "b": "cancelled",
        "c": "cancelled",
    }
    for name in "bc":
        sibling = await execution_of(engine, graph[name])
        assert sibling.cancellation_reason == "sibling_quorum_satisfied"
    with pytest.raises(Exception, match="terminal"):
        await engine.complete(running.handle)
    group = await graph.group("d")
    assert (group.satisfied_count, group.failed_count) == (1, 2)
    assert group.cancel_reason == "sibling_quorum_satisfied"


async def test_an_impossible_quorum_cancels_the_survivors(engine: Engine, graph: Graph) -> None:
    await graph.build({"d": "a b c e"}, JoinQuorum(3))

    await graph.fail("a")
    await graph.fail("b")
    await graph.settle()

    assert await graph.states() == {
        "d": "skipped",
        "a": "failed",
        "b": "failed",
        "c": "cancelled",
        "e": "cancelled",
    }
    survivor = await execution_of(engine, graph["c"])
    assert survivor.cancellation_reason == "sibling_quorum_impossible"


@pytest.mark.parametrize("endings", ["a+ b+", "a- b-"])
async def test_let_run_cancels_nobody(graph: Graph, endings: str) -> None:
    await graph.build({"d": "a b c"}, JoinQuorum(2, LET_RUN))
    await end(graph, endings)
    await graph.settle()
    assert await graph.state("c") == "waiting"


async def test_all_of_cancels_nobody(graph: Graph) -> None:
    await graph.build({"d": "a b"})
    await end(graph, "a-")
    await graph.settle()
    assert await graph.states() == {"d": "skipped", "a": "failed", "b": "waiting"}


async def test_a_cancelled_sibling_fails_the_other_joins_it_feeds(graph: Graph) -> None:
    await graph.build({"d": "a b", "e": "b c"})
    other = graph.new("f")
    await graph.engine.add_dependencies(
        graph.flow_id, [graph.join("f", "ab", JoinAny())], members=other
    )

    await graph.run("a")
    await graph.settle()

    states = await graph.states()
    assert (states["b"], states["d"], states["e"], states["f"]) == (
        "cancelled",
        "skipped",
        "skipped",
        "waiting",
    )


async def test_every_sibling_is_cancelled_however_many(graph: Graph) -> None:
    names = [f"s{number}" for number in range(450)]
    await graph.build({"d": " ".join(["a", *names])}, JoinAny())
    await graph.run("a")
    await graph.settle()
    states = await graph.states()
    assert {states[name] for name in names} == {"cancelled"}
    assert (states["d"], (await graph.group("d")).failed_count) == ("waiting", 450)
