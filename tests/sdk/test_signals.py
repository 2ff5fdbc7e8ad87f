"""Handlers that wait for signals, and whoever sends them."""

import asyncio
import itertools
from collections import Counter

import pytest
from msgspec import Struct

from flowfabric import (
    App,
    Context,
    Retry,
    Run,
    Signal,
    SignalTimeout,
    SignalToken,
    all_of,
    any_of,
    count,
    testing,
)
from flowfabric.core.journal import ROOT, MadeCall, identity
from flowfabric.core.records import SignalEffect
from flowfabric.core.signals import SignalAccepted
from flowfabric.core.states import PublicState
from flowfabric.engine.waitpoints import SuspensionView
from flowfabric.errors import ExecutionFailed, FlowFabricError, InvalidInput, WaitpointClosed
from flowfabric.testing import SettableClock
from flowfabric.worker.signals import named_id
from tests.apps import reached, working
from tests.sdk.gates import gate_of


class Decision(Struct, frozen=True):
    approved: bool
    note: str = ""


# On every store, with a worker


async def test_the_signal_is_returned_where_the_function_left_off(waiting_app: App) -> None:
    app = waiting_app
    ran: Counter[str] = Counter()

    def note(name: str) -> str:
        ran[name] += 1
        return name.upper()

    @app.task
    async def gate(ctx: Context) -> list[str]:
        ran["handler"] += 1
        before = await ctx.step("before", note, "a")
        signal = await ctx.wait_for_signal("decided", type=Decision)
        after = await ctx.step("after", note, "b")
        return [before, signal.payload.note, signal.source, signal.source_type, after]

    async with working(app):
        run = await app.submit(gate)
        await reached(run, PublicState.SUSPENDED)
        assert (await run.snapshot()).current_lease is None, "no worker is held"
        answer = await run.signal("decided", Decision(True, "go"), source="ada")
        assert isinstance(answer, SignalAccepted)
        assert answer.resumed
        assert await run.result(timeout="20s") == ["A", "go", "ada", "operator", "B"]
    assert ran == {"handler": 2, "a": 1, "b": 1}


async def test_a_plain_function_waits_too(waiting_app: App) -> None:
    app = waiting_app

    @app.task
    def gate(ctx: Context) -> object:
        token = ctx.blocking.waitpoint("go")
        first = ctx.blocking.wait_for_signal("go", type=int)
        both = ctx.blocking.wait_for(all_of("a", "b"))
        none = ctx.blocking.wait_for("never", timeout="1ms", default=())
        missed = ctx.blocking.wait_for_signal("never", timeout="1ms", default="nobody")
        return [
            token.waitpoint_id != "",
            first.payload,
            [each.name for each in both + none],
            missed,
        ]

    async with working(app):
        run = await app.submit(gate)
        await reached(run, PublicState.SUSPENDED)
        await run.signal("go", 7)
        for name in ("a", "b"):
            await listed(app, name)
            await run.signal(name)
        assert await run.result(timeout="20s") == [True, 7, ["a", "b"], "nobody"]


async def test_signals_are_returned_as_the_conditions_name_them(waiting_app: App) -> None:
    app = waiting_app

    @app.task
    async def gate(ctx: Context) -> object:
        legal, finance = await ctx.wait_for(all_of("legal", "finance"), type=str)
        voted = await ctx.wait_for("chair", count(2, "vote"), type=str)
        return [legal.payload, finance.payload, [each.payload for each in voted]]

    async with working(app):
        run = await app.submit(gate)
        await reached(run, PublicState.SUSPENDED)
        await run.signal("finance", "F")
        await run.signal("legal", "L")
        for name, vote in (("vote", "2nd"), ("vote", "1st"), ("chair", "C")):
            await listed(app, "chair")
            await run.signal(name, vote)
        assert await run.result(timeout="20s") == ["L", "F", ["C", "2nd", "1st"]]


async def listed(app: App, name: str) -> None:
    """Wait until something waits under a name, by asking."""
    async with asyncio.timeout(20):
        for _ in itertools.count():
            page = await app.signals.pending()
            if name in {str(entry.name) for entry in page.entries}:
                return
            await asyncio.sleep(0)


