"""Every attempt that fails leaves one line in a log, whoever notices."""

import asyncio
import logging
import re

import pytest

from flowfabric import App
from flowfabric.core.ids import uuid_of
from flowfabric.errors import ExecutionExpired, ExecutionFailed
from flowfabric.reconcilers import REPORTED_MAX, Supervisor
from tests.apps import working


def lines(caplog: pytest.LogCaptureFixture, execution_id: str) -> list[str]:
    """The warnings and errors that carry the execution."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING
        and getattr(record, "execution_id", None) == execution_id
    ]


async def test_a_timeout_is_logged(app: App, caplog: pytest.LogCaptureFixture) -> None:
    @app.task(timeout="100ms")
    async def slow() -> None:
        await asyncio.Event().wait()

    # Nobody but the worker itself applies the timeout.
    async with working(app, reconcile=False):
        run = await app.submit(slow)
        with pytest.raises(ExecutionExpired):
            await run.result(timeout="20s")
    (line,) = lines(caplog, run.execution_id)
    called = f"slow {uuid_of(run.execution_id)}"
    assert re.fullmatch(rf"{called} failed: it ran for [\d.]+m?s, longer than its timeout", line)


async def test_a_handler_that_cancels_itself_is_logged(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def rash() -> None:
        raise asyncio.CancelledError

    async with working(app):
        run = await app.submit(rash)
        with pytest.raises(ExecutionFailed):
            await run.result(timeout="20s")
    assert lines(caplog, run.execution_id) == [
        f"rash {uuid_of(run.execution_id)} failed: CancelledError: nobody told it to stop"
    ]


async def test_a_deadline_and_a_worker_that_went_quiet_are_logged_by_who_notices(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def work() -> int:
        return 1

    async with app:
        left = await app.submit(work)
        lost = await app.engine.claim(worker_id="w", worker_instance_id="w-0", lease_ttl_ms=1)
        assert lost is not None
        late = await app.submit(work, lane="nobody", deadline="1ms")
        async with working(app, lanes={"default": 1}):
            assert await left.result(timeout="20s") == 1
            with pytest.raises(ExecutionExpired):
                await late.result(timeout="20s")
    for run, line in (
        (left, "its worker went quiet and has lost the lease; another takes over"),
        (late, "it did not end within its deadline"),
    ):
        assert lines(caplog, run.execution_id) == [f"{run.execution_id}: {line}"]


async def test_many_at_once_leave_a_few_lines(app: App, caplog: pytest.LogCaptureFixture) -> None:
    @app.task
    async def work() -> None: ...

    async with app:
        runs = await app.submit_many([work()] * (REPORTED_MAX + 5), deadline="1ms")
        async with Supervisor(app.engine):
            for run in runs:
                with pytest.raises(ExecutionExpired):
                    await run.result(timeout="20s")
    told = [record.getMessage() for record in caplog.records]
    assert (
        sum(line.endswith("it did not end within its deadline") for line in told)
        == REPORTED_MAX + 1
    )
    assert "5 more: it did not end within its deadline" in told
