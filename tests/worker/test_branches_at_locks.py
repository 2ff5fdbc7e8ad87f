"""Branches that meet at a lock or a semaphore: who waits there may still ask for what it stored."""

import asyncio
from collections import Counter

import pytest

from flowfabric import App, Context, WorkerSettings

ORDERS = ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0), (1, 0, 3, 2))
"""In which the branches are started, run by run, as from a set."""


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
async def test_branches_take_turns_in_another_order_in_every_run(
    app: App, slots: int, named: bool
) -> None:
    ran: Counter[str] = Counter()
    runs = 0

    async def effect(name: str) -> str:
        ran[name] += 1
        return name

    async def fan_out(ctx: Context) -> list[str]:
        nonlocal runs
        runs += 1
        room = asyncio.Semaphore(slots)

        async def calls(number: int) -> str:
            async with room:
                await ctx.step("fetch", effect, f"fetch {number}")
                # The same in every branch: only its place tells whose it is.
                await ctx.sleep("50ms")
                return await ctx.step("store", effect, f"store {number}")

        async def branch(number: int) -> str:
            if not named:
                return await calls(number)
            with ctx.branch(f"item-{number}"):
                return await calls(number)

        order = ORDERS[runs % len(ORDERS)]
        tasks = [asyncio.create_task(branch(number)) for number in order]
        return sorted([await each for each in asyncio.as_completed(tasks)])

    stop = asyncio.Event()
    settings = WorkerSettings(in_process_sleep="1ms")
    run = await app.submit(app.task(fan_out))
    worker = asyncio.create_task(app.run_worker(settings=settings, stop=stop, signals=False))
    try:
        assert await run.result("60s") == [f"store {number}" for number in range(4)]
    finally:
        stop.set()
        await worker
    (attempt,) = await app.engine.list_attempts(run.execution_id)
    assert attempt.blocked_count == 0
    assert set(ran) == {f"{verb} {number}" for verb in ("fetch", "store") for number in range(4)}
    assert set(ran.values()) == {1}
    assert runs > 2
