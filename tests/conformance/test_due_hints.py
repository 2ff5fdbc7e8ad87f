"""Reconcilers sleep; whoever makes something due before they wake by themselves wakes them."""

import itertools

import pytest

from flowfabric import Engine, reconcilers
from flowfabric.engine.topics import DUE_HINT_WITHIN_MS, DUE_TOPIC, ready_topic
from flowfabric.errors import ExecutionNotTerminal
from tests.conformance.given import WORKER, Given

PATIENCE_S = 10.0
LONG_MS = DUE_HINT_WITHIN_MS * 10


@pytest.mark.parametrize(
    ("attempt_timeout_ms", "ttl_ms"),
    [
        pytest.param(LONG_MS, DUE_HINT_WITHIN_MS, id="its lease ends soon"),
        pytest.param(DUE_HINT_WITHIN_MS, LONG_MS, id="its attempt times out soon"),
    ],
)
async def test_a_claim_wakes_them_when(
    attempt_timeout_ms: int, ttl_ms: int, engine: Engine, given: Given
) -> None:
    await given.waiting(policy={"timeout_policy": {"attempt_timeout_ms": attempt_timeout_ms}})
    with engine.store.hints([DUE_TOPIC]) as hints:
        await given.taken(ttl_ms=ttl_ms)
        assert await hints.wait(PATIENCE_S)


async def test_a_delay_that_ends_soon_wakes_them(engine: Engine, given: Given) -> None:
    with engine.store.hints([DUE_TOPIC]) as hints:
        await given.delayed(by_ms=DUE_HINT_WITHIN_MS)
        assert await hints.wait(PATIENCE_S)


async def test_what_becomes_due_while_they_work_is_not_taken_for_what_others_hold(
    engine: Engine, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcilers, "AFTER_ERROR_S", 100 * PATIENCE_S)
    for due_in_ms in range(1, 21):
        await given.delayed(by_ms=due_in_ms)
    ticks = itertools.count(given.clock.now_ms())
    monkeypatch.setattr(given.clock, "now_ms", lambda: next(ticks))
    async with reconcilers.Supervisor(engine):
        for _ in range(20):
            found = await engine.claim("default", max_wait_ms=int(PATIENCE_S * 1_000), **WORKER)
            assert found is not None


async def test_a_repeated_signal_wakes_workers_whose_claim_passed_the_locked_row_by(
    engine: Engine, given: Given
) -> None:
    execution_id = (await given.suspended()).execution_id

    async def click() -> None:
        await engine.deliver_operator_signal(
            execution_id, "gate", signal_name="gate", idempotency_key="click"
        )

    await click()
    with engine.store.hints([ready_topic("default")]) as hints:
        await click()
        assert await hints.wait(PATIENCE_S)


@pytest.mark.parametrize("touch", ["tags", "refused"])
async def test_whoever_locks_a_ready_execution_wakes_workers_whose_claim_passed_it_by(
    engine: Engine, given: Given, touch: str
) -> None:
    execution_id = await given.waiting()
    with engine.store.hints([ready_topic("default")]) as hints:
        if touch == "tags":
            await engine.set_execution_tags(execution_id, {"customer": "42"})
        else:
            with pytest.raises(ExecutionNotTerminal):
                await engine.replay_execution(execution_id)
        assert await hints.wait(PATIENCE_S)
