"""Tells those who wait what only people can change.

A worker that nobody has started, a lane that is paused, code that does not fit: whoever waits for
a few seconds for such a thing is told, and again when it has become something else. Some wait
for a result, others for what a run emits.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from flowfabric import errors
from flowfabric.core.diagnosis import Explanation
from flowfabric.core.ids import ExecutionId, uuid_of
from flowfabric.core.obstacles import Gist, gist
from flowfabric.engine.engine import Engine
from flowfabric.logs import open_log
from flowfabric.outages import statements_within

log = open_log("flowfabric.run")
"""The name that the documentation gives to programs that filter it."""

REASON_TIMEOUT_S: Final = 1.0
"""How long a caller whose wait timed out waits for the reason."""
TELL_AFTER_S: Final = 5.0
"""How long a caller waits before it is told what only somebody's action would end."""
ASK_AGAIN_S: Final = 30.0
"""How long after that it is asked whether this has changed."""
ASK_GAP_S: Final = 1.0
"""Between two such questions, however many callers wait."""

Tell = Callable[[str, Explanation], None]
"""Gets what the execution is called, and why it waits."""


async def find_reason(engine: Engine, execution_id: ExecutionId) -> Explanation | None:
    """Why an execution has not ended, if the database says so soon."""
    try:
        with statements_within(REASON_TIMEOUT_S):
            return await engine.explain_execution(execution_id)
    except errors.FlowFabricError:
        return None


async def find_obstacle(engine: Engine, execution_id: ExecutionId) -> Explanation | None:
    """The same, if it waits until somebody acts."""
    why = await find_reason(engine, execution_id)
    return why if why is not None and why.needs_somebody else None


def tell_on_log(called: str, why: Explanation) -> None:
    log.warning("still waiting for %s: %s", called, why.sentence)


class Obstacles:
    """Asks about executions that are waited for, one after another. Belongs to one event loop.

    What it has said while others wait for the same, it does not repeat.
    """

    def __init__(self, engine: Engine, tell: Tell = tell_on_log) -> None:
        self._engine = engine
        self._tell = tell
        self._waits: dict[ExecutionId, int] = {}
        """How many wait for each."""
        self._timers: dict[ExecutionId, asyncio.TimerHandle] = {}
        self._overdue: dict[ExecutionId, None] = {}
        """Those to ask about, in order."""
        self._found: dict[ExecutionId, Gist | None] = {}
        """What was found last; None if nobody has to act."""
        self._asker: asyncio.Task[None] | None = None

    def begin(self, execution_id: ExecutionId) -> None:
        """Somebody begins to wait."""
        count = self._waits[execution_id] = self._waits.get(execution_id, 0) + 1
        if count == 1:
            self._ask_in(TELL_AFTER_S, execution_id)

    def end(self, execution_id: ExecutionId) -> None:
        """That wait is over."""
        self._waits[execution_id] -= 1
        if not self._waits[execution_id]:
            del self._waits[execution_id]
            self._timers.pop(execution_id).cancel()
            self._overdue.pop(execution_id, None)
            self._found.pop(execution_id, None)

    @contextmanager
    def waiting(self, execution_id: ExecutionId) -> Iterator[None]:
        self.begin(execution_id)
        try:
            yield
        finally:
            self.end(execution_id)

    async def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        if self._asker is not None:
            self._asker.cancel()
            await asyncio.gather(self._asker, return_exceptions=True)

    def _ask_in(self, seconds: float, execution_id: ExecutionId) -> None:
        loop = asyncio.get_running_loop()
        self._timers[execution_id] = loop.call_later(seconds, self._ask_about, execution_id)

    def _ask_about(self, execution_id: ExecutionId) -> None:
        self._overdue[execution_id] = None
        if self._asker is None or self._asker.done():
            self._asker = asyncio.create_task(self._ask(), name="flowfabric-obstacles")

    async def _ask(self) -> None:
        while self._overdue:
            execution_id = next(iter(self._overdue))
            del self._overdue[execution_id]
            why = await find_obstacle(self._engine, execution_id)
            if execution_id in self._waits:
                self._note(execution_id, why)
                self._ask_in(ASK_AGAIN_S, execution_id)
            await asyncio.sleep(ASK_GAP_S)

    def _note(self, execution_id: ExecutionId, why: Explanation | None) -> None:
        found = None if why is None else gist(why)
        if why is not None and found not in self._found.values():
            self._tell(why.own_id or uuid_of(execution_id), why)
        self._found[execution_id] = found
