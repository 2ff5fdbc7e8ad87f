"""`complete_member` ends a member and tells who waits for it, as the core decides.

Members of small flows with various pasts go through the statement; every row of the flow and every
event that comes out is compared with what the core makes of the rows that went in. What the
statement is not sure of, it leaves as it was.
"""

from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flowfabric import FlowFabricError
from flowfabric.core import flow_endings, flow_joins, flow_records
from flowfabric.core.checks import INSTANCE_TAG_KEY
from flowfabric.core.decisions import Changes, Subject, Timing, change, combine
from flowfabric.core.executions import decide_complete
from flowfabric.core.handles import Handle
from flowfabric.core.ids import FIRST_UUID
from flowfabric.core.leases import Fence
from flowfabric.core.records import Attempt, Execution, Record, first_attempt
from flowfabric.core.states import LifecyclePhase, TerminalOutcome
from flowfabric.engine import shell, topics
from flowfabric.store.base import Reader, Row, Transaction
from flowfabric.store.mapping import key_of
from tests.conformance.graphs import Graph, new_graph
from tests.properties.test_differential import SHRINKING_TAKES_S, tuned
from tests.properties.world import RETENTION_MS, World

SMALL, LARGE = 2, 10_000
RESULTS = (None, b"1", b"[7]")

Shape = dict[str, str]
CHAIN: Shape = {"b": "a", "c": "b"}
SHAPES: tuple[Shape, ...] = (
    CHAIN,
    CHAIN,
    {"b": "a"},
    {"a": "", "b": ""},
    {"b": "a", "c": "a"},
    {"c": "a b"},
    {"c": "a b", "d": "c"},
)
POLICIES = (
    None,
    None,
    None,
    flow_joins.JoinAny(on_satisfied=flow_records.OnSatisfied.LET_RUN),
    flow_joins.JoinAny(),
    flow_joins.JoinQuorum(k=1, on_satisfied=flow_records.OnSatisfied.LET_RUN),
)
BEFORE = ("", "", "ran", "failed", "told")
"""What became of `b` where `a` is not the only one that is waited for."""
ALTERED: dict[str, dict[str, bool | int | bytes]] = {
    "cancel asked": {"cancel_requested": True},
    "delayed": {"delay_until_ms": 1_700_000_005_000},
    "has input": {"next_input": b"later"},
    "awaited": {"awaited": True},
}
THEN = ("", "", "", "", "moment", "late", "staged", "cancelled", "closed", "pending", *ALTERED)


@dataclass(frozen=True)
class Story:
    """A flow, how its member `a` came to run, and what befell the flow meanwhile."""

    shape: Shape
    policy: flow_joins.EdgeDependencyPolicy | None
    passing: bool
    replaces: bool
    lives: int
    replayed: bool
    tag: str | None
    before: str
    then: str
    spoiled: bool
    result: bytes | None
    bytes_max: int


stories = st.builds(
    Story,
    shape=st.sampled_from(SHAPES),
    policy=st.sampled_from(POLICIES),
    passing=st.booleans(),
    replaces=st.booleans(),
    lives=st.sampled_from((1, 1, 1, 2)),
    replayed=st.sampled_from((False, False, False, True)),
    tag=st.sampled_from((None, "blue")),
    before=st.sampled_from(BEFORE),
    then=st.sampled_from(THEN),
    spoiled=st.sampled_from((False, False, False, True)),
    result=st.sampled_from(RESULTS),
    bytes_max=st.sampled_from((SMALL, LARGE, LARGE)),
)

Rows = dict[object, Record]


