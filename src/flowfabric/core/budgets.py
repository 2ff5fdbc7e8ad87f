"""Budgets: what may be spent, what was, and what is promised to work under way.

A budget counts whole units by dimension: tokens, requests, micro-dollars. Each dimension may
have a hard limit, which no report passes, and a soft one, which a report may pass with a warning.
Work whose cost is unknown beforehand reserves first and settles afterwards.

In every dimension of a strict budget, usage and reservations together stay within the hard
limit; only lowering the limit can leave them above it. So a reservation that was granted can
always be settled up to its amount.

A reset starts a new period: usage is zero again, and what was spent before can no longer be
given back. Reservations outlive it, since the work they are for does.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, ClassVar, Final, Generic, TypeVar

import msgspec
from msgspec import Struct, structs

from flowfabric.core import ids
from flowfabric.core.bounds import AMOUNT_MAX
from flowfabric.core.policies import span
from flowfabric.core.records import Execution, Record
from flowfabric.core.states import AttemptState, LifecyclePhase
from flowfabric.errors import Corruption, InvalidInput

DIMENSIONS_COUNTED_MAX: Final = 256
"""Dimensions one budget counts, declared or not."""
KEPT_MS: Final = 24 * 60 * 60 * 1_000
"""How long a report is recognised when it is repeated, and longer while its execution exists."""
RESERVATION_CHECK_MS: Final = 60_000
"""How often to check whether a reservation's attempt still holds its lease."""
WAITING_CHECK_MS: Final = 2_000
"""How often to check whether an attempt that found no room still waits."""

LOOKALIKE_RATIO: Final = 0.82
"""How alike two names look by difflib: more than `input_tokens` and `output_tokens` do."""

Amounts = Mapping[str, int]
NOTHING: Final[Amounts] = {}


class BudgetScope(StrEnum):
    """What a budget is for: every execution this names is attached to it."""

    EXECUTION = "execution"
    FLOW = "flow"
    KIND = "kind"
    LANE = "lane"
    NAMESPACE = "namespace"
    TENANT = "tenant"
    """Executions that name it; nothing is attached automatically."""


ATTACHING: Final = (BudgetScope.LANE, BudgetScope.KIND, BudgetScope.NAMESPACE)
"""Scopes that attach every submission there; the submitter names budgets of the others."""


class EnforcementMode(StrEnum):
    STRICT = "strict"
    """Hard limits hold."""
    WARN = "warn"
    """Hard limits are counted and logged, and stop nothing."""


class OnHardLimit(StrEnum):
    """What a refused report or reservation does beyond being refused."""

    REJECT = "reject"
    """Nothing."""
    FAIL = "fail"
    """The execution whose request is refused fails."""
    CANCEL_PENDING = "cancel_pending"
    """Executions that are attached to the budget and not running are cancelled."""
    CANCEL_FLOW = "cancel_flow"
    """The flow that the budget is for is cancelled."""


CANCELLING: Final = (OnHardLimit.CANCEL_PENDING, OnHardLimit.CANCEL_FLOW)
"""Reactions carried out after the breach, a batch at a time."""


class OnSoftLimit(StrEnum):
    """What a report above a soft limit does beyond being counted."""

    WARN = "warn"
    """The caller is warned."""
    ALLOW = "allow"
    """Nothing."""


# Rows -----------------------------------------------------------------------


