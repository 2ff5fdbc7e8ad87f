"""What budgets count, refuse, hold, give back and forget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flowfabric.core import budget_terms as terms
from flowfabric.core import budgets as rules
from flowfabric.core.bounds import AMOUNT_MAX
from flowfabric.core.budget_terms import BudgetDefinition, BudgetUpdate, UsageDimensions
from flowfabric.core.budgets import (
    Account,
    Amounts,
    Budget,
    BudgetReport,
    BudgetReservation,
    BudgetSpend,
    EnforcementMode,
    HardBreach,
    Reserved,
    SoftBreach,
    UsageAlreadyApplied,
    UsageCounted,
)
from flowfabric.core.ids import BudgetId, ExecutionId, LeaseId, Namespace
from flowfabric.errors import FlowFabricError, InvalidBudgetScope, InvalidInput

NOW = 1_000_000
HOUR_MS = 3_600_000
BUDGET_ID = BudgetId("00000000-0000-4000-8000-00000000b0d6")
EXECUTION_ID = ExecutionId("{fp:0}:00000000-0000-4000-8000-000000000001")
LEASE_ID = LeaseId("00000000-0000-4000-8000-00000000001e")


def account(
    hard: Amounts = rules.NOTHING,
    soft: Amounts = rules.NOTHING,
    usage: Amounts = rules.NOTHING,
    reserved: Amounts = rules.NOTHING,
    **fields: object,
) -> Account:
    budget = Budget(
        budget_id=BUDGET_ID,
        namespace=Namespace("default"),
        name="team",
        created_at_ms=0,
        updated_at_ms=0,
    )
    return Account(structs.replace(budget, **fields), hard, soft, usage, reserved)


def spend(period: int = 0, **amounts: int) -> BudgetSpend:
    return BudgetSpend(
        budget_id=BUDGET_ID,
        partition_key=0,
        execution_id=EXECUTION_ID,
        amounts=rules.encode_amounts(amounts),
        period=period,
        keep_until_ms=0,
    )


# Reports


@pytest.mark.parametrize(
    ("before", "amounts", "outcome", "usage"),
    [
        pytest.param({}, {"tokens": 60}, UsageCounted(), {"tokens": 60}, id="within all limits"),
        pytest.param(
            {"tokens": 60},
            {"tokens": 20},
            UsageCounted(),
            {"tokens": 80},
            id="exactly the soft one",
        ),
        pytest.param(
            {"tokens": 80},
            {"tokens": 1},
            SoftBreach(dimension="tokens", current_usage=81, soft_limit=80),
            {"tokens": 81},
            id="above the soft limit it counts",
        ),
        pytest.param(
            {"tokens": 85},
            {"tokens": 15},
            SoftBreach(dimension="tokens", current_usage=100, soft_limit=80),
            {"tokens": 100},
            id="exactly the hard limit",
        ),
        pytest.param(
            {"tokens": 85},
            {"tokens": 16},
            HardBreach(dimension="tokens", current_usage=85, hard_limit=100),
            {"tokens": 85},
            id="above the hard limit nothing counts",
        ),
        pytest.param(
            {"cents": 5},
            {"cents": 1, "tokens": 101},
            HardBreach(dimension="tokens", current_usage=0, hard_limit=100),
            {"cents": 5},
            id="one dimension too many and none moves",
        ),
        pytest.param(
            {}, {"pages": 7}, UsageCounted(), {"pages": 7}, id="a dimension nobody has limited"
        ),
        pytest.param({"tokens": 9}, {}, UsageCounted(), {"tokens": 9}, id="nothing"),
    ],
)
def test_a_report(before: Amounts, amounts: Amounts, outcome: object, usage: Amounts) -> None:
    posting = rules.report(
        account(hard={"tokens": 100}, soft={"tokens": 80}, usage=before), amounts, NOW
    )

    assert (posting.outcome, posting.account.usage) == (outcome, usage)


def test_the_first_dimension_by_name_is_told_of() -> None:
    budget = account(hard={"a": 1, "b": 1})

    posting = rules.report(budget, {"b": 2, "a": 2}, NOW)

    assert posting.outcome == HardBreach(dimension="a", current_usage=0, hard_limit=1)


@pytest.mark.parametrize("verb", ["report", "settle"])
def test_a_soft_limit_that_allows_is_counted_and_not_told(verb: str) -> None:
    budget = account(hard={"a": 10}, soft={"a": 1, "b": 1}, on_soft_limit=rules.OnSoftLimit.ALLOW)
    if verb == "report":
        posting = rules.report(budget, {"a": 2, "b": 2}, NOW)
    else:
        posting = rules.settle(budget, {}, {"a": 2, "b": 2}, NOW)

    assert posting.outcome == UsageCounted()
    assert posting.account.usage == {"a": 2, "b": 2}
    assert posting.account.budget.soft_breach_count == 1


def test_a_breach_is_counted_and_a_soft_one_apart() -> None:
    budget = account(hard={"a": 10}, soft={"a": 1})

    soft = rules.report(budget, {"a": 2}, NOW).account
    hard = rules.report(soft, {"a": 9}, NOW + 1).account

    assert (soft.budget.soft_breach_count, soft.budget.breach_count) == (1, 0)
    assert soft.budget.last_breach_dim is None
    assert (hard.budget.soft_breach_count, hard.budget.breach_count) == (1, 1)
    assert (hard.budget.last_breach_at_ms, hard.budget.last_breach_dim) == (NOW + 1, "a")


def test_an_advisory_hard_limit_counts_tells_and_stops_nothing() -> None:
    budget = account(hard={"a": 10}, usage={"a": 9}, enforcement_mode=EnforcementMode.WARN)

    posting = rules.report(budget, {"a": 5}, NOW)

    assert posting.outcome == SoftBreach(dimension="a", current_usage=14, soft_limit=10)
    assert posting.account.usage == {"a": 14}
    assert posting.account.budget.breach_count == 1
    assert not rules.is_closed(posting.account)


def test_a_budget_nobody_created_counts_and_says_so() -> None:
    posting = rules.report(account(declared=False), {"a": 5}, NOW)

    assert posting.outcome == UsageCounted(undeclared=True)
    assert posting.account.usage == {"a": 5}


def test_a_dimension_counts_no_further_than_every_reader_can() -> None:
    budget = account(usage={"a": AMOUNT_MAX})

    with pytest.raises(InvalidInput, match="a budget counts up to 9007199254740991"):
        rules.report(budget, {"a": 1}, NOW)


def test_a_budget_counts_so_many_dimensions() -> None:
    usage = {f"d{n}": 1 for n in range(rules.DIMENSIONS_COUNTED_MAX)}
    budget = account(usage=usage)

    assert rules.report(budget, {"d0": 1}, NOW).outcome == UsageCounted()
    with pytest.raises(InvalidInput, match="up to 256 dimensions"):
        rules.report(budget, {"another": 1}, NOW)


@pytest.mark.parametrize(
    ("hard", "usage", "mode", "closed"),
    [
        ({"a": 10}, {"a": 9}, "strict", False),
        ({"a": 10}, {"a": 10}, "strict", True),
        ({"a": 10, "b": 1}, {"b": 1}, "strict", True),
        ({"a": 10}, {"a": 11}, "strict", True),
        ({"a": 10}, {"a": 10}, "warn", False),
        ({"a": 0}, {"a": 10}, "strict", False),
        ({}, {"a": 10}, "strict", False),
    ],
)
def test_a_budget_is_closed_when_a_hard_limit_is_used_up(
    hard: Amounts, usage: Amounts, mode: str, closed: bool
) -> None:
    budget = account(hard=hard, usage=usage, enforcement_mode=EnforcementMode(mode))

    assert rules.is_closed(budget) is closed
    assert rules.posted(budget, NOW).closed is closed


def test_an_account_that_did_not_change_is_the_row_it_was() -> None:
    budget = Budget(
        budget_id=BUDGET_ID,
        namespace=Namespace("default"),
        name="team",
        usage='{"a":1,"b":2}',
        created_at_ms=1,
        updated_at_ms=2,
    )

    assert rules.posted(rules.opened(budget), NOW) == budget


# Reservations


def test_what_is_reserved_is_not_there_for_others() -> None:
    held = rules.reserve(account(hard={"a": 10}), {}, {"a": 7}, NOW)

    assert held.outcome == Reserved()
    assert rules.room(held.account, "a") == 3
    assert rules.report(held.account, {"a": 4}, NOW).outcome == HardBreach(
        dimension="a", current_usage=0, hard_limit=10, reserved=7
    )
    assert rules.reserve(held.account, {}, {"a": 4}, NOW).outcome == HardBreach(
        dimension="a", current_usage=0, hard_limit=10, reserved=7
    )
    assert rules.report(held.account, {"a": 3}, NOW).outcome == UsageCounted()


def test_reserving_again_replaces_what_was_held() -> None:
    held = rules.reserve(account(hard={"a": 10}), {}, {"a": 7}, NOW).account

    again = rules.reserve(held, {"a": 7}, {"a": 9}, NOW)

    assert (again.outcome, again.account.reserved) == (Reserved(), {"a": 9})


def test_a_refused_reservation_leaves_what_was_held() -> None:
    held = rules.reserve(account(hard={"a": 10}), {}, {"a": 7}, NOW).account

    refused = rules.reserve(held, {"a": 7}, {"a": 11}, NOW)

    assert isinstance(refused.outcome, HardBreach)
    assert refused.account.reserved == {"a": 7}
    assert refused.account.budget.breach_count == 1


@pytest.mark.parametrize(
    ("used", "outcome", "usage"),
    [
        pytest.param({"a": 4}, UsageCounted(), {"a": 5}, id="less than reserved"),
        pytest.param({"a": 7}, UsageCounted(), {"a": 8}, id="all of it"),
        pytest.param({"a": 9}, UsageCounted(), {"a": 10}, id="more, and there is room"),
        pytest.param({}, UsageCounted(), {"a": 1}, id="nothing"),
        pytest.param({"b": 3}, UsageCounted(), {"a": 1, "b": 3}, id="another dimension"),
        pytest.param(
            {"a": 10},
            HardBreach(dimension="a", current_usage=10, hard_limit=10),
            {"a": 10},
            id="more than there is room for: it is used up",
        ),
        pytest.param(
            {"a": 10, "b": 2},
            HardBreach(dimension="a", current_usage=10, hard_limit=10),
            {"a": 10, "b": 2},
            id="more than there is room for in one dimension: all of the others",
        ),
    ],
)
def test_settling(used: Amounts, outcome: object, usage: Amounts) -> None:
    budget = account(hard={"a": 10}, usage={"a": 1}, reserved={"a": 7})

    posting = rules.settle(budget, {"a": 7}, used, NOW)

    assert (posting.outcome, posting.account.usage) == (outcome, usage)
    assert posting.account.reserved == {"a": 0}


def test_a_promise_is_kept_though_the_limit_was_lowered_meanwhile() -> None:
    budget = account(hard={"a": 5}, usage={"a": 4}, reserved={"a": 7})

    posting = rules.settle(budget, {"a": 7}, {"a": 7}, NOW)

    assert (posting.outcome, posting.account.usage) == (UsageCounted(), {"a": 11})


def test_whoever_waits_keeps_others_from_starting_until_there_is_room() -> None:
    budget = account(hard={"a": 10}, usage={"a": 7})

    waiting = rules.reserve(budget, {}, {"a": 5}, NOW, waits=True)
    assert isinstance(waiting.outcome, HardBreach)
    assert waiting.account.budget.breach_count == 0
    short = rules.posted(waiting.account, NOW)
    assert (short.closed, short.wanted) == (True, '{"a":5}')
    # The least that somebody waits for counts, and anybody who is running may use what there is.
    other = rules.reserve(rules.opened(short), {}, {"a": 4}, NOW, waits=True)
    used = rules.report(other.account, {"a": 1}, NOW)
    assert used.outcome == UsageCounted()
    assert rules.posted(used.account, NOW).wanted == '{"a":4}'

    given_back = rules.give_back(used.account, spend(0, a=2))
    opened = rules.posted(given_back, NOW)
    assert (opened.closed, opened.wanted) == (False, "{}")


def test_an_advisory_limit_holds_back_no_reservation() -> None:
    budget = account(hard={"a": 5}, enforcement_mode=EnforcementMode.WARN)

    held = rules.reserve(budget, {}, {"a": 7}, NOW)

    assert held.outcome == Reserved()
    assert rules.settle(held.account, {"a": 7}, {"a": 9}, NOW).outcome == SoftBreach(
        dimension="a", current_usage=9, soft_limit=5
    )


def test_reservations_of_attempts_that_ended_are_free() -> None:
    gone = BudgetReservation(
        budget_id=BUDGET_ID,
        reservation_id="r",
        partition_key=0,
        execution_id=EXECUTION_ID,
        lease_id=LEASE_ID,
        amounts='{"a":7}',
        created_at_ms=0,
        check_at_ms=0,
    )

    assert rules.free(account(reserved={"a": 9}), [gone]).reserved == {"a": 2}


# Spends that can be given back


def test_spends_add_up_within_a_period() -> None:
    budget = account(reset_count=3)

    first = rules.added_spend(None, budget, {"a": 1}, spend(0))
    second = rules.added_spend(first, budget, {"a": 2, "b": 5}, spend(0))

    assert (second.amounts, second.period) == ('{"a":3,"b":5}', 3)


def test_what_was_spent_before_a_reset_is_not_added_to() -> None:
    later = rules.added_spend(spend(period=3, a=9), account(reset_count=4), {"a": 1}, spend(0))

    assert (later.amounts, later.period) == ('{"a":1}', 4)


@pytest.mark.parametrize(
    ("given_back", "usage"),
    [
        pytest.param(spend(2, a=3), {"a": 7, "b": 1}, id="in this period"),
        pytest.param(spend(2, a=30), {"a": 0, "b": 1}, id="never below zero"),
        pytest.param(spend(1, a=3), {"a": 10, "b": 1}, id="before the reset"),
        pytest.param(None, {"a": 10, "b": 1}, id="nothing was spent"),
    ],
)
def test_giving_back(given_back: BudgetSpend | None, usage: Amounts) -> None:
    budget = account(usage={"a": 10, "b": 1}, reset_count=2)

    assert rules.give_back(budget, given_back).usage == usage


# Resets


def test_a_reset_starts_a_new_period() -> None:
    budget = account(
        hard={"a": 10},
        usage={"a": 10, "b": 1},
        reserved={"a": 2},
        breach_count=4,
        soft_breach_count=5,
        last_breach_at_ms=7,
        last_breach_dim="a",
        reset_interval_ms=HOUR_MS,
        next_reset_at_ms=NOW,
    )

    after = rules.reset(budget, NOW)

    assert after.usage == {"a": 0, "b": 0}
    assert after.reserved == {"a": 2}
    assert after.budget == structs.replace(
        budget.budget,
        reset_count=1,
        last_reset_at_ms=NOW,
        next_reset_at_ms=NOW + HOUR_MS,
        last_breach_at_ms=None,
        last_breach_dim=None,
    )


@pytest.mark.parametrize(
    ("interval_ms", "next_ms", "now_ms", "expected_ms"),
    [
        pytest.param(0, None, 500, None, id="never"),
        pytest.param(1_000, 5_000, 5_000, 6_000, id="on time"),
        pytest.param(1_000, 5_000, 5_300, 6_000, id="late, without drift"),
        pytest.param(1_000, 5_000, 9_000, 10_000, id="periods missed"),
        pytest.param(1_000, 5_000, 4_200, 5_000, id="by hand, before it is due"),
        pytest.param(1_000, None, 4_200, 5_200, id="unscheduled so far"),
    ],
)
def test_the_next_reset(
    interval_ms: int, next_ms: int | None, now_ms: int, expected_ms: int | None
) -> None:
    budget = account(reset_interval_ms=interval_ms, next_reset_at_ms=next_ms).budget

    assert rules.next_reset_ms(budget, now_ms) == expected_ms


@given(
    interval_ms=st.integers(1, 10_000),
    first_ms=st.integers(0, 10_000),
    now_ms=st.integers(0, 50_000),
)
def test_the_schedule_never_drifts(interval_ms: int, first_ms: int, now_ms: int) -> None:
    budget = account(reset_interval_ms=interval_ms, next_reset_at_ms=first_ms).budget

    next_ms = rules.next_reset_ms(budget, now_ms)

    assert next_ms is not None
    assert next_ms > now_ms or next_ms == first_ms
    assert (next_ms - first_ms) % interval_ms == 0
    assert next_ms - now_ms <= max(interval_ms, first_ms - now_ms)


# Whole histories

amounts = st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 12), max_size=2)
requests = st.lists(
    st.one_of(
        st.tuples(st.just("report"), st.just(0), amounts),
        st.tuples(st.just("reserve"), st.integers(0, 3), amounts),
        st.tuples(st.just("settle"), st.integers(0, 3), amounts),
        st.tuples(st.just("reset"), st.just(0), st.just({})),
    ),
    max_size=40,
)


@given(hard=amounts, history=requests)
def test_a_strict_budget_never_passes_its_limits(
    hard: Amounts, history: list[tuple[str, int, dict[str, int]]]
) -> None:
    budget = account(hard=hard)
    held: dict[int, Amounts] = {}
    for verb, who, asked in history:
        match verb:
            case "report":
                budget = rules.report(budget, asked, NOW).account
            case "reserve":
                made = rules.reserve(budget, held.get(who, {}), asked, NOW)
                if isinstance(made.outcome, Reserved):
                    held[who] = asked
                budget = made.account
            case "settle":
                budget = rules.settle(budget, held.pop(who, {}), asked, NOW).account
            case _:
                budget = rules.reset(budget, NOW)
        for name, limit in hard.items():
            taken = budget.usage.get(name, 0) + budget.reserved.get(name, 0)
            assert limit == 0 or taken <= limit
    for name in ("a", "b"):
        assert budget.reserved.get(name, 0) == sum(each.get(name, 0) for each in held.values())
    assert rules.opened(rules.posted(budget, NOW)).usage == budget.usage


@given(hard=amounts, asked=amounts, used=amounts)
def test_what_was_reserved_can_always_be_settled(
    hard: Amounts, asked: Amounts, used: Amounts
) -> None:
    made = rules.reserve(account(hard=hard), {}, asked, NOW)
    if isinstance(made.outcome, Reserved) and all(n <= asked.get(d, 0) for d, n in used.items()):
        settled = rules.settle(made.account, asked, used, NOW)
        assert settled.outcome == UsageCounted()


# Requests

DEFINITION = BudgetDefinition(budget_id="team")


def test_a_definition_becomes_a_budget() -> None:
    budget = terms.check_definition(
        BudgetDefinition(
            budget_id="team",
            namespace="shop",
            scope_type="lane",
            scope_id="gpu",
            enforcement_mode="hard",
            on_hard_limit="cancel_pending",
            on_soft_limit="allow",
            reset_interval_ms=HOUR_MS,
            dimensions=["tokens", "cents"],
            hard_limits=[100, 0],
            soft_limits=[80, 5],
        ),
        NOW,
    )

    assert structs.asdict(budget) == {
        "budget_id": budget.budget_id,
        "namespace": "shop",
        "name": "team",
        "declared": True,
        "scope_type": "lane",
        "scope_id": "gpu",
        "enforcement_mode": "strict",
        "on_hard_limit": "cancel_pending",
        "on_soft_limit": "allow",
        "reset_interval_ms": HOUR_MS,
        "hard_limits": '{"cents":0,"tokens":100}',
        "soft_limits": '{"cents":5,"tokens":80}',
        "usage": "{}",
        "reserved": "{}",
        "wanted": "{}",
        "closed": False,
        "breach_count": 0,
        "soft_breach_count": 0,
        "last_breach_at_ms": None,
        "last_breach_dim": None,
        "reset_count": 0,
        "last_reset_at_ms": None,
        "next_reset_at_ms": NOW + HOUR_MS,
        "act_at_ms": None,
        "created_at_ms": NOW,
        "updated_at_ms": NOW,
    }


def test_a_name_stands_for_one_id_per_namespace() -> None:
    def budget_id(name: str, namespace: str) -> str:
        wanted = BudgetDefinition(budget_id=name, namespace=namespace)
        return terms.check_definition(wanted, NOW).budget_id

    assert budget_id("team", "a") == budget_id("team", "a")
    assert budget_id("team", "a") != budget_id("team", "b")
    assert budget_id(BUDGET_ID, "a") == BUDGET_ID


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"budget_id": ""}, InvalidInput, "budget_id: must not be empty"),
        ({"namespace": ""}, InvalidInput, "namespace: must not be empty"),
        ({"scope_type": "planet"}, InvalidBudgetScope, "scope_type: must be one of execution"),
        ({"scope_type": 3}, InvalidBudgetScope, "scope_type: must be one of execution"),
        ({"scope_type": "lane", "scope_id": ""}, InvalidBudgetScope, "scope_id of scope lane"),
        ({"scope_type": "flow", "scope_id": ""}, InvalidBudgetScope, "scope_id of scope flow"),
        ({"enforcement_mode": "maybe"}, InvalidInput, "enforcement_mode: must be one of strict"),
        ({"on_hard_limit": "explode"}, InvalidInput, "on_hard_limit: must be one of reject"),
        ({"on_soft_limit": "explode"}, InvalidInput, "on_soft_limit: must be one of warn"),
        ({"reset_interval_ms": -1}, InvalidInput, "reset_interval_ms: must be 1000 to"),
        ({"reset_interval_ms": False}, InvalidInput, "reset_interval_ms: must be an integer"),
        ({"hard_limits": {"a": -1}}, InvalidInput, r"hard_limits\[a\]: must be 0 to"),
        ({"hard_limits": {"a": 2**53}}, InvalidInput, r"hard_limits\[a\]: must be 0 to"),
        ({"hard_limits": {"a": 1.5}}, InvalidInput, r"hard_limits\[a\]: must be an integer"),
        ({"hard_limits": {"_a": 1}}, InvalidInput, "must not begin with _"),
        ({"hard_limits": {"": 1}}, InvalidInput, "must not be empty"),
        ({"hard_limits": {"a\x07": 1}}, InvalidInput, "control or invisible"),
        ({"hard_limits": {"a" * 129: 1}}, InvalidInput, "at most 128 bytes"),
        ({"hard_limits": [1]}, InvalidInput, "must map dimensions"),
        (
            {"hard_limits": {"a": 5}, "soft_limits": {"a": 6}},
            InvalidInput,
            r"soft_limits\[a\]: must not be above the hard limit of 5",
        ),
        (
            {"hard_limits": {f"d{n}": 1 for n in range(65)}},
            InvalidInput,
            "too_many_dimensions: limit=64, got=65",
        ),
        (
            {
                "hard_limits": {f"d{n}": 1 for n in range(40)},
                "soft_limits": {f"e{n}": 1 for n in range(40)},
            },
            InvalidInput,
            "too_many_dimensions: limit=64, got=80",
        ),
        (
            {"dimensions": ["a"], "hard_limits": [1, 2], "soft_limits": [1]},
            InvalidInput,
            "create_budget: dimensions / hard_limits / soft_limits length mismatch",
        ),
        (
            {"dimensions": ["a", "a"], "hard_limits": [1, 2], "soft_limits": [1, 1]},
            InvalidInput,
            "must name each dimension once",
        ),
    ],
)
def test_a_definition_is_refused(
    fields: dict[str, object], error: type[FlowFabricError], message: str
) -> None:
    with pytest.raises(error, match=message):
        terms.check_definition(structs.replace(DEFINITION, **fields), NOW)


def test_updating_changes_what_is_named() -> None:
    before = account(
        hard={"a": 5, "b": 6}, soft={"a": 1}, usage={"a": 5}, reset_interval_ms=HOUR_MS
    )

    after = terms.updated(
        before,
        BudgetUpdate(hard_limits={"a": 9, "c": 1}, on_hard_limit="fail", reset_interval_ms=2_000),
        NOW,
    )

    assert (after.hard, after.soft, after.usage) == (
        {"a": 9, "b": 6, "c": 1},
        {"a": 1},
        {"a": 5},
    )
    assert after.budget == structs.replace(
        before.budget,
        on_hard_limit=rules.OnHardLimit.FAIL,
        reset_interval_ms=2_000,
        next_reset_at_ms=NOW + 2_000,
    )
    assert rules.is_closed(before)
    assert not rules.is_closed(after)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"hard_limits": {"a": -1}}, "must be 0 to"),
        ({"soft_limits": {"a": 6}}, "must not be above the hard limit of 5"),
        ({"hard_limits": {f"d{n}": 1 for n in range(64)}}, "too_many_dimensions"),
        ({"enforcement_mode": "x"}, "enforcement_mode"),
        ({"on_hard_limit": "x"}, "on_hard_limit"),
        ({"on_soft_limit": "x"}, "on_soft_limit"),
        ({"reset_interval_ms": 1}, "reset_interval_ms"),
    ],
)
def test_an_update_is_refused(update: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        terms.updated(account(hard={"a": 5}), structs.replace(BudgetUpdate(), **update), NOW)


def test_a_worker_s_usage_is_one_mapping() -> None:
    usage = UsageDimensions(
        input_tokens=3, output_tokens=4, wall_ms=5, custom={"cents": 2, "input_tokens": 1}
    )

    assert terms.check_usage(usage) == {
        "input_tokens": 4,
        "output_tokens": 4,
        "wall_ms": 5,
        "cents": 2,
    }
    assert terms.check_usage(UsageDimensions(custom={"cents": 2})) == {"cents": 2}


def test_deltas_of_one_dimension_are_summed() -> None:
    assert terms.check_deltas("report", ["a", "b", "a"], [1, 2, 3]) == {"a": 4, "b": 2}


@pytest.mark.parametrize(
    ("dimensions", "deltas", "message"),
    [
        (["a"], [1, 2], "report: dimensions and deltas length mismatch"),
        (["a"] * 65, [1] * 65, "too_many_dimensions: limit=64, got=65"),
        (["a", "a"], [2**53 - 1, 1], r"deltas\[a\]: must be 0 to"),
        (["a"], [-1], r"deltas\[a\]: must be 0 to"),
        ("a", [1], "dimensions: must be a list"),
        (["a"], 1, "deltas: must be a list"),
    ],
)
def test_deltas_are_refused(dimensions: object, deltas: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        terms.check_deltas("report", dimensions, deltas)


def test_a_repeat_is_told_what_the_first_report_was() -> None:
    told = SoftBreach(dimension="a", current_usage=2, soft_limit=1)
    stored = BudgetReport(
        budget_id=BUDGET_ID,
        settles=False,
        dedup_key="k",
        outcome=rules.encode_outcome(told),
        applied_at_ms=0,
        keep_until_ms=0,
    )

    assert rules.prior(stored) == UsageAlreadyApplied(prior_outcome=told)
