"""The program the demonstration runs: ordinary functions made durable.

Every step also writes a line into a journal file when it starts and when it ends,
with the number of the process that ran it. The journal is how the demonstration
proves what ran where, and how often; FlowFabric neither knows nor needs it.
"""

import asyncio
import os
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from flowfabric import App, Context, Retry, WorkerSettings, count

URL_VARIABLE: Final = "FLOWFABRIC_DEMO_URL"
JOURNAL_VARIABLE: Final = "FLOWFABRIC_DEMO_JOURNAL"

STEPS: Final = ("research", "draft", "illustrate", "proofread", "push live")
STEP_S: Final = 0.7
PHOTO_S: Final = 0.15
LEASE_TTL: Final = "2s"
"""Short, so that the demonstration need not wait long for a dead worker's leases to end."""

app = App(os.environ.get(URL_VARIABLE, "sqlite:///flowfabric-demo.db"))


class Note(Struct, frozen=True):
    """One line of the journal."""

    pid: int
    step: str
    done: bool


def note(step: str, *, done: bool) -> None:
    line = msgspec.json.encode(Note(os.getpid(), step, done)) + b"\n"
    with Path(os.environ[JOURNAL_VARIABLE]).open("ab") as journal:
        journal.write(line)


async def work_on(step: str, article_id: int) -> str:
    """What takes time in a step: a model, an API, a printer."""
    note(step, done=False)
    await asyncio.sleep(STEP_S)
    note(step, done=True)
    return f"{step} of article {article_id}, by process {os.getpid()}"


@app.task(retry=Retry(max_retries=3))
async def publish(ctx: Context, article_id: int) -> list[str]:
    """A pipeline in five steps, written as if nothing could ever go wrong."""
    results: list[str] = []
    for number, step in enumerate(STEPS):
        results.append(await ctx.step(step, work_on, step, article_id))
        await ctx.progress(100 * (number + 1) // len(STEPS), f"{step} done")
    return results


@app.task(retry=Retry(max_retries=5, delay="400ms", jitter=False))
async def fetch_weather(ctx: Context, city: str) -> str:
    """An API that is down the first two times."""
    if ctx.retry_count < 2:
        raise ConnectionError("the weather service does not answer")
    return f"sunny in {city}"


@app.task
async def resize_photo(ctx: Context, number: int) -> str:
    await asyncio.sleep(PHOTO_S)
    return f"photo-{number}-small.jpg"


@app.task
async def count_letters(ctx: Context, section: str) -> int:
    await asyncio.sleep(PHOTO_S)
    return len(section)


@app.task
async def make_issue(ctx: Context, title: str, sections: list[int]) -> str:
    return f"{title}: {len(sections)} sections, {sum(sections)} letters"


@app.task
def announce(ctx: Context, issue: str) -> str:
    return f"out now, {issue}"


@app.task
async def launch(ctx: Context, name: str) -> list[str]:
    """Goes live when two different people have said so."""
    signals = await ctx.wait_for(count(2, "approved", distinct="sources"), timeout="2d")
    return [signal.source for signal in signals]


async def work() -> None:
    async with app:
        await app.run_worker(settings=WorkerSettings(concurrency=4, lease_ttl=LEASE_TTL))


if __name__ == "__main__":
    asyncio.run(work())
