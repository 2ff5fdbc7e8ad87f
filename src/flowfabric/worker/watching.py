"""Watching which tasks a handler starts.

The worker sees every task from the moment it is created: that is the order of the code,
whereas the order in which tasks arrive somewhere is chance. Outside handlers, and for
tasks of our own, watching costs a lookup.
"""

import asyncio
import contextvars
import inspect
import weakref
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Final, Protocol, TypeVar

from flowfabric.worker.lines import Line, current_line, inside_step

OURS: Final = str(Path(__file__).parent.parent)
DEMO: Final = str(Path(OURS, "demo"))

T = TypeVar("T")


class TaskFactory(Protocol):
    """As `asyncio` calls it."""

    def __call__(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[object, object, T]
        | Generator["asyncio.Future[object] | None", None, T],
        /,
    ) -> "asyncio.Future[T]": ...


_ours: dict[CodeType, bool] = {}
_watching: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch]" = (
    weakref.WeakKeyDictionary()
)


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
        context: contextvars.Context | None = None,
        **given: object,
    ) -> "asyncio.Future[T]":
        """Create a task; inside a handler, with a line of its own."""
        line = _line_in(context)
        if line is None or line.journal.closed or inside_step.get() or _is_ours(coroutine):
            return self._create(loop, coroutine, context)
        branch = line.fork(coroutine)
        # A copy of a context that was given too: tasks that share one are lines of their own.
        own = contextvars.copy_context() if context is None else context.copy()
        own.run(current_line.set, branch)
        task = self._create(loop, coroutine, own)
        branch.work.running = task
        task.add_done_callback(branch.ended)
        return task

    def _create(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[object, object, T]
        | Generator["asyncio.Future[object] | None", None, T],
        context: contextvars.Context | None,
    ) -> "asyncio.Future[T]":
        if self.before is None:
            return asyncio.Task(coroutine, loop=loop, context=context)
        if context is None:
            return self.before(loop, coroutine)
        # It copies the context it is called in, whether or not it can be given one.
        return context.run(self.before, loop, coroutine)


def _line_in(context: contextvars.Context | None) -> Line | None:
    """The line that starts a task: that of the context it is given, or of who creates it."""
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
    # Whoever has put another one in place meanwhile keeps it.
    if watched.get_task_factory() == watch.factory:
        watched.set_task_factory(watch.before)
        _watching.pop(watched, None)


def _is_ours(coroutine: object) -> bool:
    """Whether a coroutine is part of the engine: it makes no calls of its own."""
    if not inspect.iscoroutine(coroutine):
        return False
    code = coroutine.cr_code
    known = _ours.get(code)
    if known is None:
        filename = code.co_filename
        known = _ours[code] = filename.startswith(OURS) and not filename.startswith(DEMO)
    return known
