"""Operations by name: who may call which, about what, and how values and errors travel."""

from collections.abc import Iterator, Mapping
from typing import get_args

import httpx
import msgspec
import pytest

from flowfabric import Engine, errors
from flowfabric.core.creation import NewExecution
from flowfabric.core.handles import Handle
from flowfabric.core.tokens import Scope
from flowfabric.operations import (
    BODY_BYTES_MAX,
    OPERATIONS,
    Reach,
    RemoteOperation,
    WireError,
    encode,
    raised_again,
    send_error,
)
from tests.conformance.given import Given
from tests.server.test_access import token

FLOW_ID = "11111111-1111-4111-8111-111111111111"
UUID = "22222222-2222-4222-8222-222222222222"
NAMED = {"execution_id", "execution_ids", "handle", "handles", "flow_id", "namespace", "members"}

OTHERS: Mapping[str, object] = {
    "lane_id": "default",
    "lane_ids": ["default"],
    "worker_id": "w",
    "worker_instance_id": "w-1",
    "limit": 1,
    "liveness_ttl_ms": 10_000,
    "reason": "r",
    "detail": "d",
    "step_key": None,
    "key": "k",
    "value": "v",
    "tags": {"k": "v"},
    "name": "n",
    "names": ["lane_id"],
    "text": UUID,
    "new_priority": 1,
    "phase": "active",
    "attempt_index": 0,
    "delay_until_ms": 1,
    "grant_key": "g",
    "edge_id": UUID,
    "policy": {"kind": "all_of"},
    "suspension_id": UUID,
    "waitpoint_id": UUID,
    "waitpoint_key": "wp:x",
    "waitpoint_token": "k1:00",
    "signal_name": "s",
    "idempotency_suffix": "i",
    "resume_condition": {"type": "OperatorOnly"},
    "expires_in_ms": 1_000,
    "schedule_id": "s",
    "budget_id": UUID,
    "quota_policy_id": UUID,
    "reservation_id": "r",
    "idempotency_key": "i",
    "usage": {"custom": {"tokens": 1}},
    "update": {},
    "amounts": {"tokens": 1},
    "used": {"tokens": 1},
    "deltas": {"tokens": 1},
    "dimensions": ["tokens"],
    "kinds": ["x"],
    "count": 1,
    "own_id": "own",
    "after": "0",
    "fence": {"lease_id": UUID, "lease_epoch": 1, "attempt_id": UUID},
    "wanted": {},
    "flow_kind": "k",
    "frame": {"frame_type": "delta", "payload": ""},
    "scopes": ["read"],
    "token_id": "0123",
    "kid": "k",
    "secret_hex": "00",
    "new_kid": "k",
    "new_secret_hex": "00",
    "data": "",
    "result": "",
    "matching": {},
    "partition": 0,
}
"""Something that decodes, for arguments that name nobody's property."""


class Shop:
    """What the namespace `shop` has."""

    def __init__(self, execution_id: str, handle: Handle) -> None:
        self.execution_id = execution_id
        self.handle: object = msgspec.json.decode(encode(handle))

    def arguments(self, operation: RemoteOperation) -> dict[str, object]:
        """Arguments that name them, as far as the operation takes them."""
        return {
            name: value
            for name in operation.names
            if (value := self._value(operation.name, name)) is not None or name in OTHERS
            if name in operation.required or name in NAMED
        }

    def _value(self, operation: str, name: str) -> object:
        handle, execution_id = self.handle, self.execution_id
        structs: dict[tuple[str, str], object] = {
            ("create_execution", "request"): {"execution_kind": "x", "namespace": "shop"},
            ("create_executions", "requests"): [
                {"execution_kind": "x", "namespace": "other", "parent_execution_id": execution_id}
            ],
            ("complete_many", "completions"): [{"handle": handle}],
            ("fail_many", "reports"): [{"handle": handle, "reason": "r"}],
            ("record_steps", "reports"): [{"handle": handle, "step": {"step_key": "s"}}],
            ("append_frames", "appends"): [{"handle": handle, "frames": []}],
            ("post_to_budgets", "requests"): [
                {
                    "type": "Usage",
                    "budget_id": UUID,
                    "amounts": {"tokens": 1},
                    "namespace": "other",
                    "handle": handle,
                }
            ],
            ("upsert_schedule", "definition"): {
                "schedule_id": "s",
                "execution_kind": "x",
                "every_ms": 1_000,
                "namespace": "shop",
            },
            ("create_budget", "definition"): {"budget_id": UUID, "namespace": "shop"},
            ("declare_limits", "limits"): [{"name": "n", "namespace": "shop", "spec": {}}],
            ("claim_from_resume_grant", "token"): {
                "grant": {
                    "type": "ResumeGrant",
                    "execution_id": execution_id,
                    "partition_key": "{fp:0}",
                    "grant_key": "g",
                    "expires_at_ms": 1,
                    "lane_id": "default",
                },
                "worker_id": "w",
                "worker_instance_id": "w-1",
            },
            ("cancel_matching", "matching"): {"namespace": "shop"},
            ("replay_matching", "matching"): {"namespace": "shop"},
            ("next_events", "wanted"): {"namespace": "shop"},
            ("report_usage_admin", "deltas"): [1],
        }
        if (operation, name) in structs:
            return structs[operation, name]
        if name.endswith("execution_id"):
            return execution_id
        mine: dict[str, object] = {
            "execution_ids": [execution_id],
            "members": [execution_id],
            "handle": handle,
            "handles": [handle],
            "flow_id": FLOW_ID,
            "namespace": "shop",
        }
        return mine.get(name, OTHERS.get(name))


