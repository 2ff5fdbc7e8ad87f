"""A worker that may be stopped: `python -m tests.e2e.zombie URL LOG NAME`.

Each step appends a line to LOG: who took it, for which execution, which one.
"""

import asyncio
import os
import sys
from pathlib import Path

from flowfabric import App, Context, WorkerSettings

STEPS = 30
PAUSE_S = 0.05

app = App(sys.argv[1] if __name__ == "__main__" else "sqlite:///:memory:")


async def note(line: str) -> None:
    """On the event loop, in one write: nothing comes between the check of the lease and this."""
    descriptor = os.open(Path(sys.argv[2]), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


@app.task
async def walk(ctx: Context) -> int:
    for number in range(STEPS):
        await ctx.step(f"step {number}", note, f"{sys.argv[3]} {ctx.execution_id} {number}")
        await asyncio.sleep(PAUSE_S)
    return STEPS


async def main() -> None:
    settings = WorkerSettings(lease_ttl="1s", concurrency=50, drain_timeout="2s")
    async with app:
        sys.stdout.write("started\n")
        sys.stdout.flush()
        await app.run_worker(settings=settings)


if __name__ == "__main__":
    asyncio.run(main())