class Budget(Record, frozen=True, kw_only=True):
    """A budget with everything it counts: one row, which is also what its users lock."""

    table: ClassVar[str] = "budget"
    key: ClassVar[tuple[str, ...]] = ("budget_id",)

    budget_id: ids.BudgetId
    namespace: ids.Namespace
    name: str
    """Its name, from which its id is derived; the id itself if it has no name."""
    declared: bool = True
    """False: usage was reported before the budget was created. It counts, and limits nothing."""
    scope_type: BudgetScope = BudgetScope.TENANT
    scope_id: str = ""
    enforcement_mode: EnforcementMode = EnforcementMode.STRICT
    on_hard_limit: OnHardLimit = OnHardLimit.REJECT
    on_soft_limit: OnSoftLimit = OnSoftLimit.WARN
    reset_interval_ms: int = 0
    """0: only on request."""
    hard_limits: str = "{}"
    soft_limits: str = "{}"
    usage: str = "{}"
    reserved: str = "{}"
    wanted: str = "{}"
    """What callers that found no room wait for. All five are JSON objects of amounts by dimension.
    """
    closed: bool = False
    """A hard limit is used up, or what is wanted does not fit: nothing attached starts."""
    breach_count: int = 0
    soft_breach_count: int = 0
    last_breach_at_ms: int | None = None
    last_breach_dim: str | None = None
    reset_count: int = 0
    """Also distinguishes the periods."""
    last_reset_at_ms: int | None = None
    next_reset_at_ms: int | None = None
    act_at_ms: int | None = None
    """Since when a breach has executions to cancel; null once they are cancelled."""
    created_at_ms: int
    updated_at_ms: int

    @property
    def strict(self) -> bool:
        """Whether its hard limits hold."""
        return self.enforcement_mode is EnforcementMode.STRICT


class BudgetSpend(Record, frozen=True, kw_only=True):
    """What one execution has spent of one budget in one period, and can give back."""

    table: ClassVar[str] = "budget_spend"
    key: ClassVar[tuple[str, ...]] = ("budget_id", "partition_key", "execution_id")

    budget_id: ids.BudgetId
    partition_key: int
    execution_id: ids.ExecutionId
    amounts: str
    period: int
    """The budget's `reset_count` when it was spent."""
    keep_until_ms: int


class BudgetReport(Record, frozen=True, kw_only=True):
    """An applied report, by its key, so that a repeat is not applied again."""

    table: ClassVar[str] = "budget_report"
    key: ClassVar[tuple[str, ...]] = ("budget_id", "settles", "dedup_key")

    budget_id: ids.BudgetId
    settles: bool
    """Whether the key is that of a reservation, which it has settled."""
    dedup_key: str
    outcome: str
    """JSON: the answer to the first report."""
    partition_key: int = 0
    execution_id: ids.ExecutionId | None = None
    """The report is kept as long as this execution exists."""
    lease_id: ids.LeaseId | None = None
    """The lease under which its own attempt settled it, if it did."""
    applied_at_ms: int
    keep_until_ms: int


class BudgetReservation(Record, frozen=True, kw_only=True):
    """An amount promised to an attempt. It counts as long as the attempt's lease is live."""

    table: ClassVar[str] = "budget_reservation"
    key: ClassVar[tuple[str, ...]] = ("budget_id", "reservation_id")

    budget_id: ids.BudgetId
    reservation_id: str
    partition_key: int
    execution_id: ids.ExecutionId
    lease_id: ids.LeaseId
    waits: bool = False
    """There was no room: nothing is held, and the attempt waits until there is."""
    amounts: str
    created_at_ms: int
    check_at_ms: int
    """When to check again whether the lease is live or the attempt still waits."""


# Answers to reports ------------------------------------------------------


class UsageCounted(Struct, frozen=True, kw_only=True, tag="Ok", omit_defaults=True):
    """It was counted, within all limits."""

    undeclared: bool = False
    """The budget was not created: it counts, and limits nothing."""
    lookalikes: Mapping[str, str] = {}
    """Dimensions without a limit, each with the limited dimension of nearly the same name."""


class SoftBreach(Struct, frozen=True, kw_only=True, tag="SoftBreach"):
    """It was counted, and usage is now above a soft limit, or an advisory hard one."""

    dimension: str
    current_usage: int
    soft_limit: int
    undeclared: bool = False


class HardBreach(Struct, frozen=True, kw_only=True, tag="HardBreach"):
    """Nothing was counted: it would have passed a hard limit."""

    dimension: str
    current_usage: int
    """Without what was refused."""
    hard_limit: int
    reserved: int = 0
    """Held by others."""


Counted = UsageCounted | SoftBreach


class UsageAlreadyApplied(Struct, frozen=True, kw_only=True, tag="AlreadyApplied"):
    """The same key was reported before; nothing was counted."""

    prior_outcome: Counted | HardBreach
    """`HardBreach`: a reservation was settled with more than there was room for."""


