"""Suspensions that take over several waitpoints made beforehand, or some beside fresh ones."""

from flowfabric import Engine
from flowfabric.core.conditions import Condition, Count, CountKind
from flowfabric.core.records import SignalEffect, WaitpointState
from flowfabric.core.results import Claimed
from flowfabric.core.states import PublicState
from flowfabric.core.waitpoints import Binding, FreshWaitpoint, PendingWaitpoint, UsePending
from flowfabric.engine.suspensions import Suspended, SuspendSatisfied
from flowfabric.errors import (
    InvalidInput,
    PendingWaitpointExpired,
    WaitpointClosed,
    WaitpointNotFound,
    WaitpointNotPending,
)
from flowfabric.testing import SettableClock
from tests.conditions import all_of_waitpoints
from tests.conformance.given import Given
from tests.conformance.observed import execution_of, refused
from tests.conformance.pausing import TTL_MS, create, effect_of, new_id, pause, waitpoint_of

BOTH = all_of_waitpoints(["a", "b"])
EITHER = Count(1, CountKind.DISTINCT_WAITPOINTS, ("a", "b"))


async def deliver(
    engine: Engine, claimed: Claimed, to: PendingWaitpoint, source: str = ""
) -> SignalEffect:
    return effect_of(
        await engine.deliver_signal(
            claimed.execution_id,
            to.waitpoint_id,
            waitpoint_token=to.waitpoint_token,
            signal_name="approved",
            source_identity=source,
        )
    )


def taking(*made: PendingWaitpoint) -> list[Binding]:
    return [UsePending(waitpoint_id=each.waitpoint_id) for each in made]


async def counts(engine: Engine, claimed: Claimed, made: PendingWaitpoint) -> tuple[int, int]:
    waitpoint = await waitpoint_of(engine, claimed.execution_id, made.waitpoint_id)
    return waitpoint.signal_count, waitpoint.matched_signal_count


