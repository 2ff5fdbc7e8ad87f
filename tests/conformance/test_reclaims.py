"""Taking over one execution that has lost its lease, and taking one as the operator."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.decisions import Changes
from flowfabric.core.events import LeaseEventType
from flowfabric.core.handles import HandleKind
from flowfabric.core.ids import ExecutionId, LaneId
from flowfabric.core.records import GrantKind
from flowfabric.core.results import (
    Claimed,
    GrantNotFound,
    NotReclaimable,
    ReclaimCapExceeded,
    ReclaimGrant,
)
from flowfabric.core.states import AttemptLifecycle, AttemptType, OwnershipState
from flowfabric.errors import (
    ExecutionNotEligible,
    GrantAlreadyExists,
    InvalidInput,
    NotFound,
)
from flowfabric.store.base import Transaction
from flowfabric.testing import SettableClock
from tests.conformance.given import (
    ENDED,
    LOST,
    NO_GRANT,
    NOBODY,
    OTHER_WORKER,
    SET_ASIDE,
    UNKNOWN_ID,
    WAITING,
    WORKER,
    Given,
)
from tests.conformance.observed import (
    events_since,
    execution_of,
    refused,
    refuses,
    state_of,
    unchanged,
)

GPU = {"routing_requirements": {"required_capabilities": ["cuda", "gpu"]}}
NO_RECLAIM_KEY = f"re{NO_GRANT}"
NEW_LEASE = "00000000-0000-4000-8000-00000000beef"


async def granted(engine: Engine, execution_id: str, ttl_ms: int = 5_000) -> str:
    """The key of a grant to `WORKER`."""
    grant = await engine.issue_reclaim_grant(execution_id, **WORKER, grant_ttl_ms=ttl_ms)
    assert isinstance(grant, ReclaimGrant), grant
    return grant.grant_key


# Issuing ----------------------------------------------------------------------


@pytest.mark.parametrize("state", [*LOST, "overdue_lease"])
async def test_what_has_lost_its_lease_is_granted(engine: Engine, given: Given, state: str) -> None:
    execution_id = await given.state(state)
    grant = await engine.issue_reclaim_grant(execution_id, **WORKER, grant_ttl_ms=700)
    assert isinstance(grant, ReclaimGrant)
    assert grant == ReclaimGrant(
        execution_id=execution_id,
        partition_key=execution_id.rpartition(":")[0],
        grant_key=grant.grant_key,
        expires_at_ms=given.clock.now_ms() + 700,
        lane_id=LaneId("default"),
    )
    (stored,) = (await state_of(engine)).grants.values()
    assert stored.kind is GrantKind.RECLAIM
    execution = await execution_of(engine, execution_id)
    assert execution.ownership_state is not OwnershipState.LEASED
    assert (execution.ready, execution.granted_until_ms) == (False, grant.expires_at_ms)
    assert await engine.claim(**OTHER_WORKER) is None
    async with unchanged(engine):
        assert await engine.issue_reclaim_grant(execution_id, **WORKER) == grant


async def test_only_what_has_lost_its_lease_is_granted(engine: Engine, given: Given) -> None:
    for state in (*WAITING, *SET_ASIDE, "running", *ENDED):
        execution_id = await given.state(state)
        async with unchanged(engine):
            outcome = await engine.issue_reclaim_grant(execution_id, **WORKER)
        assert outcome == NotReclaimable(
            execution_id=execution_id, detail="execution_not_reclaimable"
        ), state
    async with refused(engine, NotFound):
        await engine.issue_reclaim_grant(UNKNOWN_ID, **WORKER)


async def test_a_lost_execution_is_granted_to_one_worker(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = (await given.revoked()).execution_id
    await granted(engine, execution_id, ttl_ms=10)
    async with refused(engine, GrantAlreadyExists):
        await engine.issue_reclaim_grant(execution_id, **OTHER_WORKER)
    clock.advance(ms=11)
    assert isinstance(await engine.issue_reclaim_grant(execution_id, **OTHER_WORKER), ReclaimGrant)


async def test_a_missing_capability_is_told_and_noted(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = (await given.expired_lease(policy=GPU)).execution_id
    before = await execution_of(engine, execution_id)
    now_ms = clock.advance("1s")
    outcome = await engine.issue_reclaim_grant(execution_id, **WORKER, capabilities=["gpu"])
    assert outcome == NotReclaimable(execution_id=execution_id, detail="capability_mismatch: cuda")
    assert await execution_of(engine, execution_id) == structs.replace(
        before, last_capability_mismatch_at_ms=now_ms, last_mutation_at_ms=now_ms
    )


@pytest.mark.parametrize("limit", [0, 1])
async def test_an_execution_that_may_not_be_lost_again_ends_when_it_is_noticed(
    engine: Engine, given: Given, limit: int
) -> None:
    claimed = await given.running(policy={"max_reclaim_count": limit})
    for _ in range(limit):
        given.clock.set_ms(claimed.lease_expires_at_ms)
        again = await engine.reclaim_execution(
            claimed.execution_id,
            **WORKER,
            grant_key=await granted(engine, claimed.execution_id),
        )
        assert isinstance(again, Claimed)
        claimed = again
    given.clock.set_ms(claimed.lease_expires_at_ms)
    cursor = len(await events_since(engine))
    outcome = await engine.issue_reclaim_grant(claimed.execution_id, **WORKER)
    assert outcome == ReclaimCapExceeded(execution_id=claimed.execution_id, reclaim_count=limit)
    ended = await execution_of(engine, claimed.execution_id)
    assert (ended.public_state, ended.failure_reason) == ("failed", "max_reclaims_exceeded")
    told = (await events_since(engine))[cursor:]
    assert [(each.category, each.event_type) for each in told] == [
        ("lease", "expired"),
        ("completion", "failed"),
    ]
    assert isinstance(
        await engine.issue_reclaim_grant(claimed.execution_id, **WORKER), NotReclaimable
    )


# Using ------------------------------------------------------------------------


@pytest.mark.parametrize("state", LOST)
async def test_a_grant_takes_over_with_a_new_attempt(
    engine: Engine, given: Given, state: str
) -> None:
    execution_id = await given.state(state)
    before = await execution_of(engine, execution_id)
    key = await granted(engine, execution_id)
    now_ms = given.clock.advance("1s")
    claimed = await engine.reclaim_execution(
        execution_id,
        worker_id="worker",
        worker_instance_id="another",
        grant_key=key,
        lane_id="default",
        lease_id=NEW_LEASE,
        attempt_id=NOBODY,
        lease_ttl_ms=4_000,
    )
    assert isinstance(claimed, Claimed)
    assert (claimed.handle.kind, claimed.attempt_type) == (
        HandleKind.RECLAIMED,
        AttemptType.RECLAIM,
    )
    assert (claimed.lease_id, claimed.attempt_id) == (NEW_LEASE, NOBODY)
    assert (claimed.lease_epoch, claimed.attempt_index) == (before.lease_epoch + 1, 1)
    assert claimed.lease_expires_at_ms == now_ms + 4_000
    first, second = await engine.list_attempts(execution_id)
    reason = "lease_expired" if state == "expired_lease" else "lease_revoked"
    assert (first.attempt_state, first.failure_reason) == (
        AttemptLifecycle.INTERRUPTED_RECLAIMED,
        reason,
    )
    assert (second.attempt_type, second.previous_attempt_index) == (AttemptType.RECLAIM, 0)
    held = await execution_of(engine, execution_id)
    assert (held.lease_reclaim_count, held.granted_until_ms, held.worker_instance_id) == (
        1,
        None,
        "another",
    )
    assert (await state_of(engine)).grants == {}
    *_, event = await events_since(engine)
    assert event.event_type == LeaseEventType.RECLAIMED
    await engine.complete(claimed.handle)


async def test_a_takeover_whose_answer_was_lost_may_be_repeated(
    engine: Engine, given: Given
) -> None:
    execution_id = (await given.revoked()).execution_id
    key = await granted(engine, execution_id)
    claimed = await engine.reclaim_execution(execution_id, **WORKER, grant_key=key)
    async with unchanged(engine):
        assert await engine.reclaim_execution(execution_id, **WORKER, grant_key=key) == claimed
        elsewhere = await engine.reclaim_execution(
            execution_id, worker_id="worker", worker_instance_id="another", grant_key=key
        )
    assert elsewhere == NotReclaimable(
        execution_id=execution_id, detail="execution_not_reclaimable"
    )


async def test_there_must_be_a_grant(engine: Engine, given: Given, clock: SettableClock) -> None:
    execution_id = (await given.revoked()).execution_id
    nothing = GrantNotFound(execution_id=execution_id)
    async with unchanged(engine):
        found = await engine.reclaim_execution(execution_id, **WORKER, grant_key=NO_RECLAIM_KEY)
        assert found == nothing
    key = await granted(engine, execution_id, ttl_ms=10)
    async with unchanged(engine):
        claim_key = key.removeprefix("re")
        found = await engine.reclaim_execution(execution_id, **WORKER, grant_key=claim_key)
        assert found == nothing
        forged = f"{key[:-2]}{'00' if key[-2:] != '00' else '11'}"
        found = await engine.reclaim_execution(execution_id, **WORKER, grant_key=forged)
        assert found == nothing
    async with refused(engine, InvalidInput) as caught:
        await engine.reclaim_execution(execution_id, **OTHER_WORKER, grant_key=key)
    assert caught.value.field == "worker_id"
    clock.advance(ms=11)
    assert await engine.reclaim_execution(execution_id, **WORKER, grant_key=key) == nothing
    assert (await state_of(engine)).grants == {}
    assert (await given.taken()).execution_id == execution_id


async def test_what_ended_or_went_on_meanwhile_is_not_taken_over(
    engine: Engine, given: Given
) -> None:
    execution_id = (await given.revoked()).execution_id
    key = await granted(engine, execution_id)
    await engine.cancel_execution(execution_id, reason="no")
    lost = NotReclaimable(execution_id=execution_id, detail="execution_not_reclaimable")
    async with unchanged(engine):
        assert await engine.reclaim_execution(execution_id, **WORKER, grant_key=key) == lost
    await engine.replay_execution(execution_id)
    async with unchanged(engine):
        assert await engine.reclaim_execution(execution_id, **WORKER, grant_key=key) == lost
    async with refused(engine, NotFound):
        await engine.reclaim_execution(UNKNOWN_ID, **WORKER, grant_key=key)


async def lost_once(given: Given) -> ExecutionId:
    """Reclaimed once, and lost again."""
    engine = given.engine
    execution_id = (await given.revoked()).execution_id
    key = await granted(engine, execution_id)
    assert isinstance(
        await engine.reclaim_execution(execution_id, **WORKER, grant_key=key), Claimed
    )
    await engine.revoke_lease(execution_id, reason="again")
    return execution_id


async def test_only_a_holder_of_a_grant_ends_what_was_lost_too_often(
    engine: Engine, given: Given
) -> None:
    execution_id = await lost_once(given)
    exceeded = ReclaimCapExceeded(execution_id=execution_id, reclaim_count=1)
    async with unchanged(engine):
        found = await engine.reclaim_execution(
            execution_id, **WORKER, grant_key=NO_RECLAIM_KEY, max_reclaim_count=1
        )
        assert found == exceeded
    key = await granted(engine, execution_id)
    cursor = len(await events_since(engine))
    found = await engine.reclaim_execution(
        execution_id, **WORKER, grant_key=key, max_reclaim_count=1
    )
    assert found == exceeded
    ended = await execution_of(engine, execution_id)
    assert (ended.public_state, ended.failure_reason) == ("failed", "max_reclaims_exceeded")
    assert (await state_of(engine)).grants == {}
    *_, attempt = await engine.list_attempts(execution_id)
    assert attempt.attempt_state is AttemptLifecycle.INTERRUPTED_RECLAIMED
    told = (await events_since(engine))[cursor:]
    assert [(each.category, each.event_type) for each in told] == [
        ("lease", "revoked"),
        ("completion", "failed"),
    ]


async def test_each_takeover_has_a_later_epoch_and_takes_the_lease_from_whom_it_was(
    engine: Engine, given: Given
) -> None:
    workers = (WORKER, OTHER_WORKER)
    for each in workers:
        await engine.register_worker(["default"], **each, liveness_ttl_ms=3_600_000)
    execution_id, epochs = (await given.revoked()).execution_id, [1]
    for turn in range(4):
        worker = workers[turn % 2]
        grant = await engine.issue_reclaim_grant(execution_id, **worker)
        assert isinstance(grant, ReclaimGrant)
        claimed = await engine.reclaim_execution(execution_id, **worker, grant_key=grant.grant_key)
        assert isinstance(claimed, Claimed)
        epochs.append(claimed.lease_epoch)
        page = await engine.list_workers()
        assert {each.worker_instance_id: each.held_leases for each in page.workers} == {
            each["worker_instance_id"]: int(each is worker) for each in workers
        }
        await engine.revoke_lease(execution_id, reason="drained")
    assert epochs == sorted(set(epochs))


async def test_the_smaller_of_both_limits_holds(engine: Engine, given: Given) -> None:
    execution_id = await lost_once(given)
    key = await granted(engine, execution_id)
    claimed = await engine.reclaim_execution(
        execution_id, **WORKER, grant_key=key, max_reclaim_count=2
    )
    assert isinstance(claimed, Claimed)


async def taken_over(engine: Engine, execution_id: ExecutionId, times: int) -> None:
    """As if it had been, so often; a sound store counts it."""
    stored = structs.replace(await execution_of(engine, execution_id), lease_reclaim_count=times)

    async def body(tx: Transaction) -> None:
        await tx.save(Changes(updates=(stored,)))

    await engine.store.transact(body)


@pytest.mark.parametrize(
    ("policy", "asked", "limit"),
    [({}, None, 100), ({"max_reclaim_count": 3}, 1_000, 3), ({}, 4, 4)],
)
async def test_a_takeover_is_one_too_many_from_the_limit_on(
    engine: Engine, given: Given, policy: dict[str, object], asked: int | None, limit: int
) -> None:
    for times, answer in ((limit - 1, Claimed), (limit, ReclaimCapExceeded)):
        execution_id = (await given.revoked(policy=policy)).execution_id
        key = await granted(engine, execution_id)
        await taken_over(engine, execution_id, times)
        found = await engine.reclaim_execution(
            execution_id, **WORKER, grant_key=key, max_reclaim_count=asked
        )
        assert isinstance(found, answer), times
        counted = (await execution_of(engine, execution_id)).lease_reclaim_count
        assert counted == limit
    assert found == ReclaimCapExceeded(execution_id=execution_id, reclaim_count=limit)


@pytest.mark.parametrize("by_id", [True, False])
async def test_a_count_below_nothing_counts_as_nothing(
    engine: Engine, given: Given, *, by_id: bool
) -> None:
    execution_id = (await given.revoked(policy={"max_reclaim_count": 1})).execution_id
    key = await granted(engine, execution_id) if by_id else None
    await taken_over(engine, execution_id, -5)
    if key is None:
        assert (await given.taken()).execution_id == execution_id
    else:
        await engine.reclaim_execution(execution_id, **WORKER, grant_key=key)
    assert (await execution_of(engine, execution_id)).lease_reclaim_count == 1
    await engine.revoke_lease(execution_id, reason="again")
    ended = await execution_of(engine, execution_id)
    assert ended.failure_reason == "max_reclaims_exceeded"


async def test_bad_takeovers_are_refused(engine: Engine, given: Given) -> None:
    execution_id = (await given.revoked()).execution_id
    key = await granted(engine, execution_id)
    bad: list[tuple[str, dict[str, object]]] = [
        ("lane_id", {"lane_id": "other"}),
        ("lease_id", {"lease_id": "mine"}),
        ("attempt_id", {"attempt_id": "mine"}),
        ("lease_ttl_ms", {"lease_ttl_ms": 0}),
        ("max_reclaim_count", {"max_reclaim_count": -1}),
        ("grant_key", {"grant_key": "key"}),
    ]
    async with unchanged(engine):
        for field, named in bad:
            arguments: dict[str, object] = {**WORKER, "grant_key": key, **named}
            await refuses(engine, field, "reclaim_execution", execution_id, **arguments)


# As the operator --------------------------------------------------------------


async def test_an_operator_takes_a_waiting_execution_whatever_it_requires(
    engine: Engine, given: Given
) -> None:
    execution_id = await given.waiting(policy=GPU)
    claimed = await engine.issue_grant_and_claim(execution_id, lease_duration_ms=4_000)
    assert (claimed.lease_epoch, claimed.attempt_index) == (1, 0)
    assert claimed.lease_expires_at_ms == given.clock.now_ms() + 4_000
    held = await execution_of(engine, execution_id)
    assert (held.worker_id, held.worker_instance_id) == ("operator", "operator")
    assert (await state_of(engine)).grants == {}
    (event,) = await events_since(engine)
    assert (event.event_type, event.reason) == ("acquired", "issue_grant_and_claim")
    await engine.complete(claimed.handle)


async def test_an_operator_continues_an_interrupted_attempt(engine: Engine, given: Given) -> None:
    before = await given.resumable()
    claimed = await engine.issue_grant_and_claim(before.execution_id, lane_id="default")
    assert (claimed.attempt_id, claimed.handle.kind) == (before.attempt_id, HandleKind.RESUMED)
    *_, event = await events_since(engine)
    assert event.reason == "issue_grant_and_claim_resumed"


async def test_an_operator_takes_nothing_else(engine: Engine, given: Given) -> None:
    for state in (*SET_ASIDE, "running", "overdue_lease", *LOST, *ENDED):
        execution_id = await given.state(state)
        async with refused(engine, ExecutionNotEligible):
            await engine.issue_grant_and_claim(execution_id)
    async with refused(engine, NotFound):
        await engine.issue_grant_and_claim(UNKNOWN_ID)


async def test_an_operator_wakes_a_sleeping_attempt_only_by_force(
    engine: Engine, given: Given
) -> None:
    parked = await given.parked()
    claimed = await engine.issue_grant_and_claim(parked.execution_id, force=True)
    assert claimed.attempt_id == parked.attempt_id
    held = await execution_of(engine, parked.execution_id)
    assert (held.delay_until_ms, held.public_state) == (None, "active")
    for state in ("delayed", "suspended", "waiting_children", "completed"):
        execution_id = await given.state(state)
        async with refused(engine, ExecutionNotEligible):
            await engine.issue_grant_and_claim(execution_id, force=True)


async def test_a_grant_keeps_operators_out_as_well(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.waiting()
    await engine.issue_claim_grant(execution_id, **WORKER, grant_ttl_ms=10)
    async with refused(engine, GrantAlreadyExists):
        await engine.issue_grant_and_claim(execution_id)
    clock.advance(ms=11)
    await engine.issue_grant_and_claim(execution_id)
    assert (await state_of(engine)).grants == {}


async def test_bad_takings_are_refused(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    bad: list[tuple[str, dict[str, object]]] = [
        ("lane_id", {"lane_id": "other"}),
        ("lease_duration_ms", {"lease_duration_ms": 0}),
        ("force", {"force": "yes"}),
    ]
    async with unchanged(engine):
        for field, named in bad:
            await refuses(engine, field, "issue_grant_and_claim", execution_id, **named)
