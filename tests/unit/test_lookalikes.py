"""Dimensions of budgets that look mistyped."""

import pytest

from flowfabric.core.budgets import UsageCounted, lookalike, report
from tests.unit.test_budgets import NOW, account


@pytest.mark.parametrize(
    ("name", "among", "meant"),
    [
        ("tokns", ("cents", "tokens"), "tokens"),
        ("toekns", ("tokens",), "tokens"),
        ("pages", ("tokens",), ""),
        ("output_tokens", ("input_tokens",), ""),
        ("tokens", (), ""),
    ],
)
def test_only_a_name_that_is_nearly_another_looks_mistyped(
    name: str, among: tuple[str, ...], meant: str
) -> None:
    assert lookalike(name, among) == meant


def test_a_report_names_what_looks_mistyped_and_counts_it() -> None:
    budget = account(hard={"tokens": 9}, soft={"cents": 5})
    posting = report(budget, {"tokns": 1, "cent": 1, "pages": 1, "tokens": 1}, NOW)
    assert posting.outcome == UsageCounted(lookalikes={"tokns": "tokens", "cent": "cents"})
    assert posting.account.usage == {"tokns": 1, "cent": 1, "pages": 1, "tokens": 1}
