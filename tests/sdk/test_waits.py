"""Waits at several waitpoints made beforehand, and what a wait leaves among the steps."""

import asyncio

import pytest

from flowfabric import App, Context, Retry, SignalToken, all_of, any_of, testing
from flowfabric.core.records import SignalEffect
from flowfabric.core.signals import SignalAccepted, SignalDuplicate
from flowfabric.core.states import PublicState
from flowfabric.errors import WaitpointClosed
from flowfabric.testing import SettableClock
from tests.apps import reached, working


async def test_tokens_for_two_approvals_are_handed_out_before_both_are_waited_for(
    waiting_app: App,
) -> None:
    app = waiting_app
    told: dict[str, set[str]] = {"legal": set(), "finance": set()}
    made, sent = asyncio.Event(), asyncio.Event()

    @app.task
    async def gate(ctx: Context) -> list[object]:
        for name, tokens in told.items():
            tokens.add((await ctx.waitpoint(name)).reveal())
        made.set()
        await ctx.step("the mails are read", sent.wait)
        signals = await ctx.wait_for(all_of("legal", "finance"), timeout="1h")
        return [(signal.name, signal.payload) for signal in signals]

    async with working(app):
        run = await app.submit(gate)
        async with asyncio.timeout(20):
            await made.wait()
        early = await app.signals.deliver(min(told["finance"]), "finance", 1)
        assert isinstance(early, SignalAccepted)
        assert early.effect is SignalEffect.BUFFERED
        sent.set()
        await reached(run, PublicState.SUSPENDED)
        last = await app.signals.deliver(min(told["legal"]), "legal", 2)
        assert isinstance(last, SignalAccepted)
        assert last.resumed
        assert await run.result(timeout="20s") == [["legal", 2], ["finance", 1]]
    assert [len(tokens) for tokens in told.values()] == [1, 1]


@pytest.mark.parametrize("in_the_wait", [False, True])
async def test_a_token_handed_out_before_a_replay_is_good_after_it(in_the_wait: bool) -> None:
    async with testing.engine() as app:
        told: list[str] = []

        @app.task
        async def gate(ctx: Context) -> object:
            told.append((await ctx.waitpoint("go")).reveal())
            if len(told) == 1 and not in_the_wait:
                raise ValueError("not yet")
            return (await ctx.wait_for_signal("go")).payload

        run = await app.submit(gate)
        await app.drain()
        if in_the_wait:
            await run.cancel()
        await app.engine.replay_execution(run.execution_id)
        await app.drain()
        assert told == told[:1] * 2
        assert (await app.signals.deliver(told[0], "go", 1)).resumed
        await app.drain()
        assert await run.result(timeout=1) == 1


async def test_a_plain_wait_beside_one_made_beforehand() -> None:
    async with testing.engine() as app:
        told: list[SignalToken] = []

        @app.task
        async def gate(ctx: Context) -> list[str]:
            told.append(await ctx.waitpoint("no"))
            return [signal.name for signal in await ctx.wait_for(any_of("yes", "no"))]

        run = await app.submit(gate)
        await app.drain()
        await app.signals.deliver(told[0], "no")
        await app.drain()
        assert await run.result(timeout=1) == ["no"]


async def test_one_whose_time_is_over_is_replaced_and_the_other_kept(clock: SettableClock) -> None:
    async with testing.engine(clock) as app:
        told: list[tuple[SignalToken, SignalToken]] = []

        @app.task
        async def gate(ctx: Context) -> list[str]:
            short = await ctx.waitpoint("short", expires="1h")
            told.append((short, await ctx.waitpoint("long")))
            await ctx.sleep("2h")
            return [signal.name for signal in await ctx.wait_for("short", "long")]

        run = await app.submit(gate)
        await app.drain()
        clock.advance("2h")
        await app.drain()
        short, long = told[0]
        with pytest.raises(WaitpointClosed):
            await app.signals.deliver(short, "short")
        await app.signals.deliver(long, "long")
        await run.signal("short")
        await app.drain()
        assert await run.result(timeout=1) == ["short", "long"]


async def test_a_repeated_signal_is_not_taken_for_the_next_wait_of_the_same_name() -> None:
    async with testing.engine() as app:

        @app.task
        async def twice(ctx: Context) -> list[object]:
            return [(await ctx.wait_for_signal("go")).payload for _ in range(2)]

        run = await app.submit(twice)
        await app.drain()
        first = await run.signal("go", 1, idempotency_key="click")
        assert isinstance(first, SignalAccepted)
        before = await run.signal("go", 1, idempotency_key="click")
        await app.drain()
        after = await run.signal("go", 1, idempotency_key="click")
        assert before == after == SignalDuplicate(existing_signal_id=first.signal_id)
        await run.signal("go", 2, idempotency_key="another click")
        await app.drain()
        assert await run.result(timeout=1) == [1, 2]


async def test_a_wait_stands_before_the_steps_that_came_after_it(waiting_app: App) -> None:
    app = waiting_app

    @app.task
    async def gate(ctx: Context) -> None:
        await ctx.step("before", int)
        await ctx.wait_for_signal("go")
        await asyncio.gather(*(ctx.step(f"after {number}", int) for number in range(3)))

    async with working(app):
        run = await app.submit(gate)
        await reached(run, PublicState.SUSPENDED)
        await run.signal("go")
        await run.result(timeout="20s")
    keys = [step.step_key for step in await app.engine.list_steps(run.execution_id)]
    assert keys[:2] == ["before", "signal go"]
    assert sorted(keys[2:]) == ["after 0", "after 1", "after 2"]


@pytest.mark.parametrize("ending", ["returns", "raises", "waits again"])
async def test_a_wait_is_recorded_however_the_handler_goes_on(ending: str) -> None:
    async with testing.engine() as app:

        @app.task(retry=Retry(max_retries=0))
        async def gate(ctx: Context) -> None:
            await ctx.wait_for_signal("go")
            if ending == "raises":
                raise ConnectionError("after the wait")
            if ending == "waits again":
                await ctx.wait_for_signal("once more")

        run = await app.submit(gate)
        await app.drain()
        await run.signal("go")
        await app.drain()
        (step,) = await app.engine.list_steps(run.execution_id)
        assert step.step_key == "signal go"


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()
