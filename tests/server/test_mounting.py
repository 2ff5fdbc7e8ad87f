"""The server within a program: mounted under a prefix, and what it tells about itself there."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from flowfabric import Engine
from flowfabric.errors import InvalidInput
from flowfabric.server.api import ServerConfig, create_app

OPEN = ServerConfig(anybody="always")


def mounted(engine: Engine, *, starts: bool) -> Starlette:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Engine]:
        yield engine

    server = create_app(opened, OPEN)
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
async def client_of(program: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=program)
    async with (
        program.router.lifespan_context(program),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


async def test_a_mounted_server_answers_and_describes_itself_where_it_is(engine: Engine) -> None:
    async with client_of(mounted(engine, starts=True)) as http:
        created = await http.post("/fabric/v1/executions", json={"execution_kind": "x"})
        described = (await http.get("/fabric/docs/openapi.json")).json()
        page = await http.get("/fabric/docs")

    assert created.status_code == 201
    assert described["servers"] == [{"url": "/fabric"}]
    assert "href=docs/openapi.json" in page.text


async def test_a_mounted_server_that_was_not_started_says_so(engine: Engine) -> None:
    async with client_of(mounted(engine, starts=False)) as http:
        answer = await http.get("/fabric/v1/executions")

    assert answer.status_code == 503
    assert "lifespan()" in answer.json()["error"]


def test_what_opens_no_engine_makes_no_server() -> None:
    create: Callable[..., object] = create_app
    with pytest.raises(InvalidInput, match=r"^connect: must open an engine"):
        create("sqlite:///x.db")


async def test_the_page_loads_nothing_and_shows_every_request(http: httpx.AsyncClient) -> None:
    paths = (await http.get("/docs/openapi.json")).json()["paths"]
    page = (await http.get("/docs")).text

    assert not re.search(r"<script|src=|https?://", page)
    assert "default-src 'none'" in page
    for path in paths:
        assert f"<code>{path}</code>" in page
