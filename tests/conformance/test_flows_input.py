"""Every operation on flows refuses bad input by its field, and writes nothing."""

from collections.abc import Mapping

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.bounds import BATCH_MAX, NAME_BYTES_MAX, PAGE_MAX
from flowfabric.core.flow_endings import WaitTimeout
from flowfabric.core.flow_joins import Dependency, Join, JoinAll, JoinAny, JoinQuorum
from flowfabric.engine.flow_reads import Incoming, Outgoing
from flowfabric.errors import InvalidDependency, InvalidInput, NotFound
from tests.conformance.given import UNKNOWN_ID
from tests.conformance.graphs import Graph, graph_elsewhere, new_graph, new_id
from tests.conformance.observed import call, refused, refuses, unchanged

NO_UUIDS = (None, 7, b"x", "", "not a uuid", "0197F3A0-0000-7000-8000-000000000001", "a\x00b")
NO_EXECUTIONS = (None, 7, "", "nonsense", "{fp:1}:nonsense", "{fp:-1}:" + "0" * 36, "\ud800")
NO_NAMES = (None, 7, b"x", "", "a\x00b", "\ud800", "x" * (NAME_BYTES_MAX + 1))
NO_TEXTS = (7, b"x", "a\x00b", "\ud800", "x" * (NAME_BYTES_MAX + 1))
NO_LIMITS = (None, -1, 1.5, "ten", True, PAGE_MAX + 1)
NO_BATCHES = (None, 0, 1.5, "ten", True, BATCH_MAX + 1)
NO_REVISIONS = (-1, 1.5, "two", True, 2**63)


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    """a and b wait for nothing, and are not joined."""
    graph = await new_graph(engine)
    await graph.member("a")
    await graph.member("b")
    return graph


def ends(graph: Graph) -> dict[str, object]:
    return {"upstream_execution_id": graph["a"], "downstream_execution_id": graph["b"]}


async def refuses_each(
    engine: Engine,
    operation: str,
    good: tuple[object, ...],
    named: Mapping[str, object],
    bad: Mapping[int | str, tuple[str, tuple[object, ...]]],
) -> None:
    """Refuses each bad value in the place of the good one; places have numbers or names."""
    async with unchanged(engine):
        for place, (field, values) in bad.items():
            for value in values:
                places = list(good)
                others = dict(named)
                if isinstance(place, int):
                    places[place] = value
                else:
                    others[place] = value
                await refuses(engine, field, operation, *places, **others)


async def elsewhere(graph: Graph) -> str:
    """A well-formed execution id that cannot belong to the flow."""
    return await (await graph_elsewhere(graph)).outsider("x")


async def test_creating_a_flow(engine: Engine) -> None:
    await refuses_each(
        engine,
        "create_flow",
        (new_id(),),
        {"flow_kind": "k", "namespace": "n"},
        {
            0: ("flow_id", NO_UUIDS),
            "flow_kind": ("flow_kind", NO_NAMES),
            "namespace": ("namespace", NO_NAMES),
        },
    )
    assert (await engine.list_flows()).flows == ()


async def test_adding_a_member(engine: Engine, graph: Graph) -> None:
    strange = await elsewhere(graph)
    await refuses_each(
        engine,
        "add_execution_to_flow",
        (graph.flow_id, graph["a"]),
        {},
        {0: ("flow_id", NO_UUIDS), 1: ("execution_id", (*NO_EXECUTIONS, strange))},
    )


@pytest.mark.parametrize("operation", ["stage_dependency_edge", "apply_dependency_to_child"])
async def test_staging_and_applying_an_edge(engine: Engine, graph: Graph, operation: str) -> None:
    strange = await elsewhere(graph)
    revision = "graph_revision" if "apply" in operation else "expected_graph_revision"
    await refuses_each(
        engine,
        operation,
        (graph.flow_id, new_id()),
        ends(graph),
        {
            0: ("flow_id", NO_UUIDS),
            1: ("edge_id", NO_UUIDS),
            "upstream_execution_id": ("upstream_execution_id", (*NO_EXECUTIONS, strange)),
            "downstream_execution_id": ("downstream_execution_id", (*NO_EXECUTIONS, strange)),
            "dependency_kind": ("dependency_kind", (None, "", "always", 7)),
            "data_passing_ref": ("data_passing_ref", NO_TEXTS),
            revision: (revision, NO_REVISIONS),
        },
    )
    flow = await graph.flow()
    assert (flow.edge_count, flow.edge_groups) == (0, ())


