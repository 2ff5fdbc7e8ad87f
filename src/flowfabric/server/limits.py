"""Budgets, quotas and limits over HTTP, and grants as the reference's clients ask for them."""

from collections.abc import Sequence
from typing import Annotated

from litestar import Response, Router
from litestar.params import FromPath, JSONBody
from msgspec import Meta, Struct

from flowfabric.core import results
from flowfabric.core.budget_terms import BudgetDefinition, BudgetUpdate
from flowfabric.core.budgets import UsageAlreadyApplied, UsageCounted
from flowfabric.core.gates import QuotaPolicy, WhileSuspended
from flowfabric.core.tokens import Scope
from flowfabric.engine.admission import GateUse, PolicyCreated
from flowfabric.engine.budgets import BudgetStatus
from flowfabric.server import lists, wire
from flowfabric.server.access import InSession
from flowfabric.server.routing import EXISTED, JsonAnswer, also, answer, get, patch, post, put

Units = Annotated[int, Meta(ge=0, le=2**62)]


class NewBudget(Struct, kw_only=True):
    """Limits stand beside their dimensions; 0 is none."""

    budget_id: str
    scope_type: str = "tenant"
    scope_id: str = ""
    enforcement_mode: str = "strict"
    on_hard_limit: str = "reject"
    on_soft_limit: str = "warn"
    reset_interval_ms: Units = 0
    dimensions: Sequence[str] = ()
    hard_limits: Sequence[Units] = ()
    soft_limits: Sequence[Units] = ()
    namespace: str | None = None


class BudgetView(Struct, kw_only=True):
    """A budget; times are text, as the reference sends them."""

    budget_id: str
    scope_type: str
    scope_id: str
    enforcement_mode: str
    usage: dict[str, int]
    hard_limits: dict[str, int]
    soft_limits: dict[str, int]
    breach_count: int
    soft_breach_count: int
    last_breach_at: str | None
    last_breach_dim: str | None
    next_reset_at: str | None
    created_at: str | None
    namespace: str
    name: str
    reserved: dict[str, int]


class ReportedUsage(Struct, kw_only=True):
    dimensions: dict[str, Units]
    dedup_key: str | None = None
    namespace: str | None = None


class NewQuota(Struct, kw_only=True):
    quota_policy_id: str
    window_seconds: Units
    max_requests_per_window: Units
    max_concurrent: Units
    namespace: str | None = None
    jitter_ms: Units = 0
    while_suspended: WhileSuspended = WhileSuspended.RELEASE


class LimitBody(wire.StrictBody, kw_only=True):
    """What counts from now on, whatever programs declare; 0 is no limit."""

    window_ms: Units = 0
    max_requests_per_window: Units = 0
    active_concurrency_cap: Units = 0
    jitter_ms: Units = 0
    while_suspended: WhileSuspended | None = None
    """Whether runs that sleep or wait hold their places; as it is unless given."""


class LimitView(Struct, kw_only=True):
    """What counts; 0 is no limit."""

    quota_policy_id: str
    namespace: str
    name: str
    window_ms: int
    max_requests_per_window: int
    active_concurrency_cap: int
    jitter_ms: int
    while_suspended: str
    source: str
    """Who said so: a program, or somebody at run time."""
    created_at_ms: int
    updated_at_ms: int


class LimitList(lists.Page, kw_only=True):
    limits: list[LimitView]


class LimitUseList(lists.Page, kw_only=True):
    keys: tuple[GateUse, ...]


class BudgetList(lists.Page, kw_only=True):
    budgets: tuple[BudgetStatus, ...]


