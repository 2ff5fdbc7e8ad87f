"""Signals that met a wait, and that its worker cannot use."""

import pytest

from flowfabric import Engine
from flowfabric.core.bounds import OPEN_WAITPOINTS_MAX
from flowfabric.core.conditions import ByName, Count, CountKind, Single
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId
from flowfabric.core.signals import SignalAccepted, SignalDuplicate
from flowfabric.core.suspension import SET_ASIDE
from flowfabric.engine.waitpoints import SuspensionView
from flowfabric.errors import InvalidInput, LeaseConflict, NotFound, WaitpointClosed
from flowfabric.testing import SettableClock
from tests.conformance.given import Given
from tests.conformance.observed import execution_of, refused
from tests.conformance.pausing import TTL_MS, new_id, pause
from tests.conformance.test_signals_kept import GO, TWO, kept, send

WHY = "payload of signal go from ada: does not fit"


async def met_by(
    engine: Engine, given: Given, *senders: str
) -> tuple[Handle, ExecutionId, SuspensionView]:
    """A running execution whose wait was met by these: its handle, its id and the wait."""
    claimed = await given.running()
    condition = TWO if len(senders) == 2 else GO
    for sender in senders:
        await send(engine, claimed.execution_id, source=sender)
    view = await engine.take_signals(
        claimed.handle, suspension_id=new_id(), resume_condition=condition
    )
    assert view is not None
    return claimed.handle, claimed.execution_id, view


async def set_aside(engine: Engine, handle: Handle, view: SuspensionView, *ids: str) -> bool:
    return await engine.set_aside_signals(
        handle,
        suspension_id=view.suspension_id,
        signal_ids=ids or [view.signals[0].signal_id],
        reason=WHY,
    )


async def test_the_other_signals_of_the_wait_count_for_the_next_and_that_one_never_again(
    engine: Engine, given: Given
) -> None:
    handle, execution_id, view = await met_by(engine, given, "ada", "bob")
    assert await kept(engine, execution_id) == []
    assert await set_aside(engine, handle, view)
    assert await kept(engine, execution_id) == [("go", "bob")]
    after = await engine.describe_suspension(execution_id, view.suspension_id)
    assert after is not None
    assert not after.resumed
    assert after.close_reason == f"{SET_ASIDE}{WHY}"
    again = new_id()
    assert not await engine.take_signals(handle, suspension_id=again, resume_condition=TWO)
    await send(engine, execution_id, source="cyd")
    met = await engine.take_signals(handle, suspension_id=again, resume_condition=TWO)
    assert met is not None
    assert [each.source_identity for each in met.signals] == ["bob", "cyd"]
    assert await kept(engine, execution_id) == []


