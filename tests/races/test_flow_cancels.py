"""Cancelling a large flow while its members go on."""

from flowfabric import Engine
from flowfabric.core.bounds import CANCEL_BATCH
from flowfabric.core.ids import partition_of, uuid_of
from tests.conformance.auditing import complaints_of
from tests.conformance.given import RETRYING
from tests.conformance.graphs import new_graph
from tests.races.rival import Rival


async def test_a_retry_while_the_flow_is_cancelled_leaves_nobody_marked_and_not_queued(
    engine: Engine, rival: Rival
) -> None:
    graph = await new_graph(engine)
    names = [f"m{number}" for number in range(CANCEL_BATCH + 5)]
    await graph.build(dict.fromkeys(names, ""), policy=RETRYING)
    held = await graph.claimed("m0")
    other = graph["m1"]
    # Whoever queues this member waits until its rival has decided.
    queueing = (
        "insert into pending_cancel (partition_key, execution_id, flow_id, reason, only_waiting,"
        f" enqueued_at_ms, due_at_ms) values ({partition_of(other)}, '{uuid_of(other)}',"
        f" '{graph.flow_id}', 'rival', false, 0, 0)"
    )
    async with rival.holding(queueing):
        (cancelling,) = await rival.queued(
            engine.cancel_flow_header(graph.flow_id, cancellation_policy="cancel_pending")
        )
        await engine.fail(held.handle, "again")
    await cancelling

    assert await complaints_of(engine) == []
    await graph.settle()
    states = await graph.states()
    assert (states.pop("m0"), set(states.values())) == ("delayed", {"cancelled"})
