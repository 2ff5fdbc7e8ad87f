"""Claims of work under limits."""

import asyncio
from collections.abc import Sequence

import pytest

from flowfabric import Engine
from flowfabric.core.conditions import Single
from flowfabric.core.decisions import Changes
from flowfabric.core.diagnosis import Cause
from flowfabric.core.gates import Admitted, Gate, GateName, GateOwner
from flowfabric.core.ids import ExecutionId, QuotaPolicyId
from flowfabric.core.limits import WhileSuspended
from flowfabric.core.results import Claimed
from flowfabric.core.states import BlockingReason
from flowfabric.engine import gates
from flowfabric.engine.limits import GateUse
from flowfabric.errors import ConcurrencyLimitExceeded, InvalidInput
from flowfabric.store.base import Transaction
from flowfabric.testing import SettableClock
from tests.conformance.given import TTL_MS, WORKER, Given

CAP = QuotaPolicyId("7d9f2c1e-1a1b-4c4d-8e8f-000000000001")
RATE = QuotaPolicyId("7d9f2c1e-1a1b-4c4d-8e8f-000000000002")
RETRIED = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 200}}}
BUDGET = "7d9f2c1e-1a1b-4c4d-8e8f-000000000003"


def gate(policy: str = CAP, key: str = "") -> GateName:
    return GateName(GateOwner.QUOTA, policy, key)


async def claim(
    engine: Engine, limit: int = 100, lanes: Sequence[str] = ("default",)
) -> list[Claimed]:
    return await engine.claim_many(list(lanes), limit=limit, lease_ttl_ms=TTL_MS, **WORKER)


async def created(given: Given, count: int, **fields: object) -> list[ExecutionId]:
    """So many, the oldest first."""
    made: list[ExecutionId] = []
    for _ in range(count):
        made.append(await given.waiting(**fields))
        given.clock.advance("1ms")
    return made


def ids(claimed: Sequence[Claimed]) -> list[ExecutionId]:
    return [each.execution_id for each in claimed]


async def use(engine: Engine, policy: str = CAP) -> dict[str, GateUse]:
    page = await engine.list_limit_use(policy)
    return {each.key: each for each in page.gates}


@pytest.fixture
async def cap(engine: Engine) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=2)


@pytest.fixture
async def rate(engine: Engine) -> None:
    await engine.create_quota_policy(RATE, window_seconds=60, max_requests_per_window=3)


async def test_no_more_run_at_once_than_may(engine: Engine, given: Given, cap: None) -> None:
    waiting = await created(given, 5, gates=[gate()])
    first = await claim(engine)
    assert ids(first) == waiting[:2]
    assert await claim(engine) == []
    assert (await use(engine))[""].running == 2
    await engine.complete(first[0].handle)
    assert ids(await claim(engine)) == waiting[2:3]


async def test_what_has_no_limit_is_claimed_beside(engine: Engine, given: Given, cap: None) -> None:
    limited = await created(given, 3, gates=[gate()])
    free = [await given.waiting() for _ in range(3)]
    assert set(ids(await claim(engine))) == {*free, *limited[:2]}


async def test_limited_and_unlimited_work_take_turns(engine: Engine, given: Given) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=100)
    limited = {await given.waiting(gates=[gate()]) for _ in range(4)}
    free = {await given.waiting() for _ in range(4)}
    claimed = [ids(await claim(engine, 2)) for _ in range(4)]
    assert {frozenset(each) <= frozenset(limited) for each in claimed} == {True, False}
    assert {each for batch in claimed for each in batch} == limited | free
    assert [set(batch) <= limited for batch in claimed].count(True) == 2


async def test_each_key_has_slots_of_its_own(engine: Engine, given: Given, cap: None) -> None:
    for key in ("ann", "bob", "cy"):
        for _ in range(3):
            await given.waiting(gates=[gate(key=key)])
    assert len(await claim(engine)) == 6
    assert {key: each.running for key, each in (await use(engine)).items()} == {
        "ann": 2,
        "bob": 2,
        "cy": 2,
    }


async def test_keys_take_turns_whatever_waits_for_each(engine: Engine, given: Given) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=100)
    for _ in range(20):
        await given.waiting(gates=[gate(key="large")])
    small = [await given.waiting(gates=[gate(key=f"small-{n}")]) for n in range(30)]
    seen: set[ExecutionId] = set()
    for _ in range(12):
        seen.update(ids(await claim(engine, 4)))
    assert seen >= set(small)


