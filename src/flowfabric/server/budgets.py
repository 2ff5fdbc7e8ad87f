"""Budgets over HTTP."""

from collections.abc import Sequence

from litestar.params import FromPath, JSONBody
from msgspec import Struct, structs

from flowfabric.core.api_tokens import Scope
from flowfabric.core.budget_terms import BudgetDefinition, BudgetUpdate
from flowfabric.core.budgets import UsageAlreadyApplied, UsageCounted
from flowfabric.core.records import view_of
from flowfabric.engine.budgets import BudgetPage, BudgetStatus
from flowfabric.server import lists, wire
from flowfabric.server.access import InSession
from flowfabric.server.routing import CREATES, JsonAnswer, Routes, answer, created_or_not

routes = Routes("/v1", "budgets")


class NewBudget(Struct, kw_only=True):
    """Lists of limits follow the order of `dimensions`; 0 is no limit."""

    budget_id: str
    scope_type: str = "tenant"
    scope_id: str = ""
    enforcement_mode: str = "strict"
    on_hard_limit: str = "reject"
    on_soft_limit: str = "warn"
    reset_interval_ms: wire.Units = 0
    dimensions: Sequence[str] = ()
    hard_limits: Sequence[wire.Units] = ()
    soft_limits: Sequence[wire.Units] = ()
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
    dimensions: dict[str, wire.Units]
    dedup_key: str | None = None
    namespace: str | None = None


class BudgetChange(BudgetUpdate, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change. Limits of other dimensions stay; 0 removes a limit."""


@routes.post("/budgets", Scope.OPERATE, "Create a budget", **CREATES)
async def create_budget(data: JSONBody[NewBudget], session: InSession) -> JsonAnswer[wire.Tagged]:
    namespace = session.caller.own_namespace(data.namespace)
    definition = BudgetDefinition(**structs.asdict(data) | {"namespace": namespace})
    created = await session.engine.create_budget(definition)
    budget_id = str(created.budget.budget_id)
    return created_or_not(created.change == "created", budget_id=budget_id)


@routes.get("/budgets", Scope.READ, "List budgets")
async def list_budgets(
    session: InSession,
    namespace: lists.InNamespace = None,
    cursor: lists.AfterCursor = None,
    limit: lists.PageLimit = lists.PAGE,
) -> BudgetPage:
    return await session.engine.list_budgets(
        namespace=session.caller.namespace_for(namespace), cursor=cursor, limit=limit
    )


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