async def test_resolving_an_edge(engine: Engine, graph: Graph) -> None:
    edge_id = await graph.edge("a", "b")
    strange = await elsewhere(graph)
    await refuses_each(
        engine,
        "resolve_dependency",
        (graph.flow_id, edge_id),
        ends(graph),
        {
            0: ("flow_id", NO_UUIDS),
            1: ("edge_id", NO_UUIDS),
            "upstream_execution_id": ("upstream_execution_id", (*NO_EXECUTIONS, strange)),
            "downstream_execution_id": ("downstream_execution_id", (*NO_EXECUTIONS, strange)),
            "upstream_outcome": ("upstream_outcome", ("", "none", "completed", 7)),
        },
    )


async def test_setting_a_policy(engine: Engine, graph: Graph) -> None:
    strange = await elsewhere(graph)
    await refuses_each(
        engine,
        "set_edge_group_policy",
        (graph.flow_id, graph["b"], JoinAll()),
        {},
        {
            0: ("flow_id", NO_UUIDS),
            1: ("downstream_execution_id", (*NO_EXECUTIONS, strange)),
            2: ("policy", (None, 7, "all_of", {}, {"kind": "most_of"}, {"kind": "quorum"})),
        },
    )
    async with unchanged(engine):
        for field, policy in (
            ("policy.k", JoinQuorum(0)),
            ("policy.k", JoinQuorum(-1)),
            ("policy.k", JoinQuorum(2**31)),
            ("policy.k", structs.replace(JoinQuorum(1), k="two")),
            ("policy.on_satisfied", structs.replace(JoinAny(), on_satisfied="stop")),
        ):
            await refuses(engine, field, "set_edge_group_policy", graph.flow_id, graph["b"], policy)
    assert (await graph.flow()).edge_groups == ()


async def test_adding_in_bulk(engine: Engine, graph: Graph) -> None:
    good = Dependency(upstream_execution_id=graph["a"])
    strange = await elsewhere(graph)

    def joined(**fields: object) -> list[Join]:
        return [
            Join(downstream_execution_id=graph["b"], dependencies=[structs.replace(good, **fields)])
        ]

    malformed: list[tuple[str, object]] = [
        *(
            ("downstream_execution_id", [structs.replace(each, downstream_execution_id=value)])
            for each in joined()
            for value in (*NO_EXECUTIONS, strange)
        ),
        *(
            ("upstream_execution_id", joined(upstream_execution_id=value))
            for value in (*NO_EXECUTIONS, strange)
        ),
        *(("edge_id", joined(edge_id=value)) for value in NO_UUIDS if value is not None),
        *(("data_passing_ref", joined(data_passing_ref=value)) for value in NO_TEXTS),
        *(("replaces_payload", joined(replaces_payload=value)) for value in (None, 1, "yes")),
        ("policy", [structs.replace(each, policy="any_of") for each in joined()]),
        ("joins", joined() * 2),
    ]
    async with unchanged(engine):
        for field, joins in malformed:
            await refuses(engine, field, "add_dependencies", graph.flow_id, joins)
        for value in NO_UUIDS:
            await refuses(engine, "flow_id", "add_dependencies", value)
        for value in NO_EXECUTIONS:
            await refuses(
                engine, "execution_id", "add_dependencies", graph.flow_id, members=[value]
            )
    assert (await graph.flow()).edge_count == 0


