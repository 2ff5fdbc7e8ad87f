"""Results passed along edges, and parents that wait for children."""

import pytest

from flowfabric import Engine, EngineConfig
from flowfabric.core.flow_joins import JoinAny, JoinQuorum
from flowfabric.core.flow_records import OnSatisfied
from flowfabric.core.states import FailureClass, TerminalOutcome
from flowfabric.core.views import EligibilityStatus
from flowfabric.errors import LeaseConflict
from flowfabric.testing import SettableClock
from tests.conformance.given import UNKNOWN_ID, Given
from tests.conformance.graphs import Graph, new_graph
from tests.conformance.observed import execution_of

LET_RUN = OnSatisfied.LET_RUN


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    return await new_graph(engine)


async def test_one_passed_result_becomes_the_payload(engine: Engine, graph: Graph) -> None:
    await graph.build({"b": "a"}, passing=True)
    await graph.run("a", result=b"from a")
    await graph.settle()

    claimed = await graph.claimed("b")

    assert claimed.payload == b"from a"
    assert await engine.read_execution_inputs(graph["b"]) == {"a": b"from a"}


async def test_several_results_are_passed_by_name_and_the_newest_is_the_payload(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.build({"d": "a b c"}, JoinQuorum(2, LET_RUN), passing=True)
    for name in ("b", "a", "c"):
        clock.advance(seconds=1)
        await graph.run(name, result=f"from {name}".encode())
        await graph.settle()

    assert await engine.read_execution_inputs(graph["d"]) == {"a": b"from a", "b": b"from b"}
    assert (await graph.claimed("d")).payload == b"from a"


async def test_results_may_be_passed_beside_the_payload(engine: Engine, graph: Graph) -> None:
    await graph.build({"d": "a b"}, passing=True, replaces_payload=False)
    await graph.run("a", result=b"from a")
    await graph.run("b", result=None)
    await graph.settle()

    assert (await graph.claimed("d")).payload == b"d"
    assert await engine.read_execution_inputs(graph["d"]) == {"a": b"from a", "b": None}


async def test_without_a_name_or_a_result_the_payload_stays(engine: Engine, graph: Graph) -> None:
    await graph.build({"b": "a"})
    await graph.run("a", result=b"unused")
    await graph.settle()
    assert (await graph.claimed("b")).payload == b"b"
    assert await engine.read_execution_inputs(graph["b"]) == {}

    members = graph.new("c", "e")
    await engine.add_dependencies(
        graph.flow_id, [graph.join("e", "c", passing=True)], members=members
    )
    await graph.run("c", result=None)
    await graph.settle()
    assert (await graph.claimed("e")).payload == b"e"


async def test_a_passed_result_survives_the_replay_of_its_upstream(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"d": "a b"}, passing=True)
    await graph.run("a", result=b"first")
    await graph.settle()
    await engine.replay_execution(graph["a"])
    await graph.run("b", result=b"from b")
    await graph.settle()

    assert await engine.read_execution_inputs(graph["d"]) == {"a": b"first", "b": b"from b"}


@pytest.mark.parametrize("config", [EngineConfig(payload_bytes_max=100)])
async def test_results_too_large_together_fail_the_execution(
    engine: Engine, graph: Graph, config: EngineConfig
) -> None:
    await graph.build({"d": "a b"}, passing=True)
    await graph.run("a", result=b"x" * 60)
    await graph.run("b", result=b"x" * 60)
    await graph.settle()

    failed = await execution_of(engine, graph["d"])
    assert failed.terminal_outcome is TerminalOutcome.FAILED
    assert failed.failure_reason == (
        "inputs_too_large: the results of its dependencies are 120 bytes together,"
        " at most 100 are passed on; have them keep it elsewhere and return where"
    )


# evaluate_flow_eligibility


async def test_whether_dependencies_let_an_execution_run(
    engine: Engine, graph: Graph, given: Given
) -> None:
    await graph.build({"b": "a", "d": "a c"}, JoinAny(LET_RUN))
    alone = await given.waiting()
    statuses = {
        "alone": await engine.evaluate_flow_eligibility(alone),
        "a": await engine.evaluate_flow_eligibility(graph["a"]),
        "b": await engine.evaluate_flow_eligibility(graph["b"]),
        "unknown": await engine.evaluate_flow_eligibility(UNKNOWN_ID),
    }
    assert statuses == {
        "alone": EligibilityStatus.ELIGIBLE,
        "a": EligibilityStatus.ELIGIBLE,
        "b": EligibilityStatus.BLOCKED_BY_DEPENDENCIES,
        "unknown": EligibilityStatus.NOT_FOUND,
    }
    await graph.claimed("c")
    assert await engine.evaluate_flow_eligibility(graph["c"]) is EligibilityStatus.NOT_RUNNABLE
    await graph.run("a")
    await graph.settle()
    assert await engine.evaluate_flow_eligibility(graph["d"]) is EligibilityStatus.ELIGIBLE


# wait_children


async def test_a_parent_waits_for_children_it_added(engine: Engine, graph: Graph) -> None:
    await graph.member("parent")
    claimed = await graph.claimed("parent")
    await graph.member("child")
    await graph.edge("child", "parent")

    moved = await engine.wait_children(claimed.handle)

    assert moved.public_state == "waiting_children"
    await graph.run("child")
    await graph.settle()
    resumed = (await graph.claim())["parent"]
    assert (resumed.attempt_index, resumed.handle.kind) == (0, "resumed")


async def test_a_parent_whose_children_ended_before_it_waits_goes_on_at_once(
    engine: Engine, graph: Graph
) -> None:
    await graph.member("parent")
    claimed = await graph.claimed("parent")
    await graph.member("child")
    await graph.edge("child", "parent")
    await graph.run("child")
    await graph.settle()

    moved = await engine.wait_children(claimed.handle)

    assert moved.public_state == "waiting"
    assert set(await graph.claim()) == {"parent"}


async def test_a_member_without_children_waits_for_nothing(engine: Engine, graph: Graph) -> None:
    await graph.member("a")
    claimed = await graph.claimed("a")
    moved = await engine.wait_children(claimed.handle)
    assert moved == await engine.wait_children(claimed.handle)
    assert moved.public_state == "waiting"


async def test_only_the_holder_may_wait(engine: Engine, graph: Graph) -> None:
    await graph.member("a")
    first = await graph.claimed("a")
    await engine.revoke_lease(graph["a"], reason="moved")
    second = (await graph.claim())["a"]
    with pytest.raises(LeaseConflict):
        await engine.wait_children(first.handle)
    await engine.wait_children(second.handle)


async def test_a_retried_member_keeps_its_place(engine: Engine, graph: Graph) -> None:
    policy = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}
    members = graph.new("a", "b", policy=policy)
    await engine.add_dependencies(graph.flow_id, [graph.join("b", "a")], members=members)

    await engine.fail((await graph.claimed("a")).handle, "once")
    await graph.settle()
    assert await graph.state("b") == "waiting_children"

    await engine.promote_due_delays()
    await engine.fail(
        (await graph.claim())["a"].handle, "twice", failure_class=FailureClass.PERMANENT
    )
    await graph.settle()
    assert await graph.state("b") == "skipped"
