"""Ending well: what waits for something to happen ends early when the server is told to stop."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import TypeVar

from flowfabric.errors import ResourceExhausted, Unavailable

T = TypeVar("T")


class Waiting:
    """Requests that wait: how many may, and for how long: until the server drains."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._draining = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        return self._draining.is_set()

    def drain(self) -> None:
        self._draining.set()

    async def run(self, work: Coroutine[object, object, T]) -> T:
        """What `work` comes to, if that is before the server drains."""
        if self._count >= self._limit:
            work.close()
            raise ResourceExhausted("stream_ops", self._limit)
        self._count += 1
        task = asyncio.ensure_future(work)
        end = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Unavailable("stream_ops", "the server is stopping; ask again")
            return task.result()
        finally:
            self._count -= 1
            task.cancel()
            end.cancel()
            await asyncio.gather(task, end, return_exceptions=True)

    async def each(self, messages: AsyncIterator[T], idle_s: float, ping: T) -> AsyncIterator[T]:
        """The messages until the server drains, with a ping whenever none came for a while.

        So either side notices when the other has left.
        """
        end = asyncio.ensure_future(self._draining.wait())
        coming = asyncio.ensure_future(anext(messages, None))
        self._count += 1
        try:
            while not end.done():
                await asyncio.wait(
                    {coming, end}, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not coming.done():
                    yield ping
                    continue
                message = coming.result()
                if message is None:
                    return
                coming = asyncio.ensure_future(anext(messages, None))
                yield message
        finally:
            self._count -= 1
            end.cancel()
            coming.cancel()
            await asyncio.gather(coming, end, return_exceptions=True)
