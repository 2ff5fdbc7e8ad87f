"""Whatever a durable call raised, and the handler went on past, is the same in every run."""

import asyncio
import concurrent.futures
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from flowfabric import App, Context, EngineConfig, Retry, testing
from flowfabric.core.states import PublicState
from flowfabric.errors import ExecutionFailed, InvalidInput
from flowfabric.task import Task
from tests.apps import reached, working
from tests.transactions import in_transaction

LIMIT = 2_000


class Choosy:
    """A codec that refuses some values, and makes others too large."""

    def encode(self, data: bytes) -> bytes:
        if b"unspeakable" in data:
            raise ValueError("cannot be encoded")
        return data * LIMIT if b"grows" in data else data

    def decode(self, data: bytes) -> bytes:
        return data


Echo = Task[[str], str]


async def conflict(ctx: Context, echo: Echo) -> object:
    await ctx.submit(echo, "first", idempotency_key=ctx.execution_id)
    return await ctx.submit(echo, "second", idempotency_key=ctx.execution_id, strict=True)


async def closed_lane(ctx: Context, echo: Echo) -> object:
    return await ctx.submit(echo, "a", lane="closed")


async def bad_priority(ctx: Context, echo: Echo) -> object:
    return await ctx.submit(echo, "a", priority=10**9)


async def unencodable_argument(ctx: Context, echo: Echo) -> object:
    return await ctx.submit(echo, "unspeakable")


async def growing_argument(ctx: Context, echo: Echo) -> object:
    return await ctx.submit(echo, "grows")


async def large_result(ctx: Context, echo: Echo) -> object:
    return await ctx.step("large", lambda: "a" * LIMIT * 2)


async def no_json(ctx: Context, echo: Echo) -> object:
    return await ctx.step("no json", object)


async def unencodable_result(ctx: Context, echo: Echo) -> object:
    return await ctx.step("say", lambda: "unspeakable")


async def growing_result(ctx: Context, echo: Echo) -> object:
    return await ctx.step("say", lambda: "grows")


async def exits(ctx: Context, echo: Echo) -> object:
    return await ctx.step("exit", raising, SystemExit(3))


async def exits_async(ctx: Context, echo: Echo) -> object:
    return await ctx.step("exit", raising_async, SystemExit(3))


async def interrupted(ctx: Context, echo: Echo) -> object:
    return await ctx.step("interrupted", raising, KeyboardInterrupt("enough"))


async def cancels_itself(ctx: Context, echo: Echo) -> object:
    return await ctx.step("cancelled", raising, asyncio.CancelledError("of its own"))


async def cancels_itself_async(ctx: Context, echo: Echo) -> object:
    return await ctx.step("cancelled", raising_async, asyncio.CancelledError("of its own"))


async def cancelled_future(ctx: Context, echo: Echo) -> object:
    return await ctx.step("cancelled", raising, concurrent.futures.CancelledError("a future"))


def raising(error: BaseException) -> None:
    raise error


async def raising_async(error: BaseException) -> None:
    raise error


