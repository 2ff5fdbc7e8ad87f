"""What the verbs of a context refuse before they do anything, and the way out that they name."""

import asyncio
import operator
import re
from collections.abc import Callable, Coroutine

import pytest

from flowfabric import App, Context, Retry, testing
from flowfabric.errors import ExecutionFailed
from flowfabric.task import Task, TaskSettings


def nothing() -> None: ...


VERBS: dict[str, Callable[[Context], object]] = {
    "step": lambda ctx: ctx.step("a", int),
    "sleep": lambda ctx: ctx.sleep("1h"),
    "now": lambda ctx: ctx.now(),
    "random": lambda ctx: ctx.random(),
    "uuid": lambda ctx: ctx.uuid(),
    "submit": lambda ctx: ctx.submit(Task("child", nothing, TaskSettings())),
    "progress": lambda ctx: ctx.progress(50),
    "emit": lambda ctx: ctx.emit({"a": 1}),
    "summary": lambda ctx: ctx.summary({"a": 1}),
    "patched": lambda ctx: ctx.patched("p"),
    "tags": lambda ctx: ctx.tags(),
    "scheduled_for": lambda ctx: ctx.scheduled_for(),
    "wait_for_signal": lambda ctx: ctx.wait_for_signal("go"),
    "wait_for": lambda ctx: ctx.wait_for("go"),
    "waitpoint": lambda ctx: ctx.waitpoint("go"),
}


async def fails(app: App, task: Task[[], object]) -> str:
    async with testing.engine(app=app) as local:
        run = await local.submit(task)
        await local.drain()
        with pytest.raises(ExecutionFailed) as raised:
            await run.result()
    return raised.value.reason


@pytest.mark.parametrize("verb", VERBS)
async def test_a_verb_that_a_plain_function_cannot_await_is_refused_at_once(verb: str) -> None:
    app = App()

    @app.task
    def mistaken(ctx: Context) -> None:
        VERBS[verb](ctx)

    async def looped(ctx: Context) -> None:
        VERBS[verb](ctx)

    @app.task
    def elsewhere(ctx: Context) -> None:
        asyncio.run(looped(ctx))

    for task in (mistaken, elsewhere):
        assert f"ctx.{verb}: must be awaited" in (reason := await fails(app, task))
        assert f"use ctx.blocking.{verb}(…)" in reason


@pytest.mark.parametrize("verb", ["progress", "emit", "summary", "tags"])
async def test_what_a_step_in_a_thread_may_call_goes_through_blocking(verb: str) -> None:
    app = App()

    @app.task
    async def works(ctx: Context) -> None:
        await ctx.step("outer", lambda: VERBS[verb](ctx))

    assert f"ctx.blocking.{verb}(…)" in await fails(app, works)


async def test_a_step_in_a_thread_cannot_wait() -> None:
    app = App()

    @app.task
    async def waits(ctx: Context) -> None:
        await ctx.step("outer", lambda: ctx.sleep("1h"))

    assert "inside the function of step 'outer'" in await fails(app, waits)


async def fetch(url: str) -> str:
    return url


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        (
            lambda task: ("f", fetch("x")),
            r"the function of step f: has been called already; .* ctx\.step\('f', fetch, url\)",
        ),
        (lambda task: ("f", "x"), "the function of step f: has been called already"),
        (
            lambda task: ("f", task, "x"),
            r"the function of step f: is a task; `await ctx\.submit\(other, …\)` runs it",
        ),
        (lambda task: ("f", task("x")), r"is a task; .* other\.function is its function"),
        (lambda task: (fetch, "x"), r'name: comes first, as in ctx\.step\("fetch", fetch, url\)'),
        (lambda task: ("", fetch, "x"), "name: must not be empty"),
    ],
    ids=["coroutine", "result", "task", "call", "no name", "empty name"],
)
@pytest.mark.parametrize("blocking", [False, True])
async def test_a_step_that_is_no_function_is_refused_with_the_way_out(
    given: Callable[[Task[..., str]], tuple[object, ...]], refusal: str, blocking: bool
) -> None:
    app = App()

    @app.task
    async def other(ctx: Context, url: str) -> str:
        return url

    @app.task
    async def mistaken(ctx: Context) -> None:
        step: Callable[..., Coroutine[object, object, object]] = ctx.step
        await step(*given(other))

    @app.task
    def plainly_mistaken(ctx: Context) -> None:
        step: Callable[..., object] = ctx.blocking.step
        step(*given(other))

    reason = await fails(app, plainly_mistaken if blocking else mistaken)
    assert re.search(refusal, reason)


