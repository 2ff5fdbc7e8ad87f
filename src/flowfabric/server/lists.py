"""Lists over HTTP: schedules, limits, budgets and workers, and what belongs to an execution.

All are read page by page: `next_cursor` is the `cursor` of the next page, and is for that alone.
"""

from typing import Annotated, TypeVar

import msgspec
from litestar import Router
from litestar.params import FromPath, FromQuery, QueryParameter
from msgspec import Struct, structs

from flowfabric.core import bounds, gates, schedules, views, workers
from flowfabric.core.records import Attempt
from flowfabric.core.tokens import Scope
from flowfabric.engine.admission import GateUse
from flowfabric.engine.budgets import BudgetStatus
from flowfabric.engine.details import ChildPage
from flowfabric.engine.workers import WorkerPage
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.server import wire
from flowfabric.server.access import InSession, Session
from flowfabric.server.routing import JsonAnswer, answer, delete, get, post

PAGE = 100
T = TypeVar("T")
AfterCursor = FromQuery[str | None]
InNamespace = FromQuery[str | None]
PageLimit = Annotated[int, QueryParameter(ge=1, le=bounds.PAGE_MAX)]


class Page(Struct, kw_only=True):
    next_cursor: str | None
    """None on the last page."""


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


class LimitView(Struct, kw_only=True):
    """What counts; 0 is no limit."""

    quota_policy_id: str
    namespace: str
    name: str
    window_ms: int
    max_requests_per_window: int
    active_concurrency_cap: int
    jitter_ms: int
    source: str
    """Who said so: a program, or somebody at run time."""
    created_at_ms: int
    updated_at_ms: int


class ScheduleList(Page, kw_only=True):
    schedules: list[ScheduleView]


class LimitList(Page, kw_only=True):
    limits: list[LimitView]


class LimitUseList(Page, kw_only=True):
    keys: tuple[GateUse, ...]


class BudgetList(Page, kw_only=True):
    budgets: tuple[BudgetStatus, ...]


class StepList(Page, kw_only=True):
    steps: list[views.StepView]


class AttemptList(Page, kw_only=True):
    attempts: list[Attempt]


class WorkerEventList(Struct, kw_only=True):
    events: tuple[workers.WorkerEvent, ...]


# What belongs to an execution -------------------------------------------------


@get("/v1/executions/{id:str}/steps", tags=["executions"], summary="List what a run has done")
async def steps(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    cursor: AfterCursor = None,
    limit: PageLimit = PAGE,
) -> StepList:
    """In the order they were made in; the one that ended the last attempt comes last."""
    asked.allow(Scope.READ)
    found = (await _inspected(asked, id)).steps
    page, last = _page(found, [each.step_key for each in found], cursor, limit)
    return StepList(steps=page, next_cursor=last)


@get("/v1/executions/{id:str}/attempts", tags=["executions"], summary="List the tries of a run")
async def attempts(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    cursor: AfterCursor = None,
    limit: PageLimit = PAGE,
) -> AttemptList:
    """Oldest first; failed ones with their traceback."""
    asked.allow(Scope.READ)
    found = (await _inspected(asked, id)).attempts
    page, last = _page(found, [str(each.attempt_index) for each in found], cursor, limit)
    return AttemptList(attempts=page, next_cursor=last)


@get("/v1/executions/{id:str}/children", tags=["executions"], summary="List what a run submitted")
async def children(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    cursor: AfterCursor = None,
    limit: PageLimit = PAGE,
) -> ChildPage:
    """Oldest first."""
    asked.allow(Scope.READ)
    execution_id = await asked.find(id)
    if await asked.engine.read_execution_state(execution_id) is None:
        raise NotFound("execution", id)
    return await asked.engine.list_children(execution_id, cursor=cursor, limit=limit)


async def _inspected(asked: Session, text: str) -> views.ExecutionDetails:
    found = await asked.engine.inspect_execution(await asked.find(text))
    if found is None:
        raise NotFound("execution", text)
    return found


