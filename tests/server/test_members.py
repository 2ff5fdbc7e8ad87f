"""Members of bodies that their routes do not have."""

import httpx
import pytest

from flowfabric import Engine
from tests.server.shop import FLOW_ID

LENIENT: dict[str, tuple[dict[str, object], str]] = {
    "POST /v1/executions": ({"execution_kind": "x", "idempotancy_key": "a"}, "idempotency_key"),
    "POST /v1/executions/ID/cancel": ({"reason": "x", "leaseid": "a"}, "lease_id"),
    "POST /v1/executions/ID/signal": (
        {"signal_name": "x", "waitpoint_token": "a", "payload_jsn": 1},
        "payload_json",
    ),
    "POST /v1/flows": ({"flow_id": FLOW_ID, "flow_kind": "x", "namspace": "a"}, "namespace"),
    "POST /v1/budgets": ({"budget_id": "x", "hard_limit": [1]}, "hard_limits"),
    "POST /v1/budgets/ID/usage": ({"dimensions": {"a": 1}, "dedupkey": "a"}, "dedup_key"),
}
STRICT: dict[str, tuple[dict[str, object], str, str]] = {
    "POST /v1/executions/batch": (
        {"executions": [{"execution_kind": "x"}, {"execution_kind": "x", "odd": 1}]},
        "executions[1].odd",
        "execution_kind, execution_id, namespace, lane_id",
    ),
    "POST /v1/flows/ID/graph": (
        {"members": [{"execution_kind": "x", "odd": 1}]},
        "members[0].odd",
        "execution_kind, execution_id, namespace, lane_id",
    ),
    "POST /v1/signals": (
        {"signal_name": "x", "waitpoint_token": "a", "odd": 1},
        "odd",
        "waitpoint_token, signal_name, waitpoint_id",
    ),
    "POST /v1/tokens": ({"name": "x", "scopes": [], "odd": 1}, "odd", "name, scopes, namespace"),
    "PUT /v1/limits/ID": ({"odd": 1}, "odd", "window_ms, max_requests_per_window"),
    "PATCH /v1/budgets/ID": ({"odd": 1}, "odd", "hard_limits"),
    "POST /v1/operations/list_flows": ({"odd": 1}, "odd", "partition"),
}


async def ask(http: httpx.AsyncClient, route: str, body: object) -> httpx.Response:
    method, path = route.split()
    return await http.request(method, path.replace("ID", FLOW_ID), json=body)


@pytest.mark.parametrize("route", LENIENT)
async def test_a_misspelt_member_is_refused_by_requests_of_the_reference_too(
    http: httpx.AsyncClient, engine: Engine, route: str
) -> None:
    body, meant = LENIENT[route]
    *_, misspelt = body

    answer = await ask(http, route, body)

    told = answer.json()
    assert (answer.status_code, told["code"], told["field"]) == (422, "invalid_json", misspelt)
    assert told["error"].startswith(
        f"invalid JSON: Object contains unknown field `{misspelt}`; did you mean `{meant}`? "
        "There are "
    )
    assert meant in told["error"].partition("There are ")[2].split(", ")
    assert (await engine.find_executions()).executions == ()


@pytest.mark.parametrize("route", STRICT)
async def test_requests_of_ours_refuse_unknown_members_and_tell_what_there_is(
    http: httpx.AsyncClient, engine: Engine, route: str
) -> None:
    body, field, known = STRICT[route]

    answer = await ask(http, route, body)

    told = answer.json()
    assert (answer.status_code, told["code"], told["field"]) == (422, "invalid_json", field)
    place = f"{field.rpartition('.')[0]}: " if "." in field else ""
    assert told["error"].startswith(f"invalid JSON: {place}Object contains unknown field `odd`; ")
    assert known in told["error"]
    assert (await engine.find_executions()).executions == ()


async def test_members_that_only_the_reference_knows_are_ignored(http: httpx.AsyncClient) -> None:
    answer = await http.post(
        "/v1/executions",
        json={"execution_kind": "x", "now": 1, "partition_id": 1, "odd": 1, "": 1},
    )

    assert answer.status_code == 201
