"""Tokens that a server rejects: who learns it, and how soon.

They are no outage. Whoever waits, follows or works is told at once instead of asking for ever.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from flowfabric import App, Engine, connect, errors
from flowfabric.core.states import PublicState
from flowfabric.engine.api_tokens import TokenCreated
from flowfabric.server.api import ServerConfig
from tests.apps import PATIENCE_S, reached
from tests.cli.command import Ran, run
from tests.server.conftest import serving

EVERYTHING = ("read", "submit", "signal", "work", "operate")
LOUD = ("WARNING", "ERROR", "CRITICAL")
PROGRAM = """
import os

from flowfabric import App

app = App(os.environ["SERVER"])

@app.task
async def greet(name: str) -> str:
    return f"hello {name}"
"""


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers notice at once that a token has ended, and those who wait as well."""
    monkeypatch.setattr("flowfabric.server.access.TOKEN_CACHE_S", 0.0)
    monkeypatch.setattr("flowfabric.server.draining.CHECK_S", 0.05)


@pytest.fixture
async def database(store_url: str) -> AsyncIterator[Engine]:
    async with await connect(store_url) as engine:
        yield engine


@pytest.fixture
async def url(database: Engine) -> AsyncIterator[str]:
    async with serving(database, ServerConfig()) as address:
        yield address


@pytest.fixture
async def made(database: Engine) -> TokenCreated:
    return await database.create_token("app", scopes=EVERYTHING)


@pytest.fixture
async def app(url: str, made: TokenCreated) -> AsyncIterator[App]:
    app = App(url, token=made.token)

    @app.task
    async def wait() -> None:
        await asyncio.Event().wait()

    async with app:
        yield app


async def result(app: App, execution_id: str) -> object:
    return await app.run(app.tasks["wait"], execution_id).result()


async def stream(app: App, execution_id: str) -> object:
    return [each async for each in app.run(app.tasks["wait"], execution_id).stream()]


async def events(app: App, _execution_id: str) -> object:
    return [each async for each in app.events()]


@pytest.mark.parametrize("follow", [result, stream, events], ids=lambda each: each.__name__)
async def test_whoever_waits_is_told_that_the_token_was_revoked(
    app: App,
    database: Engine,
    made: TokenCreated,
    follow: Callable[[App, str], Awaitable[object]],
) -> None:
    waited = await app.submit(app.tasks["wait"])
    following = asyncio.ensure_future(follow(app, waited.execution_id))
    await database.revoke_token(made.stored.token_id)

    with pytest.raises(errors.Unauthorized, match="missing or invalid Authorization"):
        async with asyncio.timeout(PATIENCE_S):
            await following


async def test_a_worker_whose_token_is_revoked_stops_and_says_why(
    app: App, database: Engine, made: TokenCreated, caplog: pytest.LogCaptureFixture
) -> None:
    waited = await app.submit(app.tasks["wait"])
    working = asyncio.create_task(app.run_worker(signals=False))
    await reached(waited, PublicState.ACTIVE)

    await database.revoke_token(made.stored.token_id)

    with pytest.raises(errors.Unauthorized, match="missing or invalid Authorization"):
        async with asyncio.timeout(PATIENCE_S):
            await working
    assert [each.message for each in caplog.records if each.levelname in LOUD] == []
    # Nothing is held against the run: it passes to another worker when the lease ends.
    found = await database.inspect_execution(waited.execution_id)
    assert found is not None
    assert (found.public_state, found.total_attempt_count) == ("active", 1)


async def test_a_worker_whose_token_does_not_allow_to_work_stops_and_says_why(
    url: str, database: Engine
) -> None:
    reading = await database.create_token("reading", scopes=["read", "submit"])
    app = App(url, token=reading.token)
    app.task(_nothing)

    async with app:
        with pytest.raises(errors.AccessDenied, match="needs a token with the scope work"):
            async with asyncio.timeout(PATIENCE_S):
                await app.run_worker(signals=False)


async def _nothing() -> None: ...


async def test_a_token_that_was_refused_is_not_presented_again_and_again(
    app: App, database: Engine, made: TokenCreated, url: str
) -> None:
    """Or the address would be taken for one that guesses, and told to wait instead of why."""
    await database.revoke_token(made.stored.token_id)
    for _ in range(3):
        with pytest.raises(errors.Unauthorized):
            await result(app, "order-17")


@pytest.mark.parametrize(
    ("scopes", "says"),
    [
        (EVERYTHING, "missing or invalid Authorization header"),
        (("read",), "needs a token with the scope"),
    ],
    ids=["revoked", "without its scope"],
)
async def test_the_command_ends_with_a_status_of_its_own_and_one_line(
    url: str, database: Engine, tmp_path: Path, scopes: tuple[str, ...], says: str
) -> None:
    made = await database.create_token("worker", scopes=scopes)
    if scopes == EVERYTHING:
        await database.revoke_token(made.stored.token_id)
    (tmp_path / "shop.py").write_text(PROGRAM)

    def work() -> Ran:
        given = {"SERVER": url, "FLOWFABRIC_TOKEN": made.token}
        return run("worker", "shop:app", "--log-level", "warning", cwd=tmp_path, **given)

    ran = await asyncio.to_thread(work)

    assert (ran.status, ran.out) == (6, "")
    (line,) = ran.err.splitlines()
    assert line.startswith(f"Error: {url}: ")
    assert says in line
