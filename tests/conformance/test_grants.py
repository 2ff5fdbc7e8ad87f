"""Claiming one execution by id, with a grant."""

from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs

from flowfabric import Engine, FlowFabricError
from flowfabric.core.handles import HandleKind
from flowfabric.core.ids import ExecutionId, WorkerId, WorkerInstanceId, partition_of
from flowfabric.core.policies import DURATION_MAX_MS
from flowfabric.core.records import ClaimGrant
from flowfabric.core.states import AttemptType
from flowfabric.errors import (
    CapabilityMismatch,
    ClaimGrantExpired,
    ExecutionNotActive,
    ExecutionNotEligible,
    ExecutionNotLeaseable,
    GrantAlreadyExists,
    InvalidCapabilities,
    InvalidClaimGrant,
    UseClaimResumedExecution,
)
from flowfabric.testing import SettableClock
from tests.conformance.given import BACKOFF_MS, ENDED, OTHER_WORKER, SET_ASIDE, WORKER, Given
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


async def test_a_grant_reserves_without_changing_the_execution(
    engine: Engine, given: Given
) -> None:
    execution_id = await given.waiting(policy=GPU)
    before = await execution_of(engine, execution_id)
    grant = await engine.issue_claim_grant(
        execution_id, **WORKER, capabilities=["gpu", "cuda", "x"], grant_ttl_ms=700
    )
    now_ms = given.clock.now_ms()
    assert grant == ClaimGrant(
        partition_key=before.partition_key,
        execution_id=execution_id,
        grant_id=grant.grant_id,
        kind="claim",
        worker_id=WorkerId("worker"),
        worker_instance_id=WorkerInstanceId("worker-instance"),
        issued_at_ms=now_ms,
        expires_at_ms=now_ms + 700,
    )
    state = await state_of(engine)
    assert list(state.grants.values()) == [grant]
    assert list(state.executions.values()) == [before]
    assert state.events == ()


async def test_a_grant_becomes_a_lease_and_is_used_up(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    await engine.issue_claim_grant(execution_id, **WORKER)
    claimed = await engine.claim_execution(
        execution_id, worker_id="worker", worker_instance_id="another-instance"
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
    assert by_lane == structs.replace(by_id, handle=by_lane.handle)
    assert by_lane.handle.kind is by_id.handle.kind
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
    assert list((await state_of(engine)).grants.values()) == [replaced]
    assert (await engine.claim_execution(execution_id, **OTHER_WORKER)).lease_epoch == 1


async def test_a_grant_can_be_used_until_it_has_expired(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    early, late = await given.waiting(), await given.waiting()
    for execution_id in (early, late):
        grant = await engine.issue_claim_grant(execution_id, **WORKER, grant_ttl_ms=10)
    clock.set_ms(grant.expires_at_ms)
    await engine.claim_execution(early, **WORKER)
    clock.advance(ms=1)
    async with refused(engine, ClaimGrantExpired):
        await engine.claim_execution(late, **WORKER)


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


async def test_a_claim_by_id_is_refused_without_a_grant(engine: Engine, given: Given) -> None:
    errors: dict[str, type[FlowFabricError]] = {
        "waiting": InvalidClaimGrant,
        "resumable": UseClaimResumedExecution,
        **dict.fromkeys(SET_ASIDE, ExecutionNotLeaseable),
        **dict.fromkeys((*ACTIVE, *ENDED), ExecutionNotActive),
    }
    for state, error in errors.items():
        execution_id = await given.state(state)
        async with refused(engine, error):
            await engine.claim_execution(execution_id, **WORKER)


async def test_a_grant_is_for_one_worker(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    await engine.issue_claim_grant(execution_id, **WORKER)
    async with refused(engine, InvalidClaimGrant):
        await engine.claim_execution(execution_id, **OTHER_WORKER)
    claimed = await engine.claim_execution(execution_id, **WORKER)
    async with refused(engine, ExecutionNotActive) as caught:
        await engine.claim_execution(execution_id, **WORKER)
    error = caught.value
    assert (error.lifecycle_phase, error.lease_epoch, error.attempt_id) == (
        "active",
        1,
        claimed.attempt_id,
    )


async def test_an_interrupted_attempt_may_be_granted_but_not_claimed_as_new(
    engine: Engine, given: Given
) -> None:
    claimed = await given.resumable()
    await engine.issue_claim_grant(claimed.execution_id, **WORKER)
    async with refused(engine, UseClaimResumedExecution):
        await engine.claim_execution(claimed.execution_id, **WORKER)


async def test_a_claim_by_id_may_set_the_timers_of_its_attempt(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    policy = {
        "timeout_policy": {"attempt_timeout_ms": 7_000},
        "retry_policy": {"backoff": {"type": "fixed", "delay_ms": 0}},
    }
    execution_id = await given.waiting(policy=policy, execution_deadline_at_ms=clock.now_ms() + 1)
    now_ms = clock.now_ms()
    await engine.issue_claim_grant(execution_id, **WORKER)
    claimed = await engine.claim_execution(
        execution_id,
        **WORKER,
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
    await engine.issue_claim_grant(other, **WORKER)
    untimed = await engine.claim_execution(other, **WORKER, attempt_timeout_ms=0)
    assert (untimed.attempt_deadline_ms, untimed.deadline_at_ms) == (None, None)


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
    ]
    async with unchanged(engine):
        for field, named in bad_grant:
            await refuses(engine, field, "issue_claim_grant", execution_id, **(WORKER | named))
        with pytest.raises(InvalidCapabilities, match="worker:not_array"):
            await call(engine, "issue_claim_grant", execution_id, **WORKER, capabilities="gpu")
    await engine.issue_claim_grant(execution_id, **WORKER)
    async with unchanged(engine):
        for field, named in bad_claim:
            await refuses(engine, field, "claim_execution", execution_id, **(WORKER | named))
