"""What is kept of a failure: where in the program it happened."""

import logging
from collections.abc import Callable

import pytest

from flowfabric import App, Context, Retry
from flowfabric.errors import ExecutionFailed
from tests.apps import working


def divide(dividend: int, divisor: int) -> float:
    return dividend / divisor


async def test_every_failed_attempt_keeps_the_traceback_of_the_program(app: App) -> None:
    @app.task(retry=Retry(max_retries=1, delay=0))
    async def share(ctx: Context, among: int) -> float:
        try:
            return await ctx.step("divide", divide, 1, among)
        except ZeroDivisionError as error:
            raise RuntimeError("nobody there") from error

    async with working(app):
        run = await app.submit(share, 0)
        with pytest.raises(ExecutionFailed):
            await run.result(timeout="20s")
        attempts = (await run.snapshot()).attempts
    assert len(attempts) == 2
    for attempt in attempts:
        text = attempt.failure_traceback
        assert text is not None
        assert text.startswith("Traceback (most recent call last):")
        assert text.endswith("RuntimeError: nobody there")
        assert "in divide\n    return dividend / divisor" in text
        assert "The above exception was the direct cause" in text
        first_frame = text.rpartition("direct cause")[2].partition("File ")[2]
        assert "in share" in first_frame.partition("\n")[0]


async def test_a_traceback_has_the_lines_of_the_program_alone(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def step(ctx: Context) -> float:
        return await ctx.step("divide", divide, 1, 0)

    @app.task
    def blocking(ctx: Context) -> float:
        return ctx.blocking.step("divide", divide, 1, 0)

    @app.task
    async def child(ctx: Context) -> float:
        return await (await ctx.submit(step)).result()

    @app.task
    async def caused(ctx: Context) -> None:
        try:
            await ctx.step("divide", divide, 1, 0)
        except ZeroDivisionError as error:
            raise RuntimeError("nobody there") from error

    async with working(app):
        for task, lines in ((step, 2), (blocking, 2), (child, 1), (caused, 3)):
            run = await app.submit(task)
            with pytest.raises(ExecutionFailed):
                await run.result(timeout="20s")
            (attempt,) = (await run.snapshot()).attempts
            text = attempt.failure_traceback
            assert text is not None
            assert text.count("  File ") == text.count(f'  File "{__file__}"') == lines, text
    logged = [logging.Formatter().formatException(r.exc_info) for r in caplog.records if r.exc_info]
    assert [each.count(f'  File "{__file__}"') for each in logged] == [2, 2, 2, 1, 3]
    assert [each.count("  File ") for each in logged] == [2, 2, 2, 1, 3]


async def test_a_failure_an_earlier_attempt_stored_ends_in_the_line_that_made_the_call(
    app: App,
) -> None:
    @app.task(retry=Retry(max_retries=1, delay=0))
    async def share(ctx: Context) -> None:
        try:
            await ctx.step("divide", divide, 1, 0)
        except ZeroDivisionError as error:
            await ctx.step("note", str, "nobody there")
            raise error

    async with working(app):
        run = await app.submit(share)
        with pytest.raises(ExecutionFailed, match=r"in share, .*test_tracebacks\.py"):
            await run.result(timeout="20s")
        _, again = (await run.snapshot()).attempts
    text = again.failure_traceback
    assert text is not None
    assert "stored by an earlier run" in text
    assert text.count("  File ") == text.count(f'  File "{__file__}"') == 2, text


async def test_a_step_given_wrong_arguments_points_to_who_gave_them(app: App) -> None:
    untyped: Callable[..., float] = divide

    @app.task
    async def share(ctx: Context) -> float:
        return await ctx.step("divide", untyped, 1)

    async with working(app):
        run = await app.submit(share)
        with pytest.raises(ExecutionFailed) as caught:
            await run.result(timeout="20s")
        (attempt,) = (await run.snapshot()).attempts
    assert "missing 1 required positional argument: 'divisor' (in share, " in caught.value.reason
    assert attempt.failure_traceback is not None
    assert attempt.failure_traceback.count("  File ") == 1


async def test_what_goes_wrong_in_the_library_is_told_with_its_lines(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.worker.context.encode_step", None)

    @app.task
    async def share(ctx: Context) -> float:
        return await ctx.step("divide", divide, 1, 1)

    async with working(app):
        run = await app.submit(share)
        with pytest.raises(ExecutionFailed):
            await run.result(timeout="20s")
        (attempt,) = (await run.snapshot()).attempts
    assert attempt.failure_traceback is not None
    assert "in share\n" in attempt.failure_traceback
    assert "in _step\n" in attempt.failure_traceback


async def test_an_error_that_cannot_tell_its_text_still_has_a_traceback(app: App) -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    @app.task
    def sulk() -> None:
        raise SilentError

    async with working(app):
        run = await app.submit(sulk)
        with pytest.raises(ExecutionFailed):
            await run.result(timeout="20s")
        (attempt,) = (await run.snapshot()).attempts
    assert attempt.failure_traceback is not None
    assert "raise SilentError" in attempt.failure_traceback
