"""Concurrent single calls, made together.

Many coroutines that each report one thing at nearly the same time cost one round
trip instead of many. While a batch is under way the next one gathers, so batches
grow with the load and a lone call waits for nothing. Both the size of a batch
and the time it may gather are bounded.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, TypeVar

from flowfabric.errors import (
    FlowFabricError,
    OperationTimeout,
    ResourceExhausted,
    Transport,
    Unavailable,
)

Item = TypeVar("Item")
Answer = TypeVar("Answer")

COUNT_MAX = 500
PARALLEL = 2
SPLIT_PARALLEL = 4
"""How many items of a refused batch are tried at once, each alone."""

Commit = Callable[[Sequence[Item]], Awaitable[Sequence[Answer | FlowFabricError]]]

OUTAGE = (Transport, Unavailable, ResourceExhausted, OperationTimeout)
"""What is nobody's fault: it concerns a whole batch, and asking one by one cannot help."""


class GroupCommit(Generic[Item, Answer]):
    """Answers each `add` with its own answer or error. Belongs to one event loop."""

    def __init__(
        self,
        commit: Commit[Item, Answer],
        *,
        count_max: int = COUNT_MAX,
        delay_s: float = 0.0,
        parallel: int = PARALLEL,
    ) -> None:
        self._commit = commit
        self._count_max = count_max
        self._delay_s = delay_s
        self._parallel = parallel
        self._waiting: deque[tuple[Item, asyncio.Future[Answer]]] = deque()
        self._flushes: set[asyncio.Task[None]] = set()

    async def add(self, item: Item) -> Answer:
        """Hand in one item and wait for its answer."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if len(self._flushes) < self._parallel:
            self._flushes.add(asyncio.create_task(self._flush()))
        return await future

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
            await self._flush_waiting()
        finally:
            self._flushes = {task for task in self._flushes if task is not asyncio.current_task()}

    async def _flush_waiting(self) -> None:
        # Even without a delay: whoever is about to run joins in.
        await asyncio.sleep(self._delay_s)
        while batch := self._take():
            items = [item for item, _ in batch]
            try:
                answers = await self._commit(items)
            except Exception as error:
                await self._split(batch, error)
            else:
                for (_, future), answer in zip(batch, answers, strict=True):
                    _settle(future, answer)

    def _take(self) -> list[tuple[Item, "asyncio.Future[Answer]"]]:
        batch: list[tuple[Item, asyncio.Future[Answer]]] = []
        while self._waiting and len(batch) < self._count_max:
            entry = self._waiting.popleft()
            if not entry[1].done():
                batch.append(entry)
        return batch

    async def _split(
        self, batch: list[tuple[Item, "asyncio.Future[Answer]"]], error: Exception
    ) -> None:
        """One item that is refused does not spoil its batch: each is tried alone."""
        if len(batch) == 1 or isinstance(error, OUTAGE):
            for _, future in batch:
                _settle(future, error)
            return
        left = iter(batch)
        # A few at once, so that one which has to wait holds up no other.
        await asyncio.gather(*(self._commit_alone(left) for _ in range(SPLIT_PARALLEL)))

    async def _commit_alone(self, entries: Iterator[tuple[Item, "asyncio.Future[Answer]"]]) -> None:
        for item, future in entries:
            try:
                (answer,) = await self._commit([item])
            except Exception as own:
                _settle(future, own)
            else:
                _settle(future, answer)


def _settle(future: "asyncio.Future[Answer]", answer: Answer | Exception) -> None:
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
