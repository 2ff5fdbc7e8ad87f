"""The way from one simulated process to the store: slow, lossy, silent, or cut.

Every word to the store is an operation of the simulation. It may be refused before
it arrives, carried out while its answer is lost, or swallowed until a statement's
time is over. A process that is dead never hears anything again; one that is frozen
hears everything late, and goes on with what it believed before.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flowfabric.core.events import LogEnd
from flowfabric.errors import BackendErrorKind, Transport
from flowfabric.store.base import (
    Body,
    EventPage,
    Parameter,
    PassingStore,
    ReadBody,
    Row,
    Store,
    UnlockedBody,
)

T = TypeVar("T")

STATEMENT_S = 1.5
"""How long a statement waits for an answer that does not come."""
LATENCY_S = (0.0002, 0.004)
SLOW_S = (0.05, 0.4)
SLOW_CHANCE = 0.01


@dataclass
class Weather:
    """What a link does to the words that go over it."""

    refused: float = 0.0
    answer_lost: float = 0.0
    silent: bool = False


@dataclass
class Counter:
    """Words to the store, over all links."""

    operations: int = 0


class Link(PassingStore):
    """A store as one process reaches it."""

    def __init__(self, store: Store, chance: random.Random, counter: Counter) -> None:
        super().__init__(store)
        self.chance = chance
        self.counter = counter
        self.weather = Weather()
        self.dead = False
        self.frozen_until_s = 0.0

    # The world opens it and closes it.

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def migrate(self) -> Sequence[str]:
        return []

    # What goes over the wire

    async def ping(self) -> None:
        await self._carry(self.store.ping)

    async def transact(self, body: Body[T], *, lock_wait_ms: int | None = None) -> T:
        return await self._carry(lambda: self.store.transact(body, lock_wait_ms=lock_wait_ms))

    async def try_unlocked(self, body: UnlockedBody[T]) -> T | None:
        return await self._carry(lambda: self.store.try_unlocked(body))

    async def read(self, body: ReadBody[T]) -> T:
        return await self._carry(lambda: self.store.read(body))

    async def execute_alone(
        self, name: str, topics: Collection[str] = (), /, **parameters: Parameter
    ) -> Sequence[Row]:
        return await self._carry(lambda: self.store.execute_alone(name, topics, **parameters))

    async def execute_and_read(
        self, name: str, read: Callable[[Sequence[Row]], T], /, **parameters: Parameter
    ) -> T:
        return read(await self.execute_alone(name, **parameters))

    async def read_events(
        self, *, after: int, limit: int, category: str | None = None, wait_s: float = 0.0
    ) -> EventPage:
        return await self._carry(
            lambda: self.store.read_events(
                after=after, limit=limit, category=category, wait_s=wait_s
            )
        )

    async def end_of_events(self) -> LogEnd:
        return await self._carry(self.store.end_of_events)

    def hint(self, topic: str) -> None:
        if not self.dead:
            self.store.hint(topic)

    # Faults

    async def _carry(self, send: Callable[[], Awaitable[T]]) -> T:
        self.counter.operations += 1
        await asyncio.sleep(self._latency_s())
        await self.survive()
        if self.weather.silent:
            await asyncio.sleep(STATEMENT_S)
            await self.survive()
            raise _failure("no answer")
        if self.chance.random() < self.weather.refused:
            raise _failure("refused")
        answer = await send()
        # The answer is on its way: whatever strikes now, the deed is done.
        await asyncio.sleep(self._latency_s())
        await self.survive()
        weather = self.weather
        if weather.silent or self.chance.random() < weather.answer_lost:
            raise _failure("the answer was lost")
        return answer

    async def survive(self) -> None:
        """Wait for as long as the process stands still: for ever, if it is dead."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self.frozen_until_s - loop.time()))
        if self.dead:
            await loop.create_future()

    def _latency_s(self) -> float:
        slow = self.chance.random() < SLOW_CHANCE
        return self.chance.uniform(*(SLOW_S if slow else LATENCY_S))


def _failure(detail: str) -> Transport:
    return Transport("simulated", detail, kind=BackendErrorKind.TRANSPORT)
