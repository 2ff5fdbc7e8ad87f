"""Calls made at the same time, answered together.

`GroupCommit` is for writes: many coroutines that each report one thing cost one round
trip instead of many. While a batch is under way the next one gathers, so batches
grow with the load and a lone call waits for nothing. Both the size of a batch
and the time it may gather are bounded.

`SharedReads` is for reads: callers that ask for the same thing share one read.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from flowfabric import errors
from flowfabric.outages import NEVER, NO_ANSWER

Item = TypeVar("Item")
Reply = TypeVar("Reply")
K = TypeVar("K")
T = TypeVar("T")

BATCH_ITEMS_MAX = 500
PARALLEL = 2
SPLIT_PARALLEL = 4
"""How many items of a refused batch are tried at once, each alone."""

Commit = Callable[[Sequence[Item]], Awaitable[Sequence[Reply | errors.FlowFabricError]]]

NO_ITEMS_FAULT = (*NO_ANSWER, *NEVER)
"""What concerns a whole batch: asking one by one cannot help."""


class Entry(NamedTuple, Generic[Item, Reply]):
    item: Item
    tell: Callable[[Reply | Exception], None]
    since_s: float


class GroupCommit(Generic[Item, Reply]):
    """Answers each `add` with its own answer or error. Belongs to one event loop."""

    def __init__(
        self,
        commit: Commit[Item, Reply],
        *,
        count_max: int = BATCH_ITEMS_MAX,
        delay_s: float = 0.0,
        parallel: int = PARALLEL,
        patience_s: float = math.inf,
    ) -> None:
        """An item that has waited for `patience_s` when an outage is met is not tried."""
        self._commit = commit
        self._count_max = count_max
        self._delay_s = delay_s
        self._parallel = parallel
        self._patience_s = patience_s
        self._waiting: deque[Entry[Item, Reply]] = deque()
        self._flushes: set[asyncio.Task[None]] = set()

    async def add(self, item: Item) -> Reply:
        """Hand in one item and wait for its answer."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        entry = self.hand_in(item, partial(_answer, future))
        try:
            return await future
        except asyncio.CancelledError:
            # Nobody wants it any more, unless it is on its way.
            with suppress(ValueError):
                self._waiting.remove(entry)
            raise

    def hand_in(self, item: Item, tell: Callable[[Reply | Exception], None]) -> Entry[Item, Reply]:
        """Hand in one item; `tell` is called with its answer, and must not raise."""
        entry: Entry[Item, Reply] = Entry(item, tell, time.monotonic())
        self._waiting.append(entry)
        if len(self._flushes) < self._parallel:
            self._flushes.add(asyncio.create_task(self._flush()))
        return entry

    async def close(self) -> None:
        """Wait until everything handed in has been answered."""
        while self._flushes:
            await asyncio.wait(self._flushes)

    async def _flush(self) -> None:
        """Commit batches until nothing waits.

        It counts as ended the moment it finds nothing: an item that comes between that
        and the end of the task would otherwise wait for a flush that never looks again.
        """
        try:
            # Even without a delay, coroutines that are about to run join in.
            await asyncio.sleep(self._delay_s)
            while self._waiting:
                count = min(len(self._waiting), self._count_max)
                await self._commit_batch([self._waiting.popleft() for _ in range(count)])
        finally:
            self._flushes = {task for task in self._flushes if task is not asyncio.current_task()}

    async def _commit_batch(self, batch: list[Entry[Item, Reply]]) -> None:
        try:
            answers = await self._commit([entry.item for entry in batch])
        except Exception as error:
            await self._split(batch, error)
        else:
            for entry, answer in zip(batch, answers, strict=True):
                entry.tell(answer)

    async def _split(self, batch: list[Entry[Item, Reply]], error: Exception) -> None:
        """A refused item does not fail its batch: each is tried alone."""
        if isinstance(error, NO_ITEMS_FAULT):
            self._refuse_late(error)
        if len(batch) == 1 or isinstance(error, NO_ITEMS_FAULT):
            for entry in batch:
                entry.tell(error)
            return
        left = iter(batch)
        # A few at once, so that one that has to wait delays no other.
        await asyncio.gather(*(self._commit_alone(left) for _ in range(SPLIT_PARALLEL)))

    def _refuse_late(self, outage: errors.FlowFabricError) -> None:
        """Refuse items that have waited long enough, without trying each of them."""
        late_s = time.monotonic() - self._patience_s
        while self._waiting and self._waiting[0].since_s <= late_s:
            detail = f"waited for others, who failed: {outage}"
            entry = self._waiting.popleft()
            entry.tell(errors.Transport("queue", detail, kind=errors.BackendErrorKind.TIMEOUT))

    async def _commit_alone(self, entries: Iterator[Entry[Item, Reply]]) -> None:
        for item, tell, _ in entries:
            try:
                (answer,) = await self._commit([item])
            except Exception as own:
                tell(own)
            else:
                tell(answer)


def _answer(future: "asyncio.Future[Reply]", answer: Reply | Exception) -> None:
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class SharedReads(Generic[K, T]):
    """Reads, each shared by all callers that ask for the same before it starts."""

    def __init__(self, read: Callable[[K], Awaitable[T]]) -> None:
        self._read = read
        self._to_start: dict[K, asyncio.Task[T]] = {}
        self._started: dict[K, asyncio.Task[T]] = {}

    async def share(self, key: K) -> T:
        """The outcome of a read that starts from now on."""
        flight = self._to_start.get(key)
        if flight is None:
            flight = asyncio.create_task(self._fly(key, self._started.get(key)))
            flight.add_done_callback(_retrieve)
            self._to_start[key] = flight
        return await asyncio.shield(flight)

    async def _fly(self, key: K, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait([before])
        flight = self._started[key] = self._to_start.pop(key)
        try:
            return await self._read(key)
        finally:
            if self._started.get(key) is flight:
                del self._started[key]


def _retrieve(task: asyncio.Task[T]) -> None:
    """The caller may have gone by now."""
    if not task.cancelled():
        task.exception()
