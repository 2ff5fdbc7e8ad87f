"""The testing kit: nothing happens by itself, time included."""

import asyncio

import pytest

from flowfabric import App, Context, Retry, testing
from flowfabric.core.states import PublicState
from flowfabric.testing import SettableClock

pytest_plugins = ["pytester"]

shop = App("sqlite:///never-opened.db")


@shop.task
async def greet(name: str) -> str:
    return f"hello {name}"


@shop.task(retry=Retry(max_retries=3, delay="1m", jitter=False))
async def remind(ctx: Context, name: str) -> str:
    await ctx.sleep("2d")
    if ctx.retry_count == 0:
        raise ConnectionError("mail server away")
    child = await ctx.submit(greet, name)
    return await child.result()


async def test_work_runs_when_drained_and_not_before() -> None:
    async with testing.engine(app=shop) as app:
        run = await app.submit(greet, "Ada")
        assert await run.state() is PublicState.WAITING
        assert await app.drain() == 1
        assert await run.result(timeout=1) == "hello Ada"


async def test_sleeps_and_retries_wait_for_the_clock() -> None:
    clock = SettableClock()
    async with testing.engine(clock, app=shop) as app:
        run = await app.submit(remind, "Ada")
        await app.drain()
        assert await run.state() is PublicState.DELAYED
        clock.advance("2d")
        await app.drain()
        assert await run.state() is PublicState.DELAYED
        clock.advance("1m")
        await app.drain()
        assert await run.result(timeout=1) == "hello Ada"


async def test_time_can_be_skipped_and_submissions_be_looked_at() -> None:
    async with testing.engine(app=shop) as app:
        run = await app.submit(remind, "Bob")
        await app.drain(skip_time=True)
        assert await run.result(timeout=1) == "hello Bob"
        assert await app.submitted(greet) == [{"name": "Bob"}]
        assert await app.submitted(remind) == [{"name": "Bob"}]


async def test_two_apps_in_one_test_share_nothing() -> None:
    async with testing.engine(app=shop) as one, testing.engine(app=shop) as other:
        await asyncio.gather(one.submit(greet, "a"), one.submit(greet, "b"))
        assert (await one.drain(), await other.drain()) == (2, 0)


async def test_the_plugin_offers_an_app_and_its_clock(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        async def test_it(flowfabric_app, flowfabric_clock):
            @flowfabric_app.task
            async def work() -> int:
                return 7

            before_ms = flowfabric_clock.now_ms()
            run = await flowfabric_app.submit(work)
            assert await flowfabric_app.drain() == 1
            assert await run.result(timeout=1) == 7
            assert flowfabric_clock.now_ms() == before_ms
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:randomly", "-o", "asyncio_mode=auto")
    result.assert_outcomes(passed=1)
