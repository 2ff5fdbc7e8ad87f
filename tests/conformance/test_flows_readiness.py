"""No member runs before its join holds, nor without what the join passes on.

Every way to ready is tried with edges staged or applied while a worker had the member.
"""

from collections.abc import Awaitable, Callable

import pytest

from flowfabric import Engine, EngineConfig
from flowfabric.core.bounds import AUDIT_EVERY_MS
from flowfabric.core.conditions import Single
from flowfabric.core.flow_joins import JoinQuorum
from flowfabric.core.flow_records import OnSatisfied
from flowfabric.core.results import Claimed
from flowfabric.core.states import FailureClass, PublicState
from flowfabric.core.views import EligibilityStatus
from flowfabric.errors import ExecutionNotTerminal, FlowFabricError
from flowfabric.reconcilers import run_due
from flowfabric.testing import SettableClock
from tests.conformance.auditing import complaints_of
from tests.conformance.given import RETRYING, Given
from tests.conformance.graphs import LEASE_MS, Graph, new_graph
from tests.conformance.observed import execution_of, refused

LET_RUN = OnSatisfied.LET_RUN


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    return await new_graph(engine)


# Ways to ready


async def retry(graph: Graph, held: Claimed, clock: SettableClock) -> None:
    await graph.engine.fail(held.handle, "again")
    clock.advance(ms=5_000)
    await graph.engine.promote_due_delays()


async def delay(graph: Graph, held: Claimed, clock: SettableClock) -> None:
    await graph.engine.delay(held.handle, clock.now_ms() + 5_000)
    clock.advance(ms=5_000)
    await graph.engine.promote_delayed(graph["d"])


async def lose(graph: Graph, held: Claimed, clock: SettableClock) -> None:
    clock.advance(ms=LEASE_MS)
    await graph.engine.expire_due_leases()


async def revoke(graph: Graph, held: Claimed, clock: SettableClock) -> None:
    await graph.engine.revoke_lease(graph["d"], reason="moved")


async def hand_back(graph: Graph, held: Claimed, clock: SettableClock) -> None:
    await graph.engine.hand_back(held.handle, reason="stopping")


async def resume(graph: Graph, held: Claimed, clock: SettableClock) -> None:
    await graph.engine.suspend(held.handle, resume_condition=Single("gate"))
    await graph.engine.resume_execution(graph["d"], trigger_type="operator")


async def time_out(graph: Graph, held: Claimed, clock: SettableClock) -> None:
    clock.advance(ms=300_000)
    await graph.engine.expire_due_attempts()
    clock.advance(ms=5_000)
    await graph.engine.promote_due_delays()


async def wake(graph: Graph, held: Claimed, clock: SettableClock) -> None:
    await graph.member("awaited")
    await graph.engine.await_executions(held.handle, [graph["awaited"]])
    await graph.engine.cancel_execution(graph["awaited"], reason="enough")
    await graph.engine.wake_awaiting()


async def wait_for_children(graph: Graph, held: Claimed, clock: SettableClock) -> None:
    await graph.engine.wait_children(held.handle)


async def replay(graph: Graph, held: Claimed, clock: SettableClock) -> None:
    await graph.engine.fail(held.handle, "no", failure_class=FailureClass.PERMANENT)
    await graph.engine.replay_execution(graph["d"])


async def replay_cancelled(graph: Graph, held: Claimed, clock: SettableClock) -> None:
    await graph.engine.cancel_execution(graph["d"], reason="no")
    await graph.engine.replay_execution(graph["d"])


Way = Callable[[Graph, Claimed, SettableClock], Awaitable[None]]
WAYS: tuple[Way, ...] = (
    retry,
    delay,
    lose,
    revoke,
    hand_back,
    resume,
    time_out,
    wake,
    wait_for_children,
    replay,
    replay_cancelled,
)
PARKING = (delay, resume, wake, wait_for_children)
"""Ways on which the attempt goes on."""
POLICY = {**RETRYING, "timeout_policy": {"attempt_timeout_ms": 300_000}}


def name_of(way: Way) -> str:
    return way.__name__


async def running(graph: Graph) -> Claimed:
    """A worker has `d`, which depends on nothing yet; `u` is ready."""
    await graph.member("u")
    await graph.member("d", policy=POLICY)
    return await graph.claimed("d")


