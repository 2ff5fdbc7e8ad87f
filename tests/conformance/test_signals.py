"""Signals: what one does to the execution it is delivered to."""

import pytest
from msgspec import json, structs

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
from flowfabric.core.events import Event, EventCategory
from flowfabric.core.handles import HandleKind
from flowfabric.core.limits import SIGNAL_PAYLOAD_BYTES_MAX
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
from flowfabric.engine.suspension_reads import ResumeSignal
from flowfabric.errors import (
    InvalidInput,
    InvalidToken,
    NotFound,
    PayloadTooLarge,
    SignalLimitExceeded,
    TargetNotSignalable,
    WaitpointClosed,
)
from flowfabric.reconcilers.supervisor import run_due
from flowfabric.testing import SettableClock
from tests.conformance.given import UNKNOWN_ID, WORKER, Given
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refused,
    refuses,
    unchanged,
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


# Limits -------------------------------------------------------------------------


async def test_an_execution_accepts_as_many_signals_as_its_policy_allows(
    engine: Engine, given: Given
) -> None:
    pause = await paused(given, OperatorOnly(), fields={"policy": {"max_signals_per_execution": 2}})
    await pause.signal()
    answer = await engine.deliver_signal(
        pause.execution_id,
        pause.waitpoint_id,
        waitpoint_token=pause.token,
        signal_name="x",
        idempotency_key="k",
    )
    async with refused(engine, SignalLimitExceeded):
        await engine.deliver_signal(
            pause.execution_id, pause.waitpoint_id, waitpoint_token=pause.token, signal_name="x"
        )
    again = await engine.deliver_signal(
        pause.execution_id,
        pause.waitpoint_id,
        waitpoint_token=pause.token,
        signal_name="x",
        idempotency_key="k",
    )
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
        await engine.deliver_signal(
            pause.execution_id,
            pause.waitpoint_id,
            waitpoint_token=pause.token,
            signal_name="approved",
            payload=payload + b"x",
        )
    await engine.deliver_signal(
        pause.execution_id,
        pause.waitpoint_id,
        waitpoint_token=pause.token,
        signal_name="approved",
        payload=payload,
    )
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


# What subscribers and the worker see ----------------------------------------------


