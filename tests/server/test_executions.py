"""Executions over HTTP: the reference's routes and shapes, and what this server adds."""

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Sequence
from urllib.parse import quote

import httpx
import pytest

from flowfabric import Engine
from flowfabric.core.creation import Checked, NewExecution
from flowfabric.core.results import CreateResult
from tests.conformance.given import NOBODY, UNKNOWN_ID, WORKER, Given

REFERENCE = {
    "namespace": "shop",
    "lane_id": "default",
    "execution_kind": "demo",
    "input_payload": [123, 125],
    "priority": 5,
    "creator_identity": "rust",
    "tags": {},
    "policy": None,
    "delay_until": None,
    "execution_deadline_at": None,
    "partition_id": 86,
    "now": 1,
}
"""What the reference's client sends."""


async def create(http: httpx.AsyncClient, **fields: object) -> str:
    answer = await http.post("/v1/executions", json={"execution_kind": "demo", **fields})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["Created"]["execution_id"])


async def test_an_execution_is_created_as_the_references_client_does(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    body = REFERENCE | {"execution_id": UNKNOWN_ID}

    created = await http.post("/v1/executions", json=body)
    again = await http.post("/v1/executions", json=body)

    assert (created.status_code, created.json()) == (
        201,
        {"Created": {"execution_id": UNKNOWN_ID, "public_state": "waiting"}},
    )
    assert (again.status_code, again.json()) == (200, {"Duplicate": {"execution_id": UNKNOWN_ID}})
    context = await engine.read_execution_context(UNKNOWN_ID)
    assert context.input_payload == b"{}"


@pytest.mark.parametrize(
    ("fields", "stored", "encoding"),
    [
        ({"input_payload": [0, 255]}, b"\x00\xff", None),
        ({"input_base64": base64.b64encode(b"\x00\xff").decode()}, b"\x00\xff", None),
        ({"input_json": {"a": [1, None]}}, b'{"a":[1,null]}', "json"),
        ({"input_json": None}, b"null", "json"),
        ({}, b"", None),
    ],
    ids=["octets", "base64", "json", "null", "nothing"],
)
async def test_payloads_come_in_three_forms(
    http: httpx.AsyncClient,
    engine: Engine,
    fields: dict[str, object],
    stored: bytes,
    encoding: str | None,
) -> None:
    context = await engine.read_execution_context(await create(http, **fields))

    assert (context.input_payload, context.payload_encoding) == (stored, encoding)


async def test_those_created_at_once_are_committed_together(
    http: httpx.AsyncClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[int] = []

    async def counting(checked: Sequence[Checked], *, key_wait_ms: int) -> list[CreateResult]:
        commits.append(len(checked))
        return await Engine.create_checked(engine, checked, key_wait_ms=key_wait_ms)

    monkeypatch.setattr(engine, "create_checked", counting)
    bodies: list[dict[str, object]] = [
        {"execution_kind": "demo", "input_json": number} for number in range(20)
    ]
    bodies[3]["idempotency_key"] = bodies[4]["idempotency_key"] = "same"
    bodies[5]["lane_id"] = ""

    answers = await asyncio.gather(*(http.post("/v1/executions", json=each) for each in bodies))

    statuses = [each.status_code for each in answers]
    assert sorted(statuses[3:6]) == [200, 201, 400]
    assert statuses[5] == 400
    assert statuses[:3] + statuses[6:] == [201] * 17
    ids = [next(iter(each.json().values()))["execution_id"] for each in answers if each.is_success]
    assert len(set(ids)) == 18
    contexts = [await engine.read_execution_context(each) for each in ids[5:]]
    assert [each.input_payload for each in contexts] == [b"%d" % each for each in range(6, 20)]
    assert len(commits) < 10


async def test_many_are_created_together_or_not_at_all(http: httpx.AsyncClient) -> None:
    good = {"execution_kind": "demo", "input_json": 1}

    refused = await http.post(
        "/v1/executions/batch", json={"executions": [good, {**good, "lane_id": ""}]}
    )
    assert refused.status_code == 400
    assert (await http.get("/v1/executions")).json()["executions"] == []
    created = await http.post("/v1/executions/batch", json={"executions": [good, good]})

    assert created.status_code == 200
    assert [list(each) for each in created.json()] == [["Created"], ["Created"]]


@pytest.mark.parametrize("form", ["full", "uuid", "percent"])
async def test_an_execution_is_read_by_any_form_of_its_id(
    http: httpx.AsyncClient, form: str
) -> None:
    execution_id = await create(http, priority=7, namespace="shop")
    path = {
        "full": execution_id,
        "uuid": execution_id.rpartition(":")[2],
        "percent": execution_id.replace("{", "%7B").replace("}", "%7D"),
    }[form]

    answer = await http.get(f"/v1/executions/{path}")

    body = answer.json()
    assert answer.status_code == 200
    assert (body["execution_id"], body["namespace"]) == (execution_id, "shop")
    assert (body["priority"], body["execution_kind"]) == (7, "demo")
    assert body["state_vector"]["lifecycle_phase"] == "runnable"
    assert body["created_at"].isdigit()


async def test_an_id_of_ones_own_finds_it_in_the_default_namespace(
    http: httpx.AsyncClient,
) -> None:
    execution_id = await create(http, execution_id="order-17")

    assert (await http.get("/v1/executions/order-17")).json()["execution_id"] == execution_id


async def test_the_state_is_one_word_of_json(http: httpx.AsyncClient) -> None:
    execution_id = await create(http, delay_ms=60_000)

    answer = await http.get(f"/v1/executions/{execution_id}/state")

    assert (answer.status_code, answer.text) == (200, '"delayed"')


async def test_a_result_is_its_bytes(http: httpx.AsyncClient, engine: Engine, given: Given) -> None:
    execution_id = await create(http)
    assert (await http.get(f"/v1/executions/{execution_id}/result")).status_code == 404
    claimed = await engine.claim(**WORKER)
    assert claimed is not None
    await engine.complete(claimed.handle, b"\xff\x00")

    answer = await http.get(f"/v1/executions/{execution_id}/result")
    outcome = await http.get(f"/v1/executions/{execution_id}/outcome")

    assert (answer.status_code, answer.content) == (200, b"\xff\x00")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert (outcome.status_code, outcome.json()["public_state"]) == (200, "completed")


async def test_an_outcome_that_has_not_come_is_202(http: httpx.AsyncClient) -> None:
    execution_id = await create(http)

    answer = await http.get(f"/v1/executions/{execution_id}/outcome?wait_ms=1")

    assert (answer.status_code, answer.json()) == (202, None)


async def test_operators_move_executions(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    execution_id = await create(http)
    path = f"/v1/executions/{execution_id}"

    changed = await http.put(f"{path}/priority", json={"new_priority": 100})
    assert (changed.status_code, changed.json()) == (
        200,
        {"Changed": {"execution_id": execution_id}},
    )
    none = await http.post(f"{path}/revoke-lease")
    assert none.json() == {"AlreadySatisfied": {"reason": "no_active_lease"}}
    claimed = await engine.claim(**WORKER)
    assert claimed is not None
    revoked = await http.post(f"{path}/revoke-lease")
    assert revoked.json() == {"Revoked": {"lease_id": claimed.lease_id, "lease_epoch": "2"}}
    cancelled = await http.post(f"{path}/cancel", json={"reason": "no need", "now": 5})
    assert cancelled.json() == {
        "Cancelled": {"execution_id": execution_id, "public_state": "cancelled"}
    }
    replayed = await http.post(f"{path}/replay")
    assert (replayed.status_code, replayed.json()) == (
        200,
        {"Replayed": {"public_state": "waiting"}},
    )
    again = await http.post(f"{path}/replay")
    assert (again.status_code, again.json()["kind"]) == (409, "execution_not_terminal")
    assert again.json()["retryable"] is False


async def test_a_partition_is_listed_by_ids(http: httpx.AsyncClient, engine: Engine) -> None:
    ids = [await create(http, execution_id=f"{{fp:7}}:{NOBODY[:-1]}{n}") for n in range(3)]

    first = (await http.get("/v1/executions?partition=7&limit=2")).json()
    rest = (await http.get(f"/v1/executions?partition=7&cursor={first['next_cursor']}")).json()

    assert first == {"executions": ids[:2], "next_cursor": ids[1]}
    assert rest == {"executions": ids[2:], "next_cursor": None}
    for empty in ("partition=8", "partition=60000", "partition=7&limit=0"):
        assert (await http.get(f"/v1/executions?{empty}")).json() == {
            "executions": [],
            "next_cursor": None,
        }


async def test_lists_are_filtered_and_paged(http: httpx.AsyncClient) -> None:
    for number in range(3):
        await create(http, tags={"team": "red"}, namespace="shop", idempotency_key=f"k{number}")
    other = await create(http, delay_ms=60_000, lane_id="slow")

    tagged = (await http.get("/v1/executions?tag=team=red&namespace=shop&limit=2")).json()
    rest = (
        await http.get(
            "/v1/executions",
            params={"tag": "team=red", "namespace": "shop", "cursor": tagged["next_cursor"]},
        )
    ).json()
    by_state = (await http.get("/v1/executions?state=delayed&state=failed&lane=slow")).json()

    assert (len(tagged["executions"]), len(rest["executions"])) == (2, 1)
    assert [each["execution_id"] for each in by_state["executions"]] == [other]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "field"),
    [
        ("GET", "/v1/executions/{ghost}", None, 404, None),
        ("GET", "/v1/executions/{ghost}/state", None, 404, None),
        ("GET", "/v1/executions/{ghost}/result", None, 404, None),
        ("GET", "/v1/executions/{ghost}/outcome", None, 404, None),
        ("GET", "/v1/executions/{ghost}/details", None, 404, None),
        ("GET", "/v1/executions/{ghost}/why", None, 404, None),
        ("GET", "/v1/executions/nope", None, 404, None),
        ("GET", "/v1/executions/%7Bfp:x%7D:y", None, 400, "execution_id"),
        ("GET", "/v1/executions?limit=x", None, 400, "limit"),
        ("GET", "/v1/executions?limit=-1", None, 400, "limit"),
        ("GET", "/v1/executions?partition=x", None, 400, "partition"),
        ("GET", "/v1/executions?partition=7&cursor=zzz", None, 400, "cursor"),
        ("GET", "/v1/executions?state=odd", None, 400, "state"),
        ("GET", "/v1/executions?tag=odd", None, 400, "tag"),
        ("GET", "/v1/executions/{ghost}/outcome?wait_ms=60001", None, 400, "wait_ms"),
        ("POST", "/v1/executions", {}, 422, "execution_kind"),
        ("POST", "/v1/executions", {"execution_kind": 5}, 422, "execution_kind"),
        ("POST", "/v1/executions", {"execution_kind": ""}, 400, "execution_kind"),
        (
            *("POST", "/v1/executions"),
            *({"execution_kind": "x", "input_payload": "abc"}, 422, "input_payload"),
        ),
        (
            *("POST", "/v1/executions"),
            *({"execution_kind": "x", "input_payload": [256]}, 422, "input_payload[0]"),
        ),
        (
            *("POST", "/v1/executions"),
            *({"execution_kind": "x", "priority": 2**31}, 422, "priority"),
        ),
        (
            *("POST", "/v1/executions"),
            *({"execution_kind": "x", "input_base64": "*"}, 400, "input_base64"),
        ),
        (
            *("POST", "/v1/executions"),
            *({"execution_kind": "x", "input_base64": "", "input_json": 1}, 400, "input"),
        ),
        ("POST", "/v1/executions/{ghost}/cancel", {"reason": "r"}, 404, None),
        ("POST", "/v1/executions/{ghost}/cancel", {}, 422, "reason"),
        (
            *("POST", "/v1/executions/{ghost}/cancel"),
            *({"reason": "r", "execution_id": "{fp:1}:x"}, 400, "execution_id"),
        ),
        ("POST", "/v1/executions/{ghost}/replay", None, 404, None),
        ("POST", "/v1/executions/{ghost}/revoke-lease", None, 404, None),
        ("PUT", "/v1/executions/{ghost}/priority", {"new_priority": 1}, 404, None),
        ("GET", "/nope", None, 404, None),
        ("DELETE", "/v1/executions", None, 405, None),
        ("GET", "/v1/tokens?cursor=zz", None, 400, "cursor"),
    ],
)
async def test_what_is_wrong_is_told_in_json(
    http: httpx.AsyncClient,
    method: str,
    path: str,
    body: object,
    status: int,
    field: str | None,
) -> None:
    answer = await http.request(method, path.replace("{ghost}", UNKNOWN_ID), json=body)

    told = answer.json()
    assert (answer.status_code, told.get("field")) == (status, field), told
    assert told["error"]
    assert told["code"]
    assert ("kind" in told, "retryable" in told) == (False, False)
    if status == 404 and "ghost" in path:
        assert "not found" in told["error"]


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"content-type": "application/json"}, b"{", 400),
        ({"content-type": "application/json"}, b"\xff", 400),
        ({"content-type": "text/plain"}, b"{}", 415),
        ({}, b"", 415),
    ],
    ids=["cut off", "no text", "other type", "nothing"],
)
async def test_what_is_not_json_is_refused(
    http: httpx.AsyncClient, headers: dict[str, str], content: bytes, status: int
) -> None:
    answer = await http.post("/v1/executions", content=content, headers=headers)

    assert answer.status_code == status
    assert answer.json()["error"]


