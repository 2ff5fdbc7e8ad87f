"""Signals and flows over HTTP."""

import httpx
import pytest

from flowfabric import Engine
from flowfabric.signals import SignalToken
from tests.conformance.given import NOBODY, UNKNOWN_ID, Given

FLOW_ID = "11111111-1111-4111-8111-111111111111"


async def suspended(
    http: httpx.AsyncClient, given: Given, headers: dict[str, str] | None = None
) -> tuple[str, dict[str, object]]:
    """The path of a suspended execution, and the body of a signal to it."""
    claimed = await given.suspended()
    path = f"/v1/executions/{claimed.execution_id}"
    (waitpoint,) = (await http.get(f"{path}/pending-waitpoints", headers=headers)).json()
    url = f"{path}/waitpoints/{waitpoint['waitpoint_id']}/token"
    token = await http.get(url, headers=headers)
    assert token.headers["cache-control"] == "no-store"
    names = waitpoint["required_signal_names"] or ["go"]
    return path, {
        "waitpoint_id": waitpoint["waitpoint_id"],
        "waitpoint_token": token.json()["token"],
        "signal_name": names[0],
    }


async def test_a_signal_with_its_token_needs_no_other(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    made = await engine.create_token("somebody", scopes=["read", "signal"])
    headers = {"Authorization": f"Bearer {made.token}"}
    path, body = await suspended(http, given, headers)
    assert (await http.get(path)).status_code == 401

    answer = await http.post(
        f"{path}/signal", json=body | {"payload_json": {"by": "ada"}, "idempotency_key": "k"}
    )
    again = await http.post(
        f"{path}/signal", json=body | {"payload_json": {"by": "ada"}, "idempotency_key": "k"}
    )

    assert answer.status_code == 200, answer.text
    assert answer.json()["Accepted"]["effect"] == "resume_condition_satisfied"
    assert again.json() == {
        "Duplicate": {"existing_signal_id": answer.json()["Accepted"]["signal_id"]}
    }


async def test_a_link_is_all_that_its_holder_needs(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    await engine.create_token("somebody", scopes=["read"])
    claimed = await given.suspended(execution_id="order-17")
    (waitpoint,) = (await engine.list_pending_waitpoints(claimed.execution_id)).waitpoints
    secret = await engine.read_waitpoint_token(claimed.execution_id, waitpoint.waitpoint_id)
    assert secret is not None
    link = SignalToken(claimed.execution_id, waitpoint.waitpoint_id, secret).reveal()
    body = {"waitpoint_token": link, "signal_name": "go", "idempotency_key": "k"}
    plain = body | {"waitpoint_token": secret.reveal()}
    place, other = "/v1/executions/order-17/signal", f"/v1/executions/{UNKNOWN_ID}/signal"

    answers = [
        await http.post("/v1/signals", json=body),
        await http.post(place, json=body),
        await http.post(place, json=plain | {"waitpoint_id": waitpoint.waitpoint_id}),
    ]
    refused = [
        await http.post("/v1/signals", json=plain),
        await http.post("/v1/signals", json=body | {"waitpoint_token": link[:-1]}),
        await http.post("/v1/signals", json=body | {"waitpoint_id": NOBODY}),
        await http.post(other, json=body),
        await http.post(place, json=plain),
    ]

    assert [list(each.json()) for each in answers] == [["Accepted"], ["Duplicate"], ["Duplicate"]]
    assert [each.status_code for each in refused] == [400, 400, 400, 400, 422]


async def test_open_waitpoints_are_shown_without_their_tokens(
    http: httpx.AsyncClient, given: Given
) -> None:
    claimed = await given.suspended()
    path = f"/v1/executions/{claimed.execution_id}/pending-waitpoints"

    (shown,) = (await http.get(path)).json()

    assert (shown["state"], shown["execution_id"]) == ("active", claimed.execution_id)
    assert len(shown["token_fingerprint"]) == 16
    assert "waitpoint_token" not in shown
    waiting = await given.waiting()
    assert (await http.get(f"/v1/executions/{waiting}/pending-waitpoints")).json() == []
    unknown = await http.get(f"/v1/executions/{UNKNOWN_ID}/pending-waitpoints")
    assert unknown.status_code == 404


@pytest.mark.parametrize(
    "change",
    [
        {"waitpoint_token": "k1:00"},
        {"waitpoint_token": ""},
        {"waitpoint_token": "nobody:" + "00" * 32},
        {"waitpoint_id": NOBODY},
    ],
)
async def test_a_wrong_token_is_refused_whatever_exists(
    http: httpx.AsyncClient, given: Given, change: dict[str, str]
) -> None:
    path, body = await suspended(http, given)

    refused = await http.post(f"{path}/signal", json=body | change)
    elsewhere = await http.post(f"/v1/executions/{UNKNOWN_ID}/signal", json=body | change)

    assert (refused.status_code, elsewhere.status_code) == (400, 400), refused.text
    assert "token" in refused.json()["code"]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"signal_name": None}, 422),
        ({"execution_id": UNKNOWN_ID}, 400),
        ({"payload": "text"}, 422),
        ({"payload_base64": "*"}, 400),
        ({"waitpoint_id": "zzz"}, 400),
    ],
)
async def test_malformed_signals_are_refused(
    http: httpx.AsyncClient, given: Given, change: dict[str, object], status: int
) -> None:
    path, body = await suspended(http, given)

    assert (await http.post(f"{path}/signal", json=body | change)).status_code == status


