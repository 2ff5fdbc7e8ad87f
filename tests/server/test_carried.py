"""What a server carries between programs and the database: errors, and values in code."""

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

import pytest

from flowfabric import App, Context, Engine, connect, errors
from flowfabric.core.states import PublicState
from flowfabric.reconcilers import Supervisor
from flowfabric.server.problems import shown
from tests.apps import PATIENCE_S, reached, working
from tests.conformance.given import UNKNOWN_ID
from tests.sdk.test_codec_everywhere import SECRET, Shifted, stored_bytes
from tests.server.conftest import serving
from tests.server.test_remote import OPEN

# Errors

GIVEN: Final[dict[str, object]] = {
    "max": 3,
    "found": 1,
    "expected": 2,
    "elapsed_ms": 4,
    "limit_bytes": 5,
    "actual_bytes": 6,
    "lease_epoch": 7,
    "retry_after_ms": 8_000,
    "missing": ("gpu",),
    "calls": ["step"],
    "decoding": True,
    "kind": errors.BackendErrorKind.AUTH,
    "may_have_happened": True,
    "used": 9,
    "reserved": 10,
    "limit": 11,
    "value": "odd",
    "existing": None,
}
"""Arguments that are no text."""


def each_error(kind: type[errors.FlowFabricError]) -> Iterator[errors.FlowFabricError]:
    parameters = inspect.signature(kind).parameters
    given = {name: GIVEN.get(name, f"some {name}") for name in parameters}
    make: Callable[..., errors.FlowFabricError] = kind
    if not kind.__subclasses__():
        yield make(**given)
    for each in kind.__subclasses__():
        yield from each_error(each)


@pytest.fixture
async def app(engine: Engine) -> AsyncIterator[App]:
    async with serving(engine, OPEN) as url, App(url) as app:
        yield app


async def test_every_error_arrives_as_what_it_was(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising: list[errors.FlowFabricError] = []

    async def refuse(*_args: object, **_given: object) -> None:
        raise raising[-1]

    monkeypatch.setattr(Engine, "get_execution_result", refuse)
    seen = {}
    for error in each_error(errors.FlowFabricError):
        raising.append(error)
        with pytest.raises(errors.FlowFabricError) as raised:
            await app.engine.get_execution_result(UNKNOWN_ID)
        again = raised.value
        seen[type(error)] = (type(again), str(again), again.code, again.error_class, vars(again))

    assert len(seen) > 80
    # But for where the database is: only the server's log says that.
    assert seen == {
        type(each): (type(sent), str(sent), sent.code, sent.error_class, vars(sent))
        for each, sent in zip(raising, map(shown, raising), strict=True)
    }


# Values in code


@pytest.fixture(params=["sqlite-file", "postgres"])
def coded_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    return new_database(request.param)


async def test_values_are_in_code_in_the_database_and_plain_for_programs(coded_url: str) -> None:
    async with (
        await connect(coded_url, codec=Shifted()) as engine,
        Supervisor(engine),
        serving(engine, OPEN) as url,
    ):
        app = App(url)

        @app.task
        async def leaf(words: str) -> str:
            return words

        @app.task
        async def tell(ctx: Context, words: str) -> list[object]:
            kept = await ctx.step("keep", str, words)
            await ctx.emit(words)
            await ctx.summary({"words": words})
            child = await ctx.submit(leaf, words)
            signal = await ctx.wait_for_signal("go", type=str)
            return [kept, await child.result(), signal.payload]

        async with app, working(app):
            run = await app.submit(tell, SECRET)
            await reached(run, PublicState.SUSPENDED)
            await run.signal("go", SECRET)
            result = await run.result(timeout=PATIENCE_S)
            (step, *_) = await run.steps()
            frames = [each.text for each in await run.frames()]
            summary = await run.summary()
            flow = app.flow("leaves")
            last = flow.add(leaf, flow.add(leaf, SECRET))
            of_flow = await (await flow.start()).result(last, timeout=PATIENCE_S)

        assert result == [SECRET] * 3
        assert frames[0] == SECRET
        assert summary == {"words": SECRET}
        assert of_flow == SECRET
        assert step.name == "keep"
        assert SECRET.encode() not in await stored_bytes(coded_url)


async def test_a_codec_that_fails_at_the_server_is_told_as_such(coded_url: str) -> None:
    class Broken(Shifted):
        def encode(self, data: bytes) -> bytes:
            raise ValueError("no key")

    async with await connect(coded_url, codec=Broken()) as engine, serving(engine, OPEN) as url:
        app = App(url)

        @app.task
        async def leaf(words: str) -> str:
            return words

        async with app:
            with pytest.raises(errors.CodecFailed, match="no key"):
                await app.submit(leaf, SECRET)


def test_a_codec_of_its_own_is_refused_where_the_server_has_one() -> None:
    with pytest.raises(errors.InvalidInput, match="is a setting of the server"):
        App("http://127.0.0.1:9", codec=Shifted())
