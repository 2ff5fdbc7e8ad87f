"""Ending well: what waits for something to happen ends early when the server is told to stop."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import TypeVar

from flowfabric.errors import ResourceExhausted, Unavailable

T = TypeVar("T")


class Waiting:
    """Long polls and streams: how many there may be of each, until the server drains.

    They are counted apart: pages that are left open must not keep others from waiting.
    """

    def __init__(self, polls_max: int, streams_max: int) -> None:
        self._polls_max, self._streams_max = polls_max, streams_max
        self.polls = self.streams = 0
        self._draining = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        return self._draining.is_set()

    def drain(self) -> None:
        self._draining.set()

    async def run(self, work: Coroutine[object, object, T]) -> T:
        """What `work` comes to, if that is before the server drains."""
        if self.polls >= self._polls_max:
            work.close()
            raise ResourceExhausted("stream_ops", self._polls_max)
        self.polls += 1
        task = asyncio.ensure_future(work)
        end = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Unavailable("stream_ops", "the server is stopping; ask again")
            return task.result()
        finally:
            self.polls -= 1
            task.cancel()
            end.cancel()
            await asyncio.gather(task, end, return_exceptions=True)

    def each(
        self, messages: AsyncIterator[T], *, idle_s: float, ping: T, last: T
    ) -> AsyncIterator[T]:
        """The messages, with a ping whenever none came for a while, and `last` on draining.

        So either side notices when the other has left. Refuses at once what there is no room for.
        """
        if self.streams >= self._streams_max:
            raise ResourceExhausted("streams", self._streams_max)
        return self._each(messages, idle_s, ping, last)

    async def _each(
        self, messages: AsyncIterator[T], idle_s: float, ping: T, last: T
    ) -> AsyncIterator[T]:
        end = asyncio.ensure_future(self._draining.wait())
        coming = asyncio.ensure_future(anext(messages, None))
        self.streams += 1
        try:
            while not end.done():
                await asyncio.wait(
                    {coming, end}, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not coming.done():
                    if not end.done():
                        yield ping
                    continue
                message = coming.result()
                if message is None:
                    return
                coming = asyncio.ensure_future(anext(messages, None))
                yield message
            yield last
        finally:
            self.streams -= 1
            end.cancel()
            coming.cancel()
            await asyncio.gather(coming, end, return_exceptions=True)
