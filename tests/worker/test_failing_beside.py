"""A handler fails while steps run in its other branches: their effects happen once."""

import asyncio
import threading

import pytest

from flowfabric import App, Context, Retry
from flowfabric.core.states import PublicState
from tests.apps import PATIENCE_S, reached, working

ONCE_MORE = Retry(max_retries=1, delay="1ms", jitter=False)


class Effects:
    """A step that waits to be let go, as a plain function or an async one."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.count = 0

    def plain(self) -> str:
        self.begun.set()
        assert self.go_on.wait(PATIENCE_S)
        self.count += 1
        return "paid"

    async def asynchronous(self) -> str:
        return await asyncio.to_thread(self.plain)


# A task group cancels async functions: what they have done by then is for their code to say.
@pytest.mark.parametrize(
    ("kind", "group"), [("plain", False), ("asynchronous", False), ("plain", True)]
)
async def test_a_step_that_runs_when_another_branch_fails_is_stored(
    app: App, kind: str, group: bool
) -> None:
    effects, fails = Effects(), True

    async def fail() -> None:
        assert await asyncio.to_thread(effects.begun.wait, PATIENCE_S)
        if fails:
            asyncio.get_running_loop().call_later(0.01, effects.go_on.set)
            raise ValueError("no")

    @app.task(retry=ONCE_MORE)
    async def pay(ctx: Context) -> str:
        nonlocal fails
        fails = ctx.attempt_index == 0
        if group:
            async with asyncio.TaskGroup() as tasks:
                paying = tasks.create_task(ctx.step("pay", getattr(effects, kind)))
                tasks.create_task(fail())
            return str(await paying)
        paid, _ = await asyncio.gather(ctx.step("pay", getattr(effects, kind)), fail())
        return str(paid)

    async with working(app):
        run = await app.submit(pay)
        assert await run.result(timeout=PATIENCE_S) == "paid"
        assert effects.count == 1
        assert [(step.name, step.result) for step in await run.steps()] == [("pay", b'"paid"')]


async def test_nothing_new_begins_while_a_failed_handler_waits_for_its_steps(app: App) -> None:
    effects, later = Effects(), 0

    def note() -> None:
        nonlocal later
        later += 1

    @app.task
    async def pay(ctx: Context) -> None:
        async def twice() -> None:
            await ctx.step("pay", effects.plain)
            await ctx.step("note", note)

        async def fail() -> None:
            assert await asyncio.to_thread(effects.begun.wait, PATIENCE_S)
            asyncio.get_running_loop().call_later(0.01, effects.go_on.set)
            raise ValueError("no")

        await asyncio.gather(twice(), fail())

    async with working(app):
        run = await app.submit(pay)
        await reached(run, PublicState.FAILED)
        assert (effects.count, later) == (1, 0)
        assert [step.name for step in await run.steps() if step.error is None] == ["pay"]


async def test_a_timeout_ends_the_wait_for_steps_of_a_failed_handler(app: App) -> None:
    effects = Effects()

    @app.task(timeout="200ms")
    async def pay(ctx: Context) -> None:
        async def fail() -> None:
            assert await asyncio.to_thread(effects.begun.wait, PATIENCE_S)
            raise ValueError("no")

        await asyncio.gather(ctx.step("pay", effects.plain), fail())

    async with working(app):
        run = await app.submit(pay)
        await reached(run, PublicState.EXPIRED)
        effects.go_on.set()
