"""Finding what must not be."""

from itertools import pairwise

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.audit import Complaint, Wrong
from flowfabric.core.bounds import AUDIT_EVERY_MS
from flowfabric.core.flow_joins import JoinQuorum
from flowfabric.core.flow_records import CompletionDispatch, FlowRecord
from flowfabric.core.ids import FIRST_UUID, parse_execution_id
from flowfabric.core.records import Execution, Waiter
from flowfabric.core.states import BlockingReason, EligibilityState, LifecyclePhase
from flowfabric.engine.shell import execution_key
from flowfabric.testing import SettableClock
from tests.conformance.auditing import complaints_of, delete, spoil
from tests.conformance.given import EVERY_STATE, WORKER, Given
from tests.conformance.graphs import new_graph, overwrite
from tests.conformance.observed import execution_of, refuses


async def test_nothing_is_wrong_with_an_execution_in_any_state(
    engine: Engine, given: Given
) -> None:
    for state in EVERY_STATE:
        await given.state(state)
    graph = await new_graph(engine)
    await graph.build({"b": "a", "c": "b"})
    parent = await given.running()
    await engine.await_executions(parent.handle, [graph["c"]])
    for limit in (1, 3, 1_000):
        assert await complaints_of(engine, limit) == []


async def test_an_execution_that_nothing_moves_is_found(engine: Engine, given: Given) -> None:
    stuck = await given.waiting()
    await spoil(
        engine,
        stuck,
        ready=False,
        eligibility_state=EligibilityState.BLOCKED_BY_DEPENDENCIES,
        blocking_reason=BlockingReason.WAITING_FOR_CHILDREN,
    )
    assert await complaints_of(engine) == [
        Complaint(
            wrong=Wrong.UNOWNED, execution_id=stuck, detail="runnable, blocked_by_dependencies"
        )
    ]


async def test_a_wait_for_something_that_is_gone_is_found(engine: Engine, given: Given) -> None:
    parent, child = await given.running(), await given.waiting()
    await engine.await_executions(parent.handle, [child])
    await delete(engine, Execution, [execution_key(child)])
    assert {each.wrong for each in await complaints_of(engine)} == {Wrong.UNOWNED, Wrong.STRAY}
    await delete(engine, Waiter, [(*execution_key(child), parent.execution_id)])
    (complaint,) = await complaints_of(engine)
    assert (complaint.wrong, complaint.execution_id) == (Wrong.UNOWNED, parent.execution_id)


@pytest.mark.parametrize("limit", [1, 2, 1_000])
async def test_executions_that_wait_for_each_other_are_found(
    engine: Engine, given: Given, limit: int
) -> None:
    ring = [await given.running() for _ in range(3)]
    outside = await given.running()
    for one, other in pairwise([outside, *ring, ring[0]]):
        assert await complaints_of(engine, limit) == []
        await engine.await_executions(one.handle, [other.execution_id])
    ids = [each.execution_id for each in ring]
    assert sorted(
        await complaints_of(engine, limit), key=lambda each: ids.index(each.execution_id)
    ) == [
        Complaint(
            wrong=Wrong.RING,
            execution_id=each,
            detail=f"it waits for itself by way of {ids[place - 2]}, {ids[place - 1]}",
        )
        for place, each in enumerate(ids)
    ]
    await engine.cancel_execution(ids[0], reason="out of the ring")
    assert await complaints_of(engine, limit) == []


@pytest.mark.parametrize("way_out", ["another child", "an ended child", "a time", "a deadline"])
async def test_a_ring_that_something_opens_is_none(
    engine: Engine, given: Given, clock: SettableClock, way_out: str
) -> None:
    later_ms = clock.now_ms() + 1_000
    deadline_ms = later_ms if way_out == "a deadline" else None
    one, other = await given.running(), await given.running(execution_deadline_at_ms=deadline_ms)
    child = await given.running()
    await engine.await_executions(one.handle, [other.execution_id])
    awaited = [one.execution_id]
    if way_out in ("another child", "an ended child"):
        awaited.append(child.execution_id)
    until_ms = later_ms if way_out == "a time" else None
    await engine.await_executions(other.handle, awaited, until_ms=until_ms)
    if way_out == "an ended child":
        await engine.complete(child.handle)
    assert await complaints_of(engine) == []


@pytest.mark.parametrize("state", ["waiting", "completed"])
async def test_an_execution_that_no_claim_can_find_is_found(
    engine: Engine, given: Given, state: str
) -> None:
    execution_id = await given.state(state)
    await spoil(engine, execution_id, route_id=10**6)
    (complaint,) = await complaints_of(engine)
    assert (complaint.wrong, complaint.execution_id) == (Wrong.ROUTE_GONE, execution_id)


