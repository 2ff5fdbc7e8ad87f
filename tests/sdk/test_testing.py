"""The testing kit: nothing happens by itself, time included."""

import asyncio

import pytest

from flowfabric import App, Context, EngineConfig, Retry, testing
from flowfabric.core.states import PublicState
from flowfabric.errors import ExecutionNotTerminal, InvalidInput, PayloadTooLarge
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


async def test_the_settings_of_the_app_hold_in_its_test() -> None:
    config = EngineConfig(keep="3d", keep_failed="5d", payload_bytes_max=100, lanes=("mail",))
    app = App("sqlite:///never-opened.db", config=config)

    @app.task(retry=Retry(max_retries=0))
    async def echo(text: str) -> str:
        assert text
        return text

    async with testing.engine(app=app) as local:
        assert local.engine.config == config
        runs = [await local.submit(echo, text) for text in ("a", "")]
        await local.drain()
        with pytest.raises(PayloadTooLarge):
            await local.submit(echo, "x" * 100)
        left = []
        for _ in range(3):
            local.clock.advance("2d")
            await local.drain()
            left.append(len((await local.engine.find_executions()).executions))
        assert left == [2, 1, 0], runs


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


async def test_a_result_that_cannot_come_raises_at_once_and_says_why() -> None:
    async with testing.engine(app=shop) as app:
        run = await app.submit(remind, "Ada")
        with pytest.raises(ExecutionNotTerminal, match=r"here\. It is ready\. `await app\.drain"):
            await run.result()
        await app.drain()
        with pytest.raises(
            ExecutionNotTerminal, match=r"It waits 2d.* more .*drain\(skip_time=True\)"
        ):
            await run.result(timeout="1h")
        flow = app.flow("pair")
        node = flow.add(greet, "Bob")
        started = await flow.start()
        with pytest.raises(ExecutionNotTerminal):
            await started.wait()
        with pytest.raises(ExecutionNotTerminal):
            await started.result(node)
        await app.drain()
        assert (await started.wait(), await started.result(node)) == ("completed", "hello Bob")


async def test_a_result_may_be_awaited_while_it_is_made() -> None:
    async with testing.engine() as app:
        run = await app.submit(greet, "Ada")
        answer, _ = await asyncio.gather(run.result(), app.drain())
        assert answer == "hello Ada"


async def test_the_retries_of_a_step_take_their_time_from_the_clock() -> None:
    app = App()
    tries: list[int] = []

    @app.task
    async def fetch(ctx: Context) -> int:
        def unreliable() -> int:
            tries.append(1)
            if len(tries) < 4:
                raise ConnectionError("away")
            return len(tries)

        retry = Retry(max_retries=5, delay="1h", max_delay="5h", multiplier=2, jitter=False)
        return await ctx.step("fetch", unreliable, retry=retry)

    clock = SettableClock()
    async with testing.engine(clock) as local:
        before_ms = clock.now_ms()
        run = await local.submit(fetch)
        await local.drain()
        assert await run.result() == 4
        assert clock.now_ms() - before_ms == (1 + 2 + 4) * 3_600_000


async def test_schedules_exist_from_the_start() -> None:
    app = App()
    ran: list[str] = []

    @app.schedule(every="1h")
    async def hourly(ctx: Context) -> None:
        ran.append("hourly")

    clock = SettableClock()
    async with testing.engine(clock, app=app) as local:
        clock.advance("1h")
        assert await local.drain() == 1
    assert ran == ["hourly"]


async def test_the_app_of_what_is_submitted_is_adopted() -> None:
    async with testing.engine() as app:
        runs = [await app.submit(greet, "Ada"), *await app.submit_many([remind("Bob")])]
        await app.drain(skip_time=True)
        assert [await run.result() for run in runs] == ["hello Ada", "hello Bob"]
    async with testing.engine() as app:
        flow = app.flow("pair")
        node = flow.add(greet, "Bob")
        started = await flow.start()
        await app.drain()
        assert await started.result(node) == "hello Bob"


def test_adopting_replaces_nothing_and_may_be_repeated() -> None:
    one, other = App(), App()

    @one.task
    def work() -> int:
        return 1

    @other.task(name="work")
    def other_work() -> int:
        return 2

    other.add_schedule("nightly", other_work(), every="1h")
    with pytest.raises(
        InvalidInput, match=r"task 'work' is already that of .*\.work; .*other_work"
    ):
        one.adopt(other)
    assert (one.tasks, one.schedules) == ({"work": work}, [])
    third = App()
    third.adopt(other)
    third.adopt(other)
    assert (len(third.tasks), len(third.schedules)) == (1, 1)
    third.add_schedule("weekly", other_work(), every="7d")
    fourth = App()
    fourth.add_schedule("nightly", work(), every="1h")
    with pytest.raises(InvalidInput, match="schedule of both apps"):
        fourth.adopt(other)
