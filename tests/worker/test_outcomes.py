"""What a handler has seen: failures of steps, ends of children, calls it gave up."""

import asyncio
import subprocess
from collections import Counter
from typing import Annotated

import pytest
from msgspec import Meta

from flowfabric import App, Context, Retry, testing
from flowfabric.core.records import StepKind
from flowfabric.core.states import PublicState
from flowfabric.errors import ExecutionFailed, InvalidInput, StepFailed
from tests.apps import reached, working


class Declined(Exception):
    def __init__(self, card: str, *, code: int) -> None:
        super().__init__(card, code)
        self.code = code


@pytest.fixture(
    params=[
        ValueError("no"),
        Declined("4711", code=3),
        KeyError("a", 1),
        ExceptionGroup("both", [ValueError("no"), KeyError("a")]),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        subprocess.CalledProcessError(1, ["false"]),
    ],
    ids=lambda error: type(error).__name__,
)
def failure(request: pytest.FixtureRequest) -> Exception:
    assert isinstance(request.param, Exception)
    return request.param


async def test_a_failure_the_handler_caught_is_the_same_in_every_run(
    app: App, failure: Exception
) -> None:
    tries: Counter[str] = Counter()
    seen: list[object] = []

    def charge() -> str:
        tries["charge"] += 1
        if tries["charge"] == 1:
            raise failure
        return "charged after all"

    @app.task
    async def pay(ctx: Context) -> str:
        try:
            return await ctx.step("charge", charge)
        except type(failure) as error:
            seen.append((type(error), repr(error), str(error)))
        await ctx.wait_for_signal("go")
        return await ctx.step("fall back", str.upper, "fell back")

    async with working(app):
        run = await app.submit(pay)
        await reached(run, PublicState.SUSPENDED)
        await run.signal("go")
        assert await run.result(timeout="20s") == "FELL BACK"
    assert tries == {"charge": 1}
    assert len(seen) >= 2
    assert len({str(each) for each in seen}) == 1


async def test_a_failure_is_stored_before_anything_that_comes_after_it_runs(app: App) -> None:
    ran: Counter[str] = Counter()

    def boom() -> None:
        ran["boom"] += 1
        raise ConnectionError("away")

    @app.task(retry=Retry(max_retries=2, delay=0))
    async def careful(ctx: Context) -> None:
        try:
            await ctx.step("boom", boom)
        except ConnectionError:
            await ctx.step("after", run_after)

    def run_after() -> None:
        ran["after"] += 1
        raise RuntimeError("the attempt ends here")

    async with working(app):
        run = await app.submit(careful)
        with pytest.raises(ExecutionFailed, match="the attempt ends here"):
            await run.result(timeout="20s")
        steps = await app.engine.list_steps(run.execution_id)
    assert ran == {"boom": 1, "after": 3}
    assert [step.step_key for step in steps if step.failure] == ["boom"]


async def test_a_retry_tries_the_step_again_that_failed_the_attempt(app: App) -> None:
    tries: Counter[str] = Counter()

    def flaky(name: str) -> str:
        tries[name] += 1
        if tries[name] < 3:
            raise ConnectionError("not yet")
        return name

    @app.task(retry=Retry(max_retries=9, delay=0))
    async def patient(ctx: Context) -> list[str]:
        async def branch(name: str) -> str:
            return await ctx.step("flaky", flaky, name)

        first = await ctx.step("first", flaky, "first")
        async with asyncio.TaskGroup() as group:
            branches = [group.create_task(branch(name)) for name in "ab"]
        return [first, *(each.result() for each in branches)]

    async with working(app):
        assert await (await app.submit(patient)).result(timeout="20s") == ["first", "a", "b"]


async def test_a_failure_in_a_branch_is_stored_when_the_handler_goes_on(app: App) -> None:
    tries: Counter[str] = Counter()

    def boom() -> None:
        tries["boom"] += 1
        raise ValueError(f"try {tries['boom']}")

    @app.task
    async def gathering(ctx: Context) -> list[str]:
        async def branch() -> None:
            await ctx.step("boom", boom)

        found = await asyncio.gather(branch(), ctx.step("boom", boom), return_exceptions=True)
        await ctx.wait_for_signal("go")
        return sorted(str(each) for each in found)

    async with working(app):
        run = await app.submit(gathering)
        await reached(run, PublicState.SUSPENDED)
        await run.signal("go")
        assert await run.result(timeout="20s") == ["try 1", "try 2"]
    assert tries == {"boom": 2}


