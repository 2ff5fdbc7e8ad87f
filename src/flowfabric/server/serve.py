"""The server as a process: where it listens, and how it stops."""

import asyncio
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from types import FrameType
from typing import Final

import msgspec
import uvicorn
from litestar import Litestar
from msgspec import Struct
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from flowfabric.engine.engine import Engine
from flowfabric.errors import InvalidInput, Unavailable
from flowfabric.reconcilers import Supervisor
from flowfabric.server.access import Anybody, is_local
from flowfabric.server.api import HEADER_BYTES_MAX, ServerConfig, ServerState, create_app
from flowfabric.server.problems import Problem
from flowfabric.stop_signals import heeded

DRAIN_S: Final = 30
KEEP_ALIVE_S: Final = 75
HEADERS_S: Final = 20.0
"""How long a connection may take to send the head of a request."""

GATHERED_MAX: Final = 65_536
"""Bytes after which an answer is sent before the turn of the event loop ends."""

EngineOpener = Callable[[], AbstractAsyncContextManager[Engine]]


class Listening(Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 9090
    drain_s: int = DRAIN_S
    reconciles: bool = True
    """Whether this process also runs the reconcilers."""
    trusted_proxies: tuple[str, ...] = ()
    """Proxies whose `X-Forwarded-For` header is trusted."""

    @property
    def is_local(self) -> bool:
        return is_local(f"[{self.host}]" if ":" in self.host else self.host)

    def takes(self, insecure: bool) -> Anybody:
        """When callers need no token: never from elsewhere, unless `insecure`."""
        if insecure:
            return "always"
        return "without_tokens" if self.is_local else "never"


class Gathering(asyncio.Transport):
    """Sends together what is written in one turn of the event loop: a head with its body.

    One send costs more than everything else uvicorn does for a request.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._gathered: list[bytes] = []
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._gathered:
            self._loop.call_soon(self.send)
        self._gathered.append(bytes(data))
        self._size += len(data)
        if self._size >= GATHERED_MAX:
            self.send()

    def send(self) -> None:
        gathered, self._gathered, self._size = self._gathered, [], 0
        if gathered:
            self._transport.write(b"".join(gathered))

    def close(self) -> None:
        self.send()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._transport.get_extra_info(name, default)


class Impatient(H11Protocol):
    """Closes connections that take too long to send the head of a request."""

    _giving_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(Gathering(transport, self.loop))
        self._expect()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect()

    def send_400_response(self, msg: str) -> None:
        """Refuse in JSON, like every other refusal."""
        body = msgspec.json.encode(
            Problem(error=f"this is not an HTTP request: {msg}", code="bad_http")
        )
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect(self) -> None:
        if _is_answering(self.cycle):
            self._stop_waiting()
        elif self._giving_up is None:
            self._giving_up = self.loop.call_later(HEADERS_S, self._give_up)

    def _give_up(self) -> None:
        if not _is_answering(self.cycle):
            self.transport.close()

    def _stop_waiting(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None


def _is_answering(cycle: RequestResponseCycle | None) -> bool:
    return cycle is not None and not cycle.response_complete


class Draining(uvicorn.Server):
    """When told to stop, end waiting requests at once, then finish the others."""

    def __init__(self, config: uvicorn.Config, app: Litestar) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        shared = self._app.state.get("shared")
        if isinstance(shared, ServerState):
            shared.waiting.drain()
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Uvicorn does not heed that its terminal has gone."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.SIGHUP not in heeded():
            with super().capture_signals():
                yield
            return
        before = signal.signal(signal.SIGHUP, self.handle_exit)
        try:
            with super().capture_signals():
                yield
        finally:
            signal.signal(signal.SIGHUP, before)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        # Uvicorn would raise them again and end the process as if it had been killed.
        self._captured_signals.clear()


async def check_guarded(connect: EngineOpener, listening: Listening, *, insecure: bool) -> None:
    """Refuse to listen to other machines while there are no tokens."""
    if listening.is_local or insecure:
        return
    async with connect() as engine:
        if not await engine.has_tokens():
            raise InvalidInput(
                "--host",
                "is reachable from elsewhere and there are no tokens: whoever finds it could do"
                " everything. Make one (flowfabric tokens create), or pass --insecure",
                listening.host,
            )


async def serve(connect: EngineOpener, listening: Listening, config: ServerConfig) -> bool:
    """Serve until a signal says stop; return whether it ever started."""
    app = create_app(with_reconcilers(connect) if listening.reconciles else connect, config)
    settings = uvicorn.Config(
        app,
        host=listening.host,
        port=listening.port,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=bool(listening.trusted_proxies),
        forwarded_allow_ips=list(listening.trusted_proxies),
        h11_max_incomplete_event_size=HEADER_BYTES_MAX,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=listening.drain_s,
        lifespan="on",
        loop="asyncio",
        http=Impatient,
    )
    server = Draining(settings, app)
    try:
        await server.serve()
    except SystemExit:
        # It has logged why.
        where = f"{listening.host}:{listening.port}"
        raise Unavailable("serve", f"cannot listen at {where}; the log says why") from None
    return server.started


def with_reconcilers(connect: EngineOpener) -> EngineOpener:
    """The same engine, with reconcilers running in the background."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Engine]:
        async with connect() as engine, Supervisor(engine):
            yield engine

    return opened
