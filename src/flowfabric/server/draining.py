"""Long polls and streams: how many there may be, and when they end early.

They end when the server is told to stop, and when the token of their caller is no longer good.
"""

import asyncio
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Final, TypeVar

from flowfabric.errors import ErrorClass, FlowFabricError, ResourceExhausted, Unavailable
from flowfabric.server.problems import Refused

T = TypeVar("T")
Check = Callable[[], Awaitable[object]]
"""Raises `Refused` when the caller may no longer wait."""
CHECK_S: Final = 2.0
"""How often the tokens of waiting callers are checked."""


def stopping() -> Unavailable:
    """The answer to requests that arrive or wait while the server stops."""
    error = Unavailable("server", "it is stopping; ask again")
    error.error_class = ErrorClass.RETRYABLE
    return error


class Places:
    """A limited number of places, of which one token gets half at most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: Counter[str | None] = Counter()

    def __len__(self) -> int:
        return self._taken.total()

    def take(self, pool: str, token_id: str | None) -> "TakenPlace":
        half = -(-self._limit // 2)
        if len(self) >= self._limit:
            raise ResourceExhausted(pool, self._limit)
        if token_id is not None and self._taken[token_id] >= half:
            raise ResourceExhausted(pool, half)
        self._taken[token_id] += 1
        return TakenPlace(self._taken, token_id)


class TakenPlace:
    """A place that has been taken; leaving it twice is harmless."""

    def __init__(self, taken: Counter[str | None], token_id: str | None) -> None:
        self._taken: Counter[str | None] | None = taken
        self._token_id = token_id

    def leave(self) -> None:
        taken, self._taken = self._taken, None
        if taken is None:
            return
        taken[self._token_id] -= 1
        if not taken[self._token_id]:
            del taken[self._token_id]


class Waiting:
    """Limits long polls and streams, and ends them when the server drains.

    The two are counted separately, so that open pages do not keep others from waiting. Nor can
    one token: it gets half of the places at most.
    """

    def __init__(self, polls_max: int, streams_max: int) -> None:
        self.polls, self.streams = Places(polls_max), Places(streams_max)
        self._draining = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        return self._draining.is_set()

    def drain(self) -> None:
        self._draining.set()

    async def run(
        self, work: Coroutine[object, object, T], check: Check, token_id: str | None
    ) -> T:
        """The result of `work`, unless the server drains first."""
        try:
            place = self.polls.take("stream_ops", token_id)
        except ResourceExhausted:
            work.close()
            raise
        task = asyncio.ensure_future(work)
        end = asyncio.ensure_future(self._draining.wait())
        try:
            while not (task.done() or end.done()):
                await asyncio.wait(
                    {task, end}, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED
                )
                await _checked(check)
            if not task.done():
                raise stopping()
            return task.result()
        finally:
            place.leave()
            task.cancel()
            end.cancel()
            await asyncio.gather(task, end, return_exceptions=True)

    def each(
        self,
        messages: AsyncIterator[T],
        check: Check,
        token_id: str | None,
        *,
        idle_s: float,
        ping: T,
        last: T,
    ) -> AsyncIterator[T]:
        """The messages, with a ping whenever none came for a while, and `last` on draining.

        So either side notices when the other has left. Refuses at once if there is no room: once
        an answer has begun, it could only be cut off.
        """
        place = self.streams.take("streams", token_id)
        stream = self._each(messages, check, place, idle_s, ping, last)
        # A client may leave before its answer begins.
        weakref.finalize(stream, place.leave)
        return stream

    async def _each(
        self,
        messages: AsyncIterator[T],
        check: Check,
        place: TakenPlace,
        idle_s: float,
        ping: T,
        last: T,
    ) -> AsyncIterator[T]:
        end = asyncio.ensure_future(self._draining.wait())
        coming = asyncio.ensure_future(anext(messages, None))
        checked_s = said_s = time.monotonic()
        try:
            while not end.done():
                await asyncio.wait(
                    {coming, end},
                    timeout=min(idle_s, CHECK_S),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                now_s = time.monotonic()
                if now_s - checked_s >= CHECK_S:
                    await _checked(check)
                    checked_s = now_s
                if coming.done():
                    message = coming.result()
                    if message is None:
                        return
                    coming = asyncio.ensure_future(anext(messages, None))
                    said_s = now_s
                    yield message
                elif now_s - said_s >= idle_s and not end.done():
                    said_s = now_s
                    yield ping
            yield last
        except Refused:
            # The answer has begun, so it can only be ended.
            return
        finally:
            place.leave()
            end.cancel()
            coming.cancel()
            await asyncio.gather(coming, end, return_exceptions=True)


async def _checked(check: Check) -> None:
    """Check the caller's token; while the database is away, it stays good."""
    with suppress(FlowFabricError):
        await check()
