"""A token for one namespace neither reads nor touches another, by any operation or route.

Operations and routes come from the tables of the server itself, so that a new one is asked as
well. Each is asked about what another namespace has and about what is nowhere: what comes back
must be the same, and the other namespace must be as it was.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import httpx
import msgspec
import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core import ids
from flowfabric.core.budget_terms import BudgetDefinition
from flowfabric.core.creation import NewExecution
from flowfabric.core.limits import policy_id_of
from flowfabric.core.streams import NewFrame
from flowfabric.flows.nodes import member_uuid
from flowfabric.operations import OPERATIONS, Reach, RemoteOperation
from flowfabric.server.confinement import ConfinedEngine
from flowfabric.submission import child_id
from tests.conformance.given import Given
from tests.server.shop import (
    NAMED,
    Names,
    leaks,
    nowhere,
    open_shop,
    state_of,
    without_names,
)
from tests.server.test_access import token
from tests.server.test_lists import fill

CREATING = {"create_execution", "create_flow", "create_budget", "create_quota_policy"}
"""Operations that take an id which nobody has."""
COUNTING = {
    "report_usage",
    "reserve_budget",
    "settle_reservation",
    "post_to_budgets",
    "report_usage_admin",
}
"""Those that count for budgets, which need not exist yet."""
UNALIKE = {"create_token", *CREATING}
PLACEHOLDERS = {
    ("executions", "id"): "{execution}",
    ("executions", "attempt"): "0",
    ("executions", "waitpoint_id"): "{waitpoint}",
    ("flows", "id"): "{flow}",
    ("budgets", "id"): "{budget}",
    ("schedules", "id"): "{schedule}",
    ("limits", "name"): "{limit}",
    ("workers", "worker_id"): "{worker}",
    ("tokens", "token_id"): "0123",
}
"""What stands for the parameters of paths."""
ELSEWHERE = {"/v1/operations/{name}", "/v1/hints"}
"""Routes with tests of their own."""
MEMBER = {"execution_kind": "x", "execution_id": "{member}"}
EDGE = {
    "edge_id": "{waitpoint}",
    "upstream_execution_id": "{execution}",
    "downstream_execution_id": "{member}",
}
GRANT = {"lane_id": "default", "worker_instance_id": "{worker}", "grant_ttl_ms": 5_000}
QUOTA = {"window_seconds": 1, "max_requests_per_window": 1, "max_concurrent": 0}
SCHEDULE = {"execution_kind": "x", "every_ms": 60_000}
BODIES: Mapping[str, Sequence[Mapping[str, object]]] = {
    "POST /v1/executions": [
        {"execution_kind": "x", "namespace": "{namespace}"},
        {"execution_kind": "x", "policy": {"quota_policies": [{"quota_policy_id": "{quota}"}]}},
    ],
    "POST /v1/executions/batch": [
        {"executions": [{"execution_kind": "x", "namespace": "{namespace}"}]},
        {
            "executions": [
                {
                    "execution_kind": "x",
                    "policy": {"quota_policies": [{"quota_policy_id": "{quota}"}]},
                }
            ]
        },
    ],
    "POST /v1/executions/{id}/cancel": [{"reason": "r"}],
    "POST /v1/signals": [{"waitpoint_token": "fft_0", "signal_name": "s"}],
    "POST /v1/executions/{id}/signal": [
        {"waitpoint_id": "{waitpoint}", "waitpoint_token": "k1:00", "signal_name": "s"}
    ],
    "POST /v1/executions/{id}/signals": [{"signal_name": "s"}],
    "PUT /v1/executions/{id}/priority": [{"new_priority": 1}],
    "POST /v1/executions/{id}/reclaim": [GRANT | {"worker_id": "w"}],
    "POST /v1/flows": [
        {"flow_id": "{flow}", "flow_kind": "k", "namespace": "{namespace}"},
    ],
    "POST /v1/flows/{id}/members": [{"execution_id": "{execution}"}],
    "POST /v1/flows/{id}/graph": [{}, {"members": ["{execution}"]}, {"members": [MEMBER]}],
    "POST /v1/flows/{id}/edges": [EDGE],
    "POST /v1/flows/{id}/edges/apply": [EDGE],
    "POST /v1/flows/{id}/cancel": [{"reason": "r", "cancellation_policy": "cancel_all"}],
    "POST /v1/budgets": [
        {"budget_id": "team", "namespace": "{namespace}"},
        {"budget_id": "mine", "scope_type": "namespace", "scope_id": "{namespace}"},
    ],
    "POST /v1/budgets/{id}/usage": [
        {"dimensions": {"tokens": 1}, "namespace": "{namespace}"},
    ],
    "POST /v1/quotas": [QUOTA | {"quota_policy_id": "{quota}", "namespace": "{namespace}"}],
    "PATCH /v1/budgets/{id}": [{"hard_limits": {"tokens": 1}}],
    "PUT /v1/limits/{name}": [{"active_concurrency_cap": 1}],
    "PUT /v1/schedules/{id}": [SCHEDULE],
    "POST /v1/workers/{worker_id}/claim": [GRANT],
    "POST /v1/tokens": [{"name": "n", "scopes": ["read"], "namespace": "{namespace}"}],
    "POST /v1/admin/rotate-waitpoint-secret": [{"new_kid": "k9", "new_secret_hex": "00" * 32}],
}
"""What each route is sent, so that it names what the namespace has."""
TAKEN: Mapping[str, Sequence[Mapping[str, object]]] = {
    "/v1/executions": [
        {"execution_kind": "x", "execution_id": "{execution}"},
        {"execution_kind": "x", "policy": {"budget_ids": ["{budget}"]}},
    ],
    "/v1/executions/batch": [
        {"executions": [{"execution_kind": "x", "execution_id": "{suspended}"}]},
        {"executions": [{"execution_kind": "x", "policy": {"budget_ids": ["{budget}"]}}]},
    ],
    "/v1/flows": [{"flow_id": "{flow}", "flow_kind": "k"}],
    "/v1/flows/{mine}/members": [{"execution_id": "{execution}"}],
    "/v1/flows/{mine}/graph": [
        {"members": ["{execution}"]},
        {"members": [{"execution_kind": "x", "execution_id": "{member}"}]},
        {"members": [{"execution_kind": "x", "policy": {"budget_ids": ["{budget}"]}}]},
        {
            "joins": [
                {
                    "downstream_execution_id": "{execution}",
                    "dependencies": [{"upstream_execution_id": "{suspended}"}],
                }
            ]
        },
    ],
    "/v1/flows/{mine}/edges": [EDGE],
    "/v1/flows/{mine}/edges/apply": [EDGE],
    "/v1/budgets": [{"budget_id": "{budget}"}],
    "/v1/budgets/{budget}/usage": [{"dimensions": {"tokens": 1}}],
    "/v1/budgets/{budget}/reset": [{}],
    "/v1/quotas": [QUOTA | {"quota_policy_id": "{quota}"}],
    "/v1/operations/upsert_schedule": [
        {
            "definition": {
                "schedule_id": "s",
                "execution_kind": "x",
                "every_ms": 1_000,
                "namespace": "other",
                "policy": {"budget_ids": ["{budget}"]},
            }
        }
    ],
    "/v1/operations/create_executions": [
        {
            "requests": [
                {
                    "execution_kind": "x",
                    "namespace": "other",
                    "gates": [{"owner_kind": "budget", "owner_id": "{budget}", "key": ""}],
                }
            ]
        },
    ],
}
"""Requests of one's own namespace that use what another has."""
FRAME = NewFrame(frame_type="token", payload=b"x")
MINE = "55555555-5555-4555-8555-555555555555"