@pytest.mark.parametrize("number", ["1e999", "9" * 5_000], ids=["float", "integer"])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/executions", '{"execution_kind": "x", "input_json": [N]}', "input_json"),
        (
            *("/v1/executions/batch", '{"executions": [{"execution_kind": "x", "input_json": N}]}'),
            "executions",
        ),
        ("/v1/executions", "[N]", None),
    ],
)
async def test_numbers_that_nothing_can_hold_are_refused_by_the_name_of_their_field(
    http: httpx.AsyncClient, path: str, body: str, field: str | None, number: str
) -> None:
    json = {"content-type": "application/json"}
    answer = await http.post(path, content=body.replace("N", number), headers=json)

    told = answer.json()
    assert (answer.status_code, told["code"], told.get("field")) == (400, "invalid_json", field)
    place = f"{field}: " if field else ""
    assert told["error"].startswith(f"invalid JSON: {place}")
    assert "out of range" in told["error"]


async def test_an_id_may_have_slashes_in_it(http: httpx.AsyncClient) -> None:
    own = "orders/2026/17%2F"
    created = await http.post("/v1/executions", json={"execution_kind": "x", "execution_id": own})
    path = f"/v1/executions/{quote(own, safe='')}"

    found = await http.get(path)
    state = await http.get(f"{path}/state")
    apart = await http.get("/v1/executions/orders/2026")

    assert found.json()["execution_id"] == created.json()["Created"]["execution_id"]
    assert state.json() == "waiting"
    assert (apart.status_code, apart.json()["code"]) == (404, "no_such_route")