@pytest.fixture
async def shop(engine: Engine, given: Given) -> Shop:
    await engine.create_execution(NewExecution(execution_kind="x", namespace="shop"))
    (claimed,) = await engine.claim_many(
        ["default"], limit=1, worker_id="w", worker_instance_id="w-1", namespace="shop"
    )
    await engine.create_flow(FLOW_ID, flow_kind="k", namespace="shop")
    return Shop(claimed.execution_id, claimed.handle)


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


# Who may


async def test_each_operation_needs_one_of_its_scopes(
    http: httpx.AsyncClient, engine: Engine
) -> None:
    for operation in OPERATIONS.values():
        others = [scope for scope in Scope if scope not in {*operation.scopes, Scope.ADMIN}]
        if others:
            refused = await call(http, operation.name, {}, await token(engine, *others))
            assert (refused.status_code, refused.json()["code"]) == (403, "scope_missing")
        for scope in operation.scopes:
            if not operation.required and scope is not Scope.READ:
                continue  # It would do something.
            answer = await call(http, operation.name, {}, await token(engine, scope))
            assert answer.status_code not in (401, 403, 500), (operation.name, answer.text)


async def test_nothing_but_the_table_can_be_called(http: httpx.AsyncClient) -> None:
    for name in ("close", "prepare", "trim_retention", "on", "__init__", "store", "check_token"):
        answer = await call(http, name, {}, {})
        assert (answer.status_code, answer.json()["code"]) == (404, "no_such_operation")


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda each: each.name)
def test_what_is_confined_names_what_it_is_about(operation: RemoteOperation) -> None:
    named = {*operation.names}
    for kind in operation.kinds:
        named |= {*fields_of(kind)}

    if operation.reach is Reach.OWN:
        assert named & NAMED or any(name.endswith("execution_id") for name in named)


async def test_a_confined_caller_reaches_nothing_elsewhere(
    http: httpx.AsyncClient, engine: Engine, shop: Shop
) -> None:
    headers = await token(engine, "admin", namespace="other")
    before = await engine.inspect_execution(shop.execution_id)
    reached: dict[str, str] = {}

    for operation in OPERATIONS.values():
        answer = await call(http, operation.name, shop.arguments(operation), headers)
        if not is_refusal(operation, answer):
            reached[operation.name] = f"{answer.status_code} {answer.text}"

    assert reached == {}
    assert await engine.inspect_execution(shop.execution_id) == before


def is_refusal(operation: RemoteOperation, answer: httpx.Response) -> bool:
    if operation.reach is Reach.NOTHING:
        return True
    if operation.reach is Reach.EVERYTHING:
        return '"code":"namespace_denied"' in answer.text
    if answer.status_code in (403, 404) or answer.json() in (None, {}, []):
        return True
    nothing = ('"code":"not_found"', '"missing":[', '"executions":[]')
    return any(each in answer.text for each in nothing)


@pytest.mark.parametrize("name", ["find_executions", "list_flows", "list_inbox", "list_schedules"])
async def test_lists_of_a_confined_caller_are_of_his_namespace(
    http: httpx.AsyncClient, engine: Engine, shop: Shop, name: str
) -> None:
    mine = await engine.create_execution(NewExecution(execution_kind="x", namespace="other"))
    headers = await token(engine, "read", namespace="other")

    text = (await call(http, name, {}, headers)).text

    assert shop.execution_id not in text
    assert FLOW_ID not in text
    assert (mine.execution_id in text) is (name == "find_executions")