@pytest.fixture
async def shop(engine: Engine, given: Given) -> Names:
    return await open_shop(engine, given)


async def call(
    http: httpx.AsyncClient, name: str, arguments: object, headers: dict[str, str]
) -> httpx.Response:
    return await http.post(f"/v1/operations/{name}", json=arguments, headers=headers)


def fields_of(kind: object) -> Iterator[str]:
    """The names within a type, however deep."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            yield field.name
            yield from fields_of(field.type) if field.name != "members" else ()
    for inner in get_args(kind):
        yield from fields_of(inner)


# Operations


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda each: each.name)
def test_what_is_confined_names_what_it_is_about(operation: RemoteOperation) -> None:
    named = {*operation.names}
    for field in structs.fields(operation.arguments):
        named |= {*fields_of(field.type)}

    if operation.reach is Reach.OWN:
        told = {"quota_policy_id", *NAMED}
        assert named & told or any(name.endswith("execution_id") for name in named)


def test_a_confined_engine_has_the_operations_of_the_table_and_no_other() -> None:
    checked = {name for name in dir(Engine) if name in vars(ConfinedEngine)}

    assert OPERATIONS.keys() <= checked
    for name in ("create_checked", "check_token", "fire_due_schedules", "find_namespaces", "close"):
        assert name in checked


@pytest.mark.parametrize("own", [False, True], ids=["its namespace", "ones own"])
async def test_no_operation_reaches_another_namespace(
    http: httpx.AsyncClient, engine: Engine, shop: Names, own: bool
) -> None:
    headers = await token(engine, "admin", namespace="other")
    ghost, before = nowhere(shop), await state_of(engine, shop)
    wrong: dict[str, object] = {}

    for operation in OPERATIONS.values():
        if operation.reach is Reach.NOTHING or (own and operation.name in CREATING):
            continue
        asked = shop.arguments(operation, own=own)
        answer = await call(http, operation.name, asked, headers)
        again = await call(http, operation.name, ghost.arguments(operation, own=own), headers)
        told = (answer.status_code, without_names(answer.text, shop))
        same = told == (again.status_code, without_names(again.text, ghost))
        leaked = leaks(answer.text, shop, str(asked))
        if leaked or answer.status_code == 422 or not (same or operation.name in UNALIKE):
            wrong[operation.name] = (leaked, answer.text, again.text)

    assert wrong == {}
    assert await state_of(engine, shop) == before


@pytest.mark.parametrize("operation", sorted(CREATING | COUNTING))
async def test_an_id_that_is_taken_elsewhere_is_not_found(
    http: httpx.AsyncClient, engine: Engine, shop: Names, operation: str
) -> None:
    headers = await token(engine, "admin", namespace="other")
    arguments = shop.arguments(OPERATIONS[operation], own=True)

    answer = await call(http, operation, arguments, headers)

    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


@pytest.mark.parametrize("taken", [False, True], ids=["free", "taken"])
async def test_nobody_else_takes_what_a_name_stands_for(
    http: httpx.AsyncClient, engine: Engine, given: Given, taken: bool
) -> None:
    order, flow = engine.named_execution_id("order-17", "shop"), ids.named_flow_id("f", "shop")
    budget, limit = ids.named_budget_id("team", "shop"), policy_id_of("shop", "provider")
    node = ids.member_execution_id(flow, member_uuid(flow, 0), engine.deployment.partitions)
    if taken:
        await given.waiting(namespace="shop", execution_id="order-17")
        await engine.create_flow(flow, flow_kind="k", namespace="shop")
        await engine.create_budget(BudgetDefinition(budget_id="team", namespace="shop"))
        await engine.create_quota_policy(limit, max_concurrent=1, namespace="shop")
    headers = await token(engine, "admin", namespace="other")
    new = {"execution_kind": "x"}
    graph = {"members": [new | {"execution_id": node}]}
    requests: list[tuple[str, object]] = [
        ("executions", new | {"execution_id": order}),
        ("executions", new | {"execution_id": child_id(engine, order, "charge")}),
        ("executions", new | {"policy": {"budget_ids": [budget]}}),
        ("flows", {"flow_id": flow, "flow_kind": "k"}),
        (f"flows/{flow}/graph", graph),
        ("budgets", {"budget_id": budget}),
        (f"budgets/{budget}/usage", {"dimensions": {"tokens": 1}}),
        ("quotas", QUOTA | {"quota_policy_id": limit}),
    ]

    answers = [
        await http.post(f"/v1/{each}", json=body, headers=headers) for each, body in requests
    ]

    assert {each.json().get("code") for each in answers} == {"not_found"}
    mine = await http.post("/v1/flows", json={"flow_id": MINE, "flow_kind": "k"}, headers=headers)
    assert mine.is_success
    attempts: list[tuple[str, object]] = [
        ("/v1/executions", new | {"execution_id": node}),
        (f"/v1/flows/{MINE}/graph", graph),
    ]
    for path, body in attempts:
        answer = await http.post(path, json=body, headers=headers)
        assert answer.json().get("code") in ("not_found", "invalid_input"), answer.text
    theirs = await token(engine, "admin", namespace="shop")
    for path, body in requests:
        answer = await http.post(f"/v1/{path}", json=body, headers=theirs)
        assert answer.is_success, answer.text


async def test_parts_of_ids_are_those_of_ones_own(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    mine = await given.waiting(namespace="other", execution_id=f"{MINE[:-1]}1")
    for last in "23":
        await given.waiting(namespace="shop", execution_id=f"{MINE[:-1]}{last}")
    headers = await token(engine, "read", namespace="other")

    async def resolved(text: str) -> object:
        return (await call(http, "resolve_execution_id", {"text": text}, headers)).json()

    assert await resolved("5555") == mine
    assert await resolved(f"{MINE[:-1]}1") == mine
    for elsewhere in (f"{MINE[:-1]}2", "555555555552"):
        assert "not found" in str(await resolved(elsewhere))


@pytest.mark.parametrize("name", ["find_executions", "list_flows", "list_inbox", "list_schedules"])
async def test_lists_of_a_confined_caller_are_of_his_namespace(
    http: httpx.AsyncClient, engine: Engine, shop: Names, name: str
) -> None:
    mine = await engine.create_execution(NewExecution(execution_kind="x", namespace="other"))
    headers = await token(engine, "read", namespace="other")

    text = (await call(http, name, {}, headers)).text

    assert leaks(text, shop, "") == []
    assert (mine.execution_id in text) is (name == "find_executions")


async def test_answers_about_many_leave_out_what_is_elsewhere(
    http: httpx.AsyncClient, engine: Engine, shop: Names
) -> None:
    mine = await engine.create_execution(NewExecution(execution_kind="x", namespace="other"))
    asked = {"execution_ids": [shop.execution, mine.execution_id]}
    headers = await token(engine, "admin", namespace="other")

    found = await call(http, "find_outcomes", asked, headers)
    cancelled = await call(http, "cancel_executions", asked | {"reason": "r"}, headers)

    assert found.json() == {"ended": {}, "missing": [shop.execution]}
    first, second = cancelled.json()
    assert first["error"]["code"] == "not_found"
    assert second["ok"]["execution_id"] == mine.execution_id


async def test_a_handle_of_another_namespace_is_worth_nothing(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    claimed = await given.running(namespace="shop")
    handle = msgspec.json.decode(msgspec.json.encode(claimed.handle))
    headers = await token(engine, "work", namespace="other")

    answer = await call(http, "complete", {"handle": handle}, headers)

    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert await engine.read_execution_state(claimed.execution_id) == "active"


async def test_what_one_owns_is_named_freely(http: httpx.AsyncClient, engine: Engine) -> None:
    headers = await token(engine, "admin", namespace="other")
    await engine.create_quota_policy(MINE, max_concurrent=1, namespace="other")
    budget = ids.named_budget_id("team", "other")
    policy = {
        "budget_ids": [budget],
        "quota_policies": [{"quota_policy_id": MINE}],
    }

    created = await http.post(
        "/v1/executions", json={"execution_kind": "x", "policy": policy}, headers=headers
    )
    gate = {"owner_kind": "budget", "owner_id": budget, "key": ""}
    request = {"execution_kind": "x", "namespace": "other", "gates": [gate]}
    limited = await call(http, "create_executions", {"requests": [request]}, headers)

    assert (created.status_code, limited.status_code) == (201, 200), limited.text


# Routes


async def test_no_route_reaches_another_namespace(
    http: httpx.AsyncClient, engine: Engine, shop: Names
) -> None:
    headers = await token(engine, "admin", namespace="other")
    ghost, before = nowhere(shop), await state_of(engine, shop)
    described = (await http.get("/docs/openapi.json")).json()["paths"]
    wrong: dict[str, object] = {}

    # What is created under a name of one's own comes last: others ask about the same name.
    asked = sorted(requests_of(described), key=lambda each: each[1] == "PUT")
    for path, method, body in asked:
        url, sent = str(shop.fill(path)), shop.fill(body)
        answer = await http.request(method, url, json=sent, headers=headers)
        again = await http.request(
            method, str(ghost.fill(path)), json=ghost.fill(body), headers=headers
        )
        told = (answer.status_code, without_names(answer.text, shop))
        same = told == (again.status_code, without_names(again.text, ghost))
        leaked = leaks(answer.text, shop, f"{url} {sent}")
        if leaked or not same or answer.status_code not in expected(path, method):
            wrong[f"{method} {path} {body}"] = (leaked, answer.text, again.text)

    assert wrong == {}
    assert await state_of(engine, shop) == before


def expected(path: str, method: str) -> tuple[int, ...]:
    """Statuses of what names another namespace, or lists one's own."""
    if path == "/v1/signals" or path.endswith("/signal"):
        return (400,)  # Its token is what it needs, and wrong.
    if method == "PUT" and path in ("/v1/schedules/{schedule}", "/v1/limits/{limit}"):
        return (200, 201)  # Each namespace has its own of that name.
    return (403, 404) if "{" in path.replace("{worker}", "") else (200, 204, 403, 404)