def _page(
    found: tuple[T, ...], keys: list[str], cursor: str | None, limit: int
) -> tuple[list[T], str | None]:
    """Those after a cursor, and the cursor of the next page."""
    if cursor is not None and cursor not in keys:
        raise InvalidInput("cursor", "must be the next_cursor of an earlier page", cursor)
    start = 0 if cursor is None else keys.index(cursor) + 1
    end = start + limit
    return list(found[start:end]), keys[end - 1] if end < len(found) else None


# Schedules --------------------------------------------------------------------


@get("/v1/schedules", tags=["schedules"], summary="List schedules")
async def list_schedules(
    asked: InSession,
    namespace: InNamespace = None,
    cursor: AfterCursor = None,
    limit: PageLimit = PAGE,
) -> ScheduleList:
    asked.allow(Scope.READ)
    page = await asked.engine.list_schedules(
        namespace=asked.caller.namespace_for(namespace), cursor=_read_pair(cursor), limit=limit
    )
    return ScheduleList(
        schedules=[_schedule(each) for each in page.schedules],
        next_cursor=_pair(page.next_cursor),
    )


@get("/v1/schedules/{id:str}", tags=["schedules"], summary="Read a schedule")
async def read_schedule(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    namespace: InNamespace = None,
) -> ScheduleView:
    asked.allow(Scope.READ)
    found = await asked.engine.describe_schedule(id, namespace=_owner(asked, namespace))
    if found is None:
        raise NotFound("schedule", id)
    return _schedule(found)


@post("/v1/schedules/{id:str}/pause", tags=["schedules"], status_code=200, summary="Pause it")
async def pause_schedule(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    namespace: InNamespace = None,
) -> ScheduleView:
    """Due times pass without effect until it is resumed."""
    asked.allow(Scope.OPERATE)
    return _schedule(await asked.engine.pause_schedule(id, namespace=_owner(asked, namespace)))


@post("/v1/schedules/{id:str}/resume", tags=["schedules"], status_code=200, summary="Resume it")
async def resume_schedule(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    namespace: InNamespace = None,
) -> ScheduleView:
    """It goes on with the next due time."""
    asked.allow(Scope.OPERATE)
    return _schedule(await asked.engine.resume_schedule(id, namespace=_owner(asked, namespace)))


@post("/v1/schedules/{id:str}/run", tags=["schedules"], status_code=201, summary="Run it now")
async def run_schedule(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    namespace: InNamespace = None,
) -> JsonAnswer[wire.Tagged]:
    """Out of turn; due times are not affected."""
    asked.allow(Scope.SUBMIT)
    owner = _owner(asked, namespace)
    return answer(await asked.engine.trigger_schedule(id, namespace=owner), new=True)


@delete("/v1/schedules/{id:str}", tags=["schedules"], status_code=200, summary="Remove a schedule")
async def remove_schedule(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    namespace: InNamespace = None,
) -> ScheduleView:
    """What it has created stays."""
    asked.allow(Scope.SUBMIT)
    return _schedule(await asked.engine.remove_schedule(id, namespace=_owner(asked, namespace)))


def _schedule(found: schedules.Schedule) -> ScheduleView:
    fields = structs.asdict(found) | {
        "policy": msgspec.json.decode(found.policy),
        "tags": msgspec.json.decode(found.tags),
    }
    return ScheduleView(**{name: fields[name] for name in ScheduleView.__struct_fields__})


# Limits and budgets -----------------------------------------------------------


@get("/v1/limits", tags=["limits"], summary="List limits")
async def list_limits(
    asked: InSession,
    namespace: InNamespace = None,
    cursor: AfterCursor = None,
    limit: PageLimit = PAGE,
) -> LimitList:
    asked.allow(Scope.READ)
    wanted = asked.caller.namespace_for(namespace)
    page = await asked.engine.list_limits(namespace=wanted, cursor=cursor, limit=limit)
    return LimitList(limits=[_limit(each) for each in page.limits], next_cursor=page.next_cursor)


