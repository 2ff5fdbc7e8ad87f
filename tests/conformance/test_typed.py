"""The forms of operations that name an execution and a fence, or act for its worker."""

import pytest

from flowfabric import Engine
from flowfabric.core.bounds import PRIORITY_MAX
from flowfabric.core.checks import TAG_KEY_MAX_BYTES
from flowfabric.core.results import Delayed, Moved, Updated
from flowfabric.core.states import PublicState
from flowfabric.errors import InvalidInput, StaleLease
from flowfabric.testing import SettableClock
from tests.conformance.given import Given, fence_of
from tests.conformance.graphs import new_graph
from tests.conformance.observed import call, execution_of, refused

OPERATOR = {"source": "operator_override"}


async def test_parking_and_progress_by_fence_do_what_they_do_by_handle(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    delayed, moved = await given.running(), await given.running()
    assert await engine.update_progress(
        delayed.execution_id, fence=fence_of(delayed), percent=7
    ) == Updated(execution_id=delayed.execution_id)
    assert (await execution_of(engine, delayed.execution_id)).progress_pct == 7
    assert await engine.delay_execution(
        delayed.execution_id, fence=fence_of(delayed), delay_until_ms=clock.now_ms() + 5
    ) == Delayed(execution_id=delayed.execution_id, public_state=PublicState.DELAYED)
    answer = await engine.move_to_waiting_children(moved.execution_id, fence=fence_of(moved))
    assert isinstance(answer, Moved)


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("complete_execution", {}),
        ("fail_execution", {"reason": "broken"}),
        ("delay_execution", {"delay_until_ms": 5}),
        ("move_to_waiting_children", {}),
    ],
)
async def test_an_operator_acts_for_the_worker_on_the_attempt_that_is_meant(
    engine: Engine, given: Given, operation: str, arguments: dict[str, object]
) -> None:
    running = await given.running()
    async with refused(engine, InvalidInput):
        await call(engine, operation, running.execution_id, **arguments)
    async with refused(engine, StaleLease):
        await call(
            engine, operation, running.execution_id, attempt_index=1, **OPERATOR, **arguments
        )
    await call(engine, operation, running.execution_id, attempt_index=0, **OPERATOR, **arguments)
    assert await engine.read_execution_state(running.execution_id) is not PublicState.ACTIVE


async def test_a_priority_changes_only_in_the_lane_that_is_meant(
    engine: Engine, given: Given
) -> None:
    waiting = await given.waiting()
    async with refused(engine, InvalidInput):
        await engine.change_priority(waiting, 5, lane_id="other")
    await engine.change_priority(waiting, PRIORITY_MAX, lane_id="default")
    assert (await execution_of(engine, waiting)).priority == PRIORITY_MAX


async def test_several_tags_of_a_flow_are_set_at_once(engine: Engine) -> None:
    flow = (await new_graph(engine)).flow_id
    assert await engine.set_flow_tags(flow, {"a.b": "1", "a.c": "2"}) == 2
    assert await engine.set_flow_tags(flow, {"a.c": "3"}) == 1
    assert [await engine.get_flow_tag(flow, key) for key in ("a.b", "a.c")] == ["1", "3"]
    longest = "k" * TAG_KEY_MAX_BYTES
    assert await engine.set_flow_tags(flow, {"Kunde Nr.": "4", longest: "5"}) == 2
    assert [await engine.get_flow_tag(flow, key) for key in ("Kunde Nr.", longest)] == ["4", "5"]
    for bad in ({}, {"a=b": "1"}, {f"{longest}k": "1"}, {"": "1"}, {"a.b": "1", "nope ": "2"}):
        async with refused(engine, InvalidInput):
            await engine.set_flow_tags(flow, bad)
