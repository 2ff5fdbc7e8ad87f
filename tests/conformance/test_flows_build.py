"""Building flows: members, edges one by one, policies."""

import pytest

from flowfabric import Engine
from flowfabric.core.flow_joins import JoinAll, JoinAny, JoinQuorum
from flowfabric.core.flow_records import DependencyState, EdgeState, FlowState
from flowfabric.core.ids import EdgeId, FlowId
from flowfabric.core.results import (
    Added,
    AlreadyApplied,
    AlreadyMember,
    AlreadySet,
    Applied,
    FlowCreated,
    FlowExists,
    Set,
    Staged,
)
from flowfabric.core.views import EdgeSnapshot
from flowfabric.errors import (
    CycleDetected,
    DependencyAlreadyExists,
    ExecutionAlreadyInFlow,
    ExecutionNotInFlow,
    FlowAlreadyTerminal,
    FlowFabricError,
    InvalidDependency,
    InvalidInput,
    NotFound,
    SelfReferencingEdge,
    StaleGraphRevision,
    Terminal,
)
from flowfabric.testing import SettableClock
from tests.conformance.graphs import Graph, graph_elsewhere, neighbour, new_graph, new_id
from tests.conformance.observed import execution_of, refused, unchanged


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    return await new_graph(engine)


# create_flow


async def test_a_new_flow_is_open_and_empty(engine: Engine, clock: SettableClock) -> None:
    flow_id = FlowId(new_id())

    assert await engine.create_flow(flow_id, flow_kind="nightly", namespace="shop") == FlowCreated(
        flow_id=flow_id
    )

    flow = await engine.describe_flow(flow_id)
    assert flow is not None
    assert (flow.flow_kind, flow.namespace) == ("nightly", "shop")
    assert (flow.public_flow_state, flow.state) == (FlowState.OPEN, FlowState.OPEN)
    assert (flow.graph_revision, flow.node_count, flow.edge_count) == (0, 0, 0)
    assert flow.created_at_ms == flow.last_mutation_at_ms == clock.now_ms()
    assert (flow.tags, flow.edge_groups, flow.cancelled_at_ms) == ({}, (), None)


async def test_creating_a_flow_twice_finds_the_first(engine: Engine) -> None:
    flow_id = FlowId(new_id())
    await engine.create_flow(flow_id, flow_kind="one")

    assert await engine.create_flow(flow_id, flow_kind="two") == FlowExists(flow_id=flow_id)

    flow = await engine.describe_flow(flow_id)
    assert flow is not None
    assert flow.flow_kind == "one"


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("flow_id", {"flow_id": "not a uuid"}),
        ("flow_id", {"flow_id": "0197F3A0-0000-7000-8000-000000000001"}),
        ("flow_kind", {"flow_kind": ""}),
        ("flow_kind", {"flow_kind": "k" * 300}),
        ("namespace", {"namespace": ""}),
    ],
)
async def test_a_malformed_flow_is_refused(
    engine: Engine, field: str, fields: dict[str, str]
) -> None:
    arguments = {"flow_id": new_id(), "flow_kind": "k", "namespace": "n"} | fields
    with pytest.raises(InvalidInput) as caught:
        await engine.create_flow(
            arguments["flow_id"],
            flow_kind=arguments["flow_kind"],
            namespace=arguments["namespace"],
        )
    assert caught.value.field == field
    assert (await engine.list_flows()).flows == ()


# add_execution_to_flow


async def test_members_are_counted_and_each_raises_the_revision(
    engine: Engine, graph: Graph
) -> None:
    answers = []
    for name in "abc":
        await graph.outsider(name)
        answers.append(await engine.add_execution_to_flow(graph.flow_id, graph[name]))

    assert answers == [
        Added(execution_id=graph[name], new_node_count=count)
        for count, name in enumerate("abc", start=1)
    ]
    flow = await graph.flow()
    assert (flow.node_count, flow.graph_revision) == (3, 3)
    assert await engine.resolve_execution_flow_id(graph["b"]) == graph.flow_id


async def test_adding_a_member_again_changes_nothing(engine: Engine, graph: Graph) -> None:
    await graph.member("a")
    before = await graph.flow()

    async with unchanged(engine):
        again = await engine.add_execution_to_flow(graph.flow_id, graph["a"])

    assert again == AlreadyMember(execution_id=graph["a"], node_count=1)
    assert await graph.flow() == before


