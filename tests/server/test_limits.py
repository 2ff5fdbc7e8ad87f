"""Budgets, quotas and grants over HTTP."""

import httpx

from flowfabric import Engine
from flowfabric.core.budget_terms import BudgetDefinition
from flowfabric.core.creation import NewExecution
from tests.conformance.given import Given
from tests.server.test_access import token

BUDGET_ID = "33333333-3333-4333-8333-333333333333"
BUDGET = {
    "budget_id": BUDGET_ID,
    "scope_type": "tenant",
    "scope_id": "t",
    "enforcement_mode": "strict",
    "on_hard_limit": "reject",
    "on_soft_limit": "warn",
    "reset_interval_ms": 0,
    "dimensions": ["tokens"],
    "hard_limits": [10],
    "soft_limits": [5],
    "now": 0,
}
QUOTA = {
    "quota_policy_id": BUDGET_ID,
    "window_seconds": 60,
    "max_requests_per_window": 5,
    "max_concurrent": 1,
    "now": 0,
}
WORK = {"lane_id": "default", "worker_instance_id": "w-1", "grant_ttl_ms": 5_000}


async def test_a_budget_is_created_counted_and_reset(http: httpx.AsyncClient) -> None:
    usage = f"/v1/budgets/{BUDGET_ID}/usage"

    created = await http.post("/v1/budgets", json=BUDGET)
    again = await http.post("/v1/budgets", json=BUDGET)
    counted = await http.post(usage, json={"dimensions": {"tokens": 3}, "dedup_key": "k"})
    repeated = await http.post(usage, json={"dimensions": {"tokens": 3}, "dedup_key": "k"})
    soft = await http.post(usage, json={"dimensions": {"tokens": 4}})
    hard = await http.post(usage, json={"dimensions": {"tokens": 9}})
    status = (await http.get(f"/v1/budgets/{BUDGET_ID}")).json()
    reset = await http.post(f"/v1/budgets/{BUDGET_ID}/reset")

    assert (created.status_code, created.json()) == (201, {"Created": {"budget_id": BUDGET_ID}})
    assert (again.status_code, list(again.json())) == (200, ["AlreadySatisfied"])
    assert (counted.json(), repeated.json()) == ("Ok", "AlreadyApplied")
    assert soft.json()["SoftBreach"]["current_usage"] == 7
    assert hard.json()["HardBreach"]["hard_limit"] == 10
    assert (status["usage"], status["breach_count"]) == ({"tokens": 7}, 1)
    assert isinstance(status["last_breach_at"], str)
    assert "Reset" in reset.json()


async def test_the_terms_of_a_budget_are_changed(http: httpx.AsyncClient) -> None:
    await http.post("/v1/budgets", json=BUDGET)
    await http.post(f"/v1/budgets/{BUDGET_ID}/usage", json={"dimensions": {"tokens": 3}})
    path = f"/v1/budgets/{BUDGET_ID}"

    changed = await http.patch(path, json={"hard_limits": {"tokens": 20, "calls": 2}})
    wrong = await http.patch(path, json={"hard_limits": {"tokens": -1}})
    large = await http.patch(path, json={"hard_limits": {"tokens": 2**63}})
    missing = await http.patch("/v1/budgets/nobodys", json={"hard_limits": {"tokens": 1}})

    assert changed.json()["hard_limits"] == {"tokens": 20, "calls": 2}
    assert (changed.json()["soft_limits"], changed.json()["usage"]["tokens"]) == ({"tokens": 5}, 3)
    assert (wrong.status_code, large.status_code, missing.status_code) == (400, 400, 404)


async def test_a_budget_that_is_not_there_is_not_found(http: httpx.AsyncClient) -> None:
    assert (await http.get(f"/v1/budgets/{BUDGET_ID}")).status_code == 404
    assert (await http.post("/v1/budgets", json={"budget_id": ""})).status_code == 400
    assert (await http.post("/v1/budgets", json={})).status_code == 422


