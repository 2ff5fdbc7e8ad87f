"""What people and time do: cancel, revoke, reprioritise, replay; expire and promote.

Every operation works on one execution by id. The timed ones decide again under
the lock, so calling one too early, twice, or from many processes does no harm.
"""

import random
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from flowfabric.core.checks import (
    check_bool,
    check_int,
    check_list,
    check_optional_text,
    check_reason,
    check_text,
)
from flowfabric.core.executions import (
    CancelRequest,
    Timing,
    clamp_priority,
    decide_attempt_timeout,
    decide_cancel,
    decide_change_priority,
    decide_deadline,
    decide_promote,
    decide_replay,
)
from flowfabric.core.ids import ExecutionId, parse_lane_id, parse_uuid
from flowfabric.core.leases import OPERATOR_OVERRIDE, decide_expire_lease, decide_revoke
from flowfabric.core.limits import BATCH_MAX, EDGE_APPLY_AFTER_MS, SWEEP_BATCH, TEXT_BYTES_MAX
from flowfabric.core.policies import ATTEMPT_TIMEOUT, DURATION_MAX_MS, EXECUTION_DEADLINE
from flowfabric.core.results import (
    AlreadySatisfied,
    Cancelled,
    Changed,
    Marked,
    Replayed,
    RevokeResult,
    TimerResult,
)
from flowfabric.core.transitions import Decision, Subject
from flowfabric.engine.unit import Ask, Operations, row_execution_id
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound
from flowfabric.store.base import Reader, Transaction

TimerDecision = Callable[[Subject, Timing], Decision[TimerResult]]

TIMER_DECISIONS: dict[str, TimerDecision] = {
    ATTEMPT_TIMEOUT: decide_attempt_timeout,
    EXECUTION_DEADLINE: decide_deadline,
}


class Swept(Struct, frozen=True, kw_only=True):
    """What one sweep did."""

    acted: int
    """Executions that changed."""
    full: bool
    """Whether the batch was full: there may be more."""
    held: bool = False
    """Whether there was something to do that somebody else is holding."""
    failures: tuple[str, ...] = ()
    """What could not be done, and why; it is tried again later."""


