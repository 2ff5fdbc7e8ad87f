"""What a closed app refuses, and that it can be opened again."""

import asyncio
import logging

import pytest

from flowfabric import App, WorkerSettings
from flowfabric.errors import Unavailable


async def test_a_closed_app_submits_nothing_until_it_is_opened_again(store_url: str) -> None:
    app = App(store_url)

    @app.task
    async def echo(number: int) -> int:
        return number

    first = await app.submit(echo, 1)
    await app.close()
    closed = "app: it has been closed; `async with app:` opens it again"
    with pytest.raises(Unavailable, match=closed):
        await app.submit(echo, 2)
    with pytest.raises(Unavailable, match=closed):
        await app.submit_many([echo(2)])
    with pytest.raises(Unavailable, match=closed):
        await app.signals.pending()
    flow = app.flow("later")
    flow.add(echo, 2)
    with pytest.raises(Unavailable, match=closed):
        await flow.start()
    async with app:
        second = await app.submit(echo, 3)
        found = (await app.engine.find_executions()).executions
        assert {each.execution_id for each in found} == {first.execution_id, second.execution_id}


@pytest.mark.parametrize("told", [False, True])
async def test_an_app_that_is_closed_stops_its_worker_first(
    store_url: str, caplog: pytest.LogCaptureFixture, told: bool
) -> None:
    app, stop = App(store_url), asyncio.Event()
    begun, go_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def work() -> str:
        begun.set()
        await go_on.wait()
        return "done"

    async with app:
        settings = WorkerSettings(worker_instance_id="w-1")
        worker = asyncio.create_task(app.run_worker(settings=settings, stop=stop, signals=False))
        run = await app.submit(work)
        await begun.wait()
        if told:
            stop.set()
            for _ in range(5):
                await asyncio.sleep(0)
        with caplog.at_level(logging.WARNING):
            closing = asyncio.create_task(app.close())
            await asyncio.sleep(0)
            go_on.set()
            await closing
        assert worker.done()
    async with app:
        assert await app.run(work, run.execution_id).result(timeout="20s") == "done"
    first = "the app is closed while its worker w-1 runs, which stops first"
    assert caplog.messages == ([] if told else [first])
