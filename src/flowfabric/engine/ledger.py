"""Requests to budgets, many at once.

The requests of a batch are decided one after the other under the locks of the budgets they
name, and written together. Concurrent reports of one process cost one transaction.

A reservation counts as long as its attempt's lease is live. The row's sum of reservations may
still hold some whose attempts have ended; nothing is refused because of those: before it
refuses, a batch looks for them and frees them.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from msgspec import Struct, structs

from flowfabric.core import budgets as rules
from flowfabric.core import ids
from flowfabric.core.budget_events import budget_events
from flowfabric.core.budgets import (
    Account,
    Amounts,
    Budget,
    BudgetReport,
    BudgetReservation,
    BudgetSpend,
    HardBreach,
    Reserved,
    SoftBreach,
    UsageAlreadyApplied,
    UsageCounted,
)
from flowfabric.core.handles import Handle
from flowfabric.core.records import Record
from flowfabric.core.transitions import NO_CHANGES, Changes
from flowfabric.engine import gates
from flowfabric.engine.shell import execution_key, id_columns
from flowfabric.engine.topics import DUE_TOPIC, EVENT_TOPIC
from flowfabric.errors import FlowFabricError, LeaseExpired, NotFound
from flowfabric.store.base import Key, Transaction

R = TypeVar("R", bound=Record)


# Requests -------------------------------------------------------------------


class Usage(Struct, frozen=True, kw_only=True, tag=True):
    """One report, for `post_to_budgets`. With a handle the reporter is known, and may be failed."""

    budget_id: str
    amounts: Amounts
    namespace: str = "default"
    dedup_key: str | None = None
    """Counted once, however often it is reported."""
    handle: Handle | bytes | None = None
    require_declared: bool = False
    """Refuse to count for a budget that was not created."""


class Spend(Struct, frozen=True, kw_only=True, tag=True):
    """Usage that `release_budget` can give back."""

    budget_id: str
    execution_id: str
    deltas: Amounts
    idempotency_key: str
    namespace: str = "default"


class Reservation(Struct, frozen=True, kw_only=True, tag=True):
    """An amount to hold for the attempt of a handle."""

    handle: Handle | bytes
    budget_id: str
    amounts: Amounts
    reservation_id: str
    """The attempt's own: asking again replaces what it holds."""
    namespace: str = "default"
    waits: bool = False
    """If there is no room, let nothing attached to the budget start before there is."""


class Settlement(Struct, frozen=True, kw_only=True, tag=True):
    """What was used in place of what was reserved."""

    budget_id: str
    reservation_id: str
    used: Amounts
    namespace: str = "default"
    handle: Handle | bytes | None = None
    """The attempt that settles. Its lease may be gone: what was used was used."""


class BudgetEntry(Struct, frozen=True, kw_only=True):
    """A checked request."""

    verb: Literal["report", "reserve", "settle"]
    budget: Budget
    """The row of a budget that was not created."""
    amounts: Amounts
    key: str | None = None
    execution_id: ids.ExecutionId | None = None
    lease_id: ids.LeaseId | None = None
    spends: bool = False
    """Whether it goes into the ledger of its execution."""
    require_declared: bool = False
    handle: Handle | None = None
    waits: bool = False

    @property
    def budget_id(self) -> ids.BudgetId:
        return self.budget.budget_id


BudgetRequest = Usage | Spend | Reservation | Settlement
BudgetOutcome = UsageCounted | SoftBreach | HardBreach | UsageAlreadyApplied | Reserved


# A batch --------------------------------------------------------------------


class Rows:
    """Rows of one table that a batch has loaded under the lock of their budgets, and changes."""

    def __init__(self) -> None:
        self.stored: dict[Key, Record] = {}
        self.current: dict[Key, Record] = {}

    async def load(self, tx: Transaction, record: type[R], keys: Sequence[Key]) -> None:
        if keys:
            found = await tx.get(record, sorted(set(keys), key=str))
            self.stored.update(found)
            self.current.update(found)

    def changes(self) -> Changes:
        new = [each for key, each in self.current.items() if key not in self.stored]
        kept = [
            each
            for key, each in self.current.items()
            if key in self.stored and each != self.stored[key]
        ]
        gone = [each for key, each in self.stored.items() if key not in self.current]
        return Changes(inserts=tuple(new), updates=tuple(kept), deletes=tuple(gone))


