"""A server over every store, asked without a network."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache

import httpx
import pytest
import uvicorn
from litestar import Litestar

from flowfabric import Engine, connect
from flowfabric.server.api import ServerConfig, create_app
from flowfabric.server.serve import Impatient
from flowfabric.testing import SettableClock
from tests.conformance.given import Given


@pytest.fixture(params=["sqlite-memory", "postgres"])
def store_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    """A database of each kind: what becomes of files is none of the server's business."""
    return new_database(request.param)


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
async def engine(store_url: str, clock: SettableClock) -> AsyncIterator[Engine]:
    async with await connect(store_url, clock=clock) as opened:
        yield opened


@pytest.fixture
def given(engine: Engine, clock: SettableClock) -> Given:
    return Given(engine, clock)


@pytest.fixture
def server_config() -> ServerConfig:
    """Parametrise `server_config` to test with another."""
    return ServerConfig(anybody="without_tokens")


@pytest.fixture
async def http(engine: Engine, server_config: ServerConfig) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server on the engine of the test."""
    app = app_of(server_config)
    _ENGINES.append(engine)
    transport = httpx.ASGITransport(app=_asgi(app), raise_app_exceptions=False)
    started, stop = asyncio.Event(), asyncio.Event()

    async def live() -> None:
        # Begun and ended by the same task, which fixtures are not.
        async with app.lifespan():
            started.set()
            await stop.wait()

    living = asyncio.create_task(live())
    await started.wait()
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
    stop.set()
    await living
    _ENGINES.pop()


@pytest.fixture
async def live(engine: Engine, server_config: ServerConfig) -> AsyncIterator[httpx.AsyncClient]:
    """The same over a real connection, for answers that go on."""
    async with (
        serving(engine, server_config) as url,
        httpx.AsyncClient(base_url=url, timeout=10) as client,
    ):
        yield client


@asynccontextmanager
async def serving(engine: Engine, server_config: ServerConfig) -> AsyncIterator[str]:
    """A server on an engine, and where it is."""
    _ENGINES.append(engine)
    settings = uvicorn.Config(
        app_of(server_config), port=0, log_config=None, lifespan="on", http=Impatient
    )
    server = uvicorn.Server(settings)
    running = asyncio.create_task(server.serve())
    while not server.started:
        assert not running.done()
        await asyncio.sleep(0)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await running
        _ENGINES.pop()


_ENGINES: list[Engine] = []
"""That of the test which runs: making an application takes longer than most tests."""


@cache
def app_of(config: ServerConfig) -> Litestar:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Engine]:
        yield _ENGINES[-1]

    return create_app(opened, config)


def _asgi(app: Litestar) -> Callable[..., Awaitable[None]]:
    return app
