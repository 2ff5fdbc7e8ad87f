"""The app without an event loop."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowfabric import App
from flowfabric.core.states import PublicState
from flowfabric.errors import ExecutionCancelled, OperationTimeout


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
        OperationTimeout, match=r"timed out after \d+ ms: No worker has asked lately"
    ):
        run.result(timeout="10ms")
    run.cancel("enough")
    with pytest.raises(ExecutionCancelled, match="enough"):
        run.result(timeout=20)
    again = app.blocking.run(greet, run.execution_id)
    assert again.state() is PublicState.CANCELLED


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
    runs = app.blocking.submit_many([greet("a"), greet("b")], idempotency_key="same")
    assert len({run.execution_id for run in runs}) == 1


def test_it_can_be_closed_and_used_again(app: App) -> None:
    greet = app.tasks["greet"]
    first = app.blocking.submit(greet("a"))
    app.blocking.close()
    assert app.blocking.run(greet, first.execution_id).state() is PublicState.WAITING