async def test_whoever_corrects_a_payload_may_use_the_same_idempotency_key(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    await send(engine, claimed.execution_id, source="ada", idempotency_key="link")
    view = await engine.take_signals(claimed.handle, suspension_id=new_id(), resume_condition=GO)
    assert view is not None
    again = await send(engine, claimed.execution_id, source="ada", idempotency_key="link")
    assert isinstance(again, SignalDuplicate)
    assert await set_aside(engine, claimed.handle, view)
    corrected = await send(engine, claimed.execution_id, source="ada", idempotency_key="link")
    assert isinstance(corrected, SignalAccepted)
    assert await kept(engine, claimed.execution_id) == [("go", "ada")]


async def test_a_repeat_changes_nothing(engine: Engine, given: Given) -> None:
    handle, execution_id, view = await met_by(engine, given, "ada")
    assert await set_aside(engine, handle, view)
    before = await execution_of(engine, execution_id)
    assert not await set_aside(engine, handle, view)
    assert await execution_of(engine, execution_id) == before


async def test_tokens_that_the_end_of_the_wait_closed_work_again(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    made = await engine.create_waitpoint(claimed.handle, "go", expires_in_ms=TTL_MS)

    async def knock(source: str) -> None:
        await engine.deliver_signal(
            claimed.execution_id,
            made.waitpoint_id,
            waitpoint_token=made.waitpoint_token,
            signal_name="go",
            source_identity=source,
        )

    await knock("ada")
    view = await engine.take_signals(claimed.handle, suspension_id=new_id(), resume_condition=GO)
    assert view is not None
    async with refused(engine, WaitpointClosed):
        await knock("ada")
    assert await set_aside(engine, claimed.handle, view)
    assert (await execution_of(engine, claimed.execution_id)).open_waitpoint_count == 1
    paused = await pause(given, claimed, GO, take_pending=True)
    assert paused.waitpoint_id == made.waitpoint_id
    await knock("ada")
    resumed = await engine.describe_suspension(claimed.execution_id, paused.details.suspension_id)
    assert resumed is not None
    assert resumed.resumed
    assert (await execution_of(engine, claimed.execution_id)).open_waitpoint_count == 0


async def test_what_counts_distinct_waitpoints_can_be_met_again(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    both = Count(2, CountKind.DISTINCT_WAITPOINTS, ("go",), ByName("go"))
    made = [
        await engine.create_waitpoint(claimed.handle, "go", expires_in_ms=TTL_MS) for _ in range(2)
    ]
    for number in range(2):
        for each in made:
            await engine.deliver_signal(
                claimed.execution_id,
                each.waitpoint_id,
                waitpoint_token=each.waitpoint_token,
                signal_name="go",
            )
        view = await engine.take_signals(
            claimed.handle, suspension_id=new_id(), resume_condition=both
        )
        assert view is not None
        if number == 0:
            unusable = [each.signal_id for each in view.signals]
            assert await set_aside(engine, claimed.handle, view, *unusable)


async def test_why_tells_it_as_long_as_the_execution_waits_again(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    await send(engine, claimed.execution_id, source="ada")
    view = await engine.take_signals(claimed.handle, suspension_id=new_id(), resume_condition=GO)
    assert view is not None
    assert await set_aside(engine, claimed.handle, view)
    await pause(given, claimed, GO)
    why = await engine.explain_execution(claimed.execution_id)
    assert why.sentence == (
        "It is suspended until it gets a signal: 'go'."
        f" The last one was set aside: {WHY}. Send another."
    )
    assert why.detail["set_aside"] == WHY
    await send(engine, claimed.execution_id)
    again = await given.taken()
    await pause(given, again, Single("other", ByName("other")))
    assert "set aside" not in (await engine.explain_execution(claimed.execution_id)).sentence


async def test_waitpoints_that_have_expired_stay_closed(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    paused = await pause(given, claimed, GO, timeout_in_ms=TTL_MS)
    await send(engine, claimed.execution_id)
    again = await given.taken(ttl_ms=10 * TTL_MS)
    view = await engine.describe_suspension(claimed.execution_id, paused.details.suspension_id)
    assert view is not None
    clock.advance(ms=2 * TTL_MS)
    assert await set_aside(engine, again.handle, view)
    assert (await execution_of(engine, claimed.execution_id)).open_waitpoint_count == 0


async def test_no_more_waitpoints_are_opened_than_may_be_open(engine: Engine, given: Given) -> None:
    handle, execution_id, view = await met_by(engine, given, "ada")
    for _ in range(OPEN_WAITPOINTS_MAX):
        await engine.create_waitpoint(handle, "other", expires_in_ms=TTL_MS)
    assert await set_aside(engine, handle, view)
    count = (await execution_of(engine, execution_id)).open_waitpoint_count
    assert count == OPEN_WAITPOINTS_MAX


async def test_a_wait_goes_on_for_more_than_has_met_it(engine: Engine, given: Given) -> None:
    handle, execution_id, view = await met_by(engine, given, "ada")

    async def go_on() -> bool:
        return await engine.set_aside_signals(
            handle, suspension_id=view.suspension_id, signal_ids=[], reason=""
        )

    assert (await go_on(), await go_on()) == (True, False)
    assert await kept(engine, execution_id) == [("go", "ada")]
    again = new_id()
    assert not await engine.take_signals(handle, suspension_id=again, resume_condition=TWO)
    await send(engine, execution_id, source="bob")
    met = await engine.take_signals(handle, suspension_id=again, resume_condition=TWO)
    assert met is not None
    assert [each.source_identity for each in met.signals] == ["ada", "bob"]
    assert "set aside" not in (await engine.explain_execution(execution_id)).sentence


async def test_only_signals_that_met_a_wait_are_set_aside_and_only_by_the_holder(
    engine: Engine, given: Given
) -> None:
    handle, execution_id, view = await met_by(engine, given, "ada")
    async with refused(engine, InvalidInput) as caught:
        await set_aside(engine, handle, view, new_id())
    assert caught.value.field == "signal_ids"
    async with refused(engine, NotFound):
        await engine.set_aside_signals(
            handle, suspension_id=new_id(), signal_ids=[new_id()], reason=WHY
        )
    await engine.complete(handle)
    old = await given.expired_lease()
    await given.taken()
    with pytest.raises(LeaseConflict):
        await engine.set_aside_signals(
            old.handle, suspension_id=view.suspension_id, signal_ids=[new_id()], reason=WHY
        )
    assert (await execution_of(engine, execution_id)).open_waitpoint_count == 0
