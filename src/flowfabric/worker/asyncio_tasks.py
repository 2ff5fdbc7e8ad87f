"""The asyncio tasks of a handler: what they wait for, what they do, and which ones it starts.

asyncio cannot be asked what a task waits for. A task at an asyncio lock, event or queue, or
awaiting another task of the handler, counts as waiting for a sibling; anything else, a request or
a timer, counts as work. Where a version of Python or an event loop hides this, the order is
assumed to be unknown.
"""

import asyncio
import gc
import inspect
import threading
import weakref
from asyncio import locks, queues, taskgroups, tasks
from collections.abc import Callable, Container, Coroutine, Generator, Iterable
from contextvars import Context, ContextVar, copy_context
from functools import partial
from pathlib import Path
from types import CodeType, CoroutineType
from typing import TYPE_CHECKING, Final, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from flowfabric.worker.branches import DurableCall, Line

T = TypeVar("T")

current_line: ContextVar["Line | None"] = ContextVar("flowfabric_line", default=None)
"""The line of the task that is running, inside a handler."""
inside_step: ContextVar["DurableCall | None"] = ContextVar("flowfabric_step", default=None)
"""The step whose function is running, if any."""

_MEETING: Final = (locks.__file__, queues.__file__)
"""The modules by which tasks wait for each other."""
_QUIET: Final = ("flowfabric", "asyncio.futures", "_asyncio")
"""The modules whose timers only end a sleep, or belong to the engine."""


_GENERATOR_STEP: Final = "async_generator_asend"
_OURS: Final = str(Path(__file__).parent.parent)
_DEMO: Final = str(Path(_OURS, "demo"))
_known: dict[CodeType, bool] = {}


def is_ours(coroutine: object) -> bool:
    """Whether a coroutine is part of the engine: it makes no calls of its own."""
    if not inspect.iscoroutine(coroutine):
        return False
    code = coroutine.cr_code
    known = _known.get(code)
    if known is None:
        filename = code.co_filename
        known = _known[code] = filename.startswith(_OURS) and not filename.startswith(_DEMO)
    return known


def at_work(running: object, others: Container[object]) -> bool:
    """Whether a task outside durable calls waits for something external, not one of `others`."""
    if not isinstance(running, asyncio.Task):
        return True
    if awaits_one_of(others, running):
        return False
    inner = awaited_in(running)
    return not inner or inner[-1].cr_code.co_filename not in _MEETING


def awaits_one_of(others: Container[object], running: object) -> bool:
    """Whether a task waits for the end of another."""
    awaited: object = getattr(running, "_fut_waiter", None)
    return isinstance(awaited, asyncio.Task) and awaited in others


def is_waiting(running: object) -> bool:
    """Whether a task waits for something that has not ended."""
    awaited: object = getattr(running, "_fut_waiter", None)
    return isinstance(awaited, asyncio.Future) and not awaited.done()


def picks(running: object) -> bool:
    """Whether a task waits for a set of tasks: several may have ended when it goes on."""
    inner = awaited_in(running)
    return bool(inner) and is_from(inner[-1], tasks.__file__, "_wait")


class OwnTasks:
    """Whether a task goes on when other tasks of its handler have ended, and only then.

    Waits at a lock or a queue do not count, since another run of the same worker may use it too,
    nor does `asyncio.shield`, which hides what it waits for. A timer may end some waits earlier.
    """

    def __init__(
        self, is_own: Callable[[object], bool], runs_in: Callable[[Context], bool]
    ) -> None:
        """Whether a future is a task or a call of the handler; and whether a context is its own."""
        self._is_own = is_own
        self._runs_in = runs_in

    def in_order(self, running: object, branches: int) -> bool:
        """Whether a task with some branches waits for these, in the same order in every run."""
        awaited: object = getattr(running, "_fut_waiter", None)
        if isinstance(awaited, asyncio.Task):
            # With several it may await them one by one, in the order of a set.
            return branches <= 1 and self._is_own(awaited)
        if self._are_own(getattr(awaited, "_children", None)):
            return True
        inner = awaited_in(running)
        if not inner:
            return False
        last = inner[-1]
        if is_from(last, taskgroups.__file__, "__aexit__", "_aexit"):
            return True
        if is_from(last, tasks.__file__, "wait_for"):
            # When its time is up, it gives up the calls of what it waits for.
            return self._are_own([_local(last, "fut")])
        if is_from(last, tasks.__file__, "_wait"):
            return self._are_own(_local(last, "fs")) and not self._has_timers()
        arrives = any(is_from(each, tasks.__file__, "_wait_for_one") for each in inner)
        return arrives and not self._has_timers()

    def _are_own(self, futures: object) -> bool:
        if not isinstance(futures, Iterable):
            return False
        return all(
            self._is_own(each) or self._are_own(getattr(each, "_children", None))
            for each in futures
        )

    def _has_timers(self) -> bool:
        """Whether a timer may end something in the handler. Not every event loop can tell."""
        timers: object = getattr(asyncio.get_running_loop(), "_scheduled", None)
        return not isinstance(timers, list) or any(map(self._ends_something, timers))

    def _ends_something(self, timer: object) -> bool:
        context: object = getattr(timer, "_context", None)
        own = isinstance(context, Context) and self._runs_in(context)
        if not own or (isinstance(timer, asyncio.Handle) and timer.cancelled()):
            return False
        callback: object = getattr(timer, "_callback", None)
        return not str(getattr(callback, "__module__", "")).startswith(_QUIET)


