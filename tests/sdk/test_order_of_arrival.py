"""Loops over branches in the order they end, which something outside of steps decides."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import pytest

from flowfabric import Context
from tests.sdk.shops import Shop

Handler = Callable[[Context], Coroutine[None, None, str]]
Calls = Callable[[Shop, Context, int], Awaitable[str]]


class Arrivals:
    """In which order branches end in each run: `"02|1"` ends the third one after the first, and the
    second once the calls for both have been made."""

    def __init__(self, *runs: str) -> None:
        self._runs = list(runs)
        self._gates: dict[int, asyncio.Future[None]] = {}
        self._parts: list[str] = []

    def begin(self) -> None:
        """The last order holds for all runs that come after."""
        order = self._runs.pop(0) if len(self._runs) > 1 else self._runs[0]
        self._parts = order.split("|")
        # No asyncio.Event: the order in which a handler sets those follows from its steps.
        loop = asyncio.get_running_loop()
        self._gates = {int(each): loop.create_future() for part in self._parts for each in part}

    async def end_some(self) -> None:
        """Let the branches of the next part end, one after the other."""
        for each in self._parts.pop(0) if self._parts else "":
            self._gates[int(each)].set_result(None)
            await asyncio.sleep(0)

    async def end(self, item: int) -> None:
        """As a request would, it takes a moment, another one in every run."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()
        loop.call_later(0.001, answer.set_result, None)
        await answer
        await self._gates[item]


def loop_over(shop: Shop, arrivals: Arrivals, calls: Calls) -> Handler:
    async def handler(ctx: Context) -> str:
        arrivals.begin()
        found: dict[int, str] = {}

        async def fetch(item: int) -> int:
            await ctx.step("fetch", shop.effect, f"fetch {item}")
            await arrivals.end(item)
            return item

        async def react(fetched: Awaitable[int]) -> None:
            item = await fetched
            found[item] = await calls(shop, ctx, item)
            await arrivals.end_some()

        fetches = [asyncio.ensure_future(fetch(item)) for item in range(3)]
        await arrivals.end_some()
        for each in asyncio.as_completed(fetches):
            await react(each)
        return ", ".join(found[item] for item in sorted(found))

    return handler


async def one_step(shop: Shop, ctx: Context, item: int) -> str:
    if item == 1:
        await ctx.wait_for_signal("packed")
    return await ctx.step("mail", shop.effect, f"mail {item}")


async def two_steps(shop: Shop, ctx: Context, item: int) -> str:
    mailed = await ctx.step("mail", shop.effect, f"mail {item}")
    if item == 1:
        await ctx.wait_for_signal("packed")
    return f"{mailed} {await ctx.step('file', shop.effect, f'file {item}')}"


@pytest.mark.parametrize("calls", [one_step, two_steps])
@pytest.mark.parametrize("second", ["012", "2|0|1", "210", "1|0|2"])
@pytest.mark.parametrize("first", ["0|12", "0|2|1", "2|01"])
async def test_every_item_gets_its_own_result_in_whatever_order(
    shop: Shop, first: str, second: str, calls: Calls
) -> None:
    handler = loop_over(shop, Arrivals(first, second), calls)

    execution_id = await shop.in_flight(handler)
    found = await shop.finishes(handler, execution_id)

    wanted = [f"mail {item}" for item in range(3)]
    if calls is two_steps:
        wanted = [f"mail {item} file {item}" for item in range(3)]
    assert found == ", ".join(wanted)
    assert set(shop.done.values()) == {1}


async def test_sets_of_branches_have_the_same_order_in_every_run(shop: Shop) -> None:
    orders: list[list[int]] = []
    # Kept, so that the tasks of later runs are elsewhere in memory.
    kept: list[set[asyncio.Task[int]]] = []

    async def handler(ctx: Context) -> str:
        async def branch(number: int) -> int:
            await ctx.step("save", shop.effect, f"save {number}")
            return number

        kept.append({asyncio.create_task(branch(number)) for number in range(30)})
        done, _ = await asyncio.wait(kept[-1])
        orders.append([task.result() for task in done])
        await ctx.wait_for_signal("packed")
        return "packed"

    execution_id = await shop.in_flight(handler)
    assert await shop.finishes(handler, execution_id) == "packed"
    assert len(orders) > 1
    assert all(order == orders[0] for order in orders)
