"""Who may ask: tokens, their scopes and namespaces, and guessing them."""

import httpx
import pytest

from flowfabric import Engine
from flowfabric.server.access import FAILURES_MAX, Tally
from flowfabric.server.api import ServerConfig
from flowfabric.server.serve import Listening
from flowfabric.testing import SettableClock
from tests.conformance.given import Given

EXECUTION = "/v1/executions/{shop}"
FLOW = "/v1/flows/{flow}"
FLOW_ID = "11111111-1111-4111-8111-111111111111"

CLAIM = {"lane_id": "default", "worker_instance_id": "w-1", "grant_ttl_ms": 5_000}
RECLAIM = CLAIM | {"worker_id": "w"}
QUOTA = {
    "quota_policy_id": FLOW_ID,
    "window_seconds": 1,
    "max_requests_per_window": 1,
    "max_concurrent": 0,
}

ROUTES: list[tuple[str, str, object, str]] = [
    ("POST", "/v1/executions", {"execution_kind": "x"}, "submit"),
    ("POST", "/v1/executions/batch", {"executions": []}, "submit"),
    ("GET", "/v1/executions", None, "read"),
    ("GET", EXECUTION, None, "read"),
    ("GET", f"{EXECUTION}/details", None, "read"),
    ("GET", f"{EXECUTION}/why", None, "read"),
    ("GET", f"{EXECUTION}/state", None, "read"),
    ("GET", f"{EXECUTION}/result", None, "read"),
    ("GET", f"{EXECUTION}/outcome", None, "read"),
    ("GET", f"{EXECUTION}/pending-waitpoints", None, "read"),
    ("GET", f"{EXECUTION}/waitpoints/{FLOW_ID}/token", None, "signal"),
    ("GET", f"{EXECUTION}/attempts/0/stream", None, "read"),
    ("GET", f"{EXECUTION}/attempts/0/stream/tail", None, "read"),
    ("GET", f"{EXECUTION}/stream", None, "read"),
    ("GET", "/v1/events", None, "read"),
    ("GET", "/v1/inbox", None, "read"),
    ("POST", f"{EXECUTION}/cancel", {"reason": "r"}, "operate"),
    ("PUT", f"{EXECUTION}/priority", {"new_priority": 1}, "operate"),
    ("POST", f"{EXECUTION}/replay", None, "operate"),
    ("POST", f"{EXECUTION}/revoke-lease", None, "operate"),
    ("POST", "/v1/flows", {"flow_id": FLOW_ID, "flow_kind": "k"}, "submit"),
    ("GET", "/v1/flows", None, "read"),
    ("GET", FLOW, None, "read"),
    ("GET", f"{FLOW}/members", None, "read"),
    ("POST", f"{FLOW}/members", {"execution_id": "{shop}"}, "submit"),
    ("POST", f"{FLOW}/graph", {}, "submit"),
    (
        *("POST", f"{FLOW}/cancel"),
        *({"reason": "r", "cancellation_policy": "cancel_all"}, "operate"),
    ),
    ("POST", f"{EXECUTION}/reclaim", RECLAIM, "work"),
    ("POST", "/v1/workers/w/claim", CLAIM, "work"),
    ("POST", "/v1/budgets", {"budget_id": "b"}, "operate"),
    ("GET", "/v1/budgets/b", None, "read"),
    ("POST", "/v1/budgets/b/usage", {"dimensions": {"tokens": 1}}, "operate"),
    ("POST", "/v1/budgets/b/reset", None, "operate"),
    ("POST", "/v1/quotas", QUOTA, "operate"),
    ("POST", "/v1/tokens", {"name": "n", "scopes": ["read"]}, "admin"),
    ("GET", "/v1/tokens", None, "admin"),
    ("DELETE", "/v1/tokens/0123", None, "admin"),
    (
        *("POST", "/v1/admin/rotate-waitpoint-secret"),
        *({"new_kid": "k9", "new_secret_hex": "00" * 32}, "admin"),
    ),
]
"""Every route that needs a token, and the scope it needs."""
SCOPES = ("read", "submit", "signal", "work", "operate")


async def token(engine: Engine, *scopes: str, namespace: str | None = None) -> dict[str, str]:
    made = await engine.create_token("test", scopes=scopes, namespace=namespace)
    return {"Authorization": f"Bearer {made.token}"}


async def existing(engine: Engine, given: Given) -> dict[str, str]:
    """An execution and a flow of the namespace `shop`."""
    execution = await given.waiting(namespace="shop")
    await engine.create_flow(FLOW_ID, flow_kind="k", namespace="shop")
    return {"{shop}": execution, "{flow}": FLOW_ID}