async def test_early_signals_to_a_token_are_kept_for_the_wait(waiting_app: App) -> None:
    app = waiting_app
    told: list[str] = []
    made, sent = asyncio.Event(), asyncio.Event()

    @app.task
    async def gate(ctx: Context) -> object:
        token = await ctx.waitpoint("approved")
        told.append(token.reveal())
        made.set()
        await ctx.step("the mail is read", sent.wait)
        signal = await ctx.wait_for_signal("approved", timeout="1h")
        return [signal.payload, signal.source, signal.source_type]

    async with working(app):
        run = await app.submit(gate)
        async with asyncio.timeout(20):
            await made.wait()
        answer = await app.signals.deliver(told[0], "approved", {"n": 1}, source="ada")
        assert isinstance(answer, SignalAccepted)
        assert answer.effect is SignalEffect.BUFFERED
        sent.set()
        assert await run.result(timeout="20s") == [{"n": 1}, "ada", "external"]
    assert len(set(told)) == 1, "every run of the handler is given the same token"


async def test_a_wait_counts_distinct_sources(waiting_app: App) -> None:
    app = waiting_app

    @app.task
    async def gate(ctx: Context) -> list[str]:
        signals = await ctx.wait_for(count(2, "approved", distinct="sources"))
        return [signal.source for signal in signals]

    async with working(app):
        run = await app.submit(gate)
        await reached(run, PublicState.SUSPENDED)
        token = (await app.signals.token(run.execution_id, "approved")).reveal()
        sources = ["ada", "ada", "bob"]
        answers = [await app.signals.deliver(token, "approved", source=each) for each in sources]
        effects = [each.effect for each in answers if isinstance(each, SignalAccepted)]
        assert effects == [
            SignalEffect.APPENDED,
            SignalEffect.APPENDED_DUPLICATE,
            SignalEffect.SATISFIED,
        ]
        assert await run.result(timeout="20s") == ["ada", "bob"]


async def test_code_without_an_event_loop_sends_and_lists(waiting_app: App) -> None:
    app = waiting_app

    @app.task
    async def gate(ctx: Context) -> list[object]:
        return [(await ctx.wait_for_signal(name)).payload for name in ("one", "two", "three")]

    def outside() -> list[object]:
        run = app.blocking.submit(gate)
        signals = app.blocking.signals
        for name in ("one", "two", "three"):
            while [entry.name for entry in signals.pending().entries] != [name]:
                pass
            if name == "one":
                run.signal(name, 1)
            elif name == "two":
                signals.send(run.execution_id, name, 2)
            else:
                signals.deliver(signals.token(run.execution_id, name).reveal(), name, 3)
        return run.result(timeout="20s")

    async with working(app):
        assert await asyncio.to_thread(outside) == [1, 2, 3]


# What does not depend on the store, with a clock that stands still


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


async def test_a_wait_that_takes_too_long_raises_and_does_so_in_every_later_run(
    clock: SettableClock,
) -> None:
    async with testing.engine(clock) as app:
        seen: list[str] = []

        @app.task(retry=Retry(max_retries=1, delay=0))
        async def escalating(ctx: Context) -> str:
            try:
                await ctx.wait_for_signal("approved", timeout="2d")
            except SignalTimeout as error:
                seen.append(str(error))
            if ctx.retry_count == 0:
                raise ConnectionError("after the timeout")
            signal = await ctx.wait_for_signal("approved", timeout="1d", default="nobody")
            return signal if isinstance(signal, str) else signal.source

        run = await app.submit(escalating)
        await app.drain()
        assert seen == []
        clock.advance("2d")
        await app.drain()
        assert seen == ["signal 'approved': nothing met it in time"] * 2
        assert await run.state() is PublicState.SUSPENDED
        await app.drain(skip_time=True)
        assert await run.result(timeout=1) == "nobody"


