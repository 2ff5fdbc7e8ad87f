"""Cancelling, by operators, by systems and by the worker itself."""

import asyncio

import pytest

from flowfabric import Engine
from flowfabric.core.bounds import BATCH_MAX, TEXT_BYTES_MAX
from flowfabric.core.results import Cancelled
from flowfabric.core.states import AttemptLifecycle, OwnershipState, PublicState
from flowfabric.errors import ExecutionNotActive, InvalidInput, LeaseRevoked, NotFound, StaleLease
from flowfabric.testing import SettableClock
from tests.conformance.expected import (
    attempt_ended,
    attempts_ended,
    completion_event,
    ended,
    lease_event,
)
from tests.conformance.given import NOBODY, TAGGED, UNKNOWN_ID, WORKER, Given
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refused,
    refuses,
    state_of,
    unchanged,
)

UNFINISHED = (
    "waiting",
    "resumable",
    "delayed",
    "retrying",
    "parked",
    "waiting_children",
    "running",
    "overdue_lease",
    "expired_lease",
    "revoked",
)


@pytest.mark.parametrize("state", UNFINISHED)
async def test_an_operator_cancels_in_any_phase(
    engine: Engine, given: Given, clock: SettableClock, state: str
) -> None:
    execution_id = await given.state(state, **TAGGED)
    before = await execution_of(engine, execution_id)
    attempts = await engine.list_attempts(execution_id)
    cursor = await cursor_of(engine)
    now_ms = clock.advance("1s")
    assert await engine.cancel_execution(execution_id, reason="not needed") == Cancelled(
        execution_id=execution_id, public_state=PublicState.CANCELLED
    )
    after = await execution_of(engine, execution_id)
    assert after == ended(
        before,
        PublicState.CANCELLED,
        now_ms,
        lease_epoch=before.lease_epoch + 1,
        cancellation_reason="not needed",
        cancelled_by="operator_override",
    )
    assert await engine.list_attempts(execution_id) == attempts_ended(
        attempts,
        AttemptLifecycle.ENDED_CANCELLED,
        now_ms,
        "cancelled: not needed",
        "cancelled",
    )
    released = (
        [lease_event(before, "revoked", now_ms, "cancelled")]
        if before.ownership_state is OwnershipState.LEASED
        else []
    )
    assert await events_since(engine, cursor) == [*released, completion_event(after, now_ms)]


