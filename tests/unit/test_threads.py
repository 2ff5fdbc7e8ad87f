"""Threads that call plain functions for an event loop."""

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from flowfabric.worker.threads import Threads

PATIENCE_S = 30.0
COUNT_MAX = 4


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads(COUNT_MAX, "tested")
    yield made
    made.close()


def named() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("tested_")]


async def test_answers_reach_those_who_asked(threads: Threads) -> None:
    answers = await asyncio.gather(*(threads.call(partial(pow, n, 2)) for n in range(1_000)))
    assert answers == [n * n for n in range(1_000)]
    assert len(named()) <= COUNT_MAX


async def test_what_a_call_raises_reaches_who_asked(threads: Threads) -> None:
    def fail() -> None:
        raise SystemExit("no")

    with pytest.raises(SystemExit, match="no"):
        await threads.call(fail)
    assert await threads.call(lambda: 1) == 1


async def test_calls_have_the_context_of_who_asked(threads: Threads) -> None:
    who = contextvars.ContextVar("who", default="nobody")

    async def ask(name: str) -> object:
        who.set(name)
        return await threads.call(who.get)

    names = "ada", "bob"
    assert await asyncio.gather(*map(ask, names)) == list(names)


async def test_one_call_alone_needs_one_thread(threads: Threads) -> None:
    seen = {await threads.call(threading.get_ident) for _ in range(20)}
    assert len(seen) == 1


async def test_as_many_calls_as_threads_are_under_way(threads: Threads) -> None:
    together = threading.Barrier(COUNT_MAX, timeout=PATIENCE_S)
    await asyncio.gather(*(threads.call(together.wait) for _ in range(COUNT_MAX)))


async def test_a_call_that_is_cancelled_before_its_turn_is_not_made(threads: Threads) -> None:
    go = threading.Event()
    made: list[int] = []
    busy = [threads.call(lambda: go.wait(PATIENCE_S)) for _ in range(COUNT_MAX)]
    waiting = threads.call(lambda: made.append(1))
    waiting.cancel()
    go.set()
    assert await asyncio.gather(*busy) == [True] * COUNT_MAX
    await threads.call(lambda: made.append(2))
    assert made == [2]


async def test_an_abandoned_call_keeps_its_thread_until_it_ends(threads: Threads) -> None:
    go = threading.Event()
    abandoned = [threads.call(lambda: go.wait(PATIENCE_S)) for _ in range(COUNT_MAX - 1)]
    for each in abandoned:
        each.cancel()
    assert await threads.call(lambda: 1) == 1
    go.set()
    assert await threads.call(lambda: 2) == 2


async def test_closing_ends_threads_and_cancels_what_waits() -> None:
    threads = Threads(1, "tested")
    go = threading.Event()
    busy = threads.call(lambda: go.wait(PATIENCE_S))
    waiting = threads.call(lambda: 1)
    threads.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    assert await busy is True
    for thread in named():
        await asyncio.to_thread(thread.join, PATIENCE_S)
    assert named() == []


def test_a_call_that_outlives_its_loop_ends_its_thread() -> None:
    go = threading.Event()

    async def abandon() -> None:
        Threads(1, "tested").call(lambda: go.wait(PATIENCE_S))

    asyncio.run(abandon())
    go.set()
    for thread in named():
        thread.join(PATIENCE_S)
    assert named() == []
