"""Budgets: created, counted, reserved, given back and reset.

A budget is one row. To change it, or anything that belongs to it, lock that row.
"""

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from msgspec import Struct, structs

from flowfabric.core import budget_terms as terms
from flowfabric.core import budgets as rules
from flowfabric.core import ids
from flowfabric.core.bounds import BATCH_MAX, PAGE_MAX
from flowfabric.core.budget_events import budget_events, removal_events
from flowfabric.core.budgets import Amounts, Budget, BudgetReservation, BudgetSpend, HardBreach
from flowfabric.core.checks import check_bool, check_int, check_list, check_text, optional
from flowfabric.core.handles import Handle
from flowfabric.core.states import FailureClass
from flowfabric.core.transitions import Changes
from flowfabric.engine import gates, paging
from flowfabric.engine.executions import Executions, FailureReport
from flowfabric.engine.ledger import (
    BudgetEntry,
    BudgetOutcome,
    BudgetRequest,
    Ledger,
    Reservation,
    Settlement,
    Spend,
    Usage,
    save_budgets,
)
from flowfabric.engine.shell import Group, Shell, execution_key, value_or_error
from flowfabric.engine.topics import EVENT_TOPIC, hint_if_soon
from flowfabric.errors import BudgetExists, Conflict, FlowFabricError, InvalidInput, NotFound
from flowfabric.store.base import Reader, Transaction

BUDGET_EXCEEDED: Final = "budget_exceeded"
"""The category of failures that budgets cause."""


class BudgetCreated(Struct, frozen=True, kw_only=True):
    budget: Budget
    change: Literal["created", "already_satisfied"]
    differs: bool = False
    """It exists already, under other terms, and keeps them."""


class BudgetStatus(Struct, frozen=True, kw_only=True):
    """A budget as people see it, amounts by dimension."""

    budget_id: str
    namespace: str
    name: str
    declared: bool
    scope_type: str
    scope_id: str
    enforcement_mode: str
    on_hard_limit: str
    on_soft_limit: str
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
    next_cursor: tuple[str, str] | None


_SHOWN: Final = tuple(
    field.name
    for field in structs.fields(BudgetStatus)
    if field.name not in ("usage", "reserved", "hard_limits", "soft_limits")
)


# Operations -----------------------------------------------------------------


