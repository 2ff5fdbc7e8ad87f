"""Executions over HTTP: created, read, and steered by operators."""

from collections.abc import Sequence
from typing import Annotated

from litestar import Response
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from msgspec import UNSET, Meta, Struct, structs

from flowfabric.core.api_tokens import Scope
from flowfabric.core.creation import NewExecution
from flowfabric.core.diagnosis import Explanation
from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import Attempt
from flowfabric.core.results import Created, Revoked
from flowfabric.core.states import PublicState
from flowfabric.core.views import ExecutionDetails, ExecutionInfo, ExecutionSnapshot, StepView
from flowfabric.engine.details import ChildPage, Outcome
from flowfabric.engine.engine import Engine
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.errors import OperationTimeout, Validation
from flowfabric.run import Endings
from flowfabric.server import lists, wire
from flowfabric.server.access import Caller, InSession, Session, existing
from flowfabric.server.problems import Refused, problem_of
from flowfabric.server.routing import (
    BATCH_BODY,
    CREATES,
    LARGE_BODY,
    JsonAnswer,
    Routes,
    also,
    answer,
)

LIST_LIMIT = 50
LIST_LIMIT_MAX = 1_000
WAIT_MS_MAX = 60_000
UNENDED = also(202, "It has not ended.", type(None))
routes = Routes("/v1/executions", "executions")


class CreateExecution(Struct, kw_only=True):
    """A submission. Only `execution_kind` is required."""

    execution_kind: str
    execution_id: str | None = None
    namespace: str | None = None
    lane_id: str = "default"
    input_payload: wire.Octets | None = None
    input_base64: str | None = None
    input_json: object = UNSET
    payload_encoding: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    creator_identity: str = ""
    idempotency_key: str | None = None
    tags: dict[str, str] = {}
    policy: dict[str, object] | None = None
    delay_until: int | None = None
    delay_ms: int | None = None
    execution_deadline_at: int | None = None


class OneOfMany(CreateExecution, kw_only=True, forbid_unknown_fields=True):
    """A submission among others. Only `execution_kind` is required."""


class CreateExecutions(wire.StrictBody, kw_only=True):
    """Many submissions, created together or not at all."""

    executions: Annotated[list[OneOfMany], Meta(max_length=1_000)]


class CancelExecution(Struct, kw_only=True):
    reason: str
    execution_id: str | None = None
    source: str = "operator_override"
    lease_id: str | None = None
    lease_epoch: int | None = None
    attempt_id: str | None = None


class ChangePriority(Struct, kw_only=True):
    new_priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)]


class StepList(lists.Page, kw_only=True):
    steps: list[StepView]


class AttemptList(lists.Page, kw_only=True):
    attempts: list[Attempt]


class ExecutionList(lists.Page, kw_only=True):
    """Ids if the request names a partition, as the reference lists them; else snapshots."""

    executions: list[ExecutionId | ExecutionSnapshot]


