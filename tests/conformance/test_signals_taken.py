"""Signals that a worker takes while it works."""

import pytest

from flowfabric import Engine
from flowfabric.core.conditions import ByName, Single
from flowfabric.core.diagnosis import Cause
from flowfabric.core.records import SignalEffect
from flowfabric.core.waitpoints import ANNOUNCED_FOR_MS
from flowfabric.engine.signals import kept_topic
from flowfabric.engine.suspensions import SuspendSatisfied
from flowfabric.errors import LeaseConflict, WaitpointClosed, WaitpointNotFound
from flowfabric.testing import SettableClock
from tests.conformance.given import Given
from tests.conformance.observed import execution_of, refused
from tests.conformance.pausing import TTL_MS, effect_of, new_id, pause
from tests.conformance.test_signals_kept import GO, TWO, counted, kept, send


async def test_a_worker_takes_kept_signals_without_letting_go(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    wait = new_id()

    async def take() -> list[str] | None:
        view = await engine.take_signals(claimed.handle, suspension_id=wait, resume_condition=TWO)
        return None if view is None else [each.source_identity for each in view.signals]

    made = await engine.create_waitpoint(claimed.handle, "go", expires_in_ms=TTL_MS)
    assert await take() is None
    await send(engine, claimed.execution_id, source="ada")
    assert await take() is None
    await send(engine, claimed.execution_id, source="bob")
    await send(engine, claimed.execution_id, source="cyd")
    assert await take() == ["ada", "bob"]
    # A repeat gets the same; another wait gets the rest.
    assert await take() == ["ada", "bob"]
    assert await kept(engine, claimed.execution_id) == [("go", "cyd")]
    other = await engine.take_signals(claimed.handle, suspension_id=new_id(), resume_condition=GO)
    assert other is not None
    assert [each.source_identity for each in other.signals] == ["cyd"]
    assert (await execution_of(engine, claimed.execution_id)).open_waitpoint_count == 0
    with pytest.raises(WaitpointClosed):
        await engine.deliver_signal(
            claimed.execution_id,
            made.waitpoint_id,
            waitpoint_token=made.waitpoint_token,
            signal_name="go",
        )
    await engine.complete(claimed.handle)


async def test_a_pause_that_crosses_its_own_taking_is_answered_the_same(
    engine: Engine, given: Given
) -> None:
    """The answer to the taking was lost, and the handler is parked."""
    claimed = await given.running()
    wait = new_id()
    await send(engine, claimed.execution_id, source="ada")
    taken = await engine.take_signals(claimed.handle, suspension_id=wait, resume_condition=GO)
    assert taken is not None
    parked = await engine.suspend(
        claimed.handle,
        resume_condition=GO,
        suspension_id=wait,
        idempotency_key=wait,
        take_pending=True,
    )
    assert isinstance(parked, SuspendSatisfied)
    seen = await engine.describe_suspension(claimed.execution_id, wait)
    assert seen is not None
    assert [each.source_identity for each in seen.signals] == ["ada"]


async def test_a_wait_beside_work_is_known(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running(ttl_ms=10 * ANNOUNCED_FOR_MS)
    execution_id = claimed.execution_id

    async def take(name: str = "go") -> bool:
        taken = await engine.take_signals(
            claimed.handle,
            suspension_id=new_id(),
            resume_condition=Single(name, ByName(name)),
            announce=True,
        )
        return taken is not None

    async with refused(engine, WaitpointNotFound):
        await send(engine, execution_id, keep=False)
    for _ in range(3):
        assert not await take()
    assert (await execution_of(engine, execution_id)).open_waitpoint_count == 1
    why = await engine.explain_execution(execution_id)
    assert why.cause is Cause.RUNNING
    assert "It takes signals meanwhile: 'go'." in why.sentence
    # Announced again before it is over, so that there is no gap.
    clock.advance(ms=ANNOUNCED_FOR_MS // 2)
    assert not await take()
    clock.advance(ms=ANNOUNCED_FOR_MS // 2)
    await engine.expire_due_waitpoints()
    async with refused(engine, WaitpointNotFound) as caught:
        await send(engine, execution_id, "other", keep=False)
    assert "it waits for 'go'" in str(caught.value)
    assert effect_of(await send(engine, execution_id, keep=False)) is SignalEffect.BUFFERED
    assert await take()
    assert (await execution_of(engine, execution_id)).open_waitpoint_count == 0
    async with refused(engine, WaitpointNotFound):
        await send(engine, execution_id, keep=False)


async def test_a_wait_beside_work_that_comes_to_a_pause(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    wait = new_id()
    assert not await engine.take_signals(
        claimed.handle, suspension_id=wait, resume_condition=TWO, announce=True
    )
    await send(engine, claimed.execution_id, source="ada", keep=False)
    await pause(given, claimed, TWO, suspension_id=wait, take_pending=True)
    assert (await execution_of(engine, claimed.execution_id)).open_waitpoint_count == 1
    assert effect_of(await send(engine, claimed.execution_id, source="bob")) is (
        SignalEffect.SATISFIED
    )
    assert await counted(engine, claimed) == ["ada", "bob"]


async def test_only_who_holds_the_lease_takes_signals(engine: Engine, given: Given) -> None:
    old = await given.expired_lease()
    await send(engine, old.execution_id)
    await given.taken()
    with pytest.raises(LeaseConflict):
        await engine.take_signals(old.handle, suspension_id=new_id(), resume_condition=GO)
    assert await kept(engine, old.execution_id) == [("go", "")]


async def test_the_worker_of_a_running_execution_is_hinted(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    topic = kept_topic(claimed.handle.worker_instance_id)
    with engine.store.hints([topic]) as hints, engine.store.hints([kept_topic("nobody")]) as others:
        await send(engine, claimed.execution_id)
        assert await hints.wait(5.0)
        assert not await others.wait(0.0)
