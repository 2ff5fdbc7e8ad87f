"""Calling user functions: on the loop, in a thread or in another process.

Threads get the caller's context variables.
"""

import asyncio
import concurrent.futures
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from types import FunctionType, GeneratorType
from typing import Final, NamedTuple, TypeGuard

import msgspec
from msgspec import Struct, structs

from flowfabric.errors import InvalidInput, Unavailable
from flowfabric.task import Task
from flowfabric.worker import failures
from flowfabric.worker.branches import DurableCall
from flowfabric.worker.threads import Late, Threads

# Processes of our own for tasks that keep a core busy -----------------------
#
# Each runs one task at a time, so that what a task does to its process affects no other task: a
# task that ends its process fails alone, and one that is told to stop is killed with it. Only
# bytes cross: the name of a task and its stored arguments, then its stored result or the exception
# it raised. An exception that cannot be rebuilt here crosses as the text that would be reported.

PROCESSES_MAX: Final = 61
"""The most Windows lets us wait for; far more than useful elsewhere."""

START_S: Final = 120.0
"""How long a process may take to import the program before the worker gives it up."""
_NAME: Final = "flowfabric-task"
_GUARD: Final = 'put what the program does when it is run under `if __name__ == "__main__":`'

_SPAWN: Final = multiprocessing.get_context("spawn")


def check_not_imported() -> None:
    """Refuse calls that a program makes while one of our processes merely imports it."""
    process = multiprocessing.current_process()
    # The standard library looks at the same mark.
    if process.name == _NAME and getattr(process, "_inheriting", False):
        raise Unavailable("app", f"a process of a task imports the program that uses it; {_GUARD}")


class ProcessCall(Struct, frozen=True, array_like=True):
    """What a process is to run."""

    module: str
    name: str
    payload: bytes


