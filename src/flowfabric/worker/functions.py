"""Calling user functions: on the loop, in a thread or in another process, with what they share.

Threads get the caller's context variables.
"""

import asyncio
import concurrent.futures
import dataclasses
import datetime
import decimal
import dis
import enum
import hashlib
import importlib
import inspect
import multiprocessing
import os
import pathlib
import pickle
import signal
import threading
import types
import uuid
import weakref
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from flowfabric.errors import InvalidInput
from flowfabric.task import Task
from flowfabric.worker import failures
from flowfabric.worker.threads import Late, Threads

# Processes of our own for tasks that keep a core busy -----------------------
#
# Each holds one task at a time, so that whatever a task does to its process happens to nobody
# else: a task that ends its process has failed alone, and one that is told to stop is killed
# with it. Nothing but bytes crosses: the name of a task and its stored arguments, then its
# stored result or what it raised. An exception that cannot be rebuilt here crosses as the
# text it would have been reported as.

PROCESSES_MAX: Final = 61
"""The most Windows lets us wait for; far more than useful elsewhere."""

_SPAWN: Final = multiprocessing.get_context("spawn")


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

    def ask(self, ask: ProcessCall) -> failures.ReportedFailure:
        try:
            pipe = self._started()
            pipe.send_bytes(msgspec.msgpack.encode(ask))
            return msgspec.msgpack.decode(pipe.recv_bytes(), type=failures.ReportedFailure)
        except (EOFError, OSError) as error:
            raise failures.ProcessDied(self._last_words()) from error

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
                self._process = _SPAWN.Process(target=_serve, args=(theirs_end,), daemon=True)
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
        return f"the process of the task {how}"


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
    """Run what is asked for, one task after the other, until nobody asks any more."""
    # Ctrl-C and the end of a service are for the worker, which tells us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # It must not keep the worker from exiting, and yet a task may start processes of its own.
    multiprocessing.current_process().daemon = False
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):
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
        return failures.ReportedFailure(
            reason=failures.describe(error),
            failure_class=failures.classify(error, task),
            category=failures.category(error),
            trace=failures.traceback_text(error) or "",
            pickled=_rebuildable(error),
        )


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
    """What ends coroutines and generators ends nothing but `call`: no future can carry it."""
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
    """What a function raised that a future would take for its own cancellation."""

    error: BaseException


class Functions:
    """The threads and processes of one worker."""

    def __init__(self, threads: int, processes: int) -> None:
        self._threads = Threads(threads, "flowfabric-handler")
        # Apart from the handlers: those that wait for a step must not keep it from running.
        self._step_threads = Threads(threads, "flowfabric-step")
        self._processes = Processes(processes)

    async def call(
        self, call: partial[object], *, on_cancel: Callable[[], None], late: Late
    ) -> object:
        """Call the function of a step: an async one here, a plain one in a thread.

        A thread runs on when this is cancelled: `on_cancel` is called, and then `late`.
        """
        if inspect.iscoroutinefunction(call.func):
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
        if inspect.isawaitable(made):
            awaited: object = await made
            return awaited
        return made

    def in_thread(self, call: Callable[[], object]) -> "asyncio.Future[object]":
        return self._threads.call(partial(contained, call))

    async def in_process(self, task: Task[..., object], payload: bytes) -> bytes:
        """Run a task elsewhere and return its encoded result."""
        return await self._processes.run(task, payload)

    def close(self) -> None:
        """Let threads end by themselves, abandoned ones are not waited for; end the processes."""
        for threads in (self._threads, self._step_threads):
            threads.close()
        self._processes.close()


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


# What an application's handlers share: opened with the app, closed with it, found by type

T = TypeVar("T")

Managed = AbstractAsyncContextManager[T] | AbstractContextManager[T]
Factory = Callable[[], Managed[T] | Iterator[T] | AsyncIterator[T] | Awaitable[Managed[T] | T] | T]
"""Makes a resource: returns it or a context manager around it, `async` or not, or yields it."""


