"""Whatever the description of the server allows: no crash, and no answer it does not declare."""

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Protocol

import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.result import Ok

from flowfabric import Engine, connect
from flowfabric.server.api import ServerConfig, create_app

EXAMPLES = 8
"""Of each request: enough to find what is never thought of, few enough for every commit."""
ENDLESS = ("/v1/events", "/v1/hints", "/v1/executions/{id}/stream")
STARTED_WITHIN_S = 20
WAITS = ("wait_ms", "block_ms")


class Described(Protocol):
    path: str
    method: str
    label: str


class Answered(Protocol):
    status_code: int
    text: str


class Generated(Protocol):
    """What schemathesis makes of the description."""

    operation: Described
    query: dict[str, object] | None

    def call(self, *, base_url: str) -> Answered: ...


class Ready(uvicorn.Server):
    """Tells when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server with a thread and a database of its own, open to anybody."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Engine]:
        async with await connect("sqlite:///:memory:") as engine:
            yield engine

    app = create_app(opened, ServerConfig(anybody="always"))
    serving = Ready(uvicorn.Config(app, port=0, log_config=None, lifespan="on"))
    thread = threading.Thread(target=serving.run)
    thread.start()
    assert serving.ready.wait(STARTED_WITHIN_S)
    port = serving.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    serving.should_exit = True
    thread.join()


@pytest.mark.timeout(600)
def test_no_request_that_is_described_breaks_the_server(server: str) -> None:
    described = httpx.get(f"{server}/docs/openapi.json").json()
    schema = schemathesis.openapi.from_dict(described)
    asked, wrong = 0, list[str]()

    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        if operation.path in ENDLESS:
            continue
        asked += 1

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case: Generated) -> None:
            for name in WAITS:
                if case.query and name in case.query:
                    case.query[name] = 0
            answer = case.call(base_url=server)
            asking = case.operation
            declared = described["paths"][asking.path][asking.method.lower()]["responses"]
            if answer.status_code >= 500 or str(answer.status_code) not in declared:
                wrong.append(f"{asking.label}: {answer.status_code} {answer.text[:200]}")

        ask()

    assert wrong == []
    assert asked > 40
