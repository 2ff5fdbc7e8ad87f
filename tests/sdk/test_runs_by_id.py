"""Runs by their ids, and waiting for something that is not there."""

import asyncio
import re
from collections.abc import AsyncIterator
from functools import partial

import aiosqlite
import asyncpg
import pytest

from flowfabric import App, Context, Engine, EngineConfig, Run, Task
from flowfabric.core.decisions import Changes
from flowfabric.core.ids import ExecutionId, partition_of, uuid_of
from flowfabric.core.records import Execution
from flowfabric.core.states import PublicState
from flowfabric.engine.shell import execution_key
from flowfabric.errors import IdempotencyConflict, InvalidInput, NotFound, OperationTimeout
from flowfabric.store.base import Transaction
from tests.apps import reached, working
from tests.conformance.given import UNKNOWN_ID


@pytest.fixture
async def app(store_url: str) -> AsyncIterator[App]:
    async with App(store_url, config=EngineConfig(keep=0, keep_failed=0)) as app:
        yield app


async def forget(engine: Engine, execution_id: ExecutionId) -> None:
    """Delete an execution whoever needs it, as somebody with a database console might."""

    async def body(tx: Transaction) -> None:
        key = execution_key(execution_id)
        await tx.save(Changes(deletes=tuple((await tx.lock(Execution, [key])).values())))

    await engine.store.transact(body)


async def test_the_result_of_an_unknown_run_is_not_waited_for(app: App) -> None:
    @app.task
    def task() -> None: ...

    submitted = await app.submit(task)
    unknown = Run(submitted._opened, task, ExecutionId(UNKNOWN_ID))
    with pytest.raises(NotFound, match=UNKNOWN_ID):
        await unknown.result()


async def test_a_run_that_is_deleted_while_somebody_waits_ends_the_wait(app: App) -> None:
    @app.task
    def task() -> None: ...

    run = await app.submit(task)
    waiting = asyncio.create_task(run.result())
    await run.cancel()
    await app.engine.trim_retention()
    with pytest.raises(Exception, match=r"not found|cancelled"):
        await waiting
    for ask in (run.result, run.state, run.frames, run.summary):
        with pytest.raises(NotFound):
            await ask()


async def rolled_back(app: App, task: Task[[], None]) -> Run[None]:
    """A run that was submitted in a transaction which came to nothing."""
    if app.url.startswith("sqlite"):
        async with aiosqlite.connect(app.url.removeprefix("sqlite:///")) as file:
            await file.execute("begin immediate")
            run = await app.submit(task, connection=file)
            await file.rollback()
        return run
    connection = await asyncpg.connect(app.url)
    transaction = connection.transaction()
    await transaction.start()
    run = await app.submit(task, connection=connection)
    await transaction.rollback()
    await connection.close()
    return run


async def test_the_result_of_a_submission_that_was_rolled_back_is_not_waited_for(
    app: App,
) -> None:
    @app.task
    def task() -> None: ...

    run = await rolled_back(app, task)
    with pytest.raises(NotFound, match=re.escape(run.execution_id)):
        await run.result()


async def test_a_timeout_names_the_run_as_people_do_and_says_why(app: App) -> None:
    @app.task
    def task() -> None: ...

    run = await app.submit(task, execution_id="order-42", lane="nobody")
    with pytest.raises(OperationTimeout) as raised:
        await run.result(timeout="1ms")
    assert re.fullmatch(
        r"waiting for order-42 timed out after \d+ ms: No running worker has a task"
        r" 'task' in lane 'nobody': start one that does \(flowfabric worker module:app --lane"
        r" nobody\)\.",
        str(raised.value),
    )


async def test_a_run_that_is_not_there_is_named_as_it_was_asked_for(app: App) -> None:
    @app.task
    def task() -> None: ...

    run = app.run(task, "order-43")
    asks = (run.result, run.state, run.snapshot, run.why, run.cancel)
    for ask in (
        *asks,
        partial(run.signal, "go"),
        partial(app.signals.send, "order-43", "go"),
        partial(app.signals.token, "order-43", "go"),
    ):
        with pytest.raises(NotFound, match=r"^execution not found: order-43$"):
            await ask()


async def test_a_run_of_another_task_is_refused_whatever_is_asked_of_it(app: App) -> None:
    @app.task
    def ship() -> None: ...

    @app.task
    def pay() -> None: ...

    submitted = await app.submit(pay, execution_id="order-17", delay="1h")
    run = app.run(ship, "order-17")
    asks = (run.result, run.state, run.snapshot, run.why, run.cancel, run.frames, run.summary)
    for ask in (*asks, partial(run.signal, "go"), partial(run.signal, "go", token="fft_x")):
        with pytest.raises(InvalidInput, match="belongs to a run of task 'pay', not of 'ship'"):
            await ask()
    assert (await submitted.snapshot()).kept_signal_count == 0


