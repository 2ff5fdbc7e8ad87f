"""A network that fails at the worst moment: a proxy before Postgres that cuts one connection.

It watches for a transaction that writes to a table, and cuts the connection when
that transaction is committed, be it by a statement that is a transaction by itself:
before the server hears of it, or after the server has done it and before the client does.
"""

import asyncio
import re
from contextlib import suppress
from enum import Enum

from tests.proxy import CHUNK_BYTES, Proxy

EXECUTE = b"B"
"""The first message of a request to run what was prepared."""
READY = b"Z\x00\x00\x00\x05"
"""The server is ready; the next byte says whether in a transaction."""
ALONE = b"I"


class Cut(Enum):
    BEFORE_THE_SERVER_HEARS = "before the server hears"
    BEFORE_THE_ANSWER_ARRIVES = "before the answer arrives"


class Network(Proxy):
    """Forwards everything, until it is told what to cut."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._writes = re.compile(b"")
        self._cut: Cut | None = None
        self._lines: list[_Line] = []
        self.was_cut = asyncio.Event()

    def cut_commit(self, table: str, when: Cut) -> None:
        """Cut the next transaction that inserts into `table`, on a connection new to it."""
        self._writes = re.compile(rf"insert into (flowfabric\.)?{table} ".encode())
        self._cut = when
        self.was_cut.clear()

    def end_connections(self) -> None:
        """All there are: what is prepared anew can be cut."""
        while self._lines:
            self._lines.pop().end()

    async def connected(
        self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        server, to_server = await self.reach_server()
        line = _Line(self, to_client, to_server)
        self._lines.append(line)
        self.start(line.requests(client), line.answers(server))

    def writes(self, data: bytes) -> bool:
        return self._cut is not None and self._writes.search(data) is not None

    def take(self, when: Cut) -> bool:
        """Whether the commit is to be cut at this moment; it is so once."""
        if self._cut is not when:
            return False
        self._cut = None
        self.was_cut.set()
        return True


class _Line:
    """One connection."""

    def __init__(
        self, network: Network, to_client: asyncio.StreamWriter, to_server: asyncio.StreamWriter
    ) -> None:
        self._network = network
        self._to_client = to_client
        self._to_server = to_server
        self._writing = self._committing = False
        self._alone = True

    async def requests(self, client: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            while data := await client.read(CHUNK_BYTES):
                self._writing = self._writing or self._network.writes(data)
                if self._writing and self._commits(data):
                    self._committing = True
                    if self._network.take(Cut.BEFORE_THE_SERVER_HEARS):
                        break
                self._to_server.write(data)
                await self._to_server.drain()
        self.end()

    async def answers(self, server: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            while data := await server.read(CHUNK_BYTES):
                # What was prepared is answered without being ready for more.
                if is_ready := data[-len(READY) - 1 : -1] == READY:
                    self._alone = data.endswith(ALONE)
                if is_ready and self._committing and self._alone:
                    if self._network.take(Cut.BEFORE_THE_ANSWER_ARRIVES):
                        break
                    self._writing = self._committing = False
                self._to_client.write(data)
                await self._to_client.drain()
        self.end()

    def _commits(self, request: bytes) -> bool:
        if self._alone:
            return request.startswith(EXECUTE)
        return request.startswith(b"Q") and request.endswith(b"commit\0")

    def end(self) -> None:
        self._to_client.close()
        self._to_server.close()
