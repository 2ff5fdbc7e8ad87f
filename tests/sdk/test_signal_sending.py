"""Sending signals: tokens, refusals, the inbox."""

import asyncio
import logging
import string

import pytest

from flowfabric import Context, SignalToken, all_of, testing
from flowfabric.core.bounds import SIGNAL_PAYLOAD_BYTES_MAX
from flowfabric.core.signals import SignalAccepted, SignalDuplicate
from flowfabric.core.states import PublicState
from flowfabric.core.waitpoints import INVALID
from flowfabric.errors import (
    FlowFabricError,
    InvalidInput,
    InvalidToken,
    MissingToken,
    PayloadTooLarge,
    WaitpointNotFound,
)
from flowfabric.testing import SettableClock
from tests.mutations import mutations
from tests.sdk.gates import gate_of


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


async def test_a_signal_nothing_waits_for_says_what_is_waited_for() -> None:
    async with testing.engine() as app:
        gate_of(app)
        run = await app.submit(app.tasks["gate"]())
        with pytest.raises(WaitpointNotFound, match="it waits for no signal"):
            await run.signal("go", keep=False)
        await app.drain()
        with pytest.raises(WaitpointNotFound, match="it waits for 'go'"):
            await run.signal("stop", keep=False)


async def test_payloads_beyond_the_limit_or_without_a_json_form_are_refused() -> None:
    async with testing.engine() as app:
        gate_of(app)
        run = await app.submit(app.tasks["gate"]())
        await app.drain()
        with pytest.raises(PayloadTooLarge) as refused:
            await run.signal("go", "x" * SIGNAL_PAYLOAD_BYTES_MAX)
        assert (refused.value.field, refused.value.limit_bytes) == (
            "payload",
            SIGNAL_PAYLOAD_BYTES_MAX,
        )
        with pytest.raises(InvalidInput, match="payload: cannot be stored"):
            await run.signal("go", object())
        assert await run.state() is PublicState.SUSPENDED


async def test_a_repeat_is_told_which_signal_was_accepted() -> None:
    async with testing.engine() as app:
        gate_of(app)
        run = await app.submit(app.tasks["gate"]())
        await app.drain()
        token = await app.signals.token(run.execution_id, "go")
        first = await app.signals.deliver(token, "go", 1, idempotency_key="k")
        again = await app.signals.deliver(token, "go", 2, idempotency_key="k")
        assert isinstance(first, SignalAccepted)
        assert again == SignalDuplicate(existing_signal_id=first.signal_id)
        await app.drain()
        assert await run.result(timeout=1) == 1


async def test_a_token_opens_one_waitpoint_of_one_execution() -> None:
    async with testing.engine() as app:
        gate_of(app)
        one, other = [await app.submit(app.tasks["gate"]()) for _ in range(2)]
        await app.drain()
        token = await app.signals.token(one.execution_id, "go")
        assert SignalToken.parse(token.reveal()) == token
        with pytest.raises(InvalidToken):
            await other.signal("go", token=token)
        stranger = SignalToken(other.execution_id, token.waitpoint_id, token.secret)
        for bad in (
            stranger,
            "",
            "x",
            "fft_",
            token.reveal()[4:],
            "fft_äö",
            token.reveal()[:-2],
            "fft_" + "A" * 2_000,
        ):
            with pytest.raises(InvalidToken):
                await app.signals.deliver(bad, "go")
        await one.signal("go", 1, token=token)
        await app.drain()
        assert await one.result(timeout=1) == 1
        assert await other.state() is PublicState.SUSPENDED


@pytest.mark.parametrize("partition", ["7", "300", "40000", "65535", "65536", "99999"])
async def test_a_token_of_another_partition_is_told_what_every_bad_token_is(partition: str) -> None:
    async with testing.engine() as app:
        gate_of(app)
        run = await app.submit(app.tasks["gate"]())
        await app.drain()
        token = await app.signals.token(run.execution_id, "go")
        elsewhere = f"{{fp:{partition}}}:{run.execution_id[-36:]}"
        moved = SignalToken(elsewhere, token.waitpoint_id, token.secret).reveal()
        with pytest.raises(InvalidToken) as caught:
            await app.signals.deliver(moved, "go")
        assert (caught.value.code, str(caught.value)) == ("invalid_token", INVALID)


