"""Grants of work under limits: they hold slots and count as starts."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.decisions import Changes
from flowfabric.core.gates import Gate, GateName, GateOwner
from flowfabric.core.ids import QuotaPolicyId
from flowfabric.core.results import (
    Claimed,
    ClaimGrant,
    GrantNotFound,
    ReclaimGrant,
    ResumeGrant,
)
from flowfabric.errors import (
    BudgetExceeded,
    ClaimGrantExpired,
    ConcurrencyLimitExceeded,
    RateLimitExceeded,
)
from flowfabric.store.base import Transaction
from flowfabric.testing import SettableClock
from tests.conformance.given import OTHER_WORKER, WORKER, Given
from tests.conformance.observed import refused

CAP = QuotaPolicyId("7d9f2c1e-1a1b-4c4d-8e8f-000000000011")
RATE = QuotaPolicyId("7d9f2c1e-1a1b-4c4d-8e8f-000000000012")
BUDGET = "7d9f2c1e-1a1b-4c4d-8e8f-000000000013"
TTL_MS = 1_000


def gate(policy: str = CAP, key: str = "") -> GateName:
    return GateName(GateOwner.QUOTA, policy, key)


@pytest.fixture
async def cap(engine: Engine) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=1)


@pytest.fixture
async def rate(engine: Engine) -> None:
    await engine.create_quota_policy(RATE, window_seconds=60, max_requests_per_window=2)


async def running(engine: Engine, policy: str = CAP) -> int:
    (used,) = (await engine.list_limit_use(policy)).gates
    return used.running


async def test_a_grant_holds_a_slot_until_it_is_over(
    engine: Engine, given: Given, clock: SettableClock, cap: None
) -> None:
    first = await given.waiting(gates=[gate()])
    second = await given.waiting(gates=[gate()])
    grant = await engine.issue_claim_grant(first, **WORKER, grant_ttl_ms=TTL_MS)
    assert await running(engine) == 1
    assert await engine.claim(**OTHER_WORKER) is None
    assert await engine.claim_for_worker(["default"], **OTHER_WORKER) is None
    async with refused(engine, ConcurrencyLimitExceeded):
        await engine.issue_claim_grant(second, **OTHER_WORKER)
    clock.set_ms(grant.expires_at_ms)
    assert await running(engine) == 1
    clock.advance(ms=1)
    assert await running(engine) == 0
    assert isinstance(await engine.issue_claim_grant(second, **OTHER_WORKER), ClaimGrant)


async def test_a_slot_goes_over_from_the_grant_to_the_lease(
    engine: Engine, given: Given, cap: None
) -> None:
    execution_id = await given.waiting(gates=[gate()])
    await given.waiting(gates=[gate()])
    grant = await engine.claim_for_worker(["default"], **WORKER)
    assert grant is not None
    assert grant.execution_id == execution_id
    claimed = await engine.claim_execution(execution_id, **WORKER, grant_key=grant.grant_key)
    assert await running(engine) == 1
    assert await engine.claim_for_worker(["default"], **WORKER) is None
    await engine.complete(claimed.handle)
    assert await engine.claim_for_worker(["default"], **WORKER) is not None


async def test_a_grant_that_came_to_nothing_holds_no_slot(
    engine: Engine, given: Given, cap: None
) -> None:
    cancelled, kept_back = [await given.waiting(gates=[gate()]) for _ in range(2)]
    await engine.issue_claim_grant(cancelled, **WORKER)
    await engine.cancel_execution(cancelled, reason="no")
    assert await running(engine) == 0
    await engine.issue_claim_grant(kept_back, **WORKER)
    await engine.block_execution_for_admission(kept_back, reason="paused_by_operator")
    assert await running(engine) == 0


async def test_grants_count_as_starts(
    engine: Engine, given: Given, clock: SettableClock, rate: None
) -> None:
    for _ in range(4):
        await given.waiting(gates=[gate(RATE)])
    for _ in range(2):
        assert await engine.claim_for_worker(["default"], **WORKER) is not None
    assert await engine.claim_for_worker(["default"], **WORKER) is None
    late = await given.waiting(gates=[gate(RATE)])
    async with refused(engine, RateLimitExceeded):
        await engine.issue_claim_grant(late, **WORKER)
    clock.advance("61s")
    assert await engine.claim_for_worker(["default"], **WORKER) is not None


async def started(engine: Engine) -> int:
    (used,) = (await engine.list_limit_use(RATE)).gates
    return used.started


async def test_a_grant_that_is_not_used_in_time_gives_its_start_back(
    engine: Engine, given: Given, clock: SettableClock, rate: None
) -> None:
    unused, used, late = [await given.waiting(gates=[gate(RATE)]) for _ in range(3)]
    await engine.issue_claim_grant(unused, **WORKER, grant_ttl_ms=TTL_MS)
    clock.advance(ms=10)
    grant = await engine.issue_claim_grant(used, **WORKER, grant_ttl_ms=TTL_MS)
    await engine.claim_execution(used, **WORKER, grant_key=grant.grant_key)
    assert await started(engine) == 2
    clock.advance(ms=TTL_MS + 1)
    assert (await engine.return_due_grants()).acted == 1
    assert await started(engine) == 1
    await engine.issue_claim_grant(late, **WORKER, grant_ttl_ms=TTL_MS)
    async with refused(engine, RateLimitExceeded):
        await engine.issue_claim_grant(unused, **WORKER)
    clock.advance(ms=TTL_MS + 1)
    # A grant in place of one whose time is over takes over its start.
    await engine.issue_claim_grant(late, **OTHER_WORKER)
    assert await started(engine) == 2


async def test_a_grant_that_counted_no_start_gives_none_back(
    engine: Engine, given: Given, clock: SettableClock, rate: None
) -> None:
    resumable = (await given.resumable(gates=[gate(RATE)])).execution_id
    cancelled = await given.waiting(gates=[gate(RATE)])
    before = await started(engine)
    await engine.issue_claim_grant(resumable, **WORKER, grant_ttl_ms=TTL_MS)
    await engine.issue_claim_grant(cancelled, **WORKER, grant_ttl_ms=TTL_MS)
    await engine.cancel_execution(cancelled, reason="no")
    clock.advance(ms=TTL_MS + 1)
    await engine.return_due_grants()
    assert await started(engine) == before + 1


async def test_a_limit_that_did_not_count_a_grant_gives_no_start_back_for_it(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await engine.create_quota_policy(RATE, max_concurrent=10)
    granted, _ = [await given.waiting(gates=[gate(RATE)]) for _ in range(2)]
    await engine.issue_claim_grant(granted, **WORKER, grant_ttl_ms=TTL_MS)
    await engine.set_limit(RATE, window_ms=60_000, max_requests_per_window=2)
    assert await engine.claim(**WORKER) is not None
    clock.advance(ms=TTL_MS + 1)
    assert (await engine.return_due_grants()).acted == 1
    assert await started(engine) == 1


async def test_a_grant_that_is_used_too_late_gives_its_start_back_once(
    engine: Engine, given: Given, clock: SettableClock, rate: None
) -> None:
    execution_id, _ = [await given.waiting(gates=[gate(RATE)]) for _ in range(2)]
    grant = await engine.issue_claim_grant(execution_id, **WORKER, grant_ttl_ms=TTL_MS)
    assert await engine.claim(**WORKER) is not None
    clock.advance(ms=TTL_MS + 1)
    for _ in range(2):
        with pytest.raises(ClaimGrantExpired):
            await engine.claim_execution(execution_id, **WORKER, grant_key=grant.grant_key)
        assert await started(engine) == 1
    await engine.return_due_grants()
    assert await started(engine) == 1


async def test_a_takeover_that_comes_too_late_gives_its_start_back(
    engine: Engine, given: Given, clock: SettableClock, rate: None
) -> None:
    lost = (await given.revoked(gates=[gate(RATE)])).execution_id
    before = await started(engine)
    grant = await engine.issue_reclaim_grant(lost, **WORKER, grant_ttl_ms=TTL_MS)
    assert isinstance(grant, ReclaimGrant)
    assert await started(engine) == before + 1
    clock.advance(ms=TTL_MS + 1)
    late = await engine.reclaim_execution(lost, **WORKER, grant_key=grant.grant_key)
    assert isinstance(late, GrantNotFound)
    assert await started(engine) == before


async def test_an_operator_in_place_of_a_grant_that_ran_out_gives_its_start_back(
    engine: Engine, given: Given, clock: SettableClock, rate: None
) -> None:
    execution_id = await given.waiting(gates=[gate(RATE)])
    await engine.issue_claim_grant(execution_id, **WORKER, grant_ttl_ms=TTL_MS)
    clock.advance(ms=TTL_MS + 1)
    await engine.issue_grant_and_claim(execution_id)
    assert await started(engine) == 0
    assert await running(engine, RATE) == 1


async def test_a_scheduler_alone_is_given_again_what_was_not_used_in_time(
    engine: Engine, given: Given, clock: SettableClock, rate: None
) -> None:
    wanted = {await given.waiting(), await given.waiting(gates=[gate(RATE)])}
    for _ in range(3):
        grants = [
            await engine.claim_for_worker(["default"], **WORKER, grant_ttl_ms=TTL_MS)
            for _ in range(3)
        ]
        assert {each.execution_id for each in grants if each is not None} == wanted
        assert None in grants
        clock.advance(ms=TTL_MS + 1)


async def test_what_resumes_needs_no_start_and_what_was_lost_does(
    engine: Engine, given: Given, rate: None
) -> None:
    resumable = (await given.resumable(gates=[gate(RATE)])).execution_id
    lost = (await given.revoked(gates=[gate(RATE)])).execution_id
    assert isinstance(await engine.issue_claim_grant(resumable, **WORKER), ResumeGrant)
    async with refused(engine, RateLimitExceeded):
        await engine.issue_reclaim_grant(lost, **WORKER)
    given.clock.advance("61s")
    assert isinstance(await engine.issue_reclaim_grant(lost, **WORKER), ReclaimGrant)


async def test_asking_again_for_a_grant_takes_nothing_more(
    engine: Engine, given: Given, cap: None, rate: None
) -> None:
    execution_id = await given.waiting(gates=[gate(), gate(RATE)])
    grant = await engine.issue_claim_grant(execution_id, **WORKER)
    for _ in range(3):
        assert await engine.issue_claim_grant(execution_id, **WORKER) == grant
    (used,) = (await engine.list_limit_use(RATE)).gates
    assert used.started == 1


async def test_a_closed_budget_grants_nothing(engine: Engine, given: Given) -> None:
    name = GateName(GateOwner.BUDGET, BUDGET)
    execution_id = await given.waiting(gates=[name])

    async def close(tx: Transaction) -> None:
        found = await tx.lock_one(Gate, (name.gate_id,))
        assert found is not None
        await tx.save(Changes(updates=(structs.replace(found, closed=True),)))

    await engine.store.transact(close)
    async with refused(engine, BudgetExceeded):
        await engine.issue_claim_grant(execution_id, **WORKER)
    assert await engine.claim_for_worker(["default"], **WORKER) is None


async def test_operators_pass_limits(engine: Engine, given: Given, cap: None) -> None:
    for _ in range(2):
        await engine.issue_grant_and_claim(await given.waiting(gates=[gate()]))
    assert await running(engine) == 2


async def test_limited_and_unlimited_work_are_granted_in_turns(
    engine: Engine, given: Given
) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=10)
    limited = {await given.waiting(gates=[gate(key=f"tenant-{n}")]) for n in range(3)}
    free = {await given.waiting() for _ in range(3)}
    grants = [await engine.claim_for_worker(["default"], **WORKER) for _ in range(6)]
    kinds = [None if each is None else each.execution_id in limited for each in grants]
    assert kinds in ([True, False] * 3, [False, True] * 3)
    assert {each.execution_id for each in grants if each is not None} == limited | free
    assert await engine.claim_for_worker(["default"], **WORKER) is None


async def test_keys_take_turns(engine: Engine, given: Given) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=10)
    for _ in range(5):
        await given.waiting(gates=[gate(key="big")])
    small = await given.waiting(gates=[gate(key="small")])
    grants = [await engine.claim_for_worker(["default"], **WORKER) for _ in range(2)]
    assert small in {each.execution_id for each in grants if each is not None}


async def test_a_takeover_needs_room(engine: Engine, given: Given, cap: None) -> None:
    lost = (await given.revoked(gates=[gate()])).execution_id
    other = await given.waiting(gates=[gate()])
    taken = await engine.issue_claim_grant(other, **OTHER_WORKER)
    async with refused(engine, ConcurrencyLimitExceeded):
        await engine.issue_reclaim_grant(lost, **WORKER)
    await engine.claim_execution(other, **OTHER_WORKER, grant_key=taken.grant_key)
    await engine.cancel_execution(other, reason="no")
    grant = await engine.issue_reclaim_grant(lost, **WORKER)
    assert isinstance(grant, ReclaimGrant)
    claimed = await engine.reclaim_execution(lost, **WORKER, grant_key=grant.grant_key)
    assert isinstance(claimed, Claimed)
    assert await running(engine) == 1
