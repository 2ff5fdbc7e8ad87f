"""What reconcilers do for budgets, a batch at a time: resets, freed reservations, breaches."""

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import structs

from flowfabric.core import budgets as rules
from flowfabric.core import ids
from flowfabric.core.bounds import BATCH_MAX, CANCEL_BATCH, SWEEP_BATCH
from flowfabric.core.budgets import (
    Budget,
    BudgetReport,
    BudgetReservation,
    BudgetSpend,
    OnHardLimit,
)
from flowfabric.core.checks import check_int
from flowfabric.core.executions import decide_cancel_waiting
from flowfabric.core.records import Execution
from flowfabric.core.results import Cancelled
from flowfabric.core.transitions import Changes, Decision, Subject, Timing
from flowfabric.engine.budgets import freed_accounts, reset_in
from flowfabric.engine.flow_operators import FlowOperators
from flowfabric.engine.ledger import save_budgets
from flowfabric.engine.shell import Ask, Group, Shell, Swept, execution_key, id_columns
from flowfabric.errors import NotFound
from flowfabric.store.base import Reader, Transaction
from flowfabric.store.mapping import key_of

BUDGETS_SWEEP: Final = 100
"""Budgets one sweep resets."""


class BudgetSweeps(Group):
    def __init__(self, shell: Shell, flows: FlowOperators) -> None:
        super().__init__(shell)
        self.flows = flows

    async def reset_due_budgets(self, *, limit: int = BUDGETS_SWEEP) -> Swept:
        """Start new periods of the budgets whose time has come."""
        check_int("limit", limit, 1, BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            due = await tx.select_records(
                Budget, "due_budget_resets", now_ms=await tx.now_ms(), limit=limit
            )
            await reset_in(tx, due)
            return Swept(acted=len(due), full=len(due) == limit)

        return await self.store.transact(body)

    async def check_reservations(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Free reservations whose attempts have ended, and open budgets to what those who no
        longer wait have held up; others are looked at again later."""
        check_int("limit", limit, 1, BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            now_ms = await tx.now_ms()
            found = await tx.select_records(
                BudgetReservation, "due_reservations", now_ms=now_ms, limit=limit
            )
            locked = await tx.lock(Budget, sorted({(each.budget_id,) for each in found}))
            # Under the locks: some may have been settled meanwhile.
            keys = [(each.budget_id, each.reservation_id) for each in found]
            due = await tx.get(BudgetReservation, keys)
            dead = await tx.select_records(
                BudgetReservation,
                "dead_reservations",
                budget_ids=[str(key[0]) for key in locked],
                now_ms=now_ms,
            )
            dead = [*dead, *await _given_up(tx, due.values())]
            freed = [rules.posted(each, now_ms) for each in freed_accounts(locked.values(), dead)]
            gone = {(each.budget_id, each.reservation_id) for each in dead}
            later = [
                structs.replace(each, check_at_ms=now_ms + _next_check_ms(each))
                for key, each in due.items()
                if key not in gone
            ]
            await save_budgets(
                tx,
                {each.budget_id: each for each in locked.values()},
                freed,
                Changes(updates=tuple(later), deletes=tuple(dead)),
            )
            return Swept(acted=len(found), full=len(found) == limit)

        return await self.store.transact(body)

    async def trim_budgets(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Forget keys and spends that are old, unless their executions exist."""
        check_int("limit", limit, 1, BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            now_ms = await tx.now_ms()
            reports = await tx.select_records(
                BudgetReport, "due_budget_reports", now_ms=now_ms, limit=limit
            )
            spends = await tx.select_records(
                BudgetSpend, "due_budget_spends", now_ms=now_ms, limit=limit
            )
            found: list[BudgetReport | BudgetSpend] = [*reports, *spends]
            await tx.lock(Budget, sorted({(each.budget_id,) for each in found}))
            # Under the locks: some may have been used again meanwhile.
            current: list[BudgetReport | BudgetSpend] = [
                *(await tx.get(BudgetReport, [key_of(each) for each in reports])).values(),
                *(await tx.get(BudgetSpend, [key_of(each) for each in spends])).values(),
            ]
            due = [each for each in current if each.keep_until_ms <= now_ms]
            there = await existing_executions(tx, [each.execution_id for each in due])
            keep_ms = now_ms + rules.KEPT_MS
            await tx.save(
                Changes(
                    updates=tuple(
                        structs.replace(each, keep_until_ms=keep_ms)
                        for each in due
                        if each.execution_id in there
                    ),
                    deletes=tuple(each for each in due if each.execution_id not in there),
                )
            )
            return Swept(acted=len(found), full=limit in (len(reports), len(spends)))

        return await self.store.transact(body)

    async def act_on_breaches(self, *, limit: int = CANCEL_BATCH) -> Swept:
        """Cancel the executions of breached budgets that want it, up to `limit`."""
        check_int("limit", limit, 1, BATCH_MAX)

        async def body(reader: Reader) -> Sequence[Budget]:
            now_ms = await reader.now_ms()
            return await reader.select_records(Budget, "due_budget_actions", now_ms=now_ms, limit=1)

        due = await self.store.read(body)
        for budget in due:
            if budget.on_hard_limit is OnHardLimit.CANCEL_PENDING:
                cancelled = await self._cancel_pending(budget, limit)
                if cancelled:
                    return Swept(acted=cancelled, full=True)
            elif budget.on_hard_limit is OnHardLimit.CANCEL_FLOW:
                await self._cancel_flow(budget)
            await self._acted(budget)
        return Swept(acted=len(due), full=bool(due))

    async def _cancel_pending(self, budget: Budget, limit: int) -> int:
        reason = f"budget {budget.name} is used up"

        def decide(subject: Subject, timing: Timing) -> Decision[Cancelled]:
            return decide_cancel_waiting(subject, reason, timing)

        pending = await self.select_as(
            ids.ExecutionId, "pending_of_budget", owner_id=budget.budget_id, limit=limit
        )
        await self.shell.decide_many([Ask(each, decide) for each in pending])
        return len(pending)

    async def _cancel_flow(self, budget: Budget) -> None:
        if budget.scope_type is not rules.BudgetScope.FLOW:
            return
        flow_id = ids.named_flow_id(budget.scope_id, budget.namespace)
        try:
            await self.flows.cancel_flow(flow_id, reason=f"budget {budget.name} is used up")
        except NotFound:
            # Its flow was never built, or is gone.
            return

    async def _acted(self, seen: Budget) -> None:
        """Note that the breach has been acted on, unless there was another one meanwhile."""

        async def body(tx: Transaction) -> None:
            budget = await tx.lock_one(Budget, (seen.budget_id,))
            if budget is not None and budget.breach_count == seen.breach_count:
                await tx.save(Changes(updates=(structs.replace(budget, act_at_ms=None),)))

        await self.store.transact(body)


async def _given_up(
    tx: Transaction, reservations: Iterable[BudgetReservation]
) -> list[BudgetReservation]:
    """The reservations of executions that no longer wait for their amount."""
    waiting = [each for each in reservations if each.waits]
    keys = sorted({execution_key(each.execution_id) for each in waiting})
    found = await tx.get(Execution, keys)
    return [
        each
        for each in waiting
        if not rules.still_waits(found.get(execution_key(each.execution_id)))
    ]


def _next_check_ms(reservation: BudgetReservation) -> int:
    return rules.WAITING_CHECK_MS if reservation.waits else rules.RESERVATION_CHECK_MS


async def existing_executions(
    tx: Transaction, execution_ids: Iterable[ids.ExecutionId | None]
) -> set[ids.ExecutionId | None]:
    wanted = sorted({each for each in execution_ids if each is not None})
    if not wanted:
        return set()
    return set(await tx.select_as(ids.ExecutionId, "namespaces_of", **id_columns(wanted)))