async def test_a_missing_token_is_told_so() -> None:
    async with testing.engine() as app:
        with pytest.raises(MissingToken) as caught:
            await app.signals.deliver("", "go")
        assert caught.value.code == "missing_token"


async def test_ten_thousand_mutations_of_a_token_are_refused() -> None:
    async with testing.engine() as app:
        gate_of(app)
        run = await app.submit(app.tasks["gate"]())
        await app.drain()
        token = await app.signals.token(run.execution_id, "go")
        alphabet = string.ascii_letters + string.digits + "-_=+/ é"

        async def present(text: str) -> None:
            with pytest.raises(InvalidToken):
                await app.signals.deliver(text, "go")

        bad = mutations(token.reveal(), 10_000, alphabet)
        # The last letter stands for fewer bits than it could: all its spellings but one are bad.
        bad += [token.reveal()[:-1] + letter for letter in alphabet]
        bad.remove(token.reveal())
        for start in range(0, len(bad), 500):
            await asyncio.gather(*map(present, bad[start : start + 500]))
        assert await run.state() is PublicState.SUSPENDED
        await app.signals.deliver(token.reveal(), "go", 1)
        await app.drain()
        assert await run.result(timeout=1) == 1


async def test_the_inbox_comes_in_pages_and_shows_what_is_waited_for(clock: SettableClock) -> None:
    async with testing.engine(clock) as app:
        gate_of(app)

        @app.task
        async def both(ctx: Context) -> None:
            await ctx.wait_for(all_of("a", "b"))

        first = await app.submit(both)
        await app.drain()
        clock.advance("1m")
        second = await app.submit(app.tasks["gate"]())
        await app.drain()
        page = await app.signals.pending(limit=1)
        assert [(e.execution_id, e.execution_kind, e.name) for e in page.entries] == [
            (first.execution_id, "both", "a"),
            (first.execution_id, "both", "b"),
        ]
        rest = await app.signals.pending(cursor=page.next_cursor, limit=1)
        (entry,) = rest.entries
        assert (entry.execution_id, entry.name, entry.required_signal_names) == (
            second.execution_id,
            "go",
            ("go",),
        )
        assert entry.timeout_at_ms is not None
        assert abs(entry.timeout_at_ms - entry.suspended_at_ms - 2 * 86_400_000) < 60_000
        assert rest.next_cursor is None


async def test_an_empty_key_is_refused_where_people_give_one() -> None:
    async with testing.engine() as app:
        gate_of(app)
        gate = app.tasks["gate"]
        run = await app.submit(gate())
        await app.drain()
        token = await app.signals.token(run.execution_id, "go")
        for give in (
            lambda: app.submit(gate(), idempotency_key=""),
            lambda: app.submit_many([gate()], idempotency_key=""),
            lambda: run.signal("go", 1, idempotency_key=""),
            lambda: app.signals.deliver(token, "go", 1, idempotency_key=""),
        ):
            with pytest.raises(InvalidInput, match="idempotency_key: must not be empty"):
                await give()
        assert await run.state() is PublicState.SUSPENDED


async def test_tokens_are_nowhere_but_where_they_are_revealed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with testing.engine() as app:
        told: list[SignalToken] = []
        problems: list[str] = []

        @app.task
        async def gate(ctx: Context) -> object:
            token = await ctx.waitpoint("go")
            told.append(token)
            ctx.log.info("made %s %r", token, token)
            try:
                await ctx.step("leak", lambda: token)
            except InvalidInput as error:
                problems.append(str(error))
            return (await ctx.wait_for_signal("go")).payload

        run = await app.submit(gate)
        await app.drain()
        with pytest.raises(FlowFabricError) as refused:
            await app.signals.deliver(told[0].reveal() + "A", "go")
        problems.append(repr(refused.value))
        inbox = await app.signals.pending()
        await app.signals.deliver(told[0].reveal(), "go", 1)
        await app.drain()
        engine, execution_id = app.engine, run.execution_id
        seen = [
            repr(await engine.describe_execution(execution_id)),
            repr(await engine.list_steps(execution_id)),
            repr(await engine.list_attempts(execution_id)),
            repr(await engine.read_events(limit=100)),
            repr(inbox),
            repr(told),
            str(told[0]),
            f"{told[0]}",
            caplog.text,
            *problems,
        ]
        digest = told[0].secret.reveal().rpartition(":")[2]
        for text in seen:
            assert text
            assert digest not in text
            assert told[0].reveal() not in text