class Budgets(Group):
    def __init__(self, shell: Shell, executions: Executions) -> None:
        super().__init__(shell)
        self.executions = executions

    async def create_budget(
        self, definition: terms.BudgetDefinition, *, if_exists: str = "keep"
    ) -> BudgetCreated:
        """Create a budget. An existing one stays; `if_exists="error"` refuses one that differs.

        Usage reported before the creation counts.
        """
        if if_exists not in ("keep", "error"):
            raise InvalidInput("if_exists", "must be keep or error", if_exists)
        terms.check_definition(definition, 0)

        async def body(tx: Transaction) -> BudgetCreated:
            budget_id = terms.check_definition(definition, 0).budget_id
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
                rules.BudgetReservation, "reservations_of_budget", budget_id=budget.budget_id
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
            found = await reader.get(Budget, [(wanted.budget_id,)])
            if not found:
                raise NotFound("budget", budget_id)
            (status,) = await read_statuses(reader, list(found.values()))
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
        cursor: tuple[str, str] | None = None,
        limit: int = 100,
    ) -> BudgetPage:
        """Budgets by namespace and name, after `cursor`."""
        check_int("limit", limit, 0, PAGE_MAX)
        wanted = optional(ids.parse_namespace, namespace)
        after_namespace, after_name = paging.check_pair(cursor)

        async def body(reader: Reader) -> list[BudgetStatus]:
            found = await reader.select_records(
                Budget,
                "list_budgets",
                after_namespace=after_namespace,
                after_name=after_name,
                namespace=wanted,
                limit=limit + 1,
            )
            return await read_statuses(reader, found)

        page, last = paging.cut(
            await self.store.read(body), limit, lambda budget: (str(budget.namespace), budget.name)
        )
        return BudgetPage(budgets=page, next_cursor=last)

    # Counting

    async def post_to_budgets(
        self, requests: Sequence[BudgetRequest]
    ) -> list[BudgetOutcome | FlowFabricError]:
        """Report, spend, reserve and settle, many at once; each gets its own answer or error.

        Where a budget says so, an execution whose request is refused is failed.
        """
        check_list("requests", requests, 0, BATCH_MAX)
        checked = [value_or_error(self._entry, each) for each in requests]
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
        """Fail executions for good that budgets want failed.

        Apart from what was refused, since executions are locked before budgets. If this does
        not happen, the execution is still running and is refused again.
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
        asked = Usage(
            budget_id=budget_id,
            amounts=terms.check_usage(usage),
            namespace=namespace,
            dedup_key=usage.dedup_key,
            handle=self.shell.verify_handle(handle),
            require_declared=require_declared,
        )
        return usage_answer(await self.post_to_budgets([asked]))

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
        asked = Usage(
            budget_id=budget_id,
            amounts=terms.check_deltas("report_usage_admin", dimensions, deltas),
            namespace=namespace,
            dedup_key=dedup_key,
            require_declared=require_declared,
        )
        return usage_answer(await self.post_to_budgets([asked]))

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
        asked = Spend(
            budget_id=budget_id,
            execution_id=execution_id,
            deltas=deltas,
            idempotency_key=idempotency_key,
            namespace=namespace,
        )
        return usage_answer(await self.post_to_budgets([asked]))

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
        asked = Reservation(
            handle=handle,
            budget_id=budget_id,
            amounts=amounts,
            reservation_id=reservation_id,
            namespace=namespace,
            waits=waits,
        )
        return reserve_answer(await self.post_to_budgets([asked]))

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
        asked = Settlement(
            budget_id=budget_id,
            reservation_id=reservation_id,
            used=used,
            namespace=namespace,
            handle=handle,
        )
        return usage_answer(await self.post_to_budgets([asked]))

    def _entry(self, request: object) -> BudgetEntry:
        """A request, checked."""
        match request:
            case Usage():
                handle = (
                    None if request.handle is None else self.shell.verify_handle(request.handle)
                )
                return BudgetEntry(
                    verb="report",
                    budget=blank_budget(request.budget_id, request.namespace),
                    amounts=terms.check_amounts("amounts", request.amounts),
                    key=terms.check_dedup_key("dedup_key", request.dedup_key),
                    execution_id=None if handle is None else handle.execution_id,
                    require_declared=check_bool("require_declared", request.require_declared),
                    handle=handle,
                )
            case Spend():
                key = terms.check_dedup_key("idempotency_key", request.idempotency_key)
                if key is None:
                    raise InvalidInput("idempotency_key", "must not be empty")
                return BudgetEntry(
                    verb="report",
                    budget=blank_budget(request.budget_id, request.namespace),
                    amounts=terms.check_amounts("deltas", request.deltas),
                    key=key,
                    execution_id=self.shell.check_execution_id(request.execution_id),
                    spends=True,
                )
            case Reservation():
                handle = self.shell.open_handle(request.handle)
                return BudgetEntry(
                    verb="reserve",
                    budget=blank_budget(request.budget_id, request.namespace),
                    amounts=terms.check_amounts("amounts", request.amounts),
                    key=_check_reservation_id(request.reservation_id),
                    execution_id=handle.execution_id,
                    lease_id=handle.lease_id,
                    handle=None if request.waits else handle,
                    waits=check_bool("waits", request.waits),
                )
            case Settlement():
                handle = (
                    None if request.handle is None else self.shell.verify_handle(request.handle)
                )
                return BudgetEntry(
                    verb="settle",
                    budget=blank_budget(request.budget_id, request.namespace),
                    amounts=terms.check_amounts("used", request.used),
                    key=_check_reservation_id(request.reservation_id),
                    execution_id=None if handle is None else handle.execution_id,
                    lease_id=None if handle is None else handle.lease_id,
                    handle=handle,
                )
            case _:
                raise InvalidInput(
                    "requests", "must be Usage, Spend, Reservation or Settlement", request
                )

    # Time

    async def reset_budget(self, budget_id: str, *, namespace: str = "default") -> BudgetReset:
        """Start a new period now. The schedule of resets stays as it is."""
        wanted = blank_budget(budget_id, namespace)

        async def body(tx: Transaction) -> BudgetReset:
            before = await lock_budget(tx, wanted)
            (after,) = await reset_in(tx, [before])
            return BudgetReset(next_reset_at_ms=after.next_reset_at_ms or 0)

        return await self.store.transact(body)


def blank_budget(budget_id: object, namespace: object) -> Budget:
    """A budget to which usage is reported before it is created."""
    known = ids.parse_namespace(namespace)
    parsed = ids.named_budget_id(budget_id, known)
    return Budget(
        budget_id=parsed,
        namespace=known,
        name=str(budget_id),
        declared=False,
        created_at_ms=0,
        updated_at_ms=0,
    )


async def lock_budget(tx: Transaction, wanted: Budget) -> Budget:
    budget = await tx.lock_one(Budget, (wanted.budget_id,))
    if budget is None:
        raise NotFound("budget", wanted.name)
    return budget


async def reset_in(tx: Transaction, budgets: Sequence[Budget]) -> list[Budget]:
    """Budgets that are locked, in their next periods."""
    now_ms = await tx.now_ms()
    after = [rules.posted(rules.reset(rules.opened(each), now_ms), now_ms) for each in budgets]
    await save_budgets(tx, {each.budget_id: each for each in budgets}, after)
    for each in after:
        hint_if_soon(tx, each.next_reset_at_ms, now_ms)
    return after


def freed_accounts(
    budgets: Iterable[Budget], dead: Sequence[BudgetReservation]
) -> list[rules.Account]:
    """The accounts of budgets without the reservations of theirs that are dead."""
    return [
        rules.free(
            rules.opened(budget), [each for each in dead if each.budget_id == budget.budget_id]
        )
        for budget in budgets
    ]


async def read_statuses(reader: Reader, budgets: Sequence[Budget]) -> list[BudgetStatus]:
    """Budgets as callers see them, without what ended attempts still seem to hold."""
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
    fields = {name: getattr(account.budget, name) for name in _SHOWN}
    return BudgetStatus(
        **fields,
        usage=dict(account.usage),
        reserved={name: n for name, n in account.reserved.items() if n},
        hard_limits=dict(account.hard),
        soft_limits=dict(account.soft),
    )


def usage_answer(outcomes: Sequence[BudgetOutcome | FlowFabricError]) -> rules.UsageOutcome:
    """The answer to a single request; a refusal is raised."""
    (outcome,) = outcomes
    if isinstance(outcome, FlowFabricError):
        raise outcome
    assert not isinstance(outcome, rules.Reserved)
    return outcome


def reserve_answer(outcomes: Sequence[BudgetOutcome | FlowFabricError]) -> rules.ReserveOutcome:
    (outcome,) = outcomes
    if isinstance(outcome, FlowFabricError):
        raise outcome
    assert not isinstance(outcome, rules.UsageCounted | rules.SoftBreach)
    return outcome


def _check_reservation_id(value: object) -> str:
    return check_text("reservation_id", value, bytes_max=terms.DEDUP_KEY_BYTES_MAX, empty=False)
