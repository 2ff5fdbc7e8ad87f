"""The testing kit waits for nothing that cannot come."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest

from flowfabric import App, Context, testing
from flowfabric.core.states import PublicState
from flowfabric.errors import ExecutionExpired, ExecutionNotTerminal, OperationTimeout
from flowfabric.task import Task
from flowfabric.testing import LocalApp
from tests.apps import reached

pytestmark = pytest.mark.timeout(60)

shop = App("sqlite:///never-opened.db")


@shop.task
async def greet(name: str) -> str:
    return f"hello {name}"


@shop.task
async def waits_for_ever() -> None:
    await asyncio.Event().wait()


@shop.task(timeout="2m")
async def waits_two_minutes() -> None:
    await asyncio.Event().wait()


@shop.task(timeout="200ms")
async def waits_shortly() -> None:
    await asyncio.Event().wait()


gate = threading.Event()


@shop.task
def blocks_a_thread() -> None:
    gate.wait()


@shop.task
async def asks_itself(ctx: Context) -> str:
    return await (await held[0].submit(greet, "Ada")).result()


held: list[LocalApp] = []


@pytest.fixture
async def app() -> AsyncIterator[LocalApp]:
    async with testing.engine(app=shop) as made:
        held[:] = [made]
        yield made


# Without an event loop


async def test_blocking_results_that_cannot_come_raise_at_once(app: LocalApp) -> None:
    def submit() -> None:
        run = app.blocking.submit(greet, "Ada")
        with pytest.raises(ExecutionNotTerminal, match=r"app\.drain"):
            run.result()

    submit()
    await asyncio.to_thread(submit)
    assert await app.drain() == 2


async def test_blocking_calls_are_about_the_same_database(app: LocalApp) -> None:
    run = app.blocking.submit(greet, "Ada")
    (other,) = await asyncio.to_thread(app.blocking.submit_many, [greet("Bob")])
    await app.drain()
    assert (run.result(), await asyncio.to_thread(other.result)) == ("hello Ada", "hello Bob")
    assert app.blocking.run(greet, run.execution_id).state() is PublicState.COMPLETED
    assert await app.run(greet, run.execution_id).result() == "hello Ada"


async def test_a_blocking_result_may_be_awaited_while_it_is_made(app: LocalApp) -> None:
    run = app.blocking.submit(greet, "Ada")
    answer, _ = await asyncio.gather(asyncio.to_thread(run.result), app.drain())
    assert answer == "hello Ada"


async def test_an_app_is_adopted_by_what_is_submitted_without_a_loop() -> None:
    async with testing.engine() as app:
        run = app.blocking.submit(greet, "Ada")
        await app.drain()
        assert run.result() == "hello Ada"


# Handlers that wait for something outside


@pytest.mark.parametrize(
    ("task", "timeout_ms"), [(waits_two_minutes, 120_000), (waits_shortly, 200)]
)
async def test_a_stuck_handler_meets_its_timeout_by_the_clock(
    app: LocalApp, task: Task[[], None], timeout_ms: int
) -> None:
    before_ms, began_s = app.clock.now_ms(), time.monotonic()
    run = await app.submit(task)
    await app.drain(patience="500ms")
    assert time.monotonic() - began_s < 30
    with pytest.raises(ExecutionExpired, match="longer than its timeout of"):
        await run.result()
    assert app.clock.now_ms() - before_ms == timeout_ms


async def test_a_stuck_handler_without_a_timeout_is_named(app: LocalApp) -> None:
    run = await app.submit(waits_for_ever)
    other = await app.submit(greet, "Ada")
    with pytest.raises(OperationTimeout, match=r"waits_for_ever .*patience.*500 ms"):
        await app.drain(patience="500ms")
    assert await other.result() == "hello Ada"
    assert await run.state() is PublicState.WAITING


async def test_a_handler_that_waits_for_the_drain_it_is_in_is_named(app: LocalApp) -> None:
    await app.submit(asks_itself)
    with pytest.raises(OperationTimeout, match="asks_itself"):
        await app.drain(patience="500ms")


async def test_a_handler_that_keeps_its_thread_is_left_behind(app: LocalApp) -> None:
    gate.clear()
    await app.submit(blocks_a_thread)
    try:
        with pytest.raises(OperationTimeout, match="blocks_a_thread"):
            await app.drain(patience="100ms")
    finally:
        gate.set()
    assert not [task for task in asyncio.all_tasks() if "fp:" in task.get_name()]


async def test_a_cancelled_drain_ends_its_attempts(app: LocalApp) -> None:
    run = await app.submit(waits_two_minutes)
    drain = asyncio.create_task(app.drain(patience="1h"))
    await reached(run, PublicState.ACTIVE)
    drain.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drain
    assert not [task for task in asyncio.all_tasks() if "fp:" in task.get_name()]
    assert await run.state() is PublicState.WAITING


@shop.task(rate_limit="1/m")
async def limited(number: int) -> None: ...


@shop.task(budget="team")
async def paid() -> None: ...


numbers: list[int] = []


@shop.task
async def counted(number: int) -> None:
    numbers.append(number)


@shop.task
async def comes_again(ctx: Context) -> None:
    while True:
        await ctx.sleep("1s")


async def test_why_tells_of_the_limit_that_holds_work_up(app: LocalApp) -> None:
    await app.submit(limited, 1)
    second = await app.submit(limited, 2)
    await app.drain()
    assert str(await second.why()) == (
        "It waits for its limit 'limited': 1 of 1 started in the last 1m, room in 1m; 0 ahead."
    )
    with pytest.raises(ExecutionNotTerminal, match="It waits for its limit 'limited'"):
        await second.result()


async def test_skipping_time_comes_to_the_reset_of_a_budget_that_work_waits_for(
    app: LocalApp,
) -> None:
    await app.budgets.create("team", hard={"tokens": 5}, reset_every="1d")
    await app.budgets.report("team", {"tokens": 5})
    before_ms = app.clock.now_ms()
    run = await app.submit(paid)
    assert await app.drain() == 0
    assert await app.drain(skip_time=True) == 1
    await run.result()
    assert app.clock.now_ms() - before_ms == 24 * 60 * 60 * 1_000
    # Nothing waits for the next one.
    assert await app.drain(skip_time=True) == 0


async def test_what_was_submitted_first_begins_first(app: LocalApp) -> None:
    for number in range(20):
        await app.submit(counted, number)
    numbers.clear()
    await app.drain()
    assert numbers == list(range(20))


async def test_work_that_never_ends_is_named(
    app: LocalApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testing, "ROUNDS_MAX", 10)
    run = await app.submit(comes_again)
    with pytest.raises(OperationTimeout, match=f"of comes_again {run.execution_id[-36:]}"):
        await app.drain(skip_time=True)
