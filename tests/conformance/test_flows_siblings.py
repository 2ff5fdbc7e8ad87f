"""The queue of upstreams that a join no longer needs, looked after by hand."""

import pytest

from flowfabric import Engine
from flowfabric.core.decisions import Changes
from flowfabric.core.flow_joins import JoinAny
from flowfabric.core.flow_records import PendingCancel
from flowfabric.core.results import SiblingCancelAction
from flowfabric.core.states import PublicState
from flowfabric.engine.shell import execution_key
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.store.base import Reader, Transaction
from tests.conformance.auditing import complaints_of
from tests.conformance.given import UNKNOWN_ID
from tests.conformance.graphs import Graph, new_graph, new_id
from tests.conformance.observed import refused

NO_OP = SiblingCancelAction.NO_OP


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    return await new_graph(engine)


async def queued(graph: Graph, name: str) -> bool:
    key = execution_key(graph[name])

    async def body(reader: Reader) -> bool:
        return key in await reader.get(PendingCancel, [key])

    return await graph.engine.store.read(body)


async def enqueue(graph: Graph, name: str, downstream: str) -> None:
    row = PendingCancel(
        partition_key=int(execution_key(graph[name])[0]),
        execution_id=graph[name],
        flow_id=graph.flow_id,
        downstream_id=graph[downstream],
        reason="sibling_quorum_satisfied",
        enqueued_at_ms=0,
        due_at_ms=0,
    )

    async def body(tx: Transaction) -> None:
        await tx.save(Changes(inserts=(row,)))

    await graph.engine.store.transact(body)


async def reconcile(graph: Graph, downstream: str) -> SiblingCancelAction:
    return await graph.engine.reconcile_sibling_cancel_group(graph.flow_id, graph[downstream])


async def test_siblings_that_will_be_cancelled_are_left_to_the_dispatcher(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"d": "a b"}, JoinAny())
    assert await reconcile(graph, "d") is NO_OP
    await graph.run("a")
    await engine.dispatch_completions()
    assert await queued(graph, "b")
    assert await reconcile(graph, "d") is NO_OP
    await engine.cancel_pending_members()
    assert await engine.read_execution_state(graph["b"]) is PublicState.CANCELLED
    assert not await queued(graph, "b")
    assert await reconcile(graph, "d") is NO_OP


async def test_siblings_that_have_ended_are_taken_off_the_queue(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"d": "a b"}, JoinAny())
    await graph.run("a")
    await engine.dispatch_completions()
    await graph.run("b")
    assert await reconcile(graph, "d") is SiblingCancelAction.COMPLETED_DRAIN
    assert not await queued(graph, "b")
    assert await reconcile(graph, "d") is NO_OP
    await graph.settle()
    assert await complaints_of(engine) == []


async def test_siblings_that_no_join_wants_cancelled_are_spared(
    engine: Engine, graph: Graph
) -> None:
    await graph.build({"d": "a b"}, JoinAny())
    await enqueue(graph, "b", "d")
    assert await reconcile(graph, "d") is SiblingCancelAction.SREMMED_STALE
    assert not await queued(graph, "b")
    assert await engine.read_execution_state(graph["b"]) is PublicState.WAITING


async def test_what_the_flow_cancels_as_well_stays_queued(engine: Engine, graph: Graph) -> None:
    await graph.build({"d": "a b"}, JoinAny())
    await enqueue(graph, "b", "d")

    async def mark(tx: Transaction) -> None:
        await tx.select(
            "request_cancel", flow_id=graph.flow_id, only_waiting=False, reason="no", now_ms=0
        )

    await engine.store.transact(mark)
    assert await reconcile(graph, "d") is NO_OP
    assert await queued(graph, "b")


async def test_a_queue_of_nothing_that_exists_is_refused(engine: Engine, graph: Graph) -> None:
    async with refused(engine, NotFound):
        ghost = new_id()
        member = engine.new_member_id(ghost)
        await engine.reconcile_sibling_cancel_group(ghost, member)
    async with refused(engine, InvalidInput):
        await engine.reconcile_sibling_cancel_group("x", UNKNOWN_ID)
