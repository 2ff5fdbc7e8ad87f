"""A worker with a task that kills it, beside tasks that do not, in a process of its own.

python -m tests.e2e.poison URL
"""

import asyncio
import os
import signal
import sys

from flowfabric import App, Context, WorkerSettings

LEASE_TTL = "1s"
WORK_S = 0.5

poisoned = App("sqlite:///:memory:")


@poisoned.task
async def kill_the_worker() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def look(ctx: Context, number: int) -> int:
    """It takes a while before its first step."""
    await asyncio.sleep(WORK_S)
    return await ctx.step("look", abs, number)


@poisoned.task
async def look_around(ctx: Context, number: int) -> int:
    return await look(ctx, number)


@poisoned.task(max_worker_deaths=2)
async def look_twice(ctx: Context, number: int) -> int:
    """It is on its last chance before the one that kills its worker is."""
    return await look(ctx, number)


async def work(url: str) -> None:
    app = App(url)
    app.adopt(poisoned)
    await app.run_worker(settings=WorkerSettings(lease_ttl=LEASE_TTL))


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]))
