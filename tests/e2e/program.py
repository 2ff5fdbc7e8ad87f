"""A worker in a process of its own: `python -m tests.e2e.program URL LOG`.

Each step appends its name to LOG. Standard output tells the test how far it is.
"""

import asyncio
import logging
import os
import sys
import threading
from pathlib import Path

from flowfabric import App, Context, WorkerSettings

URL, LOG = sys.argv[1], Path(sys.argv[2])

app = App(URL)


def note(name: str) -> str:
    with LOG.open("a") as log:
        log.write(f"{name}\n")
    return name


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@app.task
async def pipeline(ctx: Context, hold_after: int) -> list[str]:
    done = []
    for number in range(1, 4):
        done.append(await ctx.step(f"step {number}", note, f"step {number}"))
        if number == hold_after and ctx.attempt_index == 0:
            say("holding")
            await asyncio.Event().wait()
    return done


@app.task
async def short(number: int) -> int:
    await asyncio.sleep(0)
    say("done")
    return number


@app.task
async def block(seconds: float) -> str:
    say("blocking")
    threading.Event().wait(seconds)
    return "done"


async def main() -> None:
    logging.basicConfig(stream=sys.stdout, level=logging.ERROR, format="%(message)s")
    settings = WorkerSettings(
        lease_ttl=os.environ.get("LEASE_TTL", "2s"), concurrency=50, drain_timeout="2s"
    )
    say("started")
    async with app:
        await app.run_worker(settings=settings)


if __name__ == "__main__":
    asyncio.run(main())
