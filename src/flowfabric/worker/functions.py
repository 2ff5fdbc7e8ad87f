"""Calling user functions: on the loop, in a thread, or in another process.

Threads get the caller's context variables.
"""

import asyncio
import concurrent.futures
import contextvars
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

from flowfabric.task import Task
from flowfabric.worker.processes import Processes, contained

CANCELLATIONS: Final = (asyncio.CancelledError, concurrent.futures.CancelledError)


class Raised(NamedTuple):
    """What a function raised that a future would take for its own cancellation."""

    error: BaseException


class Functions:
    """The threads and processes of one worker."""

    def __init__(self, threads: int, processes: int) -> None:
        self._threads = ThreadPoolExecutor(threads, "flowfabric-handler")
        # Apart from the handlers: those that wait for a step must not keep it from running.
        self._step_threads = ThreadPoolExecutor(threads, "flowfabric-step")
        self._processes = Processes(processes)

    async def call(
        self, function: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        """Call an async function here, a plain one in a thread: steps, and async handlers."""
        if inspect.iscoroutinefunction(function):
            result: object = await function(*args, **kwargs)
            return result
        made = await _in(self._step_threads, partial(_kept, partial(function, *args, **kwargs)))
        if isinstance(made, Raised):
            raise made.error
        # A plain function may return a coroutine, as a lambda around an async one does.
        if inspect.isawaitable(made):
            awaited: object = await made
            return awaited
        return made

    def in_thread(self, call: Callable[[], object]) -> "asyncio.Future[object]":
        return _in(self._threads, call)

    async def in_process(self, task: Task[..., object], payload: bytes) -> bytes:
        """Run a task elsewhere and return its encoded result."""
        return await self._processes.run(task, payload)

    def close(self) -> None:
        """Let threads end by themselves, abandoned ones are not waited for; end the processes."""
        for threads in (self._threads, self._step_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self._processes.close()


def is_cancelled(error: BaseException) -> bool:
    """Whether somebody cancelled the task; else it is an exception that a function raised."""
    task = asyncio.current_task()
    cancelling = task is not None and task.cancelling() > 0
    return cancelling and isinstance(error, asyncio.CancelledError)


def _kept(call: Callable[[], object]) -> object:
    try:
        return call()
    except CANCELLATIONS as error:
        return Raised(error)


def _in(threads: ThreadPoolExecutor, call: Callable[[], object]) -> "asyncio.Future[object]":
    """Run `call` in a thread, with the caller's context variables."""
    run = partial(contextvars.copy_context().run, contained, call)
    return asyncio.get_running_loop().run_in_executor(threads, run)
