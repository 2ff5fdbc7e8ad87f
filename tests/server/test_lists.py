"""Lists over HTTP: each is read to its end, page by page, and is of whom it concerns."""

import httpx
import pytest

from flowfabric import Engine
from flowfabric.core.budget_terms import BudgetDefinition
from flowfabric.core.creation import NewExecution
from flowfabric.core.limits import DeclaredLimit, QuotaSpec
from flowfabric.core.schedules import ScheduleDefinition
from flowfabric.core.states import PublicState
from flowfabric.core.steps import NewStep
from flowfabric.engine.steps import StepReport
from tests.conformance.given import UNKNOWN_ID, Given
from tests.server.test_access import token

COUNT = 3


async def fill(engine: Engine, given: Given, namespace: str) -> str:
    """Three of everything; the execution that has three steps, attempts and children."""
    for number in range(COUNT):
        name = f"{namespace}-{number}"
        await engine.upsert_schedule(
            ScheduleDefinition(
                schedule_id=name,
                execution_kind="x",
                cron="0 3 * * *",
                namespace=namespace,
                tags={"a": "b"},
            )
        )
        await engine.set_limit(name, namespace=namespace, active_concurrency_cap=1)
        await engine.create_budget(BudgetDefinition(budget_id=name, namespace=namespace))
        await engine.register_worker(
            ["default"],
            worker_id="w",
            worker_instance_id=name,
            liveness_ttl_ms=60_000,
            namespace=namespace,
        )
    claimed = await given.running(namespace=namespace)
    for number in range(COUNT):
        await engine.create_execution(
            NewExecution(
                execution_kind=f"child-{number}",
                namespace=namespace,
                parent_execution_id=claimed.execution_id,
            )
        )
        step = NewStep(step_key=f"s{number}", after_key=f"s{number - 1}" if number else None)
        await engine.record_steps([StepReport(handle=claimed.handle, step=step)])
    return claimed.execution_id


async def read_all(
    http: httpx.AsyncClient, path: str, kind: str, headers: dict[str, str], **query: str
) -> list[dict[str, object]]:
    """One by one, to the end."""
    found: list[dict[str, object]] = []
    cursor: str | None = None
    while True:
        asked = query | {"limit": "1"} | ({} if cursor is None else {"cursor": cursor})
        answer = await http.get(path, params=asked, headers=headers)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        assert len(page[kind]) <= 1
        found += page[kind]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


LISTS = {
    "schedules": ("/v1/schedules", "schedule_id"),
    "limits": ("/v1/limits", "name"),
    "budgets": ("/v1/budgets", "name"),
    "workers": ("/v1/workers", "worker_instance_id"),
}


@pytest.mark.parametrize("kind", LISTS)
async def test_a_list_is_read_to_its_end_by_whom_it_concerns(
    http: httpx.AsyncClient, engine: Engine, given: Given, kind: str
) -> None:
    path, name = LISTS[kind]
    for namespace in ("other", "shop"):
        await fill(engine, given, namespace)
    everything = await token(engine, "read")
    confined = await token(engine, "read", namespace="shop")
    shop = [f"shop-{number}" for number in range(COUNT)]
    other = [f"other-{number}" for number in range(COUNT)]

    found = await read_all(http, path, kind, everything)
    of_shop = await read_all(http, path, kind, everything, namespace="shop")
    mine = await read_all(http, path, kind, confined)
    denied = await http.get(path, params={"namespace": "other"}, headers=confined)
    wrong = await http.get(path, params={"cursor": "nonsense"}, headers=everything)

    assert sorted(str(each[name]) for each in found) == other + shop
    assert [each[name] for each in of_shop] == [each[name] for each in mine] == shop
    assert denied.status_code == 403
    assert (wrong.status_code, wrong.json()["field"]) == (400, "cursor")


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("steps", "step_key", ["s0", "s1", "s2"]),
        ("children", "execution_kind", ["child-0", "child-1", "child-2"]),
        ("attempts", "attempt_index", [0]),
    ],
)
async def test_what_belongs_to_an_execution_is_read_to_its_end(
    http: httpx.AsyncClient,
    engine: Engine,
    given: Given,
    kind: str,
    name: str,
    expected: list[object],
) -> None:
    execution_id = await fill(engine, given, "shop")
    path = f"/v1/executions/{execution_id}/{kind}"

    found = await read_all(http, path, kind, await token(engine, "read", namespace="shop"))
    at_once = await http.get(path, headers=await token(engine, "read"))
    headers = await token(engine, "read", namespace="other")
    hidden = await http.get(path, headers=headers)
    wrong = await http.get(path, params={"cursor": "nonsense"}, headers=await token(engine, "read"))
    missing = await http.get(f"/v1/executions/{UNKNOWN_ID}/{kind}", headers=headers)

    # Children that were created in the same millisecond come in any order.
    assert sorted((each[name] for each in found), key=str) == expected
    assert at_once.json()[kind] == found
    assert (hidden.status_code, missing.status_code, wrong.status_code) == (404, 404, 400)


