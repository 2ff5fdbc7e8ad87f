"""Budgets: created, counted, reserved, given back and reset; and what reconcilers do for them.

A budget is one row. To change it, or anything that belongs to it, lock that row.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, Literal

from msgspec import Struct, structs

from flowfabric.core import budget_terms as terms
from flowfabric.core import budgets as rules
from flowfabric.core import ids
from flowfabric.core.bounds import BATCH_MAX, CANCEL_BATCH, PAGE_MAX, SWEEP_BATCH
from flowfabric.core.budget_events import budget_events, removal_events
from flowfabric.core.budgets import (
    Amounts,
    Budget,
    BudgetReport,
    BudgetReservation,
    BudgetSpend,
    HardBreach,
)
from flowfabric.core.checks import check_int, check_list, optional
from flowfabric.core.decisions import Changes, Decision, Subject, Timing
from flowfabric.core.executions import decide_cancel_waiting
from flowfabric.core.handles import Handle
from flowfabric.core.records import Execution, view_of
from flowfabric.core.results import Cancelled
from flowfabric.core.states import FailureClass
from flowfabric.engine import gates, paging
from flowfabric.engine.executions import Executions, FailureReport
from flowfabric.engine.flow_operators import FlowOperators
from flowfabric.engine.ledger import (
    BudgetEntry,
    BudgetOutcome,
    BudgetRequest,
    Ledger,
    Reservation,
    Settlement,
    Spend,
    Usage,
    blank_budget,
    check_request,
    save_budgets,
)
from flowfabric.engine.shell import (
    Ask,
    Group,
    Shell,
    Swept,
    execution_key,
    id_columns,
    value_or_error,
)
from flowfabric.engine.topics import EVENT_TOPIC, hint_if_soon
from flowfabric.errors import BudgetExists, Conflict, FlowFabricError, InvalidInput, NotFound
from flowfabric.store.base import Reader, Transaction
from flowfabric.store.mapping import key_of

BUDGET_EXCEEDED: Final = "budget_exceeded"
"""The category of failures that budgets cause."""
BUDGETS_SWEEP: Final = 100
"""Budgets one sweep resets."""


class BudgetCreated(Struct, frozen=True, kw_only=True):
    budget: Budget
    change: Literal["created", "already_satisfied"]
    differs: bool = False
    """Whether it existed already, under other terms, which it keeps."""


class BudgetStatus(Struct, frozen=True, kw_only=True):
    """A budget as people see it, amounts by dimension."""

    budget_id: str
    namespace: str
    name: str
    declared: bool
    scope_type: rules.BudgetScope
    scope_id: str
    enforcement_mode: rules.EnforcementMode
    on_hard_limit: rules.OnHardLimit
    on_soft_limit: rules.OnSoftLimit
    usage: dict[str, int]
    reserved: dict[str, int]
    """Held by running attempts."""
    hard_limits: dict[str, int]
    soft_limits: dict[str, int]
    closed: bool
    breach_count: int
    soft_breach_count: int
    last_breach_at_ms: int | None
    last_breach_dim: str | None
    reset_interval_ms: int
    reset_count: int
    last_reset_at_ms: int | None
    next_reset_at_ms: int | None
    created_at_ms: int
    updated_at_ms: int


class UsageAndLimits(Struct, frozen=True, kw_only=True):
    usage: dict[str, int]
    hard_limits: dict[str, int]
    soft_limits: dict[str, int]


class BudgetReset(Struct, frozen=True, kw_only=True):
    next_reset_at_ms: int
    """0: only on request."""


class BudgetPage(Struct, frozen=True, kw_only=True):
    budgets: tuple[BudgetStatus, ...]
    next_cursor: str | None


# Operations -----------------------------------------------------------------


class Budgets(Group):
    def __init__(self, shell: Shell, executions: Executions, flows: FlowOperators) -> None:
        super().__init__(shell)
        self.executions = executions
        self.flows = flows

    async def create_budget(
        self, definition: terms.BudgetDefinition, *, if_exists: str = "keep"
    ) -> BudgetCreated:
        """Create a budget. An existing one stays; `if_exists="error"` refuses one that differs.

        Usage reported before the creation counts.
        """
        if if_exists not in ("keep", "error"):
            raise InvalidInput("if_exists", "must be keep or error", if_exists)
        budget_id = terms.check_definition(definition, 0).budget_id

        async def body(tx: Transaction) -> BudgetCreated:
            existing = await tx.lock_one(Budget, (budget_id,))
            now_ms = await tx.now_ms()
            wanted = terms.check_definition(definition, now_ms)
            if existing is None:
                if (budget_id,) not in await tx.insert_new([wanted]):
                    # Another process has just created it; from here on it can be locked.
                    return await body(tx)
                await tx.save(Changes(events=budget_events(None, wanted, now_ms)))
                tx.hint(EVENT_TOPIC)
            elif existing.declared:
                differs = terms.differs(existing, wanted)
                if differs and if_exists == "error":
                    raise BudgetExists(
                        f"budget {existing.name} exists already, under other terms; change them"
                        f" with app.budgets.change or flowfabric budgets set {existing.name}"
                    )
                return BudgetCreated(budget=existing, change="already_satisfied", differs=differs)
            else:
                account = rules.opened(terms.defined(existing, wanted))
                wanted = rules.posted(account, now_ms)
                await save_budgets(tx, {existing.budget_id: existing}, [wanted])
            if wanted.scope_type in rules.ATTACHING:
                await gates.attach_budget(tx, wanted)
            hint_if_soon(tx, wanted.next_reset_at_ms, now_ms)
            return BudgetCreated(budget=wanted, change="created")

        return await self.store.transact(body)

    async def update_budget(
        self, budget_id: str, update: terms.BudgetUpdate, *, namespace: str = "default"
    ) -> BudgetStatus:
        """Change limits, enforcement or interval. What was counted stays."""

        async def body(tx: Transaction) -> BudgetStatus:
            before = await lock_budget(tx, wanted)
            now_ms = await tx.now_ms()
            account = terms.updated(rules.opened(before), update, now_ms)
            after = rules.posted(account, now_ms)
            if after != before:
                await save_budgets(tx, {before.budget_id: before}, [after])
                hint_if_soon(tx, after.next_reset_at_ms, now_ms)
            return status_of(rules.opened(after))

        wanted = blank_budget(budget_id, namespace)
        return await self.store.transact(body)

    async def remove_budget(self, budget_id: str, *, namespace: str = "default") -> BudgetStatus:
        """Forget a budget and what it has counted; return what it was.

        Runs attached to it are limited by nothing from then on, and what is reported to it counts
        for a new one. Raises `Conflict` while running attempts hold amounts of it.
        """
        wanted = blank_budget(budget_id, namespace)

        async def body(tx: Transaction) -> BudgetStatus:
            budget = await lock_budget(tx, wanted)
            held = await tx.select_records(
                BudgetReservation, "reservations_of_budget", budget_id=budget.budget_id
            )
            if held:
                does = "wait for" if all(each.waits for each in held) else "hold"
                raise Conflict(
                    f"attempts {does} amounts of budget {budget.name!r}: remove it when they have"
                    " ended, or cancel them; without limits, it lets those go on that wait"
                )
            now_ms = await tx.now_ms()
            opened = await gates.turned(
                tx, {budget.budget_id: budget}, [structs.replace(budget, closed=False)]
            )
            await tx.select("forget_budget_reports", budget_id=budget.budget_id)
            await tx.select("forget_budget_spends", budget_id=budget.budget_id)
            events = removal_events(budget, now_ms)
            await tx.save(Changes(updates=tuple(opened), deletes=(budget,), events=events))
            tx.hint(EVENT_TOPIC)
            return status_of(rules.opened(budget))

        return await self.store.transact(body)

    async def get_budget_status(
        self, budget_id: str, *, namespace: str = "default"
    ) -> BudgetStatus:
        """The budget with what was counted, and what attempts under way hold."""
        wanted = blank_budget(budget_id, namespace)

        async def body(reader: Reader) -> BudgetStatus:
            budget = await reader.get_one(Budget, (wanted.budget_id,))
            if budget is None:
                raise NotFound("budget", budget_id)
            (status,) = await read_statuses(reader, [budget])
            return status

        return await self.store.read(body)

    async def read_budget_usage_and_limits(
        self, budget_id: str, *, namespace: str = "default"
    ) -> UsageAndLimits:
        status = await self.get_budget_status(budget_id, namespace=namespace)
        return UsageAndLimits(
            usage=status.usage, hard_limits=status.hard_limits, soft_limits=status.soft_limits
        )

    async def list_budgets(
        self,
        *,
        namespace: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> BudgetPage:
        """Budgets by namespace and name, after `cursor`."""
        check_int("limit", limit, 0, PAGE_MAX)
        owner = optional(ids.parse_namespace, namespace)
        after = paging.by_name(cursor)

        async def body(reader: Reader) -> list[BudgetStatus]:
            budgets = await reader.select_records(
                Budget, "list_budgets", namespace=owner, limit=limit + 1, **after
            )
            return await read_statuses(reader, budgets)

        found = await self.store.read(body)
        page, last = paging.cut_by_name(found, limit, lambda each: each.name)
        return BudgetPage(budgets=page, next_cursor=last)

    # Counting

    async def post_to_budgets(
        self, requests: Sequence[BudgetRequest]
    ) -> list[BudgetOutcome | FlowFabricError]:
        """Report, spend, reserve and settle, many at once; each gets its own answer or error.

        Where a budget says so, an execution whose request is refused is failed.
        """
        check_list("requests", requests, 0, BATCH_MAX)
        check = partial(check_request, self.shell)
        checked = [value_or_error(check, each) for each in requests]
        entries = [each for each in checked if isinstance(each, BudgetEntry)]
        if not entries:
            return [each for each in checked if isinstance(each, FlowFabricError)]

        async def body(tx: Transaction) -> tuple[list[BudgetOutcome | FlowFabricError], Ledger]:
            ledger = Ledger(entries)
            return await ledger.run(tx), ledger

        outcomes, ledger = await self.store.transact(body)
        await self._fail_refused(entries, outcomes, ledger)
        left = iter(outcomes)
        return [each if isinstance(each, FlowFabricError) else next(left) for each in checked]

    async def _fail_refused(
        self,
        entries: Sequence[BudgetEntry],
        outcomes: Sequence[BudgetOutcome | FlowFabricError],
        ledger: Ledger,
    ) -> None:
        """Fail for good the executions whose refusal a budget answers with failure.

        Uses a separate transaction, because executions are locked before budgets. If that fails,
        the execution is still running and is refused again.
        """
        failures = [
            FailureReport(
                handle=entry.handle,
                reason=rules.describe_breach(entry.budget.name, outcome, entry.amounts),
                failure_class=FailureClass.PERMANENT,
                category=BUDGET_EXCEEDED,
            )
            for entry, outcome in zip(entries, outcomes, strict=True)
            if isinstance(outcome, HardBreach)
            and entry.handle is not None
            and rules.fails(ledger.accounts[entry.budget_id].budget)
        ]
        if failures:
            await self.executions.fail_many(failures)

    async def report_usage(
        self,
        handle: Handle | bytes,
        budget_id: str,
        usage: terms.UsageDimensions,
        *,
        namespace: str = "default",
        require_declared: bool = False,
    ) -> rules.UsageOutcome:
        """Count what a worker has used. Its lease may be gone: what was used was used."""
        report = Usage(
            budget_id=budget_id,
            amounts=terms.check_usage(usage),
            namespace=namespace,
            dedup_key=usage.dedup_key,
            handle=self.shell.verify_handle(handle),
            require_declared=require_declared,
        )
        return usage_answer(await self.post_to_budgets([report]))

    async def report_usage_admin(
        self,
        budget_id: str,
        dimensions: Sequence[str],
        deltas: Sequence[int],
        *,
        dedup_key: str | None = None,
        namespace: str = "default",
        require_declared: bool = False,
    ) -> rules.UsageOutcome:
        """Count usage that no execution reports."""
        report = Usage(
            budget_id=budget_id,
            amounts=terms.check_deltas("report_usage_admin", dimensions, deltas),
            namespace=namespace,
            dedup_key=dedup_key,
            require_declared=require_declared,
        )
        return usage_answer(await self.post_to_budgets([report]))

    async def record_spend(
        self,
        budget_id: str,
        execution_id: str,
        deltas: Amounts,
        *,
        idempotency_key: str,
        namespace: str = "default",
    ) -> rules.UsageOutcome:
        """Count usage that `release_budget` can give back. The execution need not exist."""
        spend = Spend(
            budget_id=budget_id,
            execution_id=execution_id,
            deltas=deltas,
            idempotency_key=idempotency_key,
            namespace=namespace,
        )
        return usage_answer(await self.post_to_budgets([spend]))

    async def release_budget(
        self, budget_id: str, execution_id: str, *, namespace: str = "default"
    ) -> None:
        """Give back what an execution has spent since the last reset. Safe to repeat."""
        wanted = blank_budget(budget_id, namespace)
        key = (wanted.budget_id, *execution_key(self.shell.check_execution_id(execution_id)))

        async def body(tx: Transaction) -> None:
            before = await tx.lock_one(Budget, (wanted.budget_id,))
            spend = None if before is None else await tx.get_one(BudgetSpend, key)
            if before is None or spend is None:
                return
            account = rules.give_back(rules.opened(before), spend)
            after = rules.posted(account, await tx.now_ms())
            await save_budgets(tx, {before.budget_id: before}, [after], Changes(deletes=(spend,)))

        await self.store.transact(body)

    # Reserving

    async def reserve_budget(
        self,
        handle: Handle | bytes,
        budget_id: str,
        amounts: Amounts,
        *,
        reservation_id: str,
        namespace: str = "default",
        waits: bool = False,
    ) -> rules.ReserveOutcome:
        """Hold an amount for the attempt of `handle`, until it settles or its lease ends.

        Asking again under the same id replaces what is held. With `waits`, a refusal is no
        breach: nothing attached to the budget starts before there is room for this.
        """
        reservation = Reservation(
            handle=handle,
            budget_id=budget_id,
            amounts=amounts,
            reservation_id=reservation_id,
            namespace=namespace,
            waits=waits,
        )
        outcome = _only(await self.post_to_budgets([reservation]))
        assert not isinstance(outcome, rules.UsageCounted | rules.SoftBreach)
        return outcome

    async def settle_reservation(
        self,
        budget_id: str,
        reservation_id: str,
        used: Amounts,
        *,
        namespace: str = "default",
        handle: Handle | bytes | None = None,
    ) -> rules.UsageOutcome:
        """Count what was used, and free the rest of what was reserved. Safe to repeat.

        Using nothing gives up the reservation. Usage beyond it is counted if there is room.
        """
        settlement = Settlement(
            budget_id=budget_id,
            reservation_id=reservation_id,
            used=used,
            namespace=namespace,
            handle=handle,
        )
        return usage_answer(await self.post_to_budgets([settlement]))

    # Time

    async def reset_budget(self, budget_id: str, *, namespace: str = "default") -> BudgetReset:
        """Start a new period now. The schedule of resets stays as it is."""
        wanted = blank_budget(budget_id, namespace)

        async def body(tx: Transaction) -> BudgetReset:
            before = await lock_budget(tx, wanted)
            (after,) = await reset_in(tx, [before])
            return BudgetReset(next_reset_at_ms=after.next_reset_at_ms or 0)

        return await self.store.transact(body)

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
        """Free reservations whose attempts have ended or no longer wait; check others later."""
        check_int("limit", limit, 1, BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            now_ms = await tx.now_ms()
            seen = await tx.select_records(
                BudgetReservation, "due_reservations", now_ms=now_ms, limit=limit
            )
            locked = await tx.lock(Budget, sorted({(each.budget_id,) for each in seen}))
            # Under the locks: some may have been settled meanwhile.
            due = await tx.get(BudgetReservation, [key_of(each) for each in seen])
            dead = await tx.select_records(
                BudgetReservation,
                "dead_reservations",
                budget_ids=[str(key[0]) for key in locked],
                now_ms=now_ms,
            )
            dead = [*dead, *await _given_up(tx, due.values())]
            freed = [rules.posted(each, now_ms) for each in freed_accounts(locked.values(), dead)]
            gone = {key_of(each) for each in dead}
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
            return Swept(acted=len(seen), full=len(seen) == limit)

        return await self.store.transact(body)

    async def trim_budgets(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Forget old keys and spends, unless their executions exist."""
        check_int("limit", limit, 1, BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            now_ms = await tx.now_ms()
            reports = await tx.select_records(
                BudgetReport, "due_budget_reports", now_ms=now_ms, limit=limit
            )
            spends = await tx.select_records(
                BudgetSpend, "due_budget_spends", now_ms=now_ms, limit=limit
            )
            seen: list[BudgetReport | BudgetSpend] = [*reports, *spends]
            await tx.lock(Budget, sorted({(each.budget_id,) for each in seen}))
            # Under the locks: some may have been used again meanwhile.
            current: list[BudgetReport | BudgetSpend] = [
                *(await tx.get(BudgetReport, [key_of(each) for each in reports])).values(),
                *(await tx.get(BudgetSpend, [key_of(each) for each in spends])).values(),
            ]
            due = [each for each in current if each.keep_until_ms <= now_ms]
            existing = await _existing_executions(tx, [each.execution_id for each in due])
            kept = [each for each in due if each.execution_id in existing]
            keep_ms = now_ms + rules.KEPT_MS
            await tx.save(
                Changes(
                    updates=tuple(structs.replace(each, keep_until_ms=keep_ms) for each in kept),
                    deletes=tuple(each for each in due if each.execution_id not in existing),
                )
            )
            return Swept(acted=len(seen), full=limit in (len(reports), len(spends)))

        return await self.store.transact(body)

    async def act_on_breaches(self, *, limit: int = CANCEL_BATCH) -> Swept:
        """Cancel up to `limit` executions of breached budgets that are configured to cancel."""
        check_int("limit", limit, 1, BATCH_MAX)

        async def body(reader: Reader) -> Sequence[Budget]:
            now_ms = await reader.now_ms()
            return await reader.select_records(Budget, "due_budget_actions", now_ms=now_ms, limit=1)

        due = await self.store.read(body)
        for budget in due:
            if budget.on_hard_limit is rules.OnHardLimit.CANCEL_PENDING:
                cancelled = await self._cancel_pending(budget, limit)
                if cancelled:
                    return Swept(acted=cancelled, full=True)
            elif budget.on_hard_limit is rules.OnHardLimit.CANCEL_FLOW:
                await self._cancel_flow(budget)
            await self._mark_acted(budget)
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
            # The flow never existed, or was deleted.
            return

    async def _mark_acted(self, seen: Budget) -> None:
        """Note that the breach has been acted on, unless there was another one meanwhile."""

        async def body(tx: Transaction) -> None:
            budget = await tx.lock_one(Budget, (seen.budget_id,))
            if budget is not None and budget.breach_count == seen.breach_count:
                await tx.save(Changes(updates=(structs.replace(budget, act_at_ms=None),)))

        await self.store.transact(body)


async def lock_budget(tx: Transaction, wanted: Budget) -> Budget:
    budget = await tx.lock_one(Budget, (wanted.budget_id,))
    if budget is None:
        raise NotFound("budget", wanted.name)
    return budget


async def reset_in(tx: Transaction, budgets: Sequence[Budget]) -> list[Budget]:
    """Start new periods of locked budgets."""
    now_ms = await tx.now_ms()
    after = [rules.posted(rules.reset(rules.opened(each), now_ms), now_ms) for each in budgets]
    await save_budgets(tx, {each.budget_id: each for each in budgets}, after)
    for each in after:
        hint_if_soon(tx, each.next_reset_at_ms, now_ms)
    return after


def freed_accounts(
    budgets: Iterable[Budget], dead: Sequence[BudgetReservation]
) -> list[rules.Account]:
    """The accounts of budgets without their dead reservations."""
    return [
        rules.free(
            rules.opened(budget), [each for each in dead if each.budget_id == budget.budget_id]
        )
        for budget in budgets
    ]


async def read_statuses(reader: Reader, budgets: Sequence[Budget]) -> list[BudgetStatus]:
    """Budgets as callers see them, without the reservations of ended attempts."""
    holding = [str(each.budget_id) for each in budgets if each.reserved != "{}"]
    dead: Sequence[BudgetReservation] = ()
    if holding:
        dead = await reader.select_records(
            BudgetReservation,
            "dead_reservations",
            budget_ids=holding,
            now_ms=await reader.now_ms(),
        )
    return [status_of(account) for account in freed_accounts(budgets, dead)]


def status_of(account: rules.Account) -> BudgetStatus:
    return view_of(
        BudgetStatus,
        account.budget,
        usage=dict(account.usage),
        reserved={name: n for name, n in account.reserved.items() if n},
        hard_limits=dict(account.hard),
        soft_limits=dict(account.soft),
    )


def usage_answer(outcomes: Sequence[BudgetOutcome | FlowFabricError]) -> rules.UsageOutcome:
    """The answer to a single report; a refusal is raised."""
    outcome = _only(outcomes)
    assert not isinstance(outcome, rules.Reserved)
    return outcome


def _only(outcomes: Sequence[BudgetOutcome | FlowFabricError]) -> BudgetOutcome:
    (outcome,) = outcomes
    if isinstance(outcome, FlowFabricError):
        raise outcome
    return outcome


async def _given_up(
    tx: Transaction, reservations: Iterable[BudgetReservation]
) -> list[BudgetReservation]:
    """The reservations of executions that no longer wait for their amount."""
    waiting = {each: execution_key(each.execution_id) for each in reservations if each.waits}
    executions = await tx.get(Execution, sorted(set(waiting.values())))
    return [each for each, key in waiting.items() if not rules.still_waits(executions.get(key))]


def _next_check_ms(reservation: BudgetReservation) -> int:
    return rules.WAITING_CHECK_MS if reservation.waits else rules.RESERVATION_CHECK_MS


async def _existing_executions(
    tx: Transaction, execution_ids: Iterable[ids.ExecutionId | None]
) -> set[ids.ExecutionId | None]:
    wanted = sorted({each for each in execution_ids if each is not None})
    if not wanted:
        return set()
    return set(await tx.select_as(ids.ExecutionId, "namespaces_of", **id_columns(wanted)))
