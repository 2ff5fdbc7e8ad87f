"""Operations by name: who may call which, about what, and how values and errors travel."""

import httpx
import msgspec
import pytest

from flowfabric import Engine, errors
from flowfabric.core.api_tokens import Scope
from flowfabric.core.creation import NewExecution
from flowfabric.operations import (
    BODY_BYTES_MAX,
    OPERATIONS,
    WireError,
    encode,
    raised_again,
    send_error,
)
from tests.conformance.given import Given
from tests.server.shop import required
from tests.server.test_access import token


async def call(
    http: httpx.AsyncClient, name: str, arguments: object, headers: dict[str, str]
) -> httpx.Response:
    return await http.post(f"/v1/operations/{name}", json=arguments, headers=headers)


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
            if not required(operation) and scope is not Scope.READ:
                continue  # It would do something.
            answer = await call(http, operation.name, {}, await token(engine, scope))
            assert answer.status_code not in (401, 403, 500), (operation.name, answer.text)


async def test_nothing_but_the_table_can_be_called(http: httpx.AsyncClient) -> None:
    for name in ("close", "prepare", "trim_retention", "on", "__init__", "store", "check_token"):
        answer = await call(http, name, {}, {})
        assert (answer.status_code, answer.json()["code"]) == (404, "no_such_operation")


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
