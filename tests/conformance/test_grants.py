"""Claiming one execution by id, with a grant."""

from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs

from flowfabric import Engine, FlowFabricError
from flowfabric.core.diagnosis import Cause
from flowfabric.core.handles import HandleKind
from flowfabric.core.ids import ExecutionId, WorkerId, WorkerInstanceId, partition_of
from flowfabric.core.policies import DURATION_MAX_MS
from flowfabric.core.records import GrantKind, StoredGrant
from flowfabric.core.results import Claimed, ClaimGrant, ReclaimGrant, ResumeGrant
from flowfabric.core.states import AttemptType
from flowfabric.engine.shell import Swept
from flowfabric.engine.waitpoints import claimed_progress
from flowfabric.errors import (
    CapabilityMismatch,
    ClaimGrantExpired,
    ExecutionNotActive,
    ExecutionNotEligible,
    ExecutionNotLeaseable,
    GrantAlreadyExists,
    InvalidCapabilities,
    InvalidClaimGrant,
    InvalidInput,
    LanePaused,
    NotFound,
    UseClaimResumedExecution,
)
from flowfabric.reconcilers import run_due
from flowfabric.testing import SettableClock
from tests.conformance.given import (
    BACKOFF_MS,
    ENDED,
    NO_GRANT,
    OTHER_WORKER,
    SET_ASIDE,
    UNKNOWN_ID,
    WORKER,
    Given,
)
from tests.conformance.observed import (
    call,
    events_since,
    execution_of,
    refused,
    refuses,
    state_of,
    unchanged,
)

ACTIVE = ("running", "overdue_lease", "expired_lease", "revoked")
GPU = {"routing_requirements": {"required_capabilities": ["cuda", "gpu"]}}


async def key_to(engine: Engine, execution_id: str, ttl_ms: int = 5_000) -> str:
    """Granted to `WORKER`."""
    grant = await engine.issue_claim_grant(execution_id, **WORKER, grant_ttl_ms=ttl_ms)
    return grant.grant_key


# Issuing ----------------------------------------------------------------------


async def test_a_grant_keeps_the_execution_and_changes_nothing_else(
    engine: Engine, given: Given
) -> None:
    execution_id = await given.waiting(policy=GPU)
    before = await execution_of(engine, execution_id)
    grant = await engine.issue_claim_grant(
        execution_id, **WORKER, capabilities=["gpu", "cuda", "x"], grant_ttl_ms=700
    )
    now_ms = given.clock.now_ms()
    assert grant == ClaimGrant(
        execution_id=execution_id,
        partition_key=f"{{fp:{before.partition_key}}}",
        grant_key=grant.grant_key,
        expires_at_ms=now_ms + 700,
    )
    state = await state_of(engine)
    (stored,) = state.grants.values()
    assert stored == StoredGrant(
        partition_key=before.partition_key,
        execution_id=execution_id,
        route_id=before.route_id,
        grant_id=stored.grant_id,
        kind=GrantKind.CLAIM,
        worker_id=WorkerId("worker"),
        worker_instance_id=WorkerInstanceId("worker-instance"),
        issued_at_ms=now_ms,
        expires_at_ms=now_ms + 700,
    )
    kept = structs.replace(before, granted_until_ms=now_ms + 700, ready=False)
    assert list(state.executions.values()) == [kept]
    assert (kept.eligibility_state, kept.public_state) == ("eligible_now", "waiting")
    assert state.events == ()


async def test_nobody_else_claims_what_is_granted(engine: Engine, given: Given) -> None:
    granted, free = await given.waiting(priority=9), await given.waiting()
    key = await key_to(engine, granted)
    claimed = await engine.claim_many(["default"], limit=5, **WORKER)
    assert [each.execution_id for each in claimed] == [free]
    async with unchanged(engine):
        assert await engine.claim_for_worker(["default"], **OTHER_WORKER) is None
    assert (await engine.claim_execution(granted, **WORKER, grant_key=key)).lease_epoch == 1


