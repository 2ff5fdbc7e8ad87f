"""What every route refuses: callers without the right token, and bodies that are wrong.

Routes come from the server's own description, so that a new one is asked as well.
"""

from collections.abc import AsyncIterator, Iterator, Mapping

import httpx
import msgspec
import pytest

from flowfabric import Engine
from flowfabric.core import ids
from flowfabric.server.api import BODY_LIMIT, ServerConfig
from flowfabric.testing import SettableClock
from tests.server.shop import FLOW_ID
from tests.server.test_access import SCOPES, token
from tests.server.test_confinement import BODIES, PLACEHOLDERS

pytestmark = pytest.mark.parametrize("server_config", [ServerConfig()], ids=[""])

OPEN = {"/healthz", "/readyz", "/livez", "/v1/executions/{id}/signal", "/v1/signals"}
"""They need no token; the last two have one of their own in the body."""
ANY_SCOPE = {"/v1/deployment", "/v1/hints", "/v1/operations/{name}"}
"""They take every token; operations check the scopes of their table."""
ENDLESS = {"/v1/events"}
NOWHERE = ids.flow_execution_id(ids.FlowId(FLOW_ID), FLOW_ID, ids.PartitionConfig())
NAMES = {
    "{execution}": NOWHERE,
    "{waitpoint}": FLOW_ID,
    "{flow}": FLOW_ID,
    "{budget}": FLOW_ID,
    "{schedule}": "nightly",
    "{limit}": "provider",
    "{worker}": "w-1",
    "{name}": "list_flows",
    "{member}": NOWHERE.replace("1111", "2222"),
    "{quota}": FLOW_ID,
    "{namespace}": "default",
}
"""Nothing of the kind exists: what is let through does nothing."""
Described = Mapping[str, Mapping[str, Mapping[str, object]]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many wrong tokens come from one address here."""
    monkeypatch.setattr("flowfabric.server.access.FAILURES_MAX", 10_000)


class Route:
    """One request that is described, and what may be answered."""

    def __init__(self, path: str, method: str, about: Mapping[str, object]) -> None:
        self.path, self.method, self.url = path, method.upper(), path
        self.label = f"{self.method} {path}"
        self.takes_body = "requestBody" in about
        responses, parameters = about["responses"], about.get("parameters", [])
        assert isinstance(responses, dict)
        assert isinstance(parameters, list)
        self.declared = {int(status) for status in responses}
        family = path.split("/")[2] if path.startswith("/v1/") else ""
        for each in parameters:
            if each["in"] == "path":
                stands = PLACEHOLDERS.get((family, each["name"]), f"{{{each['name']}}}")
                self.url = self.url.replace(f"{{{each['name']}}}", NAMES.get(stands, stands))
        if path == "/v1/hints":
            self.url += "?topic=x"

    async def ask(
        self, http: httpx.AsyncClient, headers: Mapping[str, str], body: object = None
    ) -> httpx.Response:
        if body is None and self.label in BODIES:
            body = _named(BODIES[self.label][0])
        if body is None and self.takes_body:
            body = {}
        return await http.request(self.method, self.url, json=body, headers=headers)

    def wrong(self, answer: httpx.Response, status: int, code: str) -> list[str]:
        """What is wrong with an answer that should refuse."""
        told = f"{self.label}: {answer.status_code} {answer.text[:200]}"
        if answer.status_code != status or status not in self.declared:
            return [told]
        if answer.headers["content-type"].partition(";")[0] != "application/json":
            return [told]
        problem = answer.json()
        return [] if problem["code"] == code and problem["error"] else [told]


def _named(body: object) -> object:
    text = msgspec.json.encode(body).decode()
    for placeholder, name in NAMES.items():
        text = text.replace(placeholder, name)
    return msgspec.json.decode(text)


async def routes(http: httpx.AsyncClient, headers: Mapping[str, str]) -> list[Route]:
    described = (await http.get("/docs/openapi.json", headers=headers)).json()["paths"]
    found = list(_routes(described))
    assert len(found) > 50
    return found


def _routes(described: Described) -> Iterator[Route]:
    for path, methods in described.items():
        yield from (Route(path, method, about) for method, about in methods.items())


async def test_each_route_refuses_whoever_has_no_valid_token(
    http: httpx.AsyncClient, engine: Engine, clock: SettableClock
) -> None:
    expired = await engine.create_token("expired", scopes=["admin"], expires_in_ms=1)
    revoked = await engine.create_token("revoked", scopes=["admin"])
    await engine.revoke_token(revoked.stored.token_id)
    clock.advance(ms=1)
    presented = [
        {},
        {"Authorization": "Bearer ff_wrong"},
        {"Authorization": f"Bearer {expired.token}"},
        {"Authorization": f"Bearer {revoked.token}"},
    ]
    wrong: list[str] = []

    for route in await routes(http, {}):
        for headers in presented if route.path not in OPEN else ():
            answer = await route.ask(http, headers)
            wrong += route.wrong(answer, 401, "unauthorized")
            if answer.headers.get("www-authenticate") != "Bearer":
                wrong.append(f"{route.label}: no challenge")

    assert wrong == []


async def test_each_route_takes_the_tokens_of_one_scope_alone(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    headers = {scope: await token(engine, scope) for scope in SCOPES}
    wrong: list[str] = []

    for route in await routes(http, {}):
        if route.path in OPEN | ANY_SCOPE:
            continue
        taken = ["read"] if route.path in ENDLESS else []
        for scope in SCOPES:
            if scope not in taken:
                answer = await route.ask(http, headers[scope])
                if answer.status_code == 403:
                    wrong += route.wrong(answer, 403, "scope_missing")
                else:
                    taken.append(scope)
        if len(taken) > 1:
            wrong.append(f"{route.label}: {taken}")

    assert wrong == []


async def test_each_route_refuses_bodies_that_are_too_large(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    admin = await token(engine, "admin")
    wrong: list[str] = []

    async def unannounced() -> AsyncIterator[bytes]:
        for _ in range(2):
            yield b" " * BODY_LIMIT

    for route in await routes(http, {}):
        headers = admin | {"Content-Type": "application/json"}
        announced = headers | {"Content-Length": str(2**40)}
        answer = await http.request(route.method, route.url, headers=announced)
        wrong += route.wrong(answer, 413, "payload_too_large")
        if answer.json()["limit_bytes"] == BODY_LIMIT and route.takes_body:
            flood = await http.request(
                route.method, route.url, headers=headers, content=unannounced()
            )
            wrong += route.wrong(flood, 413, "payload_too_large")

    assert wrong == []


async def test_each_route_that_takes_a_body_refuses_one_of_another_shape(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    admin = await token(engine, "admin")
    wrong: list[str] = []
    cases = [
        (b'{"', "application/json", 400, "invalid_json"),
        (b"\xff\xfe", "application/json", 400, "invalid_json"),
        (b'{"reason": "\xff"}', "application/json", 400, "invalid_json"),
        (
            b'{"odd":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
            "application/json",
            400,
            "invalid_json",
        ),
        (b"[1]", "application/json", 422, "invalid_json"),
        (b"{}", "text/plain", 415, "unsupported_media_type"),
    ]

    for route in await routes(http, {}):
        for body, kind, status, code in cases if route.takes_body else ():
            headers = admin | {"Content-Type": kind}
            answer = await http.request(route.method, route.url, headers=headers, content=body)
            wrong += route.wrong(answer, status, code)

    assert wrong == []
