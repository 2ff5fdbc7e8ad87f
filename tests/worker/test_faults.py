"""What becomes of handlers that misbehave. Whatever they do, the worker lives on."""

import asyncio
import logging
import math
import os
import threading

import pytest

from flowfabric import App, Context
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import uuid_of
from flowfabric.core.states import PublicState
from flowfabric.errors import ExecutionCancelled, ExecutionFailed, InvalidInput, PayloadTooLarge
from flowfabric.submission import Submissions
from flowfabric.worker.attempt import Stop
from flowfabric.worker.inline import InlineWorker
from tests.apps import blocked, reached, working
from tests.worker import processes


def add_echo(app: App) -> None:
    @app.task
    async def echo(number: int) -> int:
        return number


async def works(app: App) -> bool:
    run = await app.submit(app.tasks["echo"](7))
    return await run.result(timeout="20s") == 7


@pytest.fixture
def app(app: App) -> App:
    add_echo(app)
    return app


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_a_base_exception_is_a_failure_like_another(
    app: App, kind: type[BaseException]
) -> None:
    @app.task
    async def leave() -> None:
        raise kind("bye")

    @app.task
    def leave_thread() -> None:
        raise kind("bye")

    async with working(app):
        for name in ("leave", "leave_thread"):
            with pytest.raises(ExecutionFailed, match=f"{kind.__name__}: bye"):
                await (await app.submit(app.tasks[name]())).result(timeout="20s")
        assert await works(app)


async def test_a_handler_that_cancels_itself_has_failed(app: App) -> None:
    @app.task
    async def give_up() -> None:
        raise asyncio.CancelledError

    async with working(app):
        with pytest.raises(ExecutionFailed, match="handler raised CancelledError"):
            await (await app.submit(give_up)).result(timeout="20s")
        assert await works(app)


async def test_a_result_that_cannot_be_stored_fails_for_good_and_says_so(app: App) -> None:
    @app.task
    async def odd() -> object:
        return object()

    @app.task
    async def huge() -> str:
        return "x" * 10_000_000

    @app.task
    async def average(ctx: Context) -> dict[str, float]:
        return {"mean": await ctx.step("divide", lambda: 0.5), "deviation": math.nan}

    @app.task
    async def step_by_step(ctx: Context) -> float:
        return await ctx.step("divide", lambda: math.inf)

    async with working(app):
        with pytest.raises(ExecutionFailed, match="the result of odd: cannot be stored"):
            await (await app.submit(odd)).result(timeout="20s")
        with pytest.raises(ExecutionFailed, match="the result of huge is 10000002 bytes, at most"):
            await (await app.submit(huge)).result(timeout="20s")
        with pytest.raises(
            ExecutionFailed, match=r"the result of average\['deviation'\]: is NaN or infinite"
        ):
            await (await app.submit(average)).result(timeout="20s")
        with pytest.raises(ExecutionFailed, match="the result of step divide: is NaN or infinite"):
            await (await app.submit(step_by_step)).result(timeout="20s")
        assert await works(app)


async def test_a_payload_of_ten_megabytes_is_refused_when_it_is_submitted(app: App) -> None:
    @app.task
    async def measure(text: str) -> int:
        return len(text)

    async with app:
        with pytest.raises(PayloadTooLarge, match="input_payload: 10000011 bytes, at most 4194304"):
            await app.submit(measure, "x" * 10_000_000)
        assert (await app.engine.find_executions()).executions == ()


async def test_arguments_that_do_not_fit_name_the_argument_on_both_sides(app: App) -> None:
    echo = app.tasks["echo"]
    async with working(app):
        with pytest.raises(
            InvalidInput, match="argument number of echo: expected `int`, got `str`"
        ):
            await app.submit(echo("seven"))
        with pytest.raises(InvalidInput, match="arguments of echo: missing a required argument"):
            await app.submit(echo())
        for payload, problem in (
            (b'{"number":"seven"}', "argument number of echo: expected `int`, got `str`"),
            (b'{"numb', "payload of echo: input data was truncated"),
        ):
            created = await app.engine.create_execution(
                NewExecution(
                    execution_kind="echo",
                    input_payload=payload,
                    policy={"retry_policy": {"max_retries": 5}},
                )
            )
            with pytest.raises(ExecutionFailed) as failure:
                await app.run(echo, created.execution_id).result(timeout="20s")
            assert failure.value.reason == problem
        assert await works(app)


