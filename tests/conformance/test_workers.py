"""The workers that are there, and what becomes of what they had in hand."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.bounds import SWEEP_BATCH
from flowfabric.core.gates import LimitUse
from flowfabric.core.ids import LaneId, Namespace, WorkerId, WorkerInstanceId
from flowfabric.core.limits import DeclaredLimit, QuotaSpec
from flowfabric.core.states import BlockingReason, EligibilityState, OwnershipState
from flowfabric.core.workers import (
    EVERYWHERE,
    NotRegistered,
    Refreshed,
    Registered,
    RegisteredWorker,
    WorkerDead,
    WorkerEntry,
    WorkerEventKind,
    decide_heartbeat,
)
from flowfabric.engine.lanes import LaneCounts
from flowfabric.engine.shell import Swept
from flowfabric.errors import InvalidCapabilities, InvalidInput, LeaseRevoked
from flowfabric.reconcilers import run_due
from flowfabric.testing import SettableClock
from tests.conformance.given import OTHER_WORKER, WORKER, Given
from tests.conformance.observed import (
    call,
    execution_of,
    refuses,
    state_of,
    unchanged,
)

TTL_MS = 60_000
GPU = {"routing_requirements": {"required_capabilities": ["cuda", "gpu"]}}
INSTANCE = WORKER["worker_instance_id"]
MAIL = LimitUse(
    limit=DeclaredLimit(namespace="default", name="mail", spec=QuotaSpec(active_concurrency_cap=1))
)


async def register(engine: Engine, **fields: object) -> Registered | Refreshed:
    asked = {"lane_ids": ["default"], **WORKER, "liveness_ttl_ms": TTL_MS, **fields}
    answer = await call(engine, "register_worker", **asked)
    assert isinstance(answer, Registered | Refreshed)
    return answer


async def stored(engine: Engine) -> RegisteredWorker | None:
    key = (EVERYWHERE, INSTANCE)
    return await engine.store.read(lambda reader: reader.get_one(RegisteredWorker, key))


async def told(engine: Engine) -> list[tuple[str, str, str]]:
    events = await engine.list_worker_events()
    return sorted((each.worker_instance_id, each.event_kind, each.reason) for each in events)


async def names(
    engine: Engine, *, namespace: str | None = None, include_expired: bool = False
) -> list[str]:
    page = await engine.list_workers(namespace=namespace, include_expired=include_expired)
    return [each.worker_instance_id for each in page.workers]


@pytest.mark.parametrize("silent_ms", [0, 1, TTL_MS - 1, TTL_MS, TTL_MS + 1])
async def test_a_heartbeat_is_what_the_rule_decides(
    engine: Engine, clock: SettableClock, silent_ms: int
) -> None:
    await register(engine, lane_ids=["b", "a"], capabilities=["gpu"], kinds=["work"])
    before = await stored(engine)
    now_ms = clock.advance(ms=silent_ms)
    decision = decide_heartbeat(before, now_ms)
    assert await engine.heartbeat_worker(INSTANCE) == decision.answer
    assert await stored(engine) == next(iter(decision.changes.updates), before)


# Coming and staying -----------------------------------------------------------


async def test_a_worker_says_what_it_serves_and_may_say_so_again(
    engine: Engine, clock: SettableClock
) -> None:
    now_ms = clock.now_ms()
    assert await register(
        engine, lane_ids=["b", "a"], capabilities=["gpu", "cuda"], kinds=["work"], namespace="shop"
    ) == Registered(expires_at_ms=now_ms + TTL_MS)
    first = WorkerEntry(
        namespace=Namespace("shop"),
        worker_id=WorkerId("worker"),
        worker_instance_id=WorkerInstanceId("worker-instance"),
        lanes=(LaneId("b"), LaneId("a")),
        kinds=("work",),
        capabilities=("cuda", "gpu"),
        registered_at_ms=now_ms,
        last_heartbeat_ms=now_ms,
        liveness_ttl_ms=TTL_MS,
        expires_at_ms=now_ms + TTL_MS,
        held_leases=0,
    )
    assert (await engine.list_workers()).workers == (first,)
    later_ms = clock.advance("1s")
    refreshed = await register(engine, namespace="shop", liveness_ttl_ms=5_000)
    assert refreshed == Refreshed(expires_at_ms=later_ms + 5_000)
    assert (await engine.list_workers()).workers == (
        structs.replace(
            first,
            lanes=(LaneId("default"),),
            kinds=None,
            capabilities=(),
            last_heartbeat_ms=later_ms,
            liveness_ttl_ms=5_000,
            expires_at_ms=later_ms + 5_000,
        ),
    )
    assert await told(engine) == [(INSTANCE, "registered", "")]


async def test_an_instance_belongs_to_one_pool_as_long_as_it_lives(
    engine: Engine, clock: SettableClock
) -> None:
    await register(engine)
    with pytest.raises(InvalidInput, match="instance_id reassigned"):
        await register(engine, worker_id="other")
    elsewhere = await register(engine, worker_id="other", namespace="elsewhere")
    assert isinstance(elsewhere, Registered)
    clock.advance(ms=TTL_MS - 1)
    with pytest.raises(InvalidInput, match="instance_id reassigned"):
        await register(engine, worker_id="other")
    now_ms = clock.advance(ms=1)
    assert isinstance(await register(engine, worker_id="other"), Registered)
    (replaced,) = [each for each in (await engine.list_workers()).workers if not each.namespace]
    assert (replaced.worker_id, replaced.registered_at_ms) == ("other", now_ms)


async def test_a_heartbeat_keeps_a_worker_there(engine: Engine, clock: SettableClock) -> None:
    await register(engine)
    now_ms = clock.advance(ms=TTL_MS - 1)
    alive = await engine.heartbeat_worker(INSTANCE)
    assert alive == Refreshed(expires_at_ms=now_ms + TTL_MS)
    clock.advance(ms=TTL_MS - 1)
    assert await names(engine) == [INSTANCE]
    assert await told(engine) == [(INSTANCE, "registered", "")]


async def test_a_heartbeat_brings_nobody_back(engine: Engine, clock: SettableClock) -> None:
    assert await engine.heartbeat_worker(INSTANCE) == NotRegistered()
    await register(engine)
    assert await engine.heartbeat_worker(INSTANCE, namespace="shop") == NotRegistered()
    clock.advance(ms=TTL_MS)
    async with unchanged(engine):
        assert await engine.heartbeat_worker(INSTANCE) == NotRegistered()
    assert isinstance(await register(engine), Registered)
    await engine.mark_worker_dead(INSTANCE)
    assert await engine.heartbeat_worker(INSTANCE) == NotRegistered()


async def test_bad_registrations_are_refused(engine: Engine) -> None:
    bad: list[tuple[str, dict[str, object]]] = [
        ("lane_ids", {"lane_ids": []}),
        ("lane_id", {"lane_ids": ["a\nb"]}),
        ("worker_id", {"worker_id": ""}),
        ("worker_instance_id", {"worker_instance_id": "a b"}),
        ("liveness_ttl_ms", {"liveness_ttl_ms": 999}),
        ("liveness_ttl_ms", {"liveness_ttl_ms": 3_600_001}),
        ("namespace", {"namespace": ""}),
    ]
    async with unchanged(engine):
        for field, named in bad:
            fine = {"lane_ids": ["default"], **WORKER, "liveness_ttl_ms": TTL_MS}
            await refuses(engine, field, "register_worker", **{**fine, **named})
        for capabilities in (["a,b"], [""], ["a b"], ["x"] * 257):
            with pytest.raises(InvalidCapabilities):
                await register(engine, capabilities=capabilities)
        await refuses(engine, "worker_instance_id", "heartbeat_worker", "")
        await refuses(engine, "namespace", "heartbeat_worker", "w", namespace="")
        for reason in ("r" * 257, "a\x07b"):
            await refuses(engine, "reason", "mark_worker_dead", "w", reason=reason)
    assert (await engine.list_workers(include_expired=True)).workers == ()


# Lists ------------------------------------------------------------------------


async def test_workers_are_listed_page_by_page(engine: Engine) -> None:
    for namespace, name in ((None, "z"), ("a", "y"), ("a", "x"), ("b c", "x")):
        await register(engine, namespace=namespace, worker_instance_id=name)
    everybody = [(None, "z"), ("a", "x"), ("a", "y"), ("b c", "x")]
    found: list[tuple[str | None, str]] = []
    cursor: str | None = None
    for _ in range(4):
        page = await engine.list_workers(cursor=cursor, limit=1)
        found += [(each.namespace, each.worker_instance_id) for each in page.workers]
        cursor = page.next_cursor
    assert (found, cursor) == (everybody, None)
    assert await names(engine, namespace="a") == ["z", "x", "y"]
    for bad in ("", "x", "a ", 5):
        await refuses(engine, "cursor", "list_workers", cursor=bad)
    for limit in (0, 1_001):
        await refuses(engine, "limit", "list_workers", limit=limit)


async def test_what_a_worker_has_in_hand_is_counted_by_namespace(
    engine: Engine, given: Given
) -> None:
    await register(engine, worker_instance_id="everywhere")
    for namespace in ("a", "a", "b"):
        await given.waiting(namespace=namespace)
    await engine.claim_many(["default"], limit=3, worker_id="w", worker_instance_id="everywhere")

    for asked, held in ((None, 3), ("a", 2), ("b", 1), ("c", 0)):
        (worker,) = (await engine.list_workers(namespace=asked)).workers
        assert worker.held_leases == held


async def test_the_silent_are_listed_only_when_asked_for(
    engine: Engine, clock: SettableClock
) -> None:
    await register(engine)
    clock.advance(ms=TTL_MS)
    assert await names(engine) == []
    assert await names(engine, include_expired=True) == [INSTANCE]


async def test_lists_tell_what_each_worker_has_in_hand(engine: Engine, given: Given) -> None:
    for _ in range(3):
        await given.waiting()
    await register(engine)
    await register(engine, **OTHER_WORKER)
    await engine.claim_many(["default"], limit=2, **WORKER, lease_ttl_ms=1_000)
    found = {
        each.worker_instance_id: each.held_leases for each in (await engine.list_workers()).workers
    }
    assert found == {INSTANCE: 2, OTHER_WORKER["worker_instance_id"]: 0}
    given.clock.advance("1s")
    assert {each.held_leases for each in (await engine.list_workers()).workers} == {0}


async def test_lanes_are_counted(engine: Engine, given: Given) -> None:
    for state in ("waiting", "resumable", "delayed", "suspended", "running", "gated", "completed"):
        await given.state(state)
    await given.revoked(lane_id="mail")
    await given.waiting_children(lane_id="mail")
    assert await engine.count_lanes() == (
        LaneCounts(lane_id=LaneId("children"), delayed=1),
        LaneCounts(lane_id=LaneId("default"), ready=2, running=1, delayed=1, suspended=1, held=1),
        LaneCounts(lane_id=LaneId("mail"), ready=1, held=1),
    )


# Going ------------------------------------------------------------------------


async def test_a_dead_worker_gives_back_what_it_had_at_once(engine: Engine, given: Given) -> None:
    await register(engine)
    mine = [await given.waiting() for _ in range(2)]
    claimed = await engine.claim_many(["default"], limit=2, **WORKER)
    theirs = await given.running()
    dead = await engine.mark_worker_dead(INSTANCE, reason="host lost")
    assert dead == WorkerDead(revoked_leases=2)
    for execution_id in mine:
        lost = await execution_of(engine, execution_id)
        assert (lost.ownership_state, lost.ready) == (OwnershipState.LEASE_REVOKED, True)
        assert lost.lease_revoke_reason == "its worker is dead: host lost"
    with pytest.raises(LeaseRevoked):
        await engine.complete(claimed[0].handle)
    await engine.complete(theirs.handle)
    assert await names(engine) == []
    assert await told(engine) == [
        (INSTANCE, "marked_dead", "host lost"),
        (INSTANCE, "registered", ""),
    ]
    again = await engine.claim_many(["default"], limit=5, **OTHER_WORKER)
    assert {each.execution_id for each in again} == set(mine)


async def test_marking_dead_may_be_repeated(engine: Engine, given: Given) -> None:
    await register(engine)
    assert await engine.mark_worker_dead(INSTANCE) == WorkerDead(revoked_leases=0)
    async with unchanged(engine):
        assert await engine.mark_worker_dead(INSTANCE) == NotRegistered()
    await given.waiting()
    await engine.claim(**WORKER)
    assert await engine.mark_worker_dead(INSTANCE) == NotRegistered(revoked_leases=1)
    assert len(await told(engine)) == 2


async def test_leases_stay_where_that_is_wanted(engine: Engine, given: Given) -> None:
    await register(engine)
    await given.waiting()
    claimed = await engine.claim(**WORKER)
    assert claimed is not None
    dead = await engine.mark_worker_dead(INSTANCE, revoke_leases=False)
    assert dead == WorkerDead(revoked_leases=0)
    await engine.renew(claimed.handle)


async def test_only_leases_of_its_namespace_are_taken_from_it(engine: Engine, given: Given) -> None:
    for namespace in ("shop", "bank"):
        await given.waiting(namespace=namespace)
        await register(engine, namespace=namespace)
    await engine.claim_many(["default"], limit=2, **WORKER)
    dead = await engine.mark_worker_dead(INSTANCE, namespace="shop")
    assert dead == WorkerDead(revoked_leases=1)
    lost = {
        each.namespace: each.ownership_state
        for each in (await state_of(engine)).executions.values()
    }
    assert lost == {"shop": "lease_revoked", "bank": "leased"}


async def test_more_leases_than_one_batch_go_back(engine: Engine, given: Given) -> None:
    count = SWEEP_BATCH + 1
    for _ in range(count):
        await given.waiting()
    await engine.claim_many(["default"], limit=count, **WORKER)
    assert await engine.mark_worker_dead(INSTANCE) == NotRegistered(revoked_leases=count)


async def test_a_worker_whose_life_is_over_is_swept_not_marked(
    engine: Engine, clock: SettableClock
) -> None:
    await register(engine)
    clock.advance(ms=TTL_MS)
    assert await engine.mark_worker_dead(INSTANCE, reason="late") == NotRegistered()
    assert await told(engine) == [(INSTANCE, "registered", ""), (INSTANCE, "ttl_swept", "")]


async def test_the_silent_are_forgotten_by_time(engine: Engine, clock: SettableClock) -> None:
    await register(engine)
    await register(engine, **OTHER_WORKER, liveness_ttl_ms=2 * TTL_MS)
    assert (await engine.next_due())["worker_expiry"] == TTL_MS
    clock.advance(ms=TTL_MS - 1)
    async with unchanged(engine):
        assert await engine.expire_workers() == Swept(acted=0, full=False)
    clock.advance(ms=1)
    assert (await run_due(engine))["worker_expiry"] == 1
    assert await names(engine, include_expired=True) == [OTHER_WORKER["worker_instance_id"]]
    assert (await told(engine))[-1] == (INSTANCE, "ttl_swept", "")
    (latest,) = await engine.list_worker_events(limit=1)
    assert latest.event_kind is WorkerEventKind.TTL_SWEPT
    assert await engine.heartbeat_worker(INSTANCE) == NotRegistered()


async def test_what_happened_to_workers_is_forgotten_in_the_end(
    engine: Engine, clock: SettableClock
) -> None:
    for number in range(3):
        await register(engine, worker_instance_id=f"w-{number}")
    clock.advance(ms=engine.config.event_retention_ms)
    assert await engine.expire_workers(limit=2) == Swept(acted=4, full=True)
    assert await engine.expire_workers(limit=2) == Swept(acted=2, full=False)
    events = await engine.list_worker_events()
    assert {each.event_kind for each in events} == {WorkerEventKind.TTL_SWEPT}
    assert sorted(each.worker_instance_id for each in events) == ["w-0", "w-1", "w-2"]
    one = await engine.list_worker_events(worker_instance_id="w-1", limit=1)
    assert [each.worker_instance_id for each in one] == ["w-1"]


# Work that nobody can run -----------------------------------------------------


async def test_presence_tells_who_serves_a_route(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    assert (await engine.explain_execution(execution_id)).cause == "no_worker"
    for _ in range(2):
        await register(engine, kinds=["work"])
    assert (await engine.explain_execution(execution_id)).cause == "queued"
    await engine.mark_worker_dead(INSTANCE)
    assert (await engine.explain_execution(execution_id)).cause == "no_worker"


async def test_what_no_worker_can_run_is_kept_back_until_one_registers(
    engine: Engine, given: Given
) -> None:
    execution_id = await given.waiting(policy=GPU)
    before = await execution_of(engine, execution_id)
    assert await engine.claim_for_worker(["default"], **WORKER, capabilities=["gpu"]) is None
    assert await execution_of(engine, execution_id) == structs.replace(
        before,
        eligibility_state=EligibilityState.BLOCKED_BY_ROUTE,
        blocking_reason=BlockingReason.WAITING_FOR_CAPABLE_WORKER,
        blocking_detail="no connected worker satisfies required_capabilities",
        ready=False,
    )
    why = await engine.explain_execution(execution_id)
    assert (why.cause, why.sentence) == (
        "no_worker",
        "No running worker has a task 'work' in lane 'default' with capabilities cuda, gpu:"
        " start one that does (flowfabric worker module:app --capability cuda --capability gpu).",
    )
    for fields in (
        {"capabilities": ["gpu"]},
        {"capabilities": ["cuda", "gpu"], "lane_ids": ["other"]},
        {"capabilities": ["cuda", "gpu"], "kinds": ["other"]},
    ):
        await register(engine, **OTHER_WORKER, **fields)
        assert not (await execution_of(engine, execution_id)).ready
    await register(
        engine,
        worker_id="elsewhere",
        worker_instance_id="elsewhere",
        capabilities=["cuda", "gpu"],
        namespace="elsewhere",
    )
    assert not (await execution_of(engine, execution_id)).ready
    await register(engine, capabilities=["cuda", "gpu", "x"], kinds=["work"])
    assert await execution_of(engine, execution_id) == before


async def test_a_capable_worker_that_asks_frees_it_too(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting(policy=GPU)
    assert await engine.claim_for_worker(["default"], **WORKER) is None
    assert not (await execution_of(engine, execution_id)).ready
    grant = await engine.claim_for_worker(["default"], **WORKER, capabilities=["cuda", "gpu"])
    assert grant is not None
    assert grant.execution_id == execution_id


@pytest.mark.parametrize("limits", [[], [MAIL]])
async def test_a_capable_worker_that_claims_frees_it_too(
    engine: Engine, given: Given, limits: list[LimitUse]
) -> None:
    execution_id = await given.waiting(policy=GPU, limits=limits)
    assert await engine.claim(**OTHER_WORKER, capabilities=["gpu"]) is None
    assert await engine.claim_for_worker(["default"], **WORKER) is None
    async with unchanged(engine):
        assert await engine.claim(**OTHER_WORKER, capabilities=["cuda"]) is None
    assert not (await execution_of(engine, execution_id)).ready
    claimed = await engine.claim(**OTHER_WORKER, capabilities=["cuda", "gpu", "x"])
    assert claimed is not None
    assert claimed.execution_id == execution_id


async def test_a_heartbeat_frees_what_was_missed(engine: Engine, given: Given) -> None:
    await register(engine, capabilities=["cuda", "gpu"])
    execution_id = await given.waiting(policy=GPU)
    await engine.block_execution_for_admission(execution_id, reason="waiting_for_capable_worker")
    why = await engine.explain_execution(execution_id)
    assert why.sentence == "It is kept back until its worker says that it is there."
    await engine.heartbeat_worker(INSTANCE)
    assert (await execution_of(engine, execution_id)).ready


async def test_nobody_parks_work_that_others_can_run(engine: Engine, given: Given) -> None:
    for policy in (GPU, None):
        await given.waiting(policy={} if policy is None else policy, lane_id="other")
    execution_id = await given.waiting(policy=GPU)
    await register(engine, capabilities=["cuda", "gpu"])
    async with unchanged(engine):
        assert await engine.claim_for_worker(["default"], **OTHER_WORKER) is None
        assert await engine.claim(**OTHER_WORKER) is None
        assert await engine.claim_for_worker(["default"], **OTHER_WORKER, kinds=["no"]) is None
    await engine.mark_worker_dead(INSTANCE)
    async with unchanged(engine):
        # A plain claim never does, nor does anything find fault with what it can run itself.
        assert await engine.claim(**OTHER_WORKER) is None
    await engine.claim_for_worker(["default"], **OTHER_WORKER)
    assert not (await execution_of(engine, execution_id)).ready


async def test_other_reasons_to_wait_are_left_alone_by_a_registration(
    engine: Engine, given: Given
) -> None:
    kept = [await given.gated(reason) for reason in ("waiting_for_budget", "paused_by_operator")]
    await register(engine)
    for execution_id in kept:
        assert not (await execution_of(engine, execution_id)).ready


async def test_more_than_one_batch_is_freed(engine: Engine, given: Given) -> None:
    count = SWEEP_BATCH + 1
    for _ in range(count):
        await given.waiting(policy=GPU)
    for _ in range(3):
        assert await engine.claim_for_worker(["default"], **WORKER) is None
    (counted,) = await engine.count_lanes()
    assert (counted.ready, counted.held) == (0, count)
    await register(engine, capabilities=["cuda", "gpu"])
    (counted,) = await engine.count_lanes()
    assert (counted.ready, counted.held) == (count, 0)
