"""Which settlement counts for which reservation."""

import pytest

from flowfabric.core import budgets as rules
from flowfabric.core.budgets import BudgetReport, BudgetReservation
from flowfabric.core.ids import BudgetId, ExecutionId, LeaseId

BUDGET_ID = BudgetId("00000000-0000-4000-8000-000000000001")
MINE, OTHERS = LeaseId("lease-1"), LeaseId("lease-2")


@pytest.mark.parametrize(
    ("asked", "held", "settled", "by_itself"),
    [
        (MINE, MINE, None, False),
        (MINE, OTHERS, None, True),
        (MINE, None, MINE, False),
        (MINE, None, OTHERS, True),
        (MINE, MINE, OTHERS, False),
        (MINE, None, None, False),
        (None, OTHERS, None, False),
        (None, None, OTHERS, False),
    ],
)
def test_an_attempt_settles_what_it_holds_and_else_for_itself(
    asked: LeaseId | None, held: LeaseId | None, settled: LeaseId | None, *, by_itself: bool
) -> None:
    reservation = held and BudgetReservation(
        budget_id=BUDGET_ID,
        reservation_id="call",
        partition_key=0,
        execution_id=ExecutionId("e"),
        lease_id=held,
        amounts="{}",
        created_at_ms=0,
        check_at_ms=0,
    )
    report = settled and BudgetReport(
        budget_id=BUDGET_ID,
        settles=True,
        dedup_key="call",
        outcome="{}",
        lease_id=settled,
        applied_at_ms=0,
        keep_until_ms=0,
    )

    key = rules.settled_under("call", asked, reservation or None, report or None)

    assert (key != "call") is by_itself
