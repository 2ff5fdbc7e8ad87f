"""The slow look at all flows finds what was left behind, and touches nothing else."""

from collections.abc import Sequence

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.bounds import AUDIT_BATCH, AUDIT_EVERY_MS
from flowfabric.core.decisions import Changes, change
from flowfabric.core.flow_joins import JoinQuorum
from flowfabric.core.flow_records import CompletionDispatch, FlowState, GroupState, JoinRecord
from flowfabric.core.ids import FIRST_UUID, LAST_UUID, make_execution_id, partition_of
from flowfabric.core.records import Execution
from flowfabric.engine.shell import Swept, execution_key
from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.reconcilers import run_due
from flowfabric.store.base import Transaction
from flowfabric.testing import SettableClock
from tests.conformance.graphs import Graph, new_graph, overwrite
from tests.conformance.observed import execution_of, unchanged

NOTHING = Swept(acted=0, full=False)


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    return await new_graph(engine)


async def lose_endings(graph: Graph, *names: str) -> None:
    """Forget that dependents have to be told, as a hand in the database might."""
    keys = []
    for name in names:
        execution = await execution_of(graph.engine, graph[name])
        partition_key, execution_id = execution_key(graph[name])
        keys.append((partition_key, graph.flow_id, execution_id, execution.replay_count))

    async def body(tx: Transaction) -> None:
        rows = await tx.lock(CompletionDispatch, keys)
        assert len(rows) == len(names)
        await tx.save(Changes(deletes=tuple(rows.values())))

    await graph.engine.store.transact(body)


async def passes(graph: Graph, clock: SettableClock, count: int = 1) -> Sequence[int]:
    acted = []
    for _ in range(count):
        clock.advance(ms=AUDIT_EVERY_MS)
        acted.append((await graph.engine.audit_flows()).acted)
    return acted


