"""Threads in which an event loop calls plain functions.

An executor of the standard library makes two futures per call, takes five locks for them
and wakes the loop once per answer: some sixty microseconds, when a whole step takes a hundred.
Here calls and answers each pass through a queue, and the loop is woken once for all the
answers that have arrived. Everything but the calls happens on the loop's own thread.
"""

import asyncio
import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

CLOSED: Final = None


Late = Callable[[bool, object], None]
"""Takes the answer to a call that was cancelled: whether it returned anything, and what."""


class ThreadCall(NamedTuple):
    """A call, and where its answer belongs."""

    future: "asyncio.Future[object]"
    context: contextvars.Context
    call: Callable[[], object]
    late: Late | None


class ThreadAnswer(NamedTuple):
    asked: ThreadCall
    made: bool
    """Whether the call was made at all."""
    result: object
    error: BaseException | None


class Threads:
    """A thread for each call under way, up to a maximum. Belongs to one event loop."""

    def __init__(self, count_max: int, name: str) -> None:
        self._count_max = count_max
        self._name = name
        self._asked: queue.SimpleQueue[ThreadCall | None] = queue.SimpleQueue()
        self._answers: deque[ThreadAnswer] = deque()
        self._woken = False
        """The loop will look at the answers."""
        self._under_way = 0
        self._started = 0

    def call(
        self, call: Callable[[], object], late: Late | None = None
    ) -> "asyncio.Future[object]":
        """Call it in a thread, with the current context variables.

        A call that is cancelled before a thread has picked it up is not made. A call already
        under way continues: `late` is then called with its outcome, on the loop.
        """
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._asked.put(ThreadCall(future, contextvars.copy_context(), call, late))
        self._under_way += 1
        if self._started < min(self._under_way, self._count_max):
            self._started += 1
            name = f"{self._name}_{self._started}"
            threading.Thread(target=self._answer_all, name=name).start()
        return future

    def close(self) -> None:
        """Let threads end after their current call, without waiting for it."""
        self._drop_waiting()
        for _ in range(self._started):
            self._asked.put(CLOSED)

    def _drop_waiting(self) -> None:
        with suppress(queue.Empty):
            while True:
                asked = self._asked.get_nowait()
                if asked is not None:
                    asked.future.cancel()
                    _tell_late(ThreadAnswer(asked, False, None, None))

    def _answer_all(self) -> None:
        while (asked := self._asked.get()) is not None:
            loop = asked.future.get_loop()
            result: object = None
            error: BaseException | None = None
            made = not asked.future.cancelled()
            if made:
                try:
                    result = asked.context.run(asked.call)
                except BaseException as raised:
                    error = raised
            self._answers.append(ThreadAnswer(asked, made, result, error))
            # Keep neither alive while this thread waits for its next call.
            del asked, result, error
            if not self._woken:
                self._woken = True
                try:
                    loop.call_soon_threadsafe(self._deliver)
                except RuntimeError:
                    return  # The loop is closed: nothing waits for answers.

    def _deliver(self) -> None:
        # Do this first: an answer that arrives from now on wakes the loop again.
        self._woken = False
        while self._answers:
            answer = self._answers.popleft()
            self._under_way -= 1
            if answer.asked.future.done():
                _tell_late(answer)
            elif answer.error is None:
                answer.asked.future.set_result(answer.result)
            else:
                answer.asked.future.set_exception(answer.error)


def _tell_late(answer: ThreadAnswer) -> None:
    if answer.asked.late is not None:
        answer.asked.late(answer.made and answer.error is None, answer.result)