async def test_a_schedule_is_read_paused_resumed_run_and_removed(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    await fill(engine, given, "default")
    path = "/v1/schedules/default-1"

    read = (await http.get(path)).json()
    paused = (await http.post(f"{path}/pause")).json()
    resumed = (await http.post(f"{path}/resume")).json()
    ran = await http.post(f"{path}/run")
    removed = await http.delete(path)

    assert (read["tags"], read["policy"], read["paused"]) == ({"a": "b"}, {}, False)
    assert (paused["paused"], resumed["paused"]) == (True, False)
    assert (ran.status_code, list(ran.json())) == (201, ["Created"])
    assert removed.json()["schedule_id"] == "default-1"
    for method, gone in [("GET", path), ("POST", f"{path}/run"), ("DELETE", path)]:
        assert (await http.request(method, gone)).status_code == 404


async def test_a_schedule_is_defined_and_changed(http: httpx.AsyncClient, engine: Engine) -> None:
    path, confined = "/v1/schedules/nightly", await token(engine, "submit", namespace="shop")
    body = {
        "execution_kind": "report",
        "cron": "0 3 * * *",
        "timezone": "Europe/Rome",
        "lane_id": "night",
        "input_json": {"day": 1},
        "policy": {"max_reclaim_count": 3},
        "priority": 7,
        "tags": {"team": "data"},
    }

    new = await http.put(path, json=body, headers=confined)
    same = await http.put(path, json=body, headers=confined)
    changed = await http.put(
        path, json={"execution_kind": "report", "every_ms": 60_000}, headers=confined
    )
    elsewhere = await http.put(f"{path}?namespace=bank", json=body, headers=confined)
    wrong = await http.put(path, json={"execution_kind": "report"}, headers=confined)

    assert (new.status_code, same.status_code, changed.status_code) == (201, 200, 200), new.text
    assert same.json() == new.json()
    stored = await engine.describe_schedule("nightly", namespace="shop")
    assert stored is not None
    assert (new.json()["namespace"], new.json()["policy"]) == ("shop", {"max_reclaim_count": 3})
    assert (new.json()["payload"], new.json()["payload_encoding"]) == ("eyJkYXkiOjF9", "json")
    assert (stored.schedule_kind, stored.expression) == ("interval", "60000")
    assert (elsewhere.status_code, elsewhere.json()["code"]) == (403, "namespace_denied")
    assert (wrong.status_code, wrong.json()["field"]) == (400, "cron")


async def test_a_limit_is_set_and_reset(http: httpx.AsyncClient, engine: Engine) -> None:
    spec = QuotaSpec(active_concurrency_cap=5)
    await engine.declare_limits([DeclaredLimit(name="provider", namespace="default", spec=spec)])
    path, rate = "/v1/limits/provider", {"window_ms": 60_000, "max_requests_per_window": 100}

    set_to = (await http.put(path, json=rate | {"while_suspended": "keep"})).json()
    reset = (await http.post(f"{path}/reset")).json()
    wrong = await http.put(path, json={"max_requests_per_window": 1})
    new = await http.put("/v1/limits/mine", json={"active_concurrency_cap": 1})
    undeclared = await http.post("/v1/limits/mine/reset")

    assert rate.items() <= set_to.items()
    assert (set_to["active_concurrency_cap"], set_to["source"]) == (0, "stored")
    assert set_to["while_suspended"] == "keep"
    assert (reset["active_concurrency_cap"], reset["source"]) == (5, "code")
    assert (wrong.status_code, wrong.json()["code"]) == (400, "invalid_quota_spec"), wrong.text
    assert (new.status_code, undeclared.status_code) == (200, 404)


async def test_the_use_of_a_limit_is_listed_by_key(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    await fill(engine, given, "default")

    limit = (await http.get("/v1/limits/default-0")).json()
    use = (await http.get("/v1/limits/default-0/use")).json()

    assert (limit["active_concurrency_cap"], limit["source"]) == (1, "stored")
    assert use == {"keys": [], "next_cursor": None}
    assert (await http.get("/v1/limits/nobodys/use")).status_code == 404


async def test_who_came_and_went_is_told(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    await fill(engine, given, "default")

    events = (await http.get("/v1/workers/events", params={"limit": 2})).json()["events"]

    assert [each["event_kind"] for each in events] == ["registered"] * 2


OURS = {
    "/v1/executions": "cursor, limit, state, lane, kind, namespace, tag",
    "/v1/flows": "namespace",
    "/v1/schedules": "namespace, cursor, limit",
    "/v1/limits": "namespace, cursor, limit",
    "/v1/budgets": "namespace, cursor, limit",
    "/v1/workers": "namespace",
    "/v1/workers/events": "worker_instance_id",
    "/v1/inbox": "namespace",
    "/v1/events": "category, execution_id, kind, tag",
    "/v1/tokens": "cursor",
    "/v1/executions/{id}/steps": "cursor, limit",
    "/v1/executions/{id}/attempts": "cursor, limit",
    "/v1/executions/{id}/children": "cursor, limit",
}
"""Lists of ours, with some of the parameters that each has."""


@pytest.mark.parametrize("path", OURS)
async def test_a_filter_that_is_not_there_is_refused_with_those_there_are(
    http: httpx.AsyncClient, given: Given, path: str
) -> None:
    execution_id = await given.waiting()
    url = path.replace("{id}", execution_id)
    refused = await http.get(url, params={"lnae": "gpu"})
    assert (refused.status_code, refused.json()["field"]) == (400, "lnae")
    start, _, known = refused.json()["error"].partition("; there are ")
    assert start == "lnae: is not a parameter"
    assert set(OURS[path].split(", ")) <= set(known.split(", "))


async def test_a_parameter_of_what_has_none_is_refused(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    await engine.set_limit("mail", active_concurrency_cap=1)
    refused = await http.delete("/v1/limits/mail", params={"namespce": "shop"})
    assert refused.json()["error"] == "namespce: is not a parameter; there are namespace"
    assert (await engine.read_limit("mail")).active_concurrency_cap == 1
    refused = await http.get("/v1/deployment", params={"a": "b"})
    assert refused.json()["error"] == "a: is not a parameter; there are none"


async def test_the_routes_of_the_reference_ignore_what_they_do_not_know(
    http: httpx.AsyncClient, given: Given
) -> None:
    execution_id = await given.waiting()
    for path in (
        "/v1/executions?partition=1&page=2",
        f"/v1/executions/{execution_id}?a=b",
        f"/v1/executions/{execution_id}/state?a=b",
        f"/v1/executions/{execution_id}/pending-waitpoints?a=b",
    ):
        assert (await http.get(path)).status_code == 200


async def test_a_state_that_is_none_is_refused_with_those_there_are(
    http: httpx.AsyncClient,
) -> None:
    refused = await http.get("/v1/executions", params={"state": "broken"})
    assert (refused.status_code, refused.json()["error"]) == (
        400,
        f"state: Invalid enum value 'broken'; must be among {', '.join(PublicState)}",
    )