async def test_an_execution_passes_all_of_its_gates(
    engine: Engine, given: Given, cap: None, rate: None
) -> None:
    for key in ("ann", "bob"):
        for _ in range(5):
            await given.waiting(gates=[gate(key=key), gate(RATE)])
    claimed = await claim(engine)
    assert len(claimed) == 3
    for each in claimed:
        await engine.complete(each.handle)
    assert await claim(engine) == []
    assert (await use(engine, RATE))[""].started == 3


async def test_tasks_may_share_a_limit(engine: Engine, given: Given, cap: None) -> None:
    for kind in ("mail", "sms", "push"):
        await given.waiting(execution_kind=kind, gates=[gate()])
    assert len(await claim(engine)) == 2


async def test_no_more_start_in_a_window_than_may(
    engine: Engine, given: Given, clock: SettableClock, rate: None
) -> None:
    waiting = await created(given, 7, gates=[gate(RATE)])
    for number in range(3):
        (claimed,) = await claim(engine, 1)
        assert claimed.execution_id == waiting[number]
        await engine.complete(claimed.handle)
        clock.advance("10s")
    assert await claim(engine) == []
    assert engine.claims_again_in_s == 30
    clock.advance("29.999s")
    assert await claim(engine) == []
    clock.advance("1ms")
    assert ids(await claim(engine)) == waiting[3:4]
    clock.advance("10s")
    assert ids(await claim(engine)) == waiting[4:5]


@pytest.mark.parametrize(("back_s", "waits_s"), [(50, 110), (3_600, 0)])
async def test_a_clock_that_was_set_back_holds_a_rate_up_for_two_windows_at_most(
    engine: Engine, given: Given, clock: SettableClock, rate: None, back_s: int, waits_s: int
) -> None:
    waiting = await created(given, 4, gates=[gate(RATE)])
    assert ids(await claim(engine)) == waiting[:3]
    clock.set_ms(clock.now_ms() - back_s * 1_000)
    if waits_s:
        clock.advance(ms=waits_s * 1_000 - 1)
        assert await claim(engine) == []
        clock.advance(ms=1)
    again = await given.waiting(gates=[gate(RATE)])
    assert set(ids(await claim(engine))) >= {waiting[3], again}


async def test_who_goes_on_after_a_pause_needs_a_slot_but_no_start(
    engine: Engine, given: Given, clock: SettableClock, rate: None
) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=3)
    for _ in range(3):
        await given.waiting(gates=[gate(), gate(RATE)])
    first, *others = await claim(engine)
    clock.advance("1ms")
    later = await given.waiting(gates=[gate(), gate(RATE)])
    await engine.delay(first.handle, clock.now_ms() + 1_000)
    clock.advance("1s")
    await engine.promote_due_delays()
    assert ids(await claim(engine)) == [first.execution_id]
    assert (await use(engine, RATE))[""].started == 3
    await engine.complete(others[0].handle)
    assert await claim(engine) == []
    clock.advance("1m")
    assert ids(await claim(engine)) == [later]


async def test_who_goes_on_does_not_wait_behind_those_that_may_not_start(
    engine: Engine, given: Given, clock: SettableClock, rate: None
) -> None:
    for _ in range(3):
        await given.waiting(gates=[gate(RATE)])
    first, second, _ = await claim(engine)
    urgent = await given.waiting(gates=[gate(RATE)], priority=9)
    for each in (first, second):
        await engine.delay(each.handle, clock.now_ms() + 1_000)
    clock.advance("1s")
    await engine.promote_due_delays()
    grant = await engine.claim_for_worker(["default"], **WORKER)
    assert grant is not None
    assert grant.execution_id == first.execution_id
    assert ids(await claim(engine)) == [second.execution_id]
    clock.advance("1m")
    assert urgent in ids(await claim(engine))


@pytest.mark.parametrize("pause", ["suspend", "delay"])
async def test_who_pauses_keeps_the_slot_where_the_policy_says_so(
    engine: Engine, given: Given, clock: SettableClock, pause: str
) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=1, while_suspended="keep")
    (first, second) = await created(given, 2, gates=[gate(key="ann")])
    (claimed,) = await claim(engine)
    if pause == "suspend":
        await engine.suspend(claimed.handle, resume_condition=Single("go"))
    else:
        await engine.delay(claimed.handle, clock.now_ms() + 1_000)
    assert await claim(engine) == []
    assert (await use(engine))["ann"].running == 1
    assert (await engine.explain_execution(second)).remark == "1 of 1 running or suspended for ann"
    if pause == "suspend":
        await engine.resume_execution(first)
    else:
        clock.advance("1s")
        await engine.promote_due_delays()
    assert (await use(engine))["ann"].running == 1
    assert (await engine.explain_execution(first)).remark == ""
    (claimed,) = await claim(engine)
    assert claimed.execution_id == first
    assert (await use(engine))["ann"].running == 1
    await engine.complete(claimed.handle)
    assert ids(await claim(engine)) == [second]


