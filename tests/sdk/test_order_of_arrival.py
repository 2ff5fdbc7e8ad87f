"""Loops over branches in the order they end, which something outside of steps decides."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence

import pytest

from flowfabric import Context
from tests.sdk.shops import Shop

Handler = Callable[[Context], Coroutine[None, None, str]]
Calls = Callable[[Shop, Context, int], Awaitable[str]]


class Arrivals:
    """In which order branches end in each run: `"02|1"` ends the third one after the first, and the
    second once the calls for both have been made."""

    def __init__(self, *runs: str, together: bool = False) -> None:
        """`together`, if the first part ends as soon as all branches have come to their end."""
        self._runs = list(runs)
        self._together = together
        self._coming = 0
        self._gates: dict[int, asyncio.Future[None]] = {}
        self._parts: list[str] = []

    def begin(self) -> None:
        """The last order holds for all runs that come after."""
        order = self._runs.pop(0) if len(self._runs) > 1 else self._runs[0]
        self._parts = order.split("|")
        # No asyncio.Event: the order in which a handler sets those follows from its steps.
        loop = asyncio.get_running_loop()
        self._gates = {int(each): loop.create_future() for part in self._parts for each in part}
        self._coming = len(self._gates)

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
        self._coming -= 1
        if self._together and not self._coming:
            for each in self._parts.pop(0):
                self._gates[int(each)].set_result(None)
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


TURNS = 20
Fetches = Sequence[asyncio.Future[int]]
Take = Callable[[Fetches], AsyncIterator[int]]


async def as_completed(fetches: Fetches) -> AsyncIterator[int]:
    for each in asyncio.as_completed(fetches):
        yield await each


async def as_waited(fetches: Fetches) -> AsyncIterator[int]:
    pending = set(fetches)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            yield each.result()


def from_a_queue(fetches: Fetches) -> AsyncIterator[int]:
    queue: asyncio.Queue[int] = asyncio.Queue()

    async def put(fetch: asyncio.Future[int]) -> None:
        queue.put_nowait(await fetch)

    async def taken() -> AsyncIterator[int]:
        for _ in fetches:
            yield await queue.get()
        await asyncio.gather(*puts)

    puts = [asyncio.create_task(put(fetch)) for fetch in fetches]
    return taken()


Step = Callable[[Context, str, Callable[..., Awaitable[str]], str], Awaitable[str]]
ELSEWHERE: dict[str, Step] = {}
exec(  # A module of the same project, which belongs to no package.
    "async def step(ctx, name, effect, text): return await ctx.step(name, effect, text)",
    {"__name__": "helpers"},
    ELSEWHERE,
)


async def step_here(
    ctx: Context, name: str, effect: Callable[..., Awaitable[str]], text: str
) -> str:
    return await ctx.step(name, effect, text)


@pytest.mark.parametrize("second", ["210", "1|0|2"])
@pytest.mark.parametrize(("in_branch", "elsewhere"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("take", [as_completed, as_waited, from_a_queue])
async def test_items_may_come_in_another_order_when_all_branches_have_ended(
    shop: Shop, take: Take, in_branch: bool, elsewhere: bool, second: str
) -> None:
    """The first run ends in the middle of its first item, when no branch is under way any more."""
    arrivals = Arrivals("012", second, together=True)
    at_once = "|" not in second
    step = ELSEWHERE["step"] if elsewhere else step_here

    async def handler(ctx: Context) -> str:
        arrivals.begin()
        found: dict[int, str] = {}

        async def fetch(item: int) -> int:
            await ctx.step("fetch", shop.effect, f"fetch {item}")
            await arrivals.end(item)
            return item

        async def loop() -> None:
            async for item in taken:
                for _ in range(TURNS if at_once else 0):
                    await asyncio.sleep(0)  # All of them end meanwhile.
                mailed = await ctx.step(f"mail {item}", shop.effect, f"mail {item}")
                if item == 0:
                    await ctx.wait_for_signal("packed")
                filed = await step(ctx, "file", shop.effect, f"file {item}")
                found[item] = f"{mailed} {filed}"
                await arrivals.end_some()

        taken = take([asyncio.ensure_future(fetch(item)) for item in range(3)])
        await (asyncio.create_task(loop()) if in_branch else loop())
        await ctx.step("last", shop.effect, "last")
        return ", ".join(found[item] for item in sorted(found))

    execution_id = await shop.in_flight(handler)
    found = await shop.finishes(handler, execution_id)

    assert found == ", ".join(f"mail {item} file {item}" for item in range(3))
    assert set(shop.done.values()) == {1}


async def test_a_step_inserted_after_branches_were_joined_blocks_the_run(shop: Shop) -> None:
    """Although they have worked outside of steps: the order of the code goes on to count."""

    def code(*, inserted: bool) -> Handler:
        arrivals = Arrivals("01", "10")

        async def handler(ctx: Context) -> str:
            async def fetch(item: int) -> None:
                await ctx.step("fetch", shop.effect, f"fetch {item}")
                await arrivals.end(item)

            arrivals.begin()
            fetches = [asyncio.create_task(fetch(item)) for item in range(2)]
            await arrivals.end_some()
            await asyncio.gather(*fetches)
            if inserted:
                await ctx.step("notify", shop.effect, "notify")
            await ctx.step("mail", shop.effect, "mail")
            await ctx.wait_for_signal("packed")
            return "packed"

        return handler

    execution_id = await shop.in_flight(code(inserted=False))
    assert "step 'notify' is not stored" in await shop.blocked(code(inserted=True), execution_id)
    assert await shop.finishes(code(inserted=False), execution_id) == "packed"


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
