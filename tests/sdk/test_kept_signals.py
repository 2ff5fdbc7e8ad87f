"""Signals sent before the handler waits, and a token for each sender."""

import pytest

from flowfabric import Context, SignalToken, any_of, count, testing
from flowfabric.core.states import PublicState
from flowfabric.errors import InvalidToken, WaitpointNotFound, WrongSignalName
from flowfabric.testing import SettableClock


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


async def test_a_signal_sent_before_the_run_waits_is_taken_by_its_next_wait() -> None:
    async with testing.engine() as app:

        @app.task
        async def gate(ctx: Context) -> list[object]:
            first = await ctx.wait_for_signal("go")
            second = await ctx.wait_for_signal("go")
            return [first.payload, second.payload]

        run = await app.submit(gate)
        answers = [await run.signal("go", number) for number in (1, 2)]
        assert [(each.resumed, each.kept) for each in answers] == [(False, True)] * 2
        assert [each.name for each in (await run.snapshot()).kept_signals] == ["go", "go"]
        assert "2 signals are kept for its next waits: 'go' (2)." in (await run.why()).sentence
        await app.drain()
        assert await run.result(timeout=1) == [1, 2]
        assert (await run.snapshot()).kept_signals == ()


async def test_a_signal_is_kept_while_the_handler_works_between_two_waits() -> None:
    async with testing.engine() as app:

        @app.task
        async def gate(ctx: Context) -> list[object]:
            first = await ctx.wait_for_signal("go")
            await ctx.step("meanwhile", lambda: app.signals.send(ctx.execution_id, "go", 2))
            second = await ctx.wait_for_signal("go", timeout="1h")
            return [first.payload, second.payload]

        run = await app.submit(gate)
        await app.drain()
        assert (await run.signal("go", 1)).resumed
        await app.drain()
        assert await run.result(timeout=1) == [1, 2]


async def test_a_sender_may_insist_on_being_waited_for() -> None:
    async with testing.engine() as app:

        @app.task
        async def gate(ctx: Context) -> object:
            return (await ctx.wait_for_signal("go")).payload

        run = await app.submit(gate)
        with pytest.raises(WaitpointNotFound):
            await run.signal("go", keep=False)
        with pytest.raises(WaitpointNotFound):
            await app.signals.send(run.execution_id, "go", keep=False)
        await app.drain()
        assert (await run.signal("go", 1, keep=False)).resumed


@pytest.mark.parametrize("early", [0, 1, 2])
async def test_each_approver_has_a_token(early: int, clock: SettableClock) -> None:
    async with testing.engine(clock) as app:
        handed: list[SignalToken] = []

        @app.task
        async def gate(ctx: Context) -> list[str]:
            tokens = [await ctx.waitpoint("approved") for _ in range(2)]
            if not handed:
                handed.extend(tokens)
            await ctx.sleep("1h")
            found = await ctx.wait_for(count(2, "approved", distinct="waitpoints"))
            return [each.source for each in found]

        run = await app.submit(gate)
        await app.drain()
        assert handed[0] != handed[1]
        for number in range(early):
            await app.signals.deliver(handed[number], "approved", source=f"{number}")
        clock.advance("1h")
        await app.drain()
        for number in range(early, 2):
            await app.signals.deliver(handed[number], "approved", source=f"{number}")
        await app.drain()
        assert await run.result(timeout=1) == ["0", "1"]


async def test_an_approval_outlives_its_token(clock: SettableClock) -> None:
    async with testing.engine(clock) as app:
        handed: list[SignalToken] = []

        @app.task
        async def gate(ctx: Context) -> str:
            token = await ctx.waitpoint("approved", expires="1h")
            if not handed:
                handed.append(token)
            await ctx.sleep("2h")
            return (await ctx.wait_for_signal("approved", timeout="1h")).source

        run = await app.submit(gate)
        await app.drain()
        await app.signals.deliver(handed[0], "approved", source="ada")
        clock.advance("2h")
        await app.drain()
        assert await run.result(timeout=1) == "ada"


async def test_a_reminder_does_not_cost_an_approval(clock: SettableClock) -> None:
    async with testing.engine(clock) as app:

        @app.task
        async def gate(ctx: Context) -> list[str]:
            two = count(2, "approved", distinct="sources")
            found = await ctx.wait_for(two, timeout="1d", default=None)
            if found is None:
                found = await ctx.wait_for(two, timeout="1d")
            return [each.source for each in found]

        run = await app.submit(gate)
        await app.drain()
        await run.signal("approved", source="ada")
        clock.advance("1d")
        await app.drain()
        assert await run.state() is PublicState.SUSPENDED
        await run.signal("approved", source="bob")
        await app.drain()
        assert await run.result(timeout=1) == ["ada", "bob"]


@pytest.mark.parametrize("beforehand", [False, True])
async def test_the_token_to_reject_cannot_approve(beforehand: bool) -> None:
    async with testing.engine() as app:
        handed: list[SignalToken] = []

        @app.task
        async def gate(ctx: Context) -> str:
            if beforehand:
                handed.append(await ctx.waitpoint("reject"))
            return (await ctx.wait_for(any_of("approve", "reject")))[0].name

        run = await app.submit(gate)
        await app.drain()
        if not beforehand:
            handed.append(await app.signals.token(run.execution_id, "reject"))
        with pytest.raises(WrongSignalName, match="'reject' only, not 'approve'"):
            await app.signals.deliver(handed[0], "approve")
        stranger = handed[0].reveal()[:-3] + "AAA"
        with pytest.raises(InvalidToken):
            await app.signals.deliver(stranger, "approve")
        assert await run.state() is PublicState.SUSPENDED
        await app.signals.deliver(handed[0], "reject")
        await app.drain()
        assert await run.result(timeout=1) == "reject"
