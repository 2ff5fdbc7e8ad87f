"""Whether a task of a handler works, or waits for another one of the same handler.

There is no asking a task what it waits for. One that is at a lock, an event or a queue of asyncio,
or awaits another task of the handler, waits for its like; whatever else a task waits for, a
request or a timer, is work.
"""

import asyncio
import asyncio.locks
import asyncio.queues
import inspect
from collections.abc import Container
from typing import Final

_MEETING: Final = (
    asyncio.locks.Event.wait.__code__.co_filename,
    asyncio.queues.Queue.get.__code__.co_filename,
)
"""Where the code is by which tasks wait for each other."""


class TaskActivity:
    """What a task of a handler is about."""

    __slots__ = ("branches", "calls", "running", "starter")

    def __init__(self, starter: "TaskActivity | None" = None) -> None:
        self.starter = starter
        self.running: object = None
        """The task itself, as long as it runs; none for the handler's own."""
        self.calls = 0
        """Durable calls of it that are awaited."""
        self.branches = 0
        """Tasks it has started that have not ended."""
        if starter is not None:
            starter.branches += 1

    @property
    def is_outside_calls(self) -> bool:
        """Whether it waits neither in a durable call nor for branches of its own."""
        return self.calls == 0 and self.branches == 0

    def end(self) -> None:
        if self.starter is not None:
            self.starter.branches -= 1
        self.starter = self.running = None


def at_work(running: object, others: Container[object]) -> bool:
    """Whether a task that makes no durable call goes on by itself, not by one of `others`."""
    if not isinstance(running, asyncio.Task):
        return True
    awaited: object = getattr(running, "_fut_waiter", None)
    if isinstance(awaited, asyncio.Task):
        return awaited not in others
    inner: object = running.get_coro()
    while inspect.iscoroutine(inner):
        deeper: object = inner.cr_await
        if not inspect.iscoroutine(deeper):
            return inner.cr_code.co_filename not in _MEETING
        inner = deeper
    return True
