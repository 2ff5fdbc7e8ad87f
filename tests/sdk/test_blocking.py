"""The app without an event loop."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfabric import App, testing
from flowfabric.blocking import BackgroundLoop
from flowfabric.core.states import PublicState
from flowfabric.errors import (
    ExecutionCancelled,
    FlowFabricError,
    InvalidInput,
    OperationTimeout,
    Unavailable,
)


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    app = App(f"sqlite:///{tmp_path}/shop.db")

    @app.task
    async def greet(name: str) -> str:
        return f"hello {name}"

    yield app
    app.blocking.close()


def test_submitting_waiting_cancelling_and_asking_need_no_loop(app: App) -> None:
    greet = app.tasks["greet"]
    run = app.blocking.submit(greet("Ada"))
    assert run.state() is PublicState.WAITING
    assert run.why().cause == "no_worker"
    with pytest.raises(
        OperationTimeout, match=r"timed out after \d+ ms: No running worker has a task"
    ):
        run.result(timeout="10ms")
    run.cancel("enough")
    with pytest.raises(ExecutionCancelled, match="enough"):
        run.result(timeout=20)
    again = app.blocking.run(greet, run.execution_id)
    assert again.state() is PublicState.CANCELLED


async def test_waiting_for_a_result_does_not_hold_up_an_event_loop(app: App) -> None:
    run = app.blocking.submit(app.tasks["greet"], "Ada")
    with pytest.raises(InvalidInput, match=r"app\.blocking…result: waits, and would hold up"):
        run.result()


def test_many_threads_share_it(app: App) -> None:
    greet = app.tasks["greet"]
    ids: list[str] = []

    def view(number: int) -> None:
        ids.append(app.blocking.submit(greet(f"thread {number}")).execution_id)

    threads = [threading.Thread(target=view, args=[number]) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 20
    runs = app.blocking.submit_many([greet("a"), greet("b")])
    assert len({run.execution_id for run in runs}) == 2
    with pytest.raises(InvalidInput, match=r"^idempotency_key: belongs to one run"):
        app.blocking.submit_many([greet("a"), greet("b")], idempotency_key="same")


def test_it_can_be_closed_and_used_again(app: App) -> None:
    greet = app.tasks["greet"]
    first = app.blocking.submit(greet("a"))
    app.blocking.close()
    assert app.blocking.run(greet, first.execution_id).state() is PublicState.WAITING


def test_events_are_told_from_the_moment_they_are_asked_for(store_url: str) -> None:
    app = App(store_url)

    @app.task
    async def work() -> None: ...

    with app.blocking as blocking:
        blocking.submit(work, tags={"team": "early"})
        events = blocking.events()
        run = blocking.submit(work, tags={"team": "sport"})
        run.cancel("enough")
        told = [next(events), next(events)]
        assert [each.event.event_type for each in told] == ["attached", "cancelled"]
        ended = blocking.events(after=told[0].cursor, task=work, tag=("team", "sport"))
        assert next(ended) == told[1]
        with pytest.raises(InvalidInput, match="after: must be 'now', 'start', or the cursor"):
            blocking.events(after="noon")


def test_closing_ends_the_wait_for_an_event(store_url: str) -> None:
    blocking = App(store_url).blocking
    events = blocking.events()
    refused: list[FlowFabricError] = []

    def wait() -> None:
        try:
            next(events)
        except FlowFabricError as error:
            refused.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    blocking.close()
    waiting.join(timeout=20)
    assert [type(each) for each in refused] == [Unavailable]


async def test_in_tests_events_end_where_the_log_does() -> None:
    async with testing.engine() as app:

        @app.task
        async def work() -> None: ...

        await app.submit(work)
        await app.drain()
        told = await asyncio.to_thread(lambda: list(app.blocking.events(after="start")))
        assert [each.event.event_type for each in told] == ["acquired", "revoked", "success"]


def test_what_is_asked_of_a_closed_one_is_refused(app: App) -> None:
    run = app.blocking.submit(app.tasks["greet"]("Ada"))
    events = app.blocking.events()
    app.blocking.close()
    with pytest.raises(Unavailable, match="closed"):
        next(events)
    with pytest.raises(Unavailable, match="closed"):
        run.state()


def test_tasks_that_clean_up_in_others_end_with_the_loop() -> None:
    started, ended = threading.Event(), threading.Event()
    tasks: list[asyncio.Task[None]] = []

    async def clean_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            tasks.append(asyncio.create_task(clean_up()))
            await asyncio.sleep(0)

    background = BackgroundLoop()
    waited = background.begin(work())
    assert started.wait(20)
    background.stop()
    assert waited.cancelled()
    assert ended.is_set()
    assert [each.cancelled() for each in tasks] == [True]


def test_a_loop_may_be_stopped_again_while_it_ends() -> None:
    background = BackgroundLoop()
    stopping = [threading.Thread(target=background.stop) for _ in range(20)]
    for each in stopping:
        each.start()
    for each in stopping:
        each.join()
    background.stop()


SCRIPT = """
import sys
from flowfabric import App

app = App(sys.argv[1])

@app.task(concurrency=2)
def square(number: int) -> int:
    return number * number

print(app.blocking.submit(square, 3).state())
"""


def test_a_script_that_leaves_it_open_ends_without_a_complaint(store_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, store_url],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.stdout, done.stderr) == ("waiting\n", "")