async def check_payload(graph: Graph, way: Way, clock: SettableClock) -> None:
    """What was passed on is the payload of the next attempt; one that goes on keeps its own."""
    claimed = (await graph.claim())["d"]
    if way in PARKING:
        assert claimed.payload == b"d"
        await retry(graph, claimed, clock)
        claimed = (await graph.claim())["d"]
    assert claimed.payload == b"from u"
    assert await graph.engine.read_execution_inputs(graph["d"]) == {"u": b"from u"}


async def payloads(graph: Graph) -> dict[str, bytes]:
    return {name: claimed.payload for name, claimed in (await graph.claim()).items()}


@pytest.mark.parametrize("applied", [False, True], ids=["staged", "applied"])
@pytest.mark.parametrize("way", WAYS, ids=name_of)
async def test_an_edge_added_while_it_ran_holds_it_back_on_every_way_to_ready(
    engine: Engine, graph: Graph, clock: SettableClock, way: Way, applied: bool
) -> None:
    held = await running(graph)
    add = graph.edge if applied else graph.stage
    edge_id = await add("u", "d", data_passing_ref="u")

    await way(graph, held, clock)

    claimed = await graph.claim()
    assert "d" not in claimed
    assert not (await execution_of(engine, graph["d"])).ready
    await engine.complete(claimed["u"].handle, b"from u")
    await graph.settle()
    if not applied:
        assert await graph.claim() == {}
        await engine.apply_dependency_to_child(
            graph.flow_id,
            edge_id,
            upstream_execution_id=graph["u"],
            downstream_execution_id=graph["d"],
        )
    await check_payload(graph, way, clock)


@pytest.mark.parametrize("way", WAYS, ids=name_of)
async def test_an_edge_added_while_it_ran_skips_it_if_its_upstream_fails(
    engine: Engine, graph: Graph, clock: SettableClock, way: Way
) -> None:
    held = await running(graph)
    await graph.edge("u", "d")

    await way(graph, held, clock)
    await graph.fail("u")
    await graph.settle()

    assert await graph.state("d") == "skipped"


@pytest.mark.parametrize("way", WAYS, ids=name_of)
async def test_what_was_passed_on_while_it_ran_is_the_payload_of_the_next_attempt(
    engine: Engine, graph: Graph, clock: SettableClock, way: Way
) -> None:
    held = await running(graph)
    await graph.edge("u", "d", data_passing_ref="u")
    await graph.run("u", result=b"from u")
    await graph.settle()
    assert (await execution_of(engine, graph["d"])).payload == b"d"

    await way(graph, held, clock)

    await check_payload(graph, way, clock)


