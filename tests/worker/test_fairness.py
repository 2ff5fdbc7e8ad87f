"""Lanes with weights share a worker as they say, while all of them have work."""

import asyncio
from collections import Counter

import pytest

from flowfabric import App, Context
from tests.apps import working

WEIGHTS = {"a": 5, "b": 3, "c": 1}
RUNS = 450
BACKLOG = 400


@pytest.mark.parametrize("concurrency", [1, 7, 40])
async def test_shares_of_a_worker_are_those_of_the_weights(app: App, concurrency: int) -> None:
    begun: list[str] = []
    enough = asyncio.Event()

    @app.task
    async def work(ctx: Context) -> None:
        begun.append(ctx.lane)
        if len(begun) >= RUNS:
            enough.set()

    async with app:
        for lane in reversed(WEIGHTS):
            await app.submit_many([work() for _ in range(BACKLOG)], lane=lane)
        async with working(app, lanes=WEIGHTS, concurrency=concurrency):
            await enough.wait()
    got = Counter(begun[:RUNS])
    wanted = {lane: RUNS * weight / 9 for lane, weight in WEIGHTS.items()}
    assert got == pytest.approx(wanted, rel=0.1)