async def test_an_unknown_waitpoint_has_no_token(http: httpx.AsyncClient, given: Given) -> None:
    execution_id = await given.waiting()

    answer = await http.get(f"/v1/executions/{execution_id}/waitpoints/{NOBODY}/token")

    assert answer.status_code == 404


async def test_the_secret_is_rotated(http: httpx.AsyncClient) -> None:
    url = "/v1/admin/rotate-waitpoint-secret"
    body = {"new_kid": "k9", "new_secret_hex": "ab" * 32}

    rotated = await http.post(url, json=body)
    again = await http.post(url, json=body)
    conflict = await http.post(url, json=body | {"new_secret_hex": "cd" * 32})

    for answer in (rotated, again):
        assert answer.json() == {"rotated": 1, "failed": [], "new_kid": "k9"}
    assert conflict.status_code == 400
    for bad in ({"new_kid": ""}, {"new_kid": "a:b"}, {"new_secret_hex": "abc"}):
        refused = await http.post(url, json=body | bad)
        assert refused.status_code == 400
        assert "retryable" not in refused.json()


async def test_a_flow_is_built_and_cancelled_as_the_references_client_does(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    base = {"flow_id": FLOW_ID, "now": 1}
    created = await http.post("/v1/flows", json=base | {"flow_kind": "k", "namespace": "default"})
    again = await http.post("/v1/flows", json=base | {"flow_kind": "k", "namespace": "default"})
    assert (created.status_code, created.json()) == (201, {"Created": {"flow_id": FLOW_ID}})
    assert (again.status_code, again.json()) == (200, {"AlreadySatisfied": {"flow_id": FLOW_ID}})
    ids = []
    for count in (1, 2):
        member = engine.new_member_id(FLOW_ID)
        await http.post("/v1/executions", json={"execution_kind": "n", "execution_id": member})
        url = f"/v1/flows/{FLOW_ID}/members"
        added = await http.post(url, json=base | {"execution_id": member})
        assert added.status_code == 201
        assert added.json() == {"Added": {"execution_id": member, "new_node_count": count}}
        ids.append(member)
    edge = {
        "edge_id": NOBODY,
        "upstream_execution_id": ids[0],
        "downstream_execution_id": ids[1],
    }
    stale = await http.post(
        f"/v1/flows/{FLOW_ID}/edges", json=base | edge | {"expected_graph_revision": 99}
    )
    assert (stale.status_code, stale.json()["kind"]) == (409, "contention")
    staged = await http.post(
        f"/v1/flows/{FLOW_ID}/edges", json=base | edge | {"expected_graph_revision": 2}
    )
    assert staged.json() == {"Staged": {"edge_id": NOBODY, "new_graph_revision": 3}}
    apply = f"/v1/flows/{FLOW_ID}/edges/apply"
    applied = await http.post(apply, json=base | edge | {"graph_revision": 3})
    assert applied.json() == {"Applied": {"unsatisfied_count": 1}}
    repeated = await http.post(apply, json=base | edge | {"graph_revision": 3})
    assert repeated.json() == "AlreadyApplied"
    cancelled = await http.post(
        f"/v1/flows/{FLOW_ID}/cancel?wait=true",
        json=base | {"reason": "r", "cancellation_policy": "cancel_all"},
    )
    assert cancelled.json()["Cancelled"]["cancellation_policy"] == "cancel_all"
    assert set(cancelled.json()["Cancelled"]["member_execution_ids"]) == set(ids)


async def test_a_flow_is_built_in_one_request(http: httpx.AsyncClient, engine: Engine) -> None:
    await http.post("/v1/flows", json={"flow_id": FLOW_ID, "flow_kind": "k"})
    ids = [engine.new_member_id(FLOW_ID) for _ in range(2)]
    graph = {
        "members": [{"execution_kind": "n", "execution_id": each} for each in ids],
        "joins": [
            {
                "downstream_execution_id": ids[1],
                "dependencies": [{"upstream_execution_id": ids[0]}],
                "policy": {"kind": "any_of", "on_satisfied": "let_run"},
            }
        ],
    }

    added = await http.post(f"/v1/flows/{FLOW_ID}/graph", json=graph)

    assert (added.json()["members_added"], added.json()["edges_added"]) == (2, 1)
    read = (await http.get(f"/v1/flows/{FLOW_ID}")).json()
    assert (read["node_count"], read["edge_count"]) == (2, 1)
    listed = (await http.get(f"/v1/flows/{FLOW_ID}/members")).json()
    assert {each["execution_id"] for each in listed["members"]} == set(ids)
    assert len((await http.get("/v1/flows")).json()["flows"]) == 1


async def test_members_of_a_flow_are_named_by_uuids_by_names_or_not_at_all(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    await http.post("/v1/flows", json={"flow_id": FLOW_ID, "flow_kind": "k"})
    url = f"/v1/flows/{FLOW_ID}/graph"
    join = {
        "downstream_execution_id": "report",
        "dependencies": [{"upstream_execution_id": NOBODY}, {"upstream_execution_id": "fetch"}],
    }
    graph = {
        "members": [
            {"execution_kind": "n", "execution_id": NOBODY},
            {"execution_kind": "n", "execution_id": "fetch"},
            {"execution_kind": "n", "execution_id": "report"},
        ],
        "joins": [join],
    }

    added = (await http.post(url, json=graph)).json()
    again = (await http.post(url, json=graph)).json()
    nameless = (await http.post(url, json={"members": [{"execution_kind": "n"}]})).json()
    listed = (await http.get(f"/v1/flows/{FLOW_ID}/members")).json()["members"]
    edge = {"edge_id": NOBODY, "upstream_execution_id": "report"}
    staged = await http.post(
        f"/v1/flows/{FLOW_ID}/edges",
        json=edge | {"downstream_execution_id": nameless["members"][0]},
    )

    assert (added["members_added"], added["edges_added"]) == (3, 2), added
    assert (again["members_added"], again["members"]) == (0, added["members"])
    assert added["members"][0].endswith(NOBODY)
    assert {each["execution_id"] for each in listed} == {*added["members"], *nameless["members"]}
    assert staged.status_code == 201, staged.text


async def test_a_signal_is_delivered_by_its_name(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    path = f"/v1/executions/{claimed.execution_id}/signals"
    body = {"signal_name": "decided", "payload_json": "yes", "idempotency_key": "k"}

    first = await http.post(path, json=body)
    again = await http.post(path, json=body)
    refused = await http.post(path, json={"signal_name": "other", "keep": False})

    assert (first.status_code, list(first.json())) == (200, ["Accepted"]), first.text
    assert list(again.json()) == ["Duplicate"]
    assert refused.status_code in (404, 409), refused.text


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("", {}, 422),
        ("", {"flow_id": "zzz", "flow_kind": "k"}, 400),
        (f"/{NOBODY}/members", {"execution_id": UNKNOWN_ID}, 400),
        (f"/{NOBODY}/members", {"execution_id": UNKNOWN_ID, "flow_id": FLOW_ID}, 400),
        ("/zzz/members", {"execution_id": UNKNOWN_ID}, 400),
        (f"/{NOBODY}/cancel", {"reason": "r", "cancellation_policy": "cancel_all"}, 404),
    ],
)
async def test_bad_flow_requests_are_told(
    http: httpx.AsyncClient, path: str, body: dict[str, str], status: int
) -> None:
    answer = await http.post(f"/v1/flows{path}", json=body)

    assert answer.status_code == status, answer.text
    assert answer.json()["error"]
