"""Claiming resumed work by a grant, and the list of who is away."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.conditions import OperatorOnly
from flowfabric.core.handles import HandleKind
from flowfabric.core.records import SuspensionReason
from flowfabric.core.results import ResumeGrant
from flowfabric.core.states import EligibilityState
from flowfabric.engine.grants import ResumeToken
from flowfabric.engine.waitpoints import SuspendedExecution
from flowfabric.errors import (
    ClaimGrantExpired,
    ExecutionNotLeaseable,
    InvalidClaimGrant,
    InvalidInput,
    NotAResumedExecution,
    NotFound,
    UseClaimResumedExecution,
)
from flowfabric.testing import SettableClock
from tests.conformance.given import NO_GRANT, OTHER_WORKER, UNKNOWN_ID, WORKER, Given
from tests.conformance.observed import execution_of, refused, refuses, state_of, unchanged
from tests.conformance.pausing import Pause, new_id, pause, paused

TIMEOUT_MS = 5_000

# By grant -------------------------------------------------------------------------


async def granted(given: Given) -> tuple[Pause, str]:
    """Resumed, and reserved for `WORKER`; with the key."""
    taken = await paused(given)
    await taken.signal()
    grant = await given.engine.issue_claim_grant(taken.execution_id, **WORKER, grant_ttl_ms=1_000)
    assert isinstance(grant, ResumeGrant)
    return taken, grant.grant_key


async def resume_grant(given: Given) -> tuple[Pause, ResumeGrant]:
    taken = await paused(given)
    await taken.signal()
    grant = await given.engine.issue_claim_grant(taken.execution_id, **WORKER)
    assert isinstance(grant, ResumeGrant)
    return taken, grant


async def test_a_grant_continues_the_attempt(engine: Engine, given: Given) -> None:
    taken, key = await granted(given)
    async with refused(engine, UseClaimResumedExecution):
        await engine.claim_execution(taken.execution_id, **WORKER, grant_key=key)
    lease_id = new_id()
    claimed = await engine.claim_resumed_execution(
        taken.execution_id,
        **WORKER,
        grant_key=key,
        lane_id="default",
        lease_id=lease_id,
        lease_ttl_ms=4_000,
        current_attempt_index=0,
        remaining_attempt_timeout_ms=2_500,
    )
    now_ms = given.clock.now_ms()
    first = taken.claimed
    assert (claimed.handle.kind, claimed.attempt_id, claimed.attempt_index) == (
        HandleKind.RESUMED,
        first.attempt_id,
        first.attempt_index,
    )
    assert (claimed.lease_id, claimed.lease_epoch) == (lease_id, first.lease_epoch + 1)
    assert (claimed.lease_expires_at_ms, claimed.attempt_deadline_ms) == (
        now_ms + 4_000,
        now_ms + 2_500,
    )
    assert (await state_of(engine)).grants == {}
    async with refused(engine, ExecutionNotLeaseable):
        await engine.claim_resumed_execution(taken.execution_id, **WORKER, grant_key=key)
    assert len(await engine.observe_signals(claimed.handle)) == 1


async def test_a_resume_token_is_a_grant_and_a_wish(engine: Engine, given: Given) -> None:
    taken, grant = await resume_grant(given)
    token = ResumeToken(grant=grant, **WORKER, lease_ttl_ms=9_000)
    claimed = await engine.claim_from_resume_grant(token)
    assert claimed is not None
    assert (claimed.handle.kind, claimed.attempt_id) == (
        HandleKind.RESUMED,
        taken.claimed.attempt_id,
    )
    assert claimed.lease_expires_at_ms == given.clock.now_ms() + 9_000
    async with unchanged(engine):
        assert await engine.claim_from_resume_grant(token) == claimed
    async with refused(engine, ExecutionNotLeaseable):
        elsewhere = structs.replace(token, worker_instance_id="another-instance")
        await engine.claim_from_resume_grant(elsewhere)


async def test_a_resume_token_for_what_has_ended_gives_nothing(
    engine: Engine, given: Given
) -> None:
    taken, grant = await resume_grant(given)
    await engine.cancel_execution(taken.execution_id, reason="enough")
    async with unchanged(engine):
        token = ResumeToken(grant=grant, **WORKER)
        assert await engine.claim_from_resume_grant(token) is None
        await refuses(engine, "token", "claim_from_resume_grant", "token")
        spoilt = structs.replace(token, grant="grant")
        await refuses(engine, "token.grant", "claim_from_resume_grant", spoilt)


async def test_a_grant_is_good_for_its_worker_only(engine: Engine, given: Given) -> None:
    taken, grant = await resume_grant(given)
    key = grant.grant_key
    async with refused(engine, InvalidClaimGrant):
        await engine.claim_resumed_execution(taken.execution_id, **OTHER_WORKER, grant_key=key)
    async with refused(engine, InvalidClaimGrant):
        invented = structs.replace(grant, grant_key=NO_GRANT)
        await engine.claim_from_resume_grant(ResumeToken(grant=invented, **WORKER))
    ungranted = await paused(given)
    await ungranted.signal()
    async with refused(engine, InvalidClaimGrant):
        await engine.claim_resumed_execution(ungranted.execution_id, **WORKER, grant_key=key)
    claimed = await engine.claim_resumed_execution(
        taken.execution_id, worker_id="worker", worker_instance_id="another", grant_key=key
    )
    assert claimed.handle.worker_instance_id == "another"


async def test_an_expired_grant_is_removed(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    taken, key = await granted(given)
    clock.advance(ms=1_001)
    with pytest.raises(ClaimGrantExpired):
        await engine.claim_resumed_execution(taken.execution_id, **WORKER, grant_key=key)
    assert (await state_of(engine)).grants == {}
    assert (await given.taken()).execution_id == taken.execution_id


async def test_only_resumed_work_is_claimed_as_resumed(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    fresh = await given.waiting()
    async with refused(engine, NotAResumedExecution):
        await engine.claim_resumed_execution(fresh, **WORKER, grant_key=NO_GRANT)
    suspended = await paused(given)
    async with refused(engine, ExecutionNotLeaseable):
        await engine.claim_resumed_execution(suspended.execution_id, **WORKER, grant_key=NO_GRANT)
    delayed = await paused(given)
    await engine.resume_execution(delayed.execution_id, resume_delay_ms=1_000)
    async with refused(engine, ExecutionNotLeaseable):
        await engine.claim_resumed_execution(delayed.execution_id, **WORKER, grant_key=NO_GRANT)
    async with refused(engine, NotFound):
        await engine.claim_resumed_execution(UNKNOWN_ID, **WORKER, grant_key=NO_GRANT)


async def test_what_a_claim_says_must_fit(engine: Engine, given: Given) -> None:
    taken, key = await granted(given)
    async with refused(engine, InvalidInput) as caught:
        await engine.claim_resumed_execution(
            taken.execution_id, **WORKER, grant_key=key, lane_id="other"
        )
    assert caught.value.problem.startswith("lane_mismatch:")
    async with unchanged(engine):
        for field, arguments in (
            ("current_attempt_index", {"current_attempt_index": 4}),
            ("current_attempt_index", {"current_attempt_index": -1}),
            ("lease_ttl_ms", {"lease_ttl_ms": 0}),
            ("lease_id", {"lease_id": "mine"}),
            ("remaining_attempt_timeout_ms", {"remaining_attempt_timeout_ms": -1}),
        ):
            named: dict[str, object] = {**WORKER, "grant_key": key, **arguments}
            await refuses(engine, field, "claim_resumed_execution", taken.execution_id, **named)


async def test_the_attempt_keeps_the_time_it_had_left(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    policy = {"timeout_policy": {"attempt_timeout_ms": 10_000}}
    claimed = await given.running(policy=policy)
    clock.advance(ms=4_000)
    taken = await pause(given, claimed, OperatorOnly())
    clock.advance(days=3)
    await engine.resume_execution(taken.execution_id)
    grant = await engine.issue_claim_grant(taken.execution_id, **WORKER)
    resumed = await engine.claim_resumed_execution(
        taken.execution_id, **WORKER, grant_key=grant.grant_key
    )
    assert resumed.attempt_deadline_ms == clock.now_ms() + 6_000


# Who is away ----------------------------------------------------------------------


async def test_the_list_of_the_suspended_goes_by_time(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    pauses = []
    for lane in ("default", "other", "default"):
        pauses.append(
            await paused(
                given,
                fields={"lane_id": lane},
                reason_code="waiting_for_approval",
                timeout_at_ms=clock.now_ms() + TIMEOUT_MS,
            )
        )
        clock.advance(ms=5)
    await given.running()
    first = await engine.list_suspended(limit=2)
    assert first.executions == tuple(
        SuspendedExecution(
            execution_id=each.execution_id,
            suspension_id=each.details.suspension_id,
            suspended_at_ms=clock.now_ms() - ago_ms,
            timeout_at_ms=clock.now_ms() - ago_ms + TIMEOUT_MS,
            reason=SuspensionReason.WAITING_FOR_APPROVAL,
        )
        for each, ago_ms in zip(pauses[:2], (15, 10), strict=True)
    )
    second = await engine.list_suspended(cursor=first.next_cursor, limit=2)
    assert [each.execution_id for each in second.executions] == [pauses[2].execution_id]
    assert second.next_cursor is None
    for each in pauses:
        await engine.resume_execution(each.execution_id)
    for cursor in (None, first.next_cursor):
        page = await engine.list_suspended(cursor=cursor)
        assert (page.executions, page.next_cursor) == ((), None)


async def test_the_list_can_be_of_one_partition(engine: Engine, given: Given) -> None:
    one = await paused(given, fields={"lane_id": "one"})
    other = await paused(given, fields={"lane_id": "two"})
    partition = (await execution_of(engine, one.execution_id)).partition_key
    assert (await execution_of(engine, other.execution_id)).partition_key != partition
    page = await engine.list_suspended(partition=partition)
    assert [each.execution_id for each in page.executions] == [one.execution_id]
    assert (await engine.list_suspended(limit=0)).executions == ()
    await refuses(engine, "limit", "list_suspended", limit=-1)
    await refuses(engine, "partition", "list_suspended", partition=70_000)
    for cursor in ("", "x", "12", "12-x", f"-{new_id()}"):
        await refuses(engine, "cursor", "list_suspended", cursor=cursor)


async def test_a_suspended_execution_is_not_ready(engine: Engine, given: Given) -> None:
    taken = await paused(given)
    async with unchanged(engine):
        assert await engine.claim(**WORKER) is None
    execution = await execution_of(engine, taken.execution_id)
    assert execution.eligibility_state is EligibilityState.NOT_APPLICABLE