class Reserved(Struct, frozen=True, kw_only=True, tag="Reserved", omit_defaults=True):
    """The amount is held until it is settled or the lease ends."""

    undeclared: bool = False
    lookalikes: Mapping[str, str] = {}


UsageOutcome = UsageCounted | SoftBreach | HardBreach | UsageAlreadyApplied
ReserveOutcome = Reserved | HardBreach | UsageAlreadyApplied
"""`UsageAlreadyApplied`: it was reserved and settled before."""

_OUTCOME: Final = msgspec.json.Decoder(Counted | HardBreach)

T = TypeVar("T", covariant=True)


def encode_outcome(outcome: Counted | HardBreach) -> str:
    return msgspec.json.encode(outcome).decode()


def prior(report: BudgetReport) -> UsageAlreadyApplied:
    try:
        return UsageAlreadyApplied(prior_outcome=_OUTCOME.decode(report.outcome))
    except msgspec.DecodeError as error:
        raise Corruption(f"the stored outcome of a report does not decode: {error}") from error


def reached_namespace(budget: Budget) -> str:
    """The namespace whose submissions the budget can attach."""
    return budget.scope_id if budget.scope_type is BudgetScope.NAMESPACE else budget.namespace


def fails(budget: Budget) -> bool:
    """Whether an execution whose request is refused fails."""
    return budget.on_hard_limit is OnHardLimit.FAIL and budget.strict


def describe_closed(budget: Budget, now_ms: int) -> str:
    """Why nothing attached to a budget starts, in a few words with its numbers."""
    account = opened(budget)
    full = _used_up(account)
    over = _over(account, account.wanted)
    if full or over is None:
        numbers = [
            f"{account.usage[name]:,} of {account.hard[name]:,} {name} used" for name in full
        ]
    else:
        left, wanted = room(account, over.dimension) or 0, account.wanted[over.dimension]
        held = f", {over.reserved:,} reserved" if over.reserved else ""
        numbers = [
            f"{over.current_usage:,} of {over.hard_limit:,} {over.dimension} used{held}:"
            f" {left:,} left, {wanted:,} needed"
        ]
    if budget.next_reset_at_ms is None:
        until = "; reset the budget or raise its limit"
    else:
        until = f", reset in {span(max(0, budget.next_reset_at_ms - now_ms))}"
    return f"budget {budget.name}: {', '.join(numbers)}{until}"


def describe_breach(name: str, breach: HardBreach, amounts: Amounts) -> str:
    """The breach in one sentence, with its numbers."""
    held = f", {breach.reserved} reserved" if breach.reserved else ""
    return (
        f"budget {name} has no room for {amounts.get(breach.dimension, 0)} {breach.dimension}:"
        f" {breach.current_usage} of {breach.hard_limit} used{held}"
    )


def describe_soft(name: str, breach: SoftBreach) -> str:
    """The same for a limit that stops nothing."""
    return (
        f"budget {name} is above its soft limit of {breach.soft_limit:,} {breach.dimension}:"
        f" {breach.current_usage:,} used"
    )


def is_forgotten(report: BudgetReport, now_ms: int) -> bool:
    """Whether its key may be used again. That of an execution holds until both are deleted."""
    return report.execution_id is None and report.keep_until_ms <= now_ms


def settled_under(
    key: str,
    lease_id: ids.LeaseId | None,
    held: BudgetReservation | None,
    report: BudgetReport | None,
) -> str:
    """The key under which a settlement counts.

    Attempts of an execution reserve under the same name. If a replaced attempt settles late, its
    usage counts separately and leaves alone what its successor holds or has settled.
    """
    holder = held.lease_id if held is not None else report.lease_id if report is not None else None
    if lease_id is None or holder in (None, lease_id):
        return key
    return own_key(key, lease_id)


def own_key(key: str, lease_id: ids.LeaseId) -> str:
    """A name no reservation can have: theirs have no line breaks."""
    return f"{key}\n{lease_id}"


# A budget with its amounts decoded ------------------------------------------


class Account(Struct, frozen=True):
    """A budget as decisions work with it. `posted` turns it back into the row."""

    budget: Budget
    hard: Amounts
    soft: Amounts
    usage: Amounts
    reserved: Amounts
    wanted: Amounts = NOTHING