async def test_an_exception_whose_class_cannot_be_found_comes_back_as_step_failed() -> None:
    class Local(Exception):
        pass

    kinds: list[str] = []

    def boom() -> None:
        raise Local("inside")

    async with testing.engine() as app:

        @app.task
        async def work(ctx: Context) -> str:
            try:
                await ctx.step("boom", boom)
            except (Local, StepFailed) as error:
                kinds.append(type(error).__name__)
                message = str(error)
            await ctx.sleep("1h")
            return message

        run = await app.submit(work)
        await app.drain(skip_time=True)
        message = await run.result(timeout=1)
        assert message.startswith("step boom: ")
        assert message.endswith("Local: inside")
    assert kinds == ["Local", "StepFailed"]


@pytest.mark.parametrize("raised", [StopIteration, GeneratorExit])
async def test_what_ends_a_generator_is_a_failure_of_its_step_like_another(
    raised: type[BaseException],
) -> None:
    def ends() -> None:
        raise raised

    async with testing.engine() as app:

        @app.task
        async def work(ctx: Context) -> str:
            try:
                await ctx.step("ends", ends)
            except RuntimeError as error:
                told = str(error)
            await ctx.sleep("1h")
            return told

        @app.task
        async def fails(ctx: Context) -> None:
            await ctx.step("ends", ends)

        caught, failed = await app.submit(work), await app.submit(fails)
        await app.drain(skip_time=True)
        assert await caught.result(timeout=1) == f"function raised {raised.__name__}"
        with pytest.raises(ExecutionFailed, match=f"function raised {raised.__name__}"):
            await failed.result(timeout=1)


async def test_a_step_that_was_given_up_is_not_run_again(app: App) -> None:
    ran: Counter[str] = Counter()

    async def slow() -> str:
        ran["slow"] += 1
        await asyncio.Event().wait()
        return "never"

    @app.task
    async def hurried(ctx: Context) -> str:
        try:
            async with asyncio.timeout(0.5):
                await ctx.step("slow", slow)
        except TimeoutError:
            await ctx.step("plan b", str.upper, "b")
        await ctx.wait_for_signal("go")
        return "done"

    async with working(app):
        run = await app.submit(hurried)
        await reached(run, PublicState.SUSPENDED)
        await run.signal("go")
        assert await run.result(timeout="20s") == "done"
    assert ran == {"slow": 1}


async def test_a_race_that_was_won_is_won_in_every_run(app: App) -> None:
    seen: list[list[bool]] = []

    @app.task
    async def race(ctx: Context) -> list[bool]:
        alarm = asyncio.create_task(ctx.sleep(0.2))
        work = asyncio.create_task(ctx.step("work", int))
        done, _ = await asyncio.wait([alarm, work], return_when=asyncio.FIRST_COMPLETED)
        alarm.cancel()
        await ctx.step("after", int)
        seen.append([work in done, alarm in done])
        await ctx.wait_for_signal("go")
        return seen[-1]

    async with working(app):
        # On a busy machine the alarm may go off first, or meanwhile.
        while [True, False] not in seen:
            run = await app.submit(race)
            await reached(run, PublicState.SUSPENDED)
            # Its begin may not be stored: the work may have been quicker.
            stored = await app.engine.list_steps(run.execution_id)
            won = seen[-1]
            await run.signal("go")
            assert await run.result(timeout="20s") == won
    (given_up,) = [step for step in stored if step.failure is not None]
    assert (given_up.kind, given_up.name) == (StepKind.SLEEP, "sleep")


