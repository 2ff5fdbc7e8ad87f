"""A child's result is there for whoever waits for it, however short it is to be kept."""

from collections import Counter

from flowfabric import App, Context, DoNotRetry, EngineConfig
from flowfabric.core.states import PublicState
from flowfabric.errors import ExecutionFailed
from tests.apps import reached, working


async def test_a_result_that_is_not_to_be_kept_reaches_whoever_waits_for_it(
    store_url: str,
) -> None:
    app = App(store_url, config=EngineConfig(keep=0, keep_failed=0))

    @app.task
    async def child(number: int) -> int:
        return number * 10

    # It is the only one whose result somebody outside asks for, who may come too late.
    @app.task(keep="1d")
    async def parent(ctx: Context) -> list[int]:
        children = [await ctx.submit(child, number) for number in (1, 2, 3)]
        return [await each.result() for each in children]

    async with app, working(app, concurrency=1):
        run = await app.submit(parent)
        assert await run.result(timeout="20s") == [10, 20, 30]


async def test_a_child_whose_result_was_seen_does_not_run_again_when_it_is_no_longer_kept(
    store_url: str,
) -> None:
    app = App(store_url, config=EngineConfig(keep=0, keep_failed=0))
    ran: Counter[str] = Counter()

    @app.task
    async def child(name: str) -> str:
        ran[name] += 1
        if name == "bad":
            raise DoNotRetry("broken")
        return name

    @app.task(keep="1d")
    async def parent(ctx: Context) -> list[str]:
        first = await (await ctx.submit(child, "good")).result()
        try:
            second = await (await ctx.submit(child, "bad")).result()
        except ExecutionFailed as error:
            second = error.reason
        # Signals come days later, as a rule.
        await ctx.wait_for_signal("go")
        return [first, second]

    async with app, working(app, concurrency=1):
        run = await app.submit(parent)
        await reached(run, PublicState.SUSPENDED)
        await app.engine.trim_retention()
        await run.signal("go")
        assert await run.result(timeout="20s") == ["good", "broken"]
    assert ran == {"good": 1, "bad": 1}