async def test_an_unhandled_timeout_fails_at_once_whatever_the_retries() -> None:
    async with testing.engine() as app:

        @app.task(retry=Retry(max_retries=5, delay=0))
        async def gate(ctx: Context) -> None:
            await ctx.wait_for_signal("go", timeout="1h")

        run = await app.submit(gate)
        await app.drain(skip_time=True)
        assert issubclass(SignalTimeout, TimeoutError)
        with pytest.raises(ExecutionFailed, match="nothing met it in time"):
            await run.result(timeout=1)
        assert (await run.snapshot()).retry_count == 0


async def test_a_recorded_signal_is_the_same_in_every_later_run() -> None:
    async with testing.engine() as app:
        seen: list[Signal[int]] = []

        @app.task(retry=Retry(max_retries=2, delay=0))
        async def gate(ctx: Context) -> int:
            seen.append(await ctx.wait_for_signal("go", type=int))
            if ctx.retry_count < 2:
                raise ConnectionError("after the signal")
            return (await ctx.wait_for_signal("go", type=int)).payload

        run = await app.submit(gate)
        await app.drain()
        await run.signal("go", 1, source="ada")
        await app.drain()
        assert len(seen) == 3
        assert len(set(seen)) == 1
        await run.signal("go", 2)
        await app.drain()
        assert await run.result(timeout=1) == 2


async def test_a_signal_is_not_lost_when_the_worker_that_resumed_dies(clock: SettableClock) -> None:
    async with testing.engine(clock) as app:
        gate_of(app)
        run = await app.submit(app.tasks["gate"]())
        await app.drain()
        await run.signal("go", 7)
        doomed = await app.engine.claim(worker_id="w", worker_instance_id="w-1", kinds=["gate"])
        assert doomed is not None
        clock.advance(ms=doomed.handle.lease_ttl_ms)
        await app.drain()
        assert await run.result(timeout=1) == 7
        assert (await run.snapshot()).lease_reclaim_count == 1
        assert [each.resumed for each in await pauses(app, run)] == [True]


async def pauses(app: App, run: Run[object]) -> list[SuspensionView]:
    """Every pause of the first wait of a run."""
    found: list[SuspensionView] = []
    for number in range(9):
        wait = identity([ROOT], MadeCall("signal", "signal go", "", 1))
        named = named_id(run.execution_id, "suspension", wait, str(number))
        view = await app.engine.describe_suspension(run.execution_id, named)
        found += [] if view is None else [view]
    return found


@pytest.mark.parametrize("payload", ["x", None, {"approved": "yes"}, {}])
async def test_a_payload_of_another_type_is_set_aside_and_the_wait_goes_on(payload: object) -> None:
    async with testing.engine() as app:

        @app.task
        async def gate(ctx: Context) -> tuple[bool, str]:
            signal = await ctx.wait_for_signal("go", type=Decision)
            return signal.payload.approved, signal.source

        run = await app.submit(gate)
        await app.drain()
        await run.signal("go", payload, source="ada")
        await app.drain()
        assert await run.state() is PublicState.SUSPENDED
        why = (await run.why()).sentence
        assert "It is suspended until it gets a signal: 'go'." in why
        assert "set aside: payload of signal go from ada: does not fit the type asked for" in why
        await run.signal("go", {"approved": True}, source="bob", keep=False)
        await app.drain()
        assert await run.result(timeout=1) == (True, "bob")
        # Later runs know of nothing else: a replay gets the same.
        assert [step.name for step in await run.steps()] == ["signal go"]


async def test_the_other_signals_of_a_wait_count_when_one_is_set_aside() -> None:
    async with testing.engine() as app:

        @app.task
        async def gate(ctx: Context) -> list[int]:
            votes = count(2, "vote", distinct="sources")
            return [each.payload for each in await ctx.wait_for(all_of("legal", votes), type=int)]

        run = await app.submit(gate)
        await app.drain()
        for name, payload, source in (
            ("legal", 1, "eve"),
            ("vote", "x", "ada"),
            ("vote", 2, "bob"),
        ):
            await run.signal(name, payload, source=source)
        await app.drain()
        assert "with 2 of 3 signals: still 'vote'" in (await run.why()).sentence
        await run.signal("vote", 3, source="bob")
        await app.drain()
        assert await run.state() is PublicState.SUSPENDED
        await run.signal("vote", 4, source="ada")
        await app.drain()
        assert await run.result(timeout=1) == [1, 2, 4]