@get("/v1/limits/{name:str}", tags=["limits"], summary="Read a limit")
async def read_limit(
    name: FromPath[str],
    asked: InSession,
    namespace: InNamespace = None,
) -> LimitView:
    asked.allow(Scope.READ)
    return _limit(await asked.engine.read_limit(name, namespace=_owner(asked, namespace)))


@get("/v1/limits/{name:str}/use", tags=["limits"], summary="List what each key of a limit uses")
async def limit_use(
    name: FromPath[str],
    asked: InSession,
    namespace: InNamespace = None,
    cursor: AfterCursor = None,
    limit: PageLimit = PAGE,
) -> LimitUseList:
    asked.allow(Scope.READ)
    found = await asked.engine.read_limit(name, namespace=_owner(asked, namespace))
    page = await asked.engine.list_limit_use(found.quota_policy_id, cursor=cursor, limit=limit)
    return LimitUseList(keys=page.gates, next_cursor=page.next_cursor)


def _limit(found: gates.QuotaPolicy) -> LimitView:
    return LimitView(**{name: getattr(found, name) for name in LimitView.__struct_fields__})


@get("/v1/budgets", tags=["limits"], summary="List budgets")
async def list_budgets(
    asked: InSession,
    namespace: InNamespace = None,
    cursor: AfterCursor = None,
    limit: PageLimit = PAGE,
) -> BudgetList:
    asked.allow(Scope.READ)
    page = await asked.engine.list_budgets(
        namespace=asked.caller.namespace_for(namespace), cursor=_read_pair(cursor), limit=limit
    )
    return BudgetList(budgets=page.budgets, next_cursor=_pair(page.next_cursor))


# Workers ----------------------------------------------------------------------


@get("/v1/workers", tags=["work"], summary="List workers")
async def list_workers(
    asked: InSession,
    namespace: InNamespace = None,
    cursor: AfterCursor = None,
    limit: PageLimit = PAGE,
    include_expired: FromQuery[bool] = False,
) -> WorkerPage:
    """Those of a namespace serve it, with what they have of it in hand."""
    asked.allow(Scope.READ)
    return await asked.engine.list_workers(
        namespace=asked.caller.namespace_for(namespace),
        cursor=cursor,
        limit=limit,
        include_expired=include_expired,
    )


@get("/v1/workers/events", tags=["work"], summary="Who came and went lately, newest first")
async def worker_events(
    asked: InSession,
    namespace: InNamespace = None,
    worker_instance_id: FromQuery[str | None] = None,
    limit: PageLimit = PAGE,
) -> WorkerEventList:
    asked.allow(Scope.READ)
    found = await asked.engine.list_worker_events(
        namespace=asked.caller.namespace_for(namespace),
        worker_instance_id=worker_instance_id,
        limit=limit,
    )
    return WorkerEventList(events=found)


def _owner(asked: Session, namespace: str | None) -> str:
    return asked.caller.namespace_for(namespace) or "default"


def _pair(cursor: tuple[str, str] | None) -> str | None:
    """Names have no line breaks in them."""
    return None if cursor is None else "\n".join(cursor)


def _read_pair(cursor: str | None) -> tuple[str, str] | None:
    if cursor is None:
        return None
    namespace, found, name = cursor.partition("\n")
    if not found:
        raise InvalidInput("cursor", "must be the next_cursor of an earlier page", cursor)
    return namespace, name


routes = Router(
    path="/",
    route_handlers=[
        steps,
        attempts,
        children,
        list_schedules,
        read_schedule,
        pause_schedule,
        resume_schedule,
        run_schedule,
        remove_schedule,
        list_limits,
        read_limit,
        limit_use,
        list_workers,
        worker_events,
    ],
)
