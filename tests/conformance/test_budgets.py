"""Budgets: what is counted, refused, held, given back and reset, on every store."""

import asyncio

import pytest
from msgspec import structs

from flowfabric import Engine, connect
from flowfabric.core.budget_terms import BudgetDefinition, BudgetUpdate, UsageDimensions
from flowfabric.core.budgets import (
    KEPT_MS,
    BudgetScope,
    EnforcementMode,
    HardBreach,
    OnHardLimit,
    OnSoftLimit,
    Reserved,
    SoftBreach,
    UsageAlreadyApplied,
    UsageCounted,
)
from flowfabric.engine.budgets import BudgetReset, BudgetStatus, UsageAndLimits
from flowfabric.engine.ledger import BudgetRequest, Reservation, Settlement, Spend, Usage
from flowfabric.errors import (
    BudgetExists,
    FlowFabricError,
    InvalidBudgetScope,
    InvalidHandle,
    InvalidInput,
    NotFound,
)
from flowfabric.reconcilers import due_among, run_due
from flowfabric.testing import SettableClock
from tests.conformance.given import NOBODY, UNKNOWN_ID, Given

HOUR_MS = 3_600_000
TEAM = BudgetDefinition(budget_id="team", hard_limits={"tokens": 100}, soft_limits={"tokens": 80})


async def report(engine: Engine, tokens: int, key: str | None = None) -> object:
    return await engine.report_usage_admin("team", ["tokens"], [tokens], dedup_key=key)


async def spend(engine: Engine, execution_id: str, tokens: int, key: str) -> object:
    return await engine.record_spend("team", execution_id, {"tokens": tokens}, idempotency_key=key)


async def usage(engine: Engine, budget: str = "team") -> dict[str, int]:
    return (await engine.get_budget_status(budget)).usage


# Created, changed, seen


async def test_a_budget_is_created_as_defined(engine: Engine, clock: SettableClock) -> None:
    definition = BudgetDefinition(
        budget_id="team",
        namespace="shop",
        scope_type="lane",
        scope_id="gpu",
        enforcement_mode="hard",
        on_hard_limit="fail",
        on_soft_limit="allow",
        reset_interval_ms=HOUR_MS,
        dimensions=["tokens", "cents"],
        hard_limits=[100, 0],
        soft_limits=[80, 5],
    )

    created = await engine.create_budget(definition)

    assert (created.change, created.differs) == ("created", False)
    assert await engine.get_budget_status("team", namespace="shop") == BudgetStatus(
        budget_id=created.budget.budget_id,
        namespace="shop",
        name="team",
        declared=True,
        scope_type=BudgetScope.LANE,
        scope_id="gpu",
        enforcement_mode=EnforcementMode.STRICT,
        on_hard_limit=OnHardLimit.FAIL,
        on_soft_limit=OnSoftLimit.ALLOW,
        usage={},
        reserved={},
        hard_limits={"tokens": 100, "cents": 0},
        soft_limits={"tokens": 80, "cents": 5},
        closed=False,
        breach_count=0,
        soft_breach_count=0,
        last_breach_at_ms=None,
        last_breach_dim=None,
        reset_interval_ms=HOUR_MS,
        reset_count=0,
        last_reset_at_ms=None,
        next_reset_at_ms=clock.now_ms() + HOUR_MS,
        created_at_ms=clock.now_ms(),
        updated_at_ms=clock.now_ms(),
    )
    assert await engine.read_budget_usage_and_limits("team", namespace="shop") == UsageAndLimits(
        usage={}, hard_limits={"tokens": 100, "cents": 0}, soft_limits={"tokens": 80, "cents": 5}
    )
    by_id = await engine.get_budget_status(created.budget.budget_id)
    assert by_id == await engine.get_budget_status("team", namespace="shop")