async def test_a_join_that_holds_during_the_backoff_passes_its_results_on(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    held = await running(graph)
    await graph.edge("u", "d", data_passing_ref="u")
    await engine.fail(held.handle, "again")

    await graph.run("u", result=b"from u")
    await graph.settle()

    assert await graph.state("d") == "delayed"
    clock.advance(ms=5_000)
    await engine.promote_due_delays()
    assert await payloads(graph) == {"d": b"from u"}


async def test_dependencies_added_in_bulk_hold_back_what_runs(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    held = await running(graph)
    await engine.add_dependencies(graph.flow_id, [graph.join("d", "u", passing=True)])
    await engine.hand_back(held.handle, reason="stopping")
    assert await graph.state("d") == "waiting_children"

    await graph.run("u", result=b"from u")
    await graph.settle()

    assert await payloads(graph) == {"d": b"from u"}


@pytest.mark.parametrize("config", [EngineConfig(payload_bytes_max=100)])
async def test_results_too_large_end_what_runs_too(
    engine: Engine, graph: Graph, config: EngineConfig
) -> None:
    await graph.member("u")
    await graph.member("v")
    held = await running(graph)
    for upstream in "uv":
        await graph.edge(upstream, "d", data_passing_ref=upstream)
    await graph.run("u", result=b"x" * 60)
    await graph.run("v", result=b"x" * 60)
    await graph.settle()

    failed = await execution_of(engine, graph["d"])
    assert (failed.public_state, (failed.failure_reason or "")[:16]) == (
        PublicState.FAILED,
        "inputs_too_large",
    )
    assert failed.lease_epoch > held.lease_epoch


# Replay


@pytest.mark.parametrize("way", ["cancel", "expire"])
async def test_a_replay_runs_with_what_was_passed_on_after_its_end(
    engine: Engine, graph: Graph, clock: SettableClock, way: str
) -> None:
    await graph.build({"d": "u"}, passing=True, execution_deadline_at_ms=clock.now_ms() + 60_000)
    handle = (await graph.claimed("u")).handle
    if way == "cancel":
        await engine.cancel_execution(graph["d"], reason="no")
    else:
        clock.advance(ms=60_000)
        await engine.expire_execution(graph["d"], "execution_deadline")
    await engine.complete(handle, b"from u")
    await graph.settle()

    assert (await engine.replay_execution(graph["d"])).public_state is PublicState.WAITING

    assert await payloads(graph) == {"d": b"from u"}


@pytest.mark.parametrize("config", [EngineConfig(payload_bytes_max=100)])
async def test_a_replay_does_not_get_past_the_limit_of_what_is_passed_on(
    engine: Engine, graph: Graph, config: EngineConfig
) -> None:
    await graph.build({"d": "a b", "e": "d"}, passing=True)
    await graph.run("a", result=b"x" * 60)
    await graph.run("b", result=b"x" * 60)
    await graph.settle()
    assert await graph.state("d") == "failed"

    assert (await engine.replay_execution(graph["d"])).public_state is PublicState.FAILED

    await graph.settle()
    assert await graph.claim() == {}
    assert (await graph.flow()).state == "failed"
    replayed = await execution_of(engine, graph["d"])
    assert (replayed.replay_count, (replayed.failure_reason or "")[:16]) == (1, "inputs_too_large")


async def test_a_failure_from_before_a_replay_does_not_undo_it(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"d": "a b c"}, passing=True)
    await graph.fail("a")
    await graph.settle()
    assert await graph.state("d") == "skipped"
    await graph.fail("b")

    await engine.replay_execution(graph["d"])
    await graph.settle()
    assert await graph.state("d") == "waiting_children"

    for name in "ab":
        await engine.replay_execution(graph[name])
    for name in "abc":
        await graph.run(name, result=name.encode())
    await graph.settle()
    assert await graph.state("d") == "waiting"


async def test_a_failure_after_a_replay_counts(engine: Engine, graph: Graph) -> None:
    await graph.build({"d": "a b"})
    await graph.fail("a")
    await graph.settle()
    await engine.replay_execution(graph["d"])
    await engine.replay_execution(graph["a"])
    await graph.fail("a")
    await graph.settle()
    assert await graph.state("d") == "skipped"


async def test_nobody_resolves_a_reopened_edge_with_the_old_failure(
    engine: Engine, graph: Graph
) -> None:
    await graph.member("a")
    await graph.member("d")
    edge_id = await graph.edge("a", "d")
    await graph.fail("a")
    await graph.settle()
    await engine.replay_execution(graph["d"])
    ends = {"upstream_execution_id": graph["a"], "downstream_execution_id": graph["d"]}

    async with refused(engine, ExecutionNotTerminal):
        await engine.resolve_dependency(graph.flow_id, edge_id, **ends)

    assert await graph.state("d") == "waiting_children"
    await engine.replay_execution(graph["a"])
    await graph.run("a")
    await engine.resolve_dependency(graph.flow_id, edge_id, **ends)
    assert await graph.state("d") == "waiting"


async def test_an_edge_applied_after_a_replay_ignores_the_failure_from_before(
    engine: Engine, graph: Graph
) -> None:
    for name in "abd":
        await graph.member(name)
    await graph.edge("a", "d")
    edge_id = await graph.stage("b", "d")
    await graph.fail("a")
    await graph.fail("b")
    await graph.settle()
    await engine.replay_execution(graph["d"])

    await engine.apply_dependency_to_child(
        graph.flow_id,
        edge_id,
        upstream_execution_id=graph["b"],
        downstream_execution_id=graph["d"],
    )

    assert await graph.state("d") == "waiting_children"


# Waiting for a child


async def pass_an_hour(engine: Engine, clock: SettableClock) -> None:
    for _ in range(60):
        clock.advance(ms=AUDIT_EVERY_MS)
        await run_due(engine)


@pytest.mark.parametrize("in_flow", [True, False])
async def test_who_waits_for_a_child_runs_once_it_has_ended_and_not_before(
    engine: Engine, graph: Graph, given: Given, clock: SettableClock, in_flow: bool
) -> None:
    await (graph.member if in_flow else graph.outsider)("parent")
    # A flow that the audit has something to look at in.
    await graph.member("other", lane_id="elsewhere")
    child = await given.waiting(lane_id="elsewhere")
    await engine.await_executions((await graph.claimed("parent")).handle, [child])

    await pass_an_hour(engine, clock)

    assert await graph.claim() == {}
    assert (
        await engine.evaluate_flow_eligibility(graph["parent"])
        is EligibilityStatus.BLOCKED_BY_DEPENDENCIES
    )
    await engine.cancel_execution(child, reason="enough")
    await run_due(engine)
    assert set(await graph.claim()) == {"parent"}


async def test_a_join_that_holds_does_not_wake_who_waits_for_a_child(
    engine: Engine, graph: Graph, given: Given, clock: SettableClock
) -> None:
    held = await running(graph)
    child = await given.waiting(lane_id="elsewhere")
    await engine.await_executions(held.handle, [child])
    await graph.edge("u", "d", data_passing_ref="u")
    await graph.run("u", result=b"from u")
    await graph.settle()
    await pass_an_hour(engine, clock)
    assert await graph.claim() == {}

    await engine.cancel_execution(child, reason="enough")
    await engine.wake_awaiting()

    assert await payloads(graph) == {"d": b"d"}


async def test_waiting_for_children_outside_a_flow_ends_at_once(
    engine: Engine, graph: Graph, given: Given
) -> None:
    alone = await given.running()

    assert (await engine.wait_children(alone.handle)).public_state is PublicState.WAITING

    assert await engine.evaluate_flow_eligibility(alone.execution_id) == "eligible"
    assert (await given.taken()).execution_id == alone.execution_id


# Quorums built edge by edge


async def test_a_quorum_with_too_few_edges_waits_for_more(engine: Engine, graph: Graph) -> None:
    for name in ("a", "b", "c", "d"):
        await graph.member(name)
    await engine.set_edge_group_policy(graph.flow_id, graph["d"], JoinQuorum(2, LET_RUN))
    await graph.fail("a")
    await graph.edge("a", "d")
    await graph.settle()
    assert await graph.state("d") == "waiting_children"

    for name in ("b", "c"):
        await graph.stage(name, "d")
    await graph.run("b")
    await graph.run("c")
    await graph.settle()
    assert await graph.state("d") == "waiting_children"
    for edge in await engine.list_edges(graph.flow_id):
        await engine.apply_dependency_to_child(
            graph.flow_id,
            edge.edge_id,
            upstream_execution_id=edge.upstream_execution_id,
            downstream_execution_id=edge.downstream_execution_id,
        )

    assert await graph.state("d") == "waiting"


async def test_a_quorum_that_has_enough_edges_can_become_impossible(
    engine: Engine, graph: Graph
) -> None:
    for name in ("a", "b", "d"):
        await graph.member(name)
    await engine.set_edge_group_policy(graph.flow_id, graph["d"], JoinQuorum(2, LET_RUN))
    await graph.fail("a")
    await graph.edge("a", "d")
    assert await graph.state("d") == "waiting_children"

    await graph.edge("b", "d")
    await graph.run("b")
    await graph.settle()

    assert await graph.state("d") == "skipped"


@pytest.mark.parametrize("policy", ["flow_only", "cancel_pending", "cancel_all"])
async def test_a_quorum_that_can_get_no_more_edges_is_given_up(
    engine: Engine, graph: Graph, policy: str
) -> None:
    await graph.member("a")
    held = await running(graph)
    await engine.set_edge_group_policy(graph.flow_id, graph["d"], JoinQuorum(2, LET_RUN))
    await graph.edge("a", "d")
    await engine.cancel_flow(graph.flow_id, cancellation_policy=policy)
    assert await complaints_of(engine) == []

    await graph.settle()

    assert await graph.state("d") == "cancelled"
    with pytest.raises(FlowFabricError):
        await engine.complete(held.handle)