class Posting(Struct, Generic[T], frozen=True):
    """The account after a request, and the answer to the caller."""

    account: Account
    outcome: T


_AMOUNTS: Final = msgspec.json.Decoder(dict[str, Annotated[int, msgspec.Meta(ge=0)]])
_ENCODER: Final = msgspec.json.Encoder(order="sorted")


def decode_amounts(text: str) -> dict[str, int]:
    try:
        return _AMOUNTS.decode(text)
    except msgspec.DecodeError as error:
        raise Corruption(f"stored amounts of a budget do not decode: {error}") from error


def encode_amounts(amounts: Amounts) -> str:
    return _ENCODER.encode(amounts).decode()


def opened(budget: Budget) -> Account:
    return Account(
        budget,
        decode_amounts(budget.hard_limits),
        decode_amounts(budget.soft_limits),
        decode_amounts(budget.usage),
        decode_amounts(budget.reserved),
        decode_amounts(budget.wanted),
    )


def posted(account: Account, now_ms: int) -> Budget:
    """The row to store: `closed` follows from limits and usage, here alone."""
    after = structs.replace(
        account.budget,
        hard_limits=encode_amounts(account.hard),
        soft_limits=encode_amounts(account.soft),
        usage=encode_amounts(account.usage),
        reserved=encode_amounts({name: n for name, n in account.reserved.items() if n}),
        wanted=encode_amounts(account.wanted if is_short(account) else NOTHING),
        closed=is_closed(account),
    )
    return after if after == account.budget else structs.replace(after, updated_at_ms=now_ms)


def is_closed(account: Account) -> bool:
    """Whether a hard limit that holds is used up, or callers wait for room."""
    return account.budget.strict and (bool(_used_up(account)) or is_short(account))


def is_short(account: Account) -> bool:
    """Whether a caller waits for more than fits now but within its limit."""
    wanted = account.wanted
    short = account.budget.strict and _over(account, wanted) is not None
    return short and _hopeless(account, wanted) is None


def _used_up(account: Account) -> list[str]:
    """The dimensions whose hard limit is used up."""
    limits = sorted(account.hard.items())
    return [name for name, limit in limits if 0 < limit <= account.usage.get(name, 0)]


def room(account: Account, dimension: str) -> int | None:
    """What is left of a dimension's hard limit; None where nothing limits it."""
    limit = account.hard.get(dimension, 0)
    if limit == 0 or not account.budget.strict:
        return None
    taken = account.usage.get(dimension, 0) + account.reserved.get(dimension, 0)
    return max(0, limit - taken)


# Counting -------------------------------------------------------------------


def report(account: Account, amounts: Amounts, now_ms: int) -> Posting[Counted | HardBreach]:
    """Count all amounts, or none if one of them would pass its hard limit."""
    over = _over(account, amounts)
    if over is not None and account.budget.strict:
        return Posting(_breached(account, over, now_ms), over)
    counted = structs.replace(account, usage=plus(account.usage, amounts))
    if over is not None:
        warned = SoftBreach(
            dimension=over.dimension,
            current_usage=counted.usage[over.dimension],
            soft_limit=over.hard_limit,
        )
        return Posting(_breached(counted, over, now_ms), warned)
    return _judged(counted, amounts)


def reserve(
    account: Account, held: Amounts, amounts: Amounts, now_ms: int, *, waits: bool = False
) -> Posting[Reserved | HardBreach]:
    """Hold `amounts` instead of `held`, or change nothing.

    A caller that `waits` causes no breach: nothing attached starts before there is room for it, or
    for the smallest amount that any caller waits for. Nobody waits for more than the limit.
    """
    without = structs.replace(account, reserved=_minus(account.reserved, held))
    over = _hopeless(without, amounts) or _over(without, amounts)
    if over is not None and account.budget.strict:
        if waits and not never_fits(over, amounts):
            least = amounts if not account.wanted else min(account.wanted, amounts, key=_size)
            return Posting(structs.replace(account, wanted=least), over)
        return Posting(_breached(account, over, now_ms), over)
    reserved = plus(without.reserved, amounts)
    answer = Reserved(
        undeclared=not account.budget.declared, lookalikes=_lookalikes(account, amounts)
    )
    return Posting(structs.replace(account, reserved=reserved), answer)


