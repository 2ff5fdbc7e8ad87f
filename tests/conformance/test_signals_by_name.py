"""Signals an operator sends to whatever an execution waits for under a name."""

import pytest

from flowfabric import Engine
from flowfabric.core.conditions import OperatorOnly
from flowfabric.core.records import SignalEffect
from flowfabric.core.signals import SignalResult
from flowfabric.core.states import PublicState
from flowfabric.errors import NotFound, TargetNotSignalable, WaitpointNotFound
from flowfabric.testing import SettableClock
from tests.conditions import all_of_waitpoints
from tests.conformance.given import UNKNOWN_ID, Given
from tests.conformance.observed import refused, refuses, unchanged
from tests.conformance.pausing import TTL_MS, create, duplicate_of, effect_of, pause, paused

SECRET = "ab" * 32


async def send(
    engine: Engine,
    execution_id: str,
    key: str = "gate",
    idempotency_key: str | None = None,
    keep: bool = True,
) -> SignalResult:
    return await engine.deliver_operator_signal(
        execution_id, key, signal_name="approved", idempotency_key=idempotency_key, keep=keep
    )


async def test_an_operator_needs_neither_token_nor_waitpoint_id(
    engine: Engine, given: Given
) -> None:
    taken = await paused(given, all_of_waitpoints(["a", "b"]))
    assert effect_of(await send(engine, taken.execution_id, "b")) is SignalEffect.APPENDED
    last = await engine.deliver_operator_signal(
        taken.execution_id, "a", signal_name="yes", payload=b"1", source_identity="ada"
    )
    assert effect_of(last) is SignalEffect.SATISFIED
    seen = await engine.observe_signals(taken.handle)
    assert [
        (each.waitpoint_key, each.signal_name, each.source_type, each.source_identity, each.payload)
        for each in seen
    ] == [("b", "approved", "operator", "", None), ("a", "yes", "operator", "ada", b"1")]


async def test_an_operator_is_heard_however_often_the_keys_were_rotated(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    taken = await paused(given)
    await engine.rotate_waitpoint_hmac_secret_all("k2", SECRET, grace_ms=0)
    clock.advance(ms=1)
    assert effect_of(await send(engine, taken.execution_id)) is SignalEffect.SATISFIED


async def test_what_is_waited_for_comes_before_what_was_made_for_later(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    await create(engine, claimed)
    await pause(given, claimed)
    assert effect_of(await send(engine, claimed.execution_id)) is SignalEffect.SATISFIED
    assert effect_of(await send(engine, claimed.execution_id)) is SignalEffect.BUFFERED


async def test_a_repeat_does_not_count_for_the_next_wait_of_the_same_name(
    engine: Engine, given: Given
) -> None:
    first = await paused(given)
    accepted = await send(engine, first.execution_id, idempotency_key="click")
    assert effect_of(accepted) is SignalEffect.SATISFIED
    again = await send(engine, first.execution_id, idempotency_key="click")
    await pause(given, await given.taken())
    later = await send(engine, first.execution_id, idempotency_key="click")
    assert duplicate_of(again) == duplicate_of(later)
    assert (await engine.observe_signals(first.handle, include_unmatched=True)) == ()
    assert await engine.read_execution_state(first.execution_id) is PublicState.SUSPENDED
    other = await send(engine, first.execution_id, idempotency_key="another click")
    assert effect_of(other) is SignalEffect.SATISFIED


async def test_a_key_under_one_name_says_nothing_about_another(
    engine: Engine, given: Given
) -> None:
    taken = await paused(given, all_of_waitpoints(["a", "b"]))
    answers = [
        await send(engine, taken.execution_id, key, idempotency_key="click") for key in ("a", "b")
    ]
    assert [effect_of(each) for each in answers] == [SignalEffect.APPENDED, SignalEffect.SATISFIED]


async def test_a_forgotten_key_is_a_new_signal(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    taken = await paused(given, OperatorOnly())
    key = taken.details.waitpoint_key

    async def click() -> SignalResult:
        return await engine.deliver_operator_signal(
            taken.execution_id, key, signal_name="x", idempotency_key="k", dedup_ttl_ms=1_000
        )

    first = effect_of(await click())
    clock.advance(ms=999)
    duplicate_of(await click())
    clock.advance(ms=1)
    assert [first, effect_of(await click())] == [SignalEffect.APPENDED] * 2
    duplicate_of(await click())


async def test_who_insists_on_being_waited_for_is_answered_with_what_is(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    async with unchanged(engine):
        with pytest.raises(WaitpointNotFound, match="it waits for no signal"):
            await send(engine, claimed.execution_id, keep=False)
    await create(engine, claimed)
    clock.advance(ms=TTL_MS)
    async with refused(engine, WaitpointNotFound):
        await send(engine, claimed.execution_id, keep=False)
    taken = await paused(given)
    async with unchanged(engine):
        with pytest.raises(WaitpointNotFound, match=r"does not wait for 'other' now: .* 'gate'"):
            await send(engine, taken.execution_id, "other", keep=False)
    await engine.cancel_execution(taken.execution_id, reason="enough")
    for keep, error in ((False, WaitpointNotFound), (True, TargetNotSignalable)):
        async with refused(engine, error):
            await send(engine, taken.execution_id, keep=keep)
    async with refused(engine, NotFound):
        await send(engine, UNKNOWN_ID)


async def test_every_field_of_an_operators_signal_is_checked(engine: Engine, given: Given) -> None:
    taken = await paused(given)
    operation = "deliver_operator_signal"
    async with unchanged(engine):
        await refuses(engine, "execution_id", operation, "x", "gate", signal_name="x")
        for key in ("", 7, "x" * 257):
            await refuses(
                engine, "waitpoint_key", operation, taken.execution_id, key, signal_name="x"
            )
        for name in ("", None):
            await refuses(
                engine, "signal_name", operation, taken.execution_id, "gate", signal_name=name
            )