class Operators(Operations):
    async def cancel_execution(
        self,
        execution_id: str,
        *,
        reason: str,
        source: str = OPERATOR_OVERRIDE,
        lease_id: str | None = None,
        lease_epoch: int | None = None,
        attempt_id: str | None = None,
    ) -> Cancelled:
        """End an execution in any phase. Cancelling a cancelled one succeeds and writes nothing."""
        request = check_cancel(
            reason,
            source=source,
            lease_id=lease_id,
            lease_epoch=lease_epoch,
            attempt_id=attempt_id,
        )
        return await self.decide(_cancel_ask(self.check_execution_id(execution_id), request))

    async def cancel_executions(
        self, execution_ids: Sequence[str], *, reason: str
    ) -> list[Cancelled | FlowFabricError]:
        """Cancel many as an operator; each gets its own answer or error."""
        check_list("execution_ids", execution_ids, 0, BATCH_MAX)
        request = check_cancel(reason)
        return await self.decide_many(
            [_cancel_ask(self.check_execution_id(each), request) for each in execution_ids]
        )

    async def revoke_lease(
        self,
        execution_id: str,
        *,
        reason: str,
        expected_lease_id: str = "",
        worker_instance_id: str = "",
    ) -> RevokeResult:
        """Take the lease from its holder; the execution is ready for another worker at once."""
        why = check_reason(reason)
        if expected_lease_id != "":
            parse_uuid("expected_lease_id", expected_lease_id)
        check_text("worker_instance_id", worker_instance_id)

        def decide(subject: Subject, timing: Timing) -> Decision[RevokeResult]:
            return decide_revoke(
                subject,
                expected_lease_id=expected_lease_id,
                worker_instance_id=worker_instance_id,
                reason=why,
                now_ms=timing.now_ms,
                retention_ms=timing.retention_ms,
            )

        return await self.decide(Ask(self.check_execution_id(execution_id), decide))

    async def change_priority(
        self,
        execution_id: str,
        new_priority: int,
        *,
        lane_id: str = "",
        any_runnable: bool = False,
    ) -> Changed:
        """Move a waiting execution in its queue; `any_runnable`: delayed and blocked ones too.

        With a lane, only if it is in that lane.
        """
        priority = clamp_priority(new_priority, "new_priority")
        check_bool("any_runnable", any_runnable)

        lane = parse_lane_id(lane_id) if check_text("lane_id", lane_id) else ""

        def decide(subject: Subject, timing: Timing) -> Decision[Changed]:
            if lane not in ("", subject.execution.lane_id):
                raise InvalidInput(
                    "lane_id", f"is not its lane, which is {subject.execution.lane_id}", lane
                )
            return decide_change_priority(subject, priority, any_runnable, timing.now_ms)

        return await self.decide(Ask(self.check_execution_id(execution_id), decide))

    def replay_ask(
        self, execution_id: str, reason: str | None, requested_by: str | None
    ) -> Ask[Replayed]:
        check_optional_text("reason", reason, bytes_max=TEXT_BYTES_MAX)
        check_optional_text("requested_by", requested_by)

        def decide(subject: Subject, timing: Timing) -> Decision[Replayed]:
            return decide_replay(subject, reason, requested_by, timing)

        return Ask(self.check_execution_id(execution_id), decide)

    # Time

    async def mark_lease_expired_if_due(self, execution_id: str) -> TimerResult:
        """Note that a lease has expired, if it has."""
        ask = Ask(self.check_execution_id(execution_id), _expire_lease)
        try:
            return await self.decide(ask)
        except NotFound:
            return AlreadySatisfied(reason="execution_not_found")

    async def promote_delayed(self, execution_id: str) -> TimerResult:
        """Make a delayed execution ready, if its time has come."""
        return await self.decide(Ask(self.check_execution_id(execution_id), _promote))

    async def expire_execution(self, execution_id: str, phase: str) -> TimerResult:
        """Apply an attempt timeout or the execution's deadline, if it has passed."""
        decide = check_phase(phase)
        return await self.decide(Ask(self.check_execution_id(execution_id), decide))

    async def expire_due_leases(self, *, limit: int = SWEEP_BATCH, waited_ms: int = 0) -> Swept:
        """Take work back from workers that went quiet, longest overdue first.

        `waited_ms` is how long the database has kept the caller waiting: a lease that ended
        meanwhile does not count as the death of its worker.
        """
        check_int("waited_ms", waited_ms, 0, DURATION_MAX_MS)
        asked_s = time.monotonic()

        def expire(subject: Subject, timing: Timing) -> Decision[TimerResult]:
            waited = waited_ms + int((time.monotonic() - asked_s) * 1_000)
            return decide_expire_lease(
                subject, timing.now_ms, timing.retention_ms, waited_ms=waited
            )

        return await self._sweep("due_leases", expire, limit)

    async def promote_due_delays(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Make delayed executions ready whose time has come."""
        return await self._sweep("due_delays", _promote, limit)

    async def expire_due_attempts(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """End attempts that run too long."""
        return await self._sweep("due_attempts", decide_attempt_timeout, limit)

    async def expire_due_deadlines(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """End executions past their deadline."""
        return await self._sweep("due_deadlines", decide_deadline, limit)

    async def next_due(self) -> dict[str, int]:
        """Milliseconds until each reconciler has something to do; those that never do are absent.

        Zero and less: it has now.
        """

        async def body(reader: Reader) -> dict[str, int]:
            (row,) = await reader.select(
                "next_due",
                event_retention_ms=self.config.event_retention_ms,
                edge_apply_after_ms=EDGE_APPLY_AFTER_MS,
            )
            now_ms = await reader.now_ms()
            return {
                name: int(str(due_ms)) - now_ms
                for name, due_ms in row.items()
                if due_ms is not None
            }

        return await self.store.read(body)

    async def _sweep(self, due: str, decide: TimerDecision, limit: int) -> Swept:
        """Find due rows nobody else is handling, and decide each again under its lock."""
        check_int("limit", limit, 1, BATCH_MAX)
        chances = [random.random() for _ in range(limit)]

        async def body(tx: Transaction) -> Swept:
            rows = await tx.select(due, now_ms=await tx.now_ms(), limit=limit)
            asks = [Ask(row_execution_id(row), decide) for row in rows]
            outcomes = await self.decide_in(tx, asks, chances[: len(asks)]) if asks else []
            acted = sum(isinstance(outcome, Marked) for outcome in outcomes)
            return Swept(acted=acted, full=len(rows) == limit)

        return await self.store.transact(body)


def _expire_lease(subject: Subject, timing: Timing) -> Decision[TimerResult]:
    return decide_expire_lease(subject, timing.now_ms, timing.retention_ms)


def _promote(subject: Subject, timing: Timing) -> Decision[TimerResult]:
    return decide_promote(subject, timing.now_ms)


def check_phase(phase: object) -> TimerDecision:
    decide = TIMER_DECISIONS.get(str(phase))
    if decide is None:
        raise InvalidInput("phase", f"must be one of {', '.join(TIMER_DECISIONS)}", phase)
    return decide


def check_cancel(
    reason: object,
    *,
    source: object = OPERATOR_OVERRIDE,
    lease_id: object = None,
    lease_epoch: object = None,
    attempt_id: object = None,
) -> CancelRequest:
    return CancelRequest(
        reason=check_reason(reason),
        source=check_text("source", source),
        lease_id=_optional_uuid("lease_id", lease_id),
        lease_epoch=None
        if lease_epoch is None
        else check_int("lease_epoch", lease_epoch, 0, 2**62),
        attempt_id=_optional_uuid("attempt_id", attempt_id),
    )


def _optional_uuid(field: str, value: object) -> str | None:
    return None if value in (None, "") else parse_uuid(field, value)


def _cancel_ask(execution_id: ExecutionId, request: CancelRequest) -> Ask[Cancelled]:
    def decide(subject: Subject, timing: Timing) -> Decision[Cancelled]:
        return decide_cancel(subject, request, timing)

    return Ask(execution_id, decide)
