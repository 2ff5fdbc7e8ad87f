"""What is kept of a failure: where in the program it happened."""

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