class Resources:
    """Factories by type, and what they made while the app is open."""

    def __init__(self) -> None:
        self._factories: dict[type, Callable[[], object]] = {}
        self._open: dict[type, object] = {}
        self._stack: AsyncExitStack | None = None

    def provide(self, kind: type[T], factory: Factory[T]) -> None:
        _check_kind(kind)
        if not callable(factory):
            raise InvalidInput(
                "provide",
                f"takes a function that makes a {kind.__name__} when a worker starts, as in"
                f" app.provide({kind.__name__}, lambda: …)",
                factory,
            )
        if kind in self._factories:
            raise InvalidInput("provide", f"{kind.__name__} is provided already")
        self._factories[kind] = factory

    def kinds(self) -> frozenset[type]:
        return frozenset(self._factories)

    def adopt(self, other: "Resources") -> None:
        """Provide what another provides."""
        self._factories |= other._factories

    async def open(self) -> None:
        """Make everything, in the order it was provided; what fails closes the rest."""
        if self._stack is not None:
            return
        opened: dict[type, object] = {}
        async with AsyncExitStack() as stack:
            for kind, factory in self._factories.items():
                made = opened[kind] = await _enter(stack, factory())
                if not isinstance(made, kind):
                    raise InvalidInput(
                        "provide", f"the factory of {kind.__name__} made something else", made
                    )
            self._stack = stack.pop_all()
        self._open = opened

    async def close(self) -> None:
        """Close everything in the opposite order."""
        stack, self._stack = self._stack, None
        self._open.clear()
        if stack is not None:
            await stack.aclose()

    def get(self, kind: type[T]) -> T:
        found = self._open.get(kind)
        if not isinstance(found, kind):
            raise InvalidInput(
                "get", f"nothing provides {kind.__name__}; call app.provide({kind.__name__}, …)"
            )
        return found


def _check_kind(kind: object) -> None:
    """Resources are found by `isinstance`, which not every annotation allows."""
    try:
        is_class = isinstance(kind, type) and isinstance(None, kind) in (True, False)
    except TypeError:
        is_class = False
    if not is_class:
        raise InvalidInput("provide", "takes a class by which the resource is found", kind)


async def _enter(stack: AsyncExitStack, made: object) -> object:
    """What a factory has made, opened; the stack closes it."""
    if inspect.isawaitable(made) and not _is_managed(made):
        made = await made
    if inspect.isgenerator(made):
        made = contextmanager(partial(_same, made))()
    elif inspect.isasyncgen(made):
        made = asynccontextmanager(partial(_same, made))()
    if isinstance(made, AbstractAsyncContextManager):
        entered: object = await stack.enter_async_context(made)
        return entered
    if isinstance(made, AbstractContextManager):
        value: object = stack.enter_context(made)
        return value
    stack.push_async_callback(_close, made)
    return made


def _is_managed(made: object) -> bool:
    return isinstance(made, AbstractAsyncContextManager | AbstractContextManager)


def _same(made: T) -> T:
    return made


async def _close(made: object) -> None:
    """Call its `aclose` or `close`, if it has one."""
    close: object = getattr(made, "aclose", None) or getattr(made, "close", None)
    if not callable(close):
        return
    closing: object = close()
    if inspect.isawaitable(closing):
        await closing


# A short name for the arguments of a call or branch, by which parallel ones are told apart
#
# Two digests: one of what stays the same from run to run as a rule, and one that has
# times, floats and uuids too. Of objects that are no plain values only the type
# counts. Large arguments are read up to a limit.
#
# A function is known by its name and what it has bound: the object of a method, the arguments of a
# partial, defaults, and the values that an inner function takes from around it. So is a coroutine
# that has not begun, with its arguments. Of what is bound only what nobody can change counts, and
# other functions: a list that is filled meanwhile tells nothing. What comes from around a function
# is either all that tells it from others or, beside arguments that do, whatever it happens to
# need, such as a counter: then it is in the second digest only.

NODES_MAX: Final = 500
"""Values of one call that are looked at, those inside others included."""
DEPTH_MAX: Final = 16
CHARS: Final = 12

