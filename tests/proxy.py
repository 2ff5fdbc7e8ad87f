"""Between us and a Postgres: a port that forwards to it, for networks that misbehave."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Final, Self
from urllib.parse import urlsplit, urlunsplit

CHUNK_BYTES: Final = 1 << 16


class Proxy:
    """Accepts connections at its `url`; what becomes of each, `connected` says."""

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self._pumps: set[asyncio.Task[None]] = set()
        self.url = ""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        listening = await asyncio.start_server(self.connected, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        user = self._server.netloc.rpartition("@")[0]
        self.url = urlunsplit(self._server._replace(netloc=f"{user}@127.0.0.1:{port}"))
        try:
            yield self
        finally:
            listening.close()
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)

    async def connected(
        self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        raise NotImplementedError

    async def reach_server(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._server.hostname, self._server.port)

    def start(self, *pumps: Coroutine[object, object, None]) -> None:
        """Run what forwards a connection, until the proxy is closed."""
        for pump in pumps:
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)
