"""Payloads through a codec, on every store."""

import asyncio
import itertools
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from flowfabric import App, Context, EngineConfig, Retry, Run, testing
from flowfabric.core.checks import ENCODED
from flowfabric.core.creation import NewExecution
from flowfabric.core.states import PublicState
from flowfabric.errors import (
    CodecFailed,
    ExecutionFailed,
    IdempotencyConflict,
    PayloadTooLarge,
)
from flowfabric.task import SubmitOptions, Task
from tests.apps import blocked, reached, working

SECRET = "the butler did it"


class Elsewhere:
    """Keeps everything in a dictionary, and never gives the same answer twice."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        # Values are encoded on several threads at once.
        self._numbers = itertools.count()

    def encode(self, data: bytes) -> bytes:
        key = b"%d" % next(self._numbers)
        self.kept[key] = zlib.compress(data)
        return key

    def decode(self, data: bytes) -> bytes:
        return zlib.decompress(self.kept[data])


def whodunit(app: App) -> None:
    @app.task
    async def tell(ctx: Context, clue: str) -> str:
        found = await ctx.step("look", lambda: clue)
        heard = await ctx.wait_for_signal("heard", timeout="1h", type=str)
        child = await ctx.submit(repeat, heard.payload)
        assert (found, await child.result()) == (clue, heard.payload)
        return found

    @app.task
    async def repeat(words: str) -> str:
        return words


async def test_nothing_is_stored_as_it_was_said(store_url: str) -> None:
    codec = Elsewhere()
    async with App(store_url, codec=codec) as app:
        whodunit(app)
        async with working(app):
            run = await app.submit(app.tasks["tell"](SECRET), idempotency_key="k", strict=True)
            again = await app.submit(app.tasks["tell"](SECRET), idempotency_key="k", strict=True)
            assert again.execution_id == run.execution_id
            named = SubmitOptions(execution_id=run.execution_id, strict=True)
            again = await app.submit(app.tasks["tell"](SECRET), **named)
            assert again.execution_id == run.execution_id
            with pytest.raises(IdempotencyConflict):
                await app.submit(app.tasks["tell"]("something else"), **named)
            await reached(run, PublicState.SUSPENDED)
            await run.signal("heard", SECRET)
            assert await run.result(timeout="20s") == SECRET
        (step, *_) = await app.engine.list_steps(run.execution_id)
        assert step.result == f'"{SECRET}"'.encode()
        assert (await run.steps())[0].result == step.result
    assert any(SECRET.encode() in zlib.decompress(each) for each in codec.kept.values())
    if store_url.startswith("sqlite"):
        for path in Path(store_url.removeprefix("sqlite:///")).parent.iterdir():
            assert SECRET.encode() not in path.read_bytes()


async def test_large_values_fit_when_the_codec_keeps_them_elsewhere(store_url: str) -> None:
    config = EngineConfig(payload_bytes_max=1_000)
    async with App(store_url, codec=Elsewhere(), config=config) as app:

        @app.task
        async def echo(ctx: Context, words: str) -> str:
            return await ctx.step("say", lambda: words)

        async with working(app):
            run = await app.submit(echo, "x" * 10_000)
            assert await run.result(timeout="20s") == "x" * 10_000


async def test_what_is_encoded_already_must_fit_too(store_url: str) -> None:
    config = EngineConfig(payload_bytes_max=1_000)
    async with App(store_url, codec=Elsewhere(), config=config) as app:
        request = NewExecution(execution_kind="work", input_payload=ENCODED + b"x" * 1_000)
        with pytest.raises(PayloadTooLarge, match="1000"):
            await app.engine.create_execution(request)


class Picky:
    """Makes more of some than there is room for."""

    def encode(self, data: bytes) -> bytes:
        return data * 200 if b"grow" in data else data

    def decode(self, data: bytes) -> bytes:
        return data


async def test_a_result_of_which_the_codec_makes_too_much_fails_for_good(store_url: str) -> None:
    ran: list[str] = []
    config = EngineConfig(payload_bytes_max=1_000)
    async with App(store_url, codec=Picky(), config=config) as app:

        @app.task(retry=Retry(max_retries=3))
        async def say(words: str) -> str:
            ran.append(words)
            return "grow" if words == "ow" else words

        async with working(app):
            run, other = await app.submit(say, "ow"), await app.submit(say, "well")
            reason = "the result of say, encoded, is 1201 bytes, at most 1000 are stored; keep it"
            with pytest.raises(ExecutionFailed, match=reason):
                await run.result(timeout="20s")
            assert await other.result(timeout="20s") == "well"
    assert sorted(ran) == ["ow", "well"]


class Keys:
    """Needs a service that may be away, for some values."""

    def __init__(self) -> None:
        self.not_encoded = self.not_decoded = b"\0"

    def encode(self, data: bytes) -> bytes:
        return self._turned(data, unless=self.not_encoded in data)

    def decode(self, data: bytes) -> bytes:
        return self._turned(data, unless=self.not_decoded in data[::-1])

    def _turned(self, data: bytes, *, unless: bool) -> bytes:
        if unless:
            raise ConnectionError("the key service is away")
        return data[::-1]


async def test_what_the_codec_cannot_encode_is_refused_to_who_submits_or_signals(
    store_url: str,
) -> None:
    codec = Keys()
    async with App(store_url, codec=codec) as app:
        whodunit(app)
        run = await app.submit(app.tasks["tell"]("clue"))
        codec.not_encoded = b"butler"
        refusal = "codec could not encode a value: ConnectionError: the key service is away"
        with pytest.raises(CodecFailed, match=refusal):
            await run.signal("heard", SECRET)
        calls = [app.submit(app.tasks["repeat"](words)) for words in (SECRET, "hello")]
        refused, taken = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(refused, CodecFailed)
        assert isinstance(taken, Run)
        with pytest.raises(CodecFailed, match=refusal):
            await app.submit_many([app.tasks["repeat"](SECRET)])


@pytest.mark.parametrize("what", ["step", "result"])
async def test_what_the_codec_could_not_encode_is_tried_again(store_url: str, what: str) -> None:
    codec = Keys()
    ran: list[str] = []
    async with App(store_url, codec=codec) as app:

        async def effect(words: str) -> str:
            ran.append(words)
            return words

        @app.task(retry=Retry(max_retries=3, delay=0))
        async def say(ctx: Context) -> str:
            codec.not_encoded = b"\0" if ctx.retry_count else what.encode()
            return f"{await ctx.step('say', effect, 'step')} and result"

        async with working(app):
            run = await app.submit(say)
            assert await run.result(timeout="20s") == "step and result"
            (failed, *_) = (await run.snapshot()).attempts
        assert "the app's codec could not encode" in (failed.failure_reason or "")
    # A step that was not stored is one that has failed.
    assert ran == ["step"] * (2 if what == "step" else 1)


@pytest.mark.parametrize("what", ["arguments", "step", "signal", "child"])
async def test_what_the_codec_cannot_decode_blocks_the_run_until_it_can(
    store_url: str, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    codec = Keys()
    done: list[str] = []

    def tasks_of(app: App) -> App:
        @app.task
        async def child() -> str:
            # From now on nobody can read what it returns.
            if what == "child" and not done:
                codec.not_decoded = b"child"
            return "child"

        @app.task
        async def tell(ctx: Context, words: str) -> list[str]:
            found = [words, await ctx.step("look", lambda: "step")]
            found.append((await ctx.wait_for_signal("heard", type=str)).payload)
            found.append(await (await ctx.submit(child)).result())
            done.append("done")
            return found

        return app

    async with tasks_of(App(store_url, codec=codec)) as app:
        run = await app.submit(app.tasks["tell"]("arguments"))
        if what == "arguments":
            codec.not_decoded = what.encode()
        async with working(app):
            if what != "arguments":
                await reached(run, PublicState.SUSPENDED)
                await run.signal("heard", "signal")
                if what != "child":
                    codec.not_decoded = what.encode()
        async with working(app):
            sentence = await blocked(run)
        value = "the result of child" if what == "child" else "a value"
        assert f"the app's codec could not decode {value}: ConnectionError: " in sentence
        assert "; mend the codec or bring back what it needs, or cancel it." in sentence
        assert not [each for each in caplog.messages if "changed code" in each]
        seen = await run.snapshot()
        assert (seen.retry_count, seen.total_attempt_count, done) == (0, 1, [])
        done.append("the key service is back")
        codec.not_decoded = b"\0"
        async with working(app):
            if what == "arguments":
                await reached(run, PublicState.SUSPENDED)
                await run.signal("heard", "signal")
            assert await run.result(timeout="20s") == ["arguments", "step", "signal", "child"]
    assert done[1:] == ["done"]


class Mirror:
    """Turns values round. What it returns, and as what, is up to `returning`."""

    def encode(self, data: bytes) -> bytes:
        return data[::-1]

    def decode(self, data: bytes) -> bytes:
        return data[::-1]

    def returning(self, name: str, kind: Callable[[bytes], object]) -> None:
        # In place of the method, whose type would have to tell the truth.
        vars(self)[name] = lambda data: kind(data[::-1])


def echoing(app: App) -> Task[[str], str]:
    @app.task(retry=Retry(max_retries=1, delay=0))
    async def echo(ctx: Context, words: str) -> str:
        return await ctx.step("say", lambda: words)

    return echo


@pytest.mark.parametrize("kind", [bytearray, memoryview])
async def test_a_codec_may_return_bytes_of_any_kind(
    store_url: str, kind: Callable[[bytes], object]
) -> None:
    codec = Mirror()
    codec.returning("encode", kind)
    codec.returning("decode", kind)
    async with App(store_url, codec=codec) as app, working(app):
        run = await app.submit(echoing(app), "hello")
        assert await run.result(timeout="20s") == "hello"
        assert [step.result for step in await run.steps()] == [b'"hello"']


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        pytest.param(lambda data: None, "TypeError: it returned NoneType, not bytes", id="None"),
        pytest.param(bytes.decode, "TypeError: it returned str, not bytes", id="str"),
        pytest.param(lambda data: b"", "ValueError: it returned no data", id="empty"),
    ],
)
async def test_what_a_codec_returns_in_place_of_bytes_blocks_the_run_until_it_does_not(
    store_url: str, kind: Callable[[bytes], object], told: str
) -> None:
    codec = Mirror()
    async with App(store_url, codec=codec) as app:
        run = await app.submit(echoing(app), "hello")
        codec.returning("decode", kind)
        async with working(app):
            assert f"the app's codec could not decode a value: {told}" in await blocked(run)
        seen = await run.snapshot()
        assert (seen.retry_count, seen.total_attempt_count) == (0, 1)
        codec.returning("decode", bytes)
        async with working(app):
            assert await run.result(timeout="20s") == "hello"
        codec.returning("decode", kind)
        with pytest.raises(CodecFailed, match=f"the result of echo: {re.escape(told)}"):
            await run.result(timeout="20s")
        if told.startswith("TypeError"):
            codec.returning("encode", kind)
            with pytest.raises(CodecFailed, match=re.escape(told)):
                await app.submit(app.tasks["echo"]("hello"))


@pytest.mark.parametrize("away", [True, False])
async def test_readers_are_told_what_the_codec_says(store_url: str, away: bool) -> None:
    """Or that there is none."""

    class Away(Elsewhere):
        def decode(self, data: bytes) -> bytes:
            raise RuntimeError("no key today")

    @(app := App(store_url, codec=Elsewhere())).task
    async def tell(ctx: Context) -> str:
        await ctx.emit(SECRET)
        return await ctx.step("look", lambda: SECRET)

    async with app, working(app):
        run = await app.submit(tell)
        assert await run.result("20s") == SECRET
    told = "RuntimeError: no key today" if away else "there is none; pass App(codec=…)"
    async with App(store_url, codec=Away() if away else None) as reader:
        again = reader.run(tell, run.execution_id)
        for ask in (again.result, again.frames):
            with pytest.raises(CodecFailed, match=re.escape(told)):
                await ask()
        (look,) = await again.steps()
        assert look.result is None
        assert look.error is not None
        assert told in look.error


async def test_what_was_stored_without_a_codec_is_still_read(store_url: str) -> None:
    async with App(store_url) as plain:
        whodunit(plain)
        run = await plain.submit(plain.tasks["repeat"]("hello"))
    async with App(store_url, codec=Elsewhere()) as app:
        whodunit(app)
        async with working(app):
            assert await app.run(app.tasks["repeat"], run.execution_id).result("20s") == "hello"


async def test_without_the_codec_a_run_is_blocked_with_the_reason(store_url: str) -> None:
    codec = Elsewhere()
    async with App(store_url, codec=codec) as coded:
        whodunit(coded)
        run = await coded.submit(coded.tasks["repeat"]("hello"))
    async with App(store_url) as app:
        whodunit(app)
        async with working(app):
            why = await blocked(app.run(app.tasks["repeat"], run.execution_id))
            assert "stored through a codec that this app does not have" in why
    async with coded, working(coded):
        again = coded.run(coded.tasks["repeat"], run.execution_id)
        assert await again.result(timeout="20s") == "hello"


async def test_flows_pass_on_what_went_through_a_codec() -> None:
    app = App(codec=Elsewhere())

    @app.task
    async def make() -> str:
        return SECRET

    @app.task
    async def use(one: str, more: list[str]) -> list[str]:
        return [one, *more]

    async with testing.engine(app=app) as local:
        flow = local.flow("whodunit")
        node = flow.add(use, flow.add(make), join=[flow.add(make)])
        run = await flow.start()
        await local.drain()
        assert await run.result(node) == [SECRET, SECRET]