def requests_of(
    described: Mapping[str, Mapping[str, dict[str, object]]],
) -> Iterator[tuple[str, str, object]]:
    """Each route, with all that could name something."""
    for path, methods in described.items():
        if path in ELSEWHERE or not path.startswith("/v1/"):
            continue
        for method, about in methods.items():
            parameters = about.get("parameters", [])
            assert isinstance(parameters, list)
            filled, queries = path, [""]
            for each in parameters:
                kind, name = each["in"], each["name"]
                if kind == "path":
                    family = path.split("/")[2]
                    filled = filled.replace(f"{{{name}}}", PLACEHOLDERS[family, name])
                elif name in ("namespace", "execution_id"):
                    queries.append(f"?{name}={{{name.removesuffix('_id')}}}")
            if path == "/v1/events":
                queries.remove("")  # It never ends.
            route = f"{method.upper()} {path}"
            bodies = BODIES[route] if "requestBody" in about else [None]
            yield from (
                (filled + query, method.upper(), body) for query in queries for body in bodies
            )


@pytest.mark.parametrize("path", TAKEN)
async def test_what_another_namespace_has_cannot_be_used(
    http: httpx.AsyncClient, engine: Engine, shop: Names, path: str
) -> None:
    headers = await token(engine, "admin", namespace="other")
    await engine.create_flow(MINE, flow_kind="k", namespace="other")
    before = await state_of(engine, shop)

    for body in TAKEN[path]:
        url = str(shop.fill(path.replace("{mine}", MINE)))
        answer = await http.post(url, json=shop.fill(body), headers=headers)

        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), answer.text
    assert await state_of(engine, shop) == before


