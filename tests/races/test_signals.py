"""Signals that meet something else at the same moment, each meeting 500 times.

Whatever the order, there is exactly one outcome, and it is one that either order
allows. Both kinds of outcome turn up, or there was no race.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import TypeVar

from msgspec import Struct

from flowfabric import Engine, FlowFabricError
from flowfabric.core.conditions import ByName, Condition, Count, CountKind, Single
from flowfabric.core.ids import ExecutionId, WaitpointId
from flowfabric.core.results import Claimed
from flowfabric.core.signals import SignalAccepted
from flowfabric.core.states import PublicState
from flowfabric.core.waitpoints import UsePending, WaitpointToken
from flowfabric.outages import NO_ANSWER
from tests.races.given import claim, running
from tests.races.rival import DEADLOCKS, Rival

ROUNDS = 500
AT_ONCE = 8
"""Meetings under way together; each takes two connections."""

T = TypeVar("T")
Pair = tuple[str, str]
Meeting = tuple[Callable[[], Awaitable[object]], Callable[[], Awaitable[object]]]

APPROVED = Single("gate", ByName("approved"))
TWO_SOURCES = Count(2, CountKind.DISTINCT_SOURCES, ("gate",))


class Address(Struct, frozen=True, kw_only=True):
    """Where signals go."""

    execution_id: ExecutionId
    waitpoint_id: WaitpointId
    token: WaitpointToken


async def many(work: Sequence[T], do: Callable[[T], Coroutine[object, object, None]]) -> None:
    """Do all, some at a time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(each: T) -> None:
        async with room:
            await do(each)

    await asyncio.gather(*(one(each) for each in work))


async def paused(
    engine: Engine, condition: Condition = APPROVED, *, timeout_at_ms: int | None = None
) -> list[Address]:
    addresses: list[Address] = []

    async def suspend(claimed: Claimed) -> None:
        outcome = await engine.suspend(
            claimed.handle, resume_condition=condition, timeout_at_ms=timeout_at_ms
        )
        addresses.append(
            Address(
                execution_id=claimed.execution_id,
                waitpoint_id=outcome.details.waitpoint_id,
                token=outcome.details.waitpoint_token,
            )
        )

    await many(await running(engine, ROUNDS), suspend)
    return addresses


def signal(engine: Engine, to: Address, source: str = "") -> Callable[[], Awaitable[object]]:
    return lambda: engine.deliver_signal(
        to.execution_id,
        to.waitpoint_id,
        waitpoint_token=to.token,
        signal_name="approved",
        source_identity=source,
    )


async def told(call: Callable[[], Awaitable[object]]) -> str:
    """What came of it, in one word."""
    try:
        answer = await call()
    except NO_ANSWER:
        # No outcome of a meeting: let the test fail with what the database said.
        raise
    except FlowFabricError as error:
        return type(error).__name__
    return answer.effect.value if isinstance(answer, SignalAccepted) else type(answer).__name__


async def meet(meetings: Sequence[Meeting]) -> list[Pair]:
    """Let each two calls meet; now the one, now the other has a head start."""
    pairs: dict[int, Pair] = {}

    async def one(number: int) -> None:
        left, right = meetings[number]
        if number % 2:
            second, first = await asyncio.gather(told(right), told(left))
        else:
            first, second = await asyncio.gather(told(left), told(right))
        pairs[number] = (first, second)

    await many(range(len(meetings)), one)
    return [pairs[number] for number in range(len(meetings))]


async def states(engine: Engine, addresses: Sequence[Address]) -> list[PublicState | None]:
    return [await engine.read_execution_state(each.execution_id) for each in addresses]


async def test_a_signal_meets_the_timeout(engine: Engine, rival: Rival) -> None:
    due_ms = await engine.server_time_ms() - 1
    addresses = await paused(engine, timeout_at_ms=due_ms)
    pairs = await meet(
        [
            (signal(engine, to), partial(engine.expire_suspension, to.execution_id))
            for to in addresses
        ]
    )
    resumed = ("resume_condition_satisfied", "AlreadySatisfied")
    ended = ("TargetNotSignalable", "SuspensionExpired")
    assert set(pairs) == {resumed, ended}
    expected = [PublicState.WAITING if p == resumed else PublicState.FAILED for p in pairs]
    assert await states(engine, addresses) == expected
    assert len(await claim(engine, "next", limit=ROUNDS)) == Counter(pairs)[resumed]
    await nothing_is_left_open(rival)


async def test_signals_meet_the_sweep_of_timeouts(engine: Engine, rival: Rival) -> None:
    due_ms = await engine.server_time_ms() - 1
    addresses = await paused(engine, timeout_at_ms=due_ms)
    effects: dict[ExecutionId, str] = {}

    async def deliver(to: Address) -> None:
        effects[to.execution_id] = await told(signal(engine, to))

    async def sweep() -> int:
        acted = 0
        while (swept := await engine.expire_due_suspensions(limit=25)).full or swept.acted:
            acted += swept.acted
        return acted

    _, left, right = await asyncio.gather(many(addresses, deliver), sweep(), sweep())
    # What a signal held while a sweep looked is left to the next sweep.
    left += await sweep()
    counted = Counter(effects.values())
    assert set(counted) <= {"resume_condition_satisfied", "TargetNotSignalable"}
    assert left + right == counted["TargetNotSignalable"]
    ready = await claim(engine, "next", limit=ROUNDS)
    assert len(ready) == counted["resume_condition_satisfied"]
    await nothing_is_left_open(rival)