_FIRM: Final = (
    bool, int, str, bytes, bytearray, decimal.Decimal, datetime.timedelta, pathlib.PurePath
)  # fmt: skip
_FLEETING: Final = (float, complex, datetime.date, datetime.time, uuid.UUID)
_NAMED: Final = (
    type,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)
"""Known by their names."""
_BINDING: Final = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.CoroutineType,
    partial,
)
"""Known by their names and what they have bound."""
_PLAIN: Final = (*_FIRM, *_FLEETING, enum.Enum)
_FIXED: Final = (*_PLAIN, type(None), type)
"""What nobody can change; a bytearray is none of it."""
_rebinding: "weakref.WeakKeyDictionary[types.CodeType, frozenset[str]]" = (
    weakref.WeakKeyDictionary()
)


class KnownBy(NamedTuple):
    """What tells a call or a branch from others of its name."""

    digest: str
    """`firm`, or `firm.full` when some of the values may change from run to run."""
    opaque: tuple[object, ...] = ()
    """What it has in it and the digest says nothing of."""
    is_vague: bool = False
    """It has nothing else in it."""


BY_NAME: Final = KnownBy("")


def known_by(*values: object) -> KnownBy:
    """What tells a call by its function and arguments, or a branch by its coroutine."""
    reading = _Reading()
    digest = _digest(reading.text(values, 0))
    around = not reading.tells
    if reading.fleeting or (reading.tells_around and not around):
        firm = _digest(_Reading(firm_only=True, around=around).text(values, 0))
        digest = digest if firm == digest else f"{firm}.{digest}"
    vague = bool(reading.opaque) and not (reading.tells or reading.tells_around)
    return KnownBy(digest, tuple(reading.opaque), vague)


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:CHARS]


class Parts(NamedTuple):
    """What a function, or a coroutine that has not begun, brings along."""

    arguments: tuple[object, ...] = ()
    bound: tuple[object, ...] = ()
    around: tuple[object, ...] = ()
    """The values of variables from around it."""


def parts_of(function: object) -> Parts:
    if isinstance(function, types.FunctionType):
        code, cells = function.__code__, function.__closure__ or ()
        values = {name: _content(cell) for name, cell in zip(code.co_freevars, cells, strict=True)}
        return Parts(bound=function.__defaults__ or (), around=_around(code, values))
    if isinstance(function, partial):
        return Parts(bound=(function.func, *function.args, *function.keywords.values()))
    if inspect.ismethod(function):
        return Parts(bound=(function.__func__, function.__self__))
    if inspect.isbuiltin(function):
        return Parts(bound=(function.__self__,))
    if not inspect.iscoroutine(function) or function.cr_frame is None or function.cr_suspended:
        return Parts()
    code, values = function.cr_code, function.cr_frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    arguments = tuple(values.get(name) for name in code.co_varnames[:count])
    return Parts(arguments, around=_around(code, values))


def _around(code: types.CodeType, values: Mapping[str, object]) -> tuple[object, ...]:
    if not code.co_freevars:
        return ()
    changing = _rebound(code)
    return tuple(values.get(name) for name in code.co_freevars if name not in changing)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # Its variable has no value yet.


def _rebound(code: types.CodeType) -> frozenset[str]:
    """Variables from around a function that it gives new values itself, as a counter."""
    found = _rebinding.get(code)
    if found is None:
        stores = (each for each in dis.get_instructions(code) if each.opname == "STORE_DEREF")
        found = _rebinding[code] = frozenset(each.argval for each in stores)
    return found


