"""A task that stores a quote, whose type has another field in the next deploy."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import NamedTuple

import pydantic

from flowfabric import App, Context
from flowfabric.core.states import PublicState
from flowfabric.errors import InvalidInput
from tests.apps import reached, working


class Quote(pydantic.BaseModel):
    price: int


class Grown(Quote):
    currency: str


async def quote() -> Quote:
    return Quote(price=5)


async def grown() -> Grown:
    return Grown(price=5, currency="EUR")


class Version(NamedTuple):
    """What the code of a deploy takes quotes for."""

    kind: type[Quote]
    function: Callable[[], Coroutine[object, object, Quote]]


OLD, NEW = Version(Quote, quote), Version(Grown, grown)


async def asked_in_a_step(ctx: Context, version: Version, app: App) -> Quote:
    return await ctx.step("quote", version.function)


async def asked_by_signal(ctx: Context, version: Version, app: App) -> Quote:
    return (await ctx.wait_for_signal("quote", type=version.kind)).payload


async def asked_of_a_child(ctx: Context, version: Version, app: App) -> Quote:
    child = await ctx.submit(app.tasks["quote"]())
    answer = await child.result()
    assert isinstance(answer, Quote)
    return answer


Asking = Callable[[Context, Version, App], Awaitable[Quote]]


class Quotes:
    """A task that asks for a quote, then waits to be paid."""

    def __init__(self, url: str, ask: Asking) -> None:
        self._url = url
        self._ask = ask
        self.asked = asyncio.Event()

    @asynccontextmanager
    async def deployed(self, version: Version) -> AsyncIterator[App]:
        app = App(self._url)
        app.task(name="quote")(version.function)

        @app.task
        async def order(ctx: Context) -> str:
            try:
                found = await self._ask(ctx, version, app)
            except InvalidInput:
                return "the handler cannot mend it"
            await ctx.step("note", self.asked.set)
            await ctx.wait_for_signal("paid")
            return repr(found)

        async with app, working(app):
            yield app

    async def in_flight(self) -> str:
        async with self.deployed(OLD) as app:
            run = await app.submit(app.tasks["order"]())
            await run.signal("quote", Quote(price=5))
            await self.asked.wait()
            await reached(run, PublicState.SUSPENDED)
            return run.execution_id
