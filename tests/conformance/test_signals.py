"""Signals: what one does to the execution it is delivered to."""

from msgspec import structs

from flowfabric import Engine
from flowfabric.core.conditions import (
    AllOf,
    ByName,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    all_of_waitpoints,
)
from flowfabric.core.events import EventCategory
from flowfabric.core.handles import HandleKind
from flowfabric.core.signals import SignalAccepted
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    PublicState,
)
from flowfabric.core.suspend_request import ResumePolicy
from flowfabric.core.suspension_model import SignalEffect, WaitpointState
from flowfabric.errors import (
    TargetNotSignalable,
    WaitpointClosed,
)
from flowfabric.reconcilers.supervisor import run_due
from flowfabric.testing import SettableClock
from tests.conformance.given import WORKER, Given
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refused,
)
from tests.conformance.pausing import (
    duplicate_of,
    effect_of,
    new_id,
    pause,
    paused,
    suspension_of,
    waitpoint_of,
)

SATISFIED = SignalEffect.SATISFIED
APPENDED = SignalEffect.APPENDED
DUPLICATE = SignalEffect.APPENDED_DUPLICATE
FAILED = SignalEffect.MATCHER_FAILED


async def test_a_matching_signal_makes_the_execution_ready_again(
    engine: Engine, given: Given
) -> None:
    pause = await paused(given)
    before = await execution_of(engine, pause.execution_id)
    given.clock.advance(ms=10)
    now_ms = given.clock.now_ms()
    assert await pause.signal() is SATISFIED
    assert await execution_of(engine, pause.execution_id) == structs.replace(
        before,
        lifecycle_phase=LifecyclePhase.RUNNABLE,
        eligibility_state=EligibilityState.ELIGIBLE_NOW,
        blocking_reason=BlockingReason.WAITING_FOR_WORKER,
        blocking_detail="",
        attempt_state=AttemptState.ATTEMPT_INTERRUPTED,
        public_state=PublicState.WAITING,
        ready=True,
        current_suspension_id=None,
        current_waitpoint_id=None,
        open_waitpoint_count=0,
        signal_count=1,
        last_transition_at_ms=now_ms,
        last_mutation_at_ms=now_ms,
    )
    stored = await suspension_of(engine, pause.execution_id, pause.details.suspension_id)
    assert (stored.satisfied_at_ms, stored.closed_at_ms, stored.close_reason) == (
        now_ms,
        now_ms,
        "resumed",
    )
    waitpoint = await waitpoint_of(engine, pause.execution_id, pause.waitpoint_id)
    assert (
        waitpoint.state,
        waitpoint.close_reason,
        waitpoint.satisfied_at_ms,
        waitpoint.signal_count,
        waitpoint.matched_signal_count,
        waitpoint.last_signal_at_ms,
    ) == (WaitpointState.CLOSED, "resumed", now_ms, 1, 1, now_ms)


async def test_resumed_work_continues_its_attempt_under_a_new_lease(
    engine: Engine, given: Given
) -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 10_000}}
    pause = await paused(given, fields={"policy": policy})
    given.clock.advance(hours=1)
    await pause.signal()
    resumed = await given.taken()
    first = pause.claimed
    assert (resumed.handle.kind, resumed.attempt_id, resumed.attempt_index) == (
        HandleKind.RESUMED,
        first.attempt_id,
        0,
    )
    assert resumed.lease_epoch == first.lease_epoch + 1
    assert resumed.attempt_deadline_ms == given.clock.now_ms() + 10_000
    (attempt,) = await engine.list_attempts(pause.execution_id)
    assert (attempt.attempt_state, attempt.resumed_at_ms, attempt.suspension_id) == (
        AttemptLifecycle.STARTED,
        given.clock.now_ms(),
        None,
    )
    await engine.complete(resumed.handle, b"done")
    assert await engine.get_execution_result(pause.execution_id) == b"done"


async def test_a_signal_that_does_not_match_is_appended_and_the_execution_waits_on(
    engine: Engine, given: Given
) -> None:
    pause = await paused(given)
    assert await pause.signal("rejected") is APPENDED
    assert await engine.read_execution_state(pause.execution_id) is PublicState.SUSPENDED
    waitpoint = await waitpoint_of(engine, pause.execution_id, pause.waitpoint_id)
    assert (waitpoint.signal_count, waitpoint.matched_signal_count) == (1, 0)
    assert await pause.signal("approved") is SATISFIED


async def test_names_are_compared_exactly(given: Given) -> None:
    pause = await paused(given)
    for name in ("Approved", "approved ", "approve", "approvedd"):
        assert await pause.signal(name) is APPENDED


async def test_any_name_will_do_without_a_matcher(given: Given) -> None:
    pause = await paused(given, Single("gate"))
    assert await pause.signal("whatever") is SATISFIED


