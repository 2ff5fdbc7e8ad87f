"""A worker on a machine without a database, in a process of its own.

    python -m tests.e2e.errands URL JOURNAL

The effect of a step is a line in the journal.
"""

import asyncio
import sys
from pathlib import Path

from flowfabric import App, Context, WorkerSettings

LEASE_TTL = "5s"
DEATHS_MAX = 20
"""A server that is away for longer than a lease cannot tell a worker that waits for it from a dead
one, and it goes away several times in a row."""

errands = App("http://127.0.0.1:9")


def note(journal: str, line: str) -> str:
    with Path(journal).open("a") as file:
        file.write(f"{line}\n")
    return line


@errands.task(max_worker_deaths=DEATHS_MAX)
async def run_errand(ctx: Context, name: str, journal: str) -> str:
    await ctx.step("effect", note, journal, name)
    return name


@errands.task(max_worker_deaths=DEATHS_MAX)
async def await_reply(ctx: Context, name: str, journal: str) -> str:
    reply = await ctx.wait_for_signal("reply", type=str)
    await ctx.step("effect", note, journal, name)
    return reply.payload


async def work(url: str) -> None:
    app = App(url)
    app.adopt(errands)
    await app.run_worker(settings=WorkerSettings(concurrency=20, lease_ttl=LEASE_TTL))


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]))
