"""Waits that are refused: beside one that waits for signals, or because nothing could meet them."""

import asyncio

import pytest

from flowfabric import App, Context, count, testing
from flowfabric.core import bounds
from flowfabric.core.conditions import Condition
from flowfabric.core.ids import uuid_of
from flowfabric.core.states import PublicState
from flowfabric.errors import InvalidInput, SignalLimitExceeded
from flowfabric.worker import signals
from tests.apps import reached, working


@pytest.mark.parametrize("what", ["sleep", "signal", "child"])
async def test_a_wait_that_is_refused_beside_another_may_be_caught(what: str) -> None:
    async with testing.engine() as app:
        told: list[str] = []

        @app.task(lane="nobody")
        async def child() -> None: ...

        async def wait(ctx: Context) -> None:
            if what == "sleep":
                await ctx.sleep("1h")
            elif what == "signal":
                await ctx.wait_for_signal("stop")
            else:
                await (await ctx.submit(child)).result()

        @app.task
        async def both(ctx: Context) -> object:
            first = asyncio.create_task(ctx.wait_for_signal("go"))
            for _ in range(10):
                await asyncio.sleep(0)
            try:
                await wait(ctx)
            except InvalidInput as error:
                told.append(error.field)
            return (await first).payload

        run = await app.submit(both)
        await app.drain()
        await run.signal("go", 1)
        await app.drain()
        assert await run.result(timeout=1) == 1
        assert told == ["wait", "wait"], "later runs are told the same"


TWO_OF_X = "wait_for: needs signals at 2 different waitpoints of 'x', and only 1 exists; create the"


@pytest.mark.parametrize("beside", [False, True])
async def test_a_wait_for_more_waitpoints_than_there_are_is_refused_where_it_is_written(
    app: App, beside: bool
) -> None:
    told: list[str] = []

    @app.task
    async def work(ctx: Context) -> str:
        busy = asyncio.create_task(ctx.step("busy", asyncio.sleep, 0.2)) if beside else None
        await ctx.waitpoint("x")
        try:
            await ctx.wait_for(count(2, "x", distinct="waitpoints"), timeout="1s")
        except InvalidInput as error:
            told.append(str(error))
        if busy is not None:
            await busy
        await ctx.waitpoint("x")
        await ctx.wait_for_signal("go")
        return "went on"

    async with working(app):
        run = await app.submit(work)
        await reached(run, PublicState.SUSPENDED)
        await run.signal("go")
        assert await run.result(timeout="20s") == "went on"
    assert len(told) == 2, "later runs, which have a second waitpoint, are told the same"
    assert {TWO_OF_X in each for each in told} == {True}


async def test_a_wait_for_as_many_waitpoints_as_there_are_is_not_refused(app: App) -> None:
    @app.task
    async def work(ctx: Context) -> list[str]:
        tokens = [await ctx.waitpoint("x"), await ctx.waitpoint("x")]
        await ctx.step("send", send, [each.reveal() for each in tokens])
        found = await ctx.wait_for(count(2, "x", distinct="waitpoints"))
        return sorted(str(each.payload) for each in found)

    async def send(tokens: list[str]) -> None:
        for number, token in enumerate(tokens):
            await app.signals.deliver(token, "x", number)

    async with working(app):
        run = await app.submit(work)
        assert await run.result(timeout="20s") == ["0", "1"]


@pytest.mark.parametrize(
    ("conditions", "problem"),
    [
        (tuple(f"s{n}" for n in range(65)), "wait_for: may name at most 64 signals (got 65)"),
        ((5,), "wait_for: takes signal names and conditions"),
    ],
)
async def test_a_wait_that_cannot_be_is_refused_in_the_words_of_its_caller(
    conditions: tuple[str | Condition, ...], problem: str
) -> None:
    async with testing.engine() as app:

        @app.task
        async def work(ctx: Context) -> str:
            try:
                await ctx.wait_for(*conditions)
            except InvalidInput as error:
                return str(error)
            return "waited"

        run = await app.submit(work)
        await app.drain()
        assert problem in await run.result(timeout=1)


async def test_a_wait_beyond_the_open_waitpoints_is_refused_where_it_is_written(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bounds, signals):
        monkeypatch.setattr(module, "OPEN_WAITPOINTS_MAX", 3)

    @app.task
    async def work(ctx: Context) -> list[str]:
        for _ in range(3):
            await ctx.waitpoint("go")
        told: list[str] = []
        for ask in (ctx.waitpoint, ctx.wait_for_signal):
            try:
                await ask("other")
            except SignalLimitExceeded as error:
                told.append(str(error))
        await ctx.wait_for_signal("go")
        return told

    async with working(app):
        run = await app.submit(work)
        await run.signal("go")
        told = await run.result(timeout="20s")
    assert told == 2 * [
        f"{uuid_of(run.execution_id)} has 3 open waitpoints; at most 3 may be open at a time: wait"
        " for some of them first, or make them expire sooner"
    ]
