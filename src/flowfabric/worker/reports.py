"""What a worker reports to the engine, such as the outcomes of attempts.

Reports of many handlers are grouped. A result in hand is not given up because
the database is away: it is sent again for as long as the lease may still be
live, which the heartbeat renews.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from flowfabric.batching import Answer, Commit, GroupCommit, Item
from flowfabric.core.handles import Handle
from flowfabric.core.results import Completed, FailResult, HandedBack
from flowfabric.core.steps import StepStored
from flowfabric.core.streams import Appended
from flowfabric.engine.engine import Engine
from flowfabric.engine.executions import Completion, FailureReport
from flowfabric.engine.ledger import BudgetOutcome, BudgetRequest
from flowfabric.engine.steps import StepReport
from flowfabric.engine.streams import FrameAppend
from flowfabric.errors import FlowFabricError
from flowfabric.logs import open_log
from flowfabric.outages import ASK_AGAIN, level_of, statements_within
from flowfabric.worker.leases import HeldLease

log = open_log(__name__)

T = TypeVar("T")

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0


class Reports:
    """The grouped reports of one worker."""

    def __init__(self, engine: Engine, patience_s: float) -> None:
        """`patience_s` is how long a statement of a report may take."""
        self.patience_s = patience_s
        give_back = partial(engine.hand_back_many, reason="the worker stops")
        self.completions: GroupCommit[Completion, Completed] = self._group(engine.complete_many)
        self.failures: GroupCommit[FailureReport, FailResult] = self._group(engine.fail_many)
        self.steps: GroupCommit[StepReport, StepStored] = self._group(engine.record_steps)
        self.returns: GroupCommit[Handle, HandedBack] = self._group(give_back)
        self.frames: GroupCommit[FrameAppend, tuple[Appended, ...]] = self._group(
            engine.append_frames
        )
        self.usage: GroupCommit[BudgetRequest, BudgetOutcome] = self._group(engine.post_to_budgets)

    def _group(self, report: Commit[Item, Answer]) -> GroupCommit[Item, Answer]:
        async def report_in_time(items: Sequence[Item]) -> Sequence[Answer | FlowFabricError]:
            with statements_within(self.patience_s):
                return await report(items)

        return GroupCommit(report_in_time)

    async def close(self) -> None:
        for group in (
            self.frames,
            self.usage,
            self.completions,
            self.failures,
            self.steps,
            self.returns,
        ):
            await group.close()

    async def send(self, lease: HeldLease, report: Callable[[], Awaitable[T]]) -> T:
        """Make a report that is safe to repeat; repeat it while the database is away."""

        async def in_time() -> T:
            with statements_within(self.patience_s):
                return await report()

        return await self.repeat(lease, in_time)

    async def repeat(self, lease: HeldLease, report: Callable[[], Awaitable[T]]) -> T:
        """The same for a report that is sent with others, which is in time.

        Raises `LeaseExpired` once the lease may have passed to another worker.
        """
        pause_s = BACKOFF_FIRST_S
        while True:
            lease.require()
            try:
                return await report()
            except ASK_AGAIN as error:
                log.log(
                    level_of(error),
                    "%s: the database did not answer, reporting again: %s",
                    lease.handle.execution_id,
                    error,
                )
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, BACKOFF_MAX_S)
