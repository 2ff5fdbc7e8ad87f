"""Keeping a lease, reporting progress, and losing the lease once too often."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.bounds import BATCH_MAX, TEXT_BYTES_MAX
from flowfabric.core.results import AlreadySatisfied, Marked, Renewed, Revoked, Updated
from flowfabric.core.states import AttemptLifecycle, PublicState
from flowfabric.testing import SettableClock
from tests.conformance.expected import attempt_ended, completion_event, ended, lease_event
from tests.conformance.given import TAGGED, Given, fence_of
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refuses,
    state_of,
    unchanged,
)


@pytest.mark.parametrize("form", ["renew", "renew_many", "renew_lease"])
async def test_renewing_extends_the_lease_by_its_time(
    engine: Engine, given: Given, clock: SettableClock, form: str
) -> None:
    running = await given.running(ttl_ms=10_000, **TAGGED)
    before = await execution_of(engine, running.execution_id)
    attempts = await engine.list_attempts(running.execution_id)
    cursor = await cursor_of(engine)
    now_ms = clock.advance(ms=9_999)
    renewed: object
    if form == "renew":
        renewed = await engine.renew(running.handle)
    elif form == "renew_many":
        (renewed,) = await engine.renew_many([running.handle])
    else:
        renewed = await engine.renew_lease(
            running.execution_id, fence=fence_of(running), lease_ttl_ms=10_000
        )
    assert renewed == Renewed(expires_at_ms=now_ms + 10_000, lease_epoch=1)
    after = await execution_of(engine, running.execution_id)
    assert after == structs.replace(
        before,
        lease_expires_at_ms=now_ms + 10_000,
        lease_last_renewed_at_ms=now_ms,
        last_mutation_at_ms=now_ms,
    )
    assert await engine.list_attempts(running.execution_id) == attempts
    assert await events_since(engine, cursor) == [lease_event(after, "renewed", now_ms)]


async def test_leases_that_were_taken_away_are_found_by_looking(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    live, revoked, cancelled, done, passed_on = [await given.running() for _ in range(5)]
    await engine.revoke_lease(revoked.execution_id, reason="stuck")
    await engine.cancel_execution(cancelled.execution_id, reason="not needed")
    await engine.complete(done.handle)
    await engine.hand_back(passed_on.handle, reason="closing")
    handles = [each.handle for each in (live, revoked, cancelled, done, passed_on)]

    async with unchanged(engine):
        lost = await engine.find_lost_leases(handles)
        assert sorted(lost, key=handles.index) == handles[1:]
        assert await engine.find_lost_leases([]) == []


async def test_a_lease_may_be_renewed_again_and_again(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running(ttl_ms=100)
    for _ in range(5):
        clock.advance(ms=99)
        renewed = await engine.renew(running.handle)
        assert renewed == Renewed(expires_at_ms=clock.now_ms() + 100, lease_epoch=1)
    assert (await engine.complete(running.handle)).public_state is PublicState.COMPLETED


async def test_renewing_by_fence_takes_a_time_of_its_own(engine: Engine, given: Given) -> None:
    running = await given.running(ttl_ms=10)
    now_ms = given.clock.now_ms()
    for ttl_ms in (1, 24 * 60 * 60 * 1_000):
        renewed = await engine.renew_lease(
            running.execution_id, fence=fence_of(running), lease_ttl_ms=ttl_ms
        )
        assert renewed.expires_at_ms == now_ms + ttl_ms
    async with unchanged(engine):
        bad: list[object] = [0, 24 * 60 * 60 * 1_000 + 1, -1, "1", True, 1.0]
        for ttl in bad:
            await refuses(
                engine,
                "lease_ttl_ms",
                "renew_lease",
                running.execution_id,
                fence=fence_of(running),
                lease_ttl_ms=ttl,
            )


async def test_a_batch_of_renewals_answers_each_in_order(engine: Engine, given: Given) -> None:
    long, short = await given.running(ttl_ms=900), await given.running(ttl_ms=20)
    now_ms = given.clock.now_ms()
    assert await engine.renew_many([short.handle, long.handle, short.handle]) == [
        Renewed(expires_at_ms=now_ms + 20, lease_epoch=1),
        Renewed(expires_at_ms=now_ms + 900, lease_epoch=1),
        Renewed(expires_at_ms=now_ms + 20, lease_epoch=1),
    ]
    async with unchanged(engine):
        assert await engine.renew_many([]) == []
        await refuses(engine, "handles", "renew_many", [short.handle] * (BATCH_MAX + 1))
        await refuses(engine, "handles", "renew_many", short.handle)


# Progress


async def test_progress_keeps_what_is_not_given(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running()
    before = await execution_of(engine, running.execution_id)
    cursor = await cursor_of(engine)
    now_ms = clock.advance("1s")
    answer = Updated(execution_id=running.execution_id)
    told = await engine.progress(running.handle, percent=75, message="three quarters")
    assert told == answer
    first = structs.replace(
        before,
        progress_pct=75,
        progress_message="three quarters",
        progress_updated_at_ms=now_ms,
        last_mutation_at_ms=now_ms,
    )
    assert await execution_of(engine, running.execution_id) == first
    now_ms = clock.advance("1s")
    await engine.progress(running.handle, message="")
    second = structs.replace(
        first, progress_message="", progress_updated_at_ms=now_ms, last_mutation_at_ms=now_ms
    )
    assert await execution_of(engine, running.execution_id) == second
    await engine.progress(running.handle, percent=0)
    third = structs.replace(second, progress_pct=0)
    assert await execution_of(engine, running.execution_id) == third
    clock.advance("1s")
    async with unchanged(engine):
        assert await engine.progress(running.handle) == answer
    assert await events_since(engine, cursor) == []


async def test_bad_progress_is_refused(engine: Engine, given: Given) -> None:
    handle = (await given.running()).handle
    bad: list[tuple[str, object]] = [
        ("percent", -1),
        ("percent", 101),
        ("percent", "50"),
        ("percent", True),
        ("message", 5),
        ("message", "m" * (TEXT_BYTES_MAX + 1)),
        ("message", "a\x00b"),
    ]
    async with unchanged(engine):
        for field, value in bad:
            await refuses(engine, field, "progress", handle, **{field: value})


# Losing it once too often


@pytest.mark.parametrize("how", ["expired", "revoked"])
async def test_work_that_loses_more_leases_than_its_policy_allows_fails(
    engine: Engine, given: Given, clock: SettableClock, how: str
) -> None:
    first = await given.running(policy={"max_reclaim_count": 1}, ttl_ms=1_000, **TAGGED)
    execution_id = first.execution_id
    clock.advance("1s")
    assert await engine.mark_lease_expired_if_due(execution_id) == Marked(
        execution_id=execution_id, public_state=PublicState.ACTIVE
    )
    second = await given.taken(ttl_ms=1_000)
    before = await execution_of(engine, execution_id)
    assert before.lease_reclaim_count == 1
    earlier, last = await engine.list_attempts(execution_id)
    cursor = await cursor_of(engine)
    if how == "expired":
        now_ms = clock.advance("1s")
        assert await engine.mark_lease_expired_if_due(execution_id) == Marked(
            execution_id=execution_id, public_state=PublicState.FAILED
        )
        lost, epoch = lease_event(before, "expired", now_ms), 2
    else:
        now_ms = clock.advance(ms=1)
        assert await engine.revoke_lease(execution_id, reason="drain") == Revoked(
            lease_id=second.lease_id, lease_epoch=3
        )
        lost, epoch = lease_event(before, "revoked", now_ms, "drain"), 3
    after = await execution_of(engine, execution_id)
    assert after == ended(
        before,
        PublicState.FAILED,
        now_ms,
        lease_epoch=epoch,
        worker_deaths=2 if how == "expired" else 1,
        failure_reason="max_reclaims_exceeded",
    )
    assert await engine.list_attempts(execution_id) == (
        earlier,
        attempt_ended(
            last, AttemptLifecycle.INTERRUPTED_RECLAIMED, now_ms, "max_reclaims_exceeded"
        ),
    )
    assert await events_since(engine, cursor) == [lost, completion_event(after, now_ms)]
    async with unchanged(engine):
        assert await engine.mark_lease_expired_if_due(execution_id) == AlreadySatisfied(
            reason="not_active"
        )


@pytest.mark.parametrize(
    "policy", [{"max_reclaim_count": 0}, {"timeout_policy": {"max_reclaim_count": 0}}]
)
async def test_a_policy_may_allow_no_reclaim_at_all(
    engine: Engine, given: Given, policy: object
) -> None:
    claimed = await given.expired_lease(policy=policy)
    state = await state_of(engine)
    assert [each.public_state for each in state.executions.values()] == [PublicState.FAILED]
    assert await engine.read_total_attempt_count(claimed.execution_id) == 1