class Ledger:
    """The requests of a batch, decided in order in one transaction."""

    def __init__(self, entries: Sequence[BudgetEntry]) -> None:
        self._entries = entries
        self.accounts: dict[ids.BudgetId, Account] = {}
        self._before: dict[ids.BudgetId, Budget] = {}
        self._reports, self._spends, self._reservations = Rows(), Rows(), Rows()
        self._live: set[str] = set()
        self._freed: set[ids.BudgetId] = set()
        self._now_ms = 0

    async def run(self, tx: Transaction) -> list[BudgetOutcome | FlowFabricError]:
        await self._lock(tx)
        outcomes: list[BudgetOutcome | FlowFabricError] = []
        for entry in self._entries:
            try:
                outcomes.append(await self._decide(tx, entry))
            except FlowFabricError as error:
                outcomes.append(error)
        await self._save(tx)
        return outcomes

    async def _lock(self, tx: Transaction) -> None:
        budgets = await lock_or_add(tx, {each.budget_id: each.budget for each in self._entries})
        self._before = budgets
        self.accounts = {budget_id: rules.opened(each) for budget_id, each in budgets.items()}
        self._now_ms = await tx.now_ms()
        keyed = [each for each in self._entries if each.key is not None]
        reports = [report_key(each) for each in keyed]
        reports += [report_key(_by_itself(each)) for each in keyed if _is_by_holder(each)]
        await self._reports.load(tx, BudgetReport, reports)
        spending = [spend_key(each) for each in self._entries if each.spends]
        await self._spends.load(tx, BudgetSpend, spending)
        holding = [each for each in keyed if each.verb != "report"]
        await self._reservations.load(tx, BudgetReservation, [hold_key(each) for each in holding])
        reserving = [each for each in holding if each.verb == "reserve"]
        if reserving:
            found = await tx.select_as(
                ids.LeaseId,
                "live_leases",
                **id_columns([_execution(each) for each in reserving]),
                lease_ids=[str(each.lease_id) for each in reserving],
                now_ms=self._now_ms,
            )
            self._live = set(found)

    async def _decide(self, tx: Transaction, entry: BudgetEntry) -> BudgetOutcome:
        if entry.require_declared and not self.accounts[entry.budget_id].budget.declared:
            raise NotFound("budget", entry.budget.name)
        if entry.verb == "reserve" and entry.lease_id not in self._live:
            raise LeaseExpired(f"the lease of {entry.execution_id} is not live; stop working on it")
        entry = self._as_counted(entry)
        repeated = self._repeated(entry)
        if repeated is not None:
            return repeated
        posting = self._post(entry)
        # What is reserved may be held by attempts that have ended.
        refused = isinstance(posting.outcome, HardBreach) and posting.outcome.reserved > 0
        if refused and await self._free_dead(tx, entry.budget_id):
            posting = self._post(entry)
        self.accounts[entry.budget_id] = posting.account
        self._note(entry, posting.outcome)
        return posting.outcome

    def _as_counted(self, entry: BudgetEntry) -> BudgetEntry:
        """The same, under the key that it counts under."""
        if not _is_by_holder(entry):
            return entry
        report = self._reports.current.get(report_key(entry))
        key = rules.settled_under(
            str(entry.key),
            entry.lease_id,
            self._reservation_of(entry),
            report if isinstance(report, BudgetReport) else None,
        )
        return structs.replace(entry, key=key)

    def _repeated(self, entry: BudgetEntry) -> UsageAlreadyApplied | None:
        if entry.key is None:
            return None
        report = self._reports.current.get(report_key(entry))
        if not isinstance(report, BudgetReport) or rules.is_forgotten(report, self._now_ms):
            return None
        return rules.prior(report)

    def _post(
        self, entry: BudgetEntry
    ) -> rules.Posting[UsageCounted | SoftBreach | HardBreach | Reserved]:
        account = self.accounts[entry.budget_id]
        match entry.verb:
            case "report":
                return rules.report(account, entry.amounts, self._now_ms)
            case "reserve":
                held = self._held(entry)
                return rules.reserve(account, held, entry.amounts, self._now_ms, waits=entry.waits)
            case "settle":
                return rules.settle(account, self._held(entry), entry.amounts, self._now_ms)

    def _held(self, entry: BudgetEntry) -> Amounts:
        held = self._reservation_of(entry)
        return rules.NOTHING if held is None else rules.decode_amounts(held.amounts)

    def _reservation_of(self, entry: BudgetEntry) -> BudgetReservation | None:
        """What is held under the name."""
        found = self._reservations.current.get(hold_key(entry))
        return found if isinstance(found, BudgetReservation) and not found.waits else None

    def _note(self, entry: BudgetEntry, outcome: BudgetOutcome) -> None:
        """Remember what was done, for repeats and for giving back."""
        if isinstance(outcome, Reserved):
            self._reservations.current[hold_key(entry)] = _reservation(entry, self._now_ms)
            return
        if isinstance(outcome, HardBreach) and entry.waits:
            self._note_waiting(entry, outcome)
            return
        held: BudgetReservation | None = None
        if entry.verb == "settle":
            held = self._reservation_of(entry)
            self._reservations.current.pop(hold_key(entry), None)
        if isinstance(outcome, HardBreach) and held is None:
            return
        if entry.verb == "settle" and not entry.amounts:
            # Given up, not settled: the next attempt reserves again.
            return
        if entry.key is not None and not isinstance(outcome, UsageAlreadyApplied):
            if held is not None:
                entry = structs.replace(entry, execution_id=held.execution_id)
            report = _report(entry, outcome, self._now_ms)
            self._reports.current[report_key(entry)] = report
        if entry.spends:
            account = self.accounts[entry.budget_id]
            before = self._spends.current.get(spend_key(entry))
            assert before is None or isinstance(before, BudgetSpend)
            self._spends.current[spend_key(entry)] = rules.added_spend(
                before, account, entry.amounts, _blank_spend(entry, self._now_ms)
            )

    def _note_waiting(self, entry: BudgetEntry, breach: HardBreach) -> None:
        """Record the waiting attempt: its demand stops blocking others once it has ended."""
        if rules.never_fits(breach, entry.amounts) or self._reservation_of(entry) is not None:
            return
        waiting = structs.replace(
            _reservation(entry, self._now_ms),
            waits=True,
            check_at_ms=self._now_ms + rules.WAITING_CHECK_MS,
        )
        self._reservations.current[hold_key(entry)] = waiting

    async def _free_dead(self, tx: Transaction, budget_id: ids.BudgetId) -> bool:
        """Free what ended attempts hold; return whether there were any."""
        if budget_id in self._freed:
            return False
        self._freed.add(budget_id)
        dead = await tx.select_records(
            BudgetReservation, "dead_reservations", budget_ids=[budget_id], now_ms=self._now_ms
        )
        # This batch may have settled or renewed some of them.
        left = [each for each in dead if self._unchanged(each)]
        for each in left:
            key = (each.budget_id, each.reservation_id)
            self._reservations.stored[key] = each
            self._reservations.current.pop(key, None)
        self.accounts[budget_id] = rules.free(self.accounts[budget_id], left)
        return bool(left)

    def _unchanged(self, reservation: BudgetReservation) -> bool:
        key = (reservation.budget_id, reservation.reservation_id)
        if key not in self._reservations.stored:
            return True
        return self._reservations.current.get(key) == self._reservations.stored[key]

    async def _save(self, tx: Transaction) -> None:
        parts = [self._reports.changes(), self._spends.changes(), self._reservations.changes()]
        budgets = [rules.posted(each, self._now_ms) for each in self.accounts.values()]
        if any(each.act_at_ms == self._now_ms for each in budgets):
            tx.hint(DUE_TOPIC)
        besides = Changes(
            inserts=tuple(each for part in parts for each in part.inserts),
            updates=tuple(each for part in parts for each in part.updates),
            deletes=tuple(each for part in parts for each in part.deletes),
        )
        await save_budgets(tx, self._before, budgets, besides)


