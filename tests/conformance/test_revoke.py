"""Taking a lease away."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.bounds import TEXT_BYTES_MAX
from flowfabric.core.results import AlreadySatisfied, Revoked
from flowfabric.core.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    OwnershipState,
    PublicState,
)
from flowfabric.errors import LeaseRevoked, NotFound
from flowfabric.testing import SettableClock
from tests.conformance.expected import NO_LEASE, lease_event
from tests.conformance.given import ENDED, NOBODY, SET_ASIDE, UNKNOWN_ID, WAITING, Given
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refused,
    refuses,
    unchanged,
)


@pytest.mark.parametrize("named", [False, True], ids=["whoever holds it", "named holder"])
async def test_a_revoked_lease_leaves_the_execution_ready_for_another(
    engine: Engine, given: Given, clock: SettableClock, named: bool
) -> None:
    running = await given.running(namespace="shop", tags={"cairn.instance_id": "i-1"})
    execution_id = running.execution_id
    before = await execution_of(engine, execution_id)
    attempts = await engine.list_attempts(execution_id)
    cursor = await cursor_of(engine)
    now_ms = clock.advance("1s")
    assert await engine.revoke_lease(
        execution_id,
        reason="drain",
        expected_lease_id=running.lease_id if named else "",
        worker_instance_id="worker-1-instance" if named else "",
    ) == Revoked(lease_id=running.lease_id, lease_epoch=2)
    after = await execution_of(engine, execution_id)
    assert after == structs.replace(
        before,
        **NO_LEASE
        | {
            "ownership_state": OwnershipState.LEASE_REVOKED,
            "eligibility_state": EligibilityState.NOT_APPLICABLE,
            "blocking_reason": BlockingReason.WAITING_FOR_WORKER,
            "blocking_detail": "lease revoked: drain",
            "attempt_state": AttemptState.ATTEMPT_INTERRUPTED,
            "public_state": PublicState.ACTIVE,
            "ready": True,
            "lease_epoch": 2,
            "lease_revoked_at_ms": now_ms,
            "lease_revoke_reason": "drain",
            "last_mutation_at_ms": now_ms,
        },
    )
    assert await engine.list_attempts(execution_id) == attempts
    assert await events_since(engine, cursor) == [lease_event(before, "revoked", now_ms, "drain")]
    snapshot = await engine.describe_execution(execution_id)
    assert snapshot is not None
    assert snapshot.current_lease is None
    async with refused(engine, LeaseRevoked):
        await engine.complete(running.handle)


async def test_nothing_to_revoke_is_no_error(engine: Engine, given: Given) -> None:
    answers = {
        **dict.fromkeys((*WAITING, *SET_ASIDE, *ENDED), "no_active_lease"),
        "revoked": "already_revoked",
        "expired_lease": "already_expired",
    }
    for state, reason in answers.items():
        execution_id = await given.state(state)
        async with unchanged(engine):
            assert await engine.revoke_lease(execution_id, reason="x") == AlreadySatisfied(
                reason=reason
            ), state


async def test_another_worker_or_lease_is_left_alone(engine: Engine, given: Given) -> None:
    execution_id = (await given.running()).execution_id
    async with unchanged(engine):
        assert await engine.revoke_lease(
            execution_id, reason="x", worker_instance_id="other"
        ) == AlreadySatisfied(reason="different_worker_instance_id")
        assert await engine.revoke_lease(
            execution_id, reason="x", expected_lease_id=NOBODY
        ) == AlreadySatisfied(reason="lease_id_mismatch")


async def test_an_overdue_lease_is_noted_instead_of_revoked(engine: Engine, given: Given) -> None:
    overdue = await given.overdue_lease()
    cursor = await cursor_of(engine)
    assert await engine.revoke_lease(overdue.execution_id, reason="x") == AlreadySatisfied(
        reason="already_expired"
    )
    after = await execution_of(engine, overdue.execution_id)
    assert after.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE
    assert [event.event_type for event in await events_since(engine, cursor)] == ["expired"]


async def test_bad_revocations_are_refused(engine: Engine, given: Given) -> None:
    execution_id = (await given.running()).execution_id
    bad: list[tuple[str, dict[str, object]]] = [
        ("reason", {"reason": None}),
        ("expected_lease_id", {"reason": "x", "expected_lease_id": "lease"}),
        ("expected_lease_id", {"reason": "x", "expected_lease_id": 5}),
        ("worker_instance_id", {"reason": "x", "worker_instance_id": 5}),
        ("worker_instance_id", {"reason": "x", "worker_instance_id": "w" * 257}),
    ]
    async with unchanged(engine):
        for field, named in bad:
            await refuses(engine, field, "revoke_lease", execution_id, **named)
    async with refused(engine, NotFound):
        await engine.revoke_lease(UNKNOWN_ID, reason="x")
    await engine.revoke_lease(execution_id, reason="r" * (TEXT_BYTES_MAX + 1))
    after = await execution_of(engine, execution_id)
    assert after.lease_revoke_reason == "r" * (TEXT_BYTES_MAX - 3) + "…"