async def test_a_grant_nobody_used_ends_by_itself(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting()
    before = await execution_of(engine, execution_id)
    await key_to(engine, execution_id, ttl_ms=10)
    assert (await engine.next_due())["grant_expiry"] == 11
    clock.advance(ms=10)
    async with unchanged(engine):
        assert await engine.return_due_grants() == Swept(acted=0, full=False)
    now_ms = clock.advance(ms=1)
    assert (await run_due(engine))["grant_expiry"] == 1
    assert await execution_of(engine, execution_id) == structs.replace(
        before, last_mutation_at_ms=now_ms
    )
    assert (await state_of(engine)).grants == {}
    assert "grant_expiry" not in await engine.next_due()
    assert (await given.taken()).execution_id == execution_id


async def test_grants_end_a_batch_at_a_time(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    for _ in range(3):
        await key_to(engine, await given.waiting(), ttl_ms=10)
    clock.advance(ms=11)
    assert await engine.return_due_grants(limit=2) == Swept(acted=2, full=True)
    assert await engine.return_due_grants(limit=2) == Swept(acted=1, full=False)


async def test_a_worker_that_asks_again_gets_its_grant_back(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    grant = await engine.issue_claim_grant(execution_id, **WORKER)
    async with unchanged(engine):
        assert await engine.issue_claim_grant(execution_id, **WORKER) == grant


async def test_a_live_grant_keeps_others_out_until_it_has_expired(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting()
    grant = await engine.issue_claim_grant(execution_id, **WORKER, grant_ttl_ms=10)
    clock.set_ms(grant.expires_at_ms)
    async with refused(engine, GrantAlreadyExists):
        await engine.issue_claim_grant(execution_id, **OTHER_WORKER)
    clock.advance(ms=1)
    replaced = await engine.issue_claim_grant(execution_id, **OTHER_WORKER)
    (stored,) = (await state_of(engine)).grants.values()
    assert (stored.worker_id, stored.expires_at_ms) == ("other", replaced.expires_at_ms)
    async with refused(engine, ClaimGrantExpired):
        await engine.claim_execution(execution_id, **WORKER, grant_key=grant.grant_key)
    claimed = await engine.claim_execution(
        execution_id, **OTHER_WORKER, grant_key=replaced.grant_key
    )
    assert claimed.lease_epoch == 1


async def test_a_missing_capability_refuses_the_grant_and_is_noted(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting(policy=GPU)
    before = await execution_of(engine, execution_id)
    now_ms = clock.advance("1s")
    with pytest.raises(CapabilityMismatch) as caught:
        await engine.issue_claim_grant(execution_id, **WORKER, capabilities=["gpu"])
    assert caught.value.missing == ("cuda",)
    assert await execution_of(engine, execution_id) == structs.replace(
        before, last_capability_mismatch_at_ms=now_ms, last_mutation_at_ms=now_ms
    )
    assert (await state_of(engine)).grants == {}
    await engine.issue_claim_grant(execution_id, **WORKER, capabilities=["gpu", "cuda"])


async def test_only_a_waiting_execution_is_granted(engine: Engine, given: Given) -> None:
    for state in (*SET_ASIDE, *ACTIVE, *ENDED):
        execution_id = await given.state(state)
        async with refused(engine, ExecutionNotEligible):
            await engine.issue_claim_grant(execution_id, **WORKER)


# Picking ----------------------------------------------------------------------


async def test_a_scheduler_is_given_the_best_execution_a_worker_can_run(
    engine: Engine, given: Given
) -> None:
    low = await given.waiting(priority=10)
    high = await given.waiting(priority=1_000)
    await given.waiting(priority=9_000, policy=GPU)
    await given.waiting(priority=9_000, lane_id="other")
    await given.waiting(priority=9_000, namespace="elsewhere")
    await given.waiting(priority=9_000, execution_kind="unknown")
    asked = {"kinds": ["work"], "namespace": "default", **WORKER}
    found = []
    for _ in range(3):
        grant = await call(engine, "claim_for_worker", ["default"], **asked)
        found.append(grant.execution_id if isinstance(grant, ClaimGrant) else grant)
    assert found == [high, low, None]


async def test_a_scheduler_is_told_how_the_worker_takes_it(engine: Engine, given: Given) -> None:
    lost = (await given.revoked(priority=3)).execution_id
    resumable = (await given.resumable(priority=2)).execution_id
    fresh = await given.waiting(priority=1)
    grants = [await engine.claim_for_worker(["default"], **WORKER) for _ in range(3)]
    assert [(type(each), each.execution_id) for each in grants if each is not None] == [
        (ReclaimGrant, lost),
        (ResumeGrant, resumable),
        (ClaimGrant, fresh),
    ]
    keys = [each.grant_key for each in grants if each is not None]
    reclaimed = await engine.reclaim_execution(lost, **WORKER, grant_key=keys[0])
    resumed = await engine.claim_resumed_execution(resumable, **WORKER, grant_key=keys[1])
    begun = await engine.claim_execution(fresh, **WORKER, grant_key=keys[2])
    assert isinstance(reclaimed, Claimed)
    kinds = (reclaimed.handle.kind, resumed.handle.kind, begun.handle.kind)
    assert kinds == (HandleKind.RECLAIMED, HandleKind.RESUMED, HandleKind.FRESH)


async def test_bad_questions_of_a_scheduler_are_refused(engine: Engine) -> None:
    bad: list[tuple[str, dict[str, object]]] = [
        ("lane_ids", {"lane_ids": []}),
        ("lane_ids", {"lane_ids": "default"}),
        ("lane_id", {"lane_ids": [""]}),
        ("grant_ttl_ms", {"grant_ttl_ms": 60_001}),
        ("worker_id", {"worker_id": ""}),
        ("namespace", {"namespace": ""}),
    ]
    async with unchanged(engine):
        for field, named in bad:
            arguments: dict[str, object] = {"lane_ids": ["default"], **WORKER, **named}
            await refuses(engine, field, "claim_for_worker", **arguments)


# Using ------------------------------------------------------------------------


async def test_a_grant_becomes_a_lease_and_is_used_up(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    key = await key_to(engine, execution_id)
    claimed = await engine.claim_execution(
        execution_id, worker_id="worker", worker_instance_id="another-instance", grant_key=key
    )
    assert (claimed.handle.kind, claimed.attempt_type) == (HandleKind.FRESH, AttemptType.INITIAL)
    assert (claimed.execution_id, claimed.attempt_index, claimed.lease_epoch) == (
        execution_id,
        0,
        1,
    )
    assert claimed.lease_expires_at_ms == given.clock.now_ms() + 30_000
    assert claimed.handle.worker_instance_id == "another-instance"
    assert (await state_of(engine)).grants == {}
    (event,) = await events_since(engine)
    assert (event.event_type, event.lease_id) == ("acquired", claimed.lease_id)
    await engine.renew(claimed.handle)


async def fresh(given: Given) -> ExecutionId:
    return await given.waiting(tags={"cairn.instance_id": "i"})


async def to_retry(given: Given) -> ExecutionId:
    retrying = await given.retrying("flaky", tags={"cairn.instance_id": "i"})
    given.clock.advance(ms=BACKOFF_MS)
    await given.engine.promote_delayed(retrying.execution_id)
    return retrying.execution_id


async def to_replay(given: Given) -> ExecutionId:
    ended = await given.completed(tags={"cairn.instance_id": "i"})
    await given.engine.replay_execution(ended.execution_id, reason="again", requested_by="ann")
    return ended.execution_id


@pytest.mark.parametrize("life", [fresh, to_retry, to_replay])
async def test_a_claim_by_id_is_the_same_as_any_other_claim(
    engine: Engine, given: Given, life: Callable[[Given], Awaitable[ExecutionId]]
) -> None:
    start_ms = given.clock.now_ms()
    by_id = await given.claimed(await life(given))
    held = await execution_of(engine, by_id.execution_id)
    *_, attempt = await engine.list_attempts(by_id.execution_id)
    *_, event = await events_since(engine)

    given.clock.set_ms(start_ms)
    execution_id = await life(given)
    by_lane = await given.taken()
    assert by_lane.execution_id == execution_id
    # A store may bring what earlier runs have left along with the one claim and not the other.
    assert by_lane == structs.replace(by_id, handle=by_lane.handle, progress=by_lane.progress)
    assert by_lane.handle.kind is by_id.handle.kind
    for claim in (by_id, by_lane):
        if claim.progress is not None:
            stored = await engine.read_progress(claim.execution_id)
            assert claimed_progress(claim.progress) == stored
    where = {"partition_key": partition_of(execution_id), "execution_id": execution_id}
    who = {**where, "lease_id": by_lane.lease_id}
    instance = {"worker_instance_id": by_lane.handle.worker_instance_id}
    worker = {"worker_id": instance["worker_instance_id"].removesuffix("-instance")}
    assert await execution_of(engine, execution_id) == structs.replace(
        held, current_attempt_id=by_lane.attempt_id, **who, **instance, **worker
    )
    *_, same_attempt = await engine.list_attempts(execution_id)
    assert same_attempt == structs.replace(
        attempt, attempt_id=by_lane.attempt_id, **who, **instance, **worker
    )
    *_, same_event = await events_since(engine)
    assert same_event == structs.replace(event, **who, **instance)


async def test_a_claim_whose_answer_was_lost_may_be_repeated(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting()
    key = await key_to(engine, execution_id)
    claimed = await engine.claim_execution(execution_id, **WORKER, grant_key=key)
    async with unchanged(engine):
        assert await engine.claim_execution(execution_id, **WORKER, grant_key=key) == claimed
    async with refused(engine, ExecutionNotLeaseable):
        await engine.claim_execution(
            execution_id, worker_id="worker", worker_instance_id="another", grant_key=key
        )
    clock.set_ms(claimed.lease_expires_at_ms)
    async with refused(engine, ExecutionNotLeaseable):
        await engine.claim_execution(execution_id, **WORKER, grant_key=key)


async def test_a_grant_can_be_used_until_it_has_expired(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    early, late = await given.waiting(), await given.waiting()
    keys = [await key_to(engine, each, ttl_ms=10) for each in (early, late)]
    clock.advance(ms=10)
    await engine.claim_execution(early, **WORKER, grant_key=keys[0])
    clock.advance(ms=1)
    with pytest.raises(ClaimGrantExpired):
        await engine.claim_execution(late, **WORKER, grant_key=keys[1])
    assert (await given.taken()).execution_id == late


async def test_a_claim_by_id_is_refused_without_a_grant(engine: Engine, given: Given) -> None:
    errors: dict[str, type[FlowFabricError]] = {
        "waiting": InvalidClaimGrant,
        "resumable": UseClaimResumedExecution,
        **dict.fromkeys((*SET_ASIDE, *ACTIVE), ExecutionNotLeaseable),
        **dict.fromkeys(ENDED, ExecutionNotActive),
    }
    for state, error in errors.items():
        execution_id = await given.state(state)
        async with refused(engine, error):
            await engine.claim_execution(execution_id, **WORKER, grant_key=NO_GRANT)
    async with refused(engine, NotFound):
        await engine.claim_execution(UNKNOWN_ID, **WORKER, grant_key=NO_GRANT)


async def test_a_grant_is_for_one_worker_and_one_execution(engine: Engine, given: Given) -> None:
    execution_id, other = await given.waiting(), await given.waiting()
    key, other_key = await key_to(engine, execution_id), await key_to(engine, other)
    async with refused(engine, InvalidClaimGrant):
        await engine.claim_execution(execution_id, **OTHER_WORKER, grant_key=key)
    async with refused(engine, InvalidClaimGrant):
        await engine.claim_execution(execution_id, **WORKER, grant_key=other_key)
    for place, text in ((0, "reclaim"), (1, NO_GRANT[6:42]), (2, "99999999999999"), (3, "00" * 16)):
        parts = key.split(":")
        parts[place] = text
        async with refused(engine, InvalidClaimGrant):
            await engine.claim_execution(execution_id, **WORKER, grant_key=":".join(parts))
    await engine.claim_execution(execution_id, **WORKER, grant_key=key)


async def test_any_process_of_the_worker_may_use_its_grant(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    key = await key_to(engine, execution_id)
    claimed = await engine.claim_execution(
        execution_id,
        worker_id=WORKER["worker_id"],
        worker_instance_id="another-process",
        grant_key=key,
    )
    assert claimed.execution_id == execution_id
    held = await execution_of(engine, execution_id)
    assert held.worker_instance_id == "another-process"


async def replayed(given: Given, execution_id: ExecutionId) -> None:
    await given.engine.cancel_execution(execution_id, reason="no")
    await given.engine.replay_execution(execution_id)


async def kept_back(given: Given, execution_id: ExecutionId) -> None:
    await given.engine.block_execution_for_admission(execution_id, reason="paused_by_operator")
    await given.engine.unblock_execution(execution_id)


@pytest.mark.parametrize("meanwhile", [replayed, kept_back])
async def test_a_leftover_grant_never_claims_a_later_life(
    engine: Engine, given: Given, meanwhile: Callable[[Given, ExecutionId], Awaitable[None]]
) -> None:
    execution_id = await given.waiting()
    key = await key_to(engine, execution_id)
    await meanwhile(given, execution_id)
    async with refused(engine, InvalidClaimGrant):
        await engine.claim_execution(execution_id, **WORKER, grant_key=key)
    again = await key_to(engine, execution_id)
    assert again != key
    async with refused(engine, InvalidClaimGrant):
        await engine.claim_execution(execution_id, **WORKER, grant_key=key)
    await engine.claim_execution(execution_id, **WORKER, grant_key=again)


async def test_leftover_grants_are_swept(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting()
    await key_to(engine, execution_id, ttl_ms=10)
    await kept_back(given, execution_id)
    before = await execution_of(engine, execution_id)
    clock.advance(ms=11)
    assert await engine.return_due_grants() == Swept(acted=1, full=False)
    assert (await state_of(engine)).grants == {}
    assert await execution_of(engine, execution_id) == before


async def test_an_interrupted_attempt_may_be_granted_but_not_claimed_as_new(
    engine: Engine, given: Given
) -> None:
    claimed = await given.resumable()
    key = await key_to(engine, claimed.execution_id)
    async with refused(engine, UseClaimResumedExecution):
        await engine.claim_execution(claimed.execution_id, **WORKER, grant_key=key)


async def test_a_claim_by_id_may_set_the_timers_of_its_attempt(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    policy = {
        "timeout_policy": {"attempt_timeout_ms": 7_000},
        "retry_policy": {"backoff": {"type": "fixed", "delay_ms": 0}},
    }
    execution_id = await given.waiting(policy=policy, execution_deadline_at_ms=clock.now_ms() + 1)
    now_ms = clock.now_ms()
    claimed = await engine.claim_execution(
        execution_id,
        **WORKER,
        grant_key=await key_to(engine, execution_id),
        attempt_timeout_ms=50,
        execution_deadline_at_ms=now_ms + 99_000,
    )
    assert (claimed.attempt_deadline_ms, claimed.deadline_at_ms) == (now_ms + 50, now_ms + 99_000)
    await engine.fail(claimed.handle, "again")
    await engine.promote_delayed(execution_id)
    retried = await given.claimed(execution_id)
    assert (retried.attempt_deadline_ms, retried.deadline_at_ms) == (
        now_ms + 7_000,
        now_ms + 99_000,
    )
    other = await given.waiting(policy=policy)
    key = await key_to(engine, other)
    untimed = await engine.claim_execution(other, **WORKER, grant_key=key, attempt_timeout_ms=0)
    assert (untimed.attempt_deadline_ms, untimed.deadline_at_ms) == (None, None)


async def test_what_a_claim_by_id_says_must_fit(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    key = await key_to(engine, execution_id)
    async with refused(engine, InvalidInput) as caught:
        await engine.claim_execution(execution_id, **WORKER, grant_key=key, lane_id="other")
    assert caught.value.problem.startswith("lane_mismatch:")
    async with refused(engine, InvalidInput) as caught:
        await engine.claim_execution(
            execution_id, **WORKER, grant_key=key, expected_attempt_index=1
        )
    assert caught.value.field == "expected_attempt_index"
    await engine.claim_execution(
        execution_id, **WORKER, grant_key=key, lane_id="default", expected_attempt_index=0
    )


# Paused lanes -----------------------------------------------------------------


@pytest.mark.parametrize("close", ["pause_lane", "disable_lane"])
async def test_a_closed_lane_hands_out_nothing_whichever_way(
    engine: Engine, given: Given, close: str
) -> None:
    waiting, wanted, granted = [await given.waiting() for _ in range(3)]
    resumable = (await given.resumable()).execution_id
    lost, granted_lost = [(await given.revoked()).execution_id for _ in range(2)]
    key, resume_key = await key_to(engine, granted), await key_to(engine, resumable)
    reclaim = await engine.issue_reclaim_grant(granted_lost, **WORKER)
    assert isinstance(reclaim, ReclaimGrant)
    await call(engine, close, "default")
    async with unchanged(engine):
        assert await engine.claim(**WORKER) is None
        assert await engine.claim_for_worker(["default"], **WORKER) is None
    refusals: list[tuple[str, str, dict[str, object]]] = [
        ("issue_claim_grant", waiting, {**WORKER}),
        ("issue_reclaim_grant", lost, {**WORKER}),
        ("issue_grant_and_claim", wanted, {}),
        ("claim_execution", granted, {**WORKER, "grant_key": key}),
        ("claim_resumed_execution", resumable, {**WORKER, "grant_key": resume_key}),
        ("reclaim_execution", granted_lost, {**WORKER, "grant_key": reclaim.grant_key}),
    ]
    for name, execution_id, arguments in refusals:
        async with refused(engine, LanePaused):
            await call(engine, name, execution_id, **arguments)
    await engine.drain_lane("default")
    for name, execution_id, arguments in refusals:
        await call(engine, name, execution_id, **arguments)


# Telling ----------------------------------------------------------------------


async def test_why_says_whom_it_is_kept_for(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting()
    await key_to(engine, execution_id, ttl_ms=5_000)
    clock.advance("2s")
    why = await engine.explain_execution(execution_id)
    assert (why.cause, why.sentence) == (
        Cause.GRANTED,
        "It is kept for worker worker. It has 3.0s left to claim it.",
    )
    assert why.detail == {"worker_id": "worker", "granted_until_ms": clock.now_ms() + 3_000}
    clock.advance("4s")
    why = await engine.explain_execution(execution_id)
    assert why.sentence == (
        "It is kept for worker worker. It has not claimed it for 1.0s. No worker is there: start"
        " one (flowfabric worker module:app)."
    )


async def test_bad_grants_and_claims_by_id_are_refused(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    bad_worker: list[tuple[str, dict[str, object]]] = [
        ("worker_id", {"worker_id": ""}),
        ("worker_id", {"worker_id": "w" * 257}),
        ("worker_instance_id", {"worker_instance_id": "a b"}),
    ]
    bad_grant: list[tuple[str, dict[str, object]]] = [
        *bad_worker,
        ("grant_ttl_ms", {"grant_ttl_ms": 0}),
        ("grant_ttl_ms", {"grant_ttl_ms": 60_001}),
        ("grant_ttl_ms", {"grant_ttl_ms": "5000"}),
    ]
    bad_claim: list[tuple[str, dict[str, object]]] = [
        *bad_worker,
        ("lease_ttl_ms", {"lease_ttl_ms": 0}),
        ("lease_ttl_ms", {"lease_ttl_ms": 86_400_001}),
        ("attempt_timeout_ms", {"attempt_timeout_ms": -1}),
        ("attempt_timeout_ms", {"attempt_timeout_ms": DURATION_MAX_MS + 1}),
        ("execution_deadline_at_ms", {"execution_deadline_at_ms": -1}),
        ("execution_deadline_at_ms", {"execution_deadline_at_ms": 1.0}),
        ("grant_key", {"grant_key": ""}),
        ("grant_key", {"grant_key": "claim:x:5:00"}),
        ("grant_key", {"grant_key": f"{NO_GRANT}:"}),
        ("grant_key", {"grant_key": f"give{NO_GRANT}"}),
        ("grant_key", {"grant_key": NO_GRANT * 10}),
    ]
    async with unchanged(engine):
        for field, named in bad_grant:
            await refuses(engine, field, "issue_claim_grant", execution_id, **(WORKER | named))
        with pytest.raises(InvalidCapabilities, match="worker:not_array"):
            await call(engine, "issue_claim_grant", execution_id, **WORKER, capabilities="gpu")
    key = await key_to(engine, execution_id)
    async with unchanged(engine):
        for field, named in bad_claim:
            arguments: dict[str, object] = {**WORKER, "grant_key": key, **named}
            await refuses(engine, field, "claim_execution", execution_id, **arguments)