class BudgetChange(BudgetUpdate, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change. Limits of dimensions that are not named stay; 0 is none."""


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


@post("/v1/budgets", responses=EXISTED, summary="Have a budget")
async def create_budget(data: JSONBody[NewBudget], asked: InSession) -> JsonAnswer[wire.Tagged]:
    asked.allow(Scope.OPERATE)
    namespace = lists.owner(asked, data.namespace)
    created = await asked.engine.create_budget(
        BudgetDefinition(
            budget_id=data.budget_id,
            namespace=namespace,
            scope_type=data.scope_type,
            scope_id=data.scope_id,
            enforcement_mode=data.enforcement_mode,
            on_hard_limit=data.on_hard_limit,
            on_soft_limit=data.on_soft_limit,
            reset_interval_ms=data.reset_interval_ms,
            dimensions=data.dimensions,
            hard_limits=data.hard_limits,
            soft_limits=data.soft_limits,
        )
    )
    new = created.change == "created"
    told: wire.Tagged = {
        "Created" if new else "AlreadySatisfied": {"budget_id": str(created.budget.budget_id)}
    }
    return JsonAnswer(told, status_code=201 if new else 200)


@get("/v1/budgets", summary="List budgets")
async def list_budgets(
    asked: InSession,
    namespace: lists.InNamespace = None,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
) -> BudgetList:
    asked.allow(Scope.READ)
    page = await asked.engine.list_budgets(
        namespace=asked.caller.namespace_for(namespace), cursor=lists.read_pair(cursor), limit=limit
    )
    return BudgetList(budgets=page.budgets, next_cursor=lists.pair(page.next_cursor))


@get("/v1/budgets/{id:str}", summary="Read a budget")
async def read_budget(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    namespace: lists.InNamespace = None,
) -> BudgetView:
    asked.allow(Scope.READ)
    owner = lists.owner(asked, namespace)
    return _budget(await asked.engine.get_budget_status(id, namespace=owner))


@patch("/v1/budgets/{id:str}", summary="Change the terms of a budget")
async def change_budget(
    id: FromPath[str],  # noqa: A002
    data: JSONBody[BudgetChange],
    asked: InSession,
    namespace: lists.InNamespace = None,
) -> BudgetView:
    """What was counted stays."""
    asked.allow(Scope.OPERATE)
    owner = lists.owner(asked, namespace)
    return _budget(await asked.engine.update_budget(id, data, namespace=owner))


def _budget(found: BudgetStatus) -> BudgetView:
    return BudgetView(
        budget_id=found.budget_id,
        scope_type=found.scope_type,
        scope_id=found.scope_id,
        enforcement_mode=found.enforcement_mode,
        usage=found.usage,
        hard_limits=found.hard_limits,
        soft_limits=found.soft_limits,
        breach_count=found.breach_count,
        soft_breach_count=found.soft_breach_count,
        last_breach_at=_text(found.last_breach_at_ms),
        last_breach_dim=found.last_breach_dim,
        next_reset_at=_text(found.next_reset_at_ms),
        created_at=_text(found.created_at_ms),
        namespace=found.namespace,
        name=found.name,
        reserved=found.reserved,
    )


def _text(at_ms: int | None) -> str | None:
    return None if at_ms is None else str(at_ms)


@post("/v1/budgets/{id:str}/usage", status_code=200, summary="Report usage to a budget")
async def report_usage(
    id: FromPath[str],  # noqa: A002
    data: JSONBody[ReportedUsage],
    asked: InSession,
) -> JsonAnswer[wire.Tagged]:
    """A breach is an answer, not an error: nothing is counted beyond a hard limit."""
    asked.allow(Scope.OPERATE)
    outcome = await asked.engine.report_usage_admin(
        id,
        list(data.dimensions),
        list(data.dimensions.values()),
        dedup_key=data.dedup_key,
        namespace=lists.owner(asked, data.namespace),
    )
    if isinstance(outcome, UsageCounted):
        return JsonAnswer("Ok")
    if isinstance(outcome, UsageAlreadyApplied):
        return JsonAnswer("AlreadyApplied")
    return answer(outcome)


@post("/v1/budgets/{id:str}/reset", status_code=200, summary="Begin a new period of a budget")
async def reset_budget(
    id: FromPath[str],  # noqa: A002
    asked: InSession,
    namespace: lists.InNamespace = None,
) -> JsonAnswer[wire.Tagged]:
    asked.allow(Scope.OPERATE)
    owner = lists.owner(asked, namespace)
    reset = await asked.engine.reset_budget(id, namespace=owner)
    return JsonAnswer({"Reset": {"next_reset_at": reset.next_reset_at_ms}})


@get("/v1/limits", summary="List limits")
async def list_limits(
    asked: InSession,
    namespace: lists.InNamespace = None,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
) -> LimitList:
    asked.allow(Scope.READ)
    wanted = asked.caller.namespace_for(namespace)
    page = await asked.engine.list_limits(namespace=wanted, cursor=cursor, limit=limit)
    return LimitList(limits=[_limit(each) for each in page.limits], next_cursor=page.next_cursor)


@get("/v1/limits/{name:str}", summary="Read a limit")
async def read_limit(
    name: FromPath[str],
    asked: InSession,
    namespace: lists.InNamespace = None,
) -> LimitView:
    asked.allow(Scope.READ)
    return _limit(await asked.engine.read_limit(name, namespace=lists.owner(asked, namespace)))


@get("/v1/limits/{name:str}/use", summary="List what each key of a limit uses")
async def limit_use(
    name: FromPath[str],
    asked: InSession,
    namespace: lists.InNamespace = None,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
) -> LimitUseList:
    asked.allow(Scope.READ)
    found = await asked.engine.read_limit(name, namespace=lists.owner(asked, namespace))
    page = await asked.engine.list_limit_use(found.quota_policy_id, cursor=cursor, limit=limit)
    return LimitUseList(keys=page.gates, next_cursor=page.next_cursor)


def _limit(found: QuotaPolicy) -> LimitView:
    return LimitView(**{name: getattr(found, name) for name in LimitView.__struct_fields__})


@put("/v1/limits/{name:str}", summary="Set a limit")
async def set_limit(
    name: FromPath[str],
    data: JSONBody[LimitBody],
    asked: InSession,
    namespace: lists.InNamespace = None,
) -> LimitView:
    """It wins over what programs declare until it is reset."""
    asked.allow(Scope.OPERATE)
    policy = await asked.engine.set_limit(
        name,
        namespace=lists.owner(asked, namespace),
        window_ms=data.window_ms,
        max_requests_per_window=data.max_requests_per_window,
        active_concurrency_cap=data.active_concurrency_cap,
        jitter_ms=data.jitter_ms,
        while_suspended=data.while_suspended,
    )
    return _limit(policy)


@post("/v1/limits/{name:str}/reset", status_code=200, summary="Reset a limit")
async def reset_limit(
    name: FromPath[str],
    asked: InSession,
    namespace: lists.InNamespace = None,
) -> LimitView:
    """What programs declare counts again; `404` if none declares it."""
    asked.allow(Scope.OPERATE)
    owner = lists.owner(asked, namespace)
    return _limit(await asked.engine.reset_limit(name, namespace=owner))


@post("/v1/quotas", responses=EXISTED, summary="Have a quota policy")
async def create_quota(data: JSONBody[NewQuota], asked: InSession) -> JsonAnswer[wire.Tagged]:
    asked.allow(Scope.OPERATE)
    created = await asked.engine.create_quota_policy(
        data.quota_policy_id,
        window_seconds=data.window_seconds,
        max_requests_per_window=data.max_requests_per_window,
        max_concurrent=data.max_concurrent,
        namespace=lists.owner(asked, data.namespace),
        jitter_ms=data.jitter_ms,
        while_suspended=data.while_suspended,
    )
    new = isinstance(created, PolicyCreated)
    told: wire.Tagged = {
        "Created" if new else "AlreadySatisfied": {"quota_policy_id": data.quota_policy_id}
    }
    return JsonAnswer(told, status_code=201 if new else 200)


@post(
    "/v1/workers/{worker_id:str}/claim",
    status_code=200,
    responses=also(204, "There is none."),
    summary="Ask for an execution to claim; 204 without a body if there is none",
)
async def claim(
    worker_id: FromPath[str],
    data: JSONBody[AskForWork],
    asked: InSession,
) -> Response[GrantView | None]:
    asked.allow(Scope.WORK)
    grant = await asked.engine.claim_for_worker(
        [data.lane_id],
        worker_id=worker_id,
        worker_instance_id=data.worker_instance_id,
        capabilities=data.capabilities,
        namespace=asked.caller.namespace,
        grant_ttl_ms=data.grant_ttl_ms,
    )
    if grant is None:
        return Response(None, status_code=204)
    granted = GrantView(
        execution_id=grant.execution_id,
        partition_key=grant.partition_key,
        grant_key=grant.grant_key,
        expires_at_ms=grant.expires_at_ms,
        lane_id=data.lane_id,
        kind=type(grant).__name__,
    )
    return Response(granted, media_type="application/json")


@post(
    "/v1/executions/{id:str}/reclaim", status_code=200, summary="Take over what a worker has lost"
)
async def reclaim(
    id: FromPath[str],  # noqa: A002
    data: JSONBody[AskForReclaim],
    asked: InSession,
) -> JsonAnswer[dict[str, object]]:
    asked.allow(Scope.WORK)
    outcome = await asked.engine.issue_reclaim_grant(
        await asked.find(id),
        worker_id=data.worker_id,
        worker_instance_id=data.worker_instance_id,
        capabilities=data.worker_capabilities,
        grant_ttl_ms=data.grant_ttl_ms,
    )
    told: dict[str, object] = {"execution_id": outcome.execution_id}
    if isinstance(outcome, results.NotReclaimable):
        told |= {"status": "not_reclaimable", "detail": outcome.detail}
    elif isinstance(outcome, results.ReclaimCapExceeded):
        told |= {"status": "reclaim_cap_exceeded", "reclaim_count": outcome.reclaim_count}
    else:
        told |= {
            "status": "granted",
            "partition_key": outcome.partition_key,
            "grant_key": outcome.grant_key,
            "expires_at_ms": outcome.expires_at_ms,
            "lane_id": outcome.lane_id,
        }
    return JsonAnswer(told)


routes = Router(
    path="/",
    tags=["limits"],
    route_handlers=[
        create_budget,
        list_budgets,
        read_budget,
        change_budget,
        report_usage,
        reset_budget,
        list_limits,
        read_limit,
        limit_use,
        set_limit,
        reset_limit,
        create_quota,
    ],
)
work = Router(path="/", tags=["work"], route_handlers=[claim, reclaim])
