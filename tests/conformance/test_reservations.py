"""Reservations: held by attempts, settled once, free when their attempt no longer goes on."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.budget_terms import BudgetDefinition, BudgetUpdate, UsageDimensions
from flowfabric.core.budgets import (
    RESERVATION_CHECK_MS,
    HardBreach,
    Reserved,
    ReserveOutcome,
    UsageAlreadyApplied,
    UsageCounted,
    UsageOutcome,
)
from flowfabric.core.conditions import Single
from flowfabric.core.results import Claimed
from flowfabric.core.states import FailureClass, PublicState
from flowfabric.engine.suspensions import Suspended
from flowfabric.errors import AlreadySuspended, ExecutionNotActive, LeaseExpired
from flowfabric.reconcilers import run_due
from flowfabric.testing import SettableClock
from tests.conformance.given import RETRYING, Given

TEAM = BudgetDefinition(budget_id="team", hard_limits={"tokens": 100})


async def reserve(
    engine: Engine, claimed: Claimed, tokens: int, key: str = "call"
) -> ReserveOutcome:
    return await engine.reserve_budget(
        claimed.handle, "team", {"tokens": tokens}, reservation_id=key
    )


async def settle(
    engine: Engine, tokens: int, key: str = "call", by: Claimed | None = None
) -> UsageOutcome:
    handle = None if by is None else by.handle
    return await engine.settle_reservation("team", key, {"tokens": tokens}, handle=handle)


async def books(engine: Engine) -> tuple[int, int]:
    """What is used, and what is reserved."""
    status = await engine.get_budget_status("team")
    return status.usage.get("tokens", 0), status.reserved.get("tokens", 0)


async def test_what_is_reserved_is_settled_with_what_was_used(engine: Engine, given: Given) -> None:
    await engine.create_budget(TEAM)
    claimed = await given.running()

    assert await reserve(engine, claimed, 60) == Reserved()
    assert await books(engine) == (0, 60)
    assert await settle(engine, 42) == UsageCounted()

    assert await books(engine) == (42, 0)


async def test_reserving_and_settling_are_safe_to_repeat(engine: Engine, given: Given) -> None:
    await engine.create_budget(TEAM)
    claimed = await given.running()

    assert [await reserve(engine, claimed, 60) for _ in range(3)] == [Reserved()] * 3
    assert await books(engine) == (0, 60)
    assert await settle(engine, 42) == UsageCounted()
    assert await settle(engine, 42) == UsageAlreadyApplied(prior_outcome=UsageCounted())
    assert await reserve(engine, claimed, 60) == UsageAlreadyApplied(prior_outcome=UsageCounted())

    assert await books(engine) == (42, 0)


async def test_nothing_passes_what_is_left(engine: Engine, given: Given) -> None:
    await engine.create_budget(TEAM)
    first, second = await given.running(), await given.running()
    await reserve(engine, first, 60)
    refused = HardBreach(dimension="tokens", current_usage=0, hard_limit=100, reserved=60)

    assert await reserve(engine, second, 41, "other") == refused
    assert await engine.report_usage_admin("team", ["tokens"], [41]) == refused
    assert await reserve(engine, second, 40, "other") == Reserved()
    assert await books(engine) == (0, 100)

    assert (await engine.get_budget_status("team")).breach_count == 2


async def test_giving_a_reservation_up_is_using_nothing(engine: Engine, given: Given) -> None:
    await engine.create_budget(TEAM)
    await reserve(engine, await given.running(), 60)

    assert await engine.settle_reservation("team", "call", {}) == UsageCounted()

    assert await books(engine) == (0, 0)


async def test_what_was_given_up_is_reserved_again_by_the_next_who_asks(
    engine: Engine, given: Given
) -> None:
    await engine.create_budget(TEAM)
    claimed = await given.running()
    for _ in range(2):
        assert await reserve(engine, claimed, 60) == Reserved()
        assert await engine.settle_reservation("team", "call", {}) == UsageCounted()
    assert await reserve(engine, claimed, 60) == Reserved()
    assert await books(engine) == (0, 60)
    await settle(engine, 40)
    assert await books(engine) == (40, 0)


async def test_using_more_than_was_reserved_counts_as_far_as_there_is_room(
    engine: Engine, given: Given
) -> None:
    await engine.create_budget(TEAM)
    claimed = await given.running()
    await reserve(engine, claimed, 10)
    assert await settle(engine, 70) == UsageCounted()

    await reserve(engine, claimed, 10, "next")
    refused = HardBreach(dimension="tokens", current_usage=100, hard_limit=100)
    assert await settle(engine, 70, "next") == refused
    assert await settle(engine, 70, "next") == UsageAlreadyApplied(prior_outcome=refused)

    assert await books(engine) == (100, 0)


async def test_a_reservation_outlives_a_reset_and_a_lower_limit(
    engine: Engine, given: Given
) -> None:
    await engine.create_budget(TEAM)
    await reserve(engine, await given.running(), 60)
    await engine.reset_budget("team")
    await engine.update_budget("team", BudgetUpdate(hard_limits={"tokens": 50}))
    assert await books(engine) == (0, 60)

    assert await settle(engine, 60) == UsageCounted()

    assert await books(engine) == (60, 0)


async def lose(engine: Engine, given: Given, claimed: Claimed, how: str) -> None:
    """End the attempt, or its lease, in one of the ways there are."""
    match how:
        case "completed":
            await engine.complete(claimed.handle, None)
        case "failed":
            await engine.fail(claimed.handle, "x", failure_class=FailureClass.PERMANENT)
        case "retried":
            await engine.fail(claimed.handle, "x")
        case "cancelled":
            await engine.cancel_execution(claimed.execution_id, reason="x")
        case "lease run out, unnoticed":
            given.clock.set_ms(claimed.lease_expires_at_ms)
        case "lease run out":
            given.clock.set_ms(claimed.lease_expires_at_ms)
            await engine.mark_lease_expired_if_due(claimed.execution_id)
        case "revoked":
            await engine.revoke_lease(claimed.execution_id, reason="x")
        case "delayed":
            await engine.delay(claimed.handle, given.clock.now_ms() + 60_000)
        case "suspended":
            await engine.suspend(claimed.handle, resume_condition=Single("gate"))
        case "claimed again":
            given.clock.set_ms(claimed.lease_expires_at_ms)
            await engine.mark_lease_expired_if_due(claimed.execution_id)
            await given.taken()
        case "deleted":
            await engine.complete(claimed.handle, None)
            given.clock.advance(days=8)
            await engine.trim_retention()
        case "replayed":
            await engine.fail(claimed.handle, "x", failure_class=FailureClass.PERMANENT)
            await engine.replay_execution(claimed.execution_id)
            await given.claimed(claimed.execution_id)
        case _:
            raise AssertionError(how)


LOSSES = (
    "completed",
    "failed",
    "retried",
    "cancelled",
    "lease run out, unnoticed",
    "lease run out",
    "revoked",
    "delayed",
    "suspended",
    "claimed again",
    "deleted",
    "replayed",
)


@pytest.mark.parametrize("how", LOSSES)
async def test_an_attempt_that_no_longer_goes_on_holds_nothing(
    engine: Engine, given: Given, how: str
) -> None:
    await engine.create_budget(TEAM)
    claimed = await given.running(policy=RETRYING)
    await reserve(engine, claimed, 60)

    await lose(engine, given, claimed, how)

    assert await books(engine) == (0, 0)
    assert await engine.report_usage_admin("team", ["tokens"], [100]) == UsageCounted()
    assert await books(engine) == (100, 0)


@pytest.mark.parametrize("how", LOSSES)
async def test_reservations_left_behind_are_cleared_away(
    engine: Engine, given: Given, clock: SettableClock, how: str
) -> None:
    await engine.create_budget(TEAM)
    claimed = await given.running(policy=RETRYING)
    await reserve(engine, claimed, 60)
    await lose(engine, given, claimed, how)

    clock.advance(ms=RESERVATION_CHECK_MS)
    assert (await engine.check_reservations()).acted == 1

    assert "budget_reservations" not in await engine.next_due()
    assert await books(engine) == (0, 0)


async def test_the_reservation_of_an_attempt_that_goes_on_stays(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await engine.create_budget(TEAM)
    claimed = await given.running(ttl_ms=10 * RESERVATION_CHECK_MS)
    await reserve(engine, claimed, 60)
    clock.advance(ms=RESERVATION_CHECK_MS)

    assert (await run_due(engine))["budget_reservations"] == 1

    assert await books(engine) == (0, 60)
    assert (await engine.next_due())["budget_reservations"] == RESERVATION_CHECK_MS
    assert await settle(engine, 60) == UsageCounted()
    assert "budget_reservations" not in await engine.next_due()


async def test_what_was_used_counts_though_the_reservation_is_gone(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await engine.create_budget(TEAM)
    claimed = await given.running()
    await reserve(engine, claimed, 60)
    clock.set_ms(claimed.lease_expires_at_ms + RESERVATION_CHECK_MS)
    await engine.check_reservations()

    assert await settle(engine, 42) == UsageCounted()
    assert isinstance(await settle(engine, 42), UsageAlreadyApplied)
    assert await books(engine) == (42, 0)


async def test_the_next_attempt_takes_over_a_reservation_of_the_same_name(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await engine.create_budget(TEAM)
    first = await given.overdue_lease()
    clock.set_ms(first.lease_expires_at_ms - 1)
    await reserve(engine, first, 60)
    clock.set_ms(first.lease_expires_at_ms)
    await engine.mark_lease_expired_if_due(first.execution_id)
    second = await given.taken()

    assert await reserve(engine, second, 70) == Reserved()

    assert await books(engine) == (0, 70)


@pytest.mark.parametrize("late", [False, True])
async def test_an_attempt_that_was_replaced_settles_for_itself(
    engine: Engine, given: Given, *, late: bool
) -> None:
    await engine.create_budget(TEAM)
    replaced = await given.running()
    await reserve(engine, replaced, 60)
    await engine.revoke_lease(replaced.execution_id, reason="stuck")
    successor = await given.taken()
    await reserve(engine, successor, 70)

    order = [(successor, 50), (replaced, 5)] if late else [(replaced, 5), (successor, 50)]
    for by, tokens in order:
        assert await settle(engine, tokens, by=by) == UsageCounted()
        if by is replaced and not late:
            assert await books(engine) == (5, 70)
    for by, tokens in order:
        repeated = await settle(engine, tokens, by=by)
        assert repeated == UsageAlreadyApplied(prior_outcome=UsageCounted())

    assert await books(engine) == (55, 0)
    assert isinstance(await reserve(engine, successor, 70), UsageAlreadyApplied)


async def test_an_attempt_that_was_replaced_settles_within_what_others_leave(
    engine: Engine, given: Given
) -> None:
    await engine.create_budget(TEAM)
    replaced = await given.running()
    await reserve(engine, replaced, 60)
    await engine.revoke_lease(replaced.execution_id, reason="stuck")
    successor = await given.taken()
    await reserve(engine, successor, 100)

    assert isinstance(await settle(engine, 1, by=replaced), HardBreach)
    assert await books(engine) == (0, 100)
    assert await settle(engine, 100, by=successor) == UsageCounted()
    assert await books(engine) == (100, 0)


async def test_only_the_holder_of_a_live_lease_may_reserve(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await engine.create_budget(TEAM)
    with pytest.raises(LeaseExpired, match="is not live; stop working on it"):
        await reserve(engine, await given.completed(), 1)
    with pytest.raises(LeaseExpired):
        await reserve(engine, await given.revoked(), 1)
    with pytest.raises(LeaseExpired):
        await reserve(engine, await given.overdue_lease(), 1)
    paused = await given.running()
    suspended = await engine.suspend(paused.handle, resume_condition=Single("gate"))
    assert isinstance(suspended, Suspended)
    with pytest.raises(AlreadySuspended):
        await engine.reserve_budget(suspended.handle, "team", {"tokens": 1}, reservation_id="call")
    assert await books(engine) == (0, 0)


# What a breach does


async def test_a_budget_may_fail_whoever_is_refused(engine: Engine, given: Given) -> None:
    await engine.create_budget(structs.replace(TEAM, on_hard_limit="fail"))
    reporting = await given.running(policy=RETRYING)
    reserving = await given.running(policy=RETRYING)

    refused = await engine.report_usage(
        reporting.handle, "team", UsageDimensions(custom={"tokens": 101})
    )
    assert isinstance(refused, HardBreach)
    assert isinstance(await reserve(engine, reserving, 101), HardBreach)

    for claimed in (reporting, reserving):
        assert await engine.read_execution_state(claimed.execution_id) is PublicState.FAILED
        described = await engine.describe_execution(claimed.execution_id)
        assert described is not None
        assert described.failure_reason == ("budget team has no room for 101 tokens: 0 of 100 used")
        with pytest.raises(ExecutionNotActive):
            await engine.complete(claimed.handle, None)


async def test_a_report_that_nobody_makes_fails_nobody(engine: Engine, given: Given) -> None:
    await engine.create_budget(structs.replace(TEAM, on_hard_limit="fail"))
    claimed = await given.running()

    assert isinstance(await engine.report_usage_admin("team", ["tokens"], [101]), HardBreach)

    assert await engine.read_execution_state(claimed.execution_id) is PublicState.ACTIVE


async def test_an_advisory_budget_fails_nobody(engine: Engine, given: Given) -> None:
    warning = structs.replace(TEAM, on_hard_limit="fail", enforcement_mode="warn")
    await engine.create_budget(warning)
    claimed = await given.running()

    await engine.report_usage(claimed.handle, "team", UsageDimensions(custom={"tokens": 101}))

    assert await engine.read_execution_state(claimed.execution_id) is PublicState.ACTIVE