async def test_creating_again_changes_nothing_and_says_whether_it_differs(engine: Engine) -> None:
    await engine.create_budget(TEAM)
    await report(engine, 60)

    same = await engine.create_budget(TEAM)
    other = await engine.create_budget(
        structs.replace(TEAM, hard_limits={"tokens": 7}, soft_limits={})
    )

    assert (same.change, same.differs) == ("already_satisfied", False)
    assert (other.change, other.differs) == ("already_satisfied", True)
    status = await engine.get_budget_status("team")
    assert (status.hard_limits, status.usage) == ({"tokens": 100}, {"tokens": 60})


async def test_creating_again_may_be_refused_where_terms_differ(engine: Engine) -> None:
    await engine.create_budget(TEAM)

    assert (await engine.create_budget(TEAM, if_exists="error")).change == "already_satisfied"
    refusal = (
        "budget team exists already, under other terms; change them with app.budgets.change or"
        " flowfabric budgets set team"
    )
    with pytest.raises(BudgetExists, match=refusal):
        await engine.create_budget(structs.replace(TEAM, on_hard_limit="fail"), if_exists="error")
    with pytest.raises(InvalidInput, match="if_exists"):
        await engine.create_budget(TEAM, if_exists="explode")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"scope_type": "planet"}, InvalidBudgetScope),
        ({"scope_type": "lane", "scope_id": "ü"}, InvalidBudgetScope),
        ({"hard_limits": {"tokens": -1}}, InvalidInput),
        ({"dimensions": ["tokens"], "hard_limits": [1, 2], "soft_limits": [1]}, InvalidInput),
        ({"budget_id": ""}, InvalidInput),
        ({"reset_interval_ms": 1}, InvalidInput),
    ],
)
async def test_a_definition_that_is_refused_leaves_nothing(
    engine: Engine, fields: dict[str, object], error: type[FlowFabricError]
) -> None:
    with pytest.raises(error):
        await engine.create_budget(structs.replace(TEAM, **fields))

    assert (await engine.list_budgets()).budgets == ()


async def test_what_was_reported_before_a_budget_was_created_counts(engine: Engine) -> None:
    assert await report(engine, 100) == UsageCounted(undeclared=True)
    assert not (await engine.get_budget_status("team")).declared

    assert (await engine.create_budget(TEAM)).change == "created"

    status = await engine.get_budget_status("team")
    assert (status.declared, status.usage, status.closed) == (True, {"tokens": 100}, True)
    assert isinstance(await report(engine, 1), HardBreach)