def settle(
    account: Account, held: Amounts, used: Amounts, now_ms: int
) -> Posting[Counted | HardBreach]:
    """Count `used` and free `held`.

    Usage up to what was held always counts: it was promised. If more was used, and the rest would
    pass the limit, as much of it counts as fits, and the caller gets the breach. If nothing was
    held, it is refused as a report would be.
    """
    freed = structs.replace(account, reserved=_minus(account.reserved, held))
    beyond = {name: n for name, n in used.items() if n > held.get(name, 0)}
    over = _over(freed, beyond)
    if over is not None and account.budget.strict:
        fitting = _fitting(freed, held, used) if held else NOTHING
        counted = structs.replace(freed, usage=plus(freed.usage, fitting))
        refused = structs.replace(over, current_usage=counted.usage.get(over.dimension, 0))
        return Posting(_breached(counted, over, now_ms), refused)
    if over is not None:
        return report(freed, used, now_ms)
    return _judged(structs.replace(freed, usage=plus(freed.usage, used)), used)


def _fitting(freed: Account, held: Amounts, used: Amounts) -> dict[str, int]:
    """What counts of an amount that passes a limit: what was held, and what still fits."""
    fitting: dict[str, int] = {}
    for name, amount in used.items():
        left = room(freed, name)
        fitting[name] = amount if left is None else min(amount, max(left, held.get(name, 0)))
    return fitting


def give_back(account: Account, spend: BudgetSpend | None) -> Account:
    """Take back what an execution has spent in this period. What it reported stays."""
    return structs.replace(account, usage=_minus(account.usage, _spent(account, spend)))


def free(account: Account, reservations: Sequence[BudgetReservation]) -> Account:
    """The account without reservations whose attempts have ended, or no longer wait.

    Callers that wait for more ask again once there seems to be room.
    """
    for each in reservations:
        amounts = decode_amounts(each.amounts)
        if not each.waits:
            account = structs.replace(account, reserved=_minus(account.reserved, amounts))
        elif account.wanted == amounts:
            account = structs.replace(account, wanted=NOTHING)
    return account


def still_waits(execution: Execution | None) -> bool:
    """Whether an attempt that found no room is set aside until there is.

    A running attempt asks again, or has given up.
    """
    return (
        execution is not None
        and execution.lifecycle_phase is not LifecyclePhase.ACTIVE
        and execution.attempt_state is AttemptState.ATTEMPT_INTERRUPTED
    )


def reset(account: Account, now_ms: int) -> Account:
    """Start a new period. The schedule of resets stays, however late or early this one is."""
    budget = structs.replace(
        account.budget,
        reset_count=account.budget.reset_count + 1,
        last_reset_at_ms=now_ms,
        next_reset_at_ms=next_reset_ms(account.budget, now_ms),
        last_breach_at_ms=None,
        last_breach_dim=None,
    )
    return structs.replace(account, budget=budget, usage=dict.fromkeys(account.usage, 0))


def next_reset_ms(budget: Budget, now_ms: int) -> int | None:
    """The schedule's first reset after `now_ms`; it never drifts."""
    if budget.reset_interval_ms == 0:
        return None
    if budget.next_reset_at_ms is None:
        return now_ms + budget.reset_interval_ms
    late_ms = now_ms - budget.next_reset_at_ms
    passed = 0 if late_ms < 0 else late_ms // budget.reset_interval_ms + 1
    return budget.next_reset_at_ms + passed * budget.reset_interval_ms


def added_spend(
    spend: BudgetSpend | None, account: Account, amounts: Amounts, blank: BudgetSpend
) -> BudgetSpend:
    """The ledger's row after a spend; amounts of an earlier period are dropped."""
    return structs.replace(
        blank,
        amounts=encode_amounts(plus(_spent(account, spend), amounts)),
        period=account.budget.reset_count,
    )


def _spent(account: Account, spend: BudgetSpend | None) -> Amounts:
    """What an execution has spent in this period."""
    if spend is None or spend.period != account.budget.reset_count:
        return NOTHING
    return decode_amounts(spend.amounts)