async def test_what_is_elsewhere_and_what_is_nowhere_look_alike(
    http: httpx.AsyncClient, engine: Engine, shop: Shop
) -> None:
    headers = await token(engine, "admin", namespace="other")
    nowhere = shop.execution_id[:-12] + "000000000000"

    for operation in OPERATIONS.values():
        if operation.required != ("execution_id",):
            continue
        answers = [
            await call(http, operation.name, {"execution_id": each}, headers)
            for each in (shop.execution_id, nowhere)
        ]
        first, second = (each.text.replace(nowhere, shop.execution_id) for each in answers)
        assert first == second


async def test_answers_about_many_leave_out_what_is_elsewhere(
    http: httpx.AsyncClient, engine: Engine, shop: Shop
) -> None:
    mine = await engine.create_execution(NewExecution(execution_kind="x", namespace="other"))
    asked = {"execution_ids": [shop.execution_id, mine.execution_id]}
    headers = await token(engine, "admin", namespace="other")

    found = await call(http, "find_outcomes", asked, headers)
    cancelled = await call(http, "cancel_executions", asked | {"reason": "r"}, headers)

    assert found.json() == {"ended": {}, "missing": [shop.execution_id]}
    first, second = cancelled.json()
    assert first["error"]["code"] == "not_found"
    assert second["ok"]["execution_id"] == mine.execution_id


# How it travels


@pytest.mark.parametrize(
    "error",
    [
        errors.NotFound("stream", "x"),
        errors.InvalidInput("field", "is wrong", object()),
        errors.PayloadTooLarge("payload", 1, 2),
        errors.CapabilityMismatch(("gpu",)),
        errors.Transport("x", "y", kind=errors.BackendErrorKind.TIMEOUT, may_have_happened=True),
        errors.BudgetExceeded("no", budget="b", dimension="d", used=1, reserved=2, limit=3),
        errors.ExecutionNotActive(
            "e", lifecycle_phase="p", terminal_outcome="o", lease_epoch=1, attempt_id=None
        ),
        errors.ResourceExhausted("pool", 1, 20),
        errors.KeyUndecided(),
    ],
    ids=lambda error: error.code,
)
def test_errors_are_raised_again_as_what_they_were(error: errors.FlowFabricError) -> None:
    error.add_note("A note.")
    sent = msgspec.json.decode(msgspec.json.encode(send_error(error)), type=WireError)

    again = raised_again(sent)

    if isinstance(error, errors.InvalidInput):
        error.value = None
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert {"value": None} | vars(again) == {"value": None} | vars(error)
    assert again.retryable is error.retryable


async def test_a_batch_stays_one_and_each_gets_an_answer(
    http: httpx.AsyncClient, engine: Engine, given: Given
) -> None:
    claimed = await given.running()
    stale = msgspec.json.decode(encode(claimed.handle)) | {"lease_epoch": 99}
    body = {
        "completions": [
            {"handle": msgspec.json.decode(encode(claimed.handle)), "result": "MQ=="},
            {"handle": stale},
        ]
    }

    done, refused = (await call(http, "complete_many", body, {})).json()

    assert done["ok"]["type"] == "Completed"
    assert refused["error"]["code"] == "invalid_handle"
    assert await engine.get_execution_result(claimed.execution_id) == b"1"


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[]", "application/json", 422),
        (b'{"execution_id": 1}', "application/json", 422),
        (b'{"execution_id": "x", "y": 1}', "application/json", 422),
        (b"{}", "text/plain", 415),
        (b" " * (BODY_BYTES_MAX + 1), "application/json", 413),
        (b'{"execution_id": "nonsense"}', "application/json", 400),
    ],
)
async def test_what_is_no_call_is_refused(
    http: httpx.AsyncClient, content: bytes, kind: str, status: int
) -> None:
    answer = await http.post(
        "/v1/operations/describe_execution", content=content, headers={"Content-Type": kind}
    )

    assert answer.status_code == status
    assert answer.json()["code"]


async def test_clients_are_told_how_ids_are_made(http: httpx.AsyncClient, engine: Engine) -> None:
    told = (await http.get("/v1/deployment")).json()

    assert told["num_flow_partitions"] == engine.deployment.partitions.num_flow
    assert (told["backend"], told["coded"]) == (engine.backend_label(), False)


async def test_hints_tell_when_to_look_again(live: httpx.AsyncClient, engine: Engine) -> None:
    async with live.stream("GET", "/v1/hints?topic=ready:default&topic=lost") as answer:
        lines = answer.aiter_lines()
        while "event: live" not in await anext(lines):
            pass
        await engine.create_execution(NewExecution(execution_kind="x"))
        while (line := await anext(lines)) != "data: ready:default":
            assert "lost" not in line
