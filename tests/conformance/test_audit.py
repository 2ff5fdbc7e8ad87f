"""Finding what must not be."""

import pytest

from flowfabric import Engine
from flowfabric.core.audit import Complaint, Wrong
from flowfabric.core.model import Execution
from flowfabric.core.states import BlockingReason, EligibilityState, LifecyclePhase
from flowfabric.core.step_model import Waiter
from flowfabric.engine.unit import execution_key
from tests.conformance.auditing import complaints_of, delete, spoil
from tests.conformance.given import EVERY_STATE, Given
from tests.conformance.graphs import new_graph
from tests.conformance.observed import execution_of, refuses


async def test_nothing_is_wrong_with_an_execution_in_any_state(
    engine: Engine, given: Given
) -> None:
    for state in EVERY_STATE:
        if state != "waiting_children":
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


@pytest.mark.parametrize("cursor", ["x", "executions/1", "strays/-1", "executions/1/x", 5])
async def test_a_cursor_that_no_page_gave_is_refused(engine: Engine, cursor: object) -> None:
    await refuses(engine, "cursor", "audit", cursor=cursor)
