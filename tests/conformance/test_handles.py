"""Who may act on a running execution: handles and fences, the same for every operation."""

from collections.abc import Mapping

import pytest
from msgspec import structs

from flowfabric import Engine, FlowFabricError
from flowfabric.core.handles import FOREIGN_POSTGRES_TAG, Handle, HandleKind, sign, to_wire
from flowfabric.core.leases import Fence
from flowfabric.core.results import Completed, TerminalFailed
from flowfabric.core.states import OwnershipState, PublicState
from flowfabric.errors import (
    AlreadySuspended,
    ExecutionNotActive,
    HandleFromOtherBackend,
    InvalidHandle,
    InvalidInput,
    LeaseConflict,
    LeaseExpired,
    LeaseRevoked,
    NotFound,
    StaleLease,
)
from tests.conformance.given import NOBODY, UNKNOWN_ID, Given, fence_of
from tests.conformance.holders import WITH_FENCE, WITH_HANDLE
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refused,
    refuses,
    state_of,
    unchanged,
)


def bad_handles(engine: Engine, handle: Handle) -> list[tuple[object, type[FlowFabricError]]]:
    key = engine.deployment.handle_key
    foreign = structs.replace(handle, backend_tag=FOREIGN_POSTGRES_TAG)
    suspended = structs.replace(handle, kind=HandleKind.SUSPENDED)
    wire = to_wire(handle)
    return [
        (None, InvalidInput),
        ("handle", InvalidInput),
        (sign(foreign, key), HandleFromOtherBackend),
        (to_wire(sign(foreign, key)), HandleFromOtherBackend),
        (structs.replace(handle, lease_epoch=2), InvalidHandle),
        (structs.replace(handle, kind=HandleKind.RESUMED), InvalidHandle),
        (structs.replace(handle, signature=b""), InvalidHandle),
        (sign(handle, b"another key of thirty-two bytes!"), InvalidHandle),
        (suspended, InvalidHandle),
        (sign(suspended, key), AlreadySuspended),
        (b"", InvalidHandle),
        (wire[:-1], InvalidHandle),
        (wire + b"\x00", InvalidHandle),
        (b"\x09" + wire[1:], InvalidHandle),
    ]


@pytest.mark.parametrize("operation", WITH_HANDLE)
async def test_a_handle_that_is_not_ours_or_was_altered_is_refused(
    engine: Engine, given: Given, operation: str
) -> None:
    running = await given.running()
    async with unchanged(engine):
        for handle, error in bad_handles(engine, running.handle):
            with pytest.raises(error):
                await WITH_HANDLE[operation](engine, handle)


async def test_a_handle_may_travel_as_bytes(engine: Engine, given: Given) -> None:
    for operation in WITH_HANDLE.values():
        running = await given.running()
        await operation(engine, to_wire(running.handle))
        after = await execution_of(engine, running.execution_id)
        assert after.last_mutation_at_ms == given.clock.now_ms()


async def replaced(given: Given) -> Handle:
    """Lost by expiry and held by another worker since."""
    lost = await given.expired_lease(lane_id="replaced")
    await given.taken("replaced")
    return lost.handle


async def ended_by_another(given: Given) -> Handle:
    lost = await given.expired_lease(lane_id="ended")
    await given.engine.complete((await given.taken("ended")).handle)
    return lost.handle


async def cancelled_by_an_operator(given: Given) -> Handle:
    running = await given.running()
    await given.engine.cancel_execution(running.execution_id, reason="no")
    return running.handle


async def replayed(given: Given) -> Handle:
    ended = await given.completed()
    await given.engine.replay_execution(ended.execution_id)
    return ended.handle


async def deleted(given: Given) -> Handle:
    ended = await given.completed(policy={"stream_policy": {"retention_ttl_ms": 0}})
    await given.engine.trim_retention()
    return ended.handle


async def revoked(given: Given) -> Handle:
    return (await given.revoked()).handle


async def expired(given: Given) -> Handle:
    return (await given.expired_lease()).handle


LOST = {
    revoked: LeaseRevoked,
    expired: LeaseExpired,
    replaced: LeaseConflict,
    ended_by_another: ExecutionNotActive,
    cancelled_by_an_operator: ExecutionNotActive,
    replayed: ExecutionNotActive,
    deleted: NotFound,
}


@pytest.mark.parametrize("operation", WITH_HANDLE)
async def test_who_lost_the_lease_is_told_how_and_changes_nothing(
    engine: Engine, given: Given, operation: str
) -> None:
    for lose, error in LOST.items():
        handle = await lose(given)
        async with refused(engine, error):
            await WITH_HANDLE[operation](engine, handle)


@pytest.mark.parametrize("operation", [*(WITH_HANDLE.keys() - {"progress"}), *WITH_FENCE])
async def test_an_overdue_lease_is_noted_by_whoever_meets_it(
    engine: Engine, given: Given, operation: str
) -> None:
    claimed = await given.overdue_lease()
    before = await execution_of(engine, claimed.execution_id)
    cursor = await cursor_of(engine)
    with pytest.raises(LeaseExpired):
        await (
            WITH_HANDLE[operation](engine, claimed.handle)
            if operation in WITH_HANDLE
            else WITH_FENCE[operation](engine, claimed.execution_id, fence_of(claimed))
        )
    after = await execution_of(engine, claimed.execution_id)
    assert after.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE
    assert after == structs.replace(
        before,
        ownership_state=after.ownership_state,
        blocking_reason=after.blocking_reason,
        blocking_detail="lease expired, awaiting reclaim",
        attempt_state=after.attempt_state,
        ready=True,
        worker_deaths=0,
        lease_expired_at_ms=given.clock.now_ms(),
        last_mutation_at_ms=given.clock.now_ms(),
    )
    (event,) = await events_since(engine, cursor)
    assert (event.event_type, event.lease_id) == ("expired", claimed.lease_id)