async def test_each_delivery_is_one_event(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    execution = await execution_of(engine, pause.execution_id)
    cursor = await cursor_of(engine)
    ids = []
    for name in ("other", "approved"):
        answer = await engine.deliver_signal(
            pause.execution_id,
            pause.waitpoint_id,
            waitpoint_token=pause.token,
            signal_name=name,
            source_identity="alice",
        )
        assert isinstance(answer, SignalAccepted)
        ids.append(answer.signal_id)

    def event(effect: str, signal_id: str) -> Event:
        details = {
            "signal_id": signal_id,
            "waitpoint_id": pause.waitpoint_id,
            "source_identity": "alice",
            "effect": effect,
        }
        return Event(
            category=EventCategory.SIGNAL,
            event_type=effect,
            partition_key=execution.partition_key,
            execution_id=pause.execution_id,
            attempt_index=0,
            details=json.encode(details).decode(),
            namespace=execution.namespace,
            occurred_at_ms=given.clock.now_ms(),
        )

    assert await events_since(engine, cursor) == [
        event("appended_to_waitpoint", ids[0]),
        event("satisfied", ids[1]),
    ]


async def test_the_worker_sees_the_signals_that_resumed_it_in_order(
    engine: Engine, given: Given
) -> None:
    both = AllOf((Single("gate", ByName("alpha")), Single("gate", ByName("beta"))))
    pause = await paused(given, both)
    await pause.signal("noise")
    first = await engine.deliver_signal(
        pause.execution_id,
        pause.waitpoint_id,
        waitpoint_token=pause.token,
        signal_name="beta",
        signal_category="answer",
        source_type="human",
        source_identity="alice",
        payload=b"\x00\xff",
        payload_encoding="binary",
        correlation_id="ticket-1",
    )
    assert isinstance(first, SignalAccepted)
    await pause.signal("beta")
    assert await engine.observe_signals(pause.handle) == ()
    await pause.signal("alpha")
    resumed = await given.taken()
    signals = await engine.observe_signals(resumed.handle)
    assert [signal.signal_name for signal in signals] == ["beta", "alpha"]
    assert signals[0] == ResumeSignal(
        signal_id=first.signal_id,
        signal_name="beta",
        signal_category="answer",
        waitpoint_key=pause.details.waitpoint_key,
        source_type="human",
        source_identity="alice",
        correlation_id="ticket-1",
        accepted_at_ms=given.clock.now_ms(),
        payload=b"\x00\xff",
        payload_encoding="binary",
        effect=APPENDED,
        matched=True,
    )
    assert await engine.observe_signals(pause.handle) == signals
    everything = await engine.observe_signals(resumed.handle, include_unmatched=True)
    assert [signal.signal_name for signal in everything] == ["noise", "beta", "beta", "alpha"]


async def test_an_attempt_that_was_never_suspended_has_no_signals(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    assert await engine.observe_signals(claimed.handle) == ()


async def test_signals_of_an_earlier_attempt_are_not_shown(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    await pause.signal()
    resumed = await given.taken()
    await engine.revoke_lease(resumed.execution_id, reason="drain")
    reclaimed = await given.taken()
    assert reclaimed.attempt_index == 1
    assert await engine.observe_signals(reclaimed.handle) == ()
    assert len(await engine.observe_signals(resumed.handle)) == 1


async def test_a_pause_can_be_looked_up_by_its_id_from_any_attempt(
    engine: Engine, given: Given
) -> None:
    pause = await paused(given, continuation_metadata_pointer="step 2")
    view = await engine.describe_suspension(pause.execution_id, pause.details.suspension_id)
    assert view is not None
    assert (view.is_open, view.resumed, view.signals) == (True, False, ())
    await pause.signal()
    resumed = await given.taken()
    await engine.revoke_lease(resumed.execution_id, reason="drain")
    await given.taken()
    after = await engine.describe_suspension(pause.execution_id, pause.details.suspension_id)
    assert after is not None
    assert (after.is_open, after.resumed, after.close_reason) == (False, True, "resumed")
    assert [signal.signal_name for signal in after.signals] == ["approved"]
    assert after.continuation_metadata_pointer == "step 2"
    assert await engine.describe_suspension(pause.execution_id, new_id()) is None


async def test_the_last_pause_of_an_attempt_is_the_one_observed(
    engine: Engine, given: Given
) -> None:
    pause_one = await paused(given)
    await pause_one.signal(source="one")
    pause_two = await pause(given, await given.taken())
    assert await engine.observe_signals(pause_two.handle) == ()
    await pause_two.signal(source="two")
    (signal,) = await engine.observe_signals((await given.taken()).handle)
    assert signal.source_identity == "two"


# Operators ----------------------------------------------------------------------


async def test_an_approval_needs_no_token(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    rejected = await engine.deliver_approval_signal(
        pause.execution_id, pause.waitpoint_id, signal_name="rejected", idempotency_suffix="1"
    )
    approved = await engine.deliver_approval_signal(
        pause.execution_id,
        pause.waitpoint_id,
        signal_name="approved",
        idempotency_suffix="1",
        lane_id="default",
        operator_identity="olga",
    )
    assert (effect_of(rejected), effect_of(approved)) == (APPENDED, SATISFIED)
    again = await engine.deliver_approval_signal(
        pause.execution_id, pause.waitpoint_id, signal_name="approved", idempotency_suffix="1"
    )
    assert isinstance(approved, SignalAccepted)
    assert duplicate_of(again) == approved.signal_id
    (signal,) = await engine.observe_signals(pause.handle)
    assert (
        signal.signal_category,
        signal.source_type,
        signal.source_identity,
        signal.payload,
    ) == ("approval", "operator", "olga", None)


async def test_two_operators_are_two_sources(engine: Engine, given: Given) -> None:
    two = Count(2, CountKind.DISTINCT_SOURCES, ("gate",), ByName("approved"))
    pause = await paused(given, two)
    effects = [
        effect_of(
            await engine.deliver_approval_signal(
                pause.execution_id,
                pause.waitpoint_id,
                signal_name="approved",
                idempotency_suffix=f"{number}",
                operator_identity=who,
            )
        )
        for number, who in enumerate(("olga", "olga", "omar"))
    ]
    assert effects == [APPENDED, DUPLICATE, SATISFIED]


async def test_an_operator_is_told_what_does_not_exist(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    async with unchanged(engine):
        with pytest.raises(NotFound) as caught:
            await engine.deliver_approval_signal(
                UNKNOWN_ID, pause.waitpoint_id, signal_name="approved", idempotency_suffix="1"
            )
        assert caught.value.entity == "execution"
        with pytest.raises(NotFound) as caught:
            await engine.deliver_approval_signal(
                pause.execution_id, new_id(), signal_name="approved", idempotency_suffix="1"
            )
        assert caught.value.entity == "waitpoint"
        with pytest.raises(InvalidInput) as wrong_lane:
            await engine.deliver_approval_signal(
                pause.execution_id,
                pause.waitpoint_id,
                signal_name="approved",
                idempotency_suffix="1",
                lane_id="other",
            )
        assert wrong_lane.value.problem.startswith("lane_mismatch:")


async def test_every_field_of_an_approval_is_checked(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    base: dict[str, object] = {"signal_name": "approved", "idempotency_suffix": "1"}
    bad: list[tuple[str, dict[str, object]]] = [
        ("signal_name", {"signal_name": ""}),
        ("idempotency_suffix", {"idempotency_suffix": None}),
        ("lane_id", {"lane_id": ""}),
        ("source_identity", {"operator_identity": 1}),
        ("dedup_ttl_ms", {"signal_dedup_ttl_ms": -1}),
    ]
    async with unchanged(engine):
        for field, arguments in bad:
            await refuses(
                engine,
                field,
                "deliver_approval_signal",
                pause.execution_id,
                pause.waitpoint_id,
                **base | arguments,
            )


async def test_an_approval_works_after_the_key_is_gone(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    pause = await paused(given)
    await engine.rotate_waitpoint_hmac_secret_all("k2", "ab" * 32, grace_ms=0)
    clock.advance(ms=1)
    with pytest.raises(InvalidToken):
        await pause.signal()
    answer = await engine.deliver_approval_signal(
        pause.execution_id, pause.waitpoint_id, signal_name="approved", idempotency_suffix="1"
    )
    assert effect_of(answer) is SATISFIED
