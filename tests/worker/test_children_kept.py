"""A child's result is there for whoever waits for it, however short it is to be kept."""

from flowfabric import App, Context, EngineConfig
from tests.apps import working


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
