"""Who waits for something that only people can change is told once, on the log."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfabric import App, Context, Run, Task, testing
from flowfabric.core.ids import uuid_of
from flowfabric.core.states import PublicState
from flowfabric.errors import ExecutionNotTerminal, OperationTimeout
from tests.apps import PATIENCE_S, reached, working

START = "start one that does (flowfabric worker module:app"


@pytest.fixture
def app(waiting_app: App, monkeypatch: pytest.MonkeyPatch) -> App:
    for module in ("flowfabric.run", "flowfabric.flows.run"):
        monkeypatch.setattr(f"{module}.TELL_AFTER_S", 0.0)
        monkeypatch.setattr(f"{module}.ASK_AGAIN_S", 0.05)
    monkeypatch.setattr("flowfabric.run.ASK_GAP_S", 0.0)

    return waiting_app


def declared(app: App) -> Task[[], int]:
    @app.task
    def task() -> int:
        return 1

    return task


class Listener(logging.Handler):
    """What the callers of this event loop are told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.put_nowait(record.getMessage())

    async def next(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return await self.lines.get()


@pytest.fixture
def told() -> Iterator[Listener]:
    listener = Listener()
    log = logging.getLogger("flowfabric.run")
    log.addHandler(listener)
    yield listener
    log.removeHandler(listener)


async def given_up(*waits: "asyncio.Task[object]") -> None:
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


def waiting(run: Run[object]) -> "asyncio.Task[object]":
    return asyncio.create_task(run.result())


async def test_a_caller_is_told_that_no_worker_is_there(app: App, told: Listener) -> None:
    run = await app.submit(declared(app), execution_id="order-42", lane="mail")
    wait = waiting(run)
    assert await told.next() == (
        "still waiting for order-42: No running worker has a task 'task' in lane 'mail':"
        f" {START} --lane mail)."
    )
    async with working(app, lanes={"mail": 1}):
        assert await wait == 1


async def test_many_who_wait_for_the_same_are_told_once(app: App, told: Listener) -> None:
    task = declared(app)
    first = await app.submit(task)
    waits = [waiting(each) for each in (first, *await app.submit_many([task()] * 9), first)]
    last = await app.submit(task, lane="mail")
    lines = [await told.next()]
    waits.append(waiting(last))
    lines.append(await told.next())
    await given_up(*waits)
    assert told.lines.empty()
    assert [line.partition(": ")[0] for line in lines] == [
        f"still waiting for {uuid_of(each.execution_id)}" for each in (first, last)
    ]


async def test_a_paused_lane_is_told_and_a_queue_is_not(app: App, told: Listener) -> None:
    @app.task(concurrency=1)
    async def alone() -> None:
        await asyncio.Event().wait()

    paused = await app.submit(declared(app), lane="mail")
    await app.engine.pause_lane("mail")
    async with working(app, drain_timeout="1ms"):
        running, held_up = await app.submit_many([alone()] * 2)
        await reached(running, PublicState.ACTIVE)
        waits = [waiting(each) for each in (running, held_up, paused)]
        line = await told.next()
        await given_up(*waits)
    assert told.lines.empty()
    assert line == (
        f"still waiting for {uuid_of(paused.execution_id)}: Its lane 'mail' is paused: resume the"
        " lane (flowfabric lanes resume mail)."
    )


async def test_who_waits_for_a_flow_is_told(app: App, told: Listener) -> None:
    task = declared(app)

    @app.task
    def count(results: list[int]) -> int:
        return len(results)

    flow = app.flow("nightly", flow_id="tonight")
    last = flow.add(count, join=[flow.add(task)])
    run = await flow.start()
    waits = [asyncio.create_task(run.wait()), asyncio.create_task(run.result(last))]
    lines = [await told.next(), await told.next()]
    async with working(app):
        await asyncio.gather(*waits)
    of_flow, of_node = sorted(lines, key=lambda line: "still waiting for flow" not in line)
    assert of_flow.endswith(f"No running worker has a task 'task' in lane 'default': {START}).")
    assert of_node.endswith("No worker is there: start one (flowfabric worker module:app).")


async def test_who_reads_a_stream_is_told(app: App, told: Listener) -> None:
    run = await app.submit(declared(app))

    async def read() -> list[str]:
        return [frame.text async for frame in run.stream()]

    reader = asyncio.create_task(read())
    assert "No running worker has a task 'task' in lane 'default'" in await told.next()
    async with working(app):
        assert await reader == []


async def test_a_caller_is_told_when_it_is_something_else(app: App, told: Listener) -> None:
    run = await app.submit(declared(app), lane="mail")
    wait = waiting(run)
    assert "No running worker has a task 'task' in lane 'mail'" in await told.next()
    await app.engine.pause_lane("mail")
    assert "Its lane 'mail' is paused" in await told.next()
    await app.engine.resume_lane("mail")
    assert "No running worker has a task 'task' in lane 'mail'" in await told.next()
    await given_up(wait)
    assert told.lines.empty()


async def test_who_waits_for_a_flow_is_told_when_it_is_something_else(
    app: App, told: Listener
) -> None:
    flow = app.flow("nightly")
    flow.add(declared(app), lane="mail")
    run = await flow.start()
    wait: asyncio.Task[object] = asyncio.create_task(run.wait())
    assert "No running worker has a task 'task' in lane 'mail'" in await told.next()
    await app.engine.pause_lane("mail")
    assert "Its lane 'mail' is paused" in await told.next()
    await given_up(wait)
    assert told.lines.empty()


async def test_who_waits_for_a_parent_is_told_what_its_child_waits_for(
    app: App, told: Listener
) -> None:
    child = declared(app)

    @app.task
    async def parent(ctx: Context) -> int:
        asked = await ctx.submit(child, lane="mail", execution_id="errand")
        return await asked.result()

    @app.task
    async def grandparent(ctx: Context) -> int:
        return await (await ctx.submit(parent)).result()

    async with working(app):
        run = await app.submit(grandparent)
        await reached(run, PublicState.WAITING_CHILDREN)
        wait = waiting(run)
        line = await told.next()
        why = await run.why()
        await given_up(wait)
    assert line.endswith(
        f"About errand: No running worker has a task 'task' in lane 'mail': {START} --lane mail)."
    )
    assert why.needs_somebody
    assert why.detail["held_up_cause"] == "no_worker"


async def test_a_wait_for_a_flow_that_times_out_says_why(app: App) -> None:
    @app.task
    def count(results: list[int]) -> int:
        return len(results)

    flow = app.flow("nightly", flow_id="tonight")
    flow.add(count, join=[flow.add(declared(app), lane="mail")])
    run = await flow.start()
    with pytest.raises(OperationTimeout, match="in lane 'mail': start one that does") as caught:
        await run.wait(timeout="1ms")
    assert str(caught.value).startswith("waiting for flow tonight timed out after ")


async def test_the_kit_for_tests_says_nothing(app: App, told: Listener) -> None:
    async with testing.engine(app=app) as local:
        run = await local.submit(declared(app))
        with pytest.raises(ExecutionNotTerminal):
            await run.result()
        await asyncio.sleep(0)
    assert told.lines.empty()


async def test_a_wait_that_ends_first_asks_nothing(waiting_app: App, told: Listener) -> None:
    @waiting_app.task
    def task() -> None: ...

    run = await waiting_app.submit(task)
    with pytest.raises(OperationTimeout):
        await run.result(timeout="1ms")
    assert told.lines.empty()


PROGRAM = """
from flowfabric import App

app = App("sqlite:///shop.db")

@app.task
def greet(name: str) -> str: ...

app.blocking.submit(greet, "Ada").result(timeout="6s")
"""


def test_a_program_that_configures_no_log_is_told_on_standard_error(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.stderr.startswith("still waiting for ")
    assert f"in lane 'default': {START}).\nTraceback" in ran.stderr