async def test_how_a_child_ended_is_seen_once(app: App) -> None:
    ran: Counter[str] = Counter()

    @app.task
    async def good() -> str:
        ran["good"] += 1
        return "fine"

    @app.task
    async def bad() -> str:
        ran["bad"] += 1
        raise ValueError("broken")

    @app.task
    async def parent(ctx: Context) -> list[str]:
        first = await (await ctx.submit(good)).result()
        try:
            second = await (await ctx.submit(bad)).result()
        except ExecutionFailed as error:
            second = error.reason
        await ctx.wait_for_signal("go")
        return [first, second.partition(" (")[0]]

    async with working(app):
        run = await app.submit(parent)
        await reached(run, PublicState.SUSPENDED)
        ends = {
            step.name.partition(" of ")[0]: (step.result, step.failure)
            for step in await app.engine.list_steps(run.execution_id)
            if step.kind == "child" and step.failure is not None
        }
        assert list(ends) == ["result"]
        await run.signal("go")
        assert await run.result(timeout="20s") == ["fine", "ValueError: broken"]
    assert ran == {"good": 1, "bad": 1}


Positive = Annotated[int, Meta(gt=0)]


async def test_a_result_that_does_not_fit_its_annotation_is_a_failure_in_every_run() -> None:
    counted, told = list[int](), list[str]()

    def count() -> Positive:
        counted.append(0)
        return 0

    async with testing.engine() as app:

        @app.task
        async def work(ctx: Context) -> str:
            try:
                await ctx.step("count", count)
            except InvalidInput as error:
                told.append(str(error))
            await ctx.sleep("1h")
            return "went on"

        run = await app.submit(work)
        await app.drain(skip_time=True)
        assert await run.result(timeout=1) == "went on"
    assert len(counted) == 1
    assert len(told) == 2
    assert set(told) == {
        "the result of step count: does not fit its return annotation: Expected `int` >= 1"
    }


async def test_a_signal_that_was_set_aside_is_not_taken_by_code_that_it_would_fit(
    app: App,
) -> None:
    kinds: list[type] = [int]

    @app.task
    async def work(ctx: Context) -> object:
        return (await ctx.wait_for_signal("count", type=kinds[-1])).payload

    async with working(app):
        run = await app.submit(work)
        await run.signal("count", "many")
        await reached(run, PublicState.SUSPENDED)
        # The sender was told to send another one.
        kinds.append(str)
        await run.signal("count", "seven")
        assert await run.result(timeout="20s") == "seven"


async def test_a_child_that_was_replayed_ends_for_its_parent_as_it_was_seen_first(app: App) -> None:
    ran: Counter[str] = Counter()
    seen: list[list[str]] = []

    @app.task(retry=Retry(max_retries=0))
    async def flaky() -> str:
        ran["flaky"] += 1
        if ran["flaky"] == 1:
            raise ValueError("broken")
        return "fine after all"

    @app.task
    async def parent(ctx: Context) -> None:
        child = await ctx.submit(flaky, execution_id="flaky")
        seen.append([])
        for wait in ("go", "on"):
            try:
                seen[-1].append(await child.result())
            except ExecutionFailed as error:
                seen[-1].append(error.reason)
            await ctx.wait_for_signal(wait)

    async with working(app):
        run = await app.submit(parent)
        await reached(run, PublicState.SUSPENDED)
        again = app.run(flaky, "flaky")
        await app.engine.replay_execution(again.execution_id)
        assert await again.result(timeout="20s") == "fine after all"
        await run.signal("go")
        await run.signal("on")
        await run.result(timeout="20s")
    assert len(seen[-1]) == 2
    assert len({each for run in seen for each in run}) == 1


async def test_a_task_whose_result_does_not_fit_its_annotation_fails_for_good(app: App) -> None:
    """Nobody could read it: neither the caller, nor a parent, which it would block."""
    problem = "the result of miscount: does not fit its return annotation: Expected `int`"
    ran: Counter[str] = Counter()

    @app.task(retry=Retry(max_retries=3))
    async def miscount() -> Positive:
        ran["miscount"] += 1
        return 0

    @app.task
    async def parent(ctx: Context) -> str:
        child = await ctx.submit(miscount)
        try:
            return str(await child.result())
        except ExecutionFailed as error:
            return error.reason

    async with working(app):
        run = await app.submit(miscount)
        with pytest.raises(ExecutionFailed, match=problem):
            await run.result(timeout="20s")
        assert problem in await (await app.submit(parent)).result(timeout="20s")
    assert ran == {"miscount": 2}