@pytest.mark.parametrize("beyond", [1, 1_000])
async def test_an_id_with_another_partition_is_refused_with_the_right_one(
    app: App, beyond: int
) -> None:
    @app.task
    def task() -> None: ...

    right = (await app.submit(task)).execution_id
    wrong = f"{{fp:{partition_of(right) + beyond}}}:{uuid_of(right)}"
    problem = "execution_id: does not have the partition of its uuid; give the uuid alone, or "
    try:
        for ask in (app, app.blocking):
            with pytest.raises(InvalidInput, match=re.escape(problem + right)):
                await asyncio.to_thread(ask.run, task, wrong)
        for ask_for in (app.signals.send, app.signals.token):
            with pytest.raises(InvalidInput, match=re.escape(problem + right)):
                await ask_for(wrong, "go")
        for wait_for in (app.blocking.signals.send, app.blocking.signals.token):
            with pytest.raises(InvalidInput, match=re.escape(problem + right)):
                await asyncio.to_thread(wait_for, wrong, "go")
        with pytest.raises(InvalidInput, match=re.escape(problem + right)):
            await anext(app.events(execution_id=wrong))
    finally:
        app.blocking.close()


async def test_signals_and_events_take_whichever_id_a_run_is_known_by(app: App) -> None:
    @app.task(keep="1d")
    async def gather(ctx: Context) -> list[object]:
        return [(await ctx.wait_for_signal("part")).payload for _ in range(4)]

    async with working(app):
        run = await app.submit(gather, execution_id="order-42")
        names = (run.execution_id, uuid_of(run.execution_id), "order-42")
        for number, name in enumerate(names):
            await app.signals.send(name, "part", number)
        try:
            await asyncio.to_thread(app.blocking.signals.send, "order-42", "part", 3)
        finally:
            app.blocking.close()
        assert await run.result(timeout="20s") == [0, 1, 2, 3]
    for name in names:
        told = await anext(app.events(after="start", execution_id=name))
        assert told.event.execution_id == run.execution_id


async def test_a_token_is_found_by_whichever_id_a_run_is_known_by(app: App) -> None:
    @app.task(keep="1d")
    async def gate(ctx: Context) -> None:
        await ctx.wait_for_signal("go")

    async with working(app):
        run = await app.submit(gate, execution_id="order-42")
        await reached(run, PublicState.SUSPENDED)
        for name in (run.execution_id, uuid_of(run.execution_id), "order-42"):
            token = await app.signals.token(name, "go")
            assert token.execution_id == run.execution_id


async def test_a_child_that_is_gone_is_told_to_its_parent(app: App) -> None:
    @app.task
    def child() -> None: ...

    @app.task(keep="1d")
    async def parent(ctx: Context) -> str:
        started = await ctx.submit(child, lane="nobody")
        await forget(app.engine, started.execution_id)
        try:
            await started.result()
        except NotFound as error:
            return error.entity
        return "found"

    async with working(app):
        run = await app.submit(parent)
        assert await run.result(timeout="20s") == "execution"


async def test_a_run_is_found_by_its_uuid_and_by_an_id_of_its_own(app: App) -> None:
    @app.task(keep="1d")
    def double(number: int) -> int:
        return 2 * number

    async with working(app):
        run = await app.submit(double, 21, execution_id="order-42")
        again = await app.submit(double, 1, execution_id="order-42")
        for name in (run.execution_id, run.execution_id[-36:], "order-42"):
            assert await app.run(double, name).result(timeout="20s") == 42
    assert again.execution_id == run.execution_id
    assert (await run.snapshot()).own_id == "order-42"


async def test_an_own_id_belongs_to_one_task(app: App) -> None:
    @app.task
    def pay() -> str:
        return "paid"

    @app.task
    def ship() -> str:
        return "shipped"

    @app.task
    async def parent(ctx: Context) -> str:
        try:
            await ctx.submit(ship, execution_id="order-17")
        except IdempotencyConflict as error:
            return str(error)
        return "submitted"

    run = await app.submit(pay, execution_id="order-17", delay="1h")
    assert (await app.submit(pay, execution_id="order-17")).execution_id == run.execution_id
    said = "execution id order-17 belongs to a run of task 'pay', not of 'ship'; give another id"
    for submitting in (
        app.submit(ship, execution_id="order-17"),
        app.submit_many([ship()], execution_id="order-17"),
    ):
        with pytest.raises(IdempotencyConflict) as caught:
            await submitting
        assert str(caught.value) == said
    async with working(app):
        assert await (await app.submit(parent)).result(timeout=30) == said


async def test_a_run_is_looked_up_with_its_own_task(app: App) -> None:
    @app.task
    def pay() -> None: ...

    @app.task
    def ship() -> None: ...

    await app.submit(pay, execution_id="order-17")
    other = app.run(ship, "order-17")
    for ask in (other.result, other.state, other.snapshot, other.why, other.cancel):
        with pytest.raises(InvalidInput, match=r"'pay', not of 'ship'.*'order-17'"):
            await ask()
    assert await app.run(pay, "order-17").state() is PublicState.WAITING
