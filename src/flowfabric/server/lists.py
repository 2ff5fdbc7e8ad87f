"""Lists over HTTP: how they are read, those of workers, and of what belongs to an execution.

All are read page by page: `next_cursor` is the `cursor` of the next page, and is for that alone.
"""

from typing import Annotated, TypeVar

from litestar import Router
from litestar.params import FromPath, FromQuery, QueryParameter
from msgspec import Struct

from flowfabric.core import bounds, views, workers
from flowfabric.core.records import Attempt
from flowfabric.core.tokens import Scope
from flowfabric.engine.details import ChildPage
from flowfabric.engine.workers import WorkerPage
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.server.access import InSession, Session
from flowfabric.server.routing import get

PAGE = 100
T = TypeVar("T")
AfterCursor = FromQuery[str | None]
InNamespace = FromQuery[str | None]
PageLimit = Annotated[int, QueryParameter(ge=1, le=bounds.PAGE_MAX)]


class Page(Struct, kw_only=True):
    next_cursor: str | None
    """None on the last page."""


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


def owner(asked: Session, namespace: str | None) -> str:
    return asked.caller.namespace_for(namespace) or "default"


def pair(cursor: tuple[str, str] | None) -> str | None:
    """Names have no line breaks in them."""
    return None if cursor is None else "\n".join(cursor)


def read_pair(cursor: str | None) -> tuple[str, str] | None:
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
        list_workers,
        worker_events,
    ],
)