async def test_an_undeclared_budget_may_be_refused(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    with pytest.raises(NotFound, match="budget not found: team"):
        await engine.report_usage_admin("team", ["tokens"], [1], require_declared=True)
    with pytest.raises(NotFound, match="budget not found: team"):
        await engine.report_usage(
            claimed.handle, "team", UsageDimensions(input_tokens=1), require_declared=True
        )


async def test_budgets_that_are_not_there(engine: Engine) -> None:
    for asked in (
        engine.get_budget_status("nobody"),
        engine.read_budget_usage_and_limits("nobody"),
        engine.reset_budget("nobody"),
        engine.remove_budget("nobody"),
        engine.update_budget("nobody", BudgetUpdate(hard_limits={"a": 1})),
        engine.get_budget_status(NOBODY),
    ):
        with pytest.raises(NotFound, match="budget not found"):
            await asked
    await engine.release_budget("nobody", UNKNOWN_ID)
    assert (await engine.list_budgets()).budgets == ()


async def test_a_budget_is_changed_while_it_is_used(engine: Engine, clock: SettableClock) -> None:
    await engine.create_budget(TEAM)
    await report(engine, 100)
    assert (await engine.get_budget_status("team")).closed

    raised = await engine.update_budget(
        "team",
        BudgetUpdate(hard_limits={"tokens": 150}, on_hard_limit="fail", reset_interval_ms=HOUR_MS),
    )

    assert (raised.hard_limits, raised.usage, raised.closed) == (
        {"tokens": 150},
        {"tokens": 100},
        False,
    )
    assert raised.next_reset_at_ms == clock.now_ms() + HOUR_MS
    assert raised == await engine.get_budget_status("team")
    with pytest.raises(InvalidInput, match="soft_limits"):
        await engine.update_budget("team", BudgetUpdate(soft_limits={"tokens": 151}))


async def test_budgets_are_listed_page_by_page(engine: Engine) -> None:
    for namespace, name in (("b", "x"), ("a", "y"), ("a", "x")):
        await engine.create_budget(BudgetDefinition(budget_id=name, namespace=namespace))

    first = await engine.list_budgets(limit=2)
    second = await engine.list_budgets(limit=2, cursor=first.next_cursor)

    assert [(each.namespace, each.name) for each in first.budgets] == [("a", "x"), ("a", "y")]
    assert [(each.namespace, each.name) for each in second.budgets] == [("b", "x")]
    assert second.next_cursor is None
    one = await engine.list_budgets(namespace="b")
    assert [each.name for each in one.budgets] == ["x"]
    with pytest.raises(InvalidInput, match="limit"):
        await engine.list_budgets(limit=1_001)


# Reported


async def test_reports_pass_the_soft_limit_and_stop_at_the_hard_one(
    engine: Engine, clock: SettableClock
) -> None:
    await engine.create_budget(TEAM)

    assert await report(engine, 60) == UsageCounted()
    assert await report(engine, 25) == SoftBreach(
        dimension="tokens", current_usage=85, soft_limit=80
    )
    assert await report(engine, 50) == HardBreach(
        dimension="tokens", current_usage=85, hard_limit=100
    )

    status = await engine.get_budget_status("team")
    assert (status.usage, status.breach_count, status.soft_breach_count) == ({"tokens": 85}, 1, 1)
    assert (status.last_breach_at_ms, status.last_breach_dim) == (clock.now_ms(), "tokens")


async def test_what_lands_exactly_on_a_limit_is_within_it(engine: Engine) -> None:
    await engine.create_budget(TEAM)

    for _ in range(2):
        assert await report(engine, 80) == UsageCounted()
        assert isinstance(await report(engine, 20), SoftBreach)
        assert isinstance(await report(engine, 1), HardBreach)
        await engine.reset_budget("team")

    status = await engine.get_budget_status("team")
    assert (status.breach_count, status.soft_breach_count, status.reset_count) == (2, 2, 2)


async def test_a_breach_in_one_dimension_moves_none(engine: Engine) -> None:
    await engine.create_budget(TEAM)

    outcome = await engine.report_usage_admin("team", ["cents", "tokens"], [5, 101])

    assert outcome == HardBreach(dimension="tokens", current_usage=0, hard_limit=100)
    assert await usage(engine) == {}


async def test_the_sum_of_a_dimension_named_twice_is_what_counts(engine: Engine) -> None:
    await engine.create_budget(TEAM)

    assert isinstance(
        await engine.report_usage_admin("team", ["tokens", "tokens"], [60, 60]), HardBreach
    )
    assert await engine.report_usage_admin("team", ["tokens", "tokens"], [30, 30]) == UsageCounted()
    assert await usage(engine) == {"tokens": 60}


async def test_a_key_is_counted_once_per_budget(engine: Engine) -> None:
    await engine.create_budget(TEAM)

    assert await report(engine, 60, "call-1") == UsageCounted()
    assert await report(engine, 25, "call-2") == SoftBreach(
        dimension="tokens", current_usage=85, soft_limit=80
    )
    assert await report(engine, 60, "call-1") == UsageAlreadyApplied(prior_outcome=UsageCounted())
    assert await report(engine, 1, "call-2") == UsageAlreadyApplied(
        prior_outcome=SoftBreach(dimension="tokens", current_usage=85, soft_limit=80)
    )
    assert await engine.report_usage_admin("other", ["tokens"], [1], dedup_key="call-1") == (
        UsageCounted(undeclared=True)
    )
    assert await report(engine, 1, "") == SoftBreach(
        dimension="tokens", current_usage=86, soft_limit=80
    )
    assert await usage(engine) == {"tokens": 86}


async def test_a_refused_report_may_be_repeated_once_there_is_room(engine: Engine) -> None:
    await engine.create_budget(TEAM)
    await report(engine, 60)
    assert isinstance(await report(engine, 50, "call"), HardBreach)
    await engine.reset_budget("team")

    assert await report(engine, 50, "call") == UsageCounted()


async def test_a_key_is_forgotten_after_a_day(engine: Engine, clock: SettableClock) -> None:
    await report(engine, 1, "call")
    clock.advance(ms=KEPT_MS - 1)
    assert isinstance(await report(engine, 1, "call"), UsageAlreadyApplied)
    clock.advance(ms=1)

    assert due_among(await engine.next_due()) == ["budget_retention"]
    assert await report(engine, 1, "call") == UsageCounted(undeclared=True)
    assert await usage(engine) == {"tokens": 2}
    clock.advance(ms=KEPT_MS)
    await run_due(engine)
    assert "budget_retention" not in await engine.next_due()


async def test_the_key_of_an_execution_holds_as_long_as_it_exists(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    claimed = await given.running(ttl_ms=60_000)
    used = UsageDimensions(input_tokens=5, dedup_key="call")
    await engine.report_usage(claimed.handle, "team", used)
    await engine.record_spend("team", claimed.execution_id, {"cents": 1}, idempotency_key="spend")
    await engine.complete(claimed.handle, None)

    for _ in range(6):
        clock.advance(ms=KEPT_MS)
        await run_due(engine)
        assert isinstance(
            await engine.report_usage(claimed.handle, "team", used), UsageAlreadyApplied
        )
    clock.advance(ms=2 * KEPT_MS)
    await run_due(engine)
    clock.advance(ms=2 * KEPT_MS)
    await run_due(engine)

    assert "budget_retention" not in await engine.next_due()
    assert isinstance(await engine.report_usage(claimed.handle, "team", used), UsageCounted)


async def test_a_worker_reports_tokens_and_time_whatever_became_of_its_lease(
    engine: Engine, given: Given
) -> None:
    claimed = await given.completed()

    outcome = await engine.report_usage(
        claimed.handle,
        "team",
        UsageDimensions(input_tokens=3, output_tokens=4, wall_ms=5, custom={"cents": 2}),
    )

    assert outcome == UsageCounted(undeclared=True)
    assert await usage(engine) == {"input_tokens": 3, "output_tokens": 4, "wall_ms": 5, "cents": 2}


async def test_advisory_limits_count_and_stop_nothing(engine: Engine) -> None:
    await engine.create_budget(structs.replace(TEAM, enforcement_mode="warn"))

    outcome = await report(engine, 120)

    assert outcome == SoftBreach(dimension="tokens", current_usage=120, soft_limit=100)
    status = await engine.get_budget_status("team")
    assert (status.usage, status.breach_count, status.closed) == ({"tokens": 120}, 1, False)


async def test_five_reports_warn_once_then_stop_below_the_limit(engine: Engine) -> None:
    await engine.create_budget(
        BudgetDefinition(
            budget_id="team", hard_limits={"tokens": 1_200}, soft_limits={"tokens": 800}
        )
    )

    outcomes = [type(await report(engine, 350)) for _ in range(5)]

    assert outcomes == [UsageCounted, UsageCounted, SoftBreach, HardBreach, HardBreach]
    assert await usage(engine) == {"tokens": 1_050}


async def test_concurrent_reports_use_up_a_budget_exactly(engine: Engine) -> None:
    await engine.create_budget(structs.replace(TEAM, soft_limits={}))

    outcomes = await asyncio.gather(*(report(engine, 7) for _ in range(40)))

    assert outcomes.count(UsageCounted()) == 14
    assert await usage(engine) == {"tokens": 98}


async def test_processes_that_report_first_at_once_count_into_one_budget(
    store_url: str, engine: Engine
) -> None:
    async with await connect(store_url) as other:
        if store_url.endswith(":memory:"):
            other = engine
        await asyncio.gather(*(report(each, 1) for each in (engine, other) * 10))

    assert await usage(engine) == {"tokens": 20}


@pytest.mark.parametrize(
    ("dimensions", "deltas", "message"),
    [
        (["tokens"], [1, 2], "report_usage_admin: dimensions and deltas length mismatch"),
        (["tokens"], [-1], "must be 0 to"),
        (["tokens"], [2**53], "must be 0 to"),
        (["tokens"], [True], "must be an integer"),
        (["_init"], [1], "must not begin with _"),
        (["d"] * 65, [1] * 65, "too_many_dimensions: limit=64, got=65"),
    ],
)
async def test_bad_reports_are_refused(
    engine: Engine, dimensions: list[str], deltas: list[int], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        await engine.report_usage_admin("team", dimensions, deltas)

    assert (await engine.list_budgets()).budgets == ()


async def test_bad_handles_and_keys_are_refused(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    with pytest.raises(InvalidHandle):
        await engine.report_usage(b"nonsense", "team", UsageDimensions(input_tokens=1))
    with pytest.raises(InvalidInput, match="dedup_key"):
        await report(engine, 1, "k" * 513)
    with pytest.raises(InvalidInput, match="budget_id"):
        await engine.report_usage_admin(" ", ["tokens"], [1])
    with pytest.raises(InvalidInput, match="idempotency_key"):
        await spend(engine, UNKNOWN_ID, 1, "")
    with pytest.raises(InvalidInput, match="execution_id"):
        await spend(engine, "{fp:}", 1, "k")
    with pytest.raises(InvalidInput, match="reservation_id"):
        await engine.reserve_budget(claimed.handle, "team", {"tokens": 1}, reservation_id="")


async def test_a_batch_answers_each_request_on_its_own(engine: Engine, given: Given) -> None:
    claimed = await given.running()
    await engine.create_budget(TEAM)
    requests: list[BudgetRequest] = [
        Usage(budget_id="team", amounts={"tokens": 10}, dedup_key="a"),
        Usage(budget_id="team", amounts={"tokens": -1}),
        Usage(budget_id="team", amounts={"tokens": 10}, dedup_key="a"),
        Reservation(
            handle=claimed.handle, budget_id="team", amounts={"tokens": 90}, reservation_id="r"
        ),
        Usage(budget_id="team", amounts={"tokens": 1}),
        Settlement(budget_id="team", reservation_id="r", used={"tokens": 5}),
        Spend(
            budget_id="team",
            execution_id=claimed.execution_id,
            deltas={"tokens": 1},
            idempotency_key="s",
        ),
        Usage(budget_id="other", amounts={"tokens": 1}),
    ]

    outcomes = await engine.post_to_budgets(requests)

    assert isinstance(outcomes[1], InvalidInput)
    assert [outcomes[0], *outcomes[2:]] == [
        UsageCounted(),
        UsageAlreadyApplied(prior_outcome=UsageCounted()),
        Reserved(),
        HardBreach(dimension="tokens", current_usage=10, hard_limit=100, reserved=90),
        UsageCounted(),
        UsageCounted(),
        UsageCounted(undeclared=True),
    ]
    status = await engine.get_budget_status("team")
    assert (status.usage, status.reserved) == ({"tokens": 16}, {})


# Spent and given back


async def test_spends_are_given_back_exactly_once(engine: Engine) -> None:
    await engine.create_budget(TEAM)
    other = UNKNOWN_ID.replace("0000", "0001", 1)

    assert await spend(engine, UNKNOWN_ID, 30, "a") == UsageCounted()
    assert await spend(engine, UNKNOWN_ID, 10, "b") == UsageCounted()
    assert isinstance(await spend(engine, UNKNOWN_ID, 10, "b"), UsageAlreadyApplied)
    assert await spend(engine, other, 7, "c") == UsageCounted()
    await report(engine, 1)
    assert isinstance(await spend(engine, UNKNOWN_ID, 60, "d"), HardBreach)
    assert await usage(engine) == {"tokens": 48}

    await engine.release_budget("team", UNKNOWN_ID)
    await engine.release_budget("team", UNKNOWN_ID)

    assert await usage(engine) == {"tokens": 8}
    await engine.release_budget("team", other)
    assert await usage(engine) == {"tokens": 1}


async def test_giving_back_after_a_reset_leaves_what_others_have_spent_since(
    engine: Engine,
) -> None:
    await spend(engine, UNKNOWN_ID, 30, "a")
    await engine.reset_budget("team")
    await report(engine, 20)

    await engine.release_budget("team", UNKNOWN_ID)

    assert await usage(engine) == {"tokens": 20}


async def test_only_the_spends_of_this_period_are_given_back(engine: Engine) -> None:
    await spend(engine, UNKNOWN_ID, 30, "a")
    await engine.reset_budget("team")
    await report(engine, 20)
    await spend(engine, UNKNOWN_ID, 5, "b")

    await engine.release_budget("team", UNKNOWN_ID)

    assert await usage(engine) == {"tokens": 20}


async def test_giving_back_opens_a_budget_again(engine: Engine) -> None:
    await engine.create_budget(TEAM)
    await spend(engine, UNKNOWN_ID, 100, "a")
    assert (await engine.get_budget_status("team")).closed

    await engine.release_budget("team", UNKNOWN_ID)

    assert not (await engine.get_budget_status("team")).closed


# Reset


async def test_a_reset_starts_a_new_period(engine: Engine, clock: SettableClock) -> None:
    await engine.create_budget(structs.replace(TEAM, reset_interval_ms=HOUR_MS))
    next_ms = clock.now_ms() + HOUR_MS
    await report(engine, 100)
    await report(engine, 1)
    clock.advance(ms=10)

    assert await engine.reset_budget("team") == BudgetReset(next_reset_at_ms=next_ms)

    status = await engine.get_budget_status("team")
    assert (status.usage, status.closed, status.reset_count) == ({"tokens": 0}, False, 1)
    assert (status.last_reset_at_ms, status.next_reset_at_ms) == (clock.now_ms(), next_ms)
    assert (status.last_breach_at_ms, status.last_breach_dim) == (None, None)
    assert (status.breach_count, status.soft_breach_count) == (1, 1)


async def test_a_budget_without_an_interval_is_reset_by_hand_alone(
    engine: Engine, clock: SettableClock
) -> None:
    await engine.create_budget(TEAM)
    await report(engine, 5)

    assert "budget_reset" not in await engine.next_due()
    assert await engine.reset_budget("team") == BudgetReset(next_reset_at_ms=0)
    assert await usage(engine) == {"tokens": 0}


async def test_due_resets_come_by_themselves_without_drift(
    engine: Engine, clock: SettableClock
) -> None:
    created_ms = clock.now_ms()
    await engine.create_budget(structs.replace(TEAM, reset_interval_ms=HOUR_MS))
    later = structs.replace(TEAM, budget_id="later", reset_interval_ms=10 * HOUR_MS)
    await engine.create_budget(later)
    await report(engine, 5)
    await engine.report_usage_admin("later", ["tokens"], [5])

    clock.advance(ms=HOUR_MS - 1)
    assert (await run_due(engine)).get("budget_reset") is None
    clock.advance(ms=3 * HOUR_MS)
    assert await run_due(engine) == {"budget_reset": 1}

    status = await engine.get_budget_status("team")
    assert (status.usage, status.reset_count) == ({"tokens": 0}, 1)
    assert status.next_reset_at_ms == created_ms + 4 * HOUR_MS
    assert await usage(engine, "later") == {"tokens": 5}
    assert (await engine.reset_due_budgets()).acted == 0