def _size(amounts: Amounts) -> tuple[int, ...]:
    return tuple(sorted(amounts.values(), reverse=True))


def _hopeless(account: Account, amounts: Amounts) -> HardBreach | None:
    """The first dimension, by name, whose amount is above its whole hard limit."""
    return _over(account, {name: n for name, n in amounts.items() if n > account.hard.get(name, 0)})


def never_fits(breach: HardBreach, amounts: Amounts) -> bool:
    """Whether no reset makes room for what was refused."""
    return amounts[breach.dimension] > breach.hard_limit


def _over(account: Account, amounts: Amounts) -> HardBreach | None:
    """The first dimension, by name, that would pass its hard limit."""
    for name in sorted(amounts):
        limit = account.hard.get(name, 0)
        used, reserved = account.usage.get(name, 0), account.reserved.get(name, 0)
        if limit > 0 and used + reserved + amounts[name] > limit:
            return HardBreach(
                dimension=name, current_usage=used, hard_limit=limit, reserved=reserved
            )
    return None


def _breached(account: Account, breach: HardBreach, now_ms: int) -> Account:
    before = account.budget
    acts = (
        before.on_hard_limit in CANCELLING
        and before.strict
        # Others may give back what they hold.
        and breach.reserved == 0
    )
    budget = structs.replace(
        before,
        act_at_ms=now_ms if acts and before.act_at_ms is None else before.act_at_ms,
        breach_count=before.breach_count + 1,
        last_breach_at_ms=now_ms,
        last_breach_dim=breach.dimension,
    )
    return structs.replace(account, budget=budget)


def _judged(counted: Account, amounts: Amounts) -> Posting[Counted | HardBreach]:
    for name in sorted(amounts):
        limit, usage = counted.soft.get(name, 0), counted.usage.get(name, 0)
        if 0 < limit < usage:
            budget = structs.replace(
                counted.budget, soft_breach_count=counted.budget.soft_breach_count + 1
            )
            counted = structs.replace(counted, budget=budget)
            if budget.on_soft_limit is OnSoftLimit.ALLOW:
                break
            answer = SoftBreach(dimension=name, current_usage=usage, soft_limit=limit)
            return Posting(counted, answer)
    within = UsageCounted(
        undeclared=not counted.budget.declared, lookalikes=_lookalikes(counted, amounts)
    )
    return Posting(counted, within)


def _lookalikes(account: Account, amounts: Amounts) -> dict[str, str]:
    """The unlimited dimensions whose names look like that of a limited one.

    A budget counts them too, whether they are meant or mistyped.
    """
    unlimited = [name for name in amounts if not (account.hard.get(name) or account.soft.get(name))]
    if not unlimited:
        return {}
    limits = (*account.hard.items(), *account.soft.items())
    limited = tuple(sorted({name for name, limit in limits if limit}))
    alike = {name: lookalike(name, limited) for name in unlimited}
    return {name: other for name, other in alike.items() if other}


@lru_cache(maxsize=1_000)
def lookalike(name: str, among: tuple[str, ...]) -> str:
    """The name that was probably meant; empty if there is none."""
    return next(iter(get_close_matches(name, among, 1, LOOKALIKE_RATIO)), "")


def plus(sums: Amounts, amounts: Amounts) -> dict[str, int]:
    """The sums with amounts added, within what a budget can count."""
    total = dict(sums)
    for name, amount in amounts.items():
        total[name] = total.get(name, 0) + amount
        if total[name] > AMOUNT_MAX:
            raise InvalidInput(name, f"a budget counts up to {AMOUNT_MAX}", total[name])
    if len(total) > DIMENSIONS_COUNTED_MAX:
        problem = f"a budget counts up to {DIMENSIONS_COUNTED_MAX} dimensions"
        raise InvalidInput("dimensions", problem, len(total))
    return total


def _minus(sums: Amounts, amounts: Amounts) -> dict[str, int]:
    left = dict(sums)
    for name, amount in amounts.items():
        if name in left:
            left[name] = max(0, left[name] - amount)
    return left
