"""Members of a flow that pause."""

import pytest

from flowfabric import Engine
from flowfabric.core.records import TimeoutBehavior
from flowfabric.reconcilers import run_due
from flowfabric.testing import SettableClock
from tests.conformance.graphs import Graph, new_graph
from tests.conformance.pausing import APPROVED

TIMEOUT_MS = 1_000


@pytest.fixture
async def graph(engine: Engine) -> Graph:
    made = await new_graph(engine)
    await made.build({"b": "a"})
    return made


async def test_dependents_wait_until_a_paused_member_has_ended(
    engine: Engine, graph: Graph
) -> None:
    paused = await engine.suspend((await graph.claimed("a")).handle, resume_condition=APPROVED)
    await graph.settle()
    assert await graph.states() == {"b": "waiting_children", "a": "suspended"}
    await engine.deliver_signal(
        graph["a"],
        paused.details.waitpoint_id,
        waitpoint_token=paused.details.waitpoint_token,
        signal_name="approved",
    )
    await graph.settle()
    assert await graph.states() == {"b": "waiting_children", "a": "waiting"}
    await engine.complete((await graph.claim())["a"].handle)
    await graph.settle()
    assert await graph.states() == {"b": "waiting", "a": "completed"}


@pytest.mark.parametrize(
    ("behavior", "state"),
    [
        (TimeoutBehavior.FAIL, "failed"),
        (TimeoutBehavior.CANCEL, "cancelled"),
        (TimeoutBehavior.EXPIRE, "expired"),
    ],
)
async def test_dependents_are_told_of_a_pause_that_lasted_too_long(
    engine: Engine, graph: Graph, clock: SettableClock, behavior: TimeoutBehavior, state: str
) -> None:
    await engine.suspend(
        (await graph.claimed("a")).handle,
        resume_condition=APPROVED,
        timeout_in_ms=TIMEOUT_MS,
        timeout_behavior=behavior,
    )
    clock.advance(ms=TIMEOUT_MS)
    await run_due(engine)
    await graph.settle()
    assert await graph.states() == {"b": "skipped", "a": state}
