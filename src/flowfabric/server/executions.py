"""Executions over HTTP: created, read, signalled, and moved by operators."""

from collections.abc import Sequence
from typing import Annotated, TypeVar

from litestar import Response, Router
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from msgspec import Struct

from flowfabric.core.creation import NewExecution
from flowfabric.core.diagnosis import Explanation
from flowfabric.core.ids import ExecutionId
from flowfabric.core.results import Created, Revoked
from flowfabric.core.states import PublicState
from flowfabric.core.tokens import Scope
from flowfabric.core.views import ExecutionDetails, ExecutionInfo, ExecutionSnapshot
from flowfabric.engine.details import Outcome
from flowfabric.engine.engine import Engine
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.errors import NotFound, OperationTimeout, Validation
from flowfabric.run import Endings
from flowfabric.server import wire
from flowfabric.server.access import Caller, InSession
from flowfabric.server.problems import Refused, problem_of, refuse
from flowfabric.server.routing import EXISTED, JsonAnswer, also, answer, get, post, put

LIST_LIMIT = 50
LIST_LIMIT_MAX = 1_000
WAIT_MS_MAX = 60_000
LARGE_BODY = {"body_limit": 1_048_576}
BATCH_BODY = {"body_limit": 16 * 1_048_576}
MEDIUM_BODY = {"body_limit": 262_144}
NO_STORE = {"Cache-Control": "no-store"}
UNENDED = also(202, "It has not ended.", type(None))
T = TypeVar("T")


class ExecutionList(Struct, kw_only=True):
    """Ids where a partition was asked for, as the reference lists them; else snapshots."""

    executions: list[ExecutionId | ExecutionSnapshot]
    next_cursor: str | None


def check_same(field: str, in_path: str, in_body: str | None) -> None:
    if in_body is not None and in_body != in_path:
        raise refuse(400, "invalid_input", f"path {field} does not match body {field}", field=field)


def new_execution(data: wire.CreateExecution, caller: Caller) -> NewExecution:
    payload, encoding = wire.read_bytes(
        "input", data.input_payload, data.input_base64, data.input_json
    )
    return NewExecution(
        execution_kind=data.execution_kind,
        execution_id=data.execution_id,
        namespace=caller.namespace_for(data.namespace) or "default",
        lane_id=data.lane_id,
        input_payload=payload or b"",
        payload_encoding=data.payload_encoding or encoding,
        priority=data.priority,
        creator_identity=data.creator_identity or caller.name,
        idempotency_key=data.idempotency_key,
        tags=data.tags,
        policy=data.policy,
        delay_until_ms=data.delay_until,
        delay_ms=data.delay_ms,
        execution_deadline_at_ms=data.execution_deadline_at,
    )


@post("/", opt=LARGE_BODY, responses=EXISTED, summary="Create an execution")
async def create(
    data: JSONBody[wire.CreateExecution],
    asked: InSession,
) -> JsonAnswer[wire.Tagged]:
    asked.allow(Scope.SUBMIT)
    created = await asked.engine.create_execution(new_execution(data, asked.caller))
    return answer(created, new=isinstance(created, Created))


@post("/batch", opt=BATCH_BODY, status_code=200, summary="Create many executions at once")
async def create_many(
    data: JSONBody[wire.CreateExecutions],
    asked: InSession,
) -> list[wire.Tagged]:
    asked.allow(Scope.SUBMIT)
    requests = [new_execution(each, asked.caller) for each in data.executions]
    try:
        created = await asked.engine.create_executions(requests)
    except Validation as error:
        raise _told_which(asked.engine, requests, error) from None
    return [wire.tagged(each) for each in created]


def _told_which(engine: Engine, requests: Sequence[NewExecution], error: Validation) -> Exception:
    """The error with the place of the request that is to blame."""
    for number, request in enumerate(requests):
        try:
            engine.check_request(request)
        except Validation as found:
            _, problem = problem_of(found)
            place = f"executions[{number}]"
            problem.field = f"{place}.{problem.field}" if problem.field else place
            problem.error = f"{place}: {problem.error}"
            return Refused(400, problem)
    return error


@get("/", summary="List executions")
async def list_executions(
    asked: InSession,
    partition: Annotated[int | None, QueryParameter(ge=0, le=65_535)] = None,
    cursor: FromQuery[str | None] = None,
    limit: Annotated[int, QueryParameter(ge=0, le=2**31)] = LIST_LIMIT,
    states: Annotated[list[PublicState] | None, QueryParameter(name="state")] = None,
    lane: FromQuery[str | None] = None,
    kind: FromQuery[str | None] = None,
    namespace: FromQuery[str | None] = None,
    tag: FromQuery[str | None] = None,
    created_after_ms: FromQuery[int | None] = None,
    created_before_ms: FromQuery[int | None] = None,
) -> ExecutionList:
    """With a `partition`, ids of that partition in their order; else snapshots, newest first."""
    asked.allow(Scope.READ)
    limit = min(limit, LIST_LIMIT_MAX)
    if partition is not None:
        if partition >= asked.engine.deployment.partitions.num_flow:
            return ExecutionList(executions=[], next_cursor=None)
        ids = await asked.engine.list_executions(
            partition,
            namespace=asked.caller.namespace_for(namespace),
            cursor=cursor or None,
            limit=limit,
        )
        return ExecutionList(executions=list(ids.executions), next_cursor=ids.next_cursor)
    found = await asked.engine.find_executions(
        ExecutionFilter(
            states=tuple(states or ()),
            lane_id=lane,
            execution_kind=kind,
            namespace=asked.caller.namespace_for(namespace),
            tag=None if tag is None else split_tag(tag),
            created_after_ms=created_after_ms,
            created_before_ms=created_before_ms,
        ),
        cursor=cursor or None,
        limit=limit,
    )
    return ExecutionList(executions=list(found.executions), next_cursor=found.next_cursor)


