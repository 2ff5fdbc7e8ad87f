"""Signals that a wait cannot use: it leaves them for later waits."""

import pytest

from flowfabric import Engine
from flowfabric.core.bounds import KEPT_SIGNALS_MAX
from flowfabric.core.conditions import (
    AllConditions,
    Condition,
    Count,
    CountKind,
    Single,
)
from flowfabric.core.records import SignalEffect
from flowfabric.core.signals import SignalAccepted
from flowfabric.engine.suspensions import SuspendSatisfied
from flowfabric.errors import KeptSignalsFull, WaitpointNotFound
from flowfabric.testing import SettableClock
from tests.conditions import all_of_waitpoints
from tests.conformance.given import Given
from tests.conformance.observed import refused
from tests.conformance.pausing import TTL_MS, effect_of, pause
from tests.conformance.test_signals_kept import counted, kept, send

BOTH = all_of_waitpoints(["a", "b"])
SOURCES = Count(2, CountKind.DISTINCT_SOURCES, ("a",))


@pytest.mark.parametrize(
    ("condition", "sent", "used", "left"),
    [
        pytest.param(BOTH, "a1 a2 b3", ["1", "3"], ["2"], id="all of them"),
        pytest.param(SOURCES, "a1 a1 a2", ["1", "2"], ["1"], id="distinct sources"),
        pytest.param(
            AllConditions((Count(1, CountKind.DISTINCT_SIGNALS, ("a", "c")), Single("b"))),
            "a1 c2 b3",
            ["1", "3"],
            ["2"],
            id="a part that has enough",
        ),
    ],
)
@pytest.mark.parametrize("early", [True, False])
async def test_a_wait_leaves_what_it_cannot_use_for_the_next(
    engine: Engine,
    given: Given,
    condition: Condition,
    sent: str,
    used: list[str],
    left: list[str],
    early: bool,
) -> None:
    claimed = await given.running()
    if not early:
        await pause(given, claimed, condition)
    answers = [
        await send(engine, claimed.execution_id, each[0], source=each[1:]) for each in sent.split()
    ]
    if early:
        outcome = await engine.suspend(claimed.handle, resume_condition=condition)
        assert isinstance(outcome, SuspendSatisfied)
    else:
        kept_now = [isinstance(each, SignalAccepted) and each.kept for each in answers]
        assert kept_now == [False, True, False]
        claimed = await given.taken()
    assert await counted(engine, claimed) == used
    name = sent.split()[1][0]
    assert await kept(engine, claimed.execution_id) == [(name, source) for source in left]
    outcome = await engine.suspend(claimed.handle, resume_condition=Single(name))
    assert isinstance(outcome, SuspendSatisfied)
    assert await counted(engine, claimed) == left


@pytest.mark.parametrize("early", [True, False])
async def test_a_wait_that_ends_unmet_leaves_both_what_it_used_and_what_not(
    engine: Engine, given: Given, clock: SettableClock, early: bool
) -> None:
    claimed = await given.running()
    sent = [("a", "1"), ("a", "1"), ("a", "2")]
    three = Count(3, CountKind.DISTINCT_SOURCES, ("a",))
    for name, source in sent if early else ():
        await send(engine, claimed.execution_id, name, source=source)
    await pause(given, claimed, three, timeout_in_ms=1_000, timeout_behavior="auto_resume")
    for name, source in () if early else sent:
        await send(engine, claimed.execution_id, name, source=source)
    clock.advance(ms=1_000)
    await engine.expire_due_suspensions()
    assert await kept(engine, claimed.execution_id) == sent


async def test_a_second_approver_of_one_name_is_kept_for_the_next_wait(
    engine: Engine, given: Given
) -> None:
    """Two have a token for `a`, one for `b`; the wait for both needs one of each."""
    claimed = await given.running()
    made = [
        await engine.create_waitpoint(claimed.handle, key, expires_in_ms=TTL_MS) for key in "aab"
    ]
    await pause(given, claimed, BOTH, take_pending=True)
    effects = [
        effect_of(
            await engine.deliver_signal(
                claimed.execution_id,
                each.waitpoint_id,
                waitpoint_token=each.waitpoint_token,
                signal_name=each.waitpoint_key,
                source_identity=str(number),
            )
        )
        for number, each in enumerate(made)
    ]
    assert effects == [
        SignalEffect.APPENDED,
        SignalEffect.APPENDED_DUPLICATE,
        SignalEffect.SATISFIED,
    ]
    claimed = await given.taken()
    outcome = await engine.suspend(claimed.handle, resume_condition=Single("a"))
    assert isinstance(outcome, SuspendSatisfied)
    assert await counted(engine, claimed) == ["1"]


async def test_who_does_not_want_it_kept_is_told_that_the_wait_does_not_need_it(
    engine: Engine, given: Given
) -> None:
    taken = await pause(given, await given.running(), BOTH)
    await send(engine, taken.execution_id, "a", keep=False)
    async with refused(engine, WaitpointNotFound) as caught:
        await send(engine, taken.execution_id, "a", keep=False)
    assert "does not wait for 'a' now: it waits for 'b'" in str(caught.value)


async def test_a_wait_hears_what_it_needs_though_no_more_is_kept(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    for _ in range(KEPT_SIGNALS_MAX):
        await send(engine, claimed.execution_id, "other")
    taken = await pause(given, claimed, BOTH)
    await send(engine, taken.execution_id, "a")
    async with refused(engine, KeptSignalsFull):
        await send(engine, taken.execution_id, "a")
    assert effect_of(await send(engine, taken.execution_id, "b")) is SignalEffect.SATISFIED
