"""Telling the engine what became of the work, until it has heard.

Reports of many handlers are grouped. A result in hand is not given up because
the database is away: it is sent again for as long as the lease may still be
live, which the heartbeat sees to meanwhile.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from flowfabric.core.handles import Handle
from flowfabric.core.results import Completed, FailResult, HandedBack
from flowfabric.core.steps import StepStored
from flowfabric.core.streams import Appended
from flowfabric.engine.engine import Engine
from flowfabric.engine.steps import StepReport
from flowfabric.engine.streams import FrameAppend
from flowfabric.engine.work import Completion, FailureReport
from flowfabric.errors import DatabaseGone, FlowFabricError, RetryExhausted
from flowfabric.logs import open_log
from flowfabric.outages import level_of, statements_within
from flowfabric.submission import OUTAGE, GroupCommit
from flowfabric.worker.leases import HeldLease

log = open_log(__name__)

T = TypeVar("T")

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0


class Reports:
    """The grouped reports of one worker."""

    def __init__(self, engine: Engine, patience_s: float) -> None:
        """`patience_s` is how long a statement of a report may take."""
        self._engine = engine
        self._patience_s = patience_s
        self.completions = GroupCommit[Completion, Completed](self._complete)
        self.failures = GroupCommit[FailureReport, FailResult](self._fail)
        self.steps = GroupCommit[StepReport, StepStored](self._record)
        self.returns = GroupCommit[Handle, HandedBack](self._hand_back)
        self.frames = GroupCommit[FrameAppend, tuple[Appended, ...]](self._append)

    async def close(self) -> None:
        for group in (self.frames, self.completions, self.failures, self.steps, self.returns):
            await group.close()

    async def send(self, lease: HeldLease, report: Callable[[], Awaitable[T]]) -> T:
        """Make a report that is safe to repeat; repeat it while the database is away.

        Raises `LeaseExpired` once the lease may have passed to somebody else.
        """
        pause_s = BACKOFF_FIRST_S
        while True:
            lease.require()
            try:
                with statements_within(self._patience_s):
                    return await report()
            except DatabaseGone:
                raise
            except (*OUTAGE, RetryExhausted) as error:
                log.log(
                    level_of(error),
                    "%s: the database did not answer, reporting again: %s",
                    lease.handle.execution_id,
                    error,
                )
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, BACKOFF_MAX_S)

    async def _complete(
        self, completions: Sequence[Completion]
    ) -> Sequence[Completed | FlowFabricError]:
        with statements_within(self._patience_s):
            return await self._engine.complete_many(completions)

    async def _fail(
        self, reports: Sequence[FailureReport]
    ) -> Sequence[FailResult | FlowFabricError]:
        with statements_within(self._patience_s):
            return await self._engine.fail_many(reports)

    async def _hand_back(self, handles: Sequence[Handle]) -> Sequence[HandedBack | FlowFabricError]:
        with statements_within(self._patience_s):
            return await self._engine.hand_back_many(handles, reason="the worker stops")

    async def _record(
        self, reports: Sequence[StepReport]
    ) -> Sequence[StepStored | FlowFabricError]:
        with statements_within(self._patience_s):
            return await self._engine.record_steps(reports)

    async def _append(
        self, appends: Sequence[FrameAppend]
    ) -> Sequence[tuple[Appended, ...] | FlowFabricError]:
        with statements_within(self._patience_s):
            return await self._engine.append_frames(appends)