def awaited_in(running: object) -> "list[CoroutineType[object, object, object]]":
    """The coroutines that a task is inside of, from the outermost to the one that waits."""
    found: list[CoroutineType[object, object, object]] = []
    inner: object = running.get_coro() if isinstance(running, asyncio.Task) else None
    while inner is not None:
        if inspect.iscoroutine(inner):
            found.append(inner)
            inner = inner.cr_await
        else:
            inner = _awaited_by_generator(inner)
    return found


def _awaited_by_generator(step: object) -> object:
    """What an async generator waits for to make its next value; None for anything else."""
    # There is no other way from the step to its generator.
    for each in gc.get_referents(step) if type(step).__name__ == _GENERATOR_STEP else ():
        if inspect.isasyncgen(each):
            return each.ag_await
    return None


def is_from(coroutine: "CoroutineType[object, object, object]", filename: str, *names: str) -> bool:
    code = coroutine.cr_code
    return code.co_filename == filename and code.co_name in names


def _local(coroutine: "CoroutineType[object, object, object]", name: str) -> object:
    return None if coroutine.cr_frame is None else coroutine.cr_frame.f_locals.get(name)


# Tasks that cannot be ended ---------------------------------------------------


UNENDING: Final[set["asyncio.Task[None]"]] = set()


def keep_from_ending(task: "asyncio.Task[None]") -> None:
    """Let the program end without a task whose code catches whatever is to end it.

    `asyncio.run` would wait for it. If it were destroyed, its code would catch that, too, and then
    continue where no event loop can interrupt it. What is on the stack of a daemon thread is not
    destroyed, even as the process ends.
    """
    asyncio._unregister_task(task)
    ended = threading.Event()
    UNENDING.add(task)
    task.add_done_callback(UNENDING.discard)
    task.add_done_callback(lambda _: ended.set())
    threading.Thread(target=_hold, args=(task, ended), name="flowfabric-held", daemon=True).start()


def _hold(task: "asyncio.Task[None]", ended: threading.Event) -> None:
    ended.wait()


# What a task is doing --------------------------------------------------------


class TaskActivity:
    """What a task of a handler is doing."""

    __slots__ = (
        "branches",
        "calls",
        "ended",
        "held",
        "in_turn",
        "picks",
        "running",
        "starter",
        "stopped",
        "unseen",
    )

    def __init__(self, starter: "TaskActivity | None" = None) -> None:
        self.starter = starter
        self.running: object = None
        """The task itself, as long as it runs."""
        self.calls = 0
        """How many of its durable calls are awaited."""
        self.stopped = 0
        """Of those, the ones that only wait: for a time, a child, a signal or other code."""
        self.held = 0
        """Of those, the ones it awaits itself, doing nothing else meanwhile."""
        self.branches = 0
        """Tasks it has started that have not ended."""
        self.ended = 0
        """Tasks it has started that have ended since its last call."""
        self.unseen = 0
        """Tasks that ended during its calls: it may not have reacted to them yet."""
        self.in_turn = False
        """It may continue as they end: one has failed, was cancelled, or ended before others."""
        self.picks = False
        """It was seen to wait for a set of them: if several have ended, chance decides which one it
        continues with first."""
        if starter is not None:
            starter.branches += 1

    @property
    def is_outside_calls(self) -> bool:
        """Whether it waits neither in a durable call nor for its own branches."""
        return self.calls == 0 and self.branches == 0

    @property
    def is_acting(self) -> bool:
        """Whether one of its durable calls continues by itself."""
        return self.calls > self.stopped

    def end(self, *, cut_off: bool = False) -> None:
        if self.starter is not None:
            self.starter.branches -= 1
            self.starter.ended += 1
            self.starter.unseen += self.starter.held > 0
            self.starter.in_turn |= cut_off or self.starter.branches > 0
        self.starter = self.running = None