async def ask(
    http: httpx.AsyncClient,
    route: tuple[str, str, object, str],
    ids: dict[str, str],
    headers: dict[str, str],
) -> int:
    method, path, body, _ = route
    for name, value in ids.items():
        path = path.replace(name, value)
        if isinstance(body, dict):
            body = {key: value if each == name else each for key, each in body.items()}
    request = http.build_request(method, path, json=body, headers=headers)
    return (await http.send(request)).status_code


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route[0]} {route[1]}")
async def test_each_route_needs_its_scope(
    http: httpx.AsyncClient, engine: Engine, given: Given, route: tuple[str, str, object, str]
) -> None:
    ids = await existing(engine, given)
    others = [scope for scope in SCOPES if scope != route[3]]

    assert await ask(http, route, ids, {"Authorization": "Bearer ff_wrong"}) == 401
    assert await ask(http, route, ids, await token(engine, *others)) == 403
    assert await ask(http, route, ids, {}) == 401
    without_body = (*route[:2], None, route[3])
    json = {"content-type": "application/json"}
    assert await ask(http, without_body, ids, await token(engine, *others) | json) == 403


@pytest.mark.parametrize(
    "route",
    # Events never end; see `test_streams`.
    [route for route in ROUTES if route[1] != "/v1/events"],
    ids=lambda route: f"{route[0]} {route[1]}",
)
async def test_a_confined_token_finds_nothing_elsewhere(
    http: httpx.AsyncClient, engine: Engine, given: Given, route: tuple[str, str, object, str]
) -> None:
    ids = await existing(engine, given)
    method, path, *_ = route
    about_one = "{shop}" in path or "{flow}" in path
    about_all = path.startswith(("/v1/admin", "/v1/tokens")) and method != "POST"

    status = await ask(http, route, ids, await token(engine, "admin", namespace="other"))

    if about_one:
        assert status == 404
    elif about_all or path.startswith("/v1/admin"):
        assert status == 403
    else:
        assert status in (200, 201, 204, 404)


async def test_a_confined_token_creates_and_lists_in_its_namespace_only(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    foreign = await given.waiting(namespace="shop")
    mine = await token(engine, "admin", namespace="other")
    body = {"execution_kind": "x"}

    created = await http.post("/v1/executions", json=body, headers=mine)
    denied = await http.post("/v1/executions", json=body | {"namespace": "shop"}, headers=mine)
    listed = (await http.get("/v1/executions", headers=mine)).json()["executions"]
    partition = created.json()["Created"]["execution_id"].partition("}")[0].removeprefix("{fp:")
    by_partition = await http.get(f"/v1/executions?partition={partition}", headers=mine)
    minted = await http.post("/v1/tokens", json={"name": "n", "scopes": ["read"]}, headers=mine)
    wider = await http.post(
        "/v1/tokens", json={"name": "n", "scopes": ["read"], "namespace": "shop"}, headers=mine
    )

    execution_id = created.json()["Created"]["execution_id"]
    assert await engine.get_execution_namespace(execution_id) == "other"
    assert (denied.status_code, denied.json()["code"]) == (403, "namespace_denied")
    assert [each["execution_id"] for each in listed] == [execution_id]
    assert foreign not in by_partition.text
    assert by_partition.json() == {"executions": [execution_id], "next_cursor": None}
    assert minted.json()["namespace"] == "other"
    assert wider.status_code == 403


async def test_an_own_id_means_that_of_the_tokens_namespace(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    headers = await token(engine, "read", "submit", namespace="other")
    body = {"execution_kind": "x", "execution_id": "order-17"}

    await http.post("/v1/executions", json=body, headers=headers)

    found = await http.get("/v1/executions/order-17", headers=headers)
    assert found.json()["namespace"] == "other"


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "bearer {token}", "Basic {token}", "Bearer  {token}", "{token}"],
)
async def test_headers_that_are_not_quite_right_let_nobody_in(
    http: httpx.AsyncClient, engine: Engine, header: str
) -> None:
    made = await engine.create_token("test", scopes=["read"])

    answer = await http.get(
        "/v1/executions", headers={"Authorization": header.replace("{token}", made.token)}
    )

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_without_tokens_anybody_on_this_machine_may_do_everything(
    http: httpx.AsyncClient,
) -> None:
    assert (await http.get("/v1/executions")).status_code == 200