async def test_what_has_no_route_is_told_what_was_asked(http: httpx.AsyncClient) -> None:
    nowhere, other = await http.get("/v1/odd"), await http.delete("/v1/executions")

    assert nowhere.json()["error"] == "there is no route GET /v1/odd"
    told = other.json()["error"]
    assert told == "there is no route DELETE /v1/executions; the path takes GET, OPTIONS, POST"


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("POST", "/v1/tokens", {"name": "n", "scopes": ["read"], "expires": "90d"}, "expires"),
        ("POST", "/v1/executions/batch", {"executions": [], "namespace": "shop"}, "namespace"),
        ("PUT", "/v1/limits/x", {"rate": "1/s"}, "rate"),
        ("PUT", "/v1/schedules/x", {"execution_kind": "k", "every": "1s"}, "every"),
        ("PATCH", "/v1/budgets/x", {"hard_limit": {}}, "hard_limit"),
    ],
)
async def test_members_that_a_body_does_not_know_are_refused(
    http: httpx.AsyncClient, method: str, path: str, body: object, field: str
) -> None:
    """Bodies of the reference's requests are as its clients send them."""
    answer = await http.request(method, path, json=body)

    assert (answer.status_code, answer.json()["field"]) == (422, field), answer.text


async def test_methods_that_a_path_has_are_named(http: httpx.AsyncClient) -> None:
    described = (await http.get("/docs/openapi.json")).json()["paths"]
    wrong = {}

    for path, methods in described.items():
        expected = {method.upper() for method in methods} | {"OPTIONS"}
        place = re.sub(r"{\w+}", "7", path)
        for method in ("OPTIONS", "TRACE"):
            answer = await http.request(method, place)
            allowed = set(answer.headers["allow"].split(", "))
            if answer.status_code not in (204, 405) or allowed != expected:
                wrong[f"{method} {path}"] = (answer.status_code, allowed)

    assert wrong == {}


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/executions", 1_048_576),
        ("/v1/executions/{id}/signal", 262_144),
        ("/v1/executions/{id}/cancel", 65_536),
        ("/v1/executions/{id}/replay", 65_536),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_have_a_limit(
    http: httpx.AsyncClient, path: str, limit: int, chunked: bool
) -> None:
    url = path.replace("{id}", UNKNOWN_ID)
    json = {"content-type": "application/json"}

    async def sent(size: int) -> httpx.Response:
        async def chunks() -> AsyncIterator[bytes]:
            yield b" " * size

        content = chunks() if chunked else b" " * size
        return await http.post(url, content=content, headers=json)

    within = await sent(limit - 1)
    assert within.status_code != 413
    beyond = await sent(limit + 1)
    if chunked and path.endswith("replay"):
        # It reads no body, so nobody can tell how large it is.
        return
    assert beyond.status_code == 413
    assert beyond.json()["limit_bytes"] == limit
    assert beyond.json()["route"] == path