async def test_cursors_of_another_namespace_tell_nothing(
    http: httpx.AsyncClient, engine: Engine, given: Given, shop: Names
) -> None:
    """They are places in a list: what is there is told to its namespace alone."""
    for namespace in ("shop", "other"):
        await fill(engine, given, namespace)
        await given.suspended(namespace=namespace)
    await engine.create_flow(MINE, flow_kind="k", namespace="other")
    everything = await token(engine, "admin")
    confined = await token(engine, "admin", namespace="other")
    described = (await http.get("/docs/openapi.json")).json()["paths"]
    asked, wrong = set[str](), dict[str, object]()

    for path, method, _ in requests_of(described):
        if method != "GET" or not takes_cursor(described, path) or "?" in path:
            continue
        url = str(shop.fill(path))
        theirs = await http.get(url, params={"limit": 1}, headers=everything)
        cursor = theirs.json().get("next_cursor")
        if cursor is None:
            continue
        asked.add(path)
        found = await http.get(url, params={"cursor": cursor}, headers=confined)
        missed = await http.get(
            url, params={"cursor": renamed(cursor, shop, nowhere(shop))}, headers=confined
        )
        leaked = leaks(found.text, shop, cursor)
        if leaked or (found.status_code, found.text) != (missed.status_code, missed.text):
            wrong[path] = (leaked, found.text, missed.text)

    assert wrong == {}
    assert {"/v1/executions", "/v1/flows", "/v1/inbox", "/v1/schedules"} <= asked
    assert {"/v1/limits", "/v1/budgets", "/v1/workers", "/v1/tokens"} <= asked