@pytest.mark.parametrize("operation", ["cancel_flow", "cancel_flow_header"])
async def test_cancelling(engine: Engine, graph: Graph, operation: str) -> None:
    await refuses_each(
        engine,
        operation,
        (graph.flow_id,),
        {},
        {
            0: ("flow_id", NO_UUIDS),
            "reason": ("reason", (None, 7, b"x", "a\x00b", "\ud800")),
            "cancellation_policy": ("cancellation_policy", (None, "", "CANCEL_ALL", "some", 7)),
        },
    )
    if operation == "cancel_flow":
        for field, wait in (
            ("wait", None),
            ("wait", 5),
            ("wait.timeout_ms", WaitTimeout(-1)),
            ("wait.timeout_ms", structs.replace(WaitTimeout(1), timeout_ms="1s")),
        ):
            await refuses(engine, field, operation, graph.flow_id, wait=wait)
    flow = await graph.flow()
    assert (flow.public_flow_state, flow.cancel_reason) == ("open", None)


async def test_a_long_reason_is_shortened(engine: Engine, graph: Graph) -> None:
    await engine.cancel_flow(graph.flow_id, reason="x" * 100_000)
    reason = (await graph.flow()).cancel_reason
    assert reason is not None
    assert len(reason.encode()) == 64 * 1024
    assert reason.endswith("…")


async def test_acknowledging_a_cancelled_member(engine: Engine, graph: Graph) -> None:
    await refuses_each(
        engine,
        "ack_cancel_member",
        (graph.flow_id, graph["a"]),
        {},
        {0: ("flow_id", NO_UUIDS), 1: ("execution_id", NO_EXECUTIONS)},
    )
    async with unchanged(engine):
        await engine.ack_cancel_member(new_id(), UNKNOWN_ID)
        await engine.ack_cancel_member(graph.flow_id, graph["a"])


async def test_reading(engine: Engine, graph: Graph) -> None:
    tables: list[tuple[str, tuple[object, ...], Mapping[int | str, tuple[str, tuple[object, ...]]]]]
    tables = [
        ("describe_flow", (graph.flow_id,), {0: ("flow_id", NO_UUIDS)}),
        ("read_flow_summary", (graph.flow_id,), {0: ("flow_id", NO_UUIDS)}),
        ("project_flow_summary", (graph.flow_id,), {0: ("flow_id", NO_UUIDS)}),
        (
            "describe_edge",
            (graph.flow_id, new_id()),
            {0: ("flow_id", NO_UUIDS), 1: ("edge_id", NO_UUIDS)},
        ),
        (
            "list_edges",
            (graph.flow_id, Outgoing(graph["a"])),
            {
                0: ("flow_id", NO_UUIDS),
                1: ("direction", ("out", 7)),
                "cursor": ("cursor", NO_UUIDS[1:]),
                "limit": ("limit", NO_LIMITS[1:]),
            },
        ),
        (
            "list_flow_members",
            (graph.flow_id,),
            {
                0: ("flow_id", NO_UUIDS),
                "cursor": ("cursor", NO_EXECUTIONS[1:]),
                "limit": ("limit", NO_LIMITS),
            },
        ),
        (
            "list_edge_groups",
            (graph.flow_id,),
            {
                0: ("flow_id", NO_UUIDS),
                "cursor": ("cursor", NO_EXECUTIONS[1:]),
                "limit": ("limit", NO_LIMITS),
            },
        ),
        (
            "list_flows",
            (),
            {"cursor": ("cursor", NO_UUIDS[1:]), "limit": ("limit", NO_LIMITS)},
        ),
        ("evaluate_flow_eligibility", (graph["a"],), {0: ("execution_id", NO_EXECUTIONS)}),
        ("cascade_completion", (graph["a"],), {0: ("execution_id", NO_EXECUTIONS)}),
        ("read_execution_inputs", (graph["a"],), {0: ("execution_id", NO_EXECUTIONS)}),
        ("resolve_execution_flow_id", (graph["a"],), {0: ("execution_id", NO_EXECUTIONS)}),
        ("dispatch_completions", (), {"limit": ("limit", NO_BATCHES)}),
        (
            "cancel_pending_members",
            (),
            {"limit": ("limit", NO_BATCHES), "flow_id": ("flow_id", NO_UUIDS[1:])},
        ),
        ("apply_due_edges", (), {"limit": ("limit", NO_BATCHES)}),
        ("trim_flows", (), {"limit": ("limit", NO_BATCHES)}),
    ]
    for operation, good, bad in tables:
        await refuses_each(engine, operation, good, {}, bad)
    for node in NO_EXECUTIONS:
        for direction, field in ((Outgoing, "from_node"), (Incoming, "to_node")):
            await refuses(
                engine,
                field,
                "list_edges",
                graph.flow_id,
                structs.replace(direction(graph["a"]), **{field: node}),
            )


