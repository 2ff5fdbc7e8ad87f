"""Pausing executions, and bringing them back.

Every change goes through the execution's row lock, then suspension and
waitpoints: a signal, a timeout, a cancellation and a suspend that meet are
decided one after the other.
"""

from collections.abc import Sequence
from typing import TypedDict, Unpack

from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import bounds, events, ids, policies, records, results, resumption
from flowfabric.core.checks import check_int
from flowfabric.core.conditions import Condition
from flowfabric.core.decisions import Decision, Subject, Timing
from flowfabric.core.handles import Handle, HandleKind
from flowfabric.core.leases import Fence, compare_fence, require_fence
from flowfabric.core.resumption import ResumePolicy
from flowfabric.core.suspension import (
    SuspendAnswer,
    SuspendFindings,
    SuspendRequest,
    check_suspend,
    decide_suspend,
    may_repeat,
    with_pending,
)
from flowfabric.core.waitpoints import Binding, SuspensionDetails, details_of
from flowfabric.engine import shell, waitpoint_keys
from flowfabric.engine.reads import load_kept
from flowfabric.store.base import Transaction, Unlocked


class Suspended(Struct, frozen=True, kw_only=True, tag=True):
    """The lease is released; the handle is good for `observe_signals` only."""

    details: SuspensionDetails
    handle: Handle


class SuspendSatisfied(Struct, frozen=True, kw_only=True, tag="AlreadySatisfied"):
    """Early signals meet the condition: the lease is kept, continue with the same handle."""

    details: SuspensionDetails


SuspendOutcome = Suspended | SuspendSatisfied


class Suspending(Struct, frozen=True, kw_only=True):
    """The rows and the request that a suspend is decided on."""

    subject: Subject
    request: SuspendRequest
    found: SuspendFindings


class _Repeat(Struct, frozen=True, kw_only=True):
    """The answer an earlier suspend with the same idempotency key got."""

    subject: Subject
    answer: SuspendAnswer


class SuspendOptions(TypedDict, total=False):
    """Optional terms of a suspension, apart from its condition."""

    waitpoints: Sequence[Binding] | None
    """One per key that the condition mentions, generated if omitted."""
    suspension_id: str | None
    """Generated if omitted."""
    resume_policy: ResumePolicy
    reason_code: str
    requested_by: str
    timeout_at_ms: int | None
    """Without a timeout the execution's policy decides whether there is one."""
    timeout_in_ms: int | None
    timeout_behavior: str | records.TimeoutBehavior | None
    continuation_metadata_pointer: str | None
    idempotency_key: str | None
    take_pending: bool
    """Take over every pending waitpoint of the condition's names in place of fresh ones."""