# Watching which tasks a handler starts --------------------------------------
#
# The worker sees every task from the moment it is created: that is the order of the code,
# whereas the order in which tasks arrive somewhere is chance. Outside handlers, and for
# tasks of our own, watching costs a lookup.


class TaskFactory(Protocol):
    """As `asyncio` calls it."""

    def __call__(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[object, object, T]
        | Generator["asyncio.Future[object] | None", None, T],
        /,
    ) -> "asyncio.Future[T]": ...


_watching: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch]" = (
    weakref.WeakKeyDictionary()
)


class BranchTask(asyncio.Task[T]):
    """A task that a handler starts. Sets of them are in the same order in every run."""

    def __init__(
        self,
        order: int,
        coroutine: Coroutine[object, object, T]
        | Generator["asyncio.Future[object] | None", None, T],
        *,
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:
        # Set this first: the task is put into a set while it is being made.
        self._order = order
        super().__init__(coroutine, loop=loop, context=context)

    def __hash__(self) -> int:
        return self._order

    def add_done_callback(
        self, callback: Callable[[Self], object], /, *, context: Context | None = None
    ) -> None:
        line = current_line.get()
        if line is not None:
            line.arrivals.added(callback)
        super().add_done_callback(callback, context=context)


class _Watch:
    def __init__(self, before: TaskFactory | None) -> None:
        self.before = before
        self.uses = 0

    def factory(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[object, object, T]
        | Generator["asyncio.Future[object] | None", None, T],
        /,
        *,
        context: Context | None = None,
        **given: object,
    ) -> "asyncio.Future[T]":
        """Create a task; inside a handler, with a line of its own."""
        line = _line_in(context)
        if line is None or line.journal.closed or inside_step.get() or is_ours(coroutine):
            return self._create(loop, coroutine, context)
        branch = line.fork(coroutine)
        # A copy of a context that was given too: tasks that share one are lines of their own.
        own = copy_context() if context is None else context.copy()
        own.run(current_line.set, branch)
        task = self._create(loop, coroutine, own, branch.order)
        branch.work.running = task
        line.journal.glance(branch)
        line.journal.glance(line)
        task.add_done_callback(branch.ended)
        return task

    def _create(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[object, object, T]
        | Generator["asyncio.Future[object] | None", None, T],
        context: Context | None,
        order: int | None = None,
    ) -> "asyncio.Future[T]":
        if self.before is None and order is not None:
            return BranchTask(order, coroutine, loop=loop, context=context)
        if self.before is None:
            return asyncio.Task(coroutine, loop=loop, context=context)
        if context is None:
            return self.before(loop, coroutine)
        # It copies the context it is called in, whether or not it can be given one.
        return context.run(self.before, loop, coroutine)


def _line_in(context: Context | None) -> "Line | None":
    """The line that starts a task: that of its given context, or of the code that creates it."""
    own = current_line.get()
    return own if context is None else context.get(current_line) or own


def watch_tasks(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """See every task that handlers start on a loop, until the function returned is called."""
    watch = _watching.get(loop)
    if watch is None or loop.get_task_factory() != watch.factory:
        watch = _watching[loop] = _Watch(loop.get_task_factory())
        loop.set_task_factory(watch.factory)
    watch.uses += 1
    return partial(_unwatch, weakref.ref(loop), watch)


def _unwatch(loop: "weakref.ref[asyncio.AbstractEventLoop]", watch: _Watch) -> None:
    watch.uses -= 1
    watched = loop()
    if watched is None or watch.uses > 0:
        return
    # Leave a factory that someone else has installed meanwhile.
    if watched.get_task_factory() == watch.factory:
        watched.set_task_factory(watch.before)
        _watching.pop(watched, None)
