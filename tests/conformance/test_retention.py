"""Forgetting what ended long ago, old events, and used-up idempotency keys."""

import pytest

from flowfabric import Engine, EngineConfig
from flowfabric.core.results import Duplicate
from flowfabric.engine.shell import Swept
from flowfabric.testing import SettableClock
from tests.conformance.given import EVERY_STATE, WORKER, Given, new
from tests.conformance.observed import state_of, unchanged

DAY_MS = 24 * 60 * 60 * 1_000
WEEK_MS = 7 * DAY_MS


async def test_an_ended_execution_is_deleted_with_all_that_belongs_to_it(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running(tags={"a.b": "c"})
    events = (await state_of(engine)).events
    ended = await given.completed(tags={"a.b": "c"})
    kept = await engine.list_attempts(running.execution_id)
    clock.advance(ms=WEEK_MS - 1)
    async with unchanged(engine):
        assert await engine.trim_retention() == Swept(acted=0, full=False)
    clock.advance(ms=1)
    assert await engine.trim_retention() == Swept(acted=1, full=False)
    state = await state_of(engine)
    assert list(state.tags) == [running.execution_id]
    assert await engine.list_attempts(running.execution_id) == kept
    assert len(state.events) == len(events) + 4
    assert await engine.describe_execution(ended.execution_id) is None
    assert await engine.list_attempts(ended.execution_id) == ()
    assert await engine.get_execution_tag(ended.execution_id, "a.b") is None


async def test_only_what_has_ended_is_deleted(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    for state in EVERY_STATE:
        await given.state(state)
    clock.advance("365d")
    assert await engine.trim_retention() == Swept(acted=4, full=False)
    # One of them waits for a child, which has not ended either.
    assert len((await state_of(engine)).executions) == len(EVERY_STATE) - 4 + 1


async def test_a_policy_keeps_its_execution_shorter_or_longer(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    short = await given.completed(policy={"stream_policy": {"retention_ttl_ms": 10}})
    long = await given.completed(policy={"retention_policy": {"completed_ms": 8 * DAY_MS}})
    usual = await given.completed(policy={"retention_policy": {"failed_ms": 5}})
    for step_ms, gone in ((10, short), (WEEK_MS - 10, usual), (DAY_MS, long)):
        clock.advance(ms=step_ms)
        assert await engine.trim_retention() == Swept(acted=1, full=False)
        assert await engine.describe_execution(gone.execution_id) is None


async def test_what_did_not_succeed_is_kept_longer(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    usual = await given.waiting()
    brief = await given.waiting(policy={"retention_policy": {"failed_ms": 1_000}})
    for each in (usual, brief):
        await engine.cancel_execution(each, reason="no use")
    clock.advance("1s")
    assert await engine.trim_retention() == Swept(acted=1, full=False)
    assert await engine.describe_execution(brief) is None
    clock.advance(ms=30 * DAY_MS - 1_001)
    assert await engine.trim_retention() == Swept(acted=0, full=False)
    clock.advance(ms=1)
    assert await engine.trim_retention() == Swept(acted=1, full=False)


@pytest.mark.parametrize("config", [EngineConfig(keep="1m", keep_failed="1h")])
async def test_the_engine_says_how_long_to_keep_what_does_not_say_itself(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    completed = await given.completed()
    failed = await given.waiting()
    await engine.cancel_execution(failed, reason="no use")
    clock.advance("1m")
    assert await engine.trim_retention() == Swept(acted=1, full=False)
    assert await engine.describe_execution(completed.execution_id) is None
    clock.advance("59m")
    assert await engine.trim_retention() == Swept(acted=1, full=False)


async def test_a_replay_saves_an_execution_from_being_deleted(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    ended = await given.completed()
    await engine.replay_execution(ended.execution_id)
    clock.advance("10d")
    assert await engine.trim_retention() == Swept(acted=0, full=False)


async def test_trimming_goes_oldest_first_in_batches(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    ids = []
    for _ in range(3):
        ids.append((await given.completed()).execution_id)
        clock.advance("1s")
    clock.advance("7d")
    assert await engine.trim_retention(limit=2) == Swept(acted=2, full=True)
    assert list((await state_of(engine)).tags) == ids[2:]
    assert await engine.trim_retention(limit=2) == Swept(acted=1, full=False)


@pytest.mark.parametrize("config", [EngineConfig(keep_events=1)])
async def test_events_are_forgotten_by_age_oldest_first(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await given.completed()
    clock.advance(ms=1)
    await given.running()
    before = (await state_of(engine)).events
    clock.advance(ms=999)
    trimmed = await engine.trim_events(limit=1)
    assert trimmed == Swept(acted=1, full=True)
    while trimmed.full:
        trimmed = await engine.trim_events(limit=1)
    page = await engine.read_events()
    assert page.events == before[3:]
    clock.advance(ms=1)
    assert await engine.trim_events() == Swept(acted=1, full=False)
    assert (await engine.read_events()).events == ()


async def test_used_up_idempotency_keys_are_forgotten(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    short = {"policy": {"dedup_window_ms": 10}}
    await given.waiting(idempotency_key="a", **short)
    await given.waiting(idempotency_key="b", **short)
    kept = await given.waiting(idempotency_key="c")
    clock.advance(ms=9)
    assert await engine.trim_guards() == Swept(acted=0, full=False)
    clock.advance(ms=1)
    assert await engine.trim_guards(limit=1) == Swept(acted=1, full=True)
    assert await engine.trim_guards() == Swept(acted=1, full=False)
    assert await engine.create_execution(new(idempotency_key="c")) == Duplicate(execution_id=kept)
    assert len((await state_of(engine)).executions) == 3


async def test_a_grant_goes_with_its_execution(engine: Engine, given: Given) -> None:
    claimed = await given.running(policy={"stream_policy": {"retention_ttl_ms": 0}})
    await engine.complete(claimed.handle)
    await engine.replay_execution(claimed.execution_id)
    await engine.issue_claim_grant(claimed.execution_id, **WORKER)
    await engine.block_execution_for_admission(claimed.execution_id, reason="paused_by_operator")
    await engine.unblock_execution(claimed.execution_id)
    assert len((await state_of(engine)).grants) == 1
    again = await given.taken()
    await engine.complete(again.handle)
    assert await engine.trim_retention() == Swept(acted=1, full=False)
    assert (await state_of(engine)).grants == {}
