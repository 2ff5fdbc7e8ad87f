"""Schedules over HTTP: defined, read, paused, run out of turn and removed."""

import msgspec
from litestar.params import FromPath, JSONBody
from msgspec import UNSET, Struct

from flowfabric.core import schedules
from flowfabric.core.api_tokens import Scope
from flowfabric.core.records import view_of
from flowfabric.server import lists, wire
from flowfabric.server.access import InSession, existing
from flowfabric.server.routing import LARGE_BODY, JsonAnswer, Routes, also, answer

routes = Routes("/v1/schedules", "schedules")


class ScheduleBody(wire.StrictBody, kw_only=True):
    """What to create, and when: give either `cron` or `every_ms`."""

    execution_kind: str
    cron: str | None = None
    every_ms: int | None = None
    timezone: str = "UTC"
    catch_up: str = schedules.CatchUp.LATEST
    """Which missed due times to make up for: `latest`, `all` or `none`."""
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


@routes.get("/", Scope.READ, "List schedules")
async def list_schedules(
    session: InSession,
    namespace: lists.InNamespace = None,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
) -> ScheduleList:
    page = await session.engine.list_schedules(
        namespace=session.caller.namespace_for(namespace),
        cursor=cursor,
        limit=limit,
    )
    return ScheduleList(
        schedules=[_schedule(each) for each in page.schedules],
        next_cursor=page.next_cursor,
    )


@routes.put(
    "/{id:str}",
    Scope.SUBMIT,
    "Define a schedule",
    opt=LARGE_BODY,
    responses=also(201, "It is new.", ScheduleView),
)
async def define(
    id: FromPath[str],
    data: JSONBody[ScheduleBody],
    session: InSession,
    namespace: lists.InNamespace = None,
) -> JsonAnswer[ScheduleView]:
    """Safe to repeat: with unchanged timing the next due time stays, and so does a pause."""
    payload, encoding = wire.read_bytes(
        "input", data.input_payload, data.input_base64, data.input_json
    )
    definition = view_of(
        schedules.ScheduleDefinition,
        data,
        schedule_id=id,
        namespace=session.caller.own_namespace(namespace),
        input_payload=payload or b"",
        payload_encoding=data.payload_encoding or encoding,
        tags=data.tags or {},
    )
    defined = await session.engine.upsert_schedule(definition)
    status = 201 if defined.change == "created" else 200
    return JsonAnswer(_schedule(defined.schedule), status_code=status)


@routes.get("/{id:str}", Scope.READ, "Read a schedule")
async def read_schedule(
    id: FromPath[str], session: InSession, namespace: lists.InNamespace = None
) -> ScheduleView:
    owner = session.caller.own_namespace(namespace)
    found = await session.engine.describe_schedule(id, namespace=owner)
    return _schedule(existing(found, "schedule", id))


@routes.post("/{id:str}/pause", Scope.OPERATE, "Pause a schedule")
async def pause_schedule(
    id: FromPath[str], session: InSession, namespace: lists.InNamespace = None
) -> ScheduleView:
    """Due times pass without effect until it is resumed."""
    owner = session.caller.own_namespace(namespace)
    return _schedule(await session.engine.pause_schedule(id, namespace=owner))


@routes.post("/{id:str}/resume", Scope.OPERATE, "Resume a schedule")
async def resume_schedule(
    id: FromPath[str], session: InSession, namespace: lists.InNamespace = None
) -> ScheduleView:
    """It continues with the next due time."""
    owner = session.caller.own_namespace(namespace)
    return _schedule(await session.engine.resume_schedule(id, namespace=owner))


@routes.post("/{id:str}/run", Scope.SUBMIT, "Run a schedule now", status_code=201)
async def run_schedule(
    id: FromPath[str], session: InSession, namespace: lists.InNamespace = None
) -> JsonAnswer[wire.Tagged]:
    """Out of turn; due times are not affected."""
    owner = session.caller.own_namespace(namespace)
    return answer(await session.engine.trigger_schedule(id, namespace=owner), new=True)


@routes.delete("/{id:str}", Scope.SUBMIT, "Remove a schedule")
async def remove_schedule(
    id: FromPath[str], session: InSession, namespace: lists.InNamespace = None
) -> ScheduleView:
    """What it has created stays."""
    owner = session.caller.own_namespace(namespace)
    return _schedule(await session.engine.remove_schedule(id, namespace=owner))


def _schedule(found: schedules.Schedule) -> ScheduleView:
    return view_of(
        ScheduleView,
        found,
        policy=msgspec.json.decode(found.policy),
        tags=msgspec.json.decode(found.tags),
    )
