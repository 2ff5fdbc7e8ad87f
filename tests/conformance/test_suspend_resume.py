"""Coming back from a pause: by an operator, by time, by a grant; and the list of who is away."""

import pytest
from msgspec import json, structs

from flowfabric import Engine
from flowfabric.core.conditions import TimeoutOnly
from flowfabric.core.events import EventCategory
from flowfabric.core.handles import HandleKind
from flowfabric.core.records import SignalEffect, SuspensionReason, TimeoutBehavior, WaitpointState
from flowfabric.core.results import AlreadySatisfied
from flowfabric.core.resumption import Resumed, ResumePolicy, SuspensionExpired
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    BlockingReason,
    LifecyclePhase,
    PublicState,
    TerminalOutcome,
)
from flowfabric.errors import ExecutionNotSuspended, NotFound
from flowfabric.reconcilers import run_due
from flowfabric.testing import SettableClock
from tests.conditions import all_of_waitpoints
from tests.conformance.given import UNKNOWN_ID, Given
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refused,
    refuses,
    unchanged,
)
from tests.conformance.pausing import Pause, pause, paused, suspension_of, waitpoint_of

TIMEOUT_MS = 5_000

# Operators ------------------------------------------------------------------------


async def test_an_operator_resumes_whatever_the_condition_says(
    engine: Engine, given: Given
) -> None:
    taken = await paused(given, all_of_waitpoints(["a", "b"]))
    cursor = await cursor_of(engine)
    answer = await engine.resume_execution(taken.execution_id, trigger_type="operator")
    assert answer == Resumed(public_state=PublicState.WAITING)
    stored = await suspension_of(engine, taken.execution_id, taken.details.suspension_id)
    assert (stored.close_reason, stored.satisfied_at_ms) == ("resumed_by_operator", None)
    for key in "ab":
        waitpoint = await waitpoint_of(engine, taken.execution_id, taken.waitpoint(key)[0])
        assert (waitpoint.state, waitpoint.close_reason) == (
            WaitpointState.CLOSED,
            "resumed_by_operator",
        )
    (event,) = await events_since(engine, cursor)
    assert (event.category, event.event_type) == (EventCategory.OPERATOR, "resumed")
    assert json.decode(event.details or "") == {
        "suspension_id": taken.details.suspension_id,
        "trigger_type": "operator",
        "resume_delay_ms": 0,
    }
    resumed = await given.taken()
    assert resumed.attempt_id == taken.claimed.attempt_id
    assert await engine.observe_signals(resumed.handle) == ()


