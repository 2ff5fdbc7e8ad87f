"""Reading flows: descriptions, lists, tags, summaries."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.flow_joins import JoinAll, JoinQuorum
from flowfabric.core.flow_records import DependencyState, EdgeState, FlowState, GroupState
from flowfabric.core.ids import EdgeId, FlowId, flow_execution_id
from flowfabric.core.states import PublicState
from flowfabric.core.views import (
    EdgeGroupSnapshot,
    EdgeSnapshot,
    FlowMember,
    FlowStatus,
    FlowSummary,
)
from flowfabric.engine.flow_reads import Incoming, Outgoing
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.testing import SettableClock
from tests.conformance.given import Given
from tests.conformance.graphs import Graph, new_graph, new_id
from tests.conformance.observed import execution_of


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    return await new_graph(engine)


async def test_what_does_not_exist_is_none_or_empty(engine: Engine, given: Given) -> None:
    flow_id = new_id()
    assert await engine.describe_flow(flow_id) is None
    assert await engine.describe_edge(flow_id, new_id()) is None
    assert await engine.list_edges(flow_id) == ()
    assert await engine.read_flow_summary(flow_id) is None
    assert await engine.get_flow_tag(flow_id, "a.b") is None
    assert (await engine.list_flow_members(flow_id)).members == ()
    assert await engine.resolve_execution_flow_id(await given.waiting()) is None


async def test_a_description_has_the_joins(graph: Graph) -> None:
    await graph.build({"c": "a b"}, JoinQuorum(1))
    assert (await graph.flow()).edge_groups == (
        EdgeGroupSnapshot(
            downstream_execution_id=graph["c"],
            policy=JoinQuorum(1),
            total_deps=2,
            satisfied_count=0,
            failed_count=0,
            skipped_count=0,
            running_count=2,
            group_state=GroupState.PENDING,
            fired_at_ms=None,
            cancel_reason=None,
        ),
    )


async def test_joins_are_listed_page_by_page(engine: Engine, graph: Graph) -> None:
    await graph.build({"b": "a", "c": "a", "d": "b c"})
    first = await engine.list_edge_groups(graph.flow_id, limit=2)
    rest = await engine.list_edge_groups(
        graph.flow_id, cursor=first[-1].downstream_execution_id, limit=2
    )
    assert [g.downstream_execution_id for g in (*first, *rest)] == sorted(
        graph[name] for name in "bcd"
    )
    assert {group.policy for group in first} == {JoinAll()}


async def test_an_edge_reads_as_it_was_staged(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.member("a")
    await graph.member("b")
    edge_id = await graph.stage("a", "b", data_passing_ref="input")

    expected = EdgeSnapshot(
        edge_id=EdgeId(edge_id),
        flow_id=graph.flow_id,
        upstream_execution_id=graph["a"],
        downstream_execution_id=graph["b"],
        dependency_kind="success_only",
        satisfaction_condition="all_required",
        data_passing_ref="input",
        edge_state=EdgeState.PENDING,
        dep_state=DependencyState.UNSATISFIED,
        resolved_outcome=None,
        resolved_at_ms=None,
        created_at_ms=clock.now_ms(),
        created_by="engine",
    )
    assert await engine.describe_edge(graph.flow_id, edge_id) == expected
    assert await engine.list_edges(graph.flow_id) == (expected,)


async def test_edges_are_listed_by_direction_in_the_order_of_their_ids(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"b": "a", "c": "a", "d": "b c"})
    every = await engine.list_edges(graph.flow_id)
    assert [edge.edge_id for edge in every] == sorted(edge.edge_id for edge in every)
    assert len(every) == 4
    assert await engine.list_edges(graph.flow_id, Outgoing(graph["a"])) == tuple(
        edge for edge in every if edge.upstream_execution_id == graph["a"]
    )
    assert await engine.list_edges(graph.flow_id, Incoming(graph["d"])) == tuple(
        edge for edge in every if edge.downstream_execution_id == graph["d"]
    )
    assert await engine.list_edges(graph.flow_id, Outgoing(graph["d"])) == ()
    first = await engine.list_edges(graph.flow_id, limit=3)
    assert first + await engine.list_edges(graph.flow_id, cursor=first[-1].edge_id) == every
    with pytest.raises(InvalidInput):
        await engine.list_edges(graph.flow_id, Outgoing("nonsense"))


async def test_members_are_listed_page_by_page(engine: Engine, graph: Graph) -> None:
    await graph.build({"b": "a", "c": "a"})
    first = await engine.list_flow_members(graph.flow_id, limit=2)
    rest = await engine.list_flow_members(graph.flow_id, cursor=first.next_cursor, limit=2)
    states = {"a": PublicState.WAITING}
    assert list(first.members + rest.members) == [
        FlowMember(
            execution_id=graph[name],
            execution_kind="work",
            public_state=states.get(name, PublicState.WAITING_CHILDREN),
        )
        for name in sorted("abc", key=lambda each: graph[each])
    ]
    assert rest.next_cursor is None


# list_flows


async def test_flows_are_listed_in_the_order_of_their_ids_each_once(engine: Engine) -> None:
    made = sorted([(await new_graph(engine)).flow_id for _ in range(5)])

    seen: list[str] = []
    cursor = None
    while True:
        page = await engine.list_flows(cursor=cursor, limit=2)
        seen += [item.flow_id for item in page.flows]
        if page.next_cursor is None:
            break
        cursor = page.next_cursor

    assert seen == made
    assert (await engine.list_flows(limit=0)).flows == ()


async def test_a_partition_lists_its_own_flows(engine: Engine, graph: Graph) -> None:
    partition, _ = engine.flow_key(graph.flow_id)
    for given in (partition, f"{{fp:{partition}}}"):
        page = await engine.list_flows(given)
        assert [item.flow_id for item in page.flows] == [graph.flow_id]
    assert (await engine.list_flows((partition + 1) % 256)).flows == ()
    for wrong in ("fp:1", "{b:1}x", 256, -1):
        with pytest.raises(InvalidInput):
            await engine.list_flows(wrong)


async def test_a_list_tells_how_flows_ended(engine: Engine) -> None:
    expected = {}
    for status in FlowStatus:
        graph = await new_graph(engine)
        await graph.build({"a": ""})
        expected[graph.flow_id] = status
        if status is FlowStatus.COMPLETED:
            await graph.run("a")
        elif status is FlowStatus.FAILED:
            await graph.fail("a")
        elif status is FlowStatus.CANCELLED:
            await engine.cancel_flow(graph.flow_id)
        await graph.settle()
    page = await engine.list_flows()
    assert {item.flow_id: item.status for item in page.flows} == expected


@pytest.mark.parametrize("policy", ["flow_only", "cancel_pending", "cancel_all"])
async def test_a_cancelled_flow_is_listed_as_active_until_its_members_have_ended(
    engine: Engine, graph: Graph, policy: str
) -> None:
    await graph.build({"b": "a"})
    claimed = await graph.claimed("a")

    async def listed() -> tuple[FlowStatus, FlowState]:
        (item,) = (await engine.list_flows()).flows
        (of_partition,) = (await engine.list_flows(engine.flow_key(graph.flow_id)[0])).flows
        assert item == of_partition
        return item.status, (await graph.flow()).state

    await engine.cancel_flow(graph.flow_id, cancellation_policy=policy)
    if policy != "cancel_all":
        assert await listed() == (FlowStatus.ACTIVE, FlowState.RUNNING)
        await engine.cancel_flow(graph.flow_id)
    assert (await execution_of(engine, claimed.execution_id)).public_state == "cancelled"
    # Before anybody has counted the ends of the members, and after that.
    assert await listed() == (FlowStatus.CANCELLED, FlowState.CANCELLED)
    await graph.settle()
    assert await listed() == (FlowStatus.CANCELLED, FlowState.CANCELLED)


# Summaries


async def test_a_summary_counts_members_by_state(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.build({"b": "a", "c": "", "d": ""})
    await graph.member("later", delay_until_ms=clock.now_ms() + 1_000)
    await graph.claimed("c")
    await graph.fail("d")
    assert await engine.read_flow_summary(graph.flow_id) == FlowSummary(
        flow_id=graph.flow_id,
        total_members=5,
        sampled_members=5,
        last_summary_update_at_ms=clock.now_ms(),
        members_waiting=1,
        members_waiting_children=1,
        members_active=1,
        members_delayed=1,
        members_failed=1,
        public_flow_state=FlowState.RUNNING,
    )


@pytest.mark.parametrize(
    ("endings", "state"),
    [
        ("", FlowState.OPEN),
        ("a+ b+", FlowState.COMPLETED),
        ("a+ b-", FlowState.FAILED),
        ("a+", FlowState.OPEN),
        ("a~", FlowState.RUNNING),
    ],
)
async def test_the_state_of_a_flow_follows_from_its_members(
    engine: Engine, graph: Graph, endings: str, state: FlowState
) -> None:
    await graph.build({"a": "", "b": ""})
    for each in endings.split():
        name, how = each[0], each[1]
        if how == "~":
            await graph.claimed(name)
        else:
            await (graph.run(name) if how == "+" else graph.fail(name))
    await graph.settle()
    assert (await graph.flow()).state is state
    summary = await engine.read_flow_summary(graph.flow_id)
    assert summary is not None
    assert summary.public_flow_state is state


async def test_a_flow_that_ended_opens_again_with_a_new_member(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"a": ""})
    await graph.run("a")
    await graph.settle()
    assert (await graph.flow()).ended_at_ms is not None

    await graph.member("b")

    flow = await graph.flow()
    assert (flow.state, flow.ended_at_ms) == (FlowState.OPEN, None)
    await graph.run("b")
    await graph.settle()
    assert (await graph.flow()).state is FlowState.COMPLETED


async def test_projecting_a_summary_agrees_with_the_dispatcher(
    engine: Engine, graph: Graph
) -> None:
    assert await engine.project_flow_summary(graph.flow_id) is False
    await graph.build({"b": "a", "c": "a"})
    await graph.run("a")
    assert await engine.project_flow_summary(graph.flow_id) is True
    await graph.settle()
    await graph.run("b")
    await graph.run("c")
    await graph.settle()
    before = await graph.flow()
    assert await engine.project_flow_summary(graph.flow_id) is True
    assert await graph.flow() == before
    assert before.state is FlowState.COMPLETED
    with pytest.raises(NotFound):
        await engine.project_flow_summary(new_id())


# Tags


async def test_tags_are_set_read_and_described(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    clock.advance(seconds=1)
    await engine.set_flow_tag(graph.flow_id, "team.owner", "ops")
    await engine.set_flow_tag(graph.flow_id, "app.run", "1")
    await engine.set_flow_tag(graph.flow_id, "app.run", "2")

    assert await engine.get_flow_tag(graph.flow_id, "app.run") == "2"
    assert await engine.get_flow_tag(graph.flow_id, "app.other") is None
    flow = await graph.flow()
    assert list(flow.tags.items()) == [("app.run", "2"), ("team.owner", "ops")]
    assert (flow.last_mutation_at_ms, flow.graph_revision) == (clock.now_ms(), 0)

    await engine.cancel_flow(graph.flow_id)
    await engine.set_flow_tag(graph.flow_id, "app.run", "3")


async def test_malformed_tags_and_missing_flows_are_refused(engine: Engine, graph: Graph) -> None:
    for key, value in (("a=b", "x"), ("a ", "x"), ("a.b", "x" * 4097)):
        with pytest.raises(InvalidInput):
            await engine.set_flow_tag(graph.flow_id, key, value)
    with pytest.raises(InvalidInput):
        await engine.get_flow_tag(graph.flow_id, "no=dot")
    with pytest.raises(NotFound):
        await engine.set_flow_tag(new_id(), "a.b", "x")
    assert (await graph.flow()).tags == {}


async def test_members_are_listed_with_their_tags(engine: Engine, graph: Graph) -> None:
    tagged = await graph.member("a", tags={"app.team": "sport"})
    plain = await graph.member("b")
    page = await engine.list_flow_members(graph.flow_id)
    assert {each.execution_id: each.tags for each in page.members} == {
        tagged: {"app.team": "sport"},
        plain: {},
    }


# Whole lists

NIL = "00000000-0000-0000-0000-000000000000"
LAST = "ffffffff-ffff-ffff-ffff-ffffffffffff"


async def test_no_list_ends_unseen(engine: Engine, graph: Graph) -> None:
    """More edges and joins than a page has."""
    count = PAGE_MAX + 5
    names = [f"n{number}" for number in range(count)]
    members = graph.new("a", *names)
    for start in range(0, len(members), PAGE_MAX):
        batch = members[start : start + PAGE_MAX]
        await engine.add_dependencies(
            graph.flow_id,
            [graph.join(n, "a") for n in names if graph[n] in {m.execution_id for m in batch}],
            members=batch,
        )

    assert len((await graph.flow()).edge_groups) == count
    edges = await engine.list_edges(graph.flow_id)
    assert len({edge.edge_id for edge in edges}) == count
    assert await engine.list_edges(graph.flow_id, Outgoing(graph["a"])) == edges
    assert await engine.list_edges(graph.flow_id, cursor=edges[2].edge_id) == edges[3:]
    assert await engine.list_edges(graph.flow_id, limit=3) == edges[:3]


async def test_the_first_and_the_last_uuid_are_in_every_list(engine: Engine) -> None:
    partitions = engine.deployment.partitions
    for flow_id in (NIL, LAST):
        await engine.create_flow(flow_id, flow_kind="tests")
        graph = Graph(engine, FlowId(flow_id))
        for name, uuid in (("a", NIL), ("b", LAST)):
            graph.ids[name] = flow_execution_id(graph.flow_id, uuid, partitions)
        members = [graph.request(name) for name in "ab"]
        first, last = (graph.join("b", "a"), graph.join("a", "b"))
        wanted = first if flow_id == NIL else last
        (dependency,) = wanted.dependencies
        edge_id = structs.replace(dependency, edge_id=flow_id)
        await engine.add_dependencies(
            graph.flow_id, [structs.replace(wanted, dependencies=[edge_id])], members=members
        )
        found = (await engine.list_flow_members(graph.flow_id)).members
        assert [each.execution_id for each in found] == [graph["a"], graph["b"]]
        paged = await engine.list_flow_members(graph.flow_id, cursor=graph["a"])
        assert [each.execution_id for each in paged.members] == [graph["b"]]
        assert (await engine.list_flow_members(graph.flow_id, cursor=graph["b"])).members == ()
        assert [each.edge_id for each in await engine.list_edges(graph.flow_id)] == [flow_id]
        node = Incoming(wanted.downstream_execution_id)
        assert [e.edge_id for e in await engine.list_edges(graph.flow_id, node)] == [flow_id]
        groups = await engine.list_edge_groups(graph.flow_id)
        assert [g.downstream_execution_id for g in groups] == [wanted.downstream_execution_id]
    assert [each.flow_id for each in (await engine.list_flows()).flows] == [NIL, LAST]
    assert [each.flow_id for each in (await engine.list_flows(cursor=NIL)).flows] == [LAST]
    assert (await engine.list_flows(cursor=LAST)).flows == ()