async def test_an_execution_that_has_ended_joins_as_ended(engine: Engine, graph: Graph) -> None:
    await graph.outsider("a")
    await graph.run("a")

    await engine.add_execution_to_flow(graph.flow_id, graph["a"])

    assert (await graph.flow()).state is FlowState.COMPLETED
    assert (await execution_of(engine, graph["a"])).retain_until_ms is None


async def test_a_missing_flow_or_execution_takes_no_members(engine: Engine, graph: Graph) -> None:
    await graph.outsider("a")
    ghost = engine.new_member_id(graph.flow_id)

    async with refused(engine, NotFound) as caught:
        await engine.add_execution_to_flow(graph.flow_id, ghost)
    assert caught.value.entity == "execution"

    other = await graph_elsewhere(graph)
    stranger = await other.outsider("x")
    with pytest.raises(InvalidInput, match="partition"):
        await engine.add_execution_to_flow(graph.flow_id, stranger)
    assert (await graph.flow()).node_count == 0


async def test_an_execution_is_in_one_flow_for_life(engine: Engine, graph: Graph) -> None:
    await graph.member("a")
    other = await neighbour(graph)

    async with refused(engine, ExecutionAlreadyInFlow) as caught:
        await engine.add_execution_to_flow(other.flow_id, graph["a"])

    assert str(caught.value) == f"already_member_of_different_flow:{graph.flow_id}"


async def test_a_cancelled_flow_takes_no_members(engine: Engine, graph: Graph) -> None:
    await graph.outsider("a")
    await engine.cancel_flow(graph.flow_id)

    async with refused(engine, FlowAlreadyTerminal):
        await engine.add_execution_to_flow(graph.flow_id, graph["a"])


# stage_dependency_edge


async def test_staging_an_edge_holds_the_downstream_back(engine: Engine, graph: Graph) -> None:
    await graph.member("a")
    await graph.member("b")
    edge_id = new_id()

    staged = await engine.stage_dependency_edge(
        graph.flow_id,
        edge_id,
        upstream_execution_id=graph["a"],
        downstream_execution_id=graph["b"],
        expected_graph_revision=2,
    )

    assert staged == Staged(edge_id=EdgeId(edge_id), new_graph_revision=3)
    assert await graph.states() == {"a": "waiting", "b": "waiting_children"}
    assert set(await graph.claim()) == {"a"}
    edge = await engine.describe_edge(graph.flow_id, edge_id)
    assert edge is not None
    assert (edge.edge_state, edge.dep_state) == (EdgeState.PENDING, DependencyState.UNSATISFIED)


async def test_the_order_of_checks_on_a_staged_edge(engine: Engine, graph: Graph) -> None:
    """What is wrong first is what the caller hears of."""
    for name in "abc":
        await graph.member(name)
    await graph.outsider("x")
    edge_id = await graph.stage("a", "b")

    async def attempt(
        upstream: str,
        downstream: str,
        *,
        flow_id: str = graph.flow_id,
        edge: str | None = None,
        revision: int | None = None,
    ) -> type[FlowFabricError]:
        async with refused(engine, FlowFabricError) as caught:
            await engine.stage_dependency_edge(
                flow_id,
                edge or new_id(),
                upstream_execution_id=graph[upstream],
                downstream_execution_id=graph[downstream],
                expected_graph_revision=revision,
            )
        return type(caught.value)

    assert await attempt("a", "a", revision=99) is SelfReferencingEdge
    assert await attempt("a", "b", edge=edge_id, revision=99) is DependencyAlreadyExists
    assert await attempt("a", "c", revision=99) is StaleGraphRevision
    assert await attempt("x", "b", revision=4) is ExecutionNotInFlow
    assert await attempt("b", "x", revision=4) is ExecutionNotInFlow
    assert await attempt("a", "b", revision=4) is DependencyAlreadyExists
    assert await attempt("b", "a", revision=4) is CycleDetected