async def test_cancelling_again_succeeds_and_changes_nothing(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    execution_id = await given.cancelled()
    clock.advance("1s")
    async with unchanged(engine):
        assert await engine.cancel_execution(execution_id, reason="other") == Cancelled(
            execution_id=execution_id, public_state=PublicState.CANCELLED
        )


@pytest.mark.parametrize("state", ["completed", "failed", "expired"])
async def test_what_ended_otherwise_cannot_be_cancelled(
    engine: Engine, given: Given, state: str
) -> None:
    execution_id = await given.state(state)
    async with refused(engine, InvalidInput) as caught:
        await engine.cancel_execution(execution_id, reason="late")
    assert (caught.value.field, caught.value.value) == ("execution_id", execution_id)
    assert caught.value.problem == f"already terminal in state {state}"


async def test_of_concurrent_cancellations_one_has_an_effect_and_all_succeed(
    engine: Engine, given: Given
) -> None:
    running = await given.running()
    cursor = await cursor_of(engine)
    answers = await asyncio.gather(
        *(engine.cancel_execution(running.execution_id, reason=f"{n}") for n in range(5))
    )
    assert {answer.public_state for answer in answers} == {PublicState.CANCELLED}
    events = [event.category for event in await events_since(engine, cursor)]
    assert events == ["lease", "completion"]
    assert (await execution_of(engine, running.execution_id)).lease_epoch == 2


async def test_cancelling_drops_an_outstanding_grant(engine: Engine, given: Given) -> None:
    execution_id = await given.waiting()
    grant = await engine.issue_claim_grant(execution_id, **WORKER)
    await engine.cancel_execution(execution_id, reason="no")
    assert (await state_of(engine)).grants == {}
    async with refused(engine, ExecutionNotActive):
        await engine.claim_execution(execution_id, **WORKER, grant_key=grant.grant_key)


# Other sources


async def test_a_system_cancels_running_work_by_the_epoch_it_knows(
    engine: Engine, given: Given
) -> None:
    running = await given.running()
    execution_id = running.execution_id
    named = {"reason": "x", "source": "system_timeout"}
    async with unchanged(engine):
        await refuses(engine, "lease_epoch", "cancel_execution", execution_id, **named)
        for wrong in (
            {"lease_epoch": 2},
            {"lease_epoch": 1, "lease_id": NOBODY},
            {"lease_epoch": 1, "attempt_id": NOBODY},
        ):
            with pytest.raises(StaleLease):
                await engine.cancel_execution(execution_id, reason="x", source="s", **wrong)
    await engine.cancel_execution(
        execution_id,
        reason="x",
        source="system_timeout",
        lease_id=running.lease_id,
        lease_epoch=1,
        attempt_id=running.attempt_id,
    )
    after = await execution_of(engine, execution_id)
    assert (after.cancelled_by, after.lease_epoch) == ("system_timeout", 2)


async def test_a_system_needs_no_epoch_for_work_that_is_not_running(
    engine: Engine, given: Given
) -> None:
    for source, stored in (("flow_cascade", "flow_cascade"), ("anything", "anything"), ("", None)):
        execution_id = await given.waiting()
        await engine.cancel_execution(execution_id, reason="x", source=source)
        after = await execution_of(engine, execution_id)
        assert after.cancelled_by == (stored or execution_id)
    revoked = await given.revoked()
    async with refused(engine, LeaseRevoked):
        await engine.cancel_execution(
            revoked.execution_id, reason="x", source="lease_holder", lease_epoch=1
        )


# By the worker


async def test_a_worker_cancels_its_own_work_and_may_repeat_it(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running(**TAGGED)
    execution_id = running.execution_id
    before = await execution_of(engine, execution_id)
    (attempt,) = await engine.list_attempts(execution_id)
    cursor = await cursor_of(engine)
    now_ms = clock.advance("1s")
    answer = Cancelled(execution_id=execution_id, public_state=PublicState.CANCELLED)
    assert await engine.cancel(running.handle, "pointless") == answer
    after = await execution_of(engine, execution_id)
    assert after == ended(
        before,
        PublicState.CANCELLED,
        now_ms,
        cancellation_reason="pointless",
        cancelled_by="worker",
    )
    assert await engine.list_attempts(execution_id) == (
        attempt_ended(
            attempt,
            AttemptLifecycle.ENDED_CANCELLED,
            now_ms,
            "cancelled: pointless",
            "cancelled",
        ),
    )
    assert await events_since(engine, cursor) == [
        lease_event(before, "revoked", now_ms, "cancelled"),
        completion_event(after, now_ms),
    ]
    clock.advance("1s")
    async with unchanged(engine):
        assert await engine.cancel(running.handle, "again") == answer


# Many


async def test_a_batch_is_cancelled_each_with_its_own_answer(engine: Engine, given: Given) -> None:
    done, waiting = (await given.completed()).execution_id, await given.waiting()
    gone = await given.cancelled()
    outcomes = await engine.cancel_executions([done, waiting, UNKNOWN_ID, gone], reason="x")
    names = [type(each).__name__ for each in outcomes]
    assert names == ["InvalidInput", "Cancelled", "NotFound", "Cancelled"]
    assert outcomes[1] == Cancelled(execution_id=waiting, public_state=PublicState.CANCELLED)
    assert isinstance(outcomes[2], NotFound)
    assert outcomes[2].id == UNKNOWN_ID
    async with unchanged(engine):
        assert await engine.cancel_executions([], reason="x") == []


async def test_bad_cancellations_are_refused(engine: Engine, given: Given) -> None:
    running = await given.running()
    execution_id = running.execution_id
    bad: list[tuple[str, dict[str, object]]] = [
        ("reason", {"reason": 5}),
        ("reason", {"reason": None}),
        ("source", {"reason": "x", "source": "s" * 257}),
        ("source", {"reason": "x", "source": None}),
        ("lease_id", {"reason": "x", "lease_id": "lease"}),
        ("lease_epoch", {"reason": "x", "lease_epoch": "1"}),
        ("lease_epoch", {"reason": "x", "lease_epoch": -1}),
        ("attempt_id", {"reason": "x", "attempt_id": 5}),
    ]
    async with unchanged(engine):
        for field, named in bad:
            await refuses(engine, field, "cancel_execution", execution_id, **named)
        await refuses(engine, "reason", "cancel", running.handle, 5)
        await refuses(engine, "reason", "cancel_executions", [execution_id], reason=5)
        await refuses(engine, "execution_ids", "cancel_executions", execution_id, reason="x")
        too_many = [execution_id] * (BATCH_MAX + 1)
        await refuses(engine, "execution_ids", "cancel_executions", too_many, reason="x")


async def test_a_long_reason_to_cancel_is_shortened(engine: Engine, given: Given) -> None:
    execution_id = await given.cancelled("r" * (TEXT_BYTES_MAX + 1))
    after = await execution_of(engine, execution_id)
    assert after.cancellation_reason == "r" * (TEXT_BYTES_MAX - 3) + "…"
