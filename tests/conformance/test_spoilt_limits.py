"""Limits and budgets whose rows do not make sense let nothing through."""

import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.budget_terms import BudgetDefinition
from flowfabric.core.budgets import Budget, BudgetReport
from flowfabric.core.decisions import Changes
from flowfabric.core.gates import Gate, GateName, GateOwner, LimitUse
from flowfabric.core.ids import named_budget_id
from flowfabric.core.limits import DeclaredLimit, QuotaPolicy, QuotaSpec
from flowfabric.core.records import Record
from flowfabric.errors import Corruption
from flowfabric.store.base import Transaction
from tests.conformance.given import WORKER, Given
from tests.conformance.observed import call, refused, unchanged

MAIL = DeclaredLimit(
    namespace="default",
    name="mail",
    spec=QuotaSpec(window_ms=60_000, max_requests_per_window=5, active_concurrency_cap=5),
)
TEAM_ID = named_budget_id("team", "default")
TEAM = BudgetDefinition(budget_id="team", hard_limits={"tokens": 10})


async def spoil(engine: Engine, record: type[Record], key: str, **fields: object) -> None:
    """Write what no operation would."""

    async def body(tx: Transaction) -> None:
        found = await tx.lock_one(record, (key,))
        assert found is not None
        await tx.save(Changes(updates=(structs.replace(found, **fields),)))

    await engine.store.transact(body)


@pytest.mark.parametrize("starts", ["", "5", '[["then", 1]]', "[[1, -1]]", "[[1]]"])
async def test_nothing_passes_a_gate_whose_starts_cannot_be_read(
    engine: Engine, given: Given, starts: str
) -> None:
    use = LimitUse(limit=MAIL)
    waiting, other = await given.waiting(limits=[use]), await given.waiting(lane_id="other")
    policy = MAIL.quota_policy_id
    await spoil(engine, Gate, use.gate.gate_id, starts=starts)
    asked: list[tuple[str, tuple[object, ...], dict[str, object]]] = [
        ("claim", (), {**WORKER}),
        ("claim_for_worker", (["default"],), {**WORKER}),
        ("issue_claim_grant", (waiting,), {**WORKER}),
        ("check_admission", (policy, other), {}),
        ("list_limit_use", (policy,), {}),
        ("explain_execution", (waiting,), {}),
    ]
    for name, arguments, named in asked:
        async with refused(engine, Corruption):
            await call(engine, name, *arguments, **named)
    seen = {each.execution_id: each for each in (await engine.find_executions()).executions}
    assert "do not decode" in (seen[waiting].blocking_detail or "")
    assert seen[other].blocking_reason == "waiting_for_worker"
    await engine.issue_grant_and_claim(waiting)


@pytest.mark.parametrize(
    "field",
    ["window_ms", "max_requests_per_window", "active_concurrency_cap", "jitter_ms"],
)
async def test_no_store_takes_a_limit_below_nothing(engine: Engine, field: str) -> None:
    await engine.declare_limits([MAIL])
    before = await engine.read_limit("mail")
    with pytest.raises(Exception, match=r"(?i)check|constraint"):
        await spoil(engine, QuotaPolicy, MAIL.quota_policy_id, **{field: -1})
    assert await engine.read_limit("mail") == before


async def test_a_declaration_that_cannot_be_read_is_not_gone_back_to(engine: Engine) -> None:
    await engine.declare_limits([MAIL])
    stored = await engine.set_limit("mail", active_concurrency_cap=1)
    await spoil(engine, QuotaPolicy, MAIL.quota_policy_id, declared="{")
    with pytest.raises(Corruption, match="mail"):
        await engine.reset_limit("mail")
    assert (await engine.read_limit("mail")).spec == stored.spec


@pytest.mark.parametrize(
    "fields",
    [
        {"hard_limits": "none"},
        {"hard_limits": '{"tokens": -1}'},
        {"hard_limits": '{"tokens": "many"}'},
        {"soft_limits": "[]"},
        {"usage": ""},
        {"usage": '{"tokens": -1}'},
        {"reserved": "{"},
    ],
)
async def test_a_budget_whose_amounts_cannot_be_read_counts_and_opens_nothing(
    engine: Engine, given: Given, fields: dict[str, object]
) -> None:
    await engine.create_budget(TEAM)
    await given.waiting(gates=[GateName(GateOwner.BUDGET, TEAM_ID)])
    await engine.report_usage_admin("team", ["tokens"], [10])
    await spoil(engine, Budget, TEAM_ID, **fields)
    asked: list[tuple[str, tuple[object, ...]]] = [
        ("report_usage_admin", ("team", ["tokens"], [1])),
        ("reset_budget", ("team",)),
        ("get_budget_status", ("team",)),
    ]
    for operation, arguments in asked:
        async with refused(engine, Corruption):
            await call(engine, operation, *arguments)
    async with unchanged(engine):
        assert await engine.claim(**WORKER) is None
        assert await engine.claim_for_worker(["default"], **WORKER) is None


async def test_a_report_whose_outcome_cannot_be_read_is_not_counted_again(engine: Engine) -> None:
    await engine.create_budget(TEAM)
    await engine.report_usage_admin("team", ["tokens"], [3], dedup_key="once")
    stored = (TEAM_ID, False, "once")

    async def body(tx: Transaction) -> None:
        found = await tx.lock_one(BudgetReport, stored)
        assert found is not None
        await tx.save(Changes(updates=(structs.replace(found, outcome="fine"),)))

    await engine.store.transact(body)
    with pytest.raises(Corruption, match="outcome"):
        await engine.report_usage_admin("team", ["tokens"], [3], dedup_key="once")
    assert (await engine.get_budget_status("team")).usage == {"tokens": 3}
