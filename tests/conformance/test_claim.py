"""Claiming: which execution a worker gets, and what it then holds."""

import asyncio

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.bounds import BATCH_MAX
from flowfabric.core.events import Event, EventCategory
from flowfabric.core.handles import Handle, HandleKind
from flowfabric.core.ids import LaneId, Namespace, WorkerId, WorkerInstanceId, partition_of
from flowfabric.core.records import Attempt
from flowfabric.core.results import Claimed
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
)
from flowfabric.errors import InvalidCapabilities
from flowfabric.testing import SettableClock
from tests.conformance.given import (
    BACKOFF_MS,
    ENDED,
    OTHER_WORKER,
    SET_ASIDE,
    WORKER,
    Given,
    new,
)
from tests.conformance.observed import (
    call,
    cursor_of,
    events_since,
    execution_of,
    refuses,
    unchanged,
)


def needing(*capabilities: str) -> dict[str, object]:
    return {"routing_requirements": {"required_capabilities": list(capabilities)}}


async def test_a_claim_gives_a_lease_and_all_a_worker_needs(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting(
        lane_id="mail",
        execution_kind="send",
        namespace="shop",
        tags={"cairn.instance_id": "i-1"},
        input_payload=b"\x00\xff",
        payload_encoding="raw",
        priority=3,
        execution_deadline_at_ms=clock.now_ms() + 99_000,
        policy={"timeout_policy": {"attempt_timeout_ms": 7_000}},
    )
    before = await execution_of(engine, execution_id)
    now_ms = clock.advance("5s")
    claimed = await engine.claim("mail", **WORKER, lease_ttl_ms=10_001)
    assert claimed is not None
    lease_id, attempt_id = claimed.lease_id, claimed.attempt_id
    assert claimed == Claimed(
        handle=Handle(
            backend_tag=engine.store.backend_tag,
            kind=HandleKind.FRESH,
            execution_id=execution_id,
            attempt_index=0,
            attempt_id=attempt_id,
            lease_id=lease_id,
            lease_epoch=1,
            lease_ttl_ms=10_001,
            lane_id=LaneId("mail"),
            worker_instance_id=WorkerInstanceId("worker-instance"),
            signature=claimed.handle.signature,
        ),
        attempt_type=AttemptType.INITIAL,
        lease_expires_at_ms=now_ms + 10_001,
        namespace=Namespace("shop"),
        execution_kind="send",
        priority=3,
        payload=b"\x00\xff",
        payload_encoding="raw",
        flow_id=None,
        retry_count=0,
        created_at_ms=before.created_at_ms,
        deadline_at_ms=before.deadline_at_ms,
        attempt_deadline_ms=now_ms + 7_000,
    )
    assert await execution_of(engine, execution_id) == structs.replace(
        before,
        lifecycle_phase=LifecyclePhase.ACTIVE,
        ownership_state=OwnershipState.LEASED,
        eligibility_state=EligibilityState.NOT_APPLICABLE,
        blocking_reason=BlockingReason.NONE,
        attempt_state=AttemptState.RUNNING_ATTEMPT,
        public_state=PublicState.ACTIVE,
        ready=False,
        total_attempt_count=1,
        current_attempt_id=attempt_id,
        lease_id=lease_id,
        lease_epoch=1,
        worker_id="worker",
        worker_instance_id="worker-instance",
        lease_acquired_at_ms=now_ms,
        lease_expires_at_ms=now_ms + 10_001,
        lease_last_renewed_at_ms=now_ms,
        attempt_deadline_ms=now_ms + 7_000,
        started_at_ms=now_ms,
        last_transition_at_ms=now_ms,
        last_mutation_at_ms=now_ms,
    )


async def test_a_claim_starts_an_attempt_and_tells_of_it(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting(namespace="shop", tags={"cairn.instance_id": "i-1"})
    cursor, now_ms = await cursor_of(engine), clock.advance("5s")
    claimed = await engine.claim(**WORKER)
    assert claimed is not None
    lease_id, attempt_id = claimed.lease_id, claimed.attempt_id
    assert await engine.list_attempts(execution_id) == (
        Attempt(
            partition_key=partition_of(execution_id),
            execution_id=execution_id,
            attempt_index=0,
            attempt_id=attempt_id,
            attempt_type=AttemptType.INITIAL,
            attempt_state=AttemptLifecycle.STARTED,
            created_at_ms=now_ms,
            started_at_ms=now_ms,
            lease_id=lease_id,
            lease_epoch=1,
            worker_id=WorkerId("worker"),
            worker_instance_id=WorkerInstanceId("worker-instance"),
        ),
    )
    assert await events_since(engine, cursor) == [
        Event(
            category=EventCategory.LEASE,
            event_type="acquired",
            partition_key=partition_of(execution_id),
            execution_id=execution_id,
            lease_id=lease_id,
            lease_epoch=1,
            attempt_index=0,
            worker_instance_id=WorkerInstanceId("worker-instance"),
            namespace=Namespace("shop"),
            instance_tag="i-1",
            occurred_at_ms=now_ms,
        )
    ]


async def test_what_waits_for_no_worker_is_not_claimed(engine: Engine, given: Given) -> None:
    for state in (*SET_ASIDE, "running", "overdue_lease", *ENDED):
        await given.state(state)
    async with unchanged(engine):
        assert await engine.claim(**WORKER) is None
        assert await engine.claim_many(["default"], limit=5, **WORKER) == []


async def test_a_lane_nobody_has_used_holds_nothing(engine: Engine, given: Given) -> None:
    await given.waiting()
    async with unchanged(engine):
        assert await engine.claim("elsewhere", **WORKER) is None


async def test_higher_priority_goes_first_then_the_older(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    low_old = await given.waiting(priority=1)
    clock.advance(ms=1)
    high_old = await given.waiting(priority=50)
    clock.advance(ms=1)
    low_new = await given.waiting(priority=1)
    high_new = await given.waiting(priority=50, lane_id="other")
    clock.advance(ms=1)
    newest = await given.waiting(priority=50, execution_kind="other")
    claimed = await engine.claim_many(["default", "other"], limit=9, **WORKER)
    order = [high_old, high_new, newest, low_old, low_new]
    assert [each.execution_id for each in claimed] == order


async def test_a_batch_takes_no_more_than_its_limit_best_first(
    engine: Engine, given: Given
) -> None:
    ids = [await given.waiting(priority=priority) for priority in (5, 9, 7)]
    first = await engine.claim_many(["default"], limit=2, **WORKER)
    assert [each.execution_id for each in first] == [ids[1], ids[2]]
    rest = await engine.claim_many(["default"], limit=2, **WORKER)
    assert [each.execution_id for each in rest] == [ids[0]]


async def test_a_worker_gets_only_the_kinds_it_asks_for(engine: Engine, given: Given) -> None:
    await given.waiting(execution_kind="a", priority=9)
    wanted = await given.waiting(execution_kind="b")
    assert await engine.claim(**WORKER, kinds=[]) is None
    assert await engine.claim(**WORKER, kinds=["c"]) is None
    claimed = await engine.claim(**WORKER, kinds=["b", "c"])
    assert claimed is not None
    assert claimed.execution_id == wanted


async def test_a_worker_gets_what_it_has_every_capability_for(engine: Engine, given: Given) -> None:
    cases: list[tuple[tuple[str, ...], tuple[str, ...], bool]] = [
        ((), (), True),
        ((), ("gpu",), True),
        (("gpu",), (), False),
        (("gpu",), ("gpu",), True),
        (("gpu",), ("cuda", "gpu"), True),
        (("cuda", "gpu"), ("gpu",), False),
        (("gpu",), ("GPU",), False),
        (("torch>=2.3",), ("torch>=2.3",), True),
        (("ü", "a"), ("a", "ü"), True),
    ]
    for number, (required, offered, match) in enumerate(cases):
        kind = f"kind-{number}"
        execution_id = await given.waiting(policy=needing(*required), execution_kind=kind)
        claimed = await engine.claim(**WORKER, capabilities=offered, kinds=[kind])
        found = None if claimed is None else claimed.execution_id
        assert found == (execution_id if match else None), (required, offered)


async def test_work_for_others_at_the_head_of_the_lane_is_no_obstacle(
    engine: Engine, given: Given
) -> None:
    for _ in range(20):
        await given.waiting(priority=9, policy=needing("gpu"))
    wanted = await given.waiting()
    claimed = await engine.claim(**WORKER)
    assert claimed is not None
    assert claimed.execution_id == wanted


async def test_workers_that_claim_at_once_get_different_executions(
    engine: Engine, given: Given
) -> None:
    ids = {await given.waiting() for _ in range(5)}
    claims = await asyncio.gather(*(engine.claim(**WORKER) for _ in range(8)))
    claimed = [claim.execution_id for claim in claims if claim is not None]
    assert (len(claimed), set(claimed)) == (5, ids)


async def test_a_claim_may_wait_for_work(engine: Engine) -> None:
    waiting = asyncio.create_task(engine.claim(**WORKER, max_wait_ms=60_000))
    await asyncio.sleep(0)
    created = await engine.create_execution(new())
    claimed = await waiting
    assert claimed is not None
    assert claimed.execution_id == created.execution_id


async def test_a_claim_waits_no_longer_than_it_is_told(engine: Engine) -> None:
    assert await engine.claim(**WORKER, max_wait_ms=1) is None


# Later claims of the same execution


async def test_a_retry_is_a_new_attempt_that_knows_why(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    first = await given.retrying("flaky")
    before = await execution_of(engine, first.execution_id)
    now_ms = clock.advance(ms=BACKOFF_MS)
    await engine.promote_delayed(first.execution_id)
    cursor = await cursor_of(engine)
    second = await engine.claim(**WORKER)
    assert second is not None
    assert (second.attempt_type, second.handle.kind) == (AttemptType.RETRY, HandleKind.FRESH)
    assert (second.attempt_index, second.lease_epoch, second.retry_count) == (1, 2, 1)
    _, attempt = await engine.list_attempts(first.execution_id)
    assert attempt == Attempt(
        partition_key=before.partition_key,
        execution_id=first.execution_id,
        attempt_index=1,
        attempt_id=second.attempt_id,
        attempt_type=AttemptType.RETRY,
        attempt_state=AttemptLifecycle.STARTED,
        created_at_ms=now_ms,
        started_at_ms=now_ms,
        lease_id=second.lease_id,
        lease_epoch=2,
        worker_id=WorkerId("worker"),
        worker_instance_id=WorkerInstanceId("worker-instance"),
        retry_reason="flaky",
        previous_attempt_index=0,
    )
    after = await execution_of(engine, first.execution_id)
    assert after.started_at_ms == before.started_at_ms
    assert (after.pending_retry_reason, after.pending_previous_attempt_index) == (None, None)
    assert (after.current_attempt_index, after.total_attempt_count) == (1, 2)
    (event,) = await events_since(engine, cursor)
    assert (event.event_type, event.attempt_index, event.reason) == ("acquired", 1, None)


async def test_a_replay_is_a_new_attempt_that_knows_who_asked(engine: Engine, given: Given) -> None:
    first = await given.completed()
    await engine.replay_execution(first.execution_id, reason="again", requested_by="ann")
    second = await engine.claim(**WORKER)
    assert second is not None
    old, attempt = await engine.list_attempts(first.execution_id)
    assert old.attempt_state is AttemptLifecycle.ENDED_SUCCESS
    assert attempt == Attempt(
        partition_key=old.partition_key,
        execution_id=first.execution_id,
        attempt_index=1,
        attempt_id=second.attempt_id,
        attempt_type=AttemptType.REPLAY,
        attempt_state=AttemptLifecycle.STARTED,
        created_at_ms=given.clock.now_ms(),
        started_at_ms=given.clock.now_ms(),
        lease_id=second.lease_id,
        lease_epoch=second.lease_epoch,
        worker_id=WorkerId("worker"),
        worker_instance_id=WorkerInstanceId("worker-instance"),
        replay_reason="again",
        replay_requested_by="ann",
        replayed_from_attempt_index=0,
    )
    after = await execution_of(engine, first.execution_id)
    assert (after.pending_replay_reason, after.pending_replay_requested_by) == (None, None)


@pytest.mark.parametrize(
    ("state", "reason"),
    [("expired_lease", "lease_expired"), ("revoked", "lease_revoked")],
)
async def test_a_lost_lease_is_reclaimed_with_a_new_attempt(
    engine: Engine, given: Given, clock: SettableClock, state: str, reason: str
) -> None:
    execution_id = await given.state(state)
    before = await execution_of(engine, execution_id)
    (lost,) = await engine.list_attempts(execution_id)
    cursor = await cursor_of(engine)
    now_ms = clock.advance("1s")
    claimed = await engine.claim(**OTHER_WORKER)
    assert claimed is not None
    assert (claimed.attempt_type, claimed.handle.kind) == (
        AttemptType.RECLAIM,
        HandleKind.RECLAIMED,
    )
    assert claimed.lease_epoch == before.lease_epoch + 1
    old, attempt = await engine.list_attempts(execution_id)
    assert old == structs.replace(
        lost,
        attempt_state=AttemptLifecycle.INTERRUPTED_RECLAIMED,
        ended_at_ms=before.lease_expired_at_ms or now_ms,
        failure_reason=reason,
    )
    assert attempt == Attempt(
        partition_key=before.partition_key,
        execution_id=execution_id,
        attempt_index=1,
        attempt_id=claimed.attempt_id,
        attempt_type=AttemptType.RECLAIM,
        attempt_state=AttemptLifecycle.STARTED,
        created_at_ms=now_ms,
        started_at_ms=now_ms,
        lease_id=claimed.lease_id,
        lease_epoch=claimed.lease_epoch,
        worker_id=WorkerId("other"),
        worker_instance_id=WorkerInstanceId("other-instance"),
        previous_attempt_index=0,
        reclaim_reason=reason,
    )
    after = await execution_of(engine, execution_id)
    assert (after.ownership_state, after.lease_reclaim_count) == (OwnershipState.LEASED, 1)
    assert (after.lease_expired_at_ms, after.lease_revoked_at_ms) == (None, None)
    assert (after.lease_revoke_reason, after.worker_id) == (None, "other")
    assert after.last_transition_at_ms == before.last_transition_at_ms
    (event,) = await events_since(engine, cursor)
    assert (event.event_type, event.reason) == ("reclaimed", reason)
    assert (event.lease_id, event.attempt_index) == (claimed.lease_id, 1)


async def test_an_interrupted_attempt_is_continued(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    first = await given.running(policy={"timeout_policy": {"attempt_timeout_ms": 60_000}})
    clock.advance("20s")
    await engine.delay(first.handle, clock.now_ms() + 5_000)
    (parked,) = await engine.list_attempts(first.execution_id)
    clock.advance("90s")
    await engine.promote_delayed(first.execution_id)
    cursor = await cursor_of(engine)
    now_ms = clock.advance("1s")
    second = await engine.claim(**OTHER_WORKER)
    assert second is not None
    assert (second.attempt_type, second.handle.kind) == (AttemptType.INITIAL, HandleKind.RESUMED)
    assert (second.attempt_index, second.attempt_id) == (0, first.attempt_id)
    assert (second.lease_epoch, second.attempt_deadline_ms) == (2, now_ms + 40_000)
    assert await engine.list_attempts(first.execution_id) == (
        structs.replace(
            parked,
            attempt_state=AttemptLifecycle.STARTED,
            resumed_at_ms=now_ms,
            suspended_at_ms=None,
            suspension_id=None,
            lease_id=second.lease_id,
            lease_epoch=2,
            worker_id=WorkerId("other"),
            worker_instance_id=WorkerInstanceId("other-instance"),
        ),
    )
    after = await execution_of(engine, first.execution_id)
    assert (after.total_attempt_count, after.attempt_time_left_ms) == (1, None)
    (event,) = await events_since(engine, cursor)
    assert (event.event_type, event.reason, event.lease_epoch) == ("acquired", "claim_resumed", 2)


# Bad input


async def test_bad_claims_are_refused(engine: Engine, given: Given) -> None:
    await given.waiting()
    bad_many: list[tuple[str, object, dict[str, object]]] = [
        ("limit", ["default"], {"limit": 0}),
        ("limit", ["default"], {"limit": BATCH_MAX + 1}),
        ("limit", ["default"], {"limit": "1"}),
        ("lane_ids", [], {"limit": 1}),
        ("lane_ids", "default", {"limit": 1}),
        ("lane_ids", None, {"limit": 1}),
        ("lane_ids", ["default"] * (BATCH_MAX + 1), {"limit": 1}),
        ("lane_id", ["bad\nlane"], {"limit": 1}),
    ]
    bad_one: list[tuple[str, dict[str, object]]] = [
        ("worker_id", {"worker_id": ""}),
        ("worker_id", {"worker_id": "a b"}),
        ("worker_id", {"worker_id": "w" * 257}),
        ("worker_id", {"worker_id": None}),
        ("worker_instance_id", {"worker_instance_id": ""}),
        ("worker_instance_id", {"worker_instance_id": 5}),
        ("lease_ttl_ms", {"lease_ttl_ms": 0}),
        ("lease_ttl_ms", {"lease_ttl_ms": 24 * 60 * 60 * 1_000 + 1}),
        ("lease_ttl_ms", {"lease_ttl_ms": 1.5}),
        ("max_wait_ms", {"max_wait_ms": -1}),
        ("max_wait_ms", {"max_wait_ms": 600_001}),
        ("kinds", {"kinds": "work"}),
        ("kinds", {"kinds": 5}),
        ("kinds", {"kinds": ["work"] * (BATCH_MAX + 1)}),
        ("execution_kind", {"kinds": [""]}),
        ("execution_kind", {"kinds": [5]}),
    ]
    async with unchanged(engine):
        for field, lanes, named in bad_many:
            await refuses(engine, field, "claim_many", lanes, **(WORKER | named))
        for field, named in bad_one:
            await refuses(engine, field, "claim", **(WORKER | named))
        offers: list[object] = ["gpu", ["a,b"], [""], [5], ["t"] * 257]
        for offered in offers:
            with pytest.raises(InvalidCapabilities, match="worker:"):
                await call(engine, "claim", **WORKER, capabilities=offered)
