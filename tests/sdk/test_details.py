"""What a run's snapshot tells of its steps."""

import asyncio
import time
from contextlib import suppress

import pytest

from flowfabric import App, Context, Retry, Run
from flowfabric.core.journal import branch_name
from flowfabric.core.records import FailedStep, failed_step
from flowfabric.core.states import PublicState
from flowfabric.errors import ExecutionFailed
from tests.apps import reached, working


async def test_steps_tell_branch_result_duration_and_error(store_url: str) -> None:
    app = App(store_url)

    def boom() -> None:
        raise ValueError("no")

    def slow(name: str) -> str:
        until_s = time.monotonic() + 0.02
        while time.monotonic() < until_s:
            pass
        return name

    @app.task
    async def order(ctx: Context) -> None:
        async def part(name: str) -> str:
            return await ctx.step("fetch", slow, name)

        await asyncio.gather(part("ada"), part("bob"))
        with ctx.branch("billing"):
            await ctx.step("charge", slow, "charge")
        try:
            await ctx.step("notify", boom)
        except ValueError:
            await ctx.sleep("1h")

    async with app, working(app):
        run = await app.submit(order)
        await reached(run, PublicState.DELAYED)
        steps = await run.steps()
    told = [(each.name, each.branch, each.result, each.error) for each in steps]
    assert sorted(told, key=str) == sorted(
        [
            ("fetch", "part[1]", b'"ada"', None),
            ("fetch", "part[2]", b'"bob"', None),
            ("charge", "billing", b'"charge"', None),
            ("notify", "", None, "ValueError: no"),
            ("sleep", "", None, None),
        ],
        key=str,
    )
    took = {each.name: each.duration_ms for each in steps}
    assert took["sleep"] is None
    assert took["notify"] is not None
    assert (took["fetch"] or 0) >= 15


def boom() -> None:
    raise ValueError("no")


async def failed(app: App, run: Run[object]) -> FailedStep | None:
    """What a run's last attempt names as its end, once it has failed."""
    with pytest.raises(ExecutionFailed):
        await run.result(timeout=20)
    return failed_step((await run.snapshot()).attempts[-1])


async def test_the_step_that_ended_a_run_is_named_everywhere(store_url: str) -> None:
    app = App(store_url)

    @app.task
    async def order(ctx: Context) -> None:
        await ctx.step("reserve", str)
        await ctx.step("charge", boom)

    async with app, working(app):
        run = await app.submit(order)
        step = await failed(app, run)
        assert step is not None
        assert (step.step_key, step.name, step.error) == ("charge", "charge", "ValueError: no")
        told = [(each.name, each.result, each.error) for each in await run.steps()]
        assert told == [("reserve", b'""', None), ("charge", None, "ValueError: no")]
        assert (await run.steps())[-1].duration_ms is not None
        why = await run.why()
        assert why.sentence.startswith("It failed at step 'charge': ValueError: no")
        assert why.detail["failed_step_key"] == "charge"


async def test_a_step_is_named_behind_what_the_handler_made_of_its_failure(
    store_url: str,
) -> None:
    app = App(store_url)
    same = ValueError("the same object each time")

    def raise_same() -> None:
        raise same

    @app.task
    async def wrapped(ctx: Context) -> None:
        try:
            await ctx.step("charge", boom)
        except ValueError:
            raise RuntimeError("no order") from None

    @app.task
    async def grouped(ctx: Context) -> None:
        async def part(name: str) -> None:
            await ctx.step("fetch", boom if name == "bob" else str)

        async with asyncio.TaskGroup() as group:
            for name in ("ada", "bob"):
                group.create_task(part(name))

    @app.task
    async def stored(ctx: Context) -> None:
        try:
            await ctx.step("charge", boom)
        except ValueError:
            await ctx.step("note", str)
            raise

    @app.task
    async def caught(ctx: Context) -> None:
        with suppress(ValueError):
            await ctx.step("charge", raise_same)
        await ctx.step("note", str)
        raise KeyError("of the handler itself")

    @app.task
    async def again(ctx: Context) -> None:
        await ctx.step("refund", raise_same)

    @app.task
    async def waits(ctx: Context) -> None:
        await ctx.wait_for_signal("go", timeout=0.01)

    @app.task
    async def parent(ctx: Context) -> None:
        child = await ctx.submit(again)
        await child.result()

    async with app, working(app):
        named = {}
        for task in (wrapped, grouped, stored, caught, again, waits):
            step = await failed(app, await app.submit(task))
            named[task.name] = None if step is None else (step.name, branch_name(step.line))
        run = await app.submit(parent)
        of_child = await failed(app, run)
    assert named == {
        "wrapped": ("charge", ""),
        "grouped": ("fetch", "part[2]"),
        "stored": ("charge", ""),
        "caught": None,
        "again": ("refund", ""),
        "waits": ("signal go", ""),
    }
    assert of_child is not None
    assert of_child.name.startswith("result of {fp:")


async def test_a_retry_tries_the_step_again_and_is_told_apart(store_url: str) -> None:
    app = App(store_url)
    tries: list[int] = []

    def flaky() -> int:
        tries.append(len(tries))
        if len(tries) == 1:
            raise ValueError("no")
        return len(tries)

    @app.task(retry=Retry(max_retries=1, delay=0))
    async def order(ctx: Context) -> int:
        return await ctx.step("charge", flaky)

    async with app, working(app):
        run = await app.submit(order)
        assert await run.result(timeout=20) == 2
        found = await run.snapshot()
    assert [(each.name, each.result, each.error) for each in found.steps] == [
        ("charge", b"2", None)
    ]
    assert [each.failed_step_name for each in found.attempts] == ["charge", None]