async def test_every_answer_has_an_id_and_careful_headers(http: httpx.AsyncClient) -> None:
    given = await http.get("/healthz", headers={"x-request-id": "abc123"})
    forged = await http.get("/nope", headers={"x-request-id": "a b"})

    assert given.json() == {"status": "ok"}
    assert given.headers["x-request-id"] == "abc123"
    assert forged.headers["x-request-id"].isalnum()
    for answer in (given, forged):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers


async def test_the_api_describes_itself(http: httpx.AsyncClient) -> None:
    document = (await http.get("/docs/openapi.json")).json()

    assert document["openapi"].startswith("3.1")
    assert "/v1/executions/{id}/signal" in document["paths"]
    assert (await http.get("/docs")).headers["content-type"].startswith("text/html")


async def test_creating_under_ones_own_key_is_idempotent(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    body = {"execution_kind": "demo", "idempotency_key": "k"}

    first = await http.post("/v1/executions", json=body)
    again = await http.post("/v1/executions", json=body)

    assert again.status_code == 200
    assert again.json()["Duplicate"] == {
        "execution_id": first.json()["Created"]["execution_id"],
    }
    repeat = await engine.create_execution(NewExecution(execution_kind="demo", idempotency_key="k"))
    assert repeat.execution_id == first.json()["Created"]["execution_id"]


async def test_a_missing_body_is_told_what_it_needs(http: httpx.AsyncClient, given: Given) -> None:
    path = f"/v1/executions/{await given.waiting()}/cancel"
    answer = await http.post(path, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]) == (
        422,
        "the body is missing: send JSON with `reason`",
    )
