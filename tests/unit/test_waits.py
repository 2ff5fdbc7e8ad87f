"""What tasks wait for, as told by asyncio; and that nothing is certain where it does not tell."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from flowfabric.worker import asyncio_tasks as waits

TURNS = 5


class Handler:
    """Tasks that wait without end, and one that waits for these."""

    def __init__(self) -> None:
        self.tasks: set[object] = set()
        self.waits = waits.OwnTasks(self.tasks.__contains__, lambda context: True)

    def task(self) -> "asyncio.Task[None]":
        made = asyncio.create_task(_never())
        self.tasks.add(made)
        return made

    @asynccontextmanager
    async def waiting(
        self, body: "Callable[[Handler], Awaitable[object]]"
    ) -> AsyncIterator["asyncio.Task[None]"]:
        async def run() -> None:
            await body(self)

        running = asyncio.create_task(run())
        for _ in range(TURNS):
            await asyncio.sleep(0)
        try:
            yield running
        finally:
            for each in (running, *self.tasks):
                assert isinstance(each, asyncio.Task)
                each.cancel()
            await asyncio.wait([running])


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


async def one(handler: Handler) -> None:
    await handler.task()


async def gathered(handler: Handler) -> None:
    await asyncio.gather(handler.task(), asyncio.gather(handler.task()))


async def grouped(handler: Handler) -> None:
    async with asyncio.TaskGroup() as group:
        handler.tasks.add(group.create_task(_never()))


async def waited_for(handler: Handler) -> None:
    await asyncio.wait([handler.task()])


async def arriving(handler: Handler) -> None:
    for each in asyncio.as_completed([handler.task()]):
        await each


async def timed(handler: Handler) -> None:
    await asyncio.wait_for(handler.task(), 60)


async def shielded(handler: Handler) -> None:
    await asyncio.shield(handler.task())


async def requested(handler: Handler) -> None:
    await _never()


async def locked(handler: Handler) -> None:
    lock = asyncio.Lock()
    async with lock:
        await lock.acquire()


@pytest.mark.parametrize("body", [one, gathered, grouped, waited_for, arriving, timed])
async def test_a_task_that_waits_for_others_of_its_handler_goes_on_in_order(
    body: Callable[[Handler], Awaitable[object]],
) -> None:
    handler = Handler()
    async with handler.waiting(body) as running:
        assert handler.waits.in_order(running, 1)


@pytest.mark.parametrize("body", [shielded, requested, locked])
async def test_a_task_that_waits_for_anything_else_does_not(
    body: Callable[[Handler], Awaitable[object]],
) -> None:
    handler = Handler()
    async with handler.waiting(body) as running:
        assert not handler.waits.in_order(running, 1)


@pytest.mark.parametrize("body", [waited_for, arriving])
async def test_an_event_loop_that_does_not_tell_its_timers_leaves_it_open(
    body: Callable[[Handler], Awaitable[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Handler()
    async with handler.waiting(body) as running:
        monkeypatch.setattr(asyncio, "get_running_loop", SimpleNamespace)
        told = handler.waits.in_order(running, 1)
        monkeypatch.undo()
    assert not told


@pytest.mark.parametrize("running", [None, object(), SimpleNamespace(_fut_waiter=object())])
async def test_a_task_that_does_not_tell_what_it_waits_for_leaves_it_open(running: object) -> None:
    handler = Handler()
    assert not handler.waits.in_order(running, 1)
    assert not waits.picks(running)
    assert waits.at_work(running, handler.tasks)
    assert not waits.awaits_one_of(handler.tasks, running)


async def test_a_task_without_a_coroutine_leaves_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager one has none any more if it ended as it was started."""

    handler = Handler()
    async with handler.waiting(waited_for) as running:
        monkeypatch.setattr(inspect, "iscoroutine", lambda _: False)
        assert not handler.waits.in_order(running, 0)
        assert not waits.picks(running)
        assert waits.at_work(running, handler.tasks)