async def test_who_only_reports_progress_leaves_no_trace_of_an_overdue_lease(
    engine: Engine, given: Given
) -> None:
    claimed = await given.overdue_lease()
    async with refused(engine, LeaseExpired):
        await engine.progress(claimed.handle, percent=5)


async def test_an_execution_that_is_not_running_says_what_became_of_it(
    engine: Engine, given: Given
) -> None:
    claimed = await given.completed()
    async with refused(engine, ExecutionNotActive) as caught:
        await engine.renew(claimed.handle)
    assert vars(caught.value) | {"detail": ""} == {
        "detail": "",
        "execution_id": claimed.execution_id,
        "lifecycle_phase": "terminal",
        "terminal_outcome": "success",
        "lease_epoch": 1,
        "attempt_id": claimed.attempt_id,
        "reason": "",
    }
    retrying = await given.retrying()
    async with refused(engine, ExecutionNotActive) as caught:
        await engine.complete(retrying.handle)
    error = caught.value
    assert (error.lifecycle_phase, error.terminal_outcome) == ("runnable", "none")
    assert (error.lease_epoch, error.attempt_id) == (1, None)


async def test_one_bad_handle_does_not_spoil_its_batch(engine: Engine, given: Given) -> None:
    good, lost = await given.running(), await given.revoked()
    forged = structs.replace(good.handle, lease_epoch=9)
    renewed = await engine.renew_many([forged, good.handle, lost.handle])
    assert [type(each).__name__ for each in renewed] == ["InvalidHandle", "Renewed", "LeaseRevoked"]


# By fence


@pytest.mark.parametrize("operation", WITH_FENCE)
async def test_a_fence_must_match_whole(engine: Engine, given: Given, operation: str) -> None:
    running = await given.running()
    wrong: list[Mapping[str, object]] = [
        {"lease_id": NOBODY},
        {"lease_epoch": 2},
        {"attempt_id": NOBODY},
        {"attempt_index": 1},
    ]
    for fields in wrong:
        async with refused(engine, StaleLease):
            await WITH_FENCE[operation](engine, running.execution_id, fence_of(running, **fields))
    right = fence_of(running, attempt_index=0)
    await WITH_FENCE[operation](engine, running.execution_id, right)


@pytest.mark.parametrize("operation", WITH_FENCE)
async def test_a_lost_lease_is_told_by_fence_too(
    engine: Engine, given: Given, operation: str
) -> None:
    lost: dict[str, type[FlowFabricError]] = {
        "revoked": LeaseRevoked,
        "expired_lease": LeaseExpired,
        "cancelled": ExecutionNotActive,
        "waiting": ExecutionNotActive,
        "parked": ExecutionNotActive,
    }
    fence = fence_of(await given.running())
    for state, error in lost.items():
        execution_id = await given.state(state)
        async with refused(engine, error):
            await WITH_FENCE[operation](engine, execution_id, fence)
    async with refused(engine, NotFound):
        await WITH_FENCE[operation](engine, UNKNOWN_ID, fence)


@pytest.mark.parametrize("operation", WITH_FENCE)
async def test_a_fence_is_required_and_must_be_whole(
    engine: Engine, given: Given, operation: str
) -> None:
    running = await given.running()
    fence = fence_of(running)
    bad: list[tuple[str, object]] = [
        ("fence", None),
        ("fence", "fence"),
        ("fence", structs.replace(fence, lease_id="")),
        ("fence", structs.replace(fence, attempt_id="")),
        ("fence.lease_id", structs.replace(fence, lease_id="lease")),
        ("fence.attempt_id", structs.replace(fence, attempt_id=5)),
        ("fence.lease_epoch", structs.replace(fence, lease_epoch="1")),
        ("fence.lease_epoch", structs.replace(fence, lease_epoch=-1)),
        ("fence.attempt_index", structs.replace(fence, attempt_index="0")),
    ]
    reason = {"reason": "broken"} if operation == "fail_execution" else {}
    async with unchanged(engine):
        for field, given_fence in bad:
            named = {"fence": given_fence, **reason}
            await refuses(engine, field, operation, running.execution_id, **named)


async def test_an_operator_may_finish_work_without_a_fence(engine: Engine, given: Given) -> None:
    done, broken = (await given.running()).execution_id, (await given.running()).execution_id
    override = "operator_override"
    assert await engine.complete_execution(done, source=override, result=b"by hand") == Completed(
        execution_id=done, public_state=PublicState.COMPLETED
    )
    assert await engine.get_execution_result(done) == b"by hand"
    assert await engine.fail_execution(broken, source=override, reason="gave up") == TerminalFailed(
        execution_id=broken
    )
    for state, error in (
        ("completed", ExecutionNotActive),
        ("waiting", ExecutionNotActive),
        ("revoked", LeaseRevoked),
        ("expired_lease", LeaseExpired),
    ):
        execution_id = await given.state(state)
        async with refused(engine, error):
            await engine.complete_execution(execution_id, source=override)
        async with refused(engine, error):
            await engine.fail_execution(execution_id, source=override, reason="no")


async def test_a_handle_of_one_execution_says_nothing_about_another(
    engine: Engine, given: Given
) -> None:
    mine, other = await given.running(), await given.running()
    stolen = Fence(lease_id=mine.lease_id, lease_epoch=mine.lease_epoch, attempt_id=mine.attempt_id)
    async with refused(engine, StaleLease):
        await engine.complete_execution(other.execution_id, fence=stolen)
    assert len((await state_of(engine)).executions) == 2