async def test_lost_endings_reach_those_who_wait_for_them(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.build({"b": "a", "d": "c", "e": "d"}, passing=True)
    await graph.run("a", result=b"from a")
    await graph.fail("c")
    await lose_endings(graph, "a", "c")
    await graph.settle()
    assert await graph.state("b") == "waiting_children"

    assert await passes(graph, clock) == [3]
    await graph.settle()

    assert await graph.states() == {
        "a": "completed",
        "b": "waiting",
        "c": "failed",
        "d": "skipped",
        "e": "skipped",
    }
    assert await engine.read_execution_inputs(graph["b"]) == {"a": b"from a"}
    await graph.run("b")
    await graph.settle()
    assert (await graph.flow()).state is FlowState.FAILED
    assert await passes(graph, clock, 2) == [0, 0]


async def test_a_lost_ending_nobody_waits_for_ends_the_flow(
    graph: Graph, clock: SettableClock
) -> None:
    await graph.build({"b": "a"})
    await graph.run("a")
    await graph.settle()
    clock.advance(seconds=1)
    await graph.run("b")
    ended_at_ms = clock.now_ms()
    await lose_endings(graph, "b")
    await graph.settle()
    assert (await graph.engine.list_flows()).flows[0].status == "active"

    assert await passes(graph, clock) == [1]

    flow = await graph.flow()
    assert (flow.state, flow.ended_at_ms) == (FlowState.COMPLETED, ended_at_ms)
    assert (await graph.engine.list_flows()).flows[0].status == "completed"


@pytest.mark.parametrize("state", [GroupState.SATISFIED, GroupState.IMPOSSIBLE])
async def test_a_member_whose_fired_join_let_it_down_is_let_go(
    engine: Engine, graph: Graph, clock: SettableClock, state: GroupState
) -> None:
    await graph.build({"d": "a b"}, JoinQuorum(1))
    group = await graph.stored_group("d")
    assert group is not None
    await overwrite(graph, structs.replace(group, group_state=state, fired_at_ms=clock.now_ms()))

    assert await passes(graph, clock) == [1]

    expected = "waiting" if state is GroupState.SATISFIED else "skipped"
    assert await graph.state("d") == expected


async def test_a_member_without_a_join_is_let_go(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.build({"b": "a"})
    group = await graph.stored_group("b")
    assert isinstance(group, JoinRecord)

    async def body(tx: Transaction) -> None:
        await tx.save(Changes(deletes=(group,)))

    await engine.store.transact(body)

    assert await passes(graph, clock) == [1]

    assert await graph.state("b") == "waiting"


async def test_no_uuid_is_passed_over(engine: Engine, clock: SettableClock) -> None:
    graph = await new_graph(engine, FIRST_UUID)
    partition_key = partition_of(engine.new_member_id(graph.flow_id))
    graph.ids |= {
        "first": make_execution_id(partition_key, FIRST_UUID),
        "last": make_execution_id(partition_key, LAST_UUID),
    }
    members = [graph.request(name) for name in ("first", "last")]
    await engine.add_dependencies(graph.flow_id, [], members=members)
    for name in ("first", "last"):
        execution = await execution_of(engine, graph[name])
        await overwrite(graph, change(execution, clock.now_ms(), join_pending=True))

    # A page each, then one that finds nothing more, then all of it again.
    freed = []
    for _ in range(4):
        clock.advance(ms=AUDIT_EVERY_MS)
        freed.append((await engine.audit_flows(limit=1)).acted)

    assert freed == [1, 1, 0, 0]


async def test_a_sound_flow_is_left_as_it_is(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    """In the middle of everything: told and untold endings, open, staged and reopened edges."""
    await graph.build({"d": "a b", "e": "b c", "replayed": "f g", "h": "i"})
    await graph.fail("f")
    await graph.run("i")
    await graph.settle()
    await engine.replay_execution(graph["replayed"])
    await graph.member("staged")
    await graph.stage("i", "staged")
    await graph.run("a")
    await graph.claimed("c")
    before = await graph.flow()

    async with unchanged(engine):
        assert await passes(graph, clock, 3) == [0, 0, 0]

    assert await graph.flow() == before
    assert await graph.state("replayed") == "waiting_children"


async def test_the_failure_of_a_replayed_upstream_is_found_too(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.build({"b": "a"})
    await graph.fail("a")
    await graph.settle()
    await engine.replay_execution(graph["b"])
    clock.advance(seconds=1)
    await engine.replay_execution(graph["a"])
    await graph.fail("a")
    await lose_endings(graph, "a")
    assert await graph.state("b") == "waiting_children"

    # The edge, and the count of the flow.
    assert await passes(graph, clock) == [2]

    assert await graph.state("b") == "skipped"


async def test_members_of_a_cancelled_flow_are_left_to_their_cancellation(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    names = [f"m{number}" for number in range(230)]
    await graph.build({"last": " ".join(names)})
    group = await graph.stored_group("last")
    assert group is not None
    await engine.cancel_flow(graph.flow_id)
    await overwrite(graph, structs.replace(group, group_state=GroupState.SATISFIED))
    assert await passes(graph, clock) == [0]
    assert await graph.claim() == {}


async def test_a_member_marked_for_cancellation_that_nobody_has_queued_is_cancelled(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.build({"a": "", "b": "a", "c": ""})
    handle = (await graph.claimed("c")).handle
    await engine.cancel_flow(graph.flow_id, reason="enough", cancellation_policy="flow_only")
    for name in "abc":
        execution = await execution_of(engine, graph[name])
        marked = change(execution, clock.now_ms(), cancel_requested=True)
        await overwrite(graph, marked)
    await graph.settle()
    assert await graph.claim() == {}

    assert await passes(graph, clock, 2) == [3, 0]
    await graph.settle()

    assert await graph.states() == {"a": "cancelled", "b": "cancelled", "c": "cancelled"}
    assert (await execution_of(engine, graph["a"])).cancellation_reason == "enough"
    with pytest.raises(FlowFabricError):
        await engine.complete(handle)
    assert await passes(graph, clock) == [0]


async def test_each_look_goes_on_where_the_last_one_ended(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    other = await new_graph(engine)
    for each in (graph, other):
        await each.build({"b": "a", "c": "a"})
        await each.run("a")
        await lose_endings(each, "a")
    clock.advance(ms=AUDIT_EVERY_MS)

    looks = []
    for _ in range(5):
        looks.append((await engine.audit_flows(limit=2)).acted)
        clock.advance(ms=AUDIT_EVERY_MS)

    # Six members, two at a time; the fourth look finds the end and the fifth begins anew.
    assert (sum(looks), looks[3:]) == (6, [0, 0])
    for each in (graph, other):
        assert await each.states() == {"a": "completed", "b": "waiting", "c": "waiting"}


async def test_it_is_due_once_a_minute_for_all_processes_while_there_are_flows(
    engine: Engine, clock: SettableClock
) -> None:
    assert "flow_audit" not in await engine.next_due()
    graph = await new_graph(engine)
    assert (await run_due(engine))["flow_audit"] == 0
    assert (await engine.next_due())["flow_audit"] == AUDIT_EVERY_MS
    await graph.build({"b": "a"})
    await graph.run("a")
    await lose_endings(graph, "a")

    assert await engine.audit_flows() == NOTHING
    clock.advance(ms=AUDIT_EVERY_MS)
    assert (await run_due(engine))["flow_audit"] == 2

    assert await graph.state("b") == "waiting"


@pytest.mark.parametrize("limit", [0, AUDIT_BATCH + 1, True])
async def test_a_look_has_limits(engine: Engine, limit: int) -> None:
    with pytest.raises(InvalidInput) as caught:
        await engine.audit_flows(limit=limit)
    assert caught.value.field == "limit"


async def test_a_policy_without_edges_holds_nobody_back(engine: Engine, graph: Graph) -> None:
    await graph.member("a")
    await engine.set_edge_group_policy(graph.flow_id, graph["a"], JoinQuorum(1))
    claimed = await graph.claimed("a")

    assert (await engine.wait_children(claimed.handle)).public_state == "waiting"

    assert isinstance(await execution_of(engine, graph["a"]), Execution)
    assert set(await graph.claim()) == {"a"}
