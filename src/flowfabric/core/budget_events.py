"""Events about budgets.

An event follows from a budget's row before and after. Usage alone is no event, and a condition that
lasts is logged once: usage above a soft limit when it gets there, a limit that refuses at its first
refusal and again after a minute without one.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec
from msgspec import Struct

from flowfabric.core import ids
from flowfabric.core.budget_terms import differs
from flowfabric.core.budgets import Budget, OnSoftLimit, decode_amounts
from flowfabric.core.events import Event, EventCategory, StoredEvent, damaged

QUIET_MS: Final = 60_000
"""A refusal this long after the last one is logged again."""


class BudgetEventType(StrEnum):
    CREATED = "created"
    CHANGED = "changed"
    RESET = "reset"
    REMOVED = "removed"
    SOFT_LIMIT = "soft_limit"
    """Usage is now above a soft limit."""
    BREACHED = "breached"
    """A report or a reservation passed a hard limit: refused, unless the budget only warns."""


class BudgetDetails(Struct, frozen=True):
    """What the event of a budget carries."""

    budget: str
    """Its name."""
    usage: Mapping[str, int]
    hard_limits: Mapping[str, int]
    soft_limits: Mapping[str, int]
    dimension: str | None = None
    """The dimension whose limit was passed."""


def budget_events(before: Budget | None, after: Budget, now_ms: int) -> tuple[Event, ...]:
    """What happened to a budget. An undeclared one has no events: nobody created it."""
    if not after.declared:
        return ()
    if before is None or not before.declared:
        return (_event(after, BudgetEventType.CREATED, now_ms),)
    events: list[Event] = []
    if differs(before, after):
        events.append(_event(after, BudgetEventType.CHANGED, now_ms))
    if after.reset_count != before.reset_count:
        events.append(_event(after, BudgetEventType.RESET, now_ms))
    if after.soft_breach_count != before.soft_breach_count:
        events += [
            _event(after, BudgetEventType.SOFT_LIMIT, now_ms, name)
            for name in _passed(before, after)
        ]
    if after.breach_count != before.breach_count and _is_news(before, after, now_ms):
        events.append(_event(after, BudgetEventType.BREACHED, now_ms, after.last_breach_dim))
    return tuple(events)


def removal_events(removed: Budget, now_ms: int) -> tuple[Event, ...]:
    return (_event(removed, BudgetEventType.REMOVED, now_ms),) if removed.declared else ()


def budget_of(event: StoredEvent) -> str | None:
    """The name of the budget that an event is about, if it is about one."""
    if event.category is not EventCategory.BUDGET:
        return None
    try:
        return msgspec.json.decode(event.details or "", type=BudgetDetails).budget
    except msgspec.DecodeError:
        raise damaged(event) from None


def _passed(before: Budget, after: Budget) -> list[str]:
    """Dimensions whose usage is above its soft limit, and was not."""
    if after.on_soft_limit is OnSoftLimit.ALLOW:
        return []
    was, now = decode_amounts(before.usage), decode_amounts(after.usage)
    return [
        name
        for name, limit in sorted(decode_amounts(after.soft_limits).items())
        if was.get(name, 0) <= limit < now.get(name, 0) and limit > 0
    ]


def _is_news(before: Budget, after: Budget, now_ms: int) -> bool:
    return (
        before.last_breach_at_ms is None
        or before.last_breach_dim != after.last_breach_dim
        or now_ms - before.last_breach_at_ms >= QUIET_MS
    )


def _event(
    budget: Budget, event_type: BudgetEventType, now_ms: int, dimension: str | None = None
) -> Event:
    details = BudgetDetails(
        budget=budget.name,
        usage=decode_amounts(budget.usage),
        hard_limits=decode_amounts(budget.hard_limits),
        soft_limits=decode_amounts(budget.soft_limits),
        dimension=dimension,
    )
    return Event(
        category=EventCategory.BUDGET,
        event_type=event_type,
        partition_key=0,
        execution_id=ids.ExecutionId(f"{{fp:0}}:{budget.budget_id}"),
        namespace=budget.namespace,
        reason=_sentence(details, event_type),
        details=msgspec.json.encode(details).decode(),
        occurred_at_ms=now_ms,
    )


def _sentence(details: BudgetDetails, event_type: BudgetEventType) -> str:
    soft = event_type is BudgetEventType.SOFT_LIMIT
    limits = details.soft_limits if soft else details.hard_limits
    if details.dimension is not None:
        limits = {details.dimension: limits.get(details.dimension, 0)}
    return ", ".join(
        f"{details.usage.get(name, 0):,} of {limit:,} {name} used"
        for name, limit in sorted(limits.items())
        if limit > 0
    )
