"""A database that goes away while a handler works: nothing of that counts against its run."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from flowfabric import App, Context
from flowfabric.core.states import PublicState
from tests.apps import working
from tests.silence import Network

# Longer than any test has patience: none of them is saved by a lease that expires.
LEASE_TTL = "1h"


@pytest.fixture
async def network(postgres_database: str) -> AsyncIterator[Network]:
    async with Network(postgres_database).open() as opened:
        yield opened


async def say_how_far(app: App, ctx: Context) -> object:
    await ctx.progress(50, "half")
    return None


async def submit_a_child(app: App, ctx: Context) -> object:
    child = await ctx.submit(app.tasks["echo"](7))
    return await child.result()


async def make_a_waitpoint(app: App, ctx: Context) -> object:
    return str(await ctx.waitpoint("go"))


async def take_a_step(app: App, ctx: Context) -> object:
    return await ctx.step("double", lambda: 14)


async def submit_through_the_app(app: App, ctx: Context) -> object:
    return (await app.submit(app.tasks["echo"](7))).execution_id


VERBS = (say_how_far, submit_a_child, make_a_waitpoint, take_a_step, submit_through_the_app)


@pytest.mark.parametrize("verb", VERBS)
async def test_an_outage_under_a_verb_does_not_count_against_the_run(
    network: Network, verb: Callable[[App, Context], Awaitable[object]]
) -> None:
    app = App(network.url)
    begun, go_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def echo(number: int) -> int:
        return number

    @app.task
    async def work(ctx: Context) -> str:
        begun.set()
        await go_on.wait()
        await verb(app, ctx)
        return "done"

    async with app, working(app, lease_ttl=LEASE_TTL):
        run = await app.submit(work)
        await begun.wait()
        network.go_down()
        go_on.set()
        await network.was_tried(5)
        network.heal()
        assert await run.result(timeout="20s") == "done"
        shown = await run.snapshot()
        assert (shown.public_state, shown.retry_count, shown.lease_reclaim_count) == (
            PublicState.COMPLETED,
            0,
            0,
        )
