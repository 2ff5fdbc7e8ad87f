"""Waitpoints: made beforehand, kept early signals, closed, listed."""

import pytest

from flowfabric import Engine
from flowfabric.core.bounds import WAITPOINT_TTL_MS_MAX
from flowfabric.core.conditions import (
    AllConditions,
    ByName,
    Count,
    CountKind,
    Single,
)
from flowfabric.core.leases import OPERATOR_OVERRIDE
from flowfabric.core.records import SignalEffect, Waitpoint, WaitpointState
from flowfabric.core.results import Claimed
from flowfabric.core.signals import SignalAccepted
from flowfabric.core.states import LifecyclePhase, OwnershipState, PublicState
from flowfabric.core.waitpoints import PendingWaitpoint, UsePending, fingerprint
from flowfabric.engine.suspensions import Suspended, SuspendSatisfied
from flowfabric.errors import (
    ExecutionNotActive,
    InvalidInput,
    InvalidWaitpointForExecution,
    LeaseExpired,
    NotFound,
    PendingWaitpointExpired,
    StaleLease,
    WaitpointClosed,
    WaitpointNotFound,
    WaitpointNotPending,
)
from flowfabric.reconcilers import run_due
from flowfabric.testing import SettableClock
from tests.conditions import all_of_waitpoints
from tests.conformance.given import UNKNOWN_ID, Given, fence_of
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refused,
    refuses,
    unchanged,
)
from tests.conformance.pausing import (
    APPROVED,
    TTL_MS,
    create,
    duplicate_of,
    effect_of,
    new_id,
    pause,
    paused,
    waitpoint_of,
)


async def send(
    engine: Engine,
    claimed: Claimed,
    pending: PendingWaitpoint,
    name: str = "approved",
    source: str = "alice",
) -> SignalEffect:
    answer = await engine.deliver_signal(
        claimed.execution_id,
        pending.waitpoint_id,
        waitpoint_token=pending.waitpoint_token,
        signal_name=name,
        source_identity=source,
    )
    return effect_of(answer)


def using(pending: PendingWaitpoint, any_attempt: bool = False) -> list[UsePending]:
    return [UsePending(waitpoint_id=pending.waitpoint_id, any_attempt=any_attempt)]


# Made beforehand ------------------------------------------------------------------


