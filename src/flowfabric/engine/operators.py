"""What people and time do: cancel, revoke, reprioritise, accept; expire, promote and forget.

Every operation works on one execution by id. The timed ones decide again under
the lock, so calling one too early, twice, or from many processes does no harm.
"""

import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from flowfabric.core import (
    bounds,
    changed_code,
    checks,
    executions,
    ids,
    leases,
    results,
    steps,
)
from flowfabric.core.decisions import Decision, Subject, Timing
from flowfabric.core.events import EVERYBODY, ScannerFilter, check_scanner_filter
from flowfabric.core.policies import ATTEMPT_TIMEOUT, DURATION_MAX_MS, EXECUTION_DEADLINE
from flowfabric.core.records import Step
from flowfabric.engine.shell import Ask, Group, Swept, execution_key, lock_subject
from flowfabric.errors import FlowFabricError, InvalidInput, NotFound
from flowfabric.store.base import Reader, Transaction

TimerDecision = Callable[[Subject, Timing], Decision[results.TimerResult]]

TIMER_DECISIONS: dict[str, TimerDecision] = {
    ATTEMPT_TIMEOUT: executions.decide_attempt_timeout,
    EXECUTION_DEADLINE: executions.decide_deadline,
}


def check_phase(phase: object) -> TimerDecision:
    decide = TIMER_DECISIONS.get(str(phase))
    if decide is None:
        raise InvalidInput("phase", f"must be one of {', '.join(TIMER_DECISIONS)}", phase)
    return decide


def check_cancel(
    reason: object,
    *,
    source: object = leases.OPERATOR_OVERRIDE,
    lease_id: object = None,
    lease_epoch: object = None,
    attempt_id: object = None,
) -> executions.CancelRequest:
    return executions.CancelRequest(
        reason=checks.check_reason(reason),
        source=checks.check_text("source", source),
        lease_id=_optional_uuid("lease_id", lease_id),
        lease_epoch=checks.check_optional_int("lease_epoch", lease_epoch, 0, 2**62),
        attempt_id=_optional_uuid("attempt_id", attempt_id),
    )


def _optional_uuid(field: str, value: object) -> str | None:
    return None if value in (None, "") else ids.parse_uuid(field, value)


def _cancel_ask(
    execution_id: ids.ExecutionId, request: executions.CancelRequest
) -> Ask[results.Cancelled]:
    return Ask(
        execution_id, lambda subject, timing: executions.decide_cancel(subject, request, timing)
    )


