"""Waitpoints whose maker names them, so that making one can be repeated; and the inbox."""

import pytest

from flowfabric import Engine
from flowfabric.core.conditions import Single
from flowfabric.core.ids import WaitpointKey
from flowfabric.core.leases import OPERATOR_OVERRIDE
from flowfabric.core.waitpoints import PendingWaitpoint
from flowfabric.engine.suspensions import Suspended, SuspendOutcome
from flowfabric.engine.waitpoints import Inbox, InboxEntry
from flowfabric.errors import InvalidWaitpointKey, LeaseExpired, WaitpointClosed
from flowfabric.testing import SettableClock
from tests.conditions import all_of_waitpoints
from tests.conformance.given import Given
from tests.conformance.observed import refused, refuses, unchanged
from tests.conformance.pausing import Pause, new_id, paused

TTL_MS = 10_000


async def test_a_named_waitpoint_is_made_once_and_found_in_whatever_state(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    named = new_id()

    async def make(key: str = "gate") -> PendingWaitpoint:
        return await engine.create_waitpoint(
            claimed.handle, key, expires_in_ms=TTL_MS, waitpoint_id=named
        )

    pending = await make()
    assert pending.waitpoint_id == named
    async with unchanged(engine):
        assert await make() == pending
    async with refused(engine, InvalidWaitpointKey):
        await make("other")
    await refuses(
        engine,
        "waitpoint_id",
        "create_waitpoint",
        claimed.handle,
        expires_in_ms=TTL_MS,
        waitpoint_id="x",
    )
    await engine.close_waitpoint(claimed.execution_id, named, source=OPERATOR_OVERRIDE)
    assert (await make()).waitpoint_token == pending.waitpoint_token
    given.clock.advance(ms=claimed.handle.lease_ttl_ms)
    with pytest.raises(LeaseExpired):
        await make()


@pytest.mark.parametrize("end", ["failed early", "cancelled in the wait", "timed out in the wait"])
async def test_a_token_from_before_a_replay_is_good_for_the_next_wait(
    engine: Engine, given: Given, clock: SettableClock, end: str
) -> None:
    claimed = await given.running()
    named = new_id()

    async def make() -> PendingWaitpoint:
        return await engine.create_waitpoint(
            claimed.handle, "gate", expires_in_ms=TTL_MS, waitpoint_id=named
        )

    async def wait(key: str | None = None) -> SuspendOutcome:
        return await engine.suspend(
            claimed.handle,
            resume_condition=Single("gate"),
            take_pending=True,
            timeout_in_ms=1_000,
            idempotency_key=key,
        )

    first = await make()
    if end == "failed early":
        await engine.fail(claimed.handle, "broken")
    else:
        await wait("k")
        if end == "cancelled in the wait":
            await engine.cancel_execution(claimed.execution_id, reason="enough")
        else:
            clock.advance(ms=1_000)
            await engine.expire_due_suspensions()
    await engine.replay_execution(claimed.execution_id)
    claimed = await given.taken()
    clock.advance(ms=1)
    again = await make()
    assert again.waitpoint_token == first.waitpoint_token
    assert again.expires_at_ms == clock.now_ms() + TTL_MS
    async with unchanged(engine):
        assert await make() == again
    outcome = await wait("k")
    assert (isinstance(outcome, Suspended), outcome.details.waitpoint_id) == (True, named)
    answer = await engine.deliver_signal(
        claimed.execution_id, named, waitpoint_token=first.waitpoint_token, signal_name="gate"
    )
    assert answer.resumed


@pytest.mark.parametrize("closed", ["met", "expired", "closed"])
async def test_a_replay_does_not_open_what_was_over_before(
    engine: Engine, given: Given, clock: SettableClock, closed: str
) -> None:
    claimed = await given.running(ttl_ms=10 * TTL_MS)
    named = new_id()

    async def make() -> PendingWaitpoint:
        return await engine.create_waitpoint(
            claimed.handle, "gate", expires_in_ms=TTL_MS, waitpoint_id=named
        )

    made = await make()
    match closed:
        case "met":
            await engine.deliver_operator_signal(claimed.execution_id, "gate", signal_name="gate")
            await engine.suspend(claimed.handle, resume_condition=Single("gate"), take_pending=True)
        case "expired":
            clock.advance(ms=TTL_MS)
            await engine.expire_due_waitpoints()
        case _:
            await engine.close_waitpoint(claimed.execution_id, named, source=OPERATOR_OVERRIDE)
    await engine.fail(claimed.handle, "broken")
    await engine.replay_execution(claimed.execution_id)
    claimed = await given.taken()
    async with unchanged(engine):
        assert (await make()).waitpoint_token == made.waitpoint_token
    with pytest.raises(WaitpointClosed):
        await engine.deliver_signal(
            claimed.execution_id, named, waitpoint_token=made.waitpoint_token, signal_name="gate"
        )


def entry_of(pause: Pause, key: str, at_ms: int, names: tuple[str, ...] = ()) -> InboxEntry:
    waitpoint_id, _ = pause.waitpoint(key)
    return InboxEntry(
        execution_id=pause.claimed.execution_id,
        execution_kind=pause.claimed.execution_kind,
        lane_id=pause.claimed.lane_id,
        waitpoint_id=waitpoint_id,
        name=WaitpointKey(key),
        required_signal_names=names,
        suspended_at_ms=at_ms,
        timeout_at_ms=None,
    )


async def test_the_inbox_lists_what_suspended_executions_wait_for_longest_first(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    assert await engine.list_inbox() == Inbox(entries=(), next_cursor=None)
    started_ms = clock.now_ms()
    pauses = []
    for _ in range(3):
        pauses.append(await paused(given, all_of_waitpoints(["one", "two"])))
        clock.advance(ms=1)
    running = await given.running()
    await engine.create_waitpoint(running.handle, "later", expires_in_ms=TTL_MS)
    expected = [
        entry_of(pause, key, started_ms + late_ms)
        for late_ms, pause in enumerate(pauses)
        for key in ("one", "two")
    ]
    first = await engine.list_inbox(limit=2)
    assert first.entries == tuple(expected[:4])
    rest = await engine.list_inbox(cursor=first.next_cursor, limit=2)
    assert rest == Inbox(entries=tuple(expected[4:]), next_cursor=None)
    await engine.cancel_execution(pauses[0].execution_id, reason="x")
    assert (await engine.list_inbox()).entries == tuple(expected[2:])
    for key in ("one", "two"):
        waitpoint_id, _ = pauses[1].waitpoint(key)
        await engine.close_waitpoint(pauses[1].execution_id, waitpoint_id, source=OPERATOR_OVERRIDE)
    nothing = await engine.list_inbox(limit=1)
    assert nothing.entries == ()
    assert (await engine.list_inbox(cursor=nothing.next_cursor)).entries == tuple(expected[4:])
    await refuses(engine, "limit", "list_inbox", limit=0)
    await refuses(engine, "cursor", "list_inbox", cursor="x")


async def test_the_inbox_leaves_out_what_has_come(engine: Engine, given: Given) -> None:
    fields: dict[str, object] = {"execution_id": "order-1"}
    pause = await paused(given, all_of_waitpoints(["legal", "finance"]), fields=fields)
    await pause.signal("legal", key="legal")

    (entry,) = (await engine.list_inbox()).entries
    assert (entry.name, entry.own_id) == ("finance", "order-1")