class Processes:
    """The processes of one worker; they are started when they are needed, and used again."""

    def __init__(self, count: int) -> None:
        count = min(count, PROCESSES_MAX)
        self._turns = asyncio.Semaphore(count)
        self._threads = ThreadPoolExecutor(count, "flowfabric-process")
        """Each waits for one process."""
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()

    async def run(self, task: Task[..., object], payload: bytes) -> bytes:
        """Run a task elsewhere and return its encoded result. Cancelling it ends its process."""
        ask = ProcessCall(task.function.__module__, task.function.__qualname__, payload)
        loop = asyncio.get_running_loop()
        async with self._turns:
            child = self._idle.pop() if self._idle else _Child()
            self._busy.add(child)
            try:
                told = await loop.run_in_executor(self._threads, child.ask, ask)
            except BaseException:
                child.kill()
                raise
            finally:
                self._busy.discard(child)
            self._idle.append(child)
        return _result(told)

    def close(self) -> None:
        """End them all; whatever they still run has been given up."""
        for child in (*self._idle, *self._busy):
            child.kill()
        self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Child:
    """One process. `ask` blocks; `kill` ends it from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._killed = False
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._came_up = False

    def ask(self, ask: ProcessCall) -> failures.ReportedFailure:
        try:
            pipe = self._started()
            if not self._came_up:
                self._await_start(pipe)
            pipe.send_bytes(msgspec.msgpack.encode(ask))
            return msgspec.msgpack.decode(pipe.recv_bytes(), type=failures.ReportedFailure)
        except (EOFError, OSError) as error:
            raise failures.ProcessDied(self._last_words()) from error

    def _await_start(self, pipe: Connection) -> None:
        if not pipe.poll(START_S):
            self.kill()
            raise failures.ProcessDied(
                f"the process of the task did not come up in {START_S:.0f} s; {_GUARD}"
            )
        pipe.recv_bytes()
        self._came_up = True

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def _started(self) -> Connection:
        with self._lock:
            if self._killed:
                raise EOFError
            if self._pipe is None:
                self._pipe, theirs_end = _SPAWN.Pipe()
                self._process = _SPAWN.Process(
                    target=_serve, name=_NAME, args=(theirs_end,), daemon=True
                )
                self._process.start()
                theirs_end.close()
            return self._pipe

    def _last_words(self) -> str:
        process = self._process
        if process is None:
            return "the process of the task was not started"
        process.join()
        code = process.exitcode
        how = (
            f"was killed by signal {-code}" if code is not None and code < 0 else f"exited: {code}"
        )
        if self._came_up or self._killed:
            return f"the process of the task {how}"
        return f"the process of the task {how} before it could run anything; {_GUARD}"


def _result(told: failures.ReportedFailure) -> bytes:
    if told.result is not None:
        return told.result
    elsewhere = failures.RaisedElsewhere(told)
    if told.pickled is None:
        raise elsewhere
    error = pickle.loads(told.pickled)
    assert isinstance(error, BaseException)
    raise error from elsewhere


# In the other process -----------------------------------------------------------------


def _serve(pipe: Connection) -> None:
    """Run what the worker asks for, one task after another, until it closes the connection."""
    # Ctrl-C and the end of a service are for the worker, which tells us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # It must not keep the worker from exiting, and yet a task may start processes of its own.
    multiprocessing.current_process().daemon = False
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):
        pipe.send_bytes(b"up")
        while True:
            ask = msgspec.msgpack.decode(pipe.recv_bytes(), type=ProcessCall)
            pipe.send_bytes(msgspec.msgpack.encode(_answer(ask)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(ask: ProcessCall) -> failures.ReportedFailure:
    task: Task[..., object] | None = None
    try:
        task = _find(ask)
        bound = task.arguments.decode(ask.payload)
        call = partial(task.function, *bound.args, **bound.kwargs)
        return failures.ReportedFailure(result=task.encode_result(contained(call)))
    except BaseException as error:
        return structs.replace(failures.report_of(error, task), pickled=_rebuildable(error))


def _find(ask: ProcessCall) -> "Task[..., object]":
    found: object = importlib.import_module(ask.module)
    for part in ask.name.split("."):
        found = getattr(found, part)
    if not isinstance(found, Task):
        raise InvalidInput(
            "task", f"{ask.module}.{ask.name} is not a task at the top of its module"
        )
    return found


def contained(call: Callable[[], object]) -> object:
    """Let exceptions that end coroutines and generators end only `call`; futures refuse them."""
    try:
        return call()
    except (StopIteration, GeneratorExit) as error:
        text = f": {error}" if str(error) else ""
        raise RuntimeError(f"function raised {type(error).__name__}{text}") from error


def _rebuildable(error: BaseException) -> bytes | None:
    """The exception as bytes from which the same can be made; not all can."""
    with suppress(Exception):
        pickled = pickle.dumps(error)
        rebuilt = pickle.loads(pickled)
        if type(rebuilt) is type(error) and str(rebuilt) == str(error):
            return pickled
    return None


CANCELLATIONS: Final = (asyncio.CancelledError, concurrent.futures.CancelledError)


class Raised(NamedTuple):
    """An exception of a function that a future would take for its own cancellation."""

    error: BaseException


class Functions:
    """The threads and processes of one worker."""

    def __init__(self, threads: int, processes: int) -> None:
        self._threads = Threads(threads, "flowfabric-handler")
        # Separate from those of handlers, which may wait for a step and must not keep it waiting.
        self._step_threads = Threads(threads, "flowfabric-step")
        self._processes = Processes(processes)

    async def call(
        self, call: partial[object], *, on_cancel: Callable[[], None], late: Late
    ) -> object:
        """Call the function of a step: an async one here, a plain one in a thread.

        A thread runs on when this is cancelled: `on_cancel` is called, and then `late`.
        """
        if _is_async(call.func):
            coroutine = call()
            assert inspect.isawaitable(coroutine), "what its function is"
            result: object = await coroutine
            return result
        thread = self._step_threads.call(partial(_kept, call), late)
        try:
            made = await thread
        except asyncio.CancelledError:
            if thread.cancelled():
                on_cancel()
            raise
        if isinstance(made, Raised):
            raise made.error
        # A plain function may return a coroutine, as a lambda around an async one does.
        if is_awaitable(made):
            awaited: object = await made
            return awaited
        return made

    def in_thread(self, call: Callable[[], object]) -> "asyncio.Future[object]":
        return self._threads.call(partial(contained, call))

    async def in_process(self, task: Task[..., object], payload: bytes) -> bytes:
        """Run a task elsewhere and return its encoded result."""
        return await self._processes.run(task, payload)

    def close(self) -> None:
        """Let threads finish, without waiting for abandoned ones; end the processes."""
        for threads in (self._threads, self._step_threads):
            threads.close()
        self._processes.close()


def _is_async(function: object) -> bool:
    """As `inspect.iscoroutinefunction`, but quick for a function that nobody has marked."""
    if isinstance(function, FunctionType) and not function.__dict__:
        return bool(function.__code__.co_flags & inspect.CO_COROUTINE)
    return inspect.iscoroutinefunction(function)


def is_awaitable(value: object) -> TypeGuard[Awaitable[object]]:
    """As `inspect.isawaitable`, but quick for a plain value."""
    if hasattr(type(value), "__await__"):
        return True
    return isinstance(value, GeneratorType) and inspect.isawaitable(value)


def is_cancelled(error: BaseException) -> bool:
    """Whether the task was cancelled, as opposed to a function having raised it."""
    task = asyncio.current_task()
    cancelling = task is not None and task.cancelling() > 0
    return cancelling and isinstance(error, asyncio.CancelledError)


def _kept(call: Callable[[], object]) -> object:
    try:
        return contained(call)
    except CANCELLATIONS as error:
        return Raised(error)


class Unfinished:
    """Step functions of one attempt that still run; the attempt does not fail before they end.

    When a branch fails, the steps of others continue, and a thread does even if it was cancelled.
    Their effects happen: unless their results are stored, the next attempt repeats them.
    """

    __slots__ = ("_none", "count", "late")

    def __init__(self) -> None:
        self.count = 0
        self.late: tuple[tuple[DurableCall, object], ...] = ()
        """Results that threads returned after the handler had cancelled the call."""
        self._none: asyncio.Event | None = None
        """Made for the one waiter."""

    def begin(self) -> None:
        self.count += 1

    def end(self) -> None:
        self.count -= 1
        if self._none is not None and not self.count:
            self._none.set()

    def came_late(self, call: DurableCall, returned: bool, result: object) -> None:
        if returned and not isinstance(result, Raised) and not inspect.isawaitable(result):
            self.late += ((call, result),)
        self.end()

    async def wait(self) -> None:
        while self.count:
            self._none = asyncio.Event()
            await self._none.wait()