def new_execution(data: CreateExecution, caller: Caller) -> NewExecution:
    payload, encoding = wire.read_bytes(
        "input", data.input_payload, data.input_base64, data.input_json
    )
    return NewExecution(
        execution_kind=data.execution_kind,
        execution_id=data.execution_id,
        namespace=caller.own_namespace(data.namespace),
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


@routes.post("/", Scope.SUBMIT, "Create an execution", opt=LARGE_BODY, **CREATES)
async def create(data: JSONBody[CreateExecution], session: InSession) -> JsonAnswer[wire.Tagged]:
    created = await session.engine.create_execution(new_execution(data, session.caller))
    return answer(created, new=isinstance(created, Created))


@routes.post("/batch", Scope.SUBMIT, "Create many executions at once", opt=BATCH_BODY)
async def create_many(data: JSONBody[CreateExecutions], session: InSession) -> list[wire.Tagged]:
    requests = [new_execution(each, session.caller) for each in data.executions]
    try:
        created = await session.engine.create_executions(requests)
    except Validation as error:
        raise _blame(session.engine, requests, error) from None
    return [wire.tagged(each) for each in created]


def _blame(engine: Engine, requests: Sequence[NewExecution], error: Validation) -> Exception:
    """The error with the place in the batch of the request that caused it."""
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


@routes.get("/", Scope.READ, "List executions")
async def list_executions(
    session: InSession,
    partition: Annotated[int | None, QueryParameter(ge=0, le=65_535)] = None,
    cursor: lists.AfterCursor = None,
    limit: Annotated[int, QueryParameter(ge=0, le=2**31)] = LIST_LIMIT,
    states: Annotated[list[PublicState] | None, QueryParameter(name="state")] = None,
    lane: FromQuery[str | None] = None,
    kind: FromQuery[str | None] = None,
    namespace: lists.InNamespace = None,
    tag: FromQuery[str | None] = None,
    created_after_ms: FromQuery[int | None] = None,
    created_before_ms: FromQuery[int | None] = None,
) -> ExecutionList:
    """With a `partition`, ids of that partition in their order; else snapshots, newest first."""
    limit = min(limit, LIST_LIMIT_MAX)
    if partition is not None:
        if partition >= session.engine.deployment.partitions.num_flow:
            return ExecutionList(executions=[], next_cursor=None)
        ids = await session.engine.list_executions(
            partition,
            namespace=session.caller.namespace_for(namespace),
            cursor=cursor or None,
            limit=limit,
        )
        return ExecutionList(executions=list(ids.executions), next_cursor=ids.next_cursor)
    found = await session.engine.find_executions(
        ExecutionFilter(
            states=tuple(states or ()),
            lane_id=lane,
            execution_kind=kind,
            namespace=session.caller.namespace_for(namespace),
            tag=None if tag is None else lists.read_tag(tag),
            created_after_ms=created_after_ms,
            created_before_ms=created_before_ms,
        ),
        cursor=cursor or None,
        limit=limit,
    )
    return ExecutionList(executions=list(found.executions), next_cursor=found.next_cursor)


@routes.get("/{id:str}", Scope.READ, "Read an execution")
async def read(id: FromPath[str], session: InSession) -> ExecutionInfo:
    info = await session.engine.read_execution_info(await session.find(id))
    return existing(info, "execution", id)


@routes.get("/{id:str}/details", Scope.READ, "Everything about an execution")
async def details(id: FromPath[str], session: InSession) -> ExecutionDetails:
    return await _inspected(session, id)


@routes.get("/{id:str}/why", Scope.READ, "Why an execution is not running")
async def why(id: FromPath[str], session: InSession) -> Explanation:
    return await session.engine.explain_execution(await session.find(id))


@routes.get("/{id:str}/state", Scope.READ, "The state of an execution")
async def state(id: FromPath[str], session: InSession) -> JsonAnswer[PublicState]:
    found = await session.engine.read_execution_state(await session.find(id))
    return JsonAnswer(existing(found, "execution", id))


@routes.get("/{id:str}/steps", Scope.READ, "List what a run has done")
async def steps(
    id: FromPath[str],
    session: InSession,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
) -> StepList:
    """In the order they were made in; the one that ended the last attempt comes last."""
    found = (await _inspected(session, id)).steps
    page, last = lists.cut(found, [each.step_key for each in found], cursor, limit)
    return StepList(steps=page, next_cursor=last)


@routes.get("/{id:str}/attempts", Scope.READ, "List the tries of a run")
async def attempts(
    id: FromPath[str],
    session: InSession,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
) -> AttemptList:
    """Oldest first; failed ones with their traceback."""
    found = (await _inspected(session, id)).attempts
    page, last = lists.cut(found, [str(each.attempt_index) for each in found], cursor, limit)
    return AttemptList(attempts=page, next_cursor=last)


@routes.get("/{id:str}/children", Scope.READ, "List what a run submitted")
async def children(
    id: FromPath[str],
    session: InSession,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
) -> ChildPage:
    """Oldest first."""
    execution_id = await session.find_existing(id)
    return await session.engine.list_children(execution_id, cursor=cursor, limit=limit)


async def _inspected(session: Session, text: str) -> ExecutionDetails:
    found = await session.engine.inspect_execution(await session.find(text))
    return existing(found, "execution", text)


@routes.get(
    "/{id:str}/result",
    Scope.READ,
    "The result of an execution, as it was stored",
    media_type="application/octet-stream",
)
async def result(
    id: FromPath[str],
    session: InSession,
    wait_ms: Annotated[int, QueryParameter(ge=0, le=WAIT_MS_MAX)] = 0,
) -> Response[bytes]:
    """Waits up to `wait_ms` for the execution to end."""
    execution_id = await session.find(id)
    if wait_ms:
        await session.wait(_ended(session.endings, execution_id, wait_ms))
    stored = await session.engine.get_execution_result(execution_id)
    return Response(existing(stored, "execution result", id), media_type="application/octet-stream")


@routes.get("/{id:str}/outcome", Scope.READ, "How an execution ended", responses=UNENDED)
async def outcome(
    id: FromPath[str],
    session: InSession,
    wait_ms: Annotated[int, QueryParameter(ge=0, le=WAIT_MS_MAX)] = 0,
) -> Response[Outcome | None]:
    """Waits up to `wait_ms`; 202 without a body for one that has not ended."""
    execution_id = await session.find_existing(id)
    ended = (await session.engine.read_outcomes([execution_id])).get(execution_id)
    if ended is None and wait_ms:
        ended = await session.wait(_ended(session.endings, execution_id, wait_ms))
    return Response(ended, status_code=202 if ended is None else 200)


async def _ended(endings: Endings, execution_id: ExecutionId, wait_ms: int) -> Outcome | None:
    try:
        return await endings.wait(execution_id, wait_ms / 1_000)
    except OperationTimeout:
        return None


@routes.post("/{id:str}/cancel", Scope.OPERATE, "Cancel an execution")
async def cancel(
    id: FromPath[str], data: JSONBody[CancelExecution], session: InSession
) -> JsonAnswer[wire.Tagged]:
    wire.check_same("execution_id", id, data.execution_id)
    request = structs.asdict(data) | {"execution_id": await session.find(id)}
    return answer(await session.engine.cancel_execution(**request))


@routes.put("/{id:str}/priority", Scope.OPERATE, "Change the priority of an execution")
async def change_priority(
    id: FromPath[str], data: JSONBody[ChangePriority], session: InSession
) -> JsonAnswer[wire.Tagged]:
    return answer(await session.engine.change_priority(await session.find(id), data.new_priority))


@routes.post("/{id:str}/replay", Scope.OPERATE, "Run an ended execution again")
async def replay(id: FromPath[str], session: InSession) -> JsonAnswer[wire.Tagged]:
    replayed = await session.engine.replay_execution(
        await session.find(id), requested_by=session.caller.name
    )
    return answer(replayed)


@routes.post("/{id:str}/revoke-lease", Scope.OPERATE, "Take an execution from its worker")
async def revoke_lease(id: FromPath[str], session: InSession) -> JsonAnswer[wire.Tagged]:
    revoked = await session.engine.revoke_lease(await session.find(id), reason="operator_revoke")
    if isinstance(revoked, Revoked):
        # Text, as the reference sends it.
        fields: dict[str, object] = {
            "lease_id": revoked.lease_id,
            "lease_epoch": str(revoked.lease_epoch),
        }
        return JsonAnswer({"Revoked": fields})
    return answer(revoked)