async def test_arguments_of_another_function_wait_for_code_that_takes_them(app: App) -> None:
    echo = app.tasks["echo"]
    async with working(app):
        for payload, problem in (
            (b"{}", "argument number of echo: is missing"),
            (b'{"number":1,"other":2}', "argument other of echo: is unknown; it takes number"),
        ):
            created = await app.engine.create_execution(
                NewExecution(execution_kind="echo", input_payload=payload)
            )
            sentence = await blocked(app.run(echo, created.execution_id))
            assert f"{problem}; deploy code that fits, or cancel it" in sentence


async def test_a_kind_nobody_has_registered_waits_and_says_why(app: App) -> None:
    async with working(app):
        created = await app.engine.create_execution(NewExecution(execution_kind="unheard of"))
        assert await works(app)
        explanation = await app.engine.explain_execution(created.execution_id)
        assert explanation.cause == "no_worker"
        assert await app.engine.read_execution_state(created.execution_id) is PublicState.WAITING


async def test_a_handler_that_ignores_its_cancellation_loses_its_slot_not_the_worker(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    started, let_go = asyncio.Event(), asyncio.Event()

    @app.task
    async def stubborn() -> str:
        started.set()
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        return "I did it anyway"

    # One slot: the next execution needs the one the stubborn handler does not give back.
    async with working(app, concurrency=1, cancel_grace="100ms"):
        run = await app.submit(stubborn)
        await started.wait()
        await run.cancel("stop it")
        assert await works(app)
        with pytest.raises(ExecutionCancelled, match="stop it"):
            await run.result(timeout="20s")
        let_go.set()
    assert "ignores its cancellation" in caplog.text


@pytest.mark.parametrize("moment_s", [None, 0.01])
async def test_a_handler_that_catches_everything_goes_on_elsewhere_when_its_wait_is_over(
    app: App, caplog: pytest.LogCaptureFixture, moment_s: float | None
) -> None:
    """Also one that never lets others run in between."""

    @app.task
    async def stubborn(ctx: Context) -> object:
        while True:
            try:
                return (await ctx.wait_for_signal("go")).payload
            except BaseException:
                if moment_s is not None:
                    await asyncio.sleep(moment_s)

    async with working(app, concurrency=1, cancel_grace="100ms"):
        run = await app.submit(stubborn)
        assert await works(app)
        await run.signal("go", "on")
        assert await run.result(timeout="20s") == "on"
    assert "ignores its cancellation" in caplog.text


async def test_a_handler_that_blocks_the_loop_past_its_lease_keeps_it(app: App) -> None:
    if app.url == "sqlite:///:memory:":
        # In memory nobody else could take the lease; there the heartbeat shares the loop.
        return

    @app.task
    async def block() -> str:
        threading.Event().wait(4)
        return "done"

    async with working(app, lease_ttl="1500ms"):
        run = await app.submit(block)
        assert await run.result(timeout="20s") == "done"
        assert (await run.snapshot()).total_attempt_count == 1
        assert await works(app)


async def test_log_records_carry_execution_attempt_and_worker(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def chatty(ctx: Context) -> None:
        ctx.log.info("hello")
        raise ValueError("oops")

    caplog.set_level(logging.INFO)
    async with working(app):
        run = await app.submit(chatty)
        await reached(run, PublicState.FAILED)
    records = [r for r in caplog.records if getattr(r, "execution_id", "") == run.execution_id]
    assert [record.getMessage() for record in records] == [
        "hello",
        f"chatty {uuid_of(run.execution_id)} failed: ValueError: oops",
    ]
    # What lies between the worker and the handler is not shown.
    assert records[1].exc_text is not None
    assert [line for line in records[1].exc_text.splitlines() if "File" in line] == [
        f'    File "{__file__}", line {chatty.function.__code__.co_firstlineno + 3}, in chatty'
    ]
    assert {(vars(r)["attempt_index"], vars(r)["worker_instance_id"]) for r in records} == {
        (0, "w-1")
    }


async def test_cpu_bound_functions_run_in_another_process_and_may_even_kill_it(app: App) -> None:
    app.adopt(processes.app)
    async with working(app):
        total, pid = await (await app.submit(processes.add_up, [1, 2, 3])).result(timeout="40s")
        assert total == 6
        assert pid != os.getpid()
        with pytest.raises(ExecutionFailed, match="the process of the task exited: 9"):
            await (await app.submit(processes.die)).result(timeout="40s")
        total, _ = await (await app.submit(processes.add_up, [4])).result(timeout="40s")
        assert total == 4
        assert await works(app)


async def test_what_was_not_started_is_handed_back_at_once_and_the_rest_after_the_deadline(
    app: App,
) -> None:
    started = asyncio.Event()

    @app.task
    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    async with app:
        runs = await app.submit_many([endless() for _ in range(4)])
        async with working(app, concurrency=1, prefetch=3, drain_timeout="0s"):
            await started.wait()
        snapshots = [await run.snapshot() for run in runs]
    assert {s.public_state for s in snapshots} == {PublicState.WAITING}
    assert {s.current_lease for s in snapshots} == {None}
    assert {(s.retry_count, s.lease_reclaim_count) for s in snapshots} == {(0, 0)}


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


async def test_an_exception_that_cannot_say_what_it_is_fails_like_another(app: App) -> None:
    @app.task
    async def mumble() -> None:
        raise Speechless

    async with working(app):
        with pytest.raises(ExecutionFailed, match="Speechless: <its text cannot be had"):
            await (await app.submit(mumble)).result(timeout="20s")
        assert await works(app)


class Secretive(Exception):
    def __getattribute__(self, name: str) -> object:
        if name == "__dict__":
            raise AttributeError(name)
        return super().__getattribute__(name)


async def test_a_step_whose_exception_hides_its_attributes_fails_like_another(app: App) -> None:
    def hide() -> None:
        raise Secretive("no")

    @app.task
    async def mumble(ctx: Context) -> None:
        await ctx.step("hide", hide)

    async with working(app):
        with pytest.raises(ExecutionFailed, match="Secretive: no"):
            await (await app.submit(mumble)).result(timeout="20s")


async def test_an_exception_with_an_endless_name_fails_like_another(app: App) -> None:
    endless = type("E" * 1_000, (Exception,), {})

    @app.task
    async def raise_it() -> None:
        raise endless("why")

    async with working(app):
        with pytest.raises(ExecutionFailed, match="EEE: why"):
            await (await app.submit(raise_it)).result(timeout="20s")
        assert await works(app)


async def test_a_plain_function_that_raises_stop_iteration_has_failed(app: App) -> None:
    @app.task
    def exhausted() -> None:
        next(iter([]))

    @app.task
    async def exhausted_step(ctx: Context) -> None:
        await ctx.step("next", lambda: next(iter([])))

    async with working(app):
        for task in (exhausted, exhausted_step):
            with pytest.raises(ExecutionFailed, match="function raised StopIteration"):
                await (await app.submit(task)).result(timeout="20s")
        assert await works(app)


class Hasty(InlineWorker):
    """Tells its handlers to stop before they have begun."""

    async def _run(self, patience_s: float) -> None:
        for attempt in tuple(self._left):
            attempt.stop(Stop.DRAIN, "as asked")
        await super()._run(patience_s)


async def test_a_handler_that_is_stopped_before_it_has_begun_is_handed_back(app: App) -> None:
    ran: list[int] = []

    @app.task
    async def work(number: int) -> None:
        ran.append(number)

    await app.open()
    run = await app.submit(work, 1)
    submissions = Submissions(app.engine)
    worker = Hasty(
        app.engine, app.tasks, submissions, app.resources, (), app.namespace, asyncio.sleep
    )
    assert await worker.run_ready() == 1
    await worker.close()
    assert (ran, await run.state()) == ([], PublicState.WAITING)