CALLED = {
    "step": "ctx.step('a', …)",
    "submit": "ctx.submit(child, …)",
    "patched": "ctx.patched('p', …)",
    "wait_for_signal": "ctx.wait_for_signal('go', …)",
    "wait_for": "ctx.wait_for('go', …)",
    "waitpoint": "ctx.waitpoint('go', …)",
    "sleep": "ctx.sleep('1h', …)",
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("where", ["handler", "branch", "task", "result"])
async def test_a_verb_that_was_not_awaited_fails_the_run_by_its_name(verb: str, where: str) -> None:
    app = App()
    attempts = 0

    @app.task(retry=Retry(max_retries=3))
    async def mistaken(ctx: Context) -> object:
        nonlocal attempts
        attempts += 1

        async def branch() -> None:
            VERBS[verb](ctx)

        if where == "branch":
            await asyncio.gather(branch())
            return None
        made = VERBS[verb](ctx)
        if where == "task":
            # It does not begin before the handler ends.
            assert asyncio.iscoroutine(made)
            tasks.add(asyncio.create_task(made))
        return made if where == "result" else None

    tasks: set[asyncio.Task[object]] = set()
    reason = await fails(app, mistaken)
    called = CALLED.get(verb, f"ctx.{verb}(…)")
    assert f"{called} was called but not awaited, so it did nothing" in reason
    assert attempts == 1, "trying again cannot help"
    for task in tasks:
        task.cancel()


async def test_of_several_calls_that_were_not_awaited_the_first_is_named() -> None:
    app = App()

    @app.task
    async def child() -> None: ...

    @app.task
    async def mistaken(ctx: Context) -> None:
        made = await ctx.submit(child)
        await ctx.step("done", int)
        calls: list[object] = [made.result(), ctx.step("forgotten", int)]
        assert len(calls) == 2

    reason = await fails(app, mistaken)
    assert "result() of a child of task child (and 1 more) was called but not awaited" in reason


async def test_calls_that_are_awaited_late_or_given_up_are_no_mistake() -> None:
    app = App()

    @app.task
    async def works(ctx: Context) -> int:
        late = [ctx.step("late", int, number) for number in range(200)]
        ctx.step("closed", int).close()
        given_up = asyncio.create_task(ctx.step("given up", int))
        given_up.cancel()
        return sum([await each for each in late])

    async with testing.engine(app=app) as local:
        run = await local.submit(works)
        await local.drain()
        assert await run.result() == sum(range(200))


async def test_a_handler_may_end_without_a_branch_that_has_just_called_something() -> None:
    app = App()

    @app.task
    async def ends_early(ctx: Context) -> str:
        async def left_behind() -> None:
            ends.set()
            # The tasks it starts here have not begun when the handler ends.
            await asyncio.gather(ctx.step("a", int), ctx.step("b", int))

        ends = asyncio.Event()
        tasks.add(asyncio.create_task(left_behind()))
        await ends.wait()
        return "ended"

    tasks: set[asyncio.Task[None]] = set()
    async with testing.engine(app=app) as local:
        run = await local.submit(ends_early)
        await local.drain()
        assert await run.result() == "ended"
    for task in tasks:
        task.cancel()


async def test_using_what_was_not_awaited_is_a_failure_that_says_so() -> None:
    app = App()

    @app.task
    async def forget(ctx: Context) -> str:
        made: object = ctx.step("write", str, "x")
        return str(operator.add(made, "!"))

    reason = await fails(app, forget)
    assert "unsupported operand" in reason
    assert "ctx.step('write', …) was called but not awaited, so it did nothing" in reason


async def test_a_verb_is_no_function_of_a_step() -> None:
    app = App()

    @app.task
    async def wait(ctx: Context) -> None:
        await ctx.step("w", ctx.wait_for_signal, "x")

    assert "ctx.wait_for_signal was called inside the function" in await fails(app, wait)
