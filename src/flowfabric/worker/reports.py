"""What a worker reports to the engine: the outcomes of attempts, and their steps.

Reports of many handlers are grouped. A result in hand is not given up because
the database is away: it is sent again for as long as the lease may still be
live, which the heartbeat renews.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, TypeVar

from flowfabric import errors
from flowfabric.batching import Commit, GroupCommit, Item, Reply
from flowfabric.core.bounds import BATCH_MAX
from flowfabric.core.handles import Handle
from flowfabric.core.results import Completed, FailResult, HandedBack
from flowfabric.core.steps import NewStep, StepStored
from flowfabric.core.streams import Appended
from flowfabric.engine.engine import Engine
from flowfabric.engine.executions import Completion, FailureReport
from flowfabric.engine.ledger import BudgetOutcome, BudgetRequest
from flowfabric.engine.steps import StepReport
from flowfabric.engine.streams import FrameAppend
from flowfabric.logs import open_log
from flowfabric.outages import ASK_AGAIN, level_of, statements_within
from flowfabric.worker.failures import why_lost
from flowfabric.worker.fences import check_outside
from flowfabric.worker.leases import LOST_LEASE, HeldLease, stop_here
from flowfabric.worker.parking import Parking

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

    def _group(self, report: Commit[Item, Reply]) -> GroupCommit[Item, Reply]:
        async def report_in_time(
            items: Sequence[Item],
        ) -> Sequence[Reply | errors.FlowFabricError]:
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

    async def call_engine(self, lease: HeldLease, report: Callable[[], Awaitable[T]]) -> T:
        """Make a call that is safe to repeat, and repeat it while the database is away.

        Each try ends after `patience_s`.
        """

        async def in_time() -> T:
            with statements_within(self.patience_s):
                return await report()

        return await self.until_answered(lease, in_time)

    async def until_answered(self, lease: HeldLease, report: Callable[[], Awaitable[T]]) -> T:
        """Repeat a report while the database is away. Ending each try in time is left to it.

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


class Recorder:
    """Stores the steps of one attempt."""

    def __init__(
        self, engine: Engine, reports: Reports, lease: HeldLease, parking: Parking
    ) -> None:
        self._engine = engine
        self._reports = reports
        self._lease = lease
        self._parking = parking
        self._later: list[NewStep] = []
        """Steps that the handler does not wait for and that are not being stored yet."""
        self._recording: asyncio.Task[None] | None = None
        self._refused: Exception | None = None
        """Why a step that the handler did not wait for cannot be stored."""

    async def store(self, step: NewStep) -> StepStored:
        check_outside(self._lease)
        if self._recording is not None:
            # Steps that the handler did not wait for come first: they were called before.
            await self.drain()
        if self._refused is not None:
            raise self._refused
        try:
            return await self._store_one(step)
        except LOST_LEASE as error:
            return await stop_here(self._lease, error)

    async def room(self) -> None:
        """Wait while a full batch of steps is waiting to be stored."""
        if len(self._later) >= BATCH_MAX:
            await self.drain()

    def store_later(self, step: NewStep) -> None:
        self._later.append(step)
        if self._recording is None:
            busy = ExitStack()
            busy.enter_context(self._parking.working())
            self._recording = asyncio.create_task(self._store_waiting())
            self._recording.add_done_callback(lambda _: busy.close())

    async def drain(self) -> None:
        """Wait until all steps that the handler did not wait for are stored."""
        while (recording := self._recording) is not None:
            if self._lease.lost is not None:
                recording.cancel()
            await asyncio.wait([recording])
            if self._recording is recording:
                # It was cancelled before it began.
                self._recording = None

    async def _store_waiting(self) -> None:
        """Store steps in order: a later run must not find a call without the one before it."""
        steps: list[NewStep] = []
        try:
            while self._later and self._refused is None:
                steps, self._later = self._later[:BATCH_MAX], self._later[BATCH_MAX:]
                await self._store_batch(steps)
        except LOST_LEASE as error:
            self._lease.lose(why_lost(error))
        except Exception as error:
            # Later runs meet the same refusal, provided that nothing is stored after it.
            self._refused = error
            keys = ", ".join(step.step_key for step in steps)
            log.warning("not stored: %s: %s", keys, error, extra=self._lease.log_fields)
        finally:
            self._recording = None

    async def _store_batch(self, steps: Sequence[NewStep]) -> None:
        if len(steps) == 1:
            # It goes together with steps of other handlers.
            await self._store_one(steps[0])
            return
        reports = [StepReport(handle=self._lease.handle, step=step) for step in steps]
        engine = self._engine
        for answer in await self._reports.call_engine(
            self._lease, lambda: engine.record_steps(reports)
        ):
            if isinstance(answer, errors.FlowFabricError):
                raise answer
            self._lease.stepped()

    async def _store_one(self, step: NewStep) -> StepStored:
        report = StepReport(handle=self._lease.handle, step=step)
        stored = await self._reports.until_answered(
            self._lease, partial(self._reports.steps.add, report)
        )
        self._lease.stepped()
        return stored
