"""What every route does when it is asked rightly, and what when nothing can be done.

Routes come from the server's own description: one that is not in the table below fails the test.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import httpx
import msgspec
import pytest

from flowfabric import Engine, connect
from flowfabric.core.limits import DeclaredLimit, QuotaSpec
from flowfabric.core.streams import DurableSummary, Encoding, NewFrame
from flowfabric.server.api import ServerConfig
from flowfabric.signals import SignalToken
from tests.conformance.given import Given
from tests.server.conftest import serving
from tests.server.shop import Names, open_shop
from tests.server.test_access import token
from tests.server.test_confinement import GRANT, QUOTA, SCHEDULE
from tests.server.test_refusals import ENDLESS, OPEN, routes
from tests.silence import Network

EVERY = {"/v1/tokens", "/v1/tokens/{token_id}", "/v1/admin/rotate-waitpoint-secret"}
"""Routes about all namespaces."""
WITHOUT_DATABASE = {"/livez", "/v1/deployment", "/v1/hints", "/v1/signals"}
"""Routes that answer without it, or refuse what the test sends."""
SECOND = "66666666-6666-4666-8666-666666666666"
EDGE = {
    "edge_id": SECOND,
    "upstream_execution_id": "{member}",
    "downstream_execution_id": "{second}",
}
SUMMARY = NewFrame(payload=b'{"a":1}', encoding=Encoding.JSON, mode=DurableSummary())
Asked = tuple[str, object]
EXECUTION = "/v1/executions/{execution}"
SUCCESSES: Sequence[tuple[str, Asked]] = [
    ("GET /healthz", ("/healthz", None)),
    ("GET /readyz", ("/readyz", None)),
    ("GET /livez", ("/livez", None)),
    ("GET /v1/deployment", ("/v1/deployment", None)),
    ("POST /v1/operations/{name}", ("/v1/operations/list_flows", {})),
    # Executions
    ("GET /v1/executions", ("/v1/executions", None)),
    ("POST /v1/executions", ("/v1/executions", {"execution_kind": "x"})),
    ("POST /v1/executions/batch", ("/v1/executions/batch", {"executions": []})),
    ("GET /v1/executions/{id}", (EXECUTION, None)),
    ("GET /v1/executions/{id}/details", (f"{EXECUTION}/details", None)),
    ("GET /v1/executions/{id}/why", (f"{EXECUTION}/why", None)),
    ("GET /v1/executions/{id}/state", (f"{EXECUTION}/state", None)),
    ("GET /v1/executions/{id}/steps", (f"{EXECUTION}/steps", None)),
    ("GET /v1/executions/{id}/attempts", (f"{EXECUTION}/attempts", None)),
    ("GET /v1/executions/{id}/children", (f"{EXECUTION}/children", None)),
    ("GET /v1/executions/{id}/result", ("/v1/executions/{ended}/result", None)),
    ("GET /v1/executions/{id}/outcome", ("/v1/executions/{ended}/outcome", None)),
    ("GET /v1/executions/{id}/stream", ("/v1/executions/{ended}/stream", None)),
    (
        "GET /v1/executions/{id}/attempts/{attempt}/stream",
        (f"{EXECUTION}/attempts/0/stream", None),
    ),
    (
        "GET /v1/executions/{id}/attempts/{attempt}/stream/tail",
        (f"{EXECUTION}/attempts/0/stream/tail", None),
    ),
    (
        "GET /v1/executions/{id}/attempts/{attempt}/summary",
        ("/v1/executions/{summed}/attempts/0/summary", None),
    ),
    ("PUT /v1/executions/{id}/priority", ("/v1/executions/{own}/priority", {"new_priority": 1})),
    ("POST /v1/executions/{id}/replay", ("/v1/executions/{ended}/replay", None)),
    (
        "POST /v1/executions/{id}/reclaim",
        (f"{EXECUTION}/reclaim", GRANT | {"worker_id": "w"}),
    ),
    ("POST /v1/executions/{id}/revoke-lease", (f"{EXECUTION}/revoke-lease", None)),
    ("POST /v1/executions/{id}/cancel", (f"{EXECUTION}/cancel", {"reason": "r"})),
    ("POST /v1/workers/{worker_id}/claim", ("/v1/workers/w/claim", GRANT)),
    # Signals
    ("GET /v1/inbox", ("/v1/inbox", None)),
    (
        "GET /v1/executions/{id}/pending-waitpoints",
        ("/v1/executions/{suspended}/pending-waitpoints", None),
    ),
    (
        "GET /v1/executions/{id}/waitpoints/{waitpoint_id}/token",
        ("/v1/executions/{suspended}/waitpoints/{waitpoint}/token", None),
    ),
    (
        "POST /v1/executions/{id}/signal",
        (
            "/v1/executions/{suspended}/signal",
            {"waitpoint_id": "{waitpoint}", "waitpoint_token": "{secret}", "signal_name": "s"},
        ),
    ),
    (
        "POST /v1/executions/{id}/signals",
        ("/v1/executions/{summed}/signals", {"signal_name": "s", "payload_json": 1}),
    ),
    ("POST /v1/signals", ("/v1/signals", {"waitpoint_token": "{link}", "signal_name": "s"})),
    # Flows
    ("GET /v1/flows", ("/v1/flows", None)),
    ("POST /v1/flows", ("/v1/flows", {"flow_id": SECOND, "flow_kind": "k"})),
    ("GET /v1/flows/{id}", ("/v1/flows/{flow}", None)),
    ("GET /v1/flows/{id}/members", ("/v1/flows/{flow}/members", None)),
    ("POST /v1/flows/{id}/members", ("/v1/flows/{flow}/members", {"execution_id": "{member}"})),
    (
        "POST /v1/flows/{id}/graph",
        (
            "/v1/flows/{flow}/graph",
            {"members": [{"execution_kind": "x", "execution_id": "{second}"}]},
        ),
    ),
    ("POST /v1/flows/{id}/edges", ("/v1/flows/{flow}/edges", EDGE)),
    ("POST /v1/flows/{id}/edges/apply", ("/v1/flows/{flow}/edges/apply", EDGE)),
    (
        "POST /v1/flows/{id}/cancel",
        ("/v1/flows/{flow}/cancel", {"reason": "r", "cancellation_policy": "cancel_all"}),
    ),
    # Schedules, limits and budgets
    ("GET /v1/schedules", ("/v1/schedules", None)),
    ("PUT /v1/schedules/{id}", ("/v1/schedules/{schedule}", SCHEDULE)),
    ("GET /v1/schedules/{id}", ("/v1/schedules/{schedule}", None)),
    ("POST /v1/schedules/{id}/pause", ("/v1/schedules/{schedule}/pause", None)),
    ("POST /v1/schedules/{id}/resume", ("/v1/schedules/{schedule}/resume", None)),
    ("POST /v1/schedules/{id}/run", ("/v1/schedules/{schedule}/run", None)),
    ("DELETE /v1/schedules/{id}", ("/v1/schedules/{schedule}", None)),
    ("GET /v1/limits", ("/v1/limits", None)),
    ("GET /v1/limits/{name}", ("/v1/limits/{limit}", None)),
    ("GET /v1/limits/{name}/use", ("/v1/limits/{limit}/use", None)),
    ("PUT /v1/limits/{name}", ("/v1/limits/{declared}", {"active_concurrency_cap": 1})),
    ("POST /v1/limits/{name}/reset", ("/v1/limits/{declared}/reset", None)),
    ("DELETE /v1/limits/{name}", ("/v1/limits/{limit}", None)),
    ("GET /v1/budgets", ("/v1/budgets", None)),
    ("POST /v1/budgets", ("/v1/budgets", {"budget_id": "team"})),
    ("GET /v1/budgets/{id}", ("/v1/budgets/team", None)),
    ("PATCH /v1/budgets/{id}", ("/v1/budgets/team", {"hard_limits": {"tokens": 9}})),
    ("POST /v1/budgets/{id}/usage", ("/v1/budgets/team/usage", {"dimensions": {"tokens": 1}})),
    ("POST /v1/budgets/{id}/reset", ("/v1/budgets/team/reset", None)),
    ("DELETE /v1/budgets/{id}", ("/v1/budgets/team", None)),
    ("POST /v1/quotas", ("/v1/quotas", QUOTA | {"quota_policy_id": SECOND})),
    # Workers and tokens
    ("GET /v1/workers", ("/v1/workers", None)),
    ("GET /v1/workers/events", ("/v1/workers/events", None)),
    ("GET /v1/tokens", ("/v1/tokens", None)),
    ("POST /v1/tokens", ("/v1/tokens", {"name": "n", "scopes": ["read"]})),
    ("DELETE /v1/tokens/{token_id}", ("/v1/tokens/{token_id}", None)),
    (
        "POST /v1/admin/rotate-waitpoint-secret",
        ("/v1/admin/rotate-waitpoint-secret", {"new_kid": "k9", "new_secret_hex": "00" * 32}),
    ),
]
"""Each route with a request that it grants, in an order in which all can be granted."""


async def fill(engine: Engine, given: Given) -> tuple[Names, dict[str, str]]:
    """A shop, and what else the requests above name."""
    shop = await open_shop(engine, given)
    ended = await given.completed(namespace="shop")
    summed = await given.running(namespace="shop")
    await engine.append_frame(summed.handle, SUMMARY)
    spec = QuotaSpec(active_concurrency_cap=5)
    await engine.declare_limits([DeclaredLimit(name="declared", namespace="shop", spec=spec)])
    secret = await engine.read_waitpoint_token(shop.suspended, shop.waitpoint)
    assert secret is not None
    other = await engine.create_token("other", scopes=["read"])
    link = await given.suspended(namespace="shop")
    (open_,) = (await engine.list_pending_waitpoints(link.execution_id)).waitpoints
    linked = await engine.read_waitpoint_token(link.execution_id, open_.waitpoint_id)
    assert linked is not None
    more = {
        "{ended}": ended.execution_id,
        "{summed}": summed.execution_id,
        "{declared}": "declared",
        "{secret}": secret.reveal(),
        "{link}": SignalToken(link.execution_id, open_.waitpoint_id, linked).reveal(),
        "{token_id}": other.stored.token_id,
        "{second}": engine.new_member_id(shop.flow),
    }
    return shop, more


def filled(value: object, shop: Names, more: Mapping[str, str]) -> object:
    text = msgspec.json.encode(shop.fill(value)).decode()
    for placeholder, each in more.items():
        text = text.replace(placeholder, each)
    return msgspec.json.decode(text)


@pytest.mark.parametrize("server_config", [ServerConfig()], ids=[""])
async def test_each_route_grants_what_is_asked_rightly(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    shop, more = await fill(engine, given)
    confined, every = await token(engine, "admin", namespace="shop"), await token(engine, "admin")
    declared = {each.label: each.declared for each in await routes(http, {})}
    wrong: list[str] = []

    for label, (path, body) in SUCCESSES:
        method, _, template = label.partition(" ")
        url, headers = str(filled(path, shop, more)), every if template in EVERY else confined
        answer = await http.request(
            method,
            url,
            json=filled(body, shop, more) if body is not None else None,
            headers=headers,
        )
        if not answer.is_success or answer.status_code not in declared[label]:
            wrong.append(f"{label}: {answer.status_code} {answer.text[:200]}")

    assert wrong == []
    asked = {label for label, _ in SUCCESSES}
    assert declared.keys() - asked == {"GET /v1/events", "GET /v1/hints"}


@pytest.mark.parametrize("server_config", [ServerConfig(requests_max=0)], ids=[""])
async def test_each_route_refuses_what_comes_too_often(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    admin = await token(engine, "admin")
    wrong: list[str] = []

    for route in await routes(http, {}):
        if route.path not in OPEN:
            answer = await route.ask(http, admin)
            wrong += route.wrong(answer, 429, "rate_limit_exceeded")
            if not int(answer.headers.get("retry-after", 0)):
                wrong.append(f"{route.label}: no Retry-After")

    assert wrong == []


@pytest.fixture
def database(new_database: Callable[[str], str]) -> str:
    return new_database("postgres")


@pytest.fixture
async def away(database: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that anybody may ask, whose database has just gone away."""
    async with (
        Network(database).open() as network,
        await connect(network.url) as engine,
        serving(engine, ServerConfig(anybody="always")) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        assert (await client.get("/v1/executions")).is_success
        network.go_down()
        yield client
        network.heal()


async def test_each_route_tells_an_outage_and_when_to_ask_again(
    away: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    wrong: list[str] = []

    for route in await routes(away, {}):
        if route.path in ENDLESS | WITHOUT_DATABASE:
            continue
        answer = await route.ask(away, {})
        wrong += route.wrong(answer, 503, "transport")
        if not int(answer.headers.get("retry-after", 0)) or "127.0.0.1" in answer.text:
            wrong.append(f"{route.label}: {answer.headers} {answer.text}")

    assert wrong == []
    # However many ask meanwhile, the log tells once that the database is away.
    told = [each.getMessage() for each in caplog.records if each.levelname != "DEBUG"]
    assert len([each for each in told if "does not answer" in each]) == 1
    assert [each for each in told if "the database failed" in each] == []
