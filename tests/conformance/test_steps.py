"""Durable steps, waiting for other executions, and handing leases back."""

import pytest

from flowfabric import Engine
from flowfabric.core.ids import partition_of, uuid_of
from flowfabric.core.records import Step, StepKind
from flowfabric.core.results import Claimed, HandedBack
from flowfabric.core.states import AttemptLifecycle, AttemptType, BlockingReason, PublicState
from flowfabric.core.steps import NewStep, StepStored
from flowfabric.engine.steps import StepReport
from flowfabric.errors import LeaseConflict, LeaseExpired, LeaseRevoked
from flowfabric.reconcilers import run_due
from flowfabric.testing import SettableClock
from tests.conformance.given import TTL_MS, Given
from tests.conformance.observed import execution_of


async def claim(engine: Engine) -> Claimed:
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    return claimed


async def test_a_step_is_stored_once_and_found_by_every_later_attempt(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    first = StepReport(
        handle=claimed.handle,
        step=NewStep(step_key="write", after_key="read", result=b'"text"'),
    )
    again = StepReport(handle=claimed.handle, step=NewStep(step_key="write", result=b'"other"'))

    assert await engine.record_steps([first]) == [StepStored(at_ms=clock.now_ms())]
    assert await engine.record_steps([again]) == [StepStored(at_ms=clock.now_ms())]
    assert await engine.list_steps(claimed.execution_id) == (
        Step(
            partition_key=partition_of(claimed.execution_id),
            execution_id=claimed.execution_id,
            step_key="write",
            after_key="read",
            kind=StepKind.CALL,
            name="write",
            result=b'"text"',
            attempt_index=0,
            recorded_at_ms=clock.now_ms(),
        ),
    )


async def test_a_step_reported_twice_is_answered_as_it_was_the_first_time(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    reports = [
        StepReport(handle=claimed.handle, step=NewStep(step_key=kind.value, kind=kind))
        for kind in StepKind
    ]
    told = await engine.record_steps(reports)
    clock.advance(ms=1_000)
    new = StepReport(handle=claimed.handle, step=NewStep(step_key="new"))
    later = StepStored(at_ms=clock.now_ms())
    assert await engine.record_steps([*reports, new, new]) == [*told, later, later]


async def test_a_sleep_remembers_when_it_ends_by_the_store_s_clock(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running()
    step = NewStep(step_key="sleep", kind=StepKind.SLEEP, sleep_ms=5_000)
    await engine.record_steps([StepReport(handle=claimed.handle, step=step)])
    (stored,) = await engine.list_steps(claimed.execution_id)
    assert stored.wake_at_ms == clock.now_ms() + 5_000


async def test_a_worker_that_lost_its_lease_stores_nothing(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    late, revoked = await given.running(), await given.running()
    await engine.revoke_lease(revoked.execution_id, reason="test")
    clock.advance(ms=TTL_MS)
    live = await given.running()
    outcomes = await engine.record_steps(
        [
            StepReport(handle=each.handle, step=NewStep(step_key="s"))
            for each in (late, revoked, live)
        ]
    )
    assert [type(outcome) for outcome in outcomes] == [LeaseExpired, LeaseRevoked, StepStored]
    stored = [await engine.list_steps(each.execution_id) for each in (late, revoked, live)]
    assert [len(steps) for steps in stored] == [0, 0, 1]


async def test_a_lease_handed_back_is_ready_at_once_and_counts_for_nothing(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()

    answer = await engine.hand_back(claimed.handle, reason="worker stops")
    assert answer == HandedBack(execution_id=claimed.execution_id)
    assert await engine.hand_back(claimed.handle, reason="worker stops") == answer

    snapshot = await engine.describe_execution(claimed.execution_id)
    assert snapshot is not None
    assert (snapshot.public_state, snapshot.retry_count, snapshot.lease_reclaim_count) == (
        PublicState.WAITING,
        0,
        0,
    )
    again = await claim(engine)
    assert (again.execution_id, again.attempt_index) == (claimed.execution_id, 1)
    first, second = await engine.list_attempts(claimed.execution_id)
    assert first.attempt_state is AttemptLifecycle.INTERRUPTED_RECLAIMED
    assert first.failure_reason == "handed_back: worker stops"
    assert (second.attempt_type, second.previous_attempt_index) == (AttemptType.RETRY, 0)


async def test_a_lease_that_somebody_else_holds_cannot_be_handed_back(
    engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    await engine.hand_back(claimed.handle, reason="first")
    await claim(engine)
    with pytest.raises(LeaseConflict):
        await engine.hand_back(claimed.handle, reason="too late")


async def test_an_execution_that_waits_for_another_wakes_when_it_has_ended(
    engine: Engine, given: Given
) -> None:
    parent, child = await given.running(), await given.running()

    moved = await engine.await_executions(parent.handle, [child.execution_id])
    assert moved.public_state is PublicState.WAITING_CHILDREN
    assert await engine.claim(worker_id="w", worker_instance_id="w-1") is None

    await engine.complete(child.handle, b"42")
    assert (await run_due(engine))["awaited"] == 1
    again = await claim(engine)
    assert (again.execution_id, again.attempt_index) == (parent.execution_id, 0)
    assert await run_due(engine) == {}


async def test_waiting_for_one_that_has_ended_already_is_due_at_once(
    engine: Engine, given: Given
) -> None:
    parent, child = await given.running(), await given.running()
    await engine.complete(child.handle)
    await engine.await_executions(parent.handle, [child.execution_id])
    assert (await run_due(engine))["delayed"] == 1
    assert (await claim(engine)).execution_id == parent.execution_id


async def test_a_wait_ends_at_its_time_at_the_latest(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    parent, child = await given.running(), await given.waiting(lane_id="other")
    await engine.await_executions(parent.handle, [child], until_ms=clock.now_ms() + 10_000)
    explanation = await engine.read_exec_core_fields(parent.execution_id, ["blocking_reason"])
    assert explanation == {"blocking_reason": BlockingReason.WAITING_FOR_CHILDREN.value}
    clock.advance(ms=10_000)
    assert (await run_due(engine))["delayed"] == 1
    assert (await claim(engine)).execution_id == parent.execution_id


async def test_cancelling_what_is_waited_for_wakes_too(engine: Engine, given: Given) -> None:
    parent, child = await given.running(), await given.waiting(lane_id="other")
    await engine.await_executions(parent.handle, [child])
    await engine.cancel_execution(child, reason="test")
    assert (await run_due(engine))["awaited"] == 1
    assert (await claim(engine)).execution_id == parent.execution_id


async def test_outcomes_are_read_for_those_that_have_ended(engine: Engine, given: Given) -> None:
    done, failed, waiting = await given.running(), await given.running(), await given.waiting()
    await engine.complete(done.handle, b"1")
    await engine.fail(failed.handle, "broken")
    found = await engine.read_outcomes([done.execution_id, failed.execution_id, waiting])
    assert {key: (o.public_state, o.result, o.reason) for key, o in found.items()} == {
        done.execution_id: (PublicState.COMPLETED, b"1", ""),
        failed.execution_id: (PublicState.FAILED, None, "broken"),
    }


async def test_the_awaited_are_named_in_the_order_of_their_ids(
    engine: Engine, given: Given
) -> None:
    running = await given.running()
    awaited = [await given.waiting(lane_id="elsewhere") for _ in range(5)]
    await engine.await_executions(running.handle, awaited)
    detail = (await execution_of(engine, running.execution_id)).blocking_detail
    named = ", ".join(f"work {uuid_of(each)}" for each in sorted(awaited)[:3])
    assert detail == f"waiting for {named} and 2 more"
