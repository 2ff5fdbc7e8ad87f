"""Sixteen processes spend from one budget, and are killed in the middle of it."""

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from flowfabric import Engine, connect
from flowfabric.core.budget_terms import BudgetDefinition
from flowfabric.core.budgets import RESERVATION_CHECK_MS
from flowfabric.core.creation import NewExecution
from flowfabric.testing import SettableClock
from tests.e2e.conftest import PATIENCE_S, python
from tests.e2e.programs import Program
from tests.e2e.spender import ASKED, AT_ONCE

PROCESSES = 16
KILLED = 8
HARD = 12_000
BATCH = 1_000


async def fill(engine: Engine) -> None:
    """Have as much to claim as can be needed: an execution may count nothing."""
    for _ in range(8 * HARD // ASKED // BATCH):
        await engine.create_executions([NewExecution(execution_kind="call")] * BATCH)


async def confirmed(process: Program) -> int:
    total = 0
    while line := await process.stdout.readline():
        # The last line of one that was killed may be cut off.
        total += int(line) if line.endswith(b"\n") else 0
    return total


@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.parametrize("store_url", ["postgres"], indirect=True)
async def test_a_hard_budget_is_never_overspent_and_no_reservation_is_left(
    store_url: str,
) -> None:
    url = store_url
    async with await connect(url) as engine, AsyncExitStack() as processes:
        await engine.create_budget(BudgetDefinition(budget_id="team", hard_limits={"tokens": HARD}))
        filling = asyncio.create_task(fill(engine))
        running: list[Program] = []
        tallies: list[asyncio.Task[int]] = []

        async def start() -> None:
            name = f"spender-{len(tallies)}"
            opened = python("tests.e2e.spender", url, name)
            process = await processes.enter_async_context(opened)
            running.append(process)
            tallies.append(asyncio.create_task(confirmed(process)))

        for _ in range(PROCESSES):
            await start()
        killed = 0
        while True:
            status = await engine.get_budget_status("team")
            used, reserved = status.usage.get("tokens", 0), status.reserved.get("tokens", 0)
            assert used + reserved <= HARD
            if killed < KILLED and used > (killed + 1) * HARD // (KILLED + 2):
                victim = running.pop(random.randrange(len(running)))
                victim.kill()
                killed += 1
                await start()
            elif used == HARD:
                break
        await filling
        for process in running:
            process.stdin.close()
        told = sum(await asyncio.gather(*tallies))

    assert killed == KILLED
    # What was counted and not confirmed was in the hands of those that were killed.
    assert HARD - KILLED * AT_ONCE * ASKED <= told <= HARD
    clock = SettableClock(await after_every_lease(url))
    async with await connect(url, clock=clock) as later:
        status = await later.get_budget_status("team")
        assert (status.usage, status.reserved) == ({"tokens": HARD}, {})
        clock.advance(ms=RESERVATION_CHECK_MS)
        while "budget_reservations" in await later.next_due():
            await later.check_reservations()


async def after_every_lease(url: str) -> int:
    async with await connect(url) as engine:
        return await engine.server_time_ms() + 10_000
