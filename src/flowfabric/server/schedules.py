"""Schedules over HTTP: defined, read, paused, run out of turn and removed."""

import msgspec
from litestar import Router
from litestar.params import FromPath, JSONBody
from msgspec import UNSET, Struct, structs

from flowfabric.core import schedules
from flowfabric.core.tokens import Scope
from flowfabric.errors import NotFound
from flowfabric.server import lists, wire
from flowfabric.server.access import InSession
from flowfabric.server.executions import LARGE_BODY
from flowfabric.server.routing import JsonAnswer, also, answer, delete, get, post, put


class ScheduleBody(wire.StrictBody, kw_only=True):
    """What to create, and when: give either `cron` or `every_ms`."""

    execution_kind: str
    cron: str | None = None
    every_ms: int | None = None
    timezone: str = "UTC"
    catch_up: str = schedules.CatchUp.LATEST
    """What becomes of due times that nobody noticed: `latest`, `all` or `none`."""
    lane_id: str = "default"
    input_payload: wire.Octets | None = None
    input_base64: str | None = None
    input_json: object = UNSET
    payload_encoding: str | None = None
    policy: dict[str, object] | None = None
    priority: int | None = None
    tags: dict[str, str] | None = None


class ScheduleView(Struct, kw_only=True):
    """A schedule; its payload in base64."""

    namespace: str
    schedule_id: str
    schedule_kind: str
    expression: str
    timezone: str
    catch_up: str
    paused: bool
    lane_id: str
    execution_kind: str
    payload: bytes
    payload_encoding: str | None
    policy: dict[str, object]
    priority: int | None
    tags: dict[str, str]
    next_due_at_ms: int | None
    last_due_at_ms: int | None
    last_fired_at_ms: int | None
    last_execution: str | None
    fired_count: int
    last_error: str | None
    created_at_ms: int
    updated_at_ms: int


class ScheduleList(lists.Page, kw_only=True):
    schedules: list[ScheduleView]


@get("/", summary="List schedules")
async def list_schedules(
    asked: InSession,
    namespace: lists.InNamespace = None,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
) -> ScheduleList:
    asked.allow(Scope.READ)
    page = await asked.engine.list_schedules(
        namespace=asked.caller.namespace_for(namespace), cursor=lists.read_pair(cursor), limit=limit
    )
    return ScheduleList(
        schedules=[_schedule(each) for each in page.schedules],
        next_cursor=lists.pair(page.next_cursor),
    )


@put(
    "/{id:str}",
    opt=LARGE_BODY,
    responses=also(201, "It is new.", ScheduleView),
    summary="Have a schedule as defined",
)
async def define(
    id: FromPath[str],  # noqa: A002
    data: JSONBody[ScheduleBody],
    asked: InSession,
    namespace: lists.InNamespace = None,
) -> JsonAnswer[ScheduleView]:
    """Safe to repeat: unchanged timing keeps its next due time, and a pause goes on."""
    asked.allow(Scope.SUBMIT)
    payload, encoding = wire.read_bytes(
        "input", data.input_payload, data.input_base64, data.input_json
    )
    defined = await asked.engine.upsert_schedule(
        schedules.ScheduleDefinition(
            schedule_id=id,
            execution_kind=data.execution_kind,
            cron=data.cron,
            every_ms=data.every_ms,
            timezone=data.timezone,
            catch_up=data.catch_up,
            namespace=lists.owner(asked, namespace),
            lane_id=data.lane_id,
            input_payload=payload or b"",
            payload_encoding=data.payload_encoding or encoding,
            policy=data.policy,
            priority=data.priority,
            tags=data.tags or {},
        )
    )
    status = 201 if defined.change == "created" else 200
    return JsonAnswer(_schedule(defined.schedule), status_code=status)


@get("/{id:str}", summary="Read a schedule")
async def read_schedule(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    namespace: lists.InNamespace = None,
) -> ScheduleView:
    asked.allow(Scope.READ)
    found = await asked.engine.describe_schedule(id, namespace=lists.owner(asked, namespace))
    if found is None:
        raise NotFound("schedule", id)
    return _schedule(found)


@post("/{id:str}/pause", status_code=200, summary="Pause it")
async def pause_schedule(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    namespace: lists.InNamespace = None,
) -> ScheduleView:
    """Due times pass without effect until it is resumed."""
    asked.allow(Scope.OPERATE)
    return _schedule(await asked.engine.pause_schedule(id, namespace=lists.owner(asked, namespace)))


@post("/{id:str}/resume", status_code=200, summary="Resume it")
async def resume_schedule(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    namespace: lists.InNamespace = None,
) -> ScheduleView:
    """It goes on with the next due time."""
    asked.allow(Scope.OPERATE)
    return _schedule(
        await asked.engine.resume_schedule(id, namespace=lists.owner(asked, namespace))
    )


@post("/{id:str}/run", status_code=201, summary="Run it now")
async def run_schedule(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    namespace: lists.InNamespace = None,
) -> JsonAnswer[wire.Tagged]:
    """Out of turn; due times are not affected."""
    asked.allow(Scope.SUBMIT)
    owner = lists.owner(asked, namespace)
    return answer(await asked.engine.trigger_schedule(id, namespace=owner), new=True)


@delete("/{id:str}", status_code=200, summary="Remove a schedule")
async def remove_schedule(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    namespace: lists.InNamespace = None,
) -> ScheduleView:
    """What it has created stays."""
    asked.allow(Scope.SUBMIT)
    return _schedule(
        await asked.engine.remove_schedule(id, namespace=lists.owner(asked, namespace))
    )


def _schedule(found: schedules.Schedule) -> ScheduleView:
    fields = structs.asdict(found) | {
        "policy": msgspec.json.decode(found.policy),
        "tags": msgspec.json.decode(found.tags),
    }
    return ScheduleView(**{name: fields[name] for name in ScheduleView.__struct_fields__})


routes = Router(
    path="/v1/schedules",
    tags=["schedules"],
    route_handlers=[
        list_schedules,
        define,
        read_schedule,
        pause_schedule,
        resume_schedule,
        run_schedule,
        remove_schedule,
    ],
)
