"""Leases are renewed every third of their time, however much others write meanwhile."""

import asyncio
import threading

import pytest

from flowfabric import App, Context
from flowfabric.worker.leases import Heartbeat
from tests.apps import PATIENCE_S, working

# Its third is longer than any test has patience: no renewal is due.
LEASE_TTL = "1h"
CANCELS = 3


@pytest.fixture
def beaten(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a heartbeat has renewed what it had found when it began."""
    event, beat = threading.Event(), Heartbeat._beat

    async def telling(heartbeat: Heartbeat) -> bool:
        answered = await beat(heartbeat)
        event.set()
        return answered

    monkeypatch.setattr(Heartbeat, "_beat", telling)
    return event


async def test_looking_for_what_was_taken_away_renews_nothing_else(
    app: App, beaten: threading.Event
) -> None:
    begun: asyncio.Queue[None] = asyncio.Queue()
    told: asyncio.Queue[None] = asyncio.Queue()

    @app.task
    async def work(ctx: Context) -> None:
        begun.put_nowait(None)
        try:
            await asyncio.Event().wait()
        finally:
            told.put_nowait(None)

    async with app, working(app, lease_ttl=LEASE_TTL, drain_timeout="0s"):
        assert await asyncio.to_thread(beaten.wait, PATIENCE_S)
        kept = await app.submit(work)
        await begun.get()
        for _ in range(CANCELS):
            other = await app.submit(work)
            await begun.get()
            await other.cancel()
            await told.get()
        page = await app.engine.read_events(limit=1_000)
        events = [each for each in page.events if each.execution_id == kept.execution_id]
        assert [each.event_type for each in events if each.category == "lease"] == ["acquired"]


async def test_a_worker_that_did_not_renew_in_time_is_not_taken_for_dead(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    stunned, renewing = True, Heartbeat._beat

    async def beat(heartbeat: Heartbeat) -> bool:
        return stunned or await renewing(heartbeat)

    monkeypatch.setattr(Heartbeat, "_beat", beat)

    @app.task(max_worker_deaths=1)
    async def work(ctx: Context) -> int:
        nonlocal stunned
        if ctx.attempt_index == 0:
            await asyncio.Event().wait()
        stunned = False
        return ctx.attempt_index

    # Nothing but the worker itself tells what has become of it.
    async with app, working(app, lease_ttl="1s", reconcile=False):
        run = await app.submit(work)
        assert await run.result(timeout=PATIENCE_S) == 1
