"""An SQLite file is deleted, and later replaced, under the processes that use it.

Nothing is acknowledged that is not in the file, which is put back after a while: a link
to it was kept. Then the same processes go on with it.
"""

import asyncio
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.chaos.arena import Arena, Ways, under_load, working
from benchmarks.chaos.timings import COLUMNS, Timing
from benchmarks.chaos.verdict import NOTHING_HIT, RECOVERY_MAX_MS, Verdict, judge
from flowfabric import App, migrate
from tests.postgres import Server

NAME: Final = "deleted file"
SUPERVISE_S = 0.1
AWAY_S: Final = 1.5
BUSY_S: Final = 30.0


@dataclass
class FileArena(Arena):
    """Jobs in a file, of which a link is kept under another name."""

    @property
    def path(self) -> Path:
        return Path(self.url.removeprefix("sqlite:///"))

    @property
    def kept(self) -> Path:
        return self.path.with_suffix(".kept")

    async def completed(self) -> int:
        return len(await self.timings())

    async def timings(self) -> list[Timing]:
        done = f"select {COLUMNS} from execution_now where public_state = 'completed'"
        return [Timing(*row) for row in await asyncio.to_thread(self._rows, done)]

    async def keys(self) -> set[object]:
        rows = await asyncio.to_thread(self._rows, "select idempotency_key from idempotency_guard")
        return {row[0] for row in rows}

    def _rows(self, query: str) -> list[tuple[int, ...]]:
        with _reading(self.path) as connection:
            return connection.execute(query).fetchall()


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=BUSY_S)
    try:
        yield connection
    finally:
        connection.close()


async def play() -> Verdict:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = f"sqlite:///{folder / 'jobs.db'}"
        await migrate(url)
        await migrate(f"sqlite:///{folder / 'other.db'}")
        app = await stack.enter_async_context(App(url))
        ready = FileArena(Server(url), url, app, Ways((url,), url), folder / "holds", fences=False)
        os.link(ready.path, ready.kept)
        await stack.enter_async_context(working(ready))
        return await _take_away(ready, folder / "other.db")


async def _take_away(within: FileArena, other: Path) -> Verdict:
    load = await under_load(within)
    fault_ms = time.time_ns() // 1_000_000
    within.path.unlink()
    into_nowhere, refused = await _acknowledged_meanwhile(within)
    os.link(within.kept, within.path)
    await asyncio.sleep(AWAY_S)
    os.replace(other, within.path)
    into_another, refused_again = await _acknowledged_meanwhile(within)
    within.path.unlink()
    os.link(within.kept, within.path)
    supervising = asyncio.create_task(_supervise(within))
    await load
    await within.reach(within.submitted)
    supervising.cancel()
    await asyncio.gather(supervising, return_exceptions=True)
    lost = within.acknowledged - await within.keys()
    problems = {
        NOTHING_HIT: not refused or not refused_again,
        f"{into_nowhere + into_another} acknowledged into nowhere": into_nowhere + into_another > 0,
        f"{len(lost)} acknowledged jobs are lost": bool(lost),
    }
    return await judge(
        within,
        NAME,
        fault_ms,
        lost=len(lost),
        found=[problem for problem, is_so in problems.items() if is_so],
        recovery_max_ms=RECOVERY_MAX_MS,
        remark=f"{refused + refused_again} refused while it was away",
    )


async def _supervise(within: Arena) -> None:
    """Start workers again that have ended, as they do when their file is gone."""
    while True:
        for worker in list(within.workers):
            if worker.returncode is not None and worker.pid not in within.killed:
                within.killed.add(worker.pid)
                await within.start_worker()
        await asyncio.sleep(SUPERVISE_S)


async def _acknowledged_meanwhile(within: Arena) -> tuple[int, int]:
    """How many submissions were answered while the file was away, and how many refused."""
    # One may be committed already whose answer is on its way.
    await asyncio.sleep(0)
    acknowledged, refused = len(within.acknowledged), within.refusals
    await asyncio.sleep(AWAY_S)
    return len(within.acknowledged) - acknowledged, within.refusals - refused
