"""Payloads through a codec, on every store."""

import itertools
import zlib
from pathlib import Path

import pytest

from flowfabric import App, Context, EngineConfig, Retry, testing
from flowfabric.core.states import PublicState
from flowfabric.errors import ExecutionFailed, IdempotencyConflict
from flowfabric.task import SubmitOptions
from tests.apps import reached, working

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


class Picky:
    """Refuses what it does not like, and makes more of some than there is room for."""

    def encode(self, data: bytes) -> bytes:
        if b"refuse" in data:
            raise LookupError("no key for it")
        return data * 200 if b"grow" in data else data

    def decode(self, data: bytes) -> bytes:
        return data


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            "fuse",
            "the result of say cannot be encoded by the app's codec: LookupError: no key for it",
        ),
        (
            "ow",
            "the result of say, encoded, is 1201 bytes, at most 1000 are stored; keep it elsewhere",
        ),
    ],
)
async def test_a_result_the_codec_cannot_store_fails_for_good(
    store_url: str, words: str, reason: str
) -> None:
    ran: list[str] = []
    config = EngineConfig(payload_bytes_max=1_000)
    async with App(store_url, codec=Picky(), config=config) as app:

        @app.task(retry=Retry(max_retries=3))
        async def say(words: str) -> str:
            ran.append(words)
            return {"fuse": "refuse", "ow": "grow", "well": "well"}[words]

        async with working(app):
            run, other = await app.submit(say, words), await app.submit(say, "well")
            with pytest.raises(ExecutionFailed) as failed:
                await run.result(timeout="20s")
            assert reason in str(failed.value)
            assert await other.result(timeout="20s") == "well"
    assert sorted(ran) == sorted([words, "well"])


async def test_what_was_stored_without_a_codec_is_still_read(store_url: str) -> None:
    async with App(store_url) as plain:
        whodunit(plain)
        run = await plain.submit(plain.tasks["repeat"]("hello"))
    async with App(store_url, codec=Elsewhere()) as app:
        whodunit(app)
        async with working(app):
            assert await app.run(app.tasks["repeat"], run.execution_id).result("20s") == "hello"


async def test_without_the_codec_a_run_fails_with_the_reason(store_url: str) -> None:
    async with App(store_url, codec=Elsewhere()) as coded:
        whodunit(coded)
        run = await coded.submit(coded.tasks["repeat"]("hello"))
    async with App(store_url) as app:
        whodunit(app)
        async with working(app):
            with pytest.raises(ExecutionFailed, match="stored through a codec"):
                await app.run(app.tasks["repeat"], run.execution_id).result("20s")


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
