"""Running ended executions again."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.bounds import BATCH_MAX, TEXT_BYTES_MAX
from flowfabric.core.results import Replayed
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    FailureClass,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.errors import ExecutionNotActive, ExecutionNotTerminal, MaxReplaysExhausted
from flowfabric.testing import SettableClock
from tests.conformance.expected import operator_event
from tests.conformance.given import ENDED, EVERY_STATE, UNKNOWN_ID, Given
from tests.conformance.observed import (
    cursor_of,
    events_since,
    execution_of,
    refused,
    refuses,
    unchanged,
)


@pytest.mark.parametrize("state", ENDED)
async def test_a_replay_makes_an_ended_execution_ready_and_keeps_its_history(
    engine: Engine, given: Given, clock: SettableClock, state: str
) -> None:
    execution_id = await given.state(state, namespace="shop", tags={"cairn.instance_id": "i-1"})
    before = await execution_of(engine, execution_id)
    attempts = await engine.list_attempts(execution_id)
    cursor = await cursor_of(engine)
    now_ms = clock.advance("1s")
    assert await engine.replay_execution(
        execution_id, reason="fixed", requested_by="ann"
    ) == Replayed(public_state=PublicState.WAITING)
    after = await execution_of(engine, execution_id)
    assert after == structs.replace(
        before,
        lifecycle_phase=LifecyclePhase.RUNNABLE,
        ownership_state=OwnershipState.UNOWNED,
        eligibility_state=EligibilityState.ELIGIBLE_NOW,
        blocking_reason=BlockingReason.WAITING_FOR_WORKER,
        terminal_outcome=TerminalOutcome.NONE,
        attempt_state=AttemptState.PENDING_REPLAY_ATTEMPT,
        public_state=PublicState.WAITING,
        ready=True,
        lease_epoch=before.lease_epoch + 1,
        current_attempt_id=None,
        replay_count=1,
        completed_at_ms=None,
        final_lease_id=None,
        final_worker_id=None,
        final_worker_instance_id=None,
        retain_until_ms=None,
        deadline_at_ms=None,
        result=None,
        failure_reason=None,
        cancellation_reason=None,
        cancelled_by=None,
        pending_replay_reason="fixed",
        pending_replay_requested_by="ann",
        pending_previous_attempt_index=0 if attempts else None,
        last_transition_at_ms=now_ms,
        last_mutation_at_ms=now_ms,
    )
    assert await engine.list_attempts(execution_id) == attempts
    assert await events_since(engine, cursor) == [
        operator_event(after, "replayed", '{"branch":"normal","groups_reset":0}', now_ms)
    ]
    assert await engine.get_execution_result(execution_id) is None
    again = await given.taken()
    assert (again.attempt_type, again.attempt_index) == (AttemptType.REPLAY, len(attempts))


async def test_a_replay_begins_without_the_progress_of_the_former_life(
    engine: Engine, given: Given
) -> None:
    running = await given.running()
    await engine.progress(running.handle, percent=80, message="almost there")
    await engine.fail(running.handle, "broken", failure_class=FailureClass.PERMANENT)
    await engine.replay_execution(running.execution_id)
    after = await execution_of(engine, running.execution_id)
    assert (after.progress_pct, after.progress_message, after.progress_updated_at_ms) == (
        None,
        None,
        None,
    )


async def test_a_replay_starts_counting_retries_and_reclaims_anew(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    policy = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}
    first = await given.expired_lease(policy=policy)
    second = await given.taken()
    await engine.fail(second.handle, "again")
    await engine.promote_delayed(first.execution_id)
    third = await given.taken()
    await engine.fail(third.handle, "again")
    before = await execution_of(engine, first.execution_id)
    assert (before.retry_count, before.lease_reclaim_count) == (1, 1)
    await engine.replay_execution(first.execution_id)
    after = await execution_of(engine, first.execution_id)
    assert (after.retry_count, after.lease_reclaim_count) == (0, 0)
    fourth = await given.taken()
    assert (fourth.attempt_index, fourth.lease_epoch) == (3, 5)
    await engine.complete(fourth.handle)
    kinds = [each.attempt_type for each in await engine.list_attempts(first.execution_id)]
    assert kinds == [
        AttemptType.INITIAL,
        AttemptType.RECLAIM,
        AttemptType.RETRY,
        AttemptType.REPLAY,
    ]


async def test_a_replay_counts_a_relative_deadline_anew_and_keeps_one_to_come(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    relative = await given.completed(policy={"timeout_policy": {"execution_deadline_ms": 500}})
    future = await given.completed(execution_deadline_at_ms=clock.now_ms() + 9_000)
    past = await given.completed(execution_deadline_at_ms=clock.now_ms() + 1)
    deadline_ms = clock.now_ms() + 9_000
    now_ms = clock.advance("1s")
    expected = {relative: now_ms + 500, future: deadline_ms, past: None}
    for claimed, rearmed_ms in expected.items():
        await engine.replay_execution(claimed.execution_id)
        after = await execution_of(engine, claimed.execution_id)
        assert after.deadline_at_ms == rearmed_ms


@pytest.mark.parametrize(
    ("policy", "replays"), [(None, 10), ({"max_replay_count": 1}, 1), ({"max_replay_count": 0}, 0)]
)
async def test_replays_are_limited_by_the_policy(
    engine: Engine, given: Given, policy: object, replays: int
) -> None:
    execution_id = await given.cancelled(policy=policy)
    for _ in range(replays):
        await engine.replay_execution(execution_id)
        await engine.cancel_execution(execution_id, reason="again")
    async with refused(engine, MaxReplaysExhausted):
        await engine.replay_execution(execution_id)


async def test_only_ended_executions_are_replayed(engine: Engine, given: Given) -> None:
    for state in EVERY_STATE:
        if state not in ENDED:
            execution_id = await given.state(state)
            async with refused(engine, ExecutionNotTerminal):
                await engine.replay_execution(execution_id)
    replayed = await given.cancelled()
    await engine.replay_execution(replayed)
    async with refused(engine, ExecutionNotTerminal):
        await engine.replay_execution(replayed)


async def test_the_old_holder_cannot_act_on_the_new_life(engine: Engine, given: Given) -> None:
    ended = await given.completed()
    await engine.replay_execution(ended.execution_id)
    async with refused(engine, ExecutionNotActive):
        await engine.complete(ended.handle)
    again = await given.taken()
    assert again.lease_epoch == 3
    await engine.complete(again.handle)
    async with refused(engine, ExecutionNotActive):
        await engine.complete(ended.handle)
    states = [each.attempt_state for each in await engine.list_attempts(ended.execution_id)]
    assert states == [AttemptLifecycle.ENDED_SUCCESS] * 2


async def test_a_batch_is_replayed_each_with_its_own_answer(engine: Engine, given: Given) -> None:
    ended, waiting = await given.cancelled(), await given.waiting()
    outcomes = await engine.replay_executions([waiting, ended, UNKNOWN_ID, ended], reason="x")
    names = [type(each).__name__ for each in outcomes]
    assert names == ["ExecutionNotTerminal", "Replayed", "NotFound", "ExecutionNotTerminal"]
    async with unchanged(engine):
        assert await engine.replay_executions([]) == []


async def test_bad_replays_are_refused(engine: Engine, given: Given) -> None:
    execution_id = await given.cancelled()
    bad: list[tuple[str, dict[str, object]]] = [
        ("reason", {"reason": 5}),
        ("reason", {"reason": "r" * (TEXT_BYTES_MAX + 1)}),
        ("requested_by", {"requested_by": 5}),
        ("requested_by", {"requested_by": "r" * 257}),
    ]
    async with unchanged(engine):
        for field, named in bad:
            await refuses(engine, field, "replay_execution", execution_id, **named)
            await refuses(engine, field, "replay_executions", [execution_id], **named)
        await refuses(engine, "execution_ids", "replay_executions", execution_id)
        too_many = [execution_id] * (BATCH_MAX + 1)
        await refuses(engine, "execution_ids", "replay_executions", too_many)
