"""What people do: cancel, revoke, reprioritise, release, accept.

Every operation works on one execution by id, or on several of which each gets its own answer.
"""

from collections.abc import Sequence

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
from flowfabric.core.records import Step
from flowfabric.engine.shell import Ask, Group, Swept, execution_key, lock_subject
from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.store.base import Transaction


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

        If a lane is given, only an execution of that lane.
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

        Stored steps that the code has not asked for by then no longer count. Safe to repeat.
        """
        full_id = self.shell.check_execution_id(execution_id)

        async def lock(tx: Transaction) -> tuple[Subject, Step | None]:
            subject = await lock_subject(tx, full_id)
            return subject, await _find_accepted(tx, subject)

        return await self.shell.decide_loaded(
            lock, lambda found, timing: changed_code.decide_accept(*found, timing)
        )


async def _find_accepted(tx: Transaction, subject: Subject) -> Step | None:
    """What an earlier acceptance of the same change has stored."""
    attempt = subject.attempt
    if attempt is None or attempt.blocked_on is None:
        return None
    key = execution_key(subject.execution.execution_id)
    return await tx.get_one(Step, (*key, steps.accepted_key(attempt.blocked_on)))
