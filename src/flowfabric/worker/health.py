"""Liveness and readiness of a worker over HTTP, for supervisors and deploys.

Not a general server: it answers two questions with a status and a word, and everything else with
`404`. It neither keeps nor shows what callers send, so it may listen on every address.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Final

from flowfabric.errors import FlowFabricError, InvalidInput

REQUEST_BYTES_MAX: Final = 16_384
REQUEST_S: Final = 5.0
"""How long a caller may take to send its request."""
AT_ONCE_MAX: Final = 32
"""How many callers are answered at the same time; connections of others are closed."""
ALIVE: Final = frozenset({"/livez"})
READY: Final = frozenset({"/readyz", "/healthz"})


class HealthPort:
    """Answers whether the process is alive, and ready: `check_ready` raises if it is not."""

    def __init__(self, check_ready: Callable[[], Awaitable[None]]) -> None:
        self._check_ready = check_ready
        self._callers = 0

    @asynccontextmanager
    async def listen(self, port: int) -> AsyncIterator[None]:
        """Answer on this port of every address. Raises `InvalidInput` if it is taken."""
        try:
            server = await asyncio.start_server(self._take, port=port, limit=REQUEST_BYTES_MAX)
        except OSError as error:
            problem = f"cannot be listened on: {error.strerror or error}"
            raise InvalidInput("--health-port", problem, port) from error
        try:
            yield
        finally:
            server.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._callers += 1
        try:
            if self._callers <= AT_ONCE_MAX:
                async with asyncio.timeout(REQUEST_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._answer(head))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # The caller has left, or does not finish its request.
        finally:
            self._callers -= 1
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if path not in ALIVE | READY:
            return _response(HTTPStatus.NOT_FOUND, "not_found")
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed")
        if path in READY:
            try:
                await self._check_ready()
            except (FlowFabricError, TimeoutError):
                return _response(HTTPStatus.SERVICE_UNAVAILABLE, "unavailable", method)
        return _response(HTTPStatus.OK, "ok", method)


def _response(status: HTTPStatus, word: str, method: str = "GET") -> bytes:
    body = f'{{"status":"{word}"}}'
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
        "",
        "" if method == "HEAD" else body,
    ]
    return "\r\n".join(lines).encode()
