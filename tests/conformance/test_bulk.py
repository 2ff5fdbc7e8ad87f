"""Cancelling and replaying everything a filter matches."""

import asyncio

from flowfabric import Engine
from flowfabric.core.bounds import BATCH_MAX, SWEEP_BATCH
from flowfabric.core.states import PublicState
from flowfabric.engine.flow_operators import BULK_MAX, BulkResult
from flowfabric.engine.reads import EVERYTHING, ExecutionFilter
from flowfabric.testing import SettableClock
from tests.conformance.given import ENDED, EVERY_STATE, Given, new
from tests.conformance.observed import execution_of, refuses, state_of, unchanged

NOTHING = BulkResult(touched=0, refused={}, more=False)


async def states_of(engine: Engine) -> dict[PublicState, int]:
    counts: dict[PublicState, int] = {}
    for execution in (await state_of(engine)).executions.values():
        counts[execution.public_state] = counts.get(execution.public_state, 0) + 1
    return counts


async def test_everything_unfinished_is_cancelled(engine: Engine, given: Given) -> None:
    for state in EVERY_STATE:
        await given.state(state)
    # One of them waits for a child, which has not ended either.
    unfinished = len(EVERY_STATE) - len(ENDED) + 1
    assert await engine.cancel_matching(EVERYTHING, reason="stop") == BulkResult(
        touched=unfinished, refused={}, more=False
    )
    assert await states_of(engine) == {
        PublicState.COMPLETED: 1,
        PublicState.FAILED: 1,
        PublicState.EXPIRED: 1,
        PublicState.CANCELLED: unfinished + 1,
    }
    async with unchanged(engine):
        assert await engine.cancel_matching(EVERYTHING, reason="stop") == NOTHING


async def test_only_what_matches_is_cancelled(engine: Engine, given: Given) -> None:
    mine = await given.waiting(tags={"app.user": "ann"})
    await given.waiting(tags={"app.user": "bob"})
    delayed = await given.delayed(tags={"app.user": "ann"})
    matching = ExecutionFilter(tag=("app.user", "ann"), states=(PublicState.WAITING,))
    assert await engine.cancel_matching(matching, reason="left") == BulkResult(
        touched=1, refused={}, more=False
    )
    assert (await execution_of(engine, mine)).cancellation_reason == "left"
    assert await engine.read_execution_state(delayed) is PublicState.DELAYED
    async with unchanged(engine):
        ended = ExecutionFilter(states=(PublicState.COMPLETED, PublicState.CANCELLED))
        assert await engine.cancel_matching(ended, reason="x") == NOTHING


async def test_ended_executions_are_replayed_and_refusals_counted(
    engine: Engine, given: Given
) -> None:
    for _ in range(2):
        await given.failed()
    await given.failed(policy={"max_replay_count": 0})
    cancelled = await given.cancelled()
    both = ExecutionFilter(states=(PublicState.FAILED, PublicState.WAITING))
    assert await engine.replay_matching(both, reason="fixed", requested_by="ann") == BulkResult(
        touched=2, refused={"max_replays_exhausted": 1}, more=False
    )
    assert await states_of(engine) == {
        PublicState.WAITING: 2,
        PublicState.FAILED: 1,
        PublicState.CANCELLED: 1,
    }
    assert await engine.read_execution_state(cancelled) is PublicState.CANCELLED
    async with unchanged(engine):
        unfinished = ExecutionFilter(states=(PublicState.WAITING,))
        assert await engine.replay_matching(unfinished) == NOTHING


async def test_a_limit_takes_the_newest_and_says_that_there_is_more(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    ids = []
    for _ in range(5):
        clock.advance(ms=1)
        ids.append(await given.waiting())
    assert await engine.cancel_matching(EVERYTHING, reason="x", limit=2) == BulkResult(
        touched=2, refused={}, more=True
    )
    states = [await engine.read_execution_state(each) for each in ids]
    assert states == [PublicState.WAITING] * 3 + [PublicState.CANCELLED] * 2
    assert await engine.cancel_matching(EVERYTHING, reason="x", limit=3) == BulkResult(
        touched=3, refused={}, more=False
    )


async def test_more_than_a_batch_is_handled(engine: Engine) -> None:
    await engine.create_executions([new()] * (SWEEP_BATCH + 1))
    assert await engine.cancel_matching(EVERYTHING, reason="x") == BulkResult(
        touched=SWEEP_BATCH + 1, refused={}, more=False
    )
    ended = ExecutionFilter(states=(PublicState.CANCELLED,))
    assert await engine.replay_matching(ended) == BulkResult(
        touched=SWEEP_BATCH + 1, refused={}, more=False
    )
    assert SWEEP_BATCH <= BATCH_MAX


async def test_work_goes_on_while_everything_is_cancelled(engine: Engine, given: Given) -> None:
    handles = [(await given.running()).handle for _ in range(6)]
    results = await asyncio.gather(
        engine.cancel_matching(EVERYTHING, reason="x"),
        *(engine.complete(handle) for handle in handles),
        return_exceptions=True,
    )
    result = results[0]
    assert isinstance(result, BulkResult)
    states = await states_of(engine)
    assert states.get(PublicState.CANCELLED, 0) == result.touched
    assert sum(states.values()) == 6
    assert states.keys() <= {PublicState.CANCELLED, PublicState.COMPLETED}


async def test_bad_bulk_requests_are_refused(engine: Engine, given: Given) -> None:
    await given.waiting()
    await given.failed()
    ended = ExecutionFilter(states=(PublicState.FAILED,))
    async with unchanged(engine):
        bad_limits: list[object] = [0, BULK_MAX + 1, "5", None]
        for limit in bad_limits:
            await refuses(engine, "limit", "cancel_matching", EVERYTHING, reason="x", limit=limit)
            await refuses(engine, "limit", "replay_matching", ended, limit=limit)
        await refuses(engine, "reason", "cancel_matching", EVERYTHING, reason=5)
        await refuses(engine, "reason", "replay_matching", ended, reason=5)
        await refuses(engine, "requested_by", "replay_matching", ended, requested_by=5)
        await refuses(engine, "matching.states", "replay_matching", EVERYTHING)
        # Also when nothing can match, or nothing does.
        await refuses(engine, "reason", "cancel_matching", ended, reason=5)
        nowhere = ExecutionFilter(states=(PublicState.FAILED,), lane_id="nowhere")
        await refuses(engine, "reason", "replay_matching", nowhere, reason=5)