REFUSED: dict[Callable[[Context, Echo], Awaitable[object]], str] = {
    conflict: "IdempotencyConflict",
    closed_lane: "LaneNotAccepting",
    bad_priority: "InvalidInput: priority",
    unencodable_argument: "ValueError: cannot be encoded",
    growing_argument: "PayloadTooLarge",
    large_result: "PayloadTooLarge: the result of large",
    no_json: "InvalidInput: the result of step no json",
    unencodable_result: "ValueError: cannot be encoded",
    growing_result: "PayloadTooLarge: the result of say",
    exits: "SystemExit: 3",
    exits_async: "SystemExit: 3",
    interrupted: "KeyboardInterrupt: enough",
    cancels_itself: "CancelledError: of its own",
    cancels_itself_async: "CancelledError: of its own",
    cancelled_future: "_base.CancelledError: a future",
}


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: str(call.__name__))
async def test_a_refusal_the_handler_caught_is_the_same_in_every_run(
    store_url: str, call: Callable[[Context, Echo], Awaitable[object]]
) -> None:
    seen: list[str] = []
    config = EngineConfig(payload_bytes_max=LIMIT, lanes=("default", "closed"))
    async with App(store_url, codec=Choosy(), config=config) as app:
        await app.engine.drain_lane("closed")

        @app.task
        async def echo(words: str) -> str:
            return words

        @app.task
        async def work(ctx: Context) -> str:
            try:
                await call(ctx, echo)
            except BaseException as error:
                if ctx.cancelled:
                    raise
                seen.append(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
            await ctx.step("after", int)
            await ctx.wait_for_signal("go")
            return "done"

        async with working(app, lanes=("default",)):
            run = await app.submit(work)
            await reached(run, PublicState.SUSPENDED)
            await run.signal("go")
            assert await run.result(timeout="20s") == "done"
    assert len(seen) >= 2
    assert len(set(seen)) == 1, seen
    assert REFUSED[call] in seen[0]


@pytest.mark.parametrize("how", ["exit", "cancel"])
async def test_a_plain_handler_sees_it_again_too(app: App, how: str) -> None:
    raised = SystemExit(3) if how == "exit" else asyncio.CancelledError()
    seen: list[str] = []

    @app.task
    def work(ctx: Context) -> str:
        try:
            ctx.blocking.step("raises", raising, raised)
        except BaseException as error:
            if ctx.cancelled:
                raise
            seen.append(repr(error))
        ctx.blocking.step("after", int)
        ctx.blocking.wait_for_signal("go")
        return "done"

    async with working(app):
        run = await app.submit(work)
        await reached(run, PublicState.SUSPENDED)
        await run.signal("go")
        assert await run.result(timeout="20s") == "done"
    assert len(seen) >= 2
    assert len(set(seen)) == 1


async def test_a_step_that_cancels_itself_is_tried_again_and_blamed() -> None:
    tries: Counter[str] = Counter()

    def cancelled(name: str) -> str:
        tries[name] += 1
        if tries[name] == 1 or name == "always":
            raise asyncio.CancelledError
        return name

    async with testing.engine() as app:

        @app.task(retry=Retry(max_retries=0))
        async def work(ctx: Context, name: str) -> str:
            return await ctx.step("cancelled", cancelled, name, retry=Retry(max_retries=1, delay=0))

        once, always = await app.submit(work, "once"), await app.submit(work, "always")
        await app.drain(skip_time=True)
        assert await once.result(timeout=1) == "once"
        with pytest.raises(ExecutionFailed, match="CancelledError"):
            await always.result(timeout=1)
        assert [step.step_key for step in await always.steps()] == ["cancelled"]
    assert tries == {"once": 2, "always": 2}


VERBS: dict[str, Callable[[Context, Echo], Awaitable[object]]] = {
    "step": lambda ctx, echo: ctx.step("s", int),
    "sleep": lambda ctx, echo: ctx.sleep(0),
    "now": lambda ctx, echo: ctx.now(),
    "random": lambda ctx, echo: ctx.random(),
    "uuid": lambda ctx, echo: ctx.uuid(),
    "submit": lambda ctx, echo: ctx.submit(echo, "a"),
    "waitpoint": lambda ctx, echo: ctx.waitpoint("w"),
    "signal": lambda ctx, echo: ctx.wait_for_signal("w"),
}


@pytest.fixture(params=["sqlite-file", "postgres"])
def shared_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    """A database that connections of the user's can reach."""
    return new_database(request.param)


async def test_what_a_fence_refused_is_refused_in_every_run(shared_url: str) -> None:
    seen: list[list[str]] = []
    async with App(shared_url) as app:

        @app.task
        async def echo(words: str) -> str:
            return words

        @app.task
        async def work(ctx: Context) -> str:
            refusals: list[str] = []
            child = await ctx.submit(echo, "first")
            async with in_transaction(app.url) as connection, ctx.fence(connection):
                for verb in (*VERBS.values(), lambda *_: child.result()):
                    with pytest.raises(InvalidInput, match="inside a fence") as refused:
                        await verb(ctx, echo)
                    refusals.append(str(refused.value))
            seen.append(refusals)
            await ctx.step("after", int)
            await ctx.wait_for_signal("go")
            return await child.result()

        async with working(app):
            run = await app.submit(work)
            await reached(run, PublicState.SUSPENDED)
            await run.signal("go")
            assert await run.result(timeout="20s") == "first"
    assert len(seen) >= 2
    assert len({str(each) for each in seen}) == 1
