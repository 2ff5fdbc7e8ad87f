"""A network that swallows packets and closes nothing: holders are told, and work goes on.

Whoever leaves a statement to the store waits longer than these tests do, on the quickest
machine. How soon work goes on is what `make chaos` measures.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from flowfabric import App
from tests.apps import PATIENCE_S, working
from tests.silence import BOTH, Network, Way

LEASE_S = 2.0
KEPT_LEASE_S = 6.0
"""Long enough that a busy machine does not lose it to anything but silence."""
OVERLAP_MAX_S = 1.0

WAYS = pytest.mark.parametrize("ways", [BOTH, (Way.REQUESTS,), (Way.ANSWERS,)], ids=str)


@pytest.fixture
async def network(postgres_database: str) -> AsyncIterator[Network]:
    async with Network(postgres_database).open() as opened:
        yield opened


class Holders:
    """A task that holds on until it is let go or told to stop, and when that was."""

    def __init__(self, *apps: App) -> None:
        self.began: asyncio.Queue[tuple[str, float]] = asyncio.Queue()
        self.told: asyncio.Queue[tuple[str, float]] = asyncio.Queue()
        self.let_go = asyncio.Event()
        for app in apps:
            self._register(app)

    def _register(self, app: App) -> None:
        name = app.url

        @app.task(name="hold")
        async def hold() -> str:
            await self.began.put((name, time.monotonic()))
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                await self.told.put((name, time.monotonic()))
                raise
            return "held"


@WAYS
async def test_a_handler_that_is_cut_off_is_told_before_another_begins(
    network: Network, postgres_database: str, ways: Sequence[Way]
) -> None:
    cut_off, heir = App(network.url), App(postgres_database)
    holders = Holders(cut_off, heir)
    async with (
        heir,
        asyncio.timeout(PATIENCE_S),
        working(cut_off, lease_ttl=LEASE_S, worker_instance_id="cut-off"),
    ):
        run = await heir.submit(heir.tasks["hold"]())
        await holders.began.get()
        async with working(heir, lease_ttl=LEASE_S, worker_instance_id="heir"):
            network.swallow(ways, new_too=True)
            _, told_s = await holders.told.get()
            name, began_s = await holders.began.get()
            network.heal()
            holders.let_go.set()
            assert await run.result() == "held"
    await cut_off.close()
    assert name == heir.url
    assert told_s - began_s < OVERLAP_MAX_S


@WAYS
async def test_a_worker_whose_connections_fall_silent_makes_new_ones_and_keeps_its_lease(
    network: Network, postgres_database: str, ways: Sequence[Way]
) -> None:
    app, outside = App(network.url), App(postgres_database)
    holders = Holders(app, outside)

    for each in (app, outside):

        @each.task
        async def echo(number: int) -> int:
            return number

    async with app, outside, working(app, lease_ttl=KEPT_LEASE_S):
        held = await outside.submit(outside.tasks["hold"]())
        await holders.began.get()
        network.swallow(ways)
        run = await outside.submit(outside.tasks["echo"](7))
        assert await run.result(timeout="20s") == 7
        holders.let_go.set()
        assert await held.result(timeout="20s") == "held"
        assert (await held.snapshot()).total_attempt_count == 1


@WAYS
async def test_who_waits_for_a_result_notices_a_silent_network(
    network: Network, postgres_database: str, ways: Sequence[Way]
) -> None:
    waiting, outside = App(network.url), App(postgres_database)
    holders = Holders(waiting, outside)
    async with waiting, outside, working(outside):
        run = await waiting.submit(waiting.tasks["hold"]())
        await holders.began.get()
        result = asyncio.create_task(run.result())
        async with asyncio.timeout(PATIENCE_S):
            for _ in itertools.count():
                if waiting.engine.store.hints_are_live:
                    break
                await asyncio.sleep(0)
        network.swallow(ways)
        holders.let_go.set()
        async with asyncio.timeout(PATIENCE_S):
            assert await result == "held"