async def test_a_waitpoint_is_made_without_touching_the_lease(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    cursor = await cursor_of(engine)
    pending = await create(engine, claimed)
    now_ms = given.clock.now_ms()
    execution = await execution_of(engine, claimed.execution_id)
    assert (execution.lease_id, execution.open_waitpoint_count) == (claimed.lease_id, 1)
    assert await waitpoint_of(engine, claimed.execution_id, pending.waitpoint_id) == Waitpoint(
        partition_key=execution.partition_key,
        execution_id=claimed.execution_id,
        waitpoint_id=pending.waitpoint_id,
        waitpoint_key=pending.waitpoint_key,
        suspension_id=None,
        attempt_index=0,
        state=WaitpointState.PENDING,
        token_kid="k1",
        token_fingerprint=fingerprint(pending.waitpoint_token),
        created_at_ms=now_ms,
        expires_at_ms=now_ms + TTL_MS,
    )
    assert pending.expires_at_ms == now_ms + TTL_MS
    assert await events_since(engine, cursor) == []
    await engine.renew(claimed.handle)


async def test_each_call_makes_another_waitpoint(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    one, other = await create(engine, claimed), await create(engine, claimed)
    assert one.waitpoint_id != other.waitpoint_id
    assert one.waitpoint_token != other.waitpoint_token


async def test_a_waitpoint_needs_the_live_lease(engine: Engine, given: Given) -> None:
    pause = await paused(given)
    async with refused(engine, ExecutionNotActive):
        await create(engine, pause.claimed)
    overdue = await given.overdue_lease()
    with pytest.raises(LeaseExpired):
        await create(engine, overdue)


async def test_what_is_asked_of_a_waitpoint_is_checked(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    async with unchanged(engine):
        for ttl_ms in (0, -1, "1", None, WAITPOINT_TTL_MS_MAX + 1):
            await refuses(
                engine,
                "expires_in_ms",
                "create_waitpoint",
                claimed.handle,
                "gate",
                expires_in_ms=ttl_ms,
            )
        for key in ("", 7, "x" * 257):
            await refuses(
                engine,
                "waitpoint_key",
                "create_waitpoint",
                claimed.handle,
                key,
                expires_in_ms=TTL_MS,
            )


# Early signals --------------------------------------------------------------------


async def test_an_early_signal_is_kept_and_told(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    pending = await create(engine, claimed)
    cursor = await cursor_of(engine)
    assert await send(engine, claimed, pending) is SignalEffect.BUFFERED
    (event,) = await events_since(engine, cursor)
    assert event.event_type == "buffered"
    execution = await execution_of(engine, claimed.execution_id)
    assert (execution.lifecycle_phase, execution.ownership_state) == (
        LifecyclePhase.ACTIVE,
        OwnershipState.LEASED,
    )


async def test_an_early_signal_is_kept_once(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    pending = await create(engine, claimed)
    answers = [
        await engine.deliver_signal(
            claimed.execution_id,
            pending.waitpoint_id,
            waitpoint_token=pending.waitpoint_token,
            signal_name="approved",
            idempotency_key="once",
        )
        for _ in range(2)
    ]
    assert effect_of(answers[0]) is SignalEffect.BUFFERED
    assert duplicate_of(answers[1])


async def test_a_worker_whose_signal_came_early_goes_on_with_its_lease(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    pending = await create(engine, claimed)
    await send(engine, claimed, pending, "noise")
    await send(engine, claimed, pending)
    before = await execution_of(engine, claimed.execution_id)
    outcome = await engine.suspend(
        claimed.handle, resume_condition=APPROVED, waitpoints=using(pending)
    )
    assert isinstance(outcome, SuspendSatisfied)
    after = await execution_of(engine, claimed.execution_id)
    assert (after.lease_id, after.public_state) == (before.lease_id, PublicState.ACTIVE)
    assert (after.open_waitpoint_count, after.current_suspension_id) == (0, None)
    waitpoint = await waitpoint_of(engine, claimed.execution_id, pending.waitpoint_id)
    assert (waitpoint.state, waitpoint.close_reason, waitpoint.matched_signal_count) == (
        WaitpointState.CLOSED,
        "resumed",
        1,
    )
    (signal,) = await engine.observe_signals(claimed.handle)
    assert signal.signal_name == "approved"
    every = await engine.observe_signals(claimed.handle, include_unmatched=True)
    # What did not fit stays for a wait that it fits.
    assert [(each.signal_name, each.matched) for each in every] == [
        ("noise", False),
        ("approved", True),
    ]
    await engine.complete(claimed.handle)


async def test_early_signals_count_together_with_later_ones(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    pending = await create(engine, claimed)
    await send(engine, claimed, pending, source="alice")
    two = Count(2, CountKind.DISTINCT_SOURCES, ("gate",), ByName("approved"))
    outcome = await engine.suspend(claimed.handle, resume_condition=two, waitpoints=using(pending))
    assert isinstance(outcome, Suspended)
    assert outcome.details.waitpoint_token == pending.waitpoint_token
    assert await send(engine, claimed, pending, source="alice") is SignalEffect.APPENDED_DUPLICATE
    assert await send(engine, claimed, pending, source="bob") is SignalEffect.SATISFIED
    signals = await engine.observe_signals(outcome.handle)
    assert [signal.source_identity for signal in signals] == ["alice", "bob"]


async def test_early_signals_of_a_composite_can_meet_it(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    pending = await create(engine, claimed)
    for name in ("beta", "alpha", "late"):
        await send(engine, claimed, pending, name)
    both = AllConditions((Single("gate", ByName("alpha")), Single("gate", ByName("beta"))))
    outcome = await engine.suspend(claimed.handle, resume_condition=both, waitpoints=using(pending))
    assert isinstance(outcome, SuspendSatisfied)
    signals = await engine.observe_signals(claimed.handle)
    assert [signal.signal_name for signal in signals] == ["beta", "alpha"]


async def test_a_pending_waitpoint_lives_as_long_as_the_pause_that_takes_it_over(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    pending = await create(engine, claimed)
    await pause(given, claimed, waitpoints=using(pending))
    waitpoint = await waitpoint_of(engine, claimed.execution_id, pending.waitpoint_id)
    assert (waitpoint.state, waitpoint.expires_at_ms) == (WaitpointState.ACTIVE, None)
    clock.advance(ms=TTL_MS)
    assert "waitpoint_expiry" not in await run_due(engine)
    assert await send(engine, claimed, pending) is SignalEffect.SATISFIED


@pytest.mark.parametrize("timeout_in_ms", [None, 10 * TTL_MS])
async def test_a_token_with_an_end_is_refused_from_then_on_while_operators_reach_the_pause(
    engine: Engine, given: Given, clock: SettableClock, timeout_in_ms: int | None
) -> None:
    claimed = await given.running()
    pending = await engine.create_waitpoint(
        claimed.handle, "gate", expires_in_ms=TTL_MS, expire_token=True
    )
    paused_at = await pause(
        given,
        claimed,
        Count(3, CountKind.DISTINCT_SOURCES, ("gate",), ByName("approved")),
        waitpoints=using(pending),
        timeout_in_ms=timeout_in_ms,
    )
    clock.advance(ms=TTL_MS - 1)
    first = await paused_at.deliver(source_identity="alice", idempotency_key="click")
    assert isinstance(first, SignalAccepted)
    assert first.effect is SignalEffect.APPENDED
    clock.advance(ms=1)
    assert "waitpoint_expiry" not in await run_due(engine)
    async with refused(engine, WaitpointClosed):
        await send(engine, claimed, pending, source="bob")
    assert await engine.read_waitpoint_token(claimed.execution_id, pending.waitpoint_id) is None
    repeat = await paused_at.deliver(source_identity="alice", idempotency_key="click")
    assert duplicate_of(repeat) == first.signal_id
    answers = [
        await engine.deliver_operator_signal(
            claimed.execution_id, "gate", signal_name="approved", source_identity="bob"
        ),
        await engine.deliver_approval_signal(
            claimed.execution_id,
            pending.waitpoint_id,
            signal_name="approved",
            idempotency_suffix="1",
            operator_identity="cyd",
        ),
    ]
    assert [effect_of(each) for each in answers] == [SignalEffect.APPENDED, SignalEffect.SATISFIED]


async def test_a_token_with_an_end_does_not_outlive_it_when_its_signal_is_set_aside(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    made = [
        await engine.create_waitpoint(claimed.handle, "gate", expires_in_ms=ms, expire_token=True)
        for ms in (TTL_MS, 2 * TTL_MS)
    ]
    suspension_id = new_id()
    both = [using(each)[0] for each in made]
    await pause(given, claimed, waitpoints=both, suspension_id=suspension_id)
    assert await send(engine, claimed, made[0]) is SignalEffect.SATISFIED
    resumed = await given.taken()
    clock.advance(ms=TTL_MS)
    (signal,) = await engine.observe_signals(resumed.handle)
    assert await engine.set_aside_signals(
        resumed.handle,
        suspension_id=suspension_id,
        signal_ids=[signal.signal_id],
        reason="test",
    )
    reopened = [
        await waitpoint_of(engine, claimed.execution_id, each.waitpoint_id) for each in made
    ]
    assert [each.state for each in reopened] == [WaitpointState.CLOSED, WaitpointState.PENDING]
    assert reopened[1].expires_at_ms == made[1].expires_at_ms
    clock.advance(ms=TTL_MS)
    async with refused(engine, WaitpointClosed):
        await send(engine, claimed, made[1])


async def test_a_pending_waitpoint_keeps_its_token_when_the_key_changes(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    pending = await create(engine, claimed)
    await engine.rotate_waitpoint_hmac_secret_all("k2", "ab" * 32)
    taken = await pause(given, claimed, waitpoints=using(pending))
    assert taken.token == pending.waitpoint_token
    assert await taken.signal() is SignalEffect.SATISFIED


async def test_other_pending_waitpoints_stay_pending(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    spare, used = await create(engine, claimed, "spare"), await create(engine, claimed)
    taken = await pause(given, claimed, waitpoints=using(used))
    assert await send(engine, claimed, spare) is SignalEffect.BUFFERED
    assert await taken.signal() is SignalEffect.SATISFIED
    resumed = await given.taken()
    assert (await execution_of(engine, claimed.execution_id)).open_waitpoint_count == 1
    outcome = await engine.suspend(
        resumed.handle, resume_condition=Single("spare"), waitpoints=using(spare)
    )
    assert isinstance(outcome, SuspendSatisfied)


# What cannot be taken over --------------------------------------------------------


async def test_only_a_pending_waitpoint_of_this_execution_is_taken_over(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    stranger = await given.running()
    foreign = await create(engine, stranger)
    claimed = await given.running()
    pending = await create(engine, claimed)
    expired = await engine.create_waitpoint(claimed.handle, "gate", expires_in_ms=1)
    closed = await create(engine, claimed)
    await engine.close_waitpoint(claimed.execution_id, closed.waitpoint_id, fence=fence_of(claimed))
    clock.advance(ms=1)
    for waitpoint, error in (
        (foreign, WaitpointNotFound),
        (expired, PendingWaitpointExpired),
        (closed, WaitpointNotPending),
    ):
        async with refused(engine, error):
            await engine.suspend(
                claimed.handle, resume_condition=APPROVED, waitpoints=using(waitpoint)
            )
    async with refused(engine, InvalidInput) as caught:
        await engine.suspend(
            claimed.handle, resume_condition=Single("other"), waitpoints=using(pending)
        )
    assert caught.value.problem == "waitpoint_key_mismatch: the condition waits at 'other'"
    async with refused(engine, InvalidInput) as caught:
        await engine.suspend(
            claimed.handle, resume_condition=all_of_waitpoints(["x"]), waitpoints=using(pending)
        )
    assert caught.value.problem == "referenced_waitpoint_key_missing_binding: x"


async def test_a_later_attempt_takes_over_only_when_it_says_so(
    engine: Engine, given: Given
) -> None:
    first = await given.running()
    pending = await create(engine, first)
    await send(engine, first, pending)
    await engine.revoke_lease(first.execution_id, reason="drain")
    second = await given.taken()
    async with refused(engine, InvalidWaitpointForExecution):
        await engine.suspend(second.handle, resume_condition=APPROVED, waitpoints=using(pending))
    outcome = await engine.suspend(
        second.handle, resume_condition=APPROVED, waitpoints=using(pending, any_attempt=True)
    )
    assert isinstance(outcome, SuspendSatisfied)
    assert len(await engine.observe_signals(second.handle)) == 1


# Closing --------------------------------------------------------------------------


async def test_a_worker_closes_its_pending_waitpoint(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    pending = await create(engine, claimed)
    fence = fence_of(claimed)
    closed = await engine.close_waitpoint(claimed.execution_id, pending.waitpoint_id, fence=fence)
    assert closed.closed == 1
    waitpoint = await waitpoint_of(engine, claimed.execution_id, pending.waitpoint_id)
    assert (waitpoint.state, waitpoint.closed_at_ms, waitpoint.close_reason) == (
        WaitpointState.CLOSED,
        given.clock.now_ms(),
        "proactive_close",
    )
    async with unchanged(engine):
        again = await engine.close_waitpoint(
            claimed.execution_id, pending.waitpoint_id, fence=fence
        )
    assert again.closed == 0
    async with refused(engine, WaitpointClosed):
        await send(engine, claimed, pending)


async def test_only_an_operator_closes_a_waitpoint_of_an_open_pause(
    engine: Engine, given: Given
) -> None:
    taken = await paused(given, all_of_waitpoints(["a", "b"]))
    waitpoint_id, token = taken.waitpoint("b")
    with pytest.raises(ExecutionNotActive):
        await engine.close_waitpoint(
            taken.execution_id, waitpoint_id, fence=fence_of(taken.claimed)
        )
    closed = await engine.close_waitpoint(
        taken.execution_id, waitpoint_id, source=OPERATOR_OVERRIDE, reason="not needed"
    )
    assert closed.closed == 1
    assert await engine.read_execution_state(taken.execution_id) is PublicState.SUSPENDED
    async with refused(engine, WaitpointClosed):
        await engine.deliver_signal(
            taken.execution_id, waitpoint_id, waitpoint_token=token, signal_name="x"
        )
    await engine.resume_execution(taken.execution_id)
    assert (await execution_of(engine, taken.execution_id)).open_waitpoint_count == 0


async def test_closing_checks_who_asks_and_for_what(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    pending = await create(engine, claimed)
    async with refused(engine, StaleLease):
        await engine.close_waitpoint(
            claimed.execution_id, pending.waitpoint_id, fence=fence_of(claimed, lease_epoch=9)
        )
    async with refused(engine, WaitpointNotFound):
        await engine.close_waitpoint(claimed.execution_id, new_id(), fence=fence_of(claimed))
    async with refused(engine, NotFound):
        await engine.close_waitpoint(UNKNOWN_ID, new_id(), source=OPERATOR_OVERRIDE)
    async with unchanged(engine):
        asked = (claimed.execution_id, pending.waitpoint_id)
        await refuses(engine, "fence", "close_waitpoint", *asked)
        await refuses(engine, "reason", "close_waitpoint", *asked, reason="")
        await refuses(engine, "waitpoint_id", "close_waitpoint", asked[0], "x")


async def test_a_waitpoint_nobody_took_over_is_closed_in_time(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running(ttl_ms=100_000)
    pending = await create(engine, claimed)
    assert (await engine.next_due())["waitpoint_expiry"] == TTL_MS
    clock.advance(ms=TTL_MS - 1)
    assert await run_due(engine) == {}
    assert await send(engine, claimed, pending) is SignalEffect.BUFFERED
    clock.advance(ms=1)
    async with refused(engine, WaitpointClosed):
        await send(engine, claimed, pending)
    assert await run_due(engine) == {"waitpoint_expiry": 1}
    waitpoint = await waitpoint_of(engine, claimed.execution_id, pending.waitpoint_id)
    assert (waitpoint.state, waitpoint.close_reason) == (WaitpointState.CLOSED, "never_committed")
    assert (await execution_of(engine, claimed.execution_id)).open_waitpoint_count == 0
    assert "waitpoint_expiry" not in await engine.next_due()
