"""What subscribers and workers see of signals, and what operators send."""

import pytest
from msgspec import json

from flowfabric import Engine
from flowfabric.core.conditions import AllConditions, ByName, Count, CountKind, Single
from flowfabric.core.events import Event, EventCategory
from flowfabric.core.records import SignalEffect
from flowfabric.core.signals import SignalAccepted
from flowfabric.core.steps import NewStep
from flowfabric.engine.steps import StepReport
from flowfabric.engine.waitpoints import PastRuns, ResumeSignal, claimed_progress
from flowfabric.errors import InvalidInput, InvalidToken, NotFound
from flowfabric.testing import SettableClock
from tests.conformance.given import UNKNOWN_ID, Given
from tests.conformance.observed import cursor_of, events_since, execution_of, refuses, unchanged
from tests.conformance.pausing import duplicate_of, effect_of, new_id, pause, paused

SATISFIED = SignalEffect.SATISFIED
APPENDED = SignalEffect.APPENDED
DUPLICATE = SignalEffect.APPENDED_DUPLICATE
FAILED = SignalEffect.MATCHER_FAILED

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


async def test_deliveries_are_read_on_from_where_a_reader_was(engine: Engine, given: Given) -> None:
    tagged: dict[str, object] = {"namespace": "shop", "tags": {"cairn.instance_id": "i-1"}}
    pause = await paused(given, fields=tagged)
    start = await cursor_of(engine)
    for name in ("first", "second"):
        await pause.signal(name)
    one = await engine.read_events(after=start, category="signal", limit=1)
    rest = await engine.read_events(after=one.cursor, category="signal")
    seen = [*one.events, *rest.events]
    assert len({start, one.cursor, rest.cursor}) == 3
    assert [(len(one.events), len(rest.events))] == [(1, 1)]
    assert {(each.namespace, each.instance_tag) for each in seen} == {("shop", "i-1")}
    tail = await engine.read_events(after=rest.cursor, category="signal")
    assert (tail.events, tail.cursor) == ((), rest.cursor)


async def test_the_worker_sees_the_signals_that_resumed_it_in_order(
    engine: Engine, given: Given
) -> None:
    both = AllConditions((Single("gate", ByName("alpha")), Single("gate", ByName("beta"))))
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


async def test_the_next_run_finds_steps_and_the_last_pause_together(
    engine: Engine, given: Given
) -> None:
    first = await paused(given)
    assert await engine.read_progress(first.execution_id) == PastRuns(
        pause=await engine.describe_suspension(first.execution_id, first.details.suspension_id)
    )
    await first.signal()
    again = await given.taken()
    steps = [
        StepReport(handle=again.handle, step=NewStep(step_key=key, after_key=after, result=b"1"))
        for key, after in (("two", "one"), ("one", None))
    ]
    assert not any(isinstance(each, Exception) for each in await engine.record_steps(steps))
    both = Count(n=2, count_kind=CountKind.DISTINCT_SIGNALS, waitpoints=("gate",))
    last = await pause(given, again, both)
    for name in ("approved", "approved too"):
        await engine.deliver_operator_signal(
            again.execution_id, "gate", signal_name=name, payload=name.encode()
        )
    progress = await engine.read_progress(again.execution_id)
    assert progress == PastRuns(
        steps=await engine.list_steps(again.execution_id),
        pause=await engine.describe_suspension(again.execution_id, last.details.suspension_id),
    )
    assert [step.step_key for step in progress.steps] == ["one", "two"]
    assert progress.pause is not None
    assert [each.payload for each in progress.pause.signals] == [b"approved", b"approved too"]
    told = (await given.taken()).progress
    assert told is None or claimed_progress(told) == progress


async def test_an_execution_that_has_nothing_behind_it_has_no_progress(
    engine: Engine, given: Given
) -> None:
    assert await engine.read_progress((await given.running()).execution_id) == PastRuns()


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


async def test_a_rejection_resumes_where_the_condition_takes_it(
    engine: Engine, given: Given
) -> None:
    pause = await paused(given, Single("gate"))
    rejected = await engine.deliver_approval_signal(
        pause.execution_id, pause.waitpoint_id, signal_name="rejected", idempotency_suffix="1"
    )
    assert effect_of(rejected) is SATISFIED
    (signal,) = await engine.observe_signals(pause.handle)
    assert signal.signal_name == "rejected"


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
