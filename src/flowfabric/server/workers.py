"""Workers over HTTP, and grants as the reference's clients ask for them."""

from collections.abc import Sequence

from litestar import Response
from litestar.params import FromPath, FromQuery, JSONBody
from msgspec import Struct, structs

from flowfabric.core import results
from flowfabric.core.api_tokens import Scope
from flowfabric.core.records import view_of
from flowfabric.core.workers import WorkerEvent
from flowfabric.engine.workers import WorkerPage
from flowfabric.server import lists
from flowfabric.server.access import InSession
from flowfabric.server.routing import JsonAnswer, Routes, also

routes = Routes("/v1", "work")


class WorkerEventList(Struct, kw_only=True):
    events: tuple[WorkerEvent, ...]


class AskForWork(Struct, kw_only=True):
    lane_id: str
    worker_instance_id: str
    grant_ttl_ms: int
    """From 1 to 60,000."""
    capabilities: Sequence[str] = ()


class AskForReclaim(Struct, kw_only=True):
    worker_id: str
    worker_instance_id: str
    lane_id: str
    grant_ttl_ms: int
    worker_capabilities: Sequence[str] = ()


class GrantView(Struct, kw_only=True):
    """The right to claim one execution."""

    execution_id: str
    partition_key: str
    grant_key: str
    expires_at_ms: int
    lane_id: str
    kind: str
    """Which claim it is for: `ClaimGrant`, `ResumeGrant` or `ReclaimGrant`."""


@routes.get("/workers", Scope.READ, "List workers")
async def list_workers(
    session: InSession,
    namespace: lists.InNamespace = None,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
    include_expired: FromQuery[bool] = False,
) -> WorkerPage:
    """With a namespace: the workers that serve it, with the executions of it that they hold."""
    return await session.engine.list_workers(
        namespace=session.caller.namespace_for(namespace),
        cursor=cursor,
        limit=limit,
        include_expired=include_expired,
    )


@routes.get("/workers/events", Scope.READ, "List recent events about workers, newest first")
async def worker_events(
    session: InSession,
    namespace: lists.InNamespace = None,
    worker_instance_id: FromQuery[str | None] = None,
    limit: lists.PageLimit = lists.PAGE,
) -> WorkerEventList:
    found = await session.engine.list_worker_events(
        namespace=session.caller.namespace_for(namespace),
        worker_instance_id=worker_instance_id,
        limit=limit,
    )
    return WorkerEventList(events=found)


@routes.post(
    "/workers/{worker_id:str}/claim",
    Scope.WORK,
    "Ask for an execution to claim; 204 without a body if there is none",
    responses=also(204, "There is none."),
)
async def claim(
    worker_id: FromPath[str], data: JSONBody[AskForWork], session: InSession
) -> Response[GrantView | None]:
    grant = await session.engine.claim_for_worker(
        [data.lane_id],
        worker_id=worker_id,
        worker_instance_id=data.worker_instance_id,
        capabilities=data.capabilities,
        namespace=session.caller.namespace,
        grant_ttl_ms=data.grant_ttl_ms,
    )
    if grant is None:
        return Response(None, status_code=204)
    granted = view_of(GrantView, grant, lane_id=data.lane_id, kind=type(grant).__name__)
    return Response(granted, media_type="application/json")


@routes.post("/executions/{id:str}/reclaim", Scope.WORK, "Take over what a worker has lost")
async def reclaim(
    id: FromPath[str], data: JSONBody[AskForReclaim], session: InSession
) -> JsonAnswer[dict[str, object]]:
    outcome = await session.engine.issue_reclaim_grant(
        await session.find(id),
        worker_id=data.worker_id,
        worker_instance_id=data.worker_instance_id,
        capabilities=data.worker_capabilities,
        grant_ttl_ms=data.grant_ttl_ms,
    )
    refusals = {
        results.NotReclaimable: "not_reclaimable",
        results.ReclaimCapExceeded: "reclaim_cap_exceeded",
    }
    status = refusals.get(type(outcome), "granted")
    head = {"execution_id": outcome.execution_id, "status": status}
    return JsonAnswer({**head, **structs.asdict(outcome)})
