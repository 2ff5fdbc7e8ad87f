"""When a handler is parked, what that must not cut off, and what it must not hide."""

import asyncio
from collections import Counter
from contextlib import suppress

import pytest

from flowfabric import App, Context, Retry, testing
from flowfabric.core.states import PublicState
from flowfabric.errors import ExecutionFailed
from tests.apps import reached, working

NEVER = Retry(max_retries=0)


def boom() -> None:
    raise ValueError("boom")


async def fails(app: App, name: str) -> str:
    with pytest.raises(ExecutionFailed) as raised:
        await (await app.submit(app.tasks[name]())).result(timeout="20s")
    return raised.value.reason


@pytest.mark.parametrize("wait", ["signal", "sleep", "child"])
@pytest.mark.parametrize("deep", [False, True])
async def test_a_failure_outranks_a_wait_of_another_branch(app: App, wait: str, deep: bool) -> None:
    @app.task(lane="elsewhere")
    async def child() -> None:
        """Nobody runs it."""

    @app.task(retry=NEVER)
    async def both(ctx: Context) -> None:
        async def waiting() -> None:
            match wait:
                case "signal":
                    await ctx.wait_for_signal("x")
                case "sleep":
                    await ctx.sleep("1h")
                case _:
                    await (await ctx.submit(child)).result()

        async def failing() -> None:
            await asyncio.gather(asyncio.gather(ctx.step("b", boom)))

        if deep:
            async with asyncio.TaskGroup() as group:
                group.create_task(waiting())
                group.create_task(failing())
        else:
            await asyncio.gather(waiting(), ctx.step("b", boom))

    async with working(app, lanes=["default"]):
        reason = await fails(app, "both")
    assert "boom" in reason or "ExceptionGroup" in reason


@pytest.mark.parametrize("how", ["finally returns", "broad except", "swallows", "raises"])
async def test_what_a_handler_does_while_it_is_unwound_changes_nothing(app: App, how: str) -> None:
    ran: Counter[str] = Counter()

    def note(name: str) -> None:
        ran[name] += 1

    @app.task(retry=NEVER)
    async def stubborn(ctx: Context) -> str:
        try:
            await ctx.wait_for_signal("go")
        except BaseException as error:
            if how == "raises":
                raise RuntimeError("while parking") from error
            if how == "swallows":
                await ctx.step("cleanup", note, "cleanup")
            if how == "broad except":
                return "given up"
            raise
        finally:
            if how == "finally returns" and not ran["signalled"]:
                return "too early"  # noqa: B012
        return "signalled"

    async with working(app):
        run = await app.submit(stubborn)
        await reached(run, PublicState.SUSPENDED)
        ran["signalled"] += 1
        await run.signal("go")
        assert await run.result(timeout="20s") == "signalled"
    assert ran == {"signalled": 1}


async def test_a_handler_that_swallows_its_park_in_a_loop_stops_nobody_else(app: App) -> None:
    @app.task(retry=NEVER)
    async def deaf(ctx: Context) -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await ctx.sleep("1h")
                return

    @app.task
    async def other() -> str:
        return "done"

    async with working(app):
        run = await app.submit(deaf)
        await reached(run, PublicState.DELAYED)
        assert await (await app.submit(other)).result(timeout="20s") == "done"


async def test_a_plain_handler_cannot_end_while_it_is_unwound_either(app: App) -> None:
    @app.task(retry=NEVER)
    def stubborn(ctx: Context) -> str:
        try:
            ctx.blocking.wait_for_signal("go")
        except BaseException:
            return "given up"
        return "signalled"

    async with working(app):
        run = await app.submit(stubborn)
        await reached(run, PublicState.SUSPENDED)
        await run.signal("go")
        assert await run.result(timeout="20s") == "signalled"


async def test_a_park_cuts_off_no_submission_of_another_branch(app: App) -> None:
    ran: Counter[str] = Counter()

    @app.task
    async def child(number: int) -> int:
        ran["child"] += 1
        return number

    @app.task
    async def parent(ctx: Context) -> list[int]:
        ran["parent"] += 1

        async def children() -> list[int]:
            made = [await ctx.submit(child, number) for number in range(3)]
            await ctx.progress(50, "submitted")
            return [await each.result() for each in made]

        async def sleeper() -> None:
            await ctx.sleep("1h")

        async with asyncio.TaskGroup() as group:
            resting = group.create_task(sleeper())
            found = await children()
            resting.cancel()
        return found

    async with working(app):
        # The children end long before the hour is over, and wake their parent.
        assert await (await app.submit(parent)).result(timeout="20s") == [0, 1, 2]
    assert ran["child"] == 3


@pytest.mark.parametrize("verb", ["wait_for_signal", "sleep", "result", "step", "submit", "now"])
async def test_a_verb_inside_a_step_is_refused_at_once(app: App, verb: str) -> None:
    @app.task
    async def child() -> None:
        """Ends at once."""

    @app.task
    async def mistaken(ctx: Context) -> None:
        other = await ctx.submit(child)

        async def inside() -> None:
            match verb:
                case "wait_for_signal":
                    await ctx.wait_for_signal("x")
                case "sleep":
                    await ctx.sleep("1h")
                case "result":
                    await other.result()
                case "step":
                    await asyncio.create_task(ctx.step("inner", int))
                case "submit":
                    await ctx.submit(child)
                case _:
                    await ctx.now()

        await ctx.step("outer", inside)

    async with working(app):
        reason = await fails(app, "mistaken")
    assert "inside the function of step 'outer'" in reason


async def test_a_verb_inside_a_step_in_a_thread_is_refused_too(app: App) -> None:
    @app.task
    async def mistaken(ctx: Context) -> None:
        await ctx.step("outer", lambda: ctx.blocking.sleep("1h"))

    async with working(app):
        assert "inside the function of step 'outer'" in await fails(app, "mistaken")


async def test_blocking_verbs_on_the_event_loop_are_refused_at_once(app: App) -> None:
    @app.task
    async def mistaken(ctx: Context) -> None:
        ctx.blocking.step("a", int)

    @app.task
    async def threaded(ctx: Context) -> int:
        return await asyncio.to_thread(ctx.blocking.step, "a", int)

    async with working(app):
        assert "ctx.blocking" in await fails(app, "mistaken")
        assert await (await app.submit(threaded)).result(timeout="20s") == 0


async def test_a_branch_that_waits_wakes_at_the_earlier_of_its_reasons() -> None:
    async with testing.engine() as app:

        @app.task
        async def child() -> None:
            """Delayed for a day."""

        @app.task
        async def parent(ctx: Context) -> str:
            async def woken() -> str:
                await ctx.sleep("1h")
                return "slept"

            other = await ctx.submit(child(), delay="1d")
            tasks = [asyncio.ensure_future(other.result()), asyncio.create_task(woken())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return "slept" if tasks[1].done() else "child"

        run = await app.submit(parent)
        await app.drain()
        app.clock.advance("1h")
        await app.drain()
        assert await run.result(timeout=1) == "slept"


async def test_a_parent_that_sleeps_as_well_goes_on_when_its_child_has_ended() -> None:
    async with testing.engine() as app:

        @app.task
        async def child() -> str:
            return "child"

        @app.task
        async def parent(ctx: Context) -> str:
            other = await ctx.submit(child(), delay="10m")
            tasks = [asyncio.ensure_future(other.result()), asyncio.ensure_future(ctx.sleep("1h"))]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return await other.result() if tasks[0].done() else "slept"

        run = await app.submit(parent)
        await app.drain()
        app.clock.advance("10m")
        await app.drain()
        assert await run.result(timeout=1) == "child"