class Operators(Group):
    async def cancel_execution(
        self,
        execution_id: str,
        *,
        reason: str,
        source: str = leases.OPERATOR_OVERRIDE,
        lease_id: str | None = None,
        lease_epoch: int | None = None,
        attempt_id: str | None = None,
    ) -> results.Cancelled:
        """End an execution in any phase. Cancelling a cancelled one succeeds and writes nothing."""
        request = check_cancel(
            reason,
            source=source,
            lease_id=lease_id,
            lease_epoch=lease_epoch,
            attempt_id=attempt_id,
        )
        return await self.shell.decide(
            _cancel_ask(self.shell.check_execution_id(execution_id), request)
        )

    async def cancel_executions(
        self, execution_ids: Sequence[str], *, reason: str
    ) -> list[results.Cancelled | FlowFabricError]:
        """Cancel many as an operator; each gets its own answer or error."""
        checks.check_list("execution_ids", execution_ids, 0, bounds.BATCH_MAX)
        request = check_cancel(reason)
        return await self.shell.decide_many(
            [_cancel_ask(self.shell.check_execution_id(each), request) for each in execution_ids]
        )

    async def revoke_lease(
        self,
        execution_id: str,
        *,
        reason: str,
        expected_lease_id: str = "",
        worker_instance_id: str = "",
    ) -> results.RevokeResult:
        """Take the lease from its holder; the execution is ready for another worker at once."""
        why = checks.check_reason(reason)
        if expected_lease_id != "":
            ids.parse_uuid("expected_lease_id", expected_lease_id)
        checks.check_text("worker_instance_id", worker_instance_id)
        return await self.shell.decide_about(
            execution_id,
            lambda subject, timing: leases.decide_revoke(
                subject,
                expected_lease_id=expected_lease_id,
                worker_instance_id=worker_instance_id,
                reason=why,
                now_ms=timing.now_ms,
            ),
        )

    async def change_priority(
        self,
        execution_id: str,
        new_priority: int,
        *,
        lane_id: str = "",
        any_runnable: bool = False,
    ) -> results.Changed:
        """Move a waiting execution in its queue; `any_runnable`: delayed and blocked ones too.

        With a lane, only if it is in that lane.
        """
        priority = executions.clamp_priority(new_priority, "new_priority")
        checks.check_bool("any_runnable", any_runnable)

        lane = ids.parse_lane_id(lane_id) if checks.check_text("lane_id", lane_id) else ""

        def decide(subject: Subject, timing: Timing) -> Decision[results.Changed]:
            if lane not in ("", subject.execution.lane_id):
                raise InvalidInput(
                    "lane_id", f"is not its lane, which is {subject.execution.lane_id}", lane
                )
            return executions.decide_change_priority(subject, priority, any_runnable, timing)

        return await self.shell.decide_about(execution_id, decide)

    def replay_ask(
        self, execution_id: str, reason: str | None, requested_by: str | None
    ) -> Ask[results.Replayed]:
        checks.check_optional_text("reason", reason, bytes_max=bounds.TEXT_BYTES_MAX)
        checks.check_optional_text("requested_by", requested_by)
        return Ask(
            self.shell.check_execution_id(execution_id),
            lambda subject, timing: executions.decide_replay(subject, reason, requested_by, timing),
        )

    # Executions that changed code has blocked

    async def release_blocked(
        self,
        kinds: Sequence[str],
        *,
        namespace: str | None = None,
        blocked_before_ms: int | None = None,
        limit: int = bounds.SWEEP_BATCH,
    ) -> Swept:
        """Let blocked executions of some kinds look at the code again at once.

        Without a `namespace`, those of every one. Those blocked after `blocked_before_ms` are
        left alone; without it, none are.
        """
        checks.optional(ids.parse_namespace, namespace)
        checks.check_int("limit", limit, 1, bounds.BATCH_MAX)
        checks.check_optional_time("blocked_before_ms", blocked_before_ms)
        wanted = [
            ids.parse_execution_kind(kind)
            for kind in checks.check_list("kinds", kinds, 0, bounds.BATCH_MAX)
        ]

        async def body(tx: Transaction) -> Swept:
            before_ms = await tx.now_ms() if blocked_before_ms is None else blocked_before_ms
            found = await tx.select_as(
                ids.ExecutionId,
                "blocked_by_code",
                kinds=wanted,
                namespace=namespace,
                blocked_before_ms=before_ms,
                limit=limit,
            )
            asks = [Ask(execution_id, changed_code.decide_release) for execution_id in found]
            outcomes = await self.shell.decide_in(tx, asks)
            acted = sum(isinstance(outcome, results.Marked) for outcome in outcomes)
            return Swept(acted=acted, full=len(found) == limit)

        return await self.store.transact(body)

    async def accept_changes(self, execution_id: str) -> results.Changed:
        """Allow the step at which changed code stopped an execution; it runs at once.

        Stored steps that the code has not full_id for by then no longer count. Safe to repeat.
        """
        full_id = self.shell.check_execution_id(execution_id)

        async def lock(tx: Transaction) -> tuple[Subject, Step | None]:
            subject = await lock_subject(tx, full_id)
            return subject, await _find_accepted(tx, subject)

        return await self.shell.decide_loaded(
            lock, lambda found, timing: changed_code.decide_accept(*found, timing)
        )

    # Time

    async def mark_lease_expired_if_due(self, execution_id: str) -> results.TimerResult:
        """Note that a lease has expired, if it has."""
        try:
            return await self.shell.decide_about(execution_id, leases.decide_expire_lease)
        except NotFound:
            return results.AlreadySatisfied(reason="execution_not_found")

    async def promote_delayed(self, execution_id: str) -> results.TimerResult:
        """Make a delayed execution ready, if its time has come."""
        return await self.shell.decide_about(execution_id, executions.decide_promote)

    async def expire_execution(self, execution_id: str, phase: str) -> results.TimerResult:
        """Apply an attempt timeout or the execution's deadline, if it has passed."""
        return await self.shell.decide_about(execution_id, check_phase(phase))

    async def expire_due_leases(
        self,
        *,
        limit: int = bounds.SWEEP_BATCH,
        waited_ms: int = 0,
        only: ScannerFilter = EVERYBODY,
    ) -> Swept:
        """Take work back from workers that went quiet, longest overdue first.

        `waited_ms` is how long the database has kept the caller waiting: a lease that ended
        meanwhile does not count as the death of its worker.
        """
        checks.check_int("waited_ms", waited_ms, 0, DURATION_MAX_MS)
        asked_s = time.monotonic()

        def expire(subject: Subject, timing: Timing) -> Decision[results.TimerResult]:
            waited = waited_ms + int((time.monotonic() - asked_s) * 1_000)
            return leases.decide_expire_lease(subject, timing, waited_ms=waited)

        return await self.shell.sweep("due_leases", expire, limit, only)

    async def promote_due_delays(
        self, *, limit: int = bounds.SWEEP_BATCH, only: ScannerFilter = EVERYBODY
    ) -> Swept:
        """Make delayed executions ready whose time has come."""
        return await self.shell.sweep("due_delays", executions.decide_promote, limit, only)

    async def expire_due_attempts(
        self, *, limit: int = bounds.SWEEP_BATCH, only: ScannerFilter = EVERYBODY
    ) -> Swept:
        """End attempts that run too long."""
        return await self.shell.sweep(
            "due_attempts", executions.decide_attempt_timeout, limit, only
        )

    async def expire_due_deadlines(
        self, *, limit: int = bounds.SWEEP_BATCH, only: ScannerFilter = EVERYBODY
    ) -> Swept:
        """End executions past their deadline."""
        return await self.shell.sweep("due_deadlines", executions.decide_deadline, limit, only)

    async def next_due(self) -> dict[str, int]:
        """Milliseconds until each reconciler has something to do; zero or less means now.

        A reconciler that has nothing to do is absent.
        """

        async def body(reader: Reader) -> dict[str, int]:
            (row,) = await reader.select(
                "next_due",
                event_retention_ms=self.shell.config.event_retention_ms,
                edge_apply_after_ms=bounds.EDGE_APPLY_AFTER_MS,
            )
            times = {name: at_ms for name, at_ms in row.items() if isinstance(at_ms, int)}
            now_ms = times.pop("now_ms")
            return {name: due_ms - now_ms for name, due_ms in times.items()}

        return await self.store.read(body)

    # Forgetting: ended executions after their keep time, old events, used-up guards, unused kinds
    #
    # When an execution ends it gets the time after which it may go, so that the scan
    # for it is one index and a policy's own retention needs no special case. What others
    # wait for, and what a parent that has not ended may still ask for, is kept beyond it.

    async def trim_retention(
        self, *, limit: int = bounds.SWEEP_BATCH, only: ScannerFilter = EVERYBODY
    ) -> Swept:
        """Delete ended executions past their keep time, with all that belongs to them."""
        checks.check_int("limit", limit, 1, bounds.BATCH_MAX)
        whose = check_scanner_filter(only)

        async def body(tx: Transaction) -> Swept:
            found = await trim_executions(tx, await tx.now_ms(), limit, whose)
            return Swept(acted=found.trimmed, full=found.looked_at == limit)

        return await self.store.transact(body)

    async def trim_events(self, *, limit: int = bounds.SWEEP_BATCH) -> Swept:
        """Delete events as old as the event log reaches back."""
        return await self._trim("trim_events", self.shell.config.event_retention_ms, limit)

    async def trim_guards(self, *, limit: int = bounds.SWEEP_BATCH) -> Swept:
        """Delete idempotency guards that have expired."""
        return await self._trim("trim_idempotency_guards", 0, limit)

    async def trim_routes(self, *, limit: int = bounds.SWEEP_BATCH) -> Swept:
        """Forget kinds and limit keys that no execution has and no recent submission used."""
        checks.check_int("limit", limit, 1, bounds.BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            now_ms = await tx.now_ms()
            due = await tx.select_as(int, "due_routes", now_ms=now_ms, limit=limit)
            if not due:
                return Swept(acted=0, full=False)
            gate_ids = await tx.select_as(str, "lock_keyed_gates", route_ids=due)
            (trimmed,) = await tx.select_as(
                int,
                "trim_routes",
                route_ids=due,
                now_ms=now_ms,
                retain_until_ms=now_ms + bounds.ROUTE_KEEP_MS,
            )
            await tx.select("trim_gates", gate_ids=gate_ids)
            return Swept(acted=trimmed, full=len(due) == limit)

        return await self.store.transact(body)

    async def _trim(self, name: str, age_ms: int, limit: int) -> Swept:
        checks.check_int("limit", limit, 1, bounds.BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            before_ms = await tx.now_ms() - age_ms
            (trimmed,) = await tx.select_as(int, name, before_ms=before_ms, limit=limit)
            # Events go as they were stored, several in a row: there may be more of them.
            return Swept(acted=trimmed, full=trimmed >= limit)

        return await self.store.transact(body)


async def _find_accepted(tx: Transaction, subject: Subject) -> Step | None:
    """What an earlier acceptance of the same change has stored."""
    attempt = subject.attempt
    if attempt is None or attempt.blocked_on is None:
        return None
    key = execution_key(subject.execution.execution_id)
    return await tx.get_one(Step, (*key, steps.accepted_key(attempt.blocked_on)))


class Trimmed(Struct, frozen=True):
    trimmed: int
    looked_at: int


async def trim_executions(
    tx: Transaction, before_ms: int, limit: int, only: ScannerFilter = EVERYBODY
) -> Trimmed:
    """Delete what is past its keep time and no longer needed."""
    (found,) = await tx.select_as(
        Trimmed,
        "trim_executions",
        before_ms=before_ms,
        limit=limit,
        held_ms_min=bounds.HELD_MS_MIN,
        held_ms_max=bounds.HELD_MS_MAX,
        **only.parameters,
    )
    return found
