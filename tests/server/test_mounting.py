"""The server within a program: mounted under a prefix, and what it tells about itself there."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI
from litestar import Litestar, asgi
from starlette.applications import Starlette
from starlette.routing import Mount

from flowfabric import App, Engine, connect
from flowfabric.errors import InvalidInput
from flowfabric.server.api import ServerConfig, create_app

OPEN = ServerConfig(anybody="always")
Program = Starlette | FastAPI | Litestar


def opening(engine: Engine) -> Callable[[], AbstractAsyncContextManager[Engine]]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Engine]:
        yield engine

    return opened


def mounted(engine: Engine, *, starts: bool) -> Starlette:
    server = create_app(opening(engine), OPEN)
    application: Callable[..., Awaitable[None]] = server

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if starts:
            async with server.lifespan():
                yield
        else:
            yield

    return Starlette(routes=[Mount("/fabric", app=application)], lifespan=lifespan)


@asynccontextmanager
async def client_of(program: Program) -> AsyncIterator[httpx.AsyncClient]:
    application: Callable[..., Awaitable[None]] = program
    transport = httpx.ASGITransport(app=application)
    async with (
        program.lifespan()
        if isinstance(program, Litestar)
        else program.router.lifespan_context(program),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


def in_starlette(engine: Engine) -> Starlette:
    return mounted(engine, starts=True)


def in_fastapi(engine: Engine) -> FastAPI:
    server = create_app(opening(engine), OPEN)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with server.lifespan():
            yield

    program = FastAPI(lifespan=lifespan)
    application: Callable[..., Awaitable[None]] = server
    program.mount("/fabric", application)
    return program


def in_litestar(engine: Engine) -> Litestar:
    server = create_app(opening(engine), OPEN)

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        async with server.lifespan():
            yield

    return Litestar(
        [asgi("/fabric", is_mount=True, copy_scope=True)(server)],
        lifespan=[lifespan],
        logging_config=None,
    )


@pytest.mark.parametrize("program", [in_starlette, in_fastapi, in_litestar])
async def test_a_mounted_server_answers_and_describes_itself_where_it_is(
    engine: Engine, program: Callable[[Engine], Program]
) -> None:
    async with client_of(program(engine)) as http:
        created = await http.post("/fabric/v1/executions", json={"execution_kind": "x"})
        described = (await http.get("/fabric/docs/openapi.json")).json()
        pages = [await http.get(f"/fabric/docs{end}") for end in ("", "/")]

    assert created.status_code == 201
    assert described["servers"] == [{"url": "/fabric"}]
    for page in pages:
        assert 'href="/fabric/docs/openapi.json"' in page.text


async def test_a_mounted_server_that_was_not_started_says_so(engine: Engine) -> None:
    async with client_of(mounted(engine, starts=False)) as http:
        answer = await http.get("/fabric/v1/executions")

    assert answer.status_code == 503
    assert "lifespan()" in answer.json()["error"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (App("sqlite:///:memory:"), "App"),
        ("postgresql://me:secret@db/x", "str"),
        (connect, "function"),
        (None, "NoneType"),
    ],
)
def test_what_opens_no_engine_makes_no_server(given: object, named: str) -> None:
    create: Callable[..., object] = create_app
    with pytest.raises(InvalidInput, match=f"^connect: must be a function .*, not {named};") as no:
        create(given)

    assert "secret" not in str(no.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (lambda: connect("sqlite:///:memory:"), "coroutine"),
        (lambda: None, "NoneType"),
        (lambda: App("sqlite:///:memory:"), "App"),
    ],
)
async def test_what_opens_something_else_starts_no_server(given: object, named: str) -> None:
    create: Callable[..., Litestar] = create_app
    with pytest.RaisesGroup(
        pytest.RaisesExc(InvalidInput, match=f"^connect: must be a function .*, not {named};")
    ):
        async with create(given).lifespan():
            pytest.fail("it started")


async def test_the_page_loads_nothing_and_shows_every_request(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/docs/openapi.json")).json()["paths"]
    page = await http.get("/docs")

    assert not re.search(r"<script|src=|https?://", page.text)
    policy = page.headers["content-security-policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
    for path in paths:
        assert f"<code>{path}</code>" in page.text
