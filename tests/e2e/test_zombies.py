"""A worker process that is stopped for longer than its leases, and then goes on."""

import asyncio
import signal
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from flowfabric import App
from tests.e2e import zombie
from tests.e2e.conftest import PATIENCE_S, python
from tests.e2e.programs import Program

RUNS = 30


@asynccontextmanager
async def worker(url: str, log: Path, name: str) -> AsyncIterator[Program]:
    async with python("tests.e2e.zombie", url, str(log), name) as process:
        async with asyncio.timeout(PATIENCE_S):
            assert (await process.stdout.readline()).decode().strip() == "started"
        yield process


def steps_of(log: Path, name: str) -> list[tuple[str, str]]:
    text = log.read_text() if log.exists() else ""
    # The last line may be half written.
    lines = [line.split(" ") for line in text.split("\n")[:-1]]
    return [(execution_id, step) for who, execution_id, step in lines if who == name]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        for _ in iter(condition, True):
            await asyncio.sleep(0)


async def stop_outside_a_write(process: Program, url: str) -> None:
    """Stopped in the middle of a commit to SQLite, it would hold up everybody until it goes on."""
    process.send_signal(signal.SIGSTOP)
    if url.startswith("postgres"):
        return
    file = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, timeout=0.1)
    while True:
        try:
            file.execute("begin immediate")
        except sqlite3.OperationalError:
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0)
            process.send_signal(signal.SIGSTOP)
        else:
            break
    file.execute("rollback")
    file.close()


async def test_a_process_that_was_stopped_runs_no_step_that_its_successor_has_stored(
    store_url: str, tmp_path: Path
) -> None:
    log = tmp_path / "steps"
    async with App(store_url) as app, worker(store_url, log, "stopped") as stopped:
        walk = app.register_task("walk", zombie.walk.function, zombie.walk.settings)
        runs = await app.submit_many([walk() for _ in range(RUNS)])
        # Each is somewhere on its way.
        await until(lambda: len(steps_of(log, "stopped")) >= RUNS * zombie.STEPS // 3)
        await stop_outside_a_write(stopped, store_url)
        async with worker(store_url, log, "heir"):
            for run in runs:
                assert await run.result(timeout="60s") == zombie.STEPS
            before = len(steps_of(log, "stopped"))
            stopped.send_signal(signal.SIGCONT)
            # It is awake and at work again.
            again = await app.submit(walk())
            assert await again.result(timeout="60s") == zombie.STEPS
    stored = set(steps_of(log, "heir"))
    assert stored
    assert set(steps_of(log, "stopped")[before:]) & stored <= {
        step for step in stored if step[0] == again.execution_id
    }
