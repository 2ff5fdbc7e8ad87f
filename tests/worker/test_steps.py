"""Durable steps: each runs once, whatever happens to the handler around it."""

import asyncio
from collections import Counter
from datetime import date
from functools import partial
from uuid import UUID

import pytest

from flowfabric import App, Context, Retry
from flowfabric.core.states import PublicState
from flowfabric.errors import ExecutionFailed
from tests.apps import blocked, reached, working

AT_ONCE = Retry(max_retries=5, delay=0)


async def test_finished_steps_run_once_although_the_handler_is_retried(app: App) -> None:
    ran: Counter[str] = Counter()

    def note(name: str) -> str:
        ran[name] += 1
        return name.upper()

    @app.task(retry=AT_ONCE)
    async def pipeline(ctx: Context) -> list[str]:
        first = await ctx.step("first", note, "a")
        if ctx.retry_count == 0:
            raise RuntimeError("between the steps")
        second = await ctx.step("second", note, "b")
        if ctx.retry_count == 1:
            raise RuntimeError("after the steps")
        return [first, second]

    async with working(app):
        assert await (await app.submit(pipeline)).result(timeout="20s") == ["A", "B"]
    assert ran == {"a": 1, "b": 1}


async def test_a_step_gets_what_was_stored_by_the_annotation_of_the_function_itself(
    app: App,
) -> None:
    def day(number: int) -> date:
        return date(2026, 11, number)

    @app.task
    async def days(ctx: Context) -> list[str]:
        annotated = await ctx.step("annotated", day, 18)
        # A partial function has no annotations.
        plain: object = await ctx.step("plain", partial(day, 18))
        return [repr(annotated), repr(plain)]

    async with working(app):
        result = await (await app.submit(days)).result(timeout="20s")
    assert result == ["datetime.date(2026, 11, 18)", "'2026-11-18'"]


async def test_a_step_of_a_plain_handler_runs_once_too(app: App) -> None:
    ran: Counter[str] = Counter()

    async def note(name: str) -> str:
        ran[name] += 1
        return name.upper()

    @app.task(retry=AT_ONCE)
    def pipeline(ctx: Context) -> list[str]:
        first = ctx.blocking.step("first", note, "a")
        second = ctx.blocking.step("second", note, "b")
        if ctx.retry_count < 2:
            raise RuntimeError("after the steps")
        return [first, second]

    async with working(app):
        assert await (await app.submit(pipeline)).result(timeout="20s") == ["A", "B"]
    assert ran == {"a": 1, "b": 1}


async def test_plain_handlers_that_fill_every_thread_still_get_their_steps_done(
    app: App,
) -> None:
    @app.task
    def pipeline(ctx: Context, name: str) -> str:
        return ctx.blocking.step("upper", str.upper, name)

    async with working(app, concurrency=2):
        runs = await app.submit_many([pipeline(name) for name in "abcdef"])
        results = [await run.result(timeout="20s") for run in runs]
    assert results == list("ABCDEF")


async def test_time_chance_and_uuids_are_the_same_in_every_run(app: App) -> None:
    seen: list[tuple[float, UUID, float]] = []

    @app.task(retry=AT_ONCE)
    async def chancy(ctx: Context) -> None:
        at = (await ctx.now()).timestamp()
        seen.append((at, await ctx.uuid(), await ctx.random()))
        if ctx.retry_count < 2:
            raise RuntimeError("again")

    async with working(app):
        await (await app.submit(chancy)).result(timeout="20s")
    assert seen == [seen[0]] * 3


async def test_steps_of_one_name_are_numbered_and_parallel_ones_are_each_kept(app: App) -> None:
    ran: Counter[int] = Counter()

    async def square(number: int) -> int:
        ran[number] += 1
        await asyncio.sleep(0)
        return number * number

    @app.task(retry=AT_ONCE)
    async def squares(ctx: Context) -> list[int]:
        async def branch(number: int) -> int:
            once = await ctx.step(f"once {number}", square, number)
            return await ctx.step(f"twice {number}", square, once)

        plain = await asyncio.gather(*(ctx.step("square", square, n) for n in (1, 2, 3)))
        deep = await asyncio.gather(*(branch(n) for n in (10, 11)))
        last = await ctx.step("last", square, 4)
        if ctx.retry_count < 2:
            raise RuntimeError("again")
        return [*plain, *deep, last]

    async with working(app):
        run = await app.submit(squares)
        assert await run.result(timeout="20s") == [1, 4, 9, 10_000, 14_641, 16]
        keys = {step.step_key for step in await app.engine.list_steps(run.execution_id)}
    assert set(ran.values()) == {1}
    assert keys >= {"square", "square#2", "square#3", "last"}