async def test_a_token_works_again_after_its_signal_was_set_aside() -> None:
    async with testing.engine() as app:
        tokens: list[str] = []

        @app.task
        async def gate(ctx: Context) -> int:
            token = await ctx.waitpoint("go")
            await ctx.step("mail", tokens.append, token.reveal())
            return (await ctx.wait_for_signal("go", type=int)).payload

        run = await app.submit(gate)
        await app.drain()
        await app.signals.deliver(tokens[0], "go", "seven")
        await app.drain()
        await app.signals.deliver(tokens[0], "go", 7)
        await app.drain()
        assert await run.result(timeout=1) == 7


async def test_the_timeout_of_a_wait_counts_from_its_beginning_whatever_was_set_aside(
    clock: SettableClock,
) -> None:
    async with testing.engine(clock) as app:

        @app.task
        async def gate(ctx: Context) -> int | None:
            signal = await ctx.wait_for_signal("go", type=int, timeout="1h", default=None)
            return None if signal is None else signal.payload

        run = await app.submit(gate)
        await app.drain()
        for _ in range(3):
            clock.advance("15m")
            await run.signal("go", "x")
            await app.drain()
        clock.advance("14m")
        await app.drain()
        assert await run.state() is PublicState.SUSPENDED
        clock.advance("1m")
        await app.drain()
        assert await run.result(timeout=1) is None


async def test_composites_nest_and_the_first_of_several_names_may_do() -> None:
    async with testing.engine() as app:

        @app.task
        async def gate(ctx: Context) -> list[str]:
            first = await ctx.wait_for(any_of("yes", "no"))
            rest = await ctx.wait_for("legal", all_of("cost", count(2, "vote")))
            return [signal.name for signal in (*first, *rest)]

        run = await app.submit(gate)
        await app.drain()
        names = [entry.name for entry in (await app.signals.pending()).entries]
        assert names == ["yes", "no"]
        await run.signal("no")
        await app.drain()
        for name in ("vote", "cost", "legal"):
            await run.signal(name)
        await app.drain()
        assert await run.state() is PublicState.SUSPENDED
        await run.signal("vote")
        await app.drain()
        assert await run.result(timeout=1) == ["no", "legal", "cost", "vote", "vote"]


async def test_an_operator_can_end_a_wait_without_its_signal() -> None:
    async with testing.engine() as app:

        @app.task
        async def gate(ctx: Context) -> str:
            signal = await ctx.wait_for_signal("go", default=None)
            return "skipped" if signal is None else "signalled"

        run = await app.submit(gate)
        await app.drain()
        await app.engine.resume_execution(run.execution_id, trigger_type="operator")
        await app.drain()
        assert await run.result(timeout=1) == "skipped"


async def test_a_replayed_execution_waits_again_where_it_was_cancelled() -> None:
    async with testing.engine() as app:
        gate_of(app)
        run = await app.submit(app.tasks["gate"]())
        await app.drain()
        await run.cancel()
        await app.engine.replay_execution(run.execution_id)
        await app.drain()
        assert await run.state() is PublicState.SUSPENDED
        await run.signal("go", "second time")
        await app.drain()
        assert await run.result(timeout=1) == "second time"


async def test_a_token_expires_while_the_run_waits_with_it_and_an_operator_can_signal(
    clock: SettableClock,
) -> None:
    async with testing.engine(clock) as app:
        told: list[SignalToken] = []

        @app.task
        async def gate(ctx: Context) -> object:
            told.append(await ctx.waitpoint("go", expires="1h"))
            return (await ctx.wait_for_signal("go", timeout="7d")).payload

        late, early = await app.submit(gate), await app.submit(gate)
        await app.drain()
        tokens = {each.execution_id: each for each in told}
        clock.advance("59m")
        await app.signals.deliver(tokens[early.execution_id], "go", 1)
        clock.advance("1m")
        with pytest.raises(WaitpointClosed, match="has expired: ask for another one, or have an"):
            await app.signals.deliver(tokens[late.execution_id], "go", 2)
        with pytest.raises(WaitpointClosed, match="the token for 'go' has expired"):
            await app.signals.token(late.execution_id, "go")
        await late.signal("go", 3)
        await app.drain()
        assert [await run.result(timeout=1) for run in (early, late)] == [1, 3]


