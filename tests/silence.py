"""A network between us and Postgres that goes down, or swallows packets without a word.

Down, it cuts every connection and refuses new ones, as a server that restarts does.
Silent, it goes on accepting and acknowledging, and forwards nothing: both ways, or one
only. A connection that was silenced stays so for good, as behind a firewall that forgot
it; whether new ones work is up to the test.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import Self
from urllib.parse import urlsplit

from tests.proxy import CHUNK_BYTES, Proxy


class Way(Enum):
    REQUESTS = "requests"
    """From us to the server."""
    ANSWERS = "answers"
    """From the server to us."""


BOTH = (Way.REQUESTS, Way.ANSWERS)


class Line:
    """One connection through the network."""

    def __init__(self, to_client: asyncio.StreamWriter, to_server: asyncio.StreamWriter) -> None:
        self.silent: set[Way] = set()
        self._writers = {Way.REQUESTS: to_server, Way.ANSWERS: to_client}

    async def pump(self, way: Way, source: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            while data := await source.read(CHUNK_BYTES):
                if way not in self.silent:
                    self._writers[way].write(data)
                    await self._writers[way].drain()
        # Across a silent network nobody hears of an end either.
        if way not in self.silent:
            self.cut()

    def end_server(self) -> None:
        self._writers[Way.REQUESTS].close()

    def cut(self) -> None:
        for writer in self._writers.values():
            writer.close()


class Network(Proxy):
    """Forwards everything, until told otherwise."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._lines: set[Line] = set()
        self._silent_from_now: set[Way] = set()
        self._is_down = False
        self._refused = asyncio.Semaphore(0)

    @property
    def made(self) -> int:
        """Connections that were ever made through it."""
        return len(self._lines)

    def go_down(self) -> None:
        self._is_down, self._refused = True, asyncio.Semaphore(0)
        for line in self._lines:
            line.cut()

    def swallow(self, ways: Collection[Way] = BOTH, *, new_too: bool = False) -> None:
        """Silence every connection there is, and with `new_too` those to come until `heal`."""
        for line in self._lines:
            line.silent |= set(ways)
        self._silent_from_now = set(ways) if new_too else set()

    def let_the_server_give_up(self) -> None:
        """End silenced connections on its side only, as it does when nobody answers its probes."""
        for line in self._lines:
            if line.silent:
                line.end_server()

    def lead_to(self, url: str) -> None:
        """Where new connections go from now on."""
        self._server = urlsplit(url)

    def heal(self) -> None:
        """Let new connections through; those that were silenced stay dead."""
        self._is_down = False
        self._silent_from_now = set()

    async def was_tried(self, times: int) -> None:
        """Wait until so many connections were refused."""
        for _ in range(times):
            await self._refused.acquire()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        try:
            async with super().open():
                yield self
        finally:
            for line in self._lines:
                line.cut()

    async def connected(
        self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        if self._refuses(to_client):
            return
        server, to_server = await self.reach_server()
        # It may have gone down meanwhile: whatever went through now would never notice.
        if self._refuses(to_client):
            to_server.close()
            return
        line = Line(to_client, to_server)
        line.silent |= self._silent_from_now
        self._lines.add(line)
        self.start(line.pump(Way.REQUESTS, client), line.pump(Way.ANSWERS, server))

    def _refuses(self, to_client: asyncio.StreamWriter) -> bool:
        if self._is_down:
            self._refused.release()
            to_client.close()
        return self._is_down