async def save_budgets(
    tx: Transaction,
    before: Mapping[ids.BudgetId, Budget],
    after: Sequence[Budget],
    besides: Changes = NO_CHANGES,
) -> None:
    """Save locked budgets, the gates that this closes or opens, and the events about it.

    `besides` is saved in the same statement.
    """
    now_ms = await tx.now_ms()
    turned = await gates.turned(tx, before, after)
    changed = [each for each in after if each != before[each.budget_id]]
    events = [
        event for each in changed for event in budget_events(before[each.budget_id], each, now_ms)
    ]
    if events:
        tx.hint(EVENT_TOPIC)
    updates = (*changed, *besides.updates, *turned)
    await tx.save(structs.replace(besides, updates=updates, events=tuple(events)))


async def lock_or_add(
    tx: Transaction, wanted: Mapping[ids.BudgetId, Budget]
) -> dict[ids.BudgetId, Budget]:
    """Lock budgets; those that were not created begin to count now."""
    keys: list[Key] = [(budget_id,) for budget_id in sorted(wanted)]
    locked = await tx.lock(Budget, keys)
    if len(locked) < len(keys):
        now_ms = await tx.now_ms()
        new = [
            structs.replace(wanted[budget_id], created_at_ms=now_ms, updated_at_ms=now_ms)
            for budget_id in sorted(wanted)
            if (budget_id,) not in locked
        ]
        await tx.insert_new(new)
        locked = await tx.lock(Budget, keys)
    return {each.budget_id: each for each in locked.values()}


