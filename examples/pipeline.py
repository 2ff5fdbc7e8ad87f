"""A pipeline whose worker is killed half-way, and that finishes anyway.

    python pipeline.py            submits an order, kills its worker, starts another
    python pipeline.py worker     is that worker

Each finished step is stored. The second worker takes the order over when the
lease of the first has run out, gets the results of the finished steps from the
database, and continues from there.
"""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass

from flowfabric import App, Context, WorkerSettings

app = App("sqlite:///pipeline.db")


@dataclass
class Order:
    number: int
    total_cents: int


def say(text: str) -> None:
    print(f"  [{os.getpid()}] {text}", flush=True)


def price(number: int) -> Order:
    say(f"pricing order {number}")
    return Order(number, 4_200)


async def charge(order: Order) -> str:
    say(f"charging {order.total_cents} cents")
    return f"receipt-{order.number}"


def ship(order: Order, receipt: str) -> str:
    say(f"shipping order {order.number} ({receipt})")
    return f"parcel-{order.number}"


@app.task
async def fulfil(ctx: Context, number: int) -> str:
    order = await ctx.step("price", price, number)
    receipt = await ctx.step("charge", charge, order)
    if ctx.attempt_index == 0:
        say("killing myself with signal 9, in the middle of it")
        os.kill(os.getpid(), signal.SIGKILL)
    return await ctx.step("ship", ship, order, receipt)


async def work() -> None:
    async with app:
        await app.run_worker(settings=WorkerSettings(lease_ttl="2s"))


async def start_worker() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, __file__, "worker")


async def main() -> None:
    async with app:
        run = await app.submit(fulfil, 7)
        first = await start_worker()
        print(f"the first worker ended with {await first.wait()}")
        second = await start_worker()
        print(f"the order went out as {await run.result(timeout='60s')}")
        second.terminate()
        await second.wait()


if __name__ == "__main__":
    asyncio.run(work() if sys.argv[1:] == ["worker"] else main())
