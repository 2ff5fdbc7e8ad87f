"""Tasks in processes of their own: whatever one does to its process, it does to itself."""

import asyncio
import logging
import os
import select
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flowfabric import App, Context
from flowfabric.errors import ExecutionCancelled, ExecutionFailed, InvalidInput
from tests.apps import working
from tests.worker import processes

PATIENCE = "60s"


@pytest.fixture
async def app() -> AsyncIterator[App]:
    made = App("sqlite:///:memory:")
    made.adopt(processes.app)
    yield made
    await made.close()


async def test_an_exception_that_cannot_be_rebuilt_is_a_failure_like_another(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    async with working(app, processes=1):
        raising = await app.submit(processes.raise_unpicklable)
        neighbour = await app.submit(processes.add_up, [1, 2])
        with pytest.raises(ExecutionFailed, match="Unpicklable: 7: the sensor is off") as failure:
            await raising.result(timeout=PATIENCE)
        total, _ = await neighbour.result(timeout=PATIENCE)

    assert total == 3
    assert "in raise_unpicklable" in str(failure.value)
    (record,) = [each for each in caplog.records if " failed: " in each.getMessage()]
    assert record.exc_text is not None
    assert "in raise_unpicklable" in record.exc_text


async def test_the_traceback_of_any_exception_is_kept(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    async with working(app):
        run = await app.submit(processes.raise_plain)
        with pytest.raises(ExecutionFailed, match=r"LookupError: nothing there \(in raise_plain"):
            await run.result(timeout=PATIENCE)

    (record,) = [each for each in caplog.records if " failed: " in each.getMessage()]
    assert record.exc_text is not None
    assert "in raise_plain" in record.exc_text


async def test_what_is_final_in_the_other_process_is_final_here(app: App) -> None:
    async with working(app):
        run = await app.submit(processes.raise_for_good)
        with pytest.raises(ExecutionFailed, match="never"):
            await run.result(timeout=PATIENCE)
        assert (await run.snapshot()).total_attempt_count == 1


async def test_a_task_that_kills_its_process_fails_alone(app: App) -> None:
    async with working(app, concurrency=40, processes=2):
        killers = [await app.submit(processes.die) for _ in range(3)]
        innocents = await app.submit_many([processes.add_up([n]) for n in range(20)])
        totals = [await run.result(timeout=PATIENCE) for run in innocents]
        for killer in killers:
            with pytest.raises(ExecutionFailed, match="the process of the task exited: 9"):
                await killer.result(timeout=PATIENCE)
        counts = {(await run.snapshot()).total_attempt_count for run in innocents}

    assert [total for total, _ in totals] == list(range(20))
    assert counts == {1}


async def test_one_that_is_killed_is_retried_as_its_task_says(app: App) -> None:
    async with working(app):
        run = await app.submit(processes.die_by_signal)
        with pytest.raises(ExecutionFailed, match="killed by signal 9"):
            await run.result(timeout=PATIENCE)
        assert (await run.snapshot()).total_attempt_count == 6


async def test_cancelling_ends_the_process_and_leaves_others_alone(
    app: App, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with working(app, processes=2, cancel_grace="20s"):
        for name in "ab":
            os.mkfifo(tmp_path / name)
        hanging = [await app.submit(processes.hang, str(tmp_path / name)) for name in "ab"]
        pids = [await written(tmp_path / name) for name in "ab"]
        ends = [os.pidfd_open(pid) for pid in pids]

        await hanging[0].cancel("enough")
        with pytest.raises(ExecutionCancelled):
            await hanging[0].result(timeout=PATIENCE)
        await gone(ends[0])
        total, _ = await (await app.submit(processes.add_up, [5])).result(timeout=PATIENCE)
        assert total == 5
        assert alive(pids[1])

        await hanging[1].cancel("enough")
        await gone(ends[1])
    assert caplog.records == []


def test_a_task_for_a_process_that_asks_for_a_context_is_refused_when_it_is_registered() -> None:
    app = App("sqlite:///:memory:")

    with pytest.raises(InvalidInput, match="takes a context, which cannot reach another process"):

        @app.task(executor="process")
        def crunch(ctx: Context, number: int) -> None: ...


async def written(path: Path) -> int:
    """What the task writes into the pipe at `path`, once it does."""
    return int(await asyncio.to_thread(path.read_text))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def gone(process: int) -> None:
    """Return when the process behind the descriptor has ended."""
    ended, _, _ = await asyncio.to_thread(select.select, [process], [], [], 30)
    assert ended
    os.close(process)
