"""Limits and quota policies over HTTP."""

from litestar.params import FromPath, JSONBody
from msgspec import Struct, structs

from flowfabric.core.api_tokens import Scope
from flowfabric.core.limits import QuotaPolicy, WhileSuspended
from flowfabric.core.records import view_of
from flowfabric.engine.limits import GateUse, PolicyCreated
from flowfabric.server import lists, wire
from flowfabric.server.access import InSession
from flowfabric.server.routing import CREATES, JsonAnswer, Routes, created_or_not

routes = Routes("/v1", "limits")


class NewQuota(Struct, kw_only=True):
    quota_policy_id: str
    window_seconds: wire.Units
    max_requests_per_window: wire.Units
    max_concurrent: wire.Units
    namespace: str | None = None
    jitter_ms: wire.Units = 0
    while_suspended: WhileSuspended = WhileSuspended.RELEASE


class LimitBody(wire.StrictBody, kw_only=True):
    """The values to apply from now on, whatever programs declare; 0 is no limit."""

    window_ms: wire.Units = 0
    max_requests_per_window: wire.Units = 0
    active_concurrency_cap: wire.Units = 0
    jitter_ms: wire.Units = 0
    while_suspended: WhileSuspended | None = None
    """Whether runs that sleep or wait keep their slots; unchanged if omitted."""


class LimitView(Struct, kw_only=True):
    """The values in force; 0 is no limit."""

    quota_policy_id: str
    namespace: str
    name: str
    window_ms: int
    max_requests_per_window: int
    active_concurrency_cap: int
    jitter_ms: int
    while_suspended: str
    source: str
    """Where they come from: declared by a program, or set at run time."""
    created_at_ms: int
    updated_at_ms: int


class LimitList(lists.Page, kw_only=True):
    limits: list[LimitView]


class LimitUseList(lists.Page, kw_only=True):
    keys: tuple[GateUse, ...]


@routes.get("/limits", Scope.READ, "List limits")
async def list_limits(
    session: InSession,
    namespace: lists.InNamespace = None,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
) -> LimitList:
    wanted = session.caller.namespace_for(namespace)
    page = await session.engine.list_limits(namespace=wanted, cursor=cursor, limit=limit)
    return LimitList(limits=[_limit(each) for each in page.limits], next_cursor=page.next_cursor)


@routes.get("/limits/{name:str}", Scope.READ, "Read a limit")
async def read_limit(
    name: FromPath[str], session: InSession, namespace: lists.InNamespace = None
) -> LimitView:
    return _limit(
        await session.engine.read_limit(name, namespace=session.caller.own_namespace(namespace))
    )


@routes.get("/limits/{name:str}/use", Scope.READ, "List what each key of a limit uses")
async def limit_use(
    name: FromPath[str],
    session: InSession,
    namespace: lists.InNamespace = None,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
) -> LimitUseList:
    found = await session.engine.read_limit(name, namespace=session.caller.own_namespace(namespace))
    page = await session.engine.list_limit_use(found.quota_policy_id, cursor=cursor, limit=limit)
    return LimitUseList(keys=page.gates, next_cursor=page.next_cursor)


def _limit(found: QuotaPolicy) -> LimitView:
    return view_of(LimitView, found)


@routes.put("/limits/{name:str}", Scope.OPERATE, "Set a limit")
async def set_limit(
    name: FromPath[str],
    data: JSONBody[LimitBody],
    session: InSession,
    namespace: lists.InNamespace = None,
) -> LimitView:
    """It wins over what programs declare until it is reset."""
    owner = session.caller.own_namespace(namespace)
    return _limit(await session.engine.set_limit(name, namespace=owner, **structs.asdict(data)))


@routes.post("/limits/{name:str}/reset", Scope.OPERATE, "Reset a limit")
async def reset_limit(
    name: FromPath[str], session: InSession, namespace: lists.InNamespace = None
) -> LimitView:
    """What programs declare counts again; `404` if none declares it."""
    owner = session.caller.own_namespace(namespace)
    return _limit(await session.engine.reset_limit(name, namespace=owner))


@routes.delete("/limits/{name:str}", Scope.OPERATE, "Remove a limit")
async def remove_limit(
    name: FromPath[str], session: InSession, namespace: lists.InNamespace = None
) -> LimitView:
    """`409` while runs that were under it are kept. A program that declares it brings it back."""
    owner = session.caller.own_namespace(namespace)
    return _limit(await session.engine.remove_limit(name, namespace=owner))


@routes.post("/quotas", Scope.OPERATE, "Create a quota policy", **CREATES)
async def create_quota(data: JSONBody[NewQuota], session: InSession) -> JsonAnswer[wire.Tagged]:
    namespace = session.caller.own_namespace(data.namespace)
    created = await session.engine.create_quota_policy(
        **structs.asdict(data) | {"namespace": namespace}
    )
    return created_or_not(isinstance(created, PolicyCreated), quota_policy_id=data.quota_policy_id)