def _is_fixed(value: object) -> bool:
    """Whether a value stays what it is, with all that is inside."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_fixed, value))
    if isinstance(value, _FIXED):
        return not isinstance(value, bytearray)
    return _is_frozen(type(value)) and all(
        _is_fixed(getattr(value, name, None)) for name in _fields(value)
    )


def _is_frozen(kind: type) -> bool:
    """Whether it is a class of records that nobody can change."""
    if issubclass(kind, Struct):
        return kind.__struct_config__.frozen
    parameters: object = getattr(kind, "__dataclass_params__", None)
    return bool(getattr(parameters, "frozen", False))


class _Reading:
    """One walk through the arguments of a call."""

    def __init__(self, *, firm_only: bool = False, around: bool = True) -> None:
        """Whether times, floats and uuids are left out, and what comes from around functions."""
        self._firm_only = firm_only
        self._reads_around = around
        self._inside_around = 0
        self._nodes = 0
        self._functions: set[int] = set()
        self.fleeting = False
        self.tells = False
        """Arguments have told something that stays the same in every run."""
        self.tells_around = False
        """So has what comes from around functions."""
        self.opaque: list[object] = []

    def text(self, value: object, depth: int) -> bytes:
        """The value's type and what it holds, so that no other value has the same text."""
        self._nodes += 1
        kind = type(value)
        if value is None or self._nodes > NODES_MAX or depth > DEPTH_MAX:
            content = b""
        # The usual types first: to ask whether a value is of any other kind takes much longer.
        elif kind is str or kind is int:
            self._tell()
            content = _text(value)
        elif kind is tuple or kind is dict:
            content = b"".join(self._parts(value, depth + 1))
        elif isinstance(value, _BINDING):
            content = b"".join(self._function(value, depth + 1))
        elif isinstance(value, _PLAIN):
            content = self._plain(value)
        else:
            content = b"".join(self._parts(value, depth + 1))
        return b"%b %d:%b" % (kind.__qualname__.encode(), len(content), content)

    def _tell(self) -> None:
        if self._inside_around:
            self.tells_around = True
        else:
            self.tells = True

    def _plain(self, value: object) -> bytes:
        if isinstance(value, _FLEETING):
            self.fleeting = True
            return b"" if self._firm_only else _text(value)
        self._tell()
        if isinstance(value, enum.Enum):
            return value.name.encode()
        return bytes(value) if isinstance(value, bytes | bytearray) else _text(value)

    def _function(self, value: object, depth: int) -> Iterable[bytes]:
        """Its name and, the first time, its arguments and what it has bound."""
        yield str(getattr(value, "__qualname__", "")).encode()
        if id(value) in self._functions:
            return
        self._functions.add(id(value))
        arguments, bound, around = parts_of(value)
        yield from (self.text(each, depth) for each in arguments)
        yield from self._fixed(bound, depth)
        if around and self._reads_around:
            self._inside_around += 1
            yield from self._fixed(around, depth)
            self._inside_around -= 1

    def _fixed(self, bound: tuple[object, ...], depth: int) -> Iterable[bytes]:
        for each in bound:
            if isinstance(each, _BINDING) or _is_fixed(each):
                yield self.text(each, depth)
            else:
                self.opaque.append(each)

    def _parts(self, value: object, depth: int) -> Iterable[bytes]:
        if isinstance(value, _NAMED):
            return (value.__qualname__.encode(),)
        # Concrete types first: to ask for any sequence or mapping takes much longer.
        if isinstance(value, list | tuple):
            return self._items(value, depth)
        if isinstance(value, dict):
            items = value.items()
            return sorted(self.text(key, depth) + self.text(held, depth) for key, held in items)
        if isinstance(value, set | frozenset):
            return sorted(self.text(each, depth) for each in value)
        if isinstance(value, Sequence):
            return self._items(value, depth)
        if isinstance(value, Mapping):
            return self._parts(dict(value), depth)
        fields = _fields(value)
        if not fields:
            self.opaque.append(value)
        return [self.text(getattr(value, name, None), depth) for name in fields]

    def _items(self, values: Sequence[object], depth: int) -> Iterable[bytes]:
        """The first of them, and how many there are."""
        read = (self.text(each, depth) for each in islice(values, NODES_MAX))
        return (b"%d" % len(values), *read)


def _text(value: object) -> bytes:
    return str(value).encode(errors="surrogatepass")


def _fields(value: object) -> Sequence[str]:
    """The fields of a record; none of an object whose inside is its own affair."""
    kind = type(value)
    if isinstance(value, Struct):
        return value.__struct_fields__
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    attributes = getattr(kind, "__attrs_attrs__", None)
    if attributes is not None:
        return [str(attribute.name) for attribute in attributes]
    return list(getattr(kind, "__pydantic_fields__", ()))
