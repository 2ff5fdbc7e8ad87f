"""Branches that meet at a lock or a semaphore: who waits there may still ask for what it stored."""

import asyncio
from collections import Counter

import pytest

from flowfabric import App, Context, Retry, WorkerSettings
from tests.apps import working

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


AGAIN = Retry(max_retries=4, delay=0)
loads: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def nothing_loaded() -> None:
    loads.clear()


async def load() -> str:
    loads["token"] += 1
    return "token"


async def load_for(scope: str) -> str:
    loads[scope] += 1
    return "token"


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("arguments", [True, False])
async def test_whichever_branch_comes_first_makes_a_call_for_all(
    app: App, arguments: bool, alike: bool, once: bool
) -> None:
    used: Counter[str] = Counter()

    async def use(who: str, token: str) -> str:
        if not used["failed"]:
            used["failed"] += 1
            raise RuntimeError("the first run gets no further than the token")
        used[who] += 1
        return f"{who} {token}"

    @app.task(retry=AGAIN)
    async def share(ctx: Context) -> list[str]:
        lock, tokens = asyncio.Lock(), list[str]()

        async def call() -> str:
            if arguments:
                return await ctx.step("load", load_for, "token")
            return await ctx.step("load", load)

        async def one(who: str) -> str:
            # Work outside of steps, which another branch is done with first in every run.
            await asyncio.sleep(0.1 if (who == "ada") == (ctx.retry_count % 2 == 1) else 0)
            async with lock:
                if not (once and tokens):
                    tokens.append(await call())
            return await ctx.step("use", use, who, tokens[0])

        async def another(who: str) -> str:
            return await one(who)

        got = await asyncio.gather(one("ada"), one("bob") if alike else another("bob"))
        if ctx.retry_count < 3:
            raise RuntimeError("once more")
        return list(got)

    async with working(app):
        run = await app.submit(share)
        assert await run.result("60s") == ["ada token", "bob token"]
    assert loads == {"token": 1 if once else 2}
    assert used == {"failed": 1, "ada": 1, "bob": 1}
