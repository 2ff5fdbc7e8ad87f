"""An app may be used by one event loop after another."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from flowfabric import App, FlowRun, Node, Run
from flowfabric.core.states import PublicState
from flowfabric.errors import Unavailable
from tests.apps import working


@pytest.fixture(autouse=True)
def leave_nothing_to_other_tests() -> Iterator[None]:
    yield
    gc.collect()


def test_runs_and_flows_are_found_by_the_next_event_loop(store_url: str) -> None:
    app = App(store_url, migrate=True)

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    async def submit() -> tuple[Run[int], FlowRun, Node[int]]:
        flow = app.flow("pair")
        node = flow.add(double, 3)
        return await app.submit(double, 2), await flow.start(), node

    run, flow, node = asyncio.run(submit())

    async def look() -> None:
        assert await app.run(double, run.execution_id).state() is PublicState.WAITING
        assert await run.state() is PublicState.WAITING
        assert (await flow.summary()).total_members == 1

    asyncio.run(look())

    async def finish() -> None:
        found = app.run(double, run.execution_id)
        async with working(app):
            assert (await found.result("20s"), await run.result("20s")) == (4, 4)
            assert await app.flow_run(flow.flow_id).result(node, "20s") == 6
            assert await flow.result(node, "20s") == 6
        assert len((await found.snapshot()).attempts) == 1
        assert (await run.why()).sentence
        await app.close()

    asyncio.run(finish())


async def test_a_run_goes_on_when_its_app_is_opened_again(store_url: str) -> None:
    async with App(store_url, migrate=True) as app:

        @app.task
        async def echo() -> None: ...

        run = await app.submit(echo)
    with pytest.raises(Unavailable, match="app: it has been closed"):
        await run.state()
    async with app:
        assert await run.state() is PublicState.WAITING


def test_an_event_loop_that_ends_before_its_app_leaves_nothing_open(
    store_url: str, recwarn: pytest.WarningsRecorder
) -> None:
    app = App(store_url, migrate=True)

    @app.task
    async def echo() -> None: ...

    async def submit() -> None:
        await app.submit(echo)
        # What is still to be told to others is told when the loop closes the app.
        app.engine.store.hint("late")

    asyncio.run(submit())
    gc.collect()
    assert [str(each.message) for each in recwarn if each.category is ResourceWarning] == []
