"""Replaying members of flows."""

import msgspec
import pytest

from flowfabric import Engine
from flowfabric.core.flow_joins import JoinAny, JoinQuorum
from flowfabric.core.flow_records import FlowState, GroupState, OnSatisfied
from flowfabric.core.results import Replayed
from flowfabric.core.states import AttemptState, AttemptType, BlockingReason, PublicState
from flowfabric.errors import ExecutionNotTerminal, FlowFabricError, NotFound
from flowfabric.testing import SettableClock
from tests.conformance.given import UNKNOWN_ID, Given
from tests.conformance.graphs import Graph, new_graph
from tests.conformance.observed import cursor_of, events_since, execution_of

LET_RUN = OnSatisfied.LET_RUN


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    return await new_graph(engine)


async def test_a_skipped_member_waits_again(engine: Engine, graph: Graph) -> None:
    await graph.build({"d": "a b"})
    await graph.run("a")
    await graph.fail("b")
    await graph.settle()
    assert await graph.state("d") == "skipped"
    cursor = await cursor_of(engine)

    answer = await engine.replay_execution(graph["d"], reason="again", requested_by="me")

    assert answer == Replayed(public_state=PublicState.WAITING_CHILDREN)
    execution = await execution_of(engine, graph["d"])
    assert execution.blocking_reason is BlockingReason.WAITING_FOR_CHILDREN
    assert execution.blocking_detail == "waiting for the executions it depends on"
    assert execution.attempt_state is AttemptState.PENDING_REPLAY_ATTEMPT
    assert execution.replay_count == 1
    group = await graph.group("d")
    assert (group.satisfied_count, group.failed_count, group.running_count) == (1, 0, 1)
    assert (group.group_state, group.fired_at_ms) == (GroupState.PENDING, None)
    (event,) = await events_since(engine, cursor)
    assert event.event_type == "replayed"
    assert msgspec.json.decode(event.details or "") == {
        "branch": "skipped_flow_member",
        "groups_reset": 1,
    }
    await graph.settle()
    assert await graph.state("d") == "waiting_children"


@pytest.mark.parametrize("first", ["upstream", "downstream"])
async def test_upstream_and_downstream_are_replayed_in_any_order(
    engine: Engine, graph: Graph, clock: SettableClock, first: str
) -> None:
    await graph.build({"d": "a b"}, passing=True)
    await graph.run("a", result=b"from a")
    await graph.fail("b")
    await graph.settle()
    clock.advance(seconds=1)

    if first == "upstream":
        await engine.replay_execution(graph["b"])
        await graph.run("b", result=b"from b")
        await graph.settle()
        assert await graph.state("d") == "skipped"
        answer = await engine.replay_execution(graph["d"])
        assert answer == Replayed(public_state=PublicState.WAITING)
    else:
        await engine.replay_execution(graph["d"])
        await engine.replay_execution(graph["b"])
        await graph.run("b", result=b"from b")
        await graph.settle()

    assert await graph.state("d") == "waiting"
    assert await engine.read_execution_inputs(graph["d"]) == {"a": b"from a", "b": b"from b"}
    claimed = await graph.claimed("d")
    assert (claimed.attempt_type, claimed.payload) == (AttemptType.REPLAY, b"from b")
    await engine.complete(claimed.handle)
    await graph.settle()
    assert (await graph.flow()).state is FlowState.COMPLETED


async def test_a_quorum_that_was_impossible_can_be_reached_after_replays(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"d": "a b c"}, JoinQuorum(2, LET_RUN))
    await graph.run("a")
    await graph.fail("b")
    await graph.fail("c")
    await graph.settle()
    assert await graph.state("d") == "skipped"

    await engine.replay_execution(graph["d"])
    await engine.replay_execution(graph["c"])
    await graph.run("c")
    await graph.settle()

    assert await graph.state("d") == "waiting"
    group = await graph.group("d")
    assert (group.satisfied_count, group.failed_count) == (2, 0)


async def test_replaying_the_downstream_spares_siblings_not_yet_cancelled(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"d": "a b c"}, JoinQuorum(3))
    await graph.fail("a")
    await engine.dispatch_completions()
    assert await graph.state("d") == "skipped"

    await engine.replay_execution(graph["d"])
    await graph.settle()

    assert await graph.states() == {
        "a": "failed",
        "b": "waiting",
        "c": "waiting",
        "d": "waiting_children",
    }


async def test_a_member_whose_join_was_satisfied_runs_again_at_once(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"b": "a"})
    await graph.run("a")
    await graph.settle()
    await graph.fail("b")
    await graph.settle()
    assert (await graph.flow()).state is FlowState.FAILED

    assert await engine.replay_execution(graph["b"]) == Replayed(public_state=PublicState.WAITING)

    assert (await graph.flow()).state is FlowState.OPEN
    await graph.run("b")
    await graph.settle()
    assert (await graph.flow()).state is FlowState.COMPLETED


async def test_a_cancelled_member_whose_join_is_open_waits_again(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"b": "a"})
    await engine.cancel_execution(graph["b"], reason="mistake")
    await graph.settle()

    answer = await engine.replay_execution(graph["b"])

    assert answer == Replayed(public_state=PublicState.WAITING_CHILDREN)
    assert set(await graph.claim()) == {"a"}


async def test_a_sibling_replayed_before_its_cancellation_lives(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"d": "a b"}, JoinAny())
    await graph.run("a")
    await graph.fail("b")
    await engine.cascade_completion(graph["a"])
    await engine.replay_execution(graph["b"])
    await graph.settle()
    assert await graph.state("b") == "waiting"


async def test_counts_are_right_whether_or_not_an_ending_was_told(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"a": "", "b": ""})
    await graph.run("a")
    await engine.replay_execution(graph["a"])
    await graph.run("a")
    await graph.settle()
    await engine.replay_execution(graph["a"])
    await graph.run("b")
    await graph.settle()
    assert (await graph.flow()).state is FlowState.OPEN
    await graph.run("a")
    await graph.settle()
    assert (await graph.flow()).state is FlowState.COMPLETED


async def test_each_of_many_gets_its_own_answer(engine: Engine, graph: Graph, given: Given) -> None:
    await graph.build({"b": "a"})
    await graph.run("a")
    await graph.settle()
    alone = (await given.completed()).execution_id

    answers = await engine.replay_executions(
        [graph["a"], graph["b"], alone, UNKNOWN_ID, graph["a"]]
    )

    assert [type(answer) for answer in answers] == [
        Replayed,
        ExecutionNotTerminal,
        Replayed,
        NotFound,
        ExecutionNotTerminal,
    ]
    assert isinstance(answers[1], FlowFabricError)
    assert await engine.replay_executions([]) == []
