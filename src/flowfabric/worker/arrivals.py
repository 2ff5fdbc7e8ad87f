"""Code that takes results as they arrive: `asyncio.as_completed`, `asyncio.wait`, a queue.

Where branches work outside of calls, their results arrive in another order in every run, and code
that takes them acts in that order. The first two can be recognised: the callback that asyncio adds
to a branch has a name. A task at a queue has to be caught waiting there.

Libraries take results that way, too: for example, to connect to the first of several addresses, or
to wait for a free connection. That does not concern the handler's calls, so it counts only for
calls made by code of the same package.
"""

import asyncio
import inspect
from asyncio import queues, tasks
from collections.abc import Mapping
from types import FunctionType
from typing import Final

from flowfabric.worker.asyncio_tasks import awaited_in, is_from

_AS_COMPLETED: Final = (
    "as_completed.<locals>._on_completion",
    "_AsCompletedIterator._handle_completion",
)
_WAIT: Final = "_wait.<locals>._on_completion"
_NO_PACKAGE: Final = ("", "asyncio", "flowfabric")


class Arrivals:
    """How the code of one line takes the results of others."""

    __slots__ = ("_added", "_packages")

    def __init__(self) -> None:
        self._packages: frozenset[str] = frozenset()
        """The packages whose code takes results as they arrive."""
        self._added: object = None

    def __bool__(self) -> bool:
        return bool(self._packages)

    @property
    def count_here(self) -> bool:
        """Whether the running code belongs to such a package."""
        return bool(self._packages) and _package_here() in self._packages

    def added(self, callback: object) -> None:
        """Its task added this to a branch; with several branches, it takes the first to end."""
        if _takes_first(callback):
            if callback == self._added:
                self._packages |= {_package_here()}
            self._added = callback

    def at_queue(self, running: object) -> None:
        """The code in its task waits for what others put into a queue."""
        frames = (each.cr_frame for each in reversed(awaited_in(running)))
        packages = (_package(frame.f_globals) for frame in frames if frame is not None)
        found = next((each for each in packages if each not in _NO_PACKAGE), None)
        if found is not None:
            self._packages |= {found}

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


def _package_here() -> str:
    """The package whose code is running, other than asyncio and the engine."""
    frame = inspect.currentframe()
    while frame is not None:
        package = _package(frame.f_globals)
        if package not in _NO_PACKAGE:
            return package
        frame = frame.f_back
    return ""


def _package(variables: Mapping[str, object]) -> str:
    return str(variables.get("__name__", "")).partition(".")[0]