async def test_a_slot_that_was_kept_comes_free_with_the_end_or_a_retry(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=1, while_suspended="keep")
    waiting = await created(given, 3, gates=[gate()], policy=RETRIED)
    (claimed,) = await claim(engine)
    await engine.suspend(claimed.handle, resume_condition=Single("go"))
    await engine.cancel_execution(waiting[0], reason="over")
    (claimed,) = await claim(engine)
    assert claimed.execution_id == waiting[1]
    await engine.fail(claimed.handle, "again")
    assert ids(await claim(engine)) == [waiting[2]]


async def test_a_grant_for_what_kept_its_slot_takes_no_other(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=1, while_suspended="keep")
    (first, second) = await created(given, 2, gates=[gate()])
    (claimed,) = await claim(engine)
    await engine.suspend(claimed.handle, resume_condition=Single("go"))
    with pytest.raises(ConcurrencyLimitExceeded):
        await engine.issue_claim_grant(second, grant_ttl_ms=1_000, **WORKER)
    await engine.resume_execution(first)
    grant = await engine.claim_for_worker(["default"], **WORKER)
    assert grant is not None
    assert grant.execution_id == first
    assert (await use(engine))[""].running == 1
    assert await claim(engine) == []


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that keep slots remember what they have to spare, however little is held."""
    monkeypatch.setattr(gates, "COUNTED_EACH_TIME_MAX", -1)


async def test_slots_to_spare_are_counted_again_once_they_are_used_up(
    engine: Engine, given: Given, remembering: None
) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=3, while_suspended="keep")
    await created(given, 6, gates=[gate()])
    (first,) = await claim(engine, 1)
    await engine.complete(first.handle)
    assert len(await claim(engine)) == 3
    assert await claim(engine) == []


async def test_slots_to_spare_are_counted_again_after_an_operator_passed_the_limit(
    engine: Engine, given: Given, remembering: None
) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=3, while_suspended="keep")
    waiting = await created(given, 6, gates=[gate()])
    assert len(await claim(engine, 1)) == 1
    await engine.issue_grant_and_claim(waiting[5])
    assert len(await claim(engine)) == 1


@pytest.mark.parametrize("taken_by", ["grant", "hand"])
async def test_slots_to_spare_are_fewer_once_another_way_takes_one(
    engine: Engine, given: Given, remembering: None, taken_by: str
) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=3, while_suspended="keep")
    waiting = await created(given, 6, gates=[gate()])
    assert len(await claim(engine, 1)) == 1
    if taken_by == "grant":
        await engine.issue_claim_grant(waiting[5], grant_ttl_ms=1_000, **WORKER)
    else:
        assert await engine.check_admission(CAP, await given.waiting()) == Admitted()
    assert len(await claim(engine, 5)) >= 1
    assert (await use(engine))[""].running == 3


@pytest.mark.parametrize(("cap_after", "fits"), [(2, 1), (5, 4)])
async def test_slots_to_spare_follow_a_changed_limit(
    engine: Engine, given: Given, remembering: None, cap_after: int, fits: int
) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=3, while_suspended="keep", name="mail")
    await created(given, 6, gates=[gate()])
    assert len(await claim(engine, 1)) == 1
    await engine.set_limit("mail", active_concurrency_cap=cap_after)
    assert len(await claim(engine)) == fits


async def test_setting_a_limit_leaves_what_becomes_of_slots_alone(engine: Engine) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=1, while_suspended="keep", name="mail")
    assert (await engine.set_limit("mail", active_concurrency_cap=5)).spec.limits.keeps
    changed = await engine.set_limit("mail", active_concurrency_cap=5, while_suspended="release")
    assert not changed.spec.limits.keeps
    limits = await engine.read_quota_policy_limits(CAP)
    assert limits is not None
    assert limits.while_suspended is WhileSuspended.RELEASE
    with pytest.raises(InvalidInput, match="while_suspended"):
        await engine.set_limit("mail", while_suspended="forget")
    with pytest.raises(InvalidInput, match="while_suspended"):
        await engine.create_quota_policy(RATE, max_concurrent=1, while_suspended="forget")


async def test_whatever_lets_go_of_a_lease_frees_its_slot(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=1)
    for _ in range(6):
        await given.waiting(gates=[gate()])

    async def next_one() -> Claimed:
        (claimed,) = await claim(engine)
        assert await claim(engine) == []
        return claimed

    await engine.fail((await next_one()).handle, "no")
    await engine.cancel_execution((await next_one()).execution_id, reason="gone")
    delayed = await next_one()
    await engine.delay(delayed.handle, clock.now_ms() + 10**9)
    await engine.cancel((await next_one()).handle, "gone")
    handed = await next_one()
    await engine.hand_back(handed.handle, reason="later")
    again = await next_one()
    assert again.execution_id == handed.execution_id
    revoked = again
    await engine.revoke_lease(revoked.execution_id, reason="drained")
    lost = await next_one()
    clock.set_ms(lost.lease_expires_at_ms)
    # Nobody has noticed yet, and it is free all the same.
    assert len(await claim(engine)) == 1


async def test_a_lost_lease_needs_a_start_again(
    engine: Engine, given: Given, clock: SettableClock, rate: None
) -> None:
    limited = await given.waiting(gates=[gate(RATE)])
    for _ in range(3):
        (claimed,) = await claim(engine)
        clock.set_ms(claimed.lease_expires_at_ms - 20_000)
        await engine.revoke_lease(limited, reason="drained")
    assert await claim(engine) == []
    clock.advance("1m")
    assert ids(await claim(engine)) == [limited]


async def test_a_live_grant_holds_a_slot(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=1)
    granted, other = await created(given, 2, gates=[gate()])
    await engine.issue_claim_grant(granted, grant_ttl_ms=5_000, **WORKER)
    assert await claim(engine) == []
    clock.advance(ms=5_001)
    assert len(await claim(engine)) == 1
    assert other is not None


async def test_an_admission_by_hand_holds_a_slot(engine: Engine, given: Given) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=1)
    by_hand = await given.waiting(lane_id="other")
    limited = await given.waiting(gates=[gate()])
    await engine.check_admission(CAP, by_hand)
    assert await claim(engine) == []
    await engine.release_admission(CAP, by_hand)
    assert ids(await claim(engine)) == [limited]


async def test_a_changed_limit_counts_from_the_next_claim_on(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    policy = await engine.set_limit("mail", window_ms=60_000, max_requests_per_window=1)
    for _ in range(6):
        await given.waiting(gates=[gate(policy.quota_policy_id)])
    assert len(await claim(engine)) == 1
    assert await claim(engine) == []
    await engine.set_limit("mail", window_ms=60_000, max_requests_per_window=3)
    assert len(await claim(engine)) == 2
    await engine.set_limit("mail", active_concurrency_cap=4)
    assert len(await claim(engine)) == 1
    await engine.set_limit("mail")
    assert len(await claim(engine)) == 2


async def test_nothing_passes_a_closed_gate(engine: Engine, given: Given) -> None:
    name = GateName(GateOwner.BUDGET, BUDGET)
    waiting = await given.waiting(gates=[name])
    (claimed,) = await claim(engine)
    await engine.hand_back(claimed.handle, reason="later")

    async def close(*, closed: bool) -> None:
        async def body(tx: Transaction) -> None:
            key = (name.gate_id,)
            found = (await tx.lock(Gate, [key]))[key]
            changed = Gate(
                gate_id=found.gate_id,
                owner_kind=found.owner_kind,
                owner_id=found.owner_id,
                gate_key=found.gate_key,
                closed=closed,
            )
            await tx.save(Changes(updates=(changed,)))

        await engine.store.transact(body)

    await close(closed=True)
    assert await claim(engine) == []
    await close(closed=False)
    assert ids(await claim(engine)) == [waiting]


async def test_lanes_kinds_namespaces_and_capabilities_hold_for_limited_work(
    engine: Engine, given: Given, cap: None
) -> None:
    needs = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    wanted = await given.waiting(gates=[gate(key="a")], policy=needs, namespace="shop")
    await given.waiting(gates=[gate(key="b")], lane_id="other")
    await given.waiting(gates=[gate(key="c")], execution_kind="other")

    async def ask(
        kinds: Sequence[str] = ("work",),
        capabilities: Sequence[str] = ("gpu",),
        namespace: str = "shop",
    ) -> list[ExecutionId]:
        return ids(
            await engine.claim_many(
                ["default"],
                limit=9,
                kinds=kinds,
                capabilities=capabilities,
                namespace=namespace,
                **WORKER,
            )
        )

    assert await ask(kinds=["other"]) == []
    assert await ask(kinds=[]) == []
    assert await ask(capabilities=[]) == []
    assert await ask(namespace="default") == []
    await engine.pause_lane("default")
    assert await ask() == []
    await engine.resume_lane("default")
    assert await ask() == [wanted]


async def test_the_best_of_a_key_comes_first(engine: Engine, given: Given) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=1)
    await given.waiting(gates=[gate()], priority=1)
    best = await given.waiting(gates=[gate()], priority=9)
    assert ids(await claim(engine)) == [best]


async def test_a_waiting_claim_is_woken_when_a_slot_comes_free(
    engine: Engine, given: Given
) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=1)
    one, two = await created(given, 2, gates=[gate()])
    (held,) = await claim(engine)
    waiting = asyncio.create_task(engine.claim(max_wait_ms=60_000, **WORKER))
    await asyncio.sleep(0)
    await engine.complete(held.handle)
    async with asyncio.timeout(5):
        claimed = await waiting
    assert claimed is not None
    assert {held.execution_id, claimed.execution_id} == {one, two}


async def test_reads_tell_the_limit_that_an_execution_waits_for(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=1)
    first, second = await created(given, 2, gates=[gate(key="ann")])
    free = await given.waiting()

    async def told(execution_id: ExecutionId) -> tuple[str | None, str]:
        info = await engine.read_execution_info(execution_id)
        seen = await engine.describe_execution(execution_id)
        assert info is not None
        assert seen is not None
        page = (await engine.find_executions()).executions
        assert [each for each in page if each.execution_id == execution_id] == [seen]
        closely = await engine.inspect_execution(execution_id)
        assert closely is not None
        assert closely.blocking_detail == seen.blocking_detail
        shown = (info.state_vector.blocking_reason, info.blocking_detail)
        assert (seen.blocking_reason, seen.blocking_detail or "") == shown
        return shown

    for_worker = (BlockingReason.WAITING_FOR_WORKER, "")
    assert [await told(each) for each in (first, second, free)] == [for_worker] * 3
    claimed = await claim(engine, 2)
    waiting = (BlockingReason.WAITING_FOR_QUOTA, "1 of 1 running for ann")
    assert await told(second) == waiting
    clock.advance(ms=TTL_MS)
    assert await told(second) == for_worker
    assert first in ids(claimed)


async def test_why_names_the_limit_that_holds_up_longest(
    engine: Engine, given: Given, cap: None, rate: None
) -> None:
    slow = "7d9f2c1e-1a1b-4c4d-8e8f-000000000004"
    await engine.create_quota_policy(slow, window_seconds=3_600, max_requests_per_window=2)
    every = [gate(), gate(RATE), gate(slow)]
    (*_, last) = await created(given, 6, gates=every)
    assert len(await claim(engine)) == 2
    assert (await engine.explain_execution(last)).remark == (
        "2 of 2 started in the last 1h, room in 1h"
    )


async def test_why_tells_what_holds_up_limited_work_with_the_numbers(
    engine: Engine, given: Given, clock: SettableClock, rate: None
) -> None:
    policy = await engine.set_limit("sync", active_concurrency_cap=2)
    await engine.register_worker(["default"], **WORKER, liveness_ttl_ms=60_000)
    first, *_, last = await created(
        given, 5, gates=[gate(policy.quota_policy_id, "ann"), gate(RATE)]
    )
    assert (await engine.explain_execution(first)).cause is Cause.QUEUED
    claimed = await claim(engine)
    why = await engine.explain_execution(last)
    assert why.cause is Cause.LIMITED
    assert why.sentence == "It waits for its limit 'sync': 2 of 2 running for ann; 2 ahead."
    assert why.remark == "2 of 2 running for ann"
    for each in claimed:
        await engine.complete(each.handle)
    await engine.set_limit("sync")
    clock.advance("10s")
    await claim(engine)
    why = await engine.explain_execution(last)
    assert why.sentence == (
        f"It waits for its limit '{RATE}': 3 of 3 started in the last 1m, room in 50.0s; 1 ahead."
    )
