"""Calling user functions: on the loop, in a thread, or in another process.

Threads get the caller's context variables. Processes get only the name of the
task and its stored arguments, and give back its stored result, so that nothing
but JSON crosses.
"""

import asyncio
import contextvars
import importlib
import inspect
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Final

from flowfabric.errors import InvalidInput
from flowfabric.task import Task

PROCESSES_MAX: Final = 61
"""The most Windows allows; far more than useful elsewhere."""


class Functions:
    """The threads and processes of one worker."""

    def __init__(self, threads: int, processes: int) -> None:
        self._threads = ThreadPoolExecutor(threads, "flowfabric-handler")
        # Apart from the handlers: those that wait for a step must not keep it from running.
        self._step_threads = ThreadPoolExecutor(threads, "flowfabric-step")
        self._processes = min(processes, PROCESSES_MAX)
        self._pool: ProcessPoolExecutor | None = None

    async def call(
        self, function: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        """Call an async function here, a plain one in a thread: steps, and async handlers."""
        if inspect.iscoroutinefunction(function):
            result: object = await function(*args, **kwargs)
            return result
        made = await _in(self._step_threads, partial(function, *args, **kwargs))
        # A plain function may return a coroutine, as a lambda around an async one does.
        if inspect.isawaitable(made):
            awaited: object = await made
            return awaited
        return made

    def in_thread(self, call: Callable[[], object]) -> "asyncio.Future[object]":
        return _in(self._threads, call)

    async def in_process(self, task: Task[..., object], payload: bytes) -> bytes:
        """Run a task elsewhere and return its encoded result."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._processes, mp_context=multiprocessing.get_context("spawn")
            )
        module, name = task.function.__module__, task.function.__qualname__
        try:
            return await self._submit(self._pool, module, name, payload)
        except BrokenProcessPool:
            # The pool is of no use any more once one of its processes has died.
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.shutdown(wait=False)
            raise

    @staticmethod
    def _submit(
        pool: ProcessPoolExecutor, module: str, name: str, payload: bytes
    ) -> "asyncio.Future[bytes]":
        loop = asyncio.get_running_loop()
        try:
            return loop.run_in_executor(pool, _run_here, module, name, payload)
        except OSError as error:
            # A process died while the pool was starting another: its pipes are closed.
            raise BrokenProcessPool("a process of the pool ended abruptly") from error

    def close(self) -> None:
        """Let threads and processes end by themselves; abandoned ones are not waited for."""
        for threads in (self._threads, self._step_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _in(threads: ThreadPoolExecutor, call: Callable[[], object]) -> "asyncio.Future[object]":
    """Run `call` in a thread, with the caller's context variables."""
    run = partial(contextvars.copy_context().run, _contained, call)
    return asyncio.get_running_loop().run_in_executor(threads, run)


def _run_here(module: str, name: str, payload: bytes) -> bytes:
    """In the other process: find the task by its name and run it."""
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, Task):
        raise InvalidInput("task", f"{module}.{name} is not a task at the top of its module")
    bound = found.arguments.decode(payload)
    return found.encode_result(_contained(partial(found.function, *bound.args, **bound.kwargs)))


def _contained(call: Callable[[], object]) -> object:
    """As in a coroutine, a StopIteration ends nothing but `call`: no future can carry one."""
    try:
        return call()
    except StopIteration as error:
        raise RuntimeError("function raised StopIteration") from error