async def lived(world: World, story: Story) -> tuple[Graph, Handle]:
    graph = await new_graph(world.engine)
    tags = {} if story.tag is None else {INSTANCE_TAG_KEY: story.tag}
    await graph.build(
        story.shape,
        story.policy,
        passing=story.passing,
        replaces_payload=story.replaces,
        tags=tags,
    )
    handle = (await graph.claimed("a")).handle
    for _ in range(1, story.lives):
        await graph.engine.revoke_lease(graph["a"], reason="again")
        handle = await claimed_again(graph)
    if "b" in graph.ids and not story.shape.get("b"):
        await happened(graph, story.before)
    elif story.replayed:
        await graph.engine.complete(handle, b"0")
        await graph.settle()
        await graph.engine.replay_execution(graph["a"])
        handle = (await graph.claimed("a")).handle
    with suppress(FlowFabricError):
        # A step that does not apply is passed over.
        await befall(world, graph, story, handle)
    return graph, handle


async def claimed_again(graph: Graph) -> Handle:
    again = await graph.engine.claim(worker_id="w", worker_instance_id="w-1")
    assert again is not None
    assert again.execution_id == graph["a"], "no member is older"
    return again.handle


async def happened(graph: Graph, before: str) -> None:
    match before:
        case "failed":
            await graph.fail("b")
        case "ran" | "told":
            await graph.run("b")
        case _:
            return
    if before != "ran":
        await graph.settle()


async def befall(world: World, graph: Graph, story: Story, handle: Handle) -> None:
    downstream = next((name for name, waits in story.shape.items() if "a" in waits.split()), "a")
    match story.then:
        case "moment":
            world.clock.advance(ms=7)
        case "late":
            world.clock.advance(ms=handle.lease_ttl_ms)
        case "staged":
            await graph.member("z")
            await graph.stage("a", "z")
        case "cancelled":
            if downstream != "a":
                await graph.engine.cancel_execution(graph[downstream], reason="unwanted")
        case "closed":
            await graph.engine.cancel_flow(graph.flow_id, cancellation_policy="flow_only")
        case "pending":
            await graph.engine.create_waitpoint(handle, "gate", expires_in_ms=1_000)
        case "":
            pass
        case _:
            await altered(world, graph, downstream, ALTERED[story.then])


async def altered(
    world: World, graph: Graph, name: str, fields: dict[str, bool | int | bytes]
) -> None:
    key = shell.execution_key(graph[name])

    async def body(tx: Transaction) -> None:
        execution = (await tx.lock(Execution, [key]))[key]
        if execution.lifecycle_phase is not LifecyclePhase.TERMINAL:
            await tx.save(Changes(updates=(change(execution, world.now_ms, **fields),)))

    await world.engine.store.transact(body)


async def rows_of(graph: Graph) -> Rows:
    """All that the end of a member can change."""
    keys = [shell.execution_key(each) for each in graph.ids.values()]

    async def body(tx: Reader) -> Rows:
        found: list[Record] = [*(await tx.get(Execution, keys)).values()]
        found += (await tx.get(flow_records.JoinRecord, keys)).values()
        flow_key = graph.engine.flow_key(graph.flow_id)
        found += (await tx.get(flow_records.FlowRecord, [flow_key])).values()
        for execution_id in graph.ids.values():
            one = shell.columns_of(execution_id)
            found += await tx.select_records(Attempt, "list_attempts", **one)
            found += await tx.select_records(
                flow_records.Edge,
                "list_edges_into",
                **one,
                flow_id=graph.flow_id,
                start=FIRST_UUID,
                limit=len(graph.ids),
            )
        found += await tx.select_records(
            flow_records.ExecutionInput,
            "inputs_of_executions",
            **shell.id_columns(list(graph.ids.values())),
        )
        queued = [(*flow_key, each, life) for each in graph.ids.values() for life in (0, 1)]
        found += (await tx.get(flow_records.CompletionDispatch, queued)).values()
        return {(type(each), key_of(each)): each for each in found}

    return await graph.engine.store.read(body)