async def test_an_operator_may_resume_later(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    taken = await paused(given, resume_policy=ResumePolicy(resume_delay_ms=9_999))
    answer = await engine.resume_execution(taken.execution_id, resume_delay_ms=700)
    assert answer == Resumed(public_state=PublicState.DELAYED)
    execution = await execution_of(engine, taken.execution_id)
    assert execution.delay_until_ms == clock.now_ms() + 700
    clock.advance(ms=700)
    assert await run_due(engine) == {"delayed": 1}
    assert (await given.taken()).handle.kind is HandleKind.RESUMED


async def test_only_what_is_suspended_resumes(engine: Engine, given: Given) -> None:
    for state in ("waiting", "running", "completed", "parked"):
        execution_id = await given.state(state)
        async with refused(engine, ExecutionNotSuspended):
            await engine.resume_execution(execution_id)
    async with refused(engine, NotFound):
        await engine.resume_execution(UNKNOWN_ID)
    taken = await paused(given)
    async with unchanged(engine):
        asked = ("resume_execution", taken.execution_id)
        await refuses(engine, "trigger_type", *asked, trigger_type="whim")
        await refuses(engine, "resume_delay_ms", *asked, resume_delay_ms=-1)
    await engine.resume_execution(taken.execution_id)
    async with refused(engine, ExecutionNotSuspended):
        await engine.resume_execution(taken.execution_id)


# Time -----------------------------------------------------------------------------


async def timing_out(given: Given, behavior: str, **fields: object) -> Pause:
    return await paused(
        given,
        all_of_waitpoints(["a", "b"]),
        fields=fields,
        timeout_at_ms=given.clock.now_ms() + TIMEOUT_MS,
        timeout_behavior=behavior,
    )


@pytest.mark.parametrize(
    ("behavior", "outcome", "attempt_end"),
    [
        ("fail", TerminalOutcome.FAILED, AttemptLifecycle.ENDED_FAILURE),
        ("cancel", TerminalOutcome.CANCELLED, AttemptLifecycle.ENDED_CANCELLED),
        ("expire", TerminalOutcome.EXPIRED, AttemptLifecycle.ENDED_FAILURE),
    ],
)
async def test_a_pause_that_lasts_too_long_ends_the_execution(
    engine: Engine,
    given: Given,
    clock: SettableClock,
    behavior: str,
    outcome: TerminalOutcome,
    attempt_end: AttemptLifecycle,
) -> None:
    taken = await timing_out(given, behavior, policy={"retry_policy": {"max_retries": 5}})
    clock.advance(ms=TIMEOUT_MS - 1)
    async with unchanged(engine):
        assert await run_due(engine) == {}
        assert await engine.expire_suspension(taken.execution_id) == AlreadySatisfied(
            reason="not_yet_due"
        )
    cursor = await cursor_of(engine)
    clock.advance(ms=1)
    assert await engine.expire_suspension(taken.execution_id) == SuspensionExpired(
        behavior_applied=TimeoutBehavior(behavior)
    )
    execution = await execution_of(engine, taken.execution_id)
    assert (
        execution.lifecycle_phase,
        execution.terminal_outcome,
        execution.attempt_state,
        execution.failure_reason,
        execution.completed_at_ms,
        execution.current_suspension_id,
        execution.open_waitpoint_count,
    ) == (
        LifecyclePhase.TERMINAL,
        outcome,
        AttemptState.ATTEMPT_TERMINAL,
        f"suspension_timeout:{behavior}",
        clock.now_ms(),
        None,
        0,
    )
    (attempt,) = await engine.list_attempts(taken.execution_id)
    assert (attempt.attempt_state, attempt.ended_at_ms) == (attempt_end, clock.now_ms())
    stored = await suspension_of(engine, taken.execution_id, taken.details.suspension_id)
    assert stored.close_reason == f"timed_out_{behavior}"
    for key in "ab":
        waitpoint = await waitpoint_of(engine, taken.execution_id, taken.waitpoint(key)[0])
        assert waitpoint.close_reason == f"timed_out_{behavior}"
    (event,) = await events_since(engine, cursor)
    assert (event.category, event.event_type) == (EventCategory.COMPLETION, outcome)
    assert await engine.observe_signals(taken.handle) == ()
    async with unchanged(engine):
        assert await engine.expire_suspension(taken.execution_id) == AlreadySatisfied(
            reason="not_suspended_cleaned"
        )


@pytest.mark.parametrize("behavior", ["auto_resume_with_timeout_signal", "auto_resume"])
async def test_a_timeout_may_resume_with_a_signal_that_says_so(
    engine: Engine, given: Given, clock: SettableClock, behavior: str
) -> None:
    taken = await paused(
        given,
        all_of_waitpoints(["a", "b"]),
        resume_policy=ResumePolicy(resume_delay_ms=60_000),
        timeout_at_ms=clock.now_ms() + TIMEOUT_MS,
        timeout_behavior=behavior,
    )
    await taken.signal("first", key="b")
    clock.advance(ms=TIMEOUT_MS)
    cursor = await cursor_of(engine)
    assert await run_due(engine) == {"suspension_timeout": 1}
    execution = await execution_of(engine, taken.execution_id)
    assert (execution.public_state, execution.attempt_state, execution.delay_until_ms) == (
        PublicState.WAITING,
        AttemptState.ATTEMPT_INTERRUPTED,
        None,
    )
    assert await events_since(engine, cursor) == []
    resumed = await given.taken()
    signals = await engine.observe_signals(resumed.handle)
    assert [signal.signal_name for signal in signals] == ["first", "timeout"]
    timeout = signals[1]
    assert (
        timeout.signal_category,
        timeout.source_type,
        timeout.source_identity,
        timeout.payload,
        timeout.accepted_at_ms,
    ) == ("system", "system", "suspension_timeout", None, clock.now_ms())
    view = await engine.describe_suspension(taken.execution_id, taken.details.suspension_id)
    assert view is not None
    assert (view.resumed, view.close_reason) == (True, "timed_out_auto_resume")


async def test_a_timeout_may_hand_over_to_an_operator(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    taken = await timing_out(given, "escalate")
    before = await execution_of(engine, taken.execution_id)
    stored = await suspension_of(engine, taken.execution_id, taken.details.suspension_id)
    due_ms = clock.advance(ms=TIMEOUT_MS)
    assert await run_due(engine) == {"suspension_timeout": 1}
    assert await execution_of(engine, taken.execution_id) == structs.replace(
        before,
        blocking_reason=BlockingReason.PAUSED_BY_OPERATOR,
        blocking_detail=f"suspension timeout at {due_ms}: needs an operator",
        last_mutation_at_ms=due_ms,
    )
    assert await suspension_of(
        engine, taken.execution_id, taken.details.suspension_id
    ) == structs.replace(
        stored,
        reason_code=SuspensionReason.WAITING_FOR_OPERATOR_REVIEW,
        timeout_at_ms=None,
        timeout_behavior=None,
    )
    clock.advance(days=30)
    assert "suspension_timeout" not in await engine.next_due()
    assert await taken.signal(key="a") is SignalEffect.APPENDED
    assert await taken.signal(key="b") is SignalEffect.SATISFIED


async def test_what_only_its_timeout_resumes(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    taken = await paused(
        given,
        TimeoutOnly(),
        timeout_at_ms=clock.now_ms() + TIMEOUT_MS,
        timeout_behavior="auto_resume",
    )
    assert await taken.signal() is SignalEffect.APPENDED
    clock.advance(ms=TIMEOUT_MS)
    await run_due(engine)
    assert (await given.taken()).attempt_id == taken.claimed.attempt_id


async def test_a_timeout_never_touches_what_was_resumed(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    taken = await timing_out(given, "fail")
    await taken.signal(key="a")
    await taken.signal(key="b")
    resumed = await given.taken(ttl_ms=1_000_000)
    clock.advance(ms=TIMEOUT_MS)
    async with unchanged(engine):
        assert await run_due(engine) == {}
        assert await engine.expire_suspension(taken.execution_id) == AlreadySatisfied(
            reason="not_suspended_cleaned"
        )
    await engine.complete(resumed.handle)


async def test_a_missing_execution_has_no_timeout(engine: Engine, given: Given) -> None:
    assert await engine.expire_suspension(UNKNOWN_ID) == AlreadySatisfied(
        reason="not_found_cleaned"
    )
    taken = await paused(given)
    async with unchanged(engine):
        assert await engine.expire_suspension(taken.execution_id) == AlreadySatisfied(
            reason="not_yet_due"
        )


async def test_due_pauses_are_handled_in_bounded_batches(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    for _ in range(3):
        await timing_out(given, "fail")
    clock.advance(ms=TIMEOUT_MS)
    swept = await engine.expire_due_suspensions(limit=2)
    assert (swept.acted, swept.full) == (2, True)
    swept = await engine.expire_due_suspensions(limit=2)
    assert (swept.acted, swept.full) == (1, False)
    for sweep in ("expire_due_suspensions", "expire_due_waitpoints"):
        await refuses(engine, "limit", sweep, limit=0)


async def test_a_due_pause_wakes_the_reconcilers(engine: Engine, given: Given) -> None:
    claimed = await given.running(ttl_ms=100_000)
    with engine.store.hints(["due"]) as hints:
        await pause(given, claimed, timeout_at_ms=given.clock.now_ms() + 100)
        assert await hints.wait(5)
