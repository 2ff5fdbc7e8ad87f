"""The worker that `benchmarks.chaos` torments: `python -m benchmarks.chaos.worker URL HOLDS`."""

import asyncio
import logging
import sys
from pathlib import Path

import asyncpg

from benchmarks.chaos.holds import FENCED, HELD, noted
from flowfabric import App, Context, Retry, WorkerSettings

# A program that imports the tasks to submit them has its own arguments.
URL, HOLDS = (
    (sys.argv[1], Path(sys.argv[2]))
    if __name__ == "__main__"
    else ("sqlite:///:memory:", Path("/dev/null"))
)

app = App(URL)

WORK_S = 0.5
"""Long enough that whatever happens, happens to jobs that are under way."""
FENCE_S = 0.05
LEASE_S = 5.0


# What goes wrong with the job's own connections is its own fault: it is tried again.
@app.task(retry=Retry(max_retries=50, delay="200ms"), max_worker_deaths=50)
async def job(ctx: Context, number: int) -> int:
    with noted(HOLDS, HELD, ctx.execution_id):
        await ctx.step("half", asyncio.sleep, WORK_S / 2)
        await asyncio.sleep(WORK_S / 2)
        return number


@app.task(retry=Retry(max_retries=50, delay="200ms"), max_worker_deaths=50)
async def fenced_job(ctx: Context, number: int) -> int:
    with noted(HOLDS, HELD, ctx.execution_id):
        await asyncio.sleep(WORK_S / 2)
        await business_write(ctx)
        await asyncio.sleep(WORK_S / 2)
        return number


async def business_write(ctx: Context) -> None:
    """Through a connection of the application's own, which meets the same trouble."""
    connection = await asyncpg.connect(
        URL, statement_cache_size=0, command_timeout=LEASE_S, timeout=LEASE_S
    )
    try:
        async with connection.transaction(), ctx.fence(connection):
            try:
                with noted(HOLDS, FENCED, ctx.execution_id):
                    await asyncio.sleep(FENCE_S)
            except asyncio.CancelledError:
                # Nobody may be there to answer a rollback.
                connection.terminate()
                raise
    finally:
        connection.terminate()


async def main() -> None:
    logging.basicConfig(level=logging.ERROR)
    settings = WorkerSettings(concurrency=200, lease_ttl=LEASE_S, drain_timeout="5s")
    async with app:
        await app.run_worker(settings=settings)


if __name__ == "__main__":
    asyncio.run(main())