async def test_who_waits_for_something_that_is_gone_is_woken_by_the_next_look(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    parents = [await given.running() for _ in range(3)]
    children = [await given.waiting(lane_id="children") for _ in range(3)]
    await engine.await_executions(parents[0].handle, [children[0], children[1]])
    await engine.await_executions(parents[1].handle, [children[1]])
    await engine.await_executions(parents[2].handle, [children[2]])
    await delete(engine, Execution, [execution_key(each) for each in children[:2]])

    looks = []
    for _ in range(4):
        looks.append((await engine.audit_flows(limit=1)).acted)
        clock.advance(ms=AUDIT_EVERY_MS)

    assert sum(looks) == 2
    assert await complaints_of(engine) == []
    claimed = await engine.claim_many(["default"], limit=9, **WORKER)
    woken = {parents[0].execution_id, parents[1].execution_id}
    assert {each.execution_id for each in claimed} == woken


async def test_a_look_at_those_who_wait_is_due_when_somebody_does(
    engine: Engine, given: Given
) -> None:
    parent, child = await given.running(), await given.waiting()
    assert "flow_audit" not in await engine.next_due()
    await engine.await_executions(parent.handle, [child])
    assert "flow_audit" in await engine.next_due()


async def test_a_suspension_without_anything_to_end_it_is_found(
    engine: Engine, given: Given
) -> None:
    execution_id = await given.waiting()
    await spoil(engine, execution_id, ready=False, lifecycle_phase=LifecyclePhase.SUSPENDED)
    (complaint,) = await complaints_of(engine)
    assert complaint.wrong is Wrong.UNOWNED


async def test_a_cancellation_that_nobody_will_carry_out_is_found(
    engine: Engine, given: Given
) -> None:
    execution_id = await given.waiting()
    await spoil(engine, execution_id, ready=False, cancel_requested=True)
    (complaint,) = await complaints_of(engine)
    assert complaint.wrong is Wrong.UNOWNED


async def test_a_ready_execution_whose_join_waits_is_found(engine: Engine) -> None:
    graph = await new_graph(engine)
    await graph.build({"b": "a"})
    await spoil(
        engine,
        graph["b"],
        ready=True,
        eligibility_state=EligibilityState.ELIGIBLE_NOW,
    )
    (complaint,) = await complaints_of(engine)
    assert (complaint.wrong, complaint.execution_id) == (Wrong.JOIN_OPEN, graph["b"])


async def test_an_end_that_is_kept_for_ever_is_found(engine: Engine, given: Given) -> None:
    ended = await given.completed()
    await spoil(engine, ended.execution_id, retain_until_ms=None)
    (complaint,) = await complaints_of(engine)
    assert complaint.wrong is Wrong.KEPT_FOR_EVER
    assert "never be deleted" in complaint.advice


async def test_what_is_left_of_something_that_is_gone_is_found(
    engine: Engine, given: Given
) -> None:
    gone = await given.running(tags={"a.b": "c"})
    await engine.revoke_lease(gone.execution_id, reason="test")
    before = await execution_of(engine, gone.execution_id)
    await delete(engine, Execution, [execution_key(before.execution_id)])
    assert [each.detail for each in await complaints_of(engine)] == [
        "a row of attempt is left of it",
        "a row of execution_tag is left of it",
    ]


async def test_a_key_or_a_wait_of_something_that_is_gone_is_found(
    engine: Engine, given: Given
) -> None:
    keyed = await given.waiting(idempotency_key="order-1")
    parent, child = await given.running(), await given.waiting()
    await engine.await_executions(parent.handle, [child])
    assert await complaints_of(engine) == []
    gone = [parse_execution_id(each) for each in (keyed, parent.execution_id)]
    await delete(engine, Execution, [execution_key(each) for each in gone])
    found = {(each.wrong, each.execution_id, each.detail) for each in await complaints_of(engine)}
    assert found >= {
        (Wrong.STRAY, gone[0], "a row of idempotency_guard is left of it"),
        (Wrong.STRAY, gone[1], "a row of waiter is left of it"),
    }


async def test_keys_and_waits_are_looked_at_page_by_page(engine: Engine, given: Given) -> None:
    keyed = [await given.waiting(idempotency_key=f'an "order" / {n}') for n in range(5)]
    child, parents = await given.waiting(), [await given.running() for _ in range(5)]
    for parent in parents:
        await engine.await_executions(parent.handle, [child])
    gone = [parse_execution_id(keyed[4]), max(parent.execution_id for parent in parents)]
    await delete(engine, Execution, [execution_key(each) for each in gone])
    pages, cursor = [], None
    while True:
        page = await engine.audit(cursor=cursor, limit=2)
        pages.append(page)
        cursor = page.cursor
        if cursor is None:
            break
    found = [
        (each.execution_id, each.detail)
        for page in pages
        for each in page.complaints
        if each.detail.split()[3] in ("idempotency_guard", "waiter")
    ]
    assert found == [
        (gone[0], "a row of idempotency_guard is left of it"),
        (gone[1], "a row of waiter is left of it"),
    ]
    # Five of each, two a page.
    for phase in ("guards", "waiting"):
        assert sum((page.cursor or "").startswith(f"{phase}/") for page in pages) == 3


# Flows


async def test_nothing_is_wrong_with_a_flow_in_the_middle_of_everything(
    engine: Engine, clock: SettableClock
) -> None:
    """Told and untold endings, open, staged and reopened edges, a lost lease with a join."""
    graph = await new_graph(engine)
    await graph.build({"d": "a b", "e": "b c", "replayed": "f g", "h": "i"})
    await graph.fail("f")
    await graph.run("i")
    await graph.settle()
    await engine.replay_execution(graph["replayed"])
    await graph.member("staged")
    await graph.stage("i", "staged")
    await graph.run("a")
    await graph.claimed("c")
    await graph.member("lost")
    await graph.claimed("lost")
    await graph.edge("b", "lost")
    await engine.revoke_lease(graph["lost"], reason="moved")
    await graph.member("short")
    await engine.set_edge_group_policy(graph.flow_id, graph["short"], JoinQuorum(2))
    await graph.edge("i", "short")
    assert await complaints_of(engine) == []
    assert await complaints_of(engine, 1) == []


async def test_an_open_join_that_nothing_will_resolve_is_found(engine: Engine) -> None:
    graph = await new_graph(engine)
    await graph.build({"b": "a"})
    await graph.run("a")
    row = (*execution_key(graph["a"])[:1], graph.flow_id, graph["a"], 0)
    await delete(engine, CompletionDispatch, [row])
    found = await complaints_of(engine)
    assert [(each.wrong, each.execution_id) for each in found] == [
        (Wrong.UNOWNED, graph["b"]),
        (Wrong.MISCOUNTED, f"{{fp:{row[0]}}}:{graph.flow_id}"),
    ]


async def test_an_execution_that_misreads_its_join_is_found(engine: Engine) -> None:
    graph = await new_graph(engine)
    await graph.build({"b": "a"})
    await spoil(engine, graph["b"], join_pending=False)
    await spoil(engine, graph["a"], join_pending=True, ready=True)
    found = {(each.wrong, each.execution_id) for each in await complaints_of(engine)}
    assert found == {(Wrong.JOIN_MISREAD, graph[name]) for name in "ab"}


async def test_the_first_flow_of_all_is_looked_at_too(engine: Engine) -> None:
    for number in (0, 1):
        graph = await new_graph(engine, f"{FIRST_UUID[:-1]}{number}")
        await graph.build({"b": "a"})
        group = await graph.stored_group("b")
        assert group is not None
        await overwrite(graph, structs.replace(group, staged=2))
    assert len(await complaints_of(engine)) == 2
    assert len(await complaints_of(engine, 1)) == 2


async def test_wrong_counts_of_a_join_are_found(engine: Engine) -> None:
    graph = await new_graph(engine)
    await graph.build({"b": "a"})
    group = await graph.stored_group("b")
    assert group is not None
    await overwrite(graph, structs.replace(group, staged=2))
    (complaint,) = await complaints_of(engine)
    assert (complaint.wrong, complaint.execution_id) == (Wrong.MISCOUNTED, graph["b"])


async def test_what_is_left_of_a_flow_that_is_gone_is_found(engine: Engine) -> None:
    graph = await new_graph(engine)
    await graph.build({"b": "a"})
    await engine.set_flow_tag(graph.flow_id, "app.run", "1")
    partition_key = execution_key(graph["a"])[0]
    await delete(engine, FlowRecord, [(partition_key, graph.flow_id)])
    found = [each.detail for each in await complaints_of(engine) if each.wrong is Wrong.STRAY]
    assert sorted(found) == ["a row of edge is left of it", "a row of flow_tag is left of it"]


@pytest.mark.parametrize(
    "cursor", ["x", "executions/1", "strays/-1", "executions/1/x", "flows/0/x", "guards/0/x", 5]
)
async def test_a_cursor_that_no_page_gave_is_refused(engine: Engine, cursor: object) -> None:
    await refuses(engine, "cursor", "audit", cursor=cursor)