class Suspensions(shell.Group):
    async def suspend(
        self,
        handle: Handle | bytes,
        *,
        resume_condition: Condition,
        **options: Unpack[SuspendOptions],
    ) -> SuspendOutcome:
        """Release the worker until signals meet the condition; the same attempt continues then.

        A repeat with the same `idempotency_key` gets the first answer, whatever else it
        asks for.
        """
        # Refuse a handle that ended with its suspension first, before other arguments.
        given = shell.value_or_error(self.shell.open_handle, handle)
        if isinstance(given, errors.AlreadySuspended):
            raise given
        request = checked_request(resume_condition, options)
        opened = shell.answered(given)
        answer, _ = await self._suspend(opened.execution_id, shell.fence_of(opened), request)
        return self._outcome(answer, opened)

    async def suspend_by_triple(
        self,
        execution_id: str,
        *,
        fence: Fence,
        resume_condition: Condition,
        **options: Unpack[SuspendOptions],
    ) -> SuspendOutcome:
        """`suspend` for a caller that has the lease's fence but no handle."""
        request = checked_request(resume_condition, options)
        given = require_fence(fence)
        answer, lane_id = await self._suspend(
            self.shell.check_execution_id(execution_id), given, request
        )
        held = answer.outcome
        handle = Handle(
            backend_tag=self.store.backend_tag,
            kind=HandleKind.SUSPENDED,
            execution_id=held.execution_id,
            attempt_index=held.attempt_index,
            attempt_id=held.attempt_id,
            lease_id=held.lease_id,
            lease_epoch=held.lease_epoch,
            lease_ttl_ms=held.lease_ttl_ms,
            lane_id=lane_id,
            worker_instance_id=held.worker_instance_id,
        )
        return self._outcome(answer, handle)

    # Ending a pause: by an operator, and by time

    async def resume_execution(
        self, execution_id: str, *, trigger_type: str = "signal", resume_delay_ms: int = 0
    ) -> resumption.Resumed:
        """Resume a suspended execution whatever its condition says."""
        if trigger_type not in resumption.TRIGGERS:
            raise errors.InvalidInput(
                "trigger_type", f"must be one of {', '.join(resumption.TRIGGERS)}", trigger_type
            )
        check_int("resume_delay_ms", resume_delay_ms, 0, policies.DURATION_MAX_MS)
        return await self.shell.decide_about(
            execution_id,
            lambda subject, timing: resumption.decide_resume(
                subject, trigger_type, resume_delay_ms, timing
            ),
        )

    async def expire_suspension(self, execution_id: str) -> resumption.ExpireResult:
        """Apply a suspension's timeout, if it has passed."""
        try:
            return await self.shell.decide_about(execution_id, _expire)
        except errors.NotFound:
            return results.AlreadySatisfied(reason="not_found_cleaned")

    async def expire_due_suspensions(
        self, *, limit: int = bounds.SWEEP_BATCH, only: events.ScannerFilter = events.EVERYBODY
    ) -> shell.Swept:
        """Apply the timeouts of suspensions that last too long."""
        return await self.shell.sweep("due_suspensions", _expire, limit, only)

    # Shared

    async def _suspend(
        self, execution_id: ids.ExecutionId, fence: Fence, request: SuspendRequest
    ) -> tuple[SuspendAnswer, ids.LaneId]:
        async def read(tx: Unlocked) -> Suspending | None:
            """The holder of the lease, unless this is a repeat or takes something over."""
            return await _read_holder(tx, execution_id, request)

        async def lock(tx: Transaction) -> Suspending | _Repeat:
            subject = await shell.lock_subject(tx, execution_id)
            repeat = await self._lock_repeat(tx, subject, request)
            if isinstance(repeat, _Repeat):
                return repeat
            return await lock_suspending(tx, subject, request, repeat)

        def decide(
            what: Suspending | _Repeat, timing: Timing
        ) -> Decision[tuple[SuspendAnswer, ids.LaneId]]:
            execution = what.subject.execution
            if isinstance(what, _Repeat):
                if not may_repeat(execution, what.answer.outcome, fence):
                    compare_fence(execution, fence)
                return Decision(answer=(what.answer, execution.lane_id))
            made = decide_suspend(what.subject, fence, what.request, what.found, timing)
            return Decision(answer=(made.answer, execution.lane_id), changes=made.changes)

        if request.pending:
            return await self.shell.decide_loaded(lock, decide)
        return await self.shell.decide_unlocked_first(read, lock, decide)

    async def _lock_repeat(
        self, tx: Transaction, subject: Subject, request: SuspendRequest
    ) -> _Repeat | records.SuspendDedup | None:
        """The remembered answer, or the row of one that is no longer valid."""
        if request.idempotency_key is None:
            return None
        execution = subject.execution
        at = (execution.partition_key, execution.execution_id)
        dedup = await tx.lock_one(records.SuspendDedup, (*at, request.idempotency_key))
        now_ms = await tx.now_ms()
        if dedup is None or dedup.expires_at_ms <= now_ms:
            return dedup
        keys = await waitpoint_keys.ensure_keys(tx)
        suspension = await tx.get_one(records.Suspension, (*at, dedup.suspension_id))
        assert suspension is not None, "a suspension is kept as long as its execution"
        waitpoints = await tx.select_records(
            records.Waitpoint,
            "list_suspension_waitpoints",
            **shell.columns_of(execution.execution_id),
            suspension_id=dedup.suspension_id,
        )
        if suspension.waitpoint_id not in [each.waitpoint_id for each in waitpoints]:
            # It is open for another suspension, since a replay: the old answer is void.
            return dedup
        details = details_of(suspension, waitpoints, keys, now_ms)
        return _Repeat(subject=subject, answer=SuspendAnswer(details=details, outcome=dedup))

    def _outcome(self, answer: SuspendAnswer, handle: Handle) -> SuspendOutcome:
        if answer.outcome.already_satisfied:
            return SuspendSatisfied(details=answer.details)
        released = structs.replace(handle, kind=HandleKind.SUSPENDED, signature=b"")
        return Suspended(details=answer.details, handle=self.shell.signer.sign(released))


def _expire(subject: Subject, timing: Timing) -> Decision[resumption.ExpireResult]:
    return resumption.decide_expire_suspension(subject, ids.SignalId(shell.new_uuid()), timing)


async def _read_holder(
    tx: Unlocked, execution_id: ids.ExecutionId, request: SuspendRequest
) -> Suspending | None:
    rows = await tx.select_joined(
        (records.Execution, records.Attempt, records.HmacKey),
        "read_for_suspend",
        **shell.columns_of(execution_id),
    )
    execution = rows[0].get(records.Execution) if rows else None
    key = rows[0].get(records.HmacKey) if rows else None
    if execution is None or key is None:
        return None
    if execution.keeps_signals or (request.take_pending and execution.open_waitpoint_count > 0):
        # There may be something for the suspension to take over.
        return None
    attempt = rows[0].get(records.Attempt)
    if attempt is None:
        attempt = records.first_attempt(execution)
        at = (*shell.execution_key(execution_id), execution.current_attempt_index)
        tx.note_absent(records.Attempt, [at])
    return Suspending(
        subject=Subject(execution=execution, attempt=attempt),
        request=request,
        found=SuspendFindings(keys=[key]),
    )


async def lock_suspending(
    tx: Transaction,
    subject: Subject,
    request: SuspendRequest,
    expired: records.SuspendDedup | None = None,
) -> Suspending:
    """Lock the waitpoints that a request names, and read what else its decision needs."""
    execution = subject.execution
    wanted = with_pending(request, subject.waitpoints, await tx.now_ms())
    at = (execution.partition_key, execution.execution_id)
    pending = (ids.WaitpointId(each.waitpoint_id) for each in wanted.pending)
    named = [*pending, *(bound.waitpoint_id for bound in wanted.fresh)]
    rows = await tx.lock(records.Waitpoint, [(*at, waitpoint_id) for waitpoint_id in named])
    taken = await tx.get(records.Suspension, [(*at, wanted.suspension_id)])
    found = SuspendFindings(
        keys=await waitpoint_keys.ensure_keys(tx),
        bound={waitpoint.waitpoint_id: waitpoint for waitpoint in rows.values()},
        kept=await load_kept(tx, execution),
        suspension_id_taken=bool(taken),
        expired_dedup=expired,
    )
    return Suspending(subject=subject, request=wanted, found=found)


def checked_request(resume_condition: Condition, options: SuspendOptions) -> SuspendRequest:
    return check_suspend(new_id=shell.new_uuid, resume_condition=resume_condition, **options)
