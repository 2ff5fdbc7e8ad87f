"""Signals: what one does to the execution it is delivered to."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.bounds import SIGNAL_PAYLOAD_BYTES_MAX
from flowfabric.core.conditions import OperatorOnly, Single
from flowfabric.core.events import EventCategory
from flowfabric.core.handles import HandleKind
from flowfabric.core.records import WaitpointState
from flowfabric.core.resumption import ResumePolicy
from flowfabric.core.signals import SignalAccepted, SignalResult
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    PublicState,
)
from flowfabric.errors import (
    PayloadTooLarge,
    SignalLimitExceeded,
    TargetNotSignalable,
    WaitpointClosed,
)
from flowfabric.reconcilers import run_due
from flowfabric.testing import SettableClock
from tests.conditions import all_of_waitpoints
from tests.conformance.given import WORKER, Given
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refused,
    refuses,
    unchanged,
)
from tests.conformance.pausing import (
    APPENDED,
    SATISFIED,
    duplicate_of,
    effect_of,
    new_id,
    pause,
    paused,
    suspension_of,
    waitpoint_of,
)


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


# Repeats ------------------------------------------------------------------------


async def test_a_repeat_is_told_which_signal_was_first(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    first = await pause.deliver(idempotency_key="click-1")
    assert isinstance(first, SignalAccepted)
    assert first.resumed
    cursor = await cursor_of(engine)
    before = await execution_of(engine, pause.execution_id)
    again = await pause.deliver(idempotency_key="click-1")
    assert duplicate_of(again) == first.signal_id
    assert await execution_of(engine, pause.execution_id) == before
    (event,) = await events_since(engine, cursor)
    assert (event.category, event.event_type) == (EventCategory.SIGNAL, "deduped")


async def test_the_same_signal_id_is_accepted_once(engine: Engine, given: Given) -> None:
    pause = await paused(given, OperatorOnly())
    signal_id = new_id()
    answers = [await pause.deliver("x", signal_id=signal_id) for _ in range(2)]
    assert effect_of(answers[0]) is APPENDED
    assert duplicate_of(answers[1]) == signal_id
    assert (await execution_of(engine, pause.execution_id)).signal_count == 1


async def test_an_idempotency_key_is_forgotten_after_its_time(
    given: Given, clock: SettableClock
) -> None:
    pause = await paused(given, OperatorOnly())

    async def deliver() -> object:
        return await pause.deliver("x", idempotency_key="k", dedup_ttl_ms=1_000)

    await deliver()
    clock.advance(ms=999)
    assert not isinstance(await deliver(), SignalAccepted)
    clock.advance(ms=1)
    assert isinstance(await deliver(), SignalAccepted)
    assert not isinstance(await deliver(), SignalAccepted)


@pytest.mark.parametrize("by_name", [True, False])
async def test_an_idempotency_key_holds_as_long_as_its_execution_exists(
    engine: Engine, given: Given, clock: SettableClock, by_name: bool
) -> None:
    """A repeat never counts for the next wait of the same name, however late it comes."""
    pause_one = await paused(given, Single("gate"))

    async def click() -> SignalResult:
        if by_name:
            return await engine.deliver_operator_signal(
                pause_one.execution_id, "gate", signal_name="gate", idempotency_key="click"
            )
        return await pause_one.deliver("gate", idempotency_key="click")

    first = await click()
    assert isinstance(first, SignalAccepted)
    await pause(given, await given.taken(), Single("gate"))
    clock.advance(ms=400 * 24 * 60 * 60 * 1_000)
    assert duplicate_of(await click()) == first.signal_id
    await engine.cancel_execution(pause_one.execution_id, reason="enough")
    await engine.replay_execution(pause_one.execution_id)
    assert duplicate_of(await click()) == first.signal_id


async def test_a_dedup_time_of_zero_remembers_nothing(given: Given) -> None:
    pause = await paused(given, OperatorOnly())
    for _ in range(2):
        answer = await pause.deliver("x", idempotency_key="k", dedup_ttl_ms=0)
        assert effect_of(answer) is APPENDED


async def test_one_key_at_two_waitpoints_is_two_keys(given: Given) -> None:
    pause = await paused(given, all_of_waitpoints(["a", "b"]))
    for key in "ab":
        answer = await pause.deliver("x", key=key, idempotency_key="k")
        assert isinstance(answer, SignalAccepted)


# Limits -------------------------------------------------------------------------


async def test_an_execution_accepts_as_many_signals_as_its_policy_allows(
    engine: Engine, given: Given
) -> None:
    pause = await paused(given, OperatorOnly(), fields={"policy": {"max_signals_per_execution": 2}})
    await pause.signal()
    answer = await pause.deliver("x", idempotency_key="k")
    async with refused(engine, SignalLimitExceeded):
        await pause.deliver("x")
    again = await pause.deliver("x", idempotency_key="k")
    assert isinstance(answer, SignalAccepted)
    assert duplicate_of(again) == answer.signal_id


async def test_a_policy_of_zero_sets_no_limit(given: Given) -> None:
    pause = await paused(given, OperatorOnly(), fields={"policy": {"max_signals_per_execution": 0}})
    for _ in range(3):
        assert await pause.signal() is APPENDED


async def test_payloads_are_bytes_up_to_a_limit(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    payload = bytes(range(256)) * (SIGNAL_PAYLOAD_BYTES_MAX // 256)
    async with refused(engine, PayloadTooLarge):
        await pause.deliver(payload=payload + b"x")
    await pause.deliver(payload=payload)
    (signal,) = await engine.observe_signals(pause.handle)
    assert signal.payload == payload


async def test_every_field_of_a_signal_is_checked(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    bad: list[tuple[str, dict[str, object]]] = [
        ("signal_name", {"signal_name": ""}),
        ("signal_name", {"signal_name": 7}),
        ("signal_name", {"signal_name": "x" * 257}),
        ("signal_id", {"signal_id": "mine"}),
        ("signal_category", {"signal_category": None}),
        ("source_type", {"source_type": "\x00"}),
        ("source_identity", {"source_identity": "x" * 257}),
        ("payload", {"payload": "text"}),
        ("payload_encoding", {"payload_encoding": 1}),
        ("correlation_id", {"correlation_id": "x" * 257}),
        ("idempotency_key", {"idempotency_key": "x" * 513}),
        ("target_scope", {"target_scope": []}),
        ("created_at_ms", {"created_at_ms": -1}),
        ("dedup_ttl_ms", {"dedup_ttl_ms": -1}),
        ("waitpoint_token", {"waitpoint_token": None}),
        ("waitpoint_token", {"waitpoint_token": b"k1:00"}),
    ]
    base: dict[str, object] = {"waitpoint_token": pause.token, "signal_name": "approved"}
    async with unchanged(engine):
        for field, arguments in bad:
            await refuses(
                engine,
                field,
                "deliver_signal",
                pause.execution_id,
                pause.waitpoint_id,
                **base | arguments,
            )
        await refuses(engine, "execution_id", "deliver_signal", "x", pause.waitpoint_id, **base)
        await refuses(engine, "waitpoint_id", "deliver_signal", pause.execution_id, "x", **base)


# What no longer takes signals ---------------------------------------------------


async def test_an_old_token_cannot_resume_a_later_pause(engine: Engine, given: Given) -> None:
    first = await paused(given)
    await engine.resume_execution(first.execution_id, trigger_type="operator")
    second = await pause(given, await given.taken())
    async with refused(engine, WaitpointClosed):
        await first.deliver()
    assert await engine.read_execution_state(first.execution_id) is PublicState.SUSPENDED
    assert await second.signal() is SATISFIED


async def test_a_signal_never_revives_what_was_cancelled(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    await engine.cancel_execution(pause.execution_id, reason="enough")
    async with refused(engine, TargetNotSignalable):
        await pause.deliver()