async def test_a_signal_meets_a_cancellation(engine: Engine, rival: Rival) -> None:
    addresses = await paused(engine)
    pairs = await meet(
        [
            (signal(engine, to), partial(engine.cancel_execution, to.execution_id, reason="enough"))
            for to in addresses
        ]
    )
    assert set(pairs) == {
        ("resume_condition_satisfied", "Cancelled"),
        ("TargetNotSignalable", "Cancelled"),
    }
    assert set(await states(engine, addresses)) == {PublicState.CANCELLED}
    assert await claim(engine, "next", limit=ROUNDS) == []
    await nothing_is_left_open(rival)


async def test_two_signals_meet_where_one_is_enough(engine: Engine, rival: Rival) -> None:
    addresses = await paused(engine)
    pairs = await meet([(signal(engine, to), signal(engine, to)) for to in addresses])
    assert {tuple(sorted(pair)) for pair in pairs} == {
        ("WaitpointClosed", "resume_condition_satisfied")
    }
    assert len(await claim(engine, "next", limit=ROUNDS)) == ROUNDS
    assert await rival.count("select count(*) from signal") == ROUNDS
    await nothing_is_left_open(rival)


async def test_two_signals_meet_where_both_are_needed(engine: Engine, rival: Rival) -> None:
    addresses = await paused(engine, TWO_SOURCES)
    pairs = await meet(
        [(signal(engine, to, "alice"), signal(engine, to, "bob")) for to in addresses]
    )
    assert {tuple(sorted(pair)) for pair in pairs} == {
        ("appended_to_waitpoint", "resume_condition_satisfied")
    }
    assert len(await claim(engine, "next", limit=ROUNDS)) == ROUNDS
    assert await rival.count("select count(*) from signal where satisfier") == 2 * ROUNDS
    await nothing_is_left_open(rival)


async def test_the_same_signal_meets_itself(engine: Engine, rival: Rival) -> None:
    addresses = await paused(engine)

    def deliver(to: Address) -> Callable[[], Awaitable[object]]:
        return lambda: engine.deliver_signal(
            to.execution_id,
            to.waitpoint_id,
            waitpoint_token=to.token,
            signal_name="approved",
            idempotency_key="click",
        )

    pairs = await meet([(deliver(to), deliver(to)) for to in addresses])
    assert {tuple(sorted(pair)) for pair in pairs} == {
        ("SignalDuplicate", "resume_condition_satisfied")
    }
    assert await rival.count("select count(*) from signal") == ROUNDS


async def test_a_suspend_meets_an_early_signal(engine: Engine, rival: Rival) -> None:
    meetings: list[Meeting] = []

    async def prepare(claimed: Claimed) -> None:
        made = await engine.create_waitpoint(claimed.handle, "gate", expires_in_ms=600_000)
        to = Address(
            execution_id=claimed.execution_id,
            waitpoint_id=made.waitpoint_id,
            token=made.waitpoint_token,
        )
        bindings = [UsePending(waitpoint_id=made.waitpoint_id)]
        meetings.append(
            (
                lambda: engine.suspend(
                    claimed.handle, resume_condition=APPROVED, waitpoints=bindings
                ),
                signal(engine, to),
            )
        )

    await many(await running(engine, ROUNDS), prepare)
    pairs = await meet(meetings)
    waited = ("Suspended", "resume_condition_satisfied")
    went_on = ("SuspendSatisfied", "buffered_for_pending_waitpoint")
    assert set(pairs) == {waited, went_on}
    assert len(await claim(engine, "next", limit=ROUNDS)) == Counter(pairs)[waited]
    assert await rival.count("select count(*) from signal where satisfier") == ROUNDS
    await nothing_is_left_open(rival)


async def test_a_suspend_meets_a_signal_by_name(engine: Engine, rival: Rival) -> None:
    """Nothing waited under the name when it was sent, or just now something did."""

    def meeting(claimed: Claimed) -> Meeting:
        return (
            lambda: engine.suspend(claimed.handle, resume_condition=APPROVED),
            lambda: engine.deliver_operator_signal(
                claimed.execution_id, "gate", signal_name="approved"
            ),
        )

    pairs = await meet([meeting(claimed) for claimed in await running(engine, ROUNDS)])
    waited = ("Suspended", "resume_condition_satisfied")
    went_on = ("SuspendSatisfied", "kept_for_next_wait")
    assert set(pairs) == {waited, went_on}
    assert len(await claim(engine, "next", limit=ROUNDS)) == Counter(pairs)[waited]
    assert await rival.count("select count(*) from signal where satisfier") == ROUNDS
    await nothing_is_left_open(rival)


async def nothing_is_left_open(rival: Rival) -> None:
    assert await rival.count("select count(*) from suspension where closed_at_ms is null") == 0
    assert await rival.count("select count(*) from waitpoint where state <> 'closed'") == 0
    assert await rival.count("select count(*) from live where open_waitpoint_count > 0") == 0
    assert await rival.count(DEADLOCKS) == 0
