"""What the end of a member does to those that wait for it."""

import pytest

from flowfabric import Engine, EngineConfig
from flowfabric.core.flow_model import DependencyState, FlowState, GroupState, OnSatisfied
from flowfabric.core.flow_policy import AllOf, AnyOf, EdgeDependencyPolicy, Quorum
from flowfabric.core.flow_results import (
    AlreadyFired,
    AlreadyResolved,
    CascadeOutcome,
    Impossible,
    Pending,
    ResolveResult,
    Satisfied,
)
from flowfabric.core.flow_views import EligibilityStatus
from flowfabric.core.states import AttemptLifecycle, FailureClass, TerminalOutcome
from flowfabric.errors import (
    ExecutionNotTerminal,
    InvalidDependency,
    InvalidInput,
    LeaseConflict,
    NotFound,
)
from flowfabric.testing import SettableClock
from tests.conformance.given import UNKNOWN_ID, Given
from tests.conformance.graphs import Graph, new_graph, new_id
from tests.conformance.observed import cursor_of, events_since, execution_of, refused

LET_RUN = OnSatisfied.LET_RUN


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    return await new_graph(engine)


async def end(graph: Graph, endings: str) -> None:
    """`a+ b- c?`: a succeeds, b fails, c is cancelled; dependents are told after each."""
    for name, how in endings.split():
        if how == "+":
            await graph.run(name)
        elif how == "-":
            await graph.fail(name)
        else:
            await graph.engine.cancel_execution(graph[name], reason="not needed")
        await graph.engine.dispatch_completions()


# Policies

POLICIES: list[tuple[EdgeDependencyPolicy, str, str, GroupState]] = [
    (AllOf(), "a+ b+", "waiting_children", GroupState.PENDING),
    (AllOf(), "a+ b+ c+", "waiting", GroupState.SATISFIED),
    (AllOf(), "a-", "skipped", GroupState.IMPOSSIBLE),
    (AllOf(), "a+ b?", "skipped", GroupState.IMPOSSIBLE),
    (AnyOf(LET_RUN), "a- b-", "waiting_children", GroupState.PENDING),
    (AnyOf(LET_RUN), "a+", "waiting", GroupState.SATISFIED),
    (AnyOf(LET_RUN), "a- b- c-", "skipped", GroupState.IMPOSSIBLE),
    (Quorum(2, LET_RUN), "a+", "waiting_children", GroupState.PENDING),
    (Quorum(2, LET_RUN), "a+ b- c+", "waiting", GroupState.SATISFIED),
    (Quorum(2, LET_RUN), "a- b-", "skipped", GroupState.IMPOSSIBLE),
    (Quorum(3, LET_RUN), "a+ b-", "skipped", GroupState.IMPOSSIBLE),
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
    await graph.build({"d": "a b c"}, AnyOf(LET_RUN))
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
    await graph.build({"d": "a b c"}, AnyOf())
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
    await graph.build({"d": "a b c e"}, Quorum(3))

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
    await graph.build({"d": "a b c"}, Quorum(2, LET_RUN))
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
        graph.flow_id, [graph.join("f", "ab", AnyOf())], members=other
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
    await graph.build({"d": " ".join(["a", *names])}, AnyOf())
    await graph.run("a")
    await graph.settle()
    states = await graph.states()
    assert {states[name] for name in names} == {"cancelled"}
    assert (states["d"], (await graph.group("d")).failed_count) == ("waiting", 450)


# Data


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
    await graph.build({"d": "a b c"}, Quorum(2, LET_RUN), passing=True)
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
        " at most 100 are passed on"
    )


# The queue


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
    await engine.set_edge_group_policy(graph.flow_id, graph["d"], Quorum(2, LET_RUN))
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


# evaluate_flow_eligibility


async def test_whether_dependencies_let_an_execution_run(
    engine: Engine, graph: Graph, given: Given
) -> None:
    await graph.build({"b": "a", "d": "a c"}, AnyOf(LET_RUN))
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
    assert (
        await engine.evaluate_flow_eligibility(graph["c"]) is EligibilityStatus.NOT_RUNNABLE
    )
    await end(graph, "a+")
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


async def test_operations_on_a_missing_flow_say_so(engine: Engine, graph: Graph) -> None:
    await graph.member("a")
    await graph.member("b")
    partition, _ = engine.flow_key(graph.flow_id)
    ghost = new_id()
    while engine.flow_key(engine.check_flow_id(ghost))[0] != partition:
        ghost = new_id()
    with pytest.raises(NotFound):
        await engine.resolve_dependency(
            ghost,
            new_id(),
            upstream_execution_id=graph["a"],
            downstream_execution_id=graph["b"],
        )