def report_key(entry: BudgetEntry) -> Key:
    return (entry.budget_id, entry.verb != "report", str(entry.key))


def spend_key(entry: BudgetEntry) -> Key:
    return (entry.budget_id, *execution_key(_execution(entry)))


def _is_by_holder(entry: BudgetEntry) -> bool:
    """Whether it is an attempt that settles what it has reserved."""
    return entry.verb == "settle" and entry.lease_id is not None


def _by_itself(entry: BudgetEntry) -> BudgetEntry:
    """The settlement of an attempt, counted beside that of its successor."""
    assert entry.lease_id is not None
    return structs.replace(entry, key=rules.own_key(str(entry.key), entry.lease_id))


def hold_key(entry: BudgetEntry) -> Key:
    return (entry.budget_id, str(entry.key))


def _execution(entry: BudgetEntry) -> ids.ExecutionId:
    assert entry.execution_id is not None
    return entry.execution_id


def _partition(entry: BudgetEntry) -> int:
    return ids.partition_of(_execution(entry))


def _report(
    entry: BudgetEntry, outcome: UsageCounted | SoftBreach | HardBreach, now_ms: int
) -> BudgetReport:
    execution_id = entry.execution_id
    return BudgetReport(
        budget_id=entry.budget_id,
        settles=entry.verb != "report",
        dedup_key=str(entry.key),
        outcome=rules.encode_outcome(outcome),
        partition_key=0 if execution_id is None else ids.partition_of(execution_id),
        execution_id=execution_id,
        lease_id=entry.lease_id,
        applied_at_ms=now_ms,
        keep_until_ms=now_ms + rules.KEPT_MS,
    )


def _blank_spend(entry: BudgetEntry, now_ms: int) -> BudgetSpend:
    return BudgetSpend(
        budget_id=entry.budget_id,
        partition_key=_partition(entry),
        execution_id=_execution(entry),
        amounts="{}",
        period=0,
        keep_until_ms=now_ms + rules.KEPT_MS,
    )


def _reservation(entry: BudgetEntry, now_ms: int) -> BudgetReservation:
    assert entry.lease_id is not None
    return BudgetReservation(
        budget_id=entry.budget_id,
        reservation_id=str(entry.key),
        partition_key=_partition(entry),
        execution_id=_execution(entry),
        lease_id=entry.lease_id,
        amounts=rules.encode_amounts(entry.amounts),
        created_at_ms=now_ms,
        check_at_ms=now_ms + rules.RESERVATION_CHECK_MS,
    )
