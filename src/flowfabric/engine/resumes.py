"""Bringing suspended executions back: by an operator, by time, and onto a worker.

Resumed work is claimed like any other; the operations here claim it by id, for
schedulers that have reserved it with `issue_claim_grant`.
"""

from msgspec import Struct

from flowfabric.core.checks import check_int
from flowfabric.core.executions import Timing
from flowfabric.core.ids import ExecutionId, LeaseId, SignalId, parse_lane_id, parse_uuid
from flowfabric.core.leases import Granted, NewIds, check_ttl
from flowfabric.core.limits import BATCH_MAX, SWEEP_BATCH
from flowfabric.core.policies import DURATION_MAX_MS
from flowfabric.core.records import ClaimGrant
from flowfabric.core.results import AlreadySatisfied, Claimed
from flowfabric.core.resumption import (
    TRIGGERS,
    ExpireResult,
    ResumeClaim,
    Resumed,
    SuspensionExpired,
    WaitpointsClosed,
    decide_claim_resumed,
    decide_expire_suspension,
    decide_expire_waitpoints,
    decide_resume,
)
from flowfabric.core.states import LifecyclePhase
from flowfabric.core.transitions import Decision, Subject
from flowfabric.engine.leases import LEASE_TTL_MS, Leases, check_worker
from flowfabric.engine.operators import Swept
from flowfabric.engine.unit import Ask, new_lease_ids, new_uuid, row_execution_id
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.store.base import Transaction


class ResumeToken(Struct, frozen=True, kw_only=True):
    """A grant, and what the worker wants done with it."""

    execution_id: ExecutionId
    grant_id: str
    worker_id: str
    worker_instance_id: str
    lease_ttl_ms: int = LEASE_TTL_MS

    @classmethod
    def of(cls, grant: ClaimGrant, *, lease_ttl_ms: int = LEASE_TTL_MS) -> "ResumeToken":
        return cls(
            execution_id=grant.execution_id,
            grant_id=grant.grant_id,
            worker_id=grant.worker_id,
            worker_instance_id=grant.worker_instance_id,
            lease_ttl_ms=lease_ttl_ms,
        )