async def test_a_step_that_fails_is_tried_again_in_place_and_then_raises(app: App) -> None:
    tries: list[int] = []

    def flaky(succeed_at: int) -> int:
        tries.append(1)
        if len(tries) < succeed_at:
            raise ConnectionError("not yet")
        return len(tries)

    @app.task
    async def patient(ctx: Context, succeed_at: int) -> int:
        return await ctx.step("flaky", flaky, succeed_at, retry=Retry(max_retries=2, delay=0))

    async with working(app):
        assert await (await app.submit(patient, 3)).result(timeout="20s") == 3
        tries.clear()
        with pytest.raises(ExecutionFailed, match="not yet"):
            await (await app.submit(patient, 9)).result(timeout="20s")
    assert len(tries) == 3


async def test_a_long_sleep_releases_the_worker_and_the_handler_goes_on_after_it(
    app: App,
) -> None:
    ran: Counter[str] = Counter()

    def note(name: str) -> None:
        ran[name] += 1

    @app.task
    async def sleepy(ctx: Context) -> str:
        ran["handler"] += 1
        await ctx.step("before", note, "before")
        await ctx.sleep("1h")
        await ctx.step("after", note, "after")
        return "awake"

    async with working(app):
        run = await app.submit(sleepy)
        await reached(run, PublicState.DELAYED)
        steps = {s.step_key: s for s in await app.engine.list_steps(run.execution_id)}
        snapshot = await run.snapshot()
        assert snapshot.delay_until_ms == steps["sleep"].wake_at_ms
        assert snapshot.current_lease is None
    assert ran == {"handler": 1, "before": 1}


async def test_parking_waits_for_the_step_a_parallel_branch_is_in(app: App) -> None:
    ran: Counter[str] = Counter()
    asleep = asyncio.Event()

    async def work() -> str:
        ran["work"] += 1
        await asleep.wait()
        return "done"

    @app.task
    async def both(ctx: Context) -> str:
        async def sleeper() -> None:
            asleep.set()
            await ctx.sleep("1h")

        _, worked = await asyncio.gather(sleeper(), ctx.step("work", work))
        return worked

    async with working(app):
        run = await app.submit(both)
        await reached(run, PublicState.DELAYED)
        keys = {step.step_key for step in await app.engine.list_steps(run.execution_id)}
    assert {key.partition("[")[0] for key in keys} == {"sleep@sleeper", "work"}
    assert ran == {"work": 1}


async def test_a_changed_order_of_steps_is_noticed_and_explained(app: App) -> None:
    @app.task(retry=AT_ONCE)
    async def changing(ctx: Context) -> None:
        names = ["a", "b"] if ctx.retry_count == 0 else ["c", "a"]
        for name in names:
            await ctx.step(name, str.upper, name)
        raise RuntimeError("run me again")

    async with working(app):
        run = await app.submit(changing)
        explanation = await blocked(run)
    assert "step 'c' is not stored, but step 'a' is and has not been asked for" in explanation


async def test_a_handler_waits_for_its_children_without_holding_a_worker(app: App) -> None:
    submitted: Counter[str] = Counter()

    @app.task
    async def child(number: int) -> int:
        submitted["child"] += 1
        return number * 10

    @app.task
    async def parent(ctx: Context) -> list[int]:
        submitted["parent"] += 1
        children = [await ctx.submit(child, number) for number in (1, 2)]
        return [await each.result() for each in children]

    # One slot only: a parent that held it would wait for ever.
    async with working(app, concurrency=1):
        run = await app.submit(parent)
        assert await run.result(timeout="30s") == [10, 20]
    assert submitted["child"] == 2
    assert submitted["parent"] >= 2


async def test_a_failed_child_raises_in_its_parent(app: App) -> None:
    @app.task
    async def child() -> None:
        raise ValueError("broken")

    @app.task
    def parent(ctx: Context) -> str:
        try:
            ctx.blocking.submit(child).result()
        except ExecutionFailed as error:
            return error.reason
        return "no error"

    async with working(app):
        run = await app.submit(parent)
        assert (await run.result(timeout="30s")).startswith("ValueError: broken")


@pytest.mark.parametrize("by", ["idempotency_key", "execution_id"])
async def test_a_run_cannot_submit_itself(app: App, by: str) -> None:
    @app.task
    async def echo(ctx: Context) -> None:
        await (await ctx.submit(echo, **{by: "mine"})).result()

    async with app, working(app):
        run = await app.submit(echo, **{by: "mine"})
        with pytest.raises(ExecutionFailed, match=f"{by}: is this run's own"):
            await run.result(timeout="20s")
