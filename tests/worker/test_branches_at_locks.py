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


async def draw_ticket() -> int:
    loads["drawn"] += 1
    return loads["drawn"]


async def load_for(scope: str) -> str:
    loads[scope] += 1
    return "token"


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("arguments", [True, False])
async def test_whichever_branch_comes_first_makes_a_call_for_all(
    app: App, arguments: bool, alike: bool
) -> None:
    used: Counter[str] = Counter()

    async def use(who: str, token: str) -> str:
        used[who] += 1
        return f"{who} {token}"

    @app.task(retry=AGAIN)
    async def share(ctx: Context) -> list[str]:
        lock, tokens = asyncio.Lock(), list[str]()

        async def one(who: str) -> str:
            # Work outside of steps, which another branch is done with first in every run.
            await asyncio.sleep(0.1 if (who == "ada") == (ctx.retry_count % 2 == 1) else 0)
            async with lock:
                if not tokens:
                    made = load_for, "token"
                    tokens.append(await ctx.step("load", *made if arguments else (load,)))
            return await ctx.step("use", use, who, tokens[0])

        async def another(who: str) -> str:
            return await one(who)

        got = await asyncio.gather(one("ada"), one("bob") if alike else another("bob"))
        if ctx.retry_count < 3:
            raise RuntimeError("once more")
        return [*got, await ctx.step("sum up", use, "all", tokens[0])]

    async with working(app):
        run = await app.submit(share)
        assert await run.result("60s") == ["ada token", "bob token", "all token"]
    assert loads == {"token": 1}
    assert used == {"ada": 1, "bob": 1, "all": 1}


@pytest.mark.parametrize("alike", [True, False])
async def test_a_branch_that_makes_a_call_for_itself_keeps_its_result(
    app: App, alike: bool
) -> None:
    used: list[str] = []

    async def use(who: str, ticket: int) -> str:
        used.append(f"{who} {ticket}")
        if len(used) == 1:
            raise RuntimeError("nobody knows whether that had its effect")
        return used[-1]

    @app.task(retry=AGAIN)
    async def draw(ctx: Context) -> list[str]:
        lock = asyncio.Lock()

        async def one(who: str) -> str:
            await asyncio.sleep(0.1 if (who == "ada") == (ctx.retry_count % 2 == 1) else 0)
            async with lock:
                ticket = await ctx.step("draw", draw_ticket)
            return await ctx.step("use", use, who, ticket)

        async def another(who: str) -> str:
            return await one(who)

        return list(await asyncio.gather(one("ada"), one("bob") if alike else another("bob")))

    async with working(app):
        run = await app.submit(draw)
        got = await run.result("60s")
    assert loads == {"drawn": 2}
    assert got[0].startswith("ada ")
    assert got[1].startswith("bob ")
    # Whoever had a ticket in the first run has it in the second.
    assert used[0] in used[1:]
    assert len({each.split()[1] for each in got}) == 2