class Resumes(Leases):
    async def resume_execution(
        self, execution_id: str, *, trigger_type: str = "signal", resume_delay_ms: int = 0
    ) -> Resumed:
        """Resume a suspended execution whatever its condition says."""
        if trigger_type not in TRIGGERS:
            raise InvalidInput(
                "trigger_type", f"must be one of {', '.join(TRIGGERS)}", trigger_type
            )
        check_int("resume_delay_ms", resume_delay_ms, 0, DURATION_MAX_MS)

        def decide(subject: Subject, timing: Timing) -> Decision[Resumed]:
            return decide_resume(subject, trigger_type, resume_delay_ms, timing)

        return await self.decide(Ask(self.check_execution_id(execution_id), decide))

    async def claim_resumed_execution(
        self,
        execution_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str | None = None,
        lease_id: str | None = None,
        lease_ttl_ms: int = LEASE_TTL_MS,
        current_attempt_index: int | None = None,
        remaining_attempt_timeout_ms: int | None = None,
    ) -> Claimed:
        """Continue an interrupted attempt, with a grant issued to this worker before.

        The attempt gets the time it had left when it was parked, unless
        `remaining_attempt_timeout_ms` says otherwise; 0 is without end.
        """
        ids = new_lease_ids()
        if lease_id is not None:
            ids = NewIds(
                lease_id=LeaseId(parse_uuid("lease_id", lease_id)), attempt_id=ids.attempt_id
            )
        claim = ResumeClaim(
            worker=check_worker(worker_id, worker_instance_id),
            ids=ids,
            lease_ttl_ms=check_ttl(lease_ttl_ms),
            lane_id=None if lane_id is None else parse_lane_id(lane_id),
            attempt_index=None
            if current_attempt_index is None
            else check_int("current_attempt_index", current_attempt_index, 0, 2**31),
            attempt_time_left_ms=None
            if remaining_attempt_timeout_ms is None
            else check_int(
                "remaining_attempt_timeout_ms", remaining_attempt_timeout_ms, 0, DURATION_MAX_MS
            ),
        )
        granted = await self.decide(_claim_ask(self.check_execution_id(execution_id), claim))
        assert granted is not None
        return await self._claimed(granted, lease_ttl_ms)

    async def claim_from_resume_grant(self, token: ResumeToken) -> Claimed | None:
        """The same from a grant alone; None when the execution has ended meanwhile."""
        if not isinstance(token, ResumeToken):
            raise InvalidInput("token", "must be a ResumeToken", token)
        claim = ResumeClaim(
            worker=check_worker(token.worker_id, token.worker_instance_id),
            ids=new_lease_ids(),
            lease_ttl_ms=check_ttl(token.lease_ttl_ms),
            grant_id=parse_uuid("grant_id", token.grant_id),
        )
        ask = _claim_ask(self.check_execution_id(token.execution_id), claim, none_when_ended=True)
        granted = await self.decide(ask)
        return None if granted is None else await self._claimed(granted, token.lease_ttl_ms)

    # Time

    async def expire_suspension(self, execution_id: str) -> ExpireResult:
        """Apply a suspension's timeout, if it has passed."""
        try:
            return await self.decide(_expire_ask(self.check_execution_id(execution_id)))
        except NotFound:
            return AlreadySatisfied(reason="not_found_cleaned")

    async def expire_due_suspensions(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Apply the timeouts of suspensions that last too long."""
        check_int("limit", limit, 1, BATCH_MAX)
        signal_ids = [new_uuid() for _ in range(limit)]

        async def body(tx: Transaction) -> Swept:
            rows = await tx.select("due_suspensions", now_ms=await tx.now_ms(), limit=limit)
            asks = [
                _expire_ask(row_execution_id(row), signal_id)
                for row, signal_id in zip(rows, signal_ids, strict=False)
            ]
            outcomes = await self.decide_in(tx, asks, [0.0] * len(asks)) if asks else []
            acted = sum(isinstance(outcome, SuspensionExpired) for outcome in outcomes)
            return Swept(acted=acted, full=len(rows) == limit)

        return await self.store.transact(body)

    async def expire_due_waitpoints(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Close pending waitpoints that no suspension took over in time."""
        check_int("limit", limit, 1, BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            rows = await tx.select("due_waitpoints", now_ms=await tx.now_ms(), limit=limit)
            asks = [
                Ask(execution_id, decide_expire_waitpoints)
                for execution_id in dict.fromkeys(row_execution_id(row) for row in rows)
            ]
            outcomes = await self.decide_in(tx, asks, [0.0] * len(asks)) if asks else []
            closed = [o.closed for o in outcomes if isinstance(o, WaitpointsClosed)]
            return Swept(acted=sum(closed), full=len(rows) == limit)

        return await self.store.transact(body)


def _expire_ask(execution_id: ExecutionId, signal_id: str | None = None) -> Ask[ExpireResult]:
    named = SignalId(signal_id or new_uuid())

    def decide(subject: Subject, timing: Timing) -> Decision[ExpireResult]:
        return decide_expire_suspension(subject, named, timing)

    return Ask(execution_id, decide)


def _claim_ask(
    execution_id: ExecutionId, claim: ResumeClaim, *, none_when_ended: bool = False
) -> Ask[Granted | None]:
    def decide(subject: Subject, timing: Timing) -> Decision[Granted | None]:
        ended = subject.execution.lifecycle_phase is LifecyclePhase.TERMINAL
        if ended and none_when_ended:
            return Decision(answer=None)
        decision = decide_claim_resumed(subject, claim, timing)
        return Decision(answer=decision.answer, changes=decision.changes)

    return Ask(execution_id, decide)