async def test_a_partition_that_is_not_one_of_flows(engine: Engine) -> None:
    for partition in ("fp:1", "{b:1}", "{q:1}", "{fp:256}", "{fp:x}", 256, -1, True, 1.5):
        with pytest.raises(InvalidInput, match="partition"):
            await call(engine, "list_flows", partition)


async def test_tagging(engine: Engine, graph: Graph) -> None:
    keys = (None, 7, "", "a=b", " a", "a ", "a.b\x00", "a." + "b" * 300)
    await refuses_each(
        engine,
        "set_flow_tag",
        (graph.flow_id, "a.b", "x"),
        {},
        {
            0: ("flow_id", NO_UUIDS),
            1: ("tag key", keys),
            2: ("tags[a.b]", (None, 7, "a\x00b", "\ud800", "x" * 4_097)),
        },
    )
    await refuses_each(
        engine,
        "get_flow_tag",
        (graph.flow_id, "a.b"),
        {},
        {0: ("flow_id", NO_UUIDS), 1: ("tag key", keys)},
    )
    assert (await graph.flow()).tags == {}
    await engine.set_flow_tag(graph.flow_id, "a.b", "x" * 4_096)
    await engine.set_flow_tag(graph.flow_id, "a.empty", "")
    assert (await graph.flow()).tags == {"a.b": "x" * 4_096, "a.empty": ""}


async def test_a_flow_nobody_created(engine: Engine, graph: Graph) -> None:
    """Writers say that there is none; readers show nothing."""
    partition, _ = engine.flow_key(graph.flow_id)
    ghost = new_id()
    while engine.flow_key(engine.check_flow_id(ghost))[0] != partition:
        ghost = new_id()
    calls: list[tuple[str, tuple[object, ...], Mapping[str, object]]] = [
        ("add_execution_to_flow", (ghost, graph["a"]), {}),
        ("stage_dependency_edge", (ghost, new_id()), ends(graph)),
        ("apply_dependency_to_child", (ghost, new_id()), ends(graph)),
        ("resolve_dependency", (ghost, new_id()), ends(graph)),
        ("set_edge_group_policy", (ghost, graph["b"], JoinAll()), {}),
        ("add_dependencies", (ghost,), {}),
        ("cancel_flow", (ghost,), {}),
        ("cancel_flow_header", (ghost,), {}),
        ("project_flow_summary", (ghost,), {}),
        ("set_flow_tag", (ghost, "a.b", "x"), {}),
    ]
    async with unchanged(engine):
        for operation, arguments, named in calls:
            with pytest.raises(NotFound) as caught:
                await call(engine, operation, *arguments, **named)
            assert (operation, caught.value.entity) == (operation, "flow")


async def test_an_execution_nobody_created(engine: Engine, graph: Graph) -> None:
    ghost = engine.new_member_id(graph.flow_id)
    for operation, arguments in (
        ("add_execution_to_flow", (graph.flow_id, ghost)),
        ("set_edge_group_policy", (graph.flow_id, ghost, JoinAll())),
    ):
        async with refused(engine, NotFound) as caught:
            await call(engine, operation, *arguments)
        assert caught.value.entity == "execution"
    async with refused(engine, NotFound):
        await call(
            engine,
            "apply_dependency_to_child",
            graph.flow_id,
            new_id(),
            upstream_execution_id=graph["a"],
            downstream_execution_id=ghost,
        )
    async with refused(engine, InvalidDependency):
        await call(engine, "resolve_dependency", graph.flow_id, new_id(), **ends(graph))
    assert await engine.list_edges(graph.flow_id, Outgoing(ghost)) == ()
    assert await engine.list_edges(graph.flow_id, Incoming(ghost)) == ()
    assert await engine.read_execution_inputs(ghost) == {}
    assert await engine.resolve_execution_flow_id(ghost) is None