async def test_no_signal_resumes_what_waits_for_an_operator(given: Given) -> None:
    pause = await paused(given, OperatorOnly())
    assert await pause.signal() is APPENDED
    assert await pause.signal("__operator_only__") is APPENDED


async def test_waiting_workers_are_woken(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    with engine.store.hints(["ready:default", "signal"]) as hints:
        await pause.signal()
        assert await hints.wait(5)


# Delays -------------------------------------------------------------------------


async def test_a_resume_delay_is_waited_for(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    pause = await paused(given, resume_policy=ResumePolicy(resume_delay_ms=3_000))
    assert await pause.signal() is SATISFIED
    execution = await execution_of(engine, pause.execution_id)
    assert (
        execution.public_state,
        execution.blocking_reason,
        execution.delay_until_ms,
        execution.blocking_detail,
    ) == (
        PublicState.DELAYED,
        BlockingReason.WAITING_FOR_RESUME_DELAY,
        clock.now_ms() + 3_000,
        "resumes after 3000 ms (signal approved)",
    )
    assert await engine.claim(**WORKER) is None
    clock.advance(ms=2_999)
    await run_due(engine)
    assert await engine.claim(**WORKER) is None
    clock.advance(ms=1)
    assert (await run_due(engine))["delayed"] == 1
    assert (await given.taken()).attempt_id == pause.claimed.attempt_id


# Conditions over several signals ------------------------------------------------


async def test_all_of_two_names_on_one_waitpoint(given: Given) -> None:
    both = AllOf((Single("gate", ByName("alpha")), Single("gate", ByName("beta"))))
    pause = await paused(given, both)
    assert await pause.signal("alpha") is APPENDED
    assert await pause.signal("alpha") is DUPLICATE
    assert await pause.signal("gamma") is FAILED
    assert await pause.signal("beta") is SATISFIED


async def test_all_of_three_waitpoints_each_with_its_own_token(given: Given) -> None:
    pause = await paused(given, all_of_waitpoints(["a", "b", "c"]))
    assert await pause.signal(key="c") is APPENDED
    assert await pause.signal(key="a") is APPENDED
    assert await pause.signal(key="b") is SATISFIED


async def test_resuming_closes_every_waitpoint_of_the_pause(engine: Engine, given: Given) -> None:
    anyone = Count(1, CountKind.DISTINCT_WAITPOINTS, ("a", "b", "c"))
    pause = await paused(given, anyone)
    assert await pause.signal(key="c") is SATISFIED
    for key in "abc":
        waitpoint_id, token = pause.waitpoint(key)
        waitpoint = await waitpoint_of(engine, pause.execution_id, waitpoint_id)
        assert (waitpoint.state, waitpoint.close_reason) == (WaitpointState.CLOSED, "resumed")
        async with refused(engine, WaitpointClosed):
            await engine.deliver_signal(
                pause.execution_id, waitpoint_id, waitpoint_token=token, signal_name="late"
            )


async def test_distinct_sources_are_counted_once_each(given: Given) -> None:
    two = Count(2, CountKind.DISTINCT_SOURCES, ("gate",))
    pause = await paused(given, two)
    assert await pause.signal(source="alice") is APPENDED
    assert await pause.signal(source="alice") is DUPLICATE
    assert await pause.signal(source="bob") is SATISFIED


async def test_a_source_is_its_type_and_its_name(engine: Engine, given: Given) -> None:
    two = Count(2, CountKind.DISTINCT_SOURCES, ("gate",))
    pause = await paused(given, two)
    effects = [
        effect_of(
            await engine.deliver_signal(
                pause.execution_id,
                pause.waitpoint_id,
                waitpoint_token=pause.token,
                signal_name="x",
                source_type=source_type,
                source_identity=identity,
            )
        )
        for source_type, identity in [("a:b", "c"), ("a", "b:c")]
    ]
    assert effects == [APPENDED, SATISFIED]


async def test_distinct_signals_are_counted_by_their_id(given: Given) -> None:
    pause = await paused(given, Count(2, CountKind.DISTINCT_SIGNALS, ("gate",)))
    assert await pause.signal() is APPENDED
    assert await pause.signal() is SATISFIED


async def test_a_count_looks_through_its_own_matcher(given: Given) -> None:
    approvals = Count(1, CountKind.DISTINCT_SOURCES, ("gate",), ByName("approve"))
    pause = await paused(given, approvals)
    assert await pause.signal("reject") is FAILED
    assert await pause.signal("approve") is SATISFIED


async def test_two_counts_do_not_satisfy_each_other(given: Given) -> None:
    both = AllOf(
        (
            Count(1, CountKind.DISTINCT_SOURCES, ("a",), ByName("yes")),
            Count(1, CountKind.DISTINCT_SOURCES, ("b",), ByName("yes")),
        )
    )
    pause = await paused(given, both)
    assert await pause.signal("yes", key="a", source="alice") is APPENDED
    assert await pause.signal("yes", key="a", source="bob") is APPENDED
    assert await pause.signal("yes", key="b", source="alice") is SATISFIED


async def test_a_count_three_levels_down_is_met(given: Given) -> None:
    deep = AllOf((AllOf((AllOf((Count(2, CountKind.DISTINCT_SIGNALS, ("gate",)),)),)),))
    pause = await paused(given, deep)
    assert await pause.signal() is APPENDED
    assert await pause.signal() is SATISFIED


# Repeats ------------------------------------------------------------------------


async def test_a_repeat_is_told_which_signal_was_first(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    first = await engine.deliver_signal(
        pause.execution_id,
        pause.waitpoint_id,
        waitpoint_token=pause.token,
        signal_name="approved",
        idempotency_key="click-1",
    )
    assert isinstance(first, SignalAccepted)
    assert first.resumed
    cursor = await cursor_of(engine)
    before = await execution_of(engine, pause.execution_id)
    again = await engine.deliver_signal(
        pause.execution_id,
        pause.waitpoint_id,
        waitpoint_token=pause.token,
        signal_name="approved",
        idempotency_key="click-1",
    )
    assert duplicate_of(again) == first.signal_id
    assert await execution_of(engine, pause.execution_id) == before
    (event,) = await events_since(engine, cursor)
    assert (event.category, event.event_type) == (EventCategory.SIGNAL, "deduped")


async def test_the_same_signal_id_is_accepted_once(engine: Engine, given: Given) -> None:
    pause = await paused(given, OperatorOnly())
    signal_id = new_id()
    answers = [
        await engine.deliver_signal(
            pause.execution_id,
            pause.waitpoint_id,
            waitpoint_token=pause.token,
            signal_name="x",
            signal_id=signal_id,
        )
        for _ in range(2)
    ]
    assert effect_of(answers[0]) is APPENDED
    assert duplicate_of(answers[1]) == signal_id
    assert (await execution_of(engine, pause.execution_id)).signal_count == 1


async def test_an_idempotency_key_is_forgotten_after_its_time(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    pause = await paused(given, OperatorOnly())

    async def deliver() -> object:
        return await engine.deliver_signal(
            pause.execution_id,
            pause.waitpoint_id,
            waitpoint_token=pause.token,
            signal_name="x",
            idempotency_key="k",
            dedup_ttl_ms=1_000,
        )

    await deliver()
    clock.advance(ms=999)
    assert not isinstance(await deliver(), SignalAccepted)
    clock.advance(ms=1)
    assert isinstance(await deliver(), SignalAccepted)
    assert not isinstance(await deliver(), SignalAccepted)


async def test_a_dedup_time_of_zero_remembers_nothing(engine: Engine, given: Given) -> None:
    pause = await paused(given, OperatorOnly())
    for _ in range(2):
        answer = await engine.deliver_signal(
            pause.execution_id,
            pause.waitpoint_id,
            waitpoint_token=pause.token,
            signal_name="x",
            idempotency_key="k",
            dedup_ttl_ms=0,
        )
        assert effect_of(answer) is APPENDED


async def test_one_key_at_two_waitpoints_is_two_keys(engine: Engine, given: Given) -> None:
    pause = await paused(given, all_of_waitpoints(["a", "b"]))
    for key in "ab":
        waitpoint_id, token = pause.waitpoint(key)
        answer = await engine.deliver_signal(
            pause.execution_id,
            waitpoint_id,
            waitpoint_token=token,
            signal_name="x",
            idempotency_key="k",
        )
        assert isinstance(answer, SignalAccepted)


# What no longer takes signals ---------------------------------------------------


async def test_an_old_token_cannot_resume_a_later_pause(engine: Engine, given: Given) -> None:
    first = await paused(given)
    await engine.resume_execution(first.execution_id, trigger_type="operator")
    second = await pause(given, await given.taken())
    async with refused(engine, WaitpointClosed):
        await engine.deliver_signal(
            first.execution_id,
            first.waitpoint_id,
            waitpoint_token=first.token,
            signal_name="approved",
        )
    assert await engine.read_execution_state(first.execution_id) is PublicState.SUSPENDED
    assert await second.signal() is SATISFIED


async def test_a_signal_never_revives_what_was_cancelled(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    await engine.cancel_execution(pause.execution_id, reason="enough")
    async with refused(engine, TargetNotSignalable):
        await engine.deliver_signal(
            pause.execution_id,
            pause.waitpoint_id,
            waitpoint_token=pause.token,
            signal_name="approved",
        )
