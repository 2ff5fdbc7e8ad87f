"""`app.events`: what happens to an app's executions."""

import asyncio
import re

import pytest

from flowfabric import App, Context, testing
from flowfabric.engine.reads import EVERYTHING
from flowfabric.errors import InvalidInput, Unavailable
from tests.apps import traced_memory, working


async def test_events_are_told_as_they_happen_and_again_after_a_cursor(waiting_app: App) -> None:
    @waiting_app.task
    async def work() -> None: ...

    @waiting_app.task
    async def other() -> None: ...

    async with working(waiting_app), asyncio.timeout(20):
        events = waiting_app.events(task=work, category="completion")
        first = asyncio.ensure_future(anext(events))
        await asyncio.wait([first], timeout=0.1)
        await (await waiting_app.submit(other)).result()
        run = await waiting_app.submit(work)
        told = await first
        assert (told.event.execution_id, told.event.event_type) == (run.execution_id, "success")
        again = await waiting_app.submit(work)
        assert (await anext(events)).event.execution_id == again.execution_id
        resumed = waiting_app.events(after=told.cursor, task="work", category="completion")
        assert (await anext(resumed)).event.execution_id == again.execution_id


async def test_an_app_sees_its_own_namespace_alone(store_url: str) -> None:
    async with App(store_url, namespace="a", migrate=True) as a, App(store_url, namespace="b") as b:

        @a.task
        async def work() -> None: ...

        @b.task(name="work")
        async def same() -> None: ...

        events = a.events(after="start")
        await (await b.submit(same)).cancel()
        run = await a.submit(work)
        await run.cancel()
        async with asyncio.timeout(20):
            assert (await anext(events)).event.execution_id == run.execution_id


async def test_a_place_in_the_log_that_is_none_is_refused_with_those_there_are() -> None:
    problem = "after: must be 'now', 'start', or the cursor of an event (got 'noon')"
    async with testing.engine() as app:
        with pytest.raises(InvalidInput, match=re.escape(problem)):
            await anext(aiter(app.events(after="noon")))


async def test_a_closed_app_tells_nothing_until_it_is_opened(waiting_app: App) -> None:
    async with waiting_app:
        pass
    with pytest.raises(Unavailable, match="has been closed"):
        await anext(aiter(waiting_app.events(after="start")))


async def test_in_tests_events_are_read_without_waiting() -> None:
    async with testing.engine() as app:

        @app.task
        async def work(ctx: Context) -> None:
            await ctx.sleep("1h")

        run = await app.submit(work)
        await app.drain()
        types = [told.event.event_type async for told in app.events(after="start")]
        assert types == ["acquired", "revoked"]
        last = [told async for told in app.events(after="start", execution_id=run.execution_id)][-1]
        await app.drain(skip_time=True)
        types = [told.event.event_type async for told in app.events(after=last.cursor)]
        assert types == ["acquired", "revoked", "success"]
        assert [told async for told in app.events()] == []
        with pytest.raises(InvalidInput):
            await anext(app.events(after="later"))


EVENTS = 3_000


async def test_subscribers_that_stop_reading_hold_a_page_each_and_delay_nobody(
    waiting_app: App,
) -> None:
    @waiting_app.task
    async def work() -> None: ...

    await waiting_app.open()
    (first, *others) = await waiting_app.submit_many([work() for _ in range(EVENTS + 1)])
    async with asyncio.timeout(60):
        slow = [waiting_app.events(after="start") for _ in range(3)]
        await first.cancel()
        for events in slow:
            assert (await anext(events)).event.execution_id == first.execution_id
        with traced_memory() as growth:
            await waiting_app.engine.cancel_matching(EVERYTHING, reason="enough")
            quick = waiting_app.events(after="start")
            for _ in range(EVENTS + 1):
                await anext(quick)
            # An event takes about a kilobyte.
            assert growth() < EVENTS * 1_000 / 4
        expected = {each.execution_id for each in others}
        for events in slow:
            assert {(await anext(events)).event.execution_id for _ in others} == expected
