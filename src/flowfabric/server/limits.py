"""Budgets, quotas and limits over HTTP."""

from collections.abc import Sequence
from typing import Annotated

from litestar.params import FromPath, JSONBody
from msgspec import Meta, Struct, structs

from flowfabric.core.api_tokens import Scope
from flowfabric.core.budget_terms import BudgetDefinition, BudgetUpdate
from flowfabric.core.budgets import UsageAlreadyApplied, UsageCounted
from flowfabric.core.limits import QuotaPolicy, WhileSuspended
from flowfabric.core.records import view_of
from flowfabric.engine.budgets import BudgetStatus
from flowfabric.engine.limits import GateUse, PolicyCreated
from flowfabric.server import lists, wire
from flowfabric.server.access import InSession
from flowfabric.server.routing import CREATES, JsonAnswer, Routes, answer

routes = Routes("/v1", "limits")
Units = Annotated[int, Meta(ge=0, le=2**62)]


class NewBudget(Struct, kw_only=True):
    """Lists of limits follow the order of `dimensions`; 0 is no limit."""

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
    """The values to apply from now on, whatever programs declare; 0 is no limit."""

    window_ms: Units = 0
    max_requests_per_window: Units = 0
    active_concurrency_cap: Units = 0
    jitter_ms: Units = 0
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


class BudgetList(lists.Page, kw_only=True):
    budgets: tuple[BudgetStatus, ...]


class BudgetChange(BudgetUpdate, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change. Limits of other dimensions stay; 0 removes a limit."""


@routes.post("/budgets", Scope.OPERATE, "Create a budget", **CREATES)
async def create_budget(data: JSONBody[NewBudget], session: InSession) -> JsonAnswer[wire.Tagged]:
    namespace = session.caller.own_namespace(data.namespace)
    definition = BudgetDefinition(**structs.asdict(data) | {"namespace": namespace})
    created = await session.engine.create_budget(definition)
    budget_id = str(created.budget.budget_id)
    return _created(created.change == "created", budget_id=budget_id)


def _created(new: bool, **ids: object) -> JsonAnswer[wire.Tagged]:
    result: wire.Tagged = {"Created" if new else "AlreadySatisfied": ids}
    return JsonAnswer(result, status_code=201 if new else 200)


@routes.get("/budgets", Scope.READ, "List budgets")
async def list_budgets(
    session: InSession,
    namespace: lists.InNamespace = None,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
) -> BudgetList:
    page = await session.engine.list_budgets(
        namespace=session.caller.namespace_for(namespace),
        cursor=lists.read_pair(cursor),
        limit=limit,
    )
    return BudgetList(budgets=page.budgets, next_cursor=lists.pair_text(page.next_cursor))


@routes.get("/budgets/{id:str}", Scope.READ, "Read a budget")
async def read_budget(
    id: FromPath[str], session: InSession, namespace: lists.InNamespace = None
) -> BudgetView:
    owner = session.caller.own_namespace(namespace)
    return _budget(await session.engine.get_budget_status(id, namespace=owner))


@routes.patch("/budgets/{id:str}", Scope.OPERATE, "Change the terms of a budget")
async def change_budget(
    id: FromPath[str],
    data: JSONBody[BudgetChange],
    session: InSession,
    namespace: lists.InNamespace = None,
) -> BudgetView:
    """Counted usage stays."""
    owner = session.caller.own_namespace(namespace)
    return _budget(await session.engine.update_budget(id, data, namespace=owner))


@routes.delete("/budgets/{id:str}", Scope.OPERATE, "Remove a budget")
async def remove_budget(
    id: FromPath[str],
    session: InSession,
    namespace: lists.InNamespace = None,
) -> BudgetView:
    """`409` while running attempts hold amounts of it."""
    owner = session.caller.own_namespace(namespace)
    return _budget(await session.engine.remove_budget(id, namespace=owner))


def _budget(found: BudgetStatus) -> BudgetView:
    return view_of(
        BudgetView,
        found,
        last_breach_at=_text(found.last_breach_at_ms),
        next_reset_at=_text(found.next_reset_at_ms),
        created_at=_text(found.created_at_ms),
    )


def _text(at_ms: int | None) -> str | None:
    return None if at_ms is None else str(at_ms)


@routes.post("/budgets/{id:str}/usage", Scope.OPERATE, "Report usage to a budget")
async def report_usage(
    id: FromPath[str], data: JSONBody[ReportedUsage], session: InSession
) -> JsonAnswer[wire.Tagged]:
    """A breach is an answer, not an error: nothing is counted beyond a hard limit."""
    outcome = await session.engine.report_usage_admin(
        id,
        list(data.dimensions),
        list(data.dimensions.values()),
        dedup_key=data.dedup_key,
        namespace=session.caller.own_namespace(data.namespace),
    )
    if isinstance(outcome, UsageCounted):
        return JsonAnswer("Ok")
    if isinstance(outcome, UsageAlreadyApplied):
        return JsonAnswer("AlreadyApplied")
    return answer(outcome)


@routes.post("/budgets/{id:str}/reset", Scope.OPERATE, "Begin a new period of a budget")
async def reset_budget(
    id: FromPath[str], session: InSession, namespace: lists.InNamespace = None
) -> JsonAnswer[wire.Tagged]:
    owner = session.caller.own_namespace(namespace)
    reset = await session.engine.reset_budget(id, namespace=owner)
    return JsonAnswer({"Reset": {"next_reset_at": reset.next_reset_at_ms}})


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
    return _created(isinstance(created, PolicyCreated), quota_policy_id=data.quota_policy_id)