async def test_a_quota_policy_is_created_once(http: httpx.AsyncClient, engine: Engine) -> None:
    created = await http.post("/v1/quotas", json=QUOTA)
    again = await http.post("/v1/quotas", json=QUOTA)

    assert (created.status_code, list(created.json())) == (201, ["Created"])
    assert (again.status_code, list(again.json())) == (200, ["AlreadySatisfied"])
    limits = await engine.read_quota_policy_limits(BUDGET_ID)
    assert limits is not None
    assert limits.active_concurrency_cap == 1


async def test_a_quota_policy_may_keep_the_slots_of_what_is_suspended(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    asked = QUOTA | {"while_suspended": "keep", "jitter_ms": 50}
    refused = await http.post("/v1/quotas", json=asked | {"while_suspended": "maybe"})
    created = await http.post("/v1/quotas", json=asked)

    assert (refused.status_code, created.status_code) == (422, 201)
    limits = await engine.read_quota_policy_limits(BUDGET_ID)
    assert limits is not None
    assert (limits.while_suspended, limits.jitter_ms) == ("keep", 50)


async def test_a_worker_is_granted_what_it_claims(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    nothing = await http.post("/v1/workers/w/claim", json=WORK)
    execution_id = await given.waiting()
    granted = (await http.post("/v1/workers/w/claim", json=WORK)).json()

    assert nothing.status_code == 204
    assert granted["execution_id"] == execution_id
    claimed = await engine.claim_execution(
        execution_id, worker_id="w", worker_instance_id="w-1", grant_key=granted["grant_key"]
    )
    assert claimed.execution_id == execution_id


async def test_claims_that_are_wrong_are_refused(http: httpx.AsyncClient) -> None:
    for wrong in ({"lane_id": ""}, {"worker_instance_id": "a b"}, {"capabilities": ["a,b"]}):
        assert (await http.post("/v1/workers/w/claim", json=WORK | wrong)).status_code == 400
    for ttl in (0, 60_001):
        answer = await http.post("/v1/workers/w/claim", json=WORK | {"grant_ttl_ms": ttl})
        assert answer.status_code in (400, 422)


async def test_what_a_worker_lost_is_granted_to_another(
    http: httpx.AsyncClient, given: Given
) -> None:
    lost, running = await given.revoked(), await given.running()
    body = WORK | {"worker_id": "w"}

    granted = await http.post(f"/v1/executions/{lost.execution_id}/reclaim", json=body)
    refused = await http.post(f"/v1/executions/{running.execution_id}/reclaim", json=body)
    missing = await http.post(f"/v1/executions/{BUDGET_ID}/reclaim", json=body)

    assert granted.json()["status"] == "granted"
    assert refused.json()["status"] == "not_reclaimable"
    assert missing.status_code == 404


async def test_a_confined_caller_reaches_no_budget_elsewhere(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    await engine.create_budget(BudgetDefinition(budget_id=BUDGET_ID, namespace="shop"))
    await engine.create_execution(NewExecution(execution_kind="x", namespace="shop"))
    headers = await token(engine, "admin", namespace="other")
    path = f"/v1/budgets/{BUDGET_ID}"
    usage = {"dimensions": {"tokens": 1}}

    answers = [
        await http.get(path, headers=headers),
        await http.post(f"{path}/usage", json=usage, headers=headers),
        await http.post(f"{path}/reset", headers=headers),
        await http.post("/v1/budgets", json=BUDGET, headers=headers),
        await http.post(
            "/v1/operations/get_budget_status", json={"budget_id": BUDGET_ID}, headers=headers
        ),
        await http.post(
            "/v1/operations/create_executions",
            json={
                "requests": [
                    {
                        "execution_kind": "x",
                        "namespace": "other",
                        "policy": {"budget_ids": [BUDGET_ID]},
                    }
                ]
            },
            headers=headers,
        ),
    ]
    work = await http.post("/v1/workers/w/claim", json=WORK, headers=headers)

    assert [each.status_code for each in answers] == [404] * len(answers)
    assert work.status_code == 204
    assert (await engine.get_budget_status(BUDGET_ID, namespace="shop")).usage == {}