async def test_early_signals_to_all_of_them_are_enough(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    a, b = await create(engine, claimed, "a"), await create(engine, claimed, "b")
    for to, source in ((b, "bob"), (a, "alice"), (b, "carol")):
        assert await deliver(engine, claimed, to, source) is SignalEffect.BUFFERED
    outcome = await engine.suspend(claimed.handle, resume_condition=BOTH, waitpoints=taking(a, b))
    assert isinstance(outcome, SuspendSatisfied)
    seen = await engine.observe_signals(claimed.handle)
    assert [each.source_identity for each in seen] == ["bob", "alice"]
    assert await counts(engine, claimed, a) == (1, 1)
    assert await counts(engine, claimed, b) == (2, 1)
    assert (await execution_of(engine, claimed.execution_id)).open_waitpoint_count == 0
    assert await engine.read_execution_state(claimed.execution_id) is PublicState.ACTIVE


async def test_early_signals_count_in_the_order_they_came_wherever_they_came(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    a, b = await create(engine, claimed, "a"), await create(engine, claimed, "b")
    for to, source in ((b, "bob"), (a, "alice")):
        await deliver(engine, claimed, to, source)
    await engine.suspend(claimed.handle, resume_condition=EITHER, waitpoints=taking(a, b))
    (first,) = await engine.observe_signals(claimed.handle)
    assert first.source_identity == "bob"


async def test_an_early_signal_to_one_of_them_leaves_the_others_to_be_waited_for(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    a, b = await create(engine, claimed, "a"), await create(engine, claimed, "b")
    await deliver(engine, claimed, b)
    outcome = await engine.suspend(claimed.handle, resume_condition=BOTH, waitpoints=taking(a, b))
    assert isinstance(outcome, Suspended)
    details = outcome.details
    assert (details.waitpoint_id, details.waitpoint_token) == (a.waitpoint_id, a.waitpoint_token)
    (extra,) = details.additional_waitpoints
    assert (extra.waitpoint_id, extra.waitpoint_token) == (b.waitpoint_id, b.waitpoint_token)
    assert (await counts(engine, claimed, a), await counts(engine, claimed, b)) == ((0, 0), (1, 1))
    assert (await execution_of(engine, claimed.execution_id)).open_waitpoint_count == 2
    assert await deliver(engine, claimed, a) is SignalEffect.SATISFIED
    for each in (a, b):
        closed = await waitpoint_of(engine, claimed.execution_id, each.waitpoint_id)
        assert (closed.state, closed.close_reason) == (WaitpointState.CLOSED, "resumed")
    assert (await execution_of(engine, claimed.execution_id)).open_waitpoint_count == 0


async def test_one_made_beforehand_stands_beside_a_fresh_one(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    b = await create(engine, claimed, "b")
    taken = await pause(
        given, claimed, BOTH, waitpoints=[FreshWaitpoint(waitpoint_key="a"), *taking(b)]
    )
    assert (await execution_of(engine, claimed.execution_id)).open_waitpoint_count == 2
    assert await deliver(engine, claimed, b) is SignalEffect.APPENDED
    assert await taken.signal(key="a") is SignalEffect.SATISFIED


async def test_a_fresh_one_of_a_pause_that_never_happened_is_closed(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    a = await create(engine, claimed, "a")
    await deliver(engine, claimed, a)
    outcome = await engine.suspend(
        claimed.handle,
        resume_condition=EITHER,
        waitpoints=[*taking(a), FreshWaitpoint(waitpoint_key="b")],
    )
    assert isinstance(outcome, SuspendSatisfied)
    (extra,) = outcome.details.additional_waitpoints
    async with refused(engine, WaitpointClosed):
        await engine.deliver_signal(
            claimed.execution_id,
            extra.waitpoint_id,
            waitpoint_token=extra.waitpoint_token,
            signal_name="late",
        )
    assert (await execution_of(engine, claimed.execution_id)).open_waitpoint_count == 0


async def test_a_repeat_of_such_a_suspend_gets_the_same_waitpoints_in_the_same_order(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    b = await create(engine, claimed, "b")
    first, again = [
        await engine.suspend(
            claimed.handle,
            resume_condition=BOTH,
            waitpoints=[FreshWaitpoint(waitpoint_key="a"), *taking(b)],
            idempotency_key="once",
        )
        for _ in range(2)
    ]
    assert first == again


async def test_what_was_made_beforehand_must_fit_the_condition(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    a, b, other = [await create(engine, claimed, key) for key in ("a", "b", "other")]
    bad: list[tuple[Condition, list[Binding], str]] = [
        (BOTH, taking(a), "referenced_waitpoint_key_missing_binding: b"),
        (BOTH, taking(a, b, other), "extra_binding_not_referenced_by_condition: other"),
        (
            BOTH,
            [*taking(a), *[FreshWaitpoint(waitpoint_key="b")] * 2],
            "duplicate_waitpoint_key: only waitpoints made beforehand share a key",
        ),
    ]
    for condition, waitpoints, problem in bad:
        async with refused(engine, InvalidInput) as caught:
            await engine.suspend(claimed.handle, resume_condition=condition, waitpoints=waitpoints)
        assert caught.value.problem == problem


async def test_one_that_cannot_be_taken_over_spoils_the_whole(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    a = await create(engine, claimed, "a")
    clock.advance(ms=1)
    b = await create(engine, claimed, "b")

    async def suspend(*bindings: Binding) -> None:
        await engine.suspend(claimed.handle, resume_condition=BOTH, waitpoints=bindings)

    async with refused(engine, WaitpointNotFound):
        await suspend(*taking(a), UsePending(waitpoint_id=new_id()))
    await engine.close_waitpoint(claimed.execution_id, b.waitpoint_id, source="operator_override")
    async with refused(engine, WaitpointNotPending):
        await suspend(*taking(a, b))
    c = await create(engine, claimed, "b")
    clock.advance(ms=TTL_MS - 1)
    async with refused(engine, PendingWaitpointExpired):
        await suspend(*taking(a, c))
