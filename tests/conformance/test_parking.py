"""Releasing the worker while the attempt goes on: delays and waiting for children."""

from flowfabric import Engine
from flowfabric.core.handles import HandleKind
from flowfabric.core.results import Delayed, Marked, Moved
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    BlockingReason,
    EligibilityState,
    PublicState,
)
from flowfabric.errors import ExecutionNotActive
from flowfabric.testing import SettableClock
from tests.conformance.expected import attempt_set_aside, lease_event, set_aside
from tests.conformance.given import TAGGED, Given
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refused,
    refuses,
    unchanged,
)

TIMED = {"policy": {"timeout_policy": {"attempt_timeout_ms": 20_000}}}


async def test_a_delay_sets_the_attempt_aside_until_a_time(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running(**TAGGED, **TIMED, execution_deadline_at_ms=clock.now_ms() + 9)
    execution_id = running.execution_id
    before = await execution_of(engine, execution_id)
    (attempt,) = await engine.list_attempts(execution_id)
    cursor = await cursor_of(engine)
    now_ms = clock.advance("1s")
    until_ms = now_ms + 5_000
    assert await engine.delay(running.handle, until_ms) == Delayed(
        execution_id=execution_id, public_state=PublicState.DELAYED
    )
    assert await execution_of(engine, execution_id) == set_aside(
        before,
        EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
        BlockingReason.WAITING_FOR_DELAY,
        AttemptState.ATTEMPT_INTERRUPTED,
        now_ms,
        blocking_detail=f"delayed until {until_ms}",
        delay_until_ms=until_ms,
        attempt_time_left_ms=19_000,
    )
    assert await engine.list_attempts(execution_id) == (
        attempt_set_aside(attempt, "worker_delay", now_ms),
    )
    assert await events_since(engine, cursor) == [
        lease_event(before, "revoked", now_ms, "worker_delay")
    ]


async def test_why_tells_the_reason_of_a_delay_that_has_one(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running()
    until_ms = clock.now_ms() + 5_000
    await engine.delay(running.handle, until_ms, why="budget team has no room")
    told = await engine.explain_execution(running.execution_id)
    assert told.sentence.startswith("It waits 5.0s more (delay). It was put aside: budget team has")
    assert told.detail == {"delay_until_ms": until_ms, "blocking_reason": "waiting_for_delay"}
    again = await given.running()
    await engine.delay(again.handle, until_ms)
    assert (await engine.explain_execution(again.execution_id)).sentence == (
        "It waits 5.0s more (delay)."
    )


async def test_who_depends_on_nothing_waits_for_children_no_longer_than_it_takes(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    """Nobody would ever wake it."""
    running = await given.running(**TAGGED)
    execution_id = running.execution_id
    before = await execution_of(engine, execution_id)
    (attempt,) = await engine.list_attempts(execution_id)
    cursor = await cursor_of(engine)
    now_ms = clock.advance("1s")
    assert await engine.wait_children(running.handle) == Moved(
        execution_id=execution_id, public_state=PublicState.WAITING
    )
    assert await execution_of(engine, execution_id) == set_aside(
        before,
        EligibilityState.ELIGIBLE_NOW,
        BlockingReason.WAITING_FOR_WORKER,
        AttemptState.ATTEMPT_INTERRUPTED,
        now_ms,
        public_state=PublicState.WAITING,
        ready=True,
    )
    assert await engine.list_attempts(execution_id) == (
        attempt_set_aside(attempt, "waiting_children", now_ms),
    )
    assert await events_since(engine, cursor) == [
        lease_event(before, "revoked", now_ms, "waiting_children")
    ]
    assert (await given.taken()).handle.kind is HandleKind.RESUMED


async def test_parking_again_gives_the_same_answer_and_changes_nothing(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    parked, waiting = await given.parked(), await given.waiting_children()
    clock.advance("1h")
    async with unchanged(engine):
        assert await engine.delay(parked.handle, clock.now_ms() + 1) == Delayed(
            execution_id=parked.execution_id, public_state=PublicState.DELAYED
        )
        assert await engine.wait_children(waiting.handle) == Moved(
            execution_id=waiting.execution_id, public_state=PublicState.WAITING_CHILDREN
        )


async def test_one_kind_of_parking_is_no_repeat_of_the_other(engine: Engine, given: Given) -> None:
    parked, waiting = await given.parked(), await given.waiting_children()
    async with refused(engine, ExecutionNotActive):
        await engine.wait_children(parked.handle)
    async with refused(engine, ExecutionNotActive):
        await engine.delay(waiting.handle, 0)
    async with refused(engine, ExecutionNotActive):
        await engine.complete(parked.handle)


async def test_a_delay_into_the_past_is_due_at_once(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running()
    assert (await engine.delay(running.handle, 0)).public_state is PublicState.DELAYED
    assert await engine.promote_delayed(running.execution_id) == Marked(
        execution_id=running.execution_id, public_state=PublicState.WAITING
    )
    resumed = await given.taken()
    assert (resumed.attempt_index, resumed.attempt_id) == (0, running.attempt_id)


async def test_an_attempt_may_be_parked_many_times(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running(**TIMED)
    for epoch in (2, 3):
        clock.advance("1s")
        await engine.delay(running.handle, clock.now_ms())
        await engine.promote_delayed(running.execution_id)
        running = await given.taken()
        assert (running.lease_epoch, running.attempt_index) == (epoch, 0)
    assert running.attempt_deadline_ms == clock.now_ms() + 18_000
    await engine.complete(running.handle)
    (attempt,) = await engine.list_attempts(running.execution_id)
    assert attempt.attempt_state is AttemptLifecycle.ENDED_SUCCESS


async def test_bad_delays_are_refused(engine: Engine, given: Given) -> None:
    handle = (await given.running()).handle
    bad: list[object] = [-1, 253_402_300_800_000, "soon", 1.0, None, True]
    async with unchanged(engine):
        for until in bad:
            await refuses(engine, "delay_until_ms", "delay", handle, until)