def split_tag(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise refuse(400, "invalid_input", f"tag: must read key=value (got {text!r})", field="tag")
    return key, value


@get("/{id:str}", summary="Read an execution")
async def read(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
) -> ExecutionInfo:
    asked.allow(Scope.READ)
    info = await asked.engine.read_execution_info(await asked.find(id))
    return _existing(info, id)


@get("/{id:str}/details", summary="Everything about an execution")
async def details(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
) -> ExecutionDetails:
    asked.allow(Scope.READ)
    return _existing(await asked.engine.inspect_execution(await asked.find(id)), id)


@get("/{id:str}/why", summary="Why an execution is not running")
async def why(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
) -> Explanation:
    asked.allow(Scope.READ)
    return await asked.engine.explain_execution(await asked.find(id))


@get("/{id:str}/state", summary="The state of an execution")
async def state(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
) -> JsonAnswer[PublicState]:
    asked.allow(Scope.READ)
    return JsonAnswer(_existing(await asked.engine.read_execution_state(await asked.find(id)), id))


@get(
    "/{id:str}/result",
    media_type="application/octet-stream",
    summary="The result of an execution, as it was stored",
)
async def result(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    wait_ms: Annotated[int, QueryParameter(ge=0, le=WAIT_MS_MAX)] = 0,
) -> Response[bytes]:
    """Waits up to `wait_ms` for the execution to end."""
    asked.allow(Scope.READ)
    execution_id = await asked.find(id)
    if wait_ms:
        await asked.wait(_ended(asked.endings, execution_id, wait_ms))
    stored = await asked.engine.get_execution_result(execution_id)
    if stored is None:
        raise NotFound("execution result", id)
    return Response(stored, media_type="application/octet-stream")


@get("/{id:str}/outcome", responses=UNENDED, summary="How an execution ended")
async def outcome(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    wait_ms: Annotated[int, QueryParameter(ge=0, le=WAIT_MS_MAX)] = 0,
) -> Response[Outcome | None]:
    """Waits up to `wait_ms`; 202 without a body for one that has not ended."""
    asked.allow(Scope.READ)
    execution_id = await asked.find(id)
    if await asked.engine.read_execution_state(execution_id) is None:
        raise NotFound("execution", id)
    ended = (await asked.engine.read_outcomes([execution_id])).get(execution_id)
    if ended is None and wait_ms:
        ended = await asked.wait(_ended(asked.endings, execution_id, wait_ms))
    return Response(ended, status_code=202 if ended is None else 200)


async def _ended(endings: Endings, execution_id: ExecutionId, wait_ms: int) -> Outcome | None:
    try:
        return await endings.wait(execution_id, wait_ms / 1_000)
    except OperationTimeout:
        return None


@post("/{id:str}/cancel", status_code=200, summary="Cancel an execution")
async def cancel(
    id: FromPath[str],  # noqa: A002
    data: JSONBody[wire.CancelExecution],
    asked: InSession,
) -> JsonAnswer[wire.Tagged]:
    asked.allow(Scope.OPERATE)
    check_same("execution_id", id, data.execution_id)
    cancelled = await asked.engine.cancel_execution(
        await asked.find(id),
        reason=data.reason,
        source=data.source,
        lease_id=data.lease_id,
        lease_epoch=data.lease_epoch,
        attempt_id=data.attempt_id,
    )
    return answer(cancelled)


@put("/{id:str}/priority", summary="Change the priority of an execution")
async def change_priority(
    id: FromPath[str],  # noqa: A002
    data: JSONBody[wire.ChangePriority],
    asked: InSession,
) -> JsonAnswer[wire.Tagged]:
    asked.allow(Scope.OPERATE)
    return answer(await asked.engine.change_priority(await asked.find(id), data.new_priority))


@post("/{id:str}/replay", status_code=200, summary="Run an ended execution again")
async def replay(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
) -> JsonAnswer[wire.Tagged]:
    asked.allow(Scope.OPERATE)
    replayed = await asked.engine.replay_execution(
        await asked.find(id), requested_by=asked.caller.name
    )
    return answer(replayed)


@post("/{id:str}/revoke-lease", status_code=200, summary="Take an execution from its worker")
async def revoke_lease(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
) -> JsonAnswer[wire.Tagged]:
    asked.allow(Scope.OPERATE)
    revoked = await asked.engine.revoke_lease(await asked.find(id), reason="operator_revoke")
    if isinstance(revoked, Revoked):
        # Text, as the reference sends it.
        fields: dict[str, object] = {
            "lease_id": revoked.lease_id,
            "lease_epoch": str(revoked.lease_epoch),
        }
        return JsonAnswer({"Revoked": fields})
    return answer(revoked)


def _existing(found: T | None, text: str) -> T:
    if found is None:
        raise NotFound("execution", text)
    return found


routes = Router(
    path="/v1/executions",
    tags=["executions"],
    route_handlers=[
        create,
        create_many,
        list_executions,
        read,
        details,
        why,
        state,
        result,
        outcome,
        cancel,
        change_priority,
        replay,
        revoke_lease,
    ],
)
