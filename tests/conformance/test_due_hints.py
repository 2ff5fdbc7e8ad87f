"""Reconcilers sleep; whoever makes something due before they wake by themselves wakes them."""

import pytest

from flowfabric import Engine
from flowfabric.engine.unit import DUE_HINT_WITHIN_MS, DUE_TOPIC
from tests.conformance.given import Given

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
