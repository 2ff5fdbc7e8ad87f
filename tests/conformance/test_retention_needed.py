"""What somebody waits for, or may still ask for, is not forgotten."""

import pytest

from flowfabric import Engine, EngineConfig
from flowfabric.core.bounds import HELD_MS_MAX, HELD_MS_MIN
from flowfabric.core.results import Claimed, Duplicate
from flowfabric.core.states import FailureClass, PublicState
from flowfabric.engine.shell import Swept
from flowfabric.reconcilers import run_due
from flowfabric.testing import SettableClock
from tests.conformance.auditing import complaints_of
from tests.conformance.given import Given, new
from tests.conformance.graphs import new_graph
from tests.conformance.observed import execution_of

BRIEF = [EngineConfig(keep=0, keep_failed=0)]


async def ended_child(engine: Engine, given: Given) -> tuple[Claimed, Claimed]:
    """A running parent, and its child, which has completed."""
    parent = await given.running(ttl_ms=1_000_000)
    child = await given.running(parent_execution_id=parent.execution_id)
    await engine.complete(child.handle, result=b"done")
    return parent, child


async def test_whoever_waits_is_woken_before_what_it_waits_for_goes(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    parent = await given.running()
    child = await given.running()
    await engine.await_executions(parent.handle, [child.execution_id])
    await engine.complete(child.handle, result=b"done")
    clock.advance("8d")
    await run_due(engine)
    assert await engine.read_execution_state(parent.execution_id) is PublicState.WAITING
    assert await engine.get_execution_result(child.execution_id) == b"done"


@pytest.mark.parametrize("config", BRIEF)
async def test_what_is_awaited_is_kept_until_whoever_waited_has_ended(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    parent = await given.running()
    child = await given.running()
    await engine.await_executions(parent.handle, [child.execution_id])
    await engine.complete(child.handle, result=b"done")
    assert await engine.trim_retention() == Swept(acted=0, full=False)
    await run_due(engine)
    clock.advance("1d")
    await run_due(engine)
    assert await engine.get_execution_result(child.execution_id) == b"done"
    again = await given.taken()
    assert again.execution_id == parent.execution_id
    await engine.complete(again.handle)
    clock.advance("1h")
    assert await engine.trim_retention() == Swept(acted=2, full=False)
    assert await engine.describe_execution(child.execution_id) is None


@pytest.mark.parametrize("config", BRIEF)
async def test_a_child_is_kept_until_its_parent_has_ended(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    parent, child = await ended_child(engine, given)
    assert await engine.trim_retention() == Swept(acted=0, full=False)
    assert await engine.get_execution_result(child.execution_id) == b"done"
    await engine.complete(parent.handle)
    assert await engine.trim_retention() == Swept(acted=1, full=False)
    clock.advance(ms=HELD_MS_MIN)
    assert await engine.trim_retention() == Swept(acted=1, full=False)


@pytest.mark.parametrize("end", ["fail", "cancel"])
async def test_a_child_is_kept_for_the_replay_of_a_parent_that_failed(
    engine: Engine, given: Given, clock: SettableClock, end: str
) -> None:
    parent, child = await ended_child(engine, given)
    if end == "fail":
        await engine.fail(parent.handle, "broken", failure_class=FailureClass.PERMANENT)
    else:
        await engine.cancel_execution(parent.execution_id, reason="no use")
    clock.advance("29d")
    await run_due(engine)
    assert await engine.get_execution_result(child.execution_id) == b"done"
    clock.advance("30d")
    await run_due(engine)
    clock.advance("30d")
    await run_due(engine)
    assert await engine.describe_execution(child.execution_id) is None


@pytest.mark.parametrize("config", BRIEF)
@pytest.mark.parametrize("found_by", ["idempotency_key", "execution_id"])
async def test_what_a_handler_found_instead_of_created_is_kept_for_it(
    engine: Engine, given: Given, clock: SettableClock, found_by: str
) -> None:
    parent = await given.running(ttl_ms=86_400_000)
    child = await given.running(idempotency_key="k")
    request = new(idempotency_key="k", parent_execution_id=parent.execution_id)
    if found_by == "execution_id":
        request = new(execution_id=child.execution_id, parent_execution_id=parent.execution_id)
    assert isinstance(await engine.create_execution(request), Duplicate)
    await engine.complete(child.handle, result=b"done")
    assert isinstance(await engine.create_execution(request), Duplicate)
    clock.advance("23h")
    await run_due(engine)
    assert await engine.get_execution_result(child.execution_id) == b"done"
    await engine.complete(parent.handle)
    clock.advance("8d")
    await run_due(engine)
    assert await engine.describe_execution(child.execution_id) is None
    assert await complaints_of(engine) == []


@pytest.mark.parametrize("config", BRIEF)
async def test_what_is_kept_is_not_looked_at_again_and_again(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    _, child = await ended_child(engine, given)
    for pause, held_ms in (("0s", HELD_MS_MIN), ("5m", 300_000), ("10d", HELD_MS_MAX)):
        clock.advance(pause)
        await engine.trim_retention()
        kept = await execution_of(engine, child.execution_id)
        assert kept.retain_until_ms == clock.now_ms() + held_ms


@pytest.mark.parametrize("config", BRIEF)
async def test_a_child_outlives_a_parent_that_is_gone_and_is_trimmed_then(
    engine: Engine, given: Given
) -> None:
    parent = await given.completed()
    await engine.trim_retention()
    child = await given.completed(parent_execution_id=parent.execution_id)
    assert await engine.trim_retention() == Swept(acted=1, full=False)
    assert await engine.describe_execution(child.execution_id) is None


@pytest.mark.parametrize("config", BRIEF)
async def test_a_waiter_goes_with_whoever_waited(engine: Engine, given: Given) -> None:
    parent = await given.running()
    child = await given.running(ttl_ms=1_000_000)
    await engine.await_executions(parent.handle, [child.execution_id])
    await engine.cancel_execution(parent.execution_id, reason="no use")
    assert await engine.trim_retention() == Swept(acted=1, full=False)
    await engine.complete(child.handle)
    acted = await run_due(engine)
    assert (acted["awaited"], acted["retention"]) == (1, 1)


@pytest.mark.parametrize("config", BRIEF)
async def test_a_flow_stays_whole_while_somebody_needs_a_member(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    graph = await new_graph(engine)
    await graph.build({"b": "a"})
    parent = await given.running(ttl_ms=1_000_000)
    await engine.await_executions(parent.handle, [graph["b"]])
    await graph.run("a")
    await graph.settle()
    await graph.run("b")
    await graph.settle()
    await run_due(engine)
    assert await graph.states() == {"a": "completed", "b": "completed"}
    assert (await engine.next_due())["flow_retention"] == HELD_MS_MIN
    await engine.cancel_execution(parent.execution_id, reason="no use")
    clock.advance("1h")
    await run_due(engine)
    assert await engine.describe_execution(graph["a"]) is None
    assert await engine.describe_flow(graph.flow_id) is None
