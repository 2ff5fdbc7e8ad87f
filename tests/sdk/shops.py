"""A task whose code changes from deploy to deploy."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from flowfabric import App, Context, Run
from flowfabric.core.states import PublicState
from tests.apps import blocked, reached, working


class Shop:
    """A task `order` whose code changes from deploy to deploy, and the effects it has had."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.done: Counter[str] = Counter()

    async def effect(self, name: str, *details: str) -> str:
        self.done[name] += 1
        return name

    @asynccontextmanager
    async def deployed(self, handler: Callable[..., Awaitable[str]]) -> AsyncIterator[App]:
        """A worker with this code, as long as the context lasts."""
        app = App(self.url)
        app.task(name="order")(handler)
        async with app, working(app):
            yield app

    async def old(self, ctx: Context) -> str:
        await ctx.step("reserve", self.effect, "reserve")
        await ctx.step("charge", self.effect, "charge")
        await ctx.wait_for_signal("packed")
        return await ctx.step("ship", self.effect, "ship")

    async def in_flight(self, handler: Callable[..., Awaitable[str]] | None = None) -> str:
        """The id of a run that has come to its signal, which is there, and has no worker."""
        app = App(self.url)
        app.task(name="order")(handler or self.old)
        async with app:
            run = await app.submit(app.tasks["order"]())
            async with working(app):
                await reached(run, PublicState.SUSPENDED)
            await run.signal("packed")
            return run.execution_id

    async def finishes(self, handler: Callable[..., Awaitable[str]], execution_id: str) -> object:
        async with self.deployed(handler) as app:
            return await run_of(app, execution_id).result(timeout="20s")

    async def blocked(self, handler: Callable[..., Awaitable[str]], execution_id: str) -> str:
        """What `why` says of a run that this code has blocked."""
        before = self.done.copy()
        async with self.deployed(handler) as app:
            run = run_of(app, execution_id)
            sentence = await blocked(run)
            seen = await run.snapshot()
        assert self.done == before, "nothing ran"
        assert (seen.retry_count, seen.total_attempt_count) == (0, 1)
        assert f"flowfabric accept {execution_id[-36:]}" in sentence
        return sentence

    async def accepted(self, handler: Callable[..., Awaitable[str]], execution_id: str) -> object:
        """The result, once somebody has accepted the change."""
        async with self.deployed(handler) as app:
            run = run_of(app, execution_id)
            await blocked(run)
            await run.accept_changes()
            return await run.result(timeout="20s")


def run_of(app: App, execution_id: str) -> Run[object]:
    return app.run(app.tasks["order"], execution_id)


async def fetch(shop: Shop, ctx: Context, who: str) -> str:
    return await ctx.step("fetch", shop.effect, f"fetch {who}")


async def branched(shop: Shop, ctx: Context) -> str:
    got = await asyncio.gather(fetch(shop, ctx, "ada"), fetch(shop, ctx, "bob"))
    await ctx.wait_for_signal("packed")
    return ", ".join(got)