def by_the_core(
    world: World, graph: Graph, before: Rows, fence: Fence, story: Story
) -> tuple[Changes, str]:
    """What the end of `a` changes, and whom it wakes."""
    timing = Timing(now_ms=world.now_ms)
    member = before[Execution, shell.execution_key(graph["a"])]
    assert isinstance(member, Execution)
    subject = Subject(execution=member, attempt=first_attempt(member))
    ended = decide_complete(subject, fence, story.result, "json", timing).changes
    assert [type(each) for each in ended.inserts] == [flow_records.CompletionDispatch]
    ending = flow_endings.Ending(
        outcome=TerminalOutcome.SUCCESS,
        replay_count=member.replay_count,
        result=story.result,
        result_encoding="json",
    )
    edges = [
        each
        for each in before.values()
        if isinstance(each, flow_records.Edge) and each.upstream_id == graph["a"]
    ]
    groups = {
        each.downstream_id: each
        for each in before.values()
        if isinstance(each, flow_records.JoinRecord)
    }
    found = flow_endings.resolve_edges(edges, groups, {graph["a"]: ending}, world.now_ms)
    flow = before[flow_records.FlowRecord, graph.engine.flow_key(graph.flow_id)]
    assert isinstance(flow, flow_records.FlowRecord)
    counted = flow_joins.count_endings(flow, [TerminalOutcome.SUCCESS])
    counted = flow_joins.with_last_end(counted, [world.now_ms])
    counted = flow_joins.with_derived_state(counted, world.now_ms, RETENTION_MS)
    released: list[Changes] = []
    for group in found.fired:
        downstream = before[Execution, key_of(group)]
        assert isinstance(downstream, Execution)
        inputs = [each for each in found.inputs if each.execution_id == group.downstream_id]
        waiting = Subject(execution=downstream, attempt=None)
        released.append(
            flow_endings.release(waiting, group, inputs, timing, inputs_bytes_max=story.bytes_max)
        )
    own = Changes(inserts=found.inputs, updates=(counted, *found.edges, *found.groups))
    woken = topics.ready_topic("default") if found.fired else topics.COMPLETION_TOPIC
    return combine([structs.replace(ended, inserts=()), own, *released]), woken


def after(before: Rows, changes: Changes) -> Rows:
    # The first attempt follows from its execution, and has no row.
    changed = (
        each for each in (*changes.inserts, *changes.updates) if not isinstance(each, Attempt)
    )
    return before | {(type(each), key_of(each)): each for each in changed}


async def told(graph: Graph, handle: Handle, story: Story) -> list[Row]:
    lease_id = graph.flow_id if story.spoiled else handle.lease_id
    return list(
        await graph.engine.store.execute_alone(
            "complete_member",
            **shell.columns_of(graph["a"]),
            lease_id=lease_id,
            result=story.result,
            result_encoding="json",
            payload_bytes_max=story.bytes_max,
        )
    )


def check(world: World, story: Story) -> None:
    world.begin()
    graph, handle = world.run(lived(world, story))
    before = world.run(rows_of(graph))
    world.look([])
    rows = world.run(told(graph, handle, story))
    _, events = world.look([])
    decided = Changes()
    if rows:
        decided, woken = by_the_core(world, graph, before, shell.fence_of(handle), story)
        awaited = story.then == "awaited" and not story.shape
        assert [(each["topic"], bool(each["awaited"])) for each in rows] == [(woken, awaited)]
    assert world.run(rows_of(graph)) == after(before, decided)
    assert events == list(decided.events)
    assert bool(rows) or not is_plain(story)


def is_plain(story: Story) -> bool:
    """Whether it is what the statement is for."""
    return (
        story.shape in (CHAIN, {"b": "a"}, {"c": "a b"}, {"c": "a b", "d": "c"})
        and story.policy is None
        and (not story.passing or story.shape in (CHAIN, {"b": "a"}))
        and (story.lives, story.replayed, story.spoiled) == (1, False, False)
        and story.before in ("", "told")
        and story.then in ("", "moment", "has input")
        and (not story.passing or len(story.result or b"") <= story.bytes_max)
        and story.bytes_max == LARGE
    )


@pytest.mark.timeout(SHRINKING_TAKES_S)
def test_a_member_completed_by_statement_is_what_the_core_decides(world: World) -> None:
    @tuned(world, 400)
    @given(story=stories)
    def agrees(story: Story) -> None:
        check(world, story)

    agrees()
