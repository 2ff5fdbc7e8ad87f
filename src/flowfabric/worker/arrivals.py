"""Code that takes results as they arrive: `asyncio.as_completed`, `asyncio.wait`, a queue.

Where branches work outside of calls, their results arrive in another order in every run, and code
that takes them acts in that order. The first two can be recognised: the callback that asyncio adds
to a branch has a name. A task at a queue has to be caught waiting there.

Libraries take results that way, too: for example, to connect to the first of several addresses, or
to wait for a free connection. That does not concern the handler's calls, so it counts only if the
user's own code does it: code that is not installed, or is of the package of the task or branch.
From then on any module may make the calls.
"""

import asyncio
import inspect
import os
import site
import sysconfig
from asyncio import queues, tasks
from collections.abc import Iterable, Iterator
from types import FrameType, FunctionType
from typing import Final

from flowfabric.worker.asyncio_tasks import awaited_in, is_from

_AS_COMPLETED: Final = (
    "as_completed.<locals>._on_completion",
    "_AsCompletedIterator._handle_completion",
)
_WAIT: Final = "_wait.<locals>._on_completion"
_NOT_TOLD_FROM: Final = ("", "asyncio", "flowfabric")
"""Packages that only pass on what their callers do."""
_INSTALLED: Final = tuple(
    os.path.join(path, "")
    for path in {*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("stdlib")}
)


class Arrivals:
    """How the code of one line takes the results of others."""

    __slots__ = ("_added", "_taken")

    def __init__(self) -> None:
        self._taken = False
        self._added: object = None

    def __bool__(self) -> bool:
        """Whether code of the user's own has taken them as they arrive."""
        return self._taken

    def added(self, callback: object) -> None:
        """Its task added this to a branch; with several branches, it takes the first to end."""
        if _takes_first(callback):
            if callback == self._added:
                self._taken |= _is_own(reversed([*_running_here()]))
            self._added = callback

    def at_queue(self, running: object) -> None:
        """The code that waits in its task does so for what others put into a queue."""
        frames = (each.cr_frame for each in awaited_in(running))
        self._taken |= _is_own(frame for frame in frames if frame is not None)

    def let_go(self) -> None:
        """Drop what asyncio has added, which may lead back here."""
        self._added = None


def waits_at_queue(running: object) -> bool:
    """Whether a task waits for the next item of a queue."""
    inner = awaited_in(running)
    if not inner or not is_from(inner[-1], queues.__file__, "get"):
        return False
    # `as_completed` waits for branches at a queue of its own.
    return len(inner) == 1 or not is_from(inner[-2], tasks.__file__, "_wait_for_one")


def _takes_first(callback: object) -> bool:
    """Whether asyncio adds this callback to continue with the first task that ends, or in time."""
    if getattr(callback, "__module__", None) != tasks.__name__:
        return False
    name: object = getattr(callback, "__qualname__", None)
    if name != _WAIT or not isinstance(callback, FunctionType):
        return name in _AS_COMPLETED
    held = inspect.getclosurevars(callback).nonlocals
    timed = held.get("timeout_handle") is not None
    return timed or held.get("return_when") == asyncio.FIRST_COMPLETED


def _running_here() -> Iterator[FrameType]:
    """The frames of the running task, from the innermost to that of its coroutine."""
    task = asyncio.current_task()
    outermost = getattr(None if task is None else task.get_coro(), "cr_frame", None)
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = None if frame is outermost else frame.f_back


def _is_own(frames: Iterable[FrameType]) -> bool:
    """Whether the innermost of these, from the outermost on, is code of the user's own."""
    told = [frame for frame in frames if _package(frame) not in _NOT_TOLD_FROM]
    if not told:
        return False
    installed = told[-1].f_code.co_filename.startswith(_INSTALLED)
    return not installed or _package(told[-1]) == _package(told[0])


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
