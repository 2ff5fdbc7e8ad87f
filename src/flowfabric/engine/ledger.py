"""Requests to budgets, many at once.

The requests of a batch are decided one after the other under the locks of the budgets they
name, and written together. Concurrent reports of one process cost one transaction.

A reservation counts as long as its attempt's lease is live. A budget's sum of reservations may
still include some whose attempts have ended; they refuse nothing: before a batch refuses a request,
it looks for them and frees them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, Literal, TypeVar

from msgspec import Struct, structs

from flowfabric.core import budget_terms as terms
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
from flowfabric.core.checks import check_bool, check_text
from flowfabric.core.decisions import NO_CHANGES, Changes, combine
from flowfabric.core.handles import Handle
from flowfabric.core.records import Record
from flowfabric.engine import gates
from flowfabric.engine.shell import Shell, execution_key, id_columns
from flowfabric.engine.topics import DUE_TOPIC, EVENT_TOPIC
from flowfabric.errors import FlowFabricError, InvalidInput, LeaseExpired, NotFound
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
    """Usage in place of what was reserved."""

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

    @property
    def execution(self) -> ids.ExecutionId:
        """The execution of a request that needs one."""
        assert self.execution_id is not None
        return self.execution_id

    @property
    def lease(self) -> ids.LeaseId:
        """The lease of an attempt that reserves or settles."""
        assert self.lease_id is not None
        return self.lease_id

    @property
    def is_by_holder(self) -> bool:
        """Whether an attempt settles what it has reserved."""
        return self.verb == "settle" and self.lease_id is not None

    @property
    def report_key(self) -> Key:
        return (self.budget_id, self.verb != "report", str(self.key))

    @property
    def spend_key(self) -> Key:
        return (self.budget_id, *execution_key(self.execution))

    @property
    def hold_key(self) -> Key:
        return (self.budget_id, str(self.key))


BudgetRequest = Usage | Spend | Reservation | Settlement
BudgetOutcome = UsageCounted | SoftBreach | HardBreach | UsageAlreadyApplied | Reserved


def check_request(shell: Shell, request: object) -> BudgetEntry:
    match request:
        case Usage():
            handle = None if request.handle is None else shell.verify_handle(request.handle)
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
                execution_id=shell.check_execution_id(request.execution_id),
                spends=True,
            )
        case Reservation():
            handle = shell.open_handle(request.handle)
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
            handle = None if request.handle is None else shell.verify_handle(request.handle)
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
            problem = "must be Usage, Spend, Reservation or Settlement"
            raise InvalidInput("requests", problem, request)


def blank_budget(budget_id: object, namespace: object) -> Budget:
    """A budget to which usage is reported before it is created."""
    owner = ids.parse_namespace(namespace)
    return Budget(
        budget_id=ids.named_budget_id(budget_id, owner),
        namespace=owner,
        name=str(budget_id),
        declared=False,
        created_at_ms=0,
        updated_at_ms=0,
    )


def _check_reservation_id(value: object) -> str:
    return check_text("reservation_id", value, bytes_max=terms.DEDUP_KEY_BYTES_MAX, empty=False)


# A batch --------------------------------------------------------------------


class Rows(Generic[R]):
    """Rows of one table that a batch has loaded under the lock of their budgets, and changes."""

    def __init__(self, record: type[R]) -> None:
        self._record = record
        self.stored: dict[Key, R] = {}
        self.current: dict[Key, R] = {}

    async def load(self, tx: Transaction, keys: Iterable[Key]) -> None:
        wanted = sorted(set(keys), key=str)
        if wanted:
            self.stored = await tx.get(self._record, wanted)
            self.current = dict(self.stored)

    def changes(self) -> Changes:
        stored, current = self.stored, self.current
        return Changes(
            inserts=tuple(each for key, each in current.items() if key not in stored),
            updates=tuple(
                each for key, each in current.items() if key in stored and each != stored[key]
            ),
            deletes=tuple(each for key, each in stored.items() if key not in current),
        )


class Ledger:
    """The requests of a batch, decided in order in one transaction."""

    def __init__(self, entries: Sequence[BudgetEntry]) -> None:
        self._entries = entries
        self.accounts: dict[ids.BudgetId, Account] = {}
        self._before: dict[ids.BudgetId, Budget] = {}
        self._reports = Rows(BudgetReport)
        self._spends = Rows(BudgetSpend)
        self._reservations = Rows(BudgetReservation)
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
        budgets = await _lock_or_add(tx, {each.budget_id: each.budget for each in self._entries})
        self._before = budgets
        self.accounts = {budget_id: rules.opened(each) for budget_id, each in budgets.items()}
        self._now_ms = await tx.now_ms()
        keyed = [each for each in self._entries if each.key is not None]
        beside = [_beside_successor(each) for each in keyed if each.is_by_holder]
        await self._reports.load(tx, [each.report_key for each in (*keyed, *beside)])
        await self._spends.load(tx, [each.spend_key for each in self._entries if each.spends])
        holding = [each for each in keyed if each.verb != "report"]
        await self._reservations.load(tx, [each.hold_key for each in holding])
        reserving = [each for each in holding if each.verb == "reserve"]
        if reserving:
            live = await tx.select_as(
                ids.LeaseId,
                "live_leases",
                **id_columns([each.execution for each in reserving]),
                lease_ids=[str(each.lease_id) for each in reserving],
                now_ms=self._now_ms,
            )
            self._live = set(live)

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
        # Attempts that have ended may hold what is reserved.
        refused = isinstance(posting.outcome, HardBreach) and posting.outcome.reserved > 0
        if refused and await self._free_dead(tx, entry.budget_id):
            posting = self._post(entry)
        self.accounts[entry.budget_id] = posting.account
        self._note(entry, posting.outcome)
        return posting.outcome

    def _as_counted(self, entry: BudgetEntry) -> BudgetEntry:
        """The same entry, with the key under which it counts."""
        if not entry.is_by_holder:
            return entry
        report = self._reports.current.get(entry.report_key)
        held = self._reservation_of(entry)
        key = rules.settled_under(str(entry.key), entry.lease_id, held, report)
        return structs.replace(entry, key=key)

    def _repeated(self, entry: BudgetEntry) -> UsageAlreadyApplied | None:
        report = None if entry.key is None else self._reports.current.get(entry.report_key)
        if report is None or rules.is_forgotten(report, self._now_ms):
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
        """The amount held under the entry's key."""
        reservation = self._reservations.current.get(entry.hold_key)
        return None if reservation is None or reservation.waits else reservation

    def _note(self, entry: BudgetEntry, outcome: BudgetOutcome) -> None:
        """Remember what was done, for repeats and for giving back."""
        if isinstance(outcome, Reserved):
            self._reservations.current[entry.hold_key] = _reservation(entry, self._now_ms)
            return
        if isinstance(outcome, HardBreach) and entry.waits:
            self._note_waiting(entry, outcome)
            return
        held: BudgetReservation | None = None
        if entry.verb == "settle":
            held = self._reservation_of(entry)
            self._reservations.current.pop(entry.hold_key, None)
        if isinstance(outcome, HardBreach) and held is None:
            return
        if entry.verb == "settle" and not entry.amounts:
            # Given up, not settled: the next attempt reserves again.
            return
        if entry.key is not None and not isinstance(outcome, UsageAlreadyApplied):
            if held is not None:
                entry = structs.replace(entry, execution_id=held.execution_id)
            self._reports.current[entry.report_key] = _report(entry, outcome, self._now_ms)
        if entry.spends:
            account, before = self.accounts[entry.budget_id], self._spends.current
            self._spends.current[entry.spend_key] = rules.added_spend(
                before.get(entry.spend_key),
                account,
                entry.amounts,
                _blank_spend(entry, self._now_ms),
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
        self._reservations.current[entry.hold_key] = waiting

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
        budgets = [rules.posted(each, self._now_ms) for each in self.accounts.values()]
        if any(each.act_at_ms == self._now_ms for each in budgets):
            tx.hint(DUE_TOPIC)
        besides = combine(
            (self._reports.changes(), self._spends.changes(), self._reservations.changes())
        )
        await save_budgets(tx, self._before, budgets, besides)


async def save_budgets(
    tx: Transaction,
    before: Mapping[ids.BudgetId, Budget],
    after: Sequence[Budget],
    besides: Changes = NO_CHANGES,
) -> None:
    """Save locked budgets, the gates that they close or open, their events, and `besides`."""
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


async def _lock_or_add(
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


def _beside_successor(entry: BudgetEntry) -> BudgetEntry:
    """The settlement of an attempt, counted beside that of its successor."""
    return structs.replace(entry, key=rules.own_key(str(entry.key), entry.lease))


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
        partition_key=ids.partition_of(entry.execution),
        execution_id=entry.execution,
        amounts="{}",
        period=0,
        keep_until_ms=now_ms + rules.KEPT_MS,
    )


def _reservation(entry: BudgetEntry, now_ms: int) -> BudgetReservation:
    return BudgetReservation(
        budget_id=entry.budget_id,
        reservation_id=str(entry.key),
        partition_key=ids.partition_of(entry.execution),
        execution_id=entry.execution,
        lease_id=entry.lease,
        amounts=rules.encode_amounts(entry.amounts),
        created_at_ms=now_ms,
        check_at_ms=now_ms + rules.RESERVATION_CHECK_MS,
    )