async def test_a_waitpoint_that_expired_is_replaced_and_an_operator_can_signal(
    clock: SettableClock,
) -> None:
    async with testing.engine(clock) as app:
        told: list[SignalToken] = []

        @app.task
        async def gate(ctx: Context) -> object:
            told.append(await ctx.waitpoint("go", expires="1h"))
            await ctx.sleep("2h")
            return (await ctx.wait_for_signal("go")).payload

        run = await app.submit(gate)
        await app.drain()
        clock.advance("2h")
        await app.drain()
        assert await run.state() is PublicState.SUSPENDED
        with pytest.raises(FlowFabricError):
            await app.signals.deliver(told[0], "go")
        await run.signal("go", 3)
        await app.drain()
        assert await run.result(timeout=1) == 3
        assert len(set(told)) == 1


async def test_a_token_outlives_the_attempt_that_made_it() -> None:
    async with testing.engine() as app:
        told: list[SignalToken] = []

        @app.task(retry=Retry(max_retries=1, delay=0))
        async def gate(ctx: Context) -> object:
            told.append(await ctx.waitpoint("go"))
            if ctx.retry_count == 0:
                raise ConnectionError("after the token was handed out")
            return (await ctx.wait_for_signal("go")).payload

        run = await app.submit(gate)
        await app.drain()
        await app.signals.deliver(told[0], "go", 3)
        await app.drain()
        assert await run.result(timeout=1) == 3
        assert (len(told), len(set(told))) == (3, 1)


async def test_two_branches_cannot_wait_long_at_once_when_one_waits_for_a_signal() -> None:
    async with testing.engine() as app:

        @app.task
        async def both(ctx: Context) -> None:
            await asyncio.gather(ctx.wait_for_signal("go"), ctx.sleep("1h"))

        @app.task
        async def two(ctx: Context) -> None:
            await asyncio.gather(ctx.wait_for_signal("go"), ctx.wait_for_signal("stop"))

        runs = [await app.submit(both), await app.submit(two)]
        await app.drain()
        for run in runs:
            with pytest.raises(ExecutionFailed, match="no other can wait long"):
                await run.result(timeout=1)


async def test_a_parallel_step_is_finished_before_the_worker_is_released() -> None:
    async with testing.engine() as app:
        ran: Counter[str] = Counter()

        async def slow() -> int:
            ran["slow"] += 1
            for _ in range(20):
                await asyncio.sleep(0)
            return 9

        @app.task
        async def both(ctx: Context) -> list[object]:
            signal, number = await asyncio.gather(ctx.wait_for_signal("go"), ctx.step("slow", slow))
            return [signal.payload, number]

        run = await app.submit(both)
        await app.drain()
        await run.signal("go", 1)
        await app.drain()
        assert await run.result(timeout=1) == [1, 9]
        assert ran == {"slow": 1}


async def test_names_and_conditions_are_checked_where_they_are_asked_for() -> None:
    async with testing.engine() as app:
        problems: list[str] = []

        @app.task
        async def gate(ctx: Context) -> None:
            for ask in (
                lambda: ctx.wait_for_signal(""),
                lambda: ctx.wait_for_signal("x" * 201),
                lambda: ctx.wait_for(),
                lambda: ctx.wait_for(all_of()),
                lambda: ctx.wait_for_signal("go", timeout="soon"),
            ):
                with pytest.raises(InvalidInput) as refused:
                    ask()
                problems.append(refused.value.field)

        run = await app.submit(gate)
        await app.drain()
        await run.result(timeout=1)
        assert problems == [
            "name",
            "name",
            "wait_for",
            "all_of",
            "timeout",
        ]
