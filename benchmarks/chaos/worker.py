"""The worker that `benchmarks.chaos` torments: `python -m benchmarks.chaos.worker URL`."""

import asyncio
import logging
import sys

from flowfabric import App, Context, WorkerSettings

app = App(sys.argv[1] if len(sys.argv) > 1 else "sqlite:///:memory:")

WORK_S = 0.5
"""Long enough that whatever happens, happens to jobs that are under way."""


@app.task
async def job(ctx: Context, number: int) -> int:
    await ctx.step("half", asyncio.sleep, WORK_S / 2)
    await asyncio.sleep(WORK_S / 2)
    return number


async def main() -> None:
    logging.basicConfig(level=logging.ERROR)
    settings = WorkerSettings(concurrency=200, lease_ttl="5s", drain_timeout="5s")
    async with app:
        await app.run_worker(settings=settings)


if __name__ == "__main__":
    asyncio.run(main())
