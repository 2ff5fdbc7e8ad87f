"""Which code is seen to take the results of others as they arrive."""

import asyncio
import sysconfig
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from pathlib import Path

import pytest

from flowfabric.worker.arrivals import Arrivals, waits_at_queue
from flowfabric.worker.asyncio_tasks import BranchTask, current_line
from flowfabric.worker.branches import Line

TURNS = 5
Body = Callable[[list["asyncio.Task[None]"]], Coroutine[object, object, object]]


async def as_completed(tasks: list["asyncio.Task[None]"]) -> None:
    for each in asyncio.as_completed(tasks):
        await each


async def first_of(tasks: list["asyncio.Task[None]"]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def for_a_time(tasks: list["asyncio.Task[None]"]) -> None:
    await asyncio.wait(tasks, timeout=60)


async def all_of(tasks: list["asyncio.Task[None]"]) -> None:
    await asyncio.wait(tasks)


async def gathered(tasks: list["asyncio.Task[None]"]) -> None:
    await asyncio.gather(*tasks)


async def one(tasks: list["asyncio.Task[None]"]) -> None:
    await tasks[0]


def another_module(name: str, directory: str) -> Body:
    """A function that takes the first that ends, in a module of another package."""
    code = "async def first_of(tasks):\n"
    code += "    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)"
    found: dict[str, Body] = {}
    path = str(Path(directory, *name.split(".")).with_suffix(".py"))
    exec(compile(code, path, "exec"), {"__name__": name, "asyncio": asyncio}, found)
    return found["first_of"]


LIBRARY = another_module("library.connecting", sysconfig.get_path("purelib"))
BESIDE = another_module("helpers", str(Path(__file__).parent))


async def seen(body: Body, count: int = 2) -> bool:
    """Whether calls count as made in order of arrival, after this has begun."""

    async def never() -> None:
        await asyncio.get_running_loop().create_future()

    line = Line.__new__(Line)
    line.arrivals = Arrivals()
    loop = asyncio.get_running_loop()
    tasks = [BranchTask(n, never(), loop=loop, context=None) for n in range(count)]

    context = copy_context()
    context.run(current_line.set, line)
    running = asyncio.create_task(body(list(tasks)), context=context)
    for _ in range(TURNS):
        await asyncio.sleep(0)
    for each in (running, *tasks):
        each.cancel()
    await asyncio.wait([running])
    return bool(line.arrivals)


@pytest.mark.parametrize("body", [as_completed, first_of, for_a_time])
async def test_code_that_goes_on_with_the_first_of_several_takes_them_as_they_arrive(
    body: Body,
) -> None:
    assert await seen(body)


@pytest.mark.parametrize("body", [as_completed, first_of])
async def test_one_alone_arrives_in_no_order(body: Body) -> None:
    assert not await seen(body, count=1)


@pytest.mark.parametrize("body", [all_of, gathered, one])
async def test_code_that_waits_for_all_of_them_does_not(body: Body) -> None:
    assert not await seen(body)


async def called_here(tasks: list["asyncio.Task[None]"]) -> None:
    await LIBRARY(tasks)


async def test_what_a_library_takes_is_nothing_to_the_calls_of_others() -> None:
    assert not await seen(called_here)


async def test_what_a_branch_of_the_library_takes_is_of_its_own() -> None:
    assert await seen(LIBRARY)


async def helped(tasks: list["asyncio.Task[None]"]) -> None:
    await BESIDE(tasks)


async def test_what_another_module_of_the_same_project_takes_counts() -> None:
    assert await seen(helped)


async def test_a_task_is_seen_to_wait_at_a_queue() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue()
    event = asyncio.Event()

    async def take() -> None:
        await queue.get()

    async def wait() -> None:
        await event.wait()

    tasks = [asyncio.create_task(body()) for body in (take, wait)]
    await asyncio.sleep(0)
    assert [waits_at_queue(each) for each in tasks] == [True, False]
    arrivals = Arrivals()
    arrivals.at_queue(tasks[0])
    assert arrivals
    queue.put_nowait(1)
    event.set()
    await asyncio.gather(*tasks)
    assert not waits_at_queue(tasks[0])