def takes_cursor(described: Mapping[str, Mapping[str, dict[str, object]]], filled: str) -> bool:
    for path, methods in described.items():
        parameters = methods.get("get", {}).get("parameters", [])
        assert isinstance(parameters, list)
        same = [part for part in path.split("/") if not part.startswith("{")]
        if same == [part for part in filled.split("/") if not part.startswith("{")]:
            return any(each["name"] == "cursor" for each in parameters)
    return False


def renamed(text: str, names: Names, others: Names) -> str:
    """The same about somebody else."""
    for placeholder, each in names.texts().items():
        text = text.replace(each, others.texts()[placeholder])
    return text


async def test_hints_about_the_streams_of_others_stay_silent(
    live: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    theirs, mine = await given.running(namespace="shop"), await given.running(namespace="other")
    headers = await token(engine, "read", namespace="other")
    topics = "&".join(f"topic=stream:{each.execution_id[-36:]}" for each in (theirs, mine))

    async with live.stream("GET", f"/v1/hints?{topics}", headers=headers) as answer:
        lines = answer.aiter_lines()
        while "event: live" not in await anext(lines):
            pass
        for claimed in (theirs, mine):
            await engine.append_frame(claimed.handle, FRAME)
        while "stream:" not in (line := await anext(lines)):
            pass

    assert line == f"data: stream:{mine.execution_id[-36:]}"