async def test_a_repeat_after_a_lost_answer_is_shown_the_stored_edge(
    engine: Engine, graph: Graph
) -> None:
    await graph.member("a")
    await graph.member("b")
    edge_id = await graph.stage("a", "b", data_passing_ref="input")

    with pytest.raises(DependencyAlreadyExists) as caught:
        await engine.stage_dependency_edge(
            graph.flow_id,
            edge_id,
            upstream_execution_id=graph["a"],
            downstream_execution_id=graph["b"],
            data_passing_ref="input",
            expected_graph_revision=2,
        )

    existing = caught.value.existing
    assert isinstance(existing, EdgeSnapshot)
    assert existing == await engine.describe_edge(graph.flow_id, edge_id)
    assert existing.data_passing_ref == "input"


async def test_a_long_way_round_is_a_cycle_too(engine: Engine, graph: Graph) -> None:
    for name in "abcde":
        await graph.member(name)
    for upstream, downstream in zip("abcd", "bcde", strict=True):
        await graph.stage(upstream, downstream)

    async with refused(engine, CycleDetected):
        await graph.stage("e", "a")


async def test_what_has_ended_or_fired_waits_for_nothing_more(engine: Engine, graph: Graph) -> None:
    for name in "abc":
        await graph.member(name)
    await graph.run("a")
    async with refused(engine, Terminal):
        await graph.stage("b", "a")

    await graph.edge("a", "c")
    assert await graph.state("c") == "waiting"
    async with refused(engine, Terminal):
        await graph.stage("b", "c")


async def test_only_success_only_edges_exist(engine: Engine, graph: Graph) -> None:
    await graph.member("a")
    await graph.member("b")
    async with refused(engine, InvalidInput) as caught:
        await engine.stage_dependency_edge(
            graph.flow_id,
            new_id(),
            upstream_execution_id=graph["a"],
            downstream_execution_id=graph["b"],
            dependency_kind="always",
        )
    assert caught.value.field == "dependency_kind"


# apply_dependency_to_child


async def test_applied_edges_count_and_are_applied_once(engine: Engine, graph: Graph) -> None:
    for name in "abc":
        await graph.member(name)
    first = await graph.stage("a", "c")
    second = await graph.stage("b", "c")

    async def apply(edge_id: str, upstream: str) -> object:
        return await engine.apply_dependency_to_child(
            graph.flow_id,
            edge_id,
            upstream_execution_id=graph[upstream],
            downstream_execution_id=graph["c"],
        )

    assert await apply(first, "a") == Applied(unsatisfied_count=1)
    assert await apply(second, "b") == Applied(unsatisfied_count=2)
    assert await apply(second, "b") == AlreadyApplied()
    group = await graph.group("c")
    assert (group.policy, group.total_deps, group.running_count) == (JoinAll(), 2, 2)


async def test_an_edge_from_an_ended_upstream_resolves_when_applied(
    engine: Engine, graph: Graph
) -> None:
    for name in "abc":
        await graph.member(name)
    await graph.run("a")
    await graph.fail("b")
    edge_id = await graph.stage("a", "c")
    assert await graph.state("c") == "waiting_children"

    applied = await engine.apply_dependency_to_child(
        graph.flow_id,
        edge_id,
        upstream_execution_id=graph["a"],
        downstream_execution_id=graph["c"],
    )

    assert applied == Applied(unsatisfied_count=0)
    assert await graph.state("c") == "waiting"


async def test_a_staged_edge_keeps_the_join_open_until_it_counts(
    engine: Engine, graph: Graph
) -> None:
    for name in "abc":
        await graph.member(name)
    await graph.run("a")
    await graph.stage("b", "c")

    await graph.edge("a", "c")

    assert await graph.state("c") == "waiting_children"


async def test_an_edge_is_applied_as_it_was_staged(engine: Engine, graph: Graph) -> None:
    for name in "abc":
        await graph.member(name)
    edge_id = await graph.stage("a", "b", data_passing_ref="x")

    for upstream, downstream, ref, edge in (
        ("c", "b", None, edge_id),
        ("a", "c", None, edge_id),
        ("a", "b", "y", edge_id),
        ("a", "b", None, new_id()),
    ):
        async with refused(engine, InvalidDependency):
            await engine.apply_dependency_to_child(
                graph.flow_id,
                edge,
                upstream_execution_id=graph[upstream],
                downstream_execution_id=graph[downstream],
                data_passing_ref=ref,
            )


