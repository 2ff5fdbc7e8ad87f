"""What time does: expire, promote and forget; to one execution, or to all that are due.

Each decides again under the lock, so calling one too early, twice, or from many processes does
no harm.
"""

import time
from collections.abc import Callable

from msgspec import Struct

from flowfabric.core import (
    bounds,
    checks,
    executions,
    leases,
    results,
)
from flowfabric.core.decisions import Decision, Subject, Timing
from flowfabric.core.events import EVERYBODY, ScannerFilter, check_scanner_filter
from flowfabric.core.policies import ATTEMPT_TIMEOUT, DURATION_MAX_MS, EXECUTION_DEADLINE
from flowfabric.engine.shell import Group, Swept
from flowfabric.errors import InvalidInput, NotFound
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


class Sweeps(Group):
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
        calm_ms: int = 0,
        only: ScannerFilter = EVERYBODY,
    ) -> Swept:
        """Take work back from workers that went quiet, longest overdue first.

        `waited_ms` is how long the database has kept the caller waiting, until `calm_ms` ago: the
        end of a lease that was to be renewed meanwhile does not count as the death of its worker.
        """
        checks.check_int("waited_ms", waited_ms, 0, DURATION_MAX_MS)
        checks.check_int("calm_ms", calm_ms, 0, DURATION_MAX_MS)
        asked_s = time.monotonic()

        def expire(subject: Subject, timing: Timing) -> Decision[results.TimerResult]:
            since_ms = int((time.monotonic() - asked_s) * 1_000)
            if calm_ms and since_ms < bounds.OUTAGE_MS_MIN:
                return leases.decide_expire_lease(
                    subject, timing, waited_ms=waited_ms, calm_ms=calm_ms + since_ms
                )
            waited = since_ms if calm_ms else waited_ms + since_ms
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