@pytest.mark.parametrize("server_config", [ServerConfig()])
async def test_a_closed_server_takes_nobody_without_a_token(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/executions")).status_code == 401
    assert (await http.get("/healthz")).status_code == 200
    assert (await http.get("/livez")).status_code == 200


@pytest.mark.parametrize("id_is_known", [False, True], ids=["any token", "one token"])
async def test_guessing_tokens_is_throttled_and_keeps_nobody_else_out(
    http: httpx.AsyncClient, engine: Engine, id_is_known: bool
) -> None:
    good, other = await token(engine, "read"), await token(engine, "read")
    forged = [f"Bearer ff_{number:016x}_{'0' * 64}" for number in range(FAILURES_MAX + 1)]
    if id_is_known:
        forged = [good["Authorization"][:-2] + f"{number:02x}" for number in range(256)]
        forged.remove(good["Authorization"])

    guesses = [
        await http.get("/v1/executions", headers={"Authorization": each})
        for each in forged[: FAILURES_MAX + 1]
    ]
    guessed = await http.get("/v1/executions", headers=good)
    others = await http.get("/v1/executions", headers=other)

    assert [each.status_code for each in guesses] == [401] * FAILURES_MAX + [429]
    assert int(guesses[-1].headers["retry-after"]) > 0
    assert guesses[-1].json()["code"] == "rate_limit_exceeded"
    assert (guessed.status_code, others.status_code) == (429 if id_is_known else 200, 200)


@pytest.mark.parametrize("server_config", [ServerConfig(anybody="without_tokens")], ids=["local"])
@pytest.mark.parametrize("way", ["revoked", "expired"])
async def test_the_end_of_the_last_token_opens_nothing(
    http: httpx.AsyncClient, engine: Engine, clock: SettableClock, way: str
) -> None:
    last = await engine.create_token("last", scopes=["admin"], expires_in_ms=1_000)
    if way == "revoked":
        await engine.revoke_token(last.stored.token_id)
    else:
        clock.advance(ms=1_000)

    answer = await http.post("/v1/tokens", json={"name": "mine", "scopes": ["admin"]})

    assert answer.status_code == 401


@pytest.mark.parametrize(
    ("host", "insecure", "anybody"),
    [
        ("127.0.0.1", False, "without_tokens"),
        ("localhost", False, "without_tokens"),
        ("::1", False, "without_tokens"),
        ("0.0.0.0", False, "never"),
        ("example.org", False, "never"),
        ("0.0.0.0", True, "always"),
    ],
)
def test_only_who_is_on_the_machine_needs_no_token(host: str, insecure: bool, anybody: str) -> None:
    assert Listening(host=host).takes(insecure) == anybody


PAGES = ServerConfig(anybody="without_tokens", cors_origins=("https://friend.example",))


@pytest.mark.parametrize("server_config", [PAGES], ids=["local"])
@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Origin": "https://evil.example"}, "origin_denied"),
        ({"Origin": "null"}, "origin_denied"),
        ({"Host": "evil.example"}, "host_denied"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, "host_denied"),
        ({"Origin": "https://friend.example"}, None),
        ({"Host": "localhost:9090", "Origin": "http://localhost:9090"}, None),
        ({"Host": "[::1]:9090"}, None),
        ({"Host": "127.0.0.1"}, None),
    ],
)
async def test_pages_of_other_origins_cannot_use_that_a_server_has_no_tokens(
    http: httpx.AsyncClient, given: Given, headers: dict[str, str], code: str | None
) -> None:
    cancelled = await given.cancelled()

    answer = await http.post(f"/v1/executions/{cancelled}/replay", headers=headers)

    assert answer.json().get("code") == code
    assert answer.status_code == (200 if code is None else 403)


async def test_an_expired_token_lets_nobody_in(
    http: httpx.AsyncClient, engine: Engine, clock: SettableClock
) -> None:
    made = await engine.create_token("test", scopes=["read"], expires_in_ms=1)
    await engine.create_token("other", scopes=["read"])
    clock.advance(ms=1)

    answer = await http.get("/v1/executions", headers={"Authorization": f"Bearer {made.token}"})

    assert answer.status_code == 401


async def test_tokens_are_handed_out_listed_and_revoked_over_http(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    admin = await token(engine, "admin")

    made = await http.post(
        "/v1/tokens",
        json={"name": "ci", "scopes": ["submit", "read"], "expires_in_ms": 1_000},
        headers=admin,
    )
    listed = await http.get("/v1/tokens", headers=admin)
    secret = made.json()["token"]
    used = await http.get("/v1/executions", headers={"Authorization": f"Bearer {secret}"})
    gone = await http.delete(f"/v1/tokens/{made.json()['token_id']}", headers=admin)

    assert (made.status_code, made.json()["scopes"]) == (201, ["read", "submit"])
    assert made.headers["cache-control"] == "no-store"
    assert secret not in listed.text
    assert len(listed.json()["tokens"]) == 2
    assert used.status_code == 200
    assert gone.json()["revoked_at_ms"] is not None


def test_a_window_forgets_after_a_minute() -> None:
    window = Tally(2)

    for _ in range(2):
        assert window.retry_after_s("a", 10.0) is None
        window.count("a", 10.0)

    assert window.retry_after_s("a", 30.0) == 40
    assert window.retry_after_s("b", 30.0) is None
    assert window.retry_after_s("a", 70.0) is None