async def test_edges_staged_and_forgotten_are_applied_after_a_while(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.member("a")
    await graph.member("b")
    await graph.stage("a", "b")
    await graph.run("a")
    await graph.settle()
    assert await graph.state("b") == "waiting_children"
    assert (await engine.apply_due_edges()).acted == 0

    clock.advance(minutes=1)
    assert (await engine.next_due())["edge_apply"] == 0
    assert (await engine.apply_due_edges()).acted == 1

    assert await graph.state("b") == "waiting"
    assert "edge_apply" not in await engine.next_due()


async def test_what_held_an_execution_back_before_holds_it_back_afterwards(
    engine: Engine, graph: Graph, clock: SettableClock
) -> None:
    await graph.member("a")
    await graph.member("late", delay_until_ms=clock.now_ms() + 60_000)
    await graph.member("soon", delay_until_ms=clock.now_ms() + 1_000)
    await graph.edge("a", "late")
    await graph.edge("a", "soon")
    assert await graph.state("late") == await graph.state("soon") == "waiting_children"
    clock.advance(seconds=2)
    assert (await engine.promote_due_delays()).acted == 0

    await graph.run("a")
    await graph.settle()

    assert await graph.state("late") == "delayed"
    assert await graph.state("soon") == "waiting"
    clock.advance(minutes=1)
    assert (await engine.promote_due_delays()).acted == 1
    assert await graph.state("late") == "waiting"


async def test_an_edge_onto_running_work_leaves_it_running(engine: Engine, graph: Graph) -> None:
    await graph.member("a")
    await graph.member("b")
    claimed = await graph.claimed("b")

    await graph.edge("a", "b")

    assert await graph.state("b") == "active"
    await engine.complete(claimed.handle)
    await graph.run("a")
    await graph.settle()
    assert await graph.states() == {"a": "completed", "b": "completed"}


# set_edge_group_policy


async def test_a_policy_is_set_until_there_is_an_edge(engine: Engine, graph: Graph) -> None:
    await graph.member("a")
    await graph.member("b")

    assert await engine.set_edge_group_policy(graph.flow_id, graph["b"], JoinQuorum(2)) == Set()
    assert (
        await engine.set_edge_group_policy(graph.flow_id, graph["b"], JoinQuorum(2)) == AlreadySet()
    )
    assert await engine.set_edge_group_policy(graph.flow_id, graph["b"], JoinQuorum(1)) == Set()
    assert await graph.state("b") == "waiting"
    await graph.stage("a", "b")
    assert (await graph.group("b")).policy == JoinQuorum(1)

    assert (
        await engine.set_edge_group_policy(graph.flow_id, graph["b"], JoinQuorum(1)) == AlreadySet()
    )
    async with refused(engine, InvalidInput) as caught:
        await engine.set_edge_group_policy(graph.flow_id, graph["b"], JoinAny())
    assert "edge_group_policy_already_fixed" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "policy"),
    [
        ("policy.k", JoinQuorum(0)),
        ("policy.k", JoinQuorum(2**31)),
        ("policy", "all_of"),
        ("policy", {"kind": "most_of"}),
        ("policy", {"kind": "quorum"}),
    ],
)
async def test_a_malformed_policy_is_refused(
    engine: Engine, graph: Graph, field: str, policy: JoinQuorum
) -> None:
    await graph.member("a")
    async with refused(engine, InvalidInput) as caught:
        await engine.set_edge_group_policy(graph.flow_id, graph["a"], policy)
    assert caught.value.field == field


async def test_policies_belong_to_members_of_open_flows(engine: Engine, graph: Graph) -> None:
    await graph.outsider("x")
    async with refused(engine, ExecutionNotInFlow):
        await engine.set_edge_group_policy(graph.flow_id, graph["x"], JoinAll())
    async with refused(engine, NotFound):
        await engine.set_edge_group_policy(
            graph.flow_id, engine.new_member_id(graph.flow_id), JoinAll()
        )
    await graph.member("a")
    await engine.cancel_flow(graph.flow_id, cancellation_policy="flow_only")
    async with refused(engine, FlowAlreadyTerminal):
        await engine.set_edge_group_policy(graph.flow_id, graph["a"], JoinAll())
