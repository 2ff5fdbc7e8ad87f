"""Equal branches, started several times: each is known by which of them it is."""

import asyncio
from collections import Counter

import pytest

from flowfabric import App, Context, Retry
from tests.apps import working

AGAIN = Retry(max_retries=3, delay=0)
ORDERS = ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0), (1, 0, 3, 2))
"""In which the branches are started, run by run, as from a set."""


class Crash(RuntimeError):
    """The attempt ends here; the next one runs the handler again."""


async def first_round(how: str, number: int) -> None:
    """Nothing that is stored."""
    if how == "fails":
        raise ConnectionError(number)
    if how == "is cancelled":
        await asyncio.Event().wait()


async def ended(tasks: list["asyncio.Task[str]"]) -> list[str]:
    found = await asyncio.gather(*tasks, return_exceptions=True)
    return sorted(each for each in found if isinstance(each, str))


@pytest.mark.parametrize("verb", ["step", "child"])
@pytest.mark.parametrize("how", ["returns", "fails", "is cancelled"])
async def test_a_first_round_that_stores_nothing_leaves_the_second_what_it_stored(
    app: App, how: str, verb: str
) -> None:
    ran: Counter[str] = Counter()

    async def effect(name: str) -> str:
        ran[name] += 1
        return name

    @app.task
    async def child(name: str) -> str:
        return await effect(name)

    @app.task(retry=AGAIN)
    async def rounds(ctx: Context) -> list[str]:
        order = ORDERS[ctx.retry_count]

        async def fetch(number: int) -> str:
            if is_first:
                await first_round(how, number)
                return "nothing"
            if verb == "child":
                return await (await ctx.submit(child, f"child {number}")).result()
            return await ctx.step("fetch", effect, f"fetch {number}")

        is_first = True
        tasks = [asyncio.create_task(fetch(number)) for number in order]
        if how == "is cancelled":
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
        await ended(tasks)
        is_first = False
        found = await ended([asyncio.create_task(fetch(number)) for number in order])
        if ctx.retry_count < 3:
            raise Crash
        return found

    names = [f"{'child' if verb == 'child' else 'fetch'} {number}" for number in range(4)]
    async with working(app):
        assert await (await app.submit(rounds)).result(timeout="30s") == names
    assert ran == dict.fromkeys(names, 1)


async def test_a_round_of_which_some_have_stored_something(app: App) -> None:
    ran: Counter[str] = Counter()

    async def effect(name: str) -> str:
        ran[name] += 1
        return name

    @app.task(retry=AGAIN)
    async def rounds(ctx: Context) -> list[str]:
        done: list[str] = []

        async def fetch(number: int) -> str:
            if not done and number % 2:
                raise ConnectionError(number)
            return await ctx.step("fetch", effect, f"fetch {number}")

        for _ in range(2):
            todo = [each for each in ORDERS[ctx.retry_count] if f"fetch {each}" not in done]
            done += await ended([asyncio.create_task(fetch(number)) for number in todo])
        if ctx.retry_count < 3:
            raise Crash
        return sorted(done)

    names = [f"fetch {number}" for number in range(4)]
    async with working(app):
        assert await (await app.submit(rounds)).result(timeout="30s") == names
    assert ran == dict.fromkeys(names, 1)
