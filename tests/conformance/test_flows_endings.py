"""However a member ends, those who wait for it hear of it, once."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from flowfabric import Engine
from flowfabric.core.conditions import Single
from flowfabric.core.flow_joins import JoinAll, JoinAny, JoinQuorum
from flowfabric.core.flow_records import DependencyState, EdgeState, FlowState, GroupState
from flowfabric.core.results import Added, AlreadyResolved, FlowCancelled, Impossible, Satisfied
from flowfabric.core.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.errors import CycleDetected
from flowfabric.testing import SettableClock
from tests.conformance.given import Given
from tests.conformance.graphs import Graph, new_graph, new_id
from tests.conformance.observed import cursor_of, events_since, execution_of, refused

TIMED = {"timeout_policy": {"attempt_timeout_ms": 1_000}}


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    return await new_graph(engine)


# Every way to end

End = Callable[[Graph, SettableClock], Awaitable[None]]


async def complete(graph: Graph, clock: SettableClock) -> None:
    await graph.run("a")


async def fail(graph: Graph, clock: SettableClock) -> None:
    await graph.fail("a")


async def cancel(graph: Graph, clock: SettableClock) -> None:
    await graph.engine.cancel_execution(graph["a"], reason="no more")


async def give_up(graph: Graph, clock: SettableClock) -> None:
    await graph.engine.cancel((await graph.claimed("a")).handle, "no more")


async def overrun_the_attempt(graph: Graph, clock: SettableClock) -> None:
    await graph.claimed("a")
    clock.advance(seconds=2)
    await graph.engine.expire_due_attempts()


async def miss_the_deadline(graph: Graph, clock: SettableClock) -> None:
    clock.advance(minutes=2)
    await graph.engine.expire_due_deadlines()


def suspended_too_long(behavior: str) -> End:
    async def end(graph: Graph, clock: SettableClock) -> None:
        await graph.engine.suspend(
            (await graph.claimed("a")).handle,
            resume_condition=Single("gate"),
            timeout_at_ms=clock.now_ms() + 1_000,
            timeout_behavior=behavior,
        )
        clock.advance(seconds=1)
        await graph.engine.expire_due_suspensions()

    return end


ENDS: dict[str, tuple[End, TerminalOutcome]] = {
    "completed": (complete, TerminalOutcome.SUCCESS),
    "failed": (fail, TerminalOutcome.FAILED),
    "cancelled": (cancel, TerminalOutcome.CANCELLED),
    "given up": (give_up, TerminalOutcome.CANCELLED),
    "overrun": (overrun_the_attempt, TerminalOutcome.EXPIRED),
    "too late": (miss_the_deadline, TerminalOutcome.EXPIRED),
    "suspended, failed": (suspended_too_long("fail"), TerminalOutcome.FAILED),
    "suspended, cancelled": (suspended_too_long("cancel"), TerminalOutcome.CANCELLED),
    "suspended, expired": (suspended_too_long("expire"), TerminalOutcome.EXPIRED),
}


@pytest.mark.parametrize("how", ENDS)
async def test_dependents_hear_of_every_ending(
    engine: Engine, graph: Graph, clock: SettableClock, how: str
) -> None:
    deadline_ms = clock.now_ms() + 60_000
    members = graph.new("a", policy=TIMED, execution_deadline_at_ms=deadline_ms) + graph.new("b")
    await engine.add_dependencies(graph.flow_id, [graph.join("b", "a")], members=members)
    cursor = await cursor_of(engine)
    end, outcome = ENDS[how]

    await end(graph, clock)
    await graph.settle()

    succeeded = outcome is TerminalOutcome.SUCCESS
    told = [
        (graph.name(event.execution_id), event.event_type, event.flow_id)
        for event in await events_since(engine, cursor)
        if event.category == "completion"
    ]
    expected = [("a", outcome.value), *([] if succeeded else [("b", "skipped")])]
    assert told == [(name, kind, graph.flow_id) for name, kind in expected]
    (edge,) = await engine.list_edges(graph.flow_id)
    assert (edge.dep_state, edge.resolved_outcome, edge.resolved_at_ms) == (
        DependencyState.SATISFIED if succeeded else DependencyState.IMPOSSIBLE,
        outcome,
        clock.now_ms(),
    )
    assert await graph.state("b") == ("waiting" if succeeded else "skipped")
    assert "dispatch" not in await engine.next_due()


async def test_what_ends_alone_is_told_to_nobody(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    for state in ("completed", "failed", "cancelled", "expired"):
        await given.state(state)
    assert "dispatch" not in await engine.next_due()
    events = [e for e in await events_since(engine) if e.category == "completion"]
    assert [event.flow_id for event in events] == [None] * 4


async def test_a_skipped_member_is_ended_in_every_respect(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.build({"b": "a"})
    await graph.fail("a")
    clock.advance(seconds=1)
    await graph.settle()

    b = await execution_of(engine, graph["b"])
    assert (b.lifecycle_phase, b.ownership_state) == (
        LifecyclePhase.TERMINAL,
        OwnershipState.UNOWNED,
    )
    assert (b.eligibility_state, b.blocking_reason, b.blocking_detail) == (
        EligibilityState.NOT_APPLICABLE,
        BlockingReason.NONE,
        "",
    )
    assert (b.terminal_outcome, b.public_state) == (TerminalOutcome.SKIPPED, PublicState.SKIPPED)
    assert b.attempt_state is AttemptState.PENDING_FIRST_ATTEMPT
    assert b.completed_at_ms == b.last_transition_at_ms == clock.now_ms()
    assert await engine.list_attempts(graph["b"]) == ()


async def test_a_suspended_member_whose_join_became_impossible_is_closed(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"a": "", "b": ""})
    claimed = await graph.claimed("b")
    await graph.edge("a", "b")
    await engine.suspend(claimed.handle, resume_condition=Single("gate"))
    await graph.fail("a")
    await graph.settle()
    assert await graph.state("b") == "skipped"
    assert (await engine.list_suspended()).executions == ()


async def test_cancelling_a_flow_closes_what_its_members_wait_for(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"a": "", "b": ""})
    claimed = await graph.claimed("b")
    await engine.suspend(claimed.handle, resume_condition=Single("gate"))
    answer = await engine.cancel_flow_header(graph.flow_id, reason="enough", grace_ms=30_000)
    assert isinstance(answer, FlowCancelled)
    assert answer.member_execution_ids == tuple(sorted(graph.ids.values()))
    assert await graph.states() == {"a": "cancelled", "b": "cancelled"}
    assert (await engine.list_suspended()).executions == ()


# Edges resolved by hand


async def test_what_has_resolved_stays_so_whatever_is_said_later(
    engine: Engine, graph: Graph
) -> None:
    await graph.member("a")
    await graph.member("b")
    edge_id = await graph.edge("a", "b")
    await graph.fail("a")

    async def resolve(outcome: str) -> object:
        return await engine.resolve_dependency(
            graph.flow_id,
            edge_id,
            upstream_execution_id=graph["a"],
            downstream_execution_id=graph["b"],
            upstream_outcome=outcome,
        )

    assert await resolve("failed") == Impossible(child_skipped=True)
    before = await graph.group("b")
    assert await resolve("success") == AlreadyResolved()
    assert await graph.group("b") == before
    assert await graph.state("b") == "skipped"


@pytest.mark.parametrize(
    ("result", "replaced"), [(b"from a", True), (None, False)], ids=["result", "none"]
)
async def test_resolving_tells_whether_the_payload_was_replaced(
    engine: Engine, graph: Graph, result: bytes | None, replaced: bool
) -> None:
    await graph.member("a")
    await graph.member("b")
    edge_id = await graph.edge("a", "b", data_passing_ref="a")
    await graph.run("a", result=result)
    answer = await engine.resolve_dependency(
        graph.flow_id,
        edge_id,
        upstream_execution_id=graph["a"],
        downstream_execution_id=graph["b"],
    )
    assert answer == Satisfied(data_injected=replaced)
    assert (await graph.claimed("b")).payload == (result or b"b")


@pytest.mark.parametrize("state", ["running", "ended"])
async def test_the_payload_of_what_runs_or_has_ended_is_never_replaced(
    engine: Engine, graph: Graph, state: str
) -> None:
    await graph.member("a")
    await graph.member("b")
    claimed = await graph.claimed("b")
    edge_id = await graph.edge("a", "b", data_passing_ref="a")
    if state == "ended":
        await engine.complete(claimed.handle, b"done")
    await graph.run("a", result=b"from a")

    answer = await engine.resolve_dependency(
        graph.flow_id,
        edge_id,
        upstream_execution_id=graph["a"],
        downstream_execution_id=graph["b"],
    )

    assert answer == Satisfied(data_injected=False)
    assert (await execution_of(engine, graph["b"])).taken_payload == (b"b", None)
    edge = await engine.describe_edge(graph.flow_id, edge_id)
    assert edge is not None
    assert (edge.edge_state, edge.dep_state) == (EdgeState.APPLIED, DependencyState.SATISFIED)


# A whole life, edge by edge


async def test_a_chain_staged_edge_by_edge_runs_to_its_end(engine: Engine, graph: Graph) -> None:
    for name in "abc":
        await graph.member(name)
    revisions = [(await graph.flow()).graph_revision]
    for upstream, downstream in ("ab", "bc"):
        edge_id = new_id()
        staged = await engine.stage_dependency_edge(
            graph.flow_id,
            edge_id,
            upstream_execution_id=graph[upstream],
            downstream_execution_id=graph[downstream],
            expected_graph_revision=revisions[-1],
        )
        revisions.append(staged.new_graph_revision)
        await engine.apply_dependency_to_child(
            graph.flow_id,
            edge_id,
            upstream_execution_id=graph[upstream],
            downstream_execution_id=graph[downstream],
            graph_revision=staged.new_graph_revision,
        )
    assert revisions == [3, 4, 5]
    async with refused(engine, CycleDetected):
        await graph.stage("c", "a")
    for name in "abc":
        claimed = await graph.claim()
        assert set(claimed) == {name}
        await engine.complete(claimed[name].handle)
        await graph.settle()
    assert set((await graph.states()).values()) == {"completed"}
    assert (await graph.flow()).state is FlowState.COMPLETED


@pytest.mark.parametrize("policy", [None, JoinAll()])
async def test_all_of_is_what_joins_are_unless_told_otherwise(
    graph: Graph, policy: JoinAll | None
) -> None:
    await graph.build({"d": "a b c"}, policy)
    for name in "abc":
        await graph.run(name)
    await graph.settle()
    group = await graph.group("d")
    assert (group.policy, group.total_deps, group.satisfied_count, group.group_state) == (
        JoinAll(),
        3,
        3,
        GroupState.SATISFIED,
    )
    assert await graph.state("d") == "waiting"


# At the same time


async def test_members_added_at_the_same_time_are_all_counted(engine: Engine, graph: Graph) -> None:
    names = [f"m{number}" for number in range(8)]
    for name in names:
        await graph.outsider(name)

    answers = await asyncio.gather(
        *(engine.add_execution_to_flow(graph.flow_id, graph[name]) for name in names)
    )

    assert {type(answer) for answer in answers} == {Added}
    counts = [answer.new_node_count for answer in answers if isinstance(answer, Added)]
    assert sorted(counts) == list(range(1, 9))
    flow = await graph.flow()
    assert (flow.node_count, flow.graph_revision) == (8, 8)


async def test_a_burst_of_endings_is_told_once_by_many(engine: Engine, graph: Graph) -> None:
    names = [f"m{number}" for number in range(10)]
    await graph.build({"last": " ".join(names)})
    for claimed in (await graph.claim()).values():
        await engine.complete(claimed.handle)

    swept = await asyncio.gather(*(engine.dispatch_completions(limit=3) for _ in range(8)))
    while (more := await engine.dispatch_completions()).acted:
        swept.append(more)

    # Each ending, and the edge it resolves.
    assert sum(each.acted for each in swept) == 20
    group = await graph.group("last")
    assert (group.satisfied_count, group.running_count) == (10, 0)
    assert await graph.state("last") == "waiting"


async def test_many_joins_fire_and_every_sibling_is_cancelled_once(
    engine: Engine, graph: Graph
) -> None:
    shape = {f"d{group}": f"w{group} x{group} y{group} z{group}" for group in range(8)}
    await graph.build(shape, JoinAny())
    for group in range(8):
        await graph.run(f"w{group}")
    cursor = await cursor_of(engine)

    await graph.settle()

    told = Counter(
        (graph.name(event.execution_id), event.event_type)
        for event in await events_since(engine, cursor)
        if event.category == "completion"
    )
    assert told == {(f"{one}{group}", "cancelled"): 1 for one in "xyz" for group in range(8)}
    assert {await graph.state(name) for name in shape} == {"waiting"}
    assert "member_cancel" not in await engine.next_due()
    for group in range(8):
        await graph.run(f"d{group}")
    await graph.settle()
    # What a join gave up is no failure of the flow.
    summary = await engine.read_flow_summary(graph.flow_id)
    assert summary is not None
    assert (summary.members_cancelled, summary.members_spared) == (24, 24)
    assert summary.public_flow_state is (await graph.flow()).state is FlowState.COMPLETED


@pytest.mark.parametrize(
    ("endings", "state"),
    [("a+ b+", FlowState.COMPLETED), ("a+ b-", FlowState.FAILED), ("a- b-", FlowState.FAILED)],
)
async def test_a_quorum_that_spares_the_rest_fails_no_flow(
    engine: Engine, graph: Graph, endings: str, state: FlowState
) -> None:
    """One of three; a fourth member feeds nothing and fails, or does not."""
    await graph.build({"d": "a c e", "b": ""}, JoinQuorum(1))
    for each in endings.split():
        await (graph.run(each[0]) if each[1] == "+" else graph.fail(each[0]))
    await graph.settle()
    if await graph.state("d") == "waiting":
        await graph.run("d")
        await graph.settle()
    else:
        await engine.cancel_execution(graph["c"], reason="no more")
        await engine.cancel_execution(graph["e"], reason="no more")
        await graph.settle()
    flow = await graph.flow()
    assert flow.state is state
    (listed,) = (await engine.list_flows()).flows
    assert listed.status.value == state.value
    assert await engine.project_flow_summary(graph.flow_id) is True
    assert await graph.flow() == flow


async def test_a_spared_member_that_is_replayed_counts_as_what_it_becomes(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"d": "a b"}, JoinAny())
    await graph.run("a")
    await graph.settle()
    await graph.run("d")
    await graph.settle()
    assert (await graph.flow()).state is FlowState.COMPLETED

    await engine.replay_execution(graph["b"])
    assert (await graph.flow()).state is FlowState.OPEN
    await engine.cancel_execution(graph["b"], reason="by hand this time")
    await graph.settle()

    assert (await graph.flow()).state is FlowState.FAILED
