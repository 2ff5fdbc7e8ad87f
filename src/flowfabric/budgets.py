"""Budgets as programs use them, by name: create them, report usage, read what is left.

    await app.budgets.create("team", hard={"tokens": 1_000_000}, reset_every="1d")
    await app.budgets.report("team", {"tokens": 812}, key="call-17")
    print(await app.budgets.status("team"))

Handlers use `ctx.report_usage` and `ctx.reserve` instead, which count once even after a
crash; see `worker.budgets`.
"""

from collections.abc import Mapping
from functools import lru_cache

from flowfabric.batching import GroupCommit
from flowfabric.core import budgets as rules
from flowfabric.core.budget_terms import BudgetDefinition, BudgetUpdate
from flowfabric.core.budgets import (
    Amounts,
    HardBreach,
    Reserved,
    UsageAlreadyApplied,
    UsageCounted,
)
from flowfabric.core.policies import Duration, duration_ms
from flowfabric.engine.budgets import BudgetStatus, usage_answer
from flowfabric.engine.engine import Engine
from flowfabric.engine.ledger import BudgetOutcome, BudgetRequest, Usage
from flowfabric.errors import BudgetExceeded, InvalidInput
from flowfabric.logs import open_log
from flowfabric.parts import AppPart

log = open_log(__name__)

Posts = GroupCommit[BudgetRequest, BudgetOutcome]
LimitAmounts = Mapping[str, int | None]
"""By dimension; None means no limit."""


class AppBudgets(AppPart):
    """The budgets of an app's namespace."""

    _group: tuple[Engine, Posts] | None = None

    async def create(
        self,
        name: str,
        *,
        hard: LimitAmounts = rules.NOTHING,
        soft: LimitAmounts = rules.NOTHING,
        reset_every: Duration | None = None,
        lane: str | None = None,
        task: str | None = None,
        whole_namespace: bool = False,
        flow: str | None = None,
        warn_only: bool = False,
        on_hard_limit: str = rules.OnHardLimit.REJECT,
        on_soft_limit: str = rules.OnSoftLimit.WARN,
    ) -> BudgetStatus:
        """Create a budget; an existing one stays as it is.

        Reports beyond a `hard` limit are refused, and those beyond a `soft` limit are warned about;
        with `warn_only` nothing is refused. While a hard limit is used up, runs attached to the
        budget do not start: those submitted with `budget=`, and those of the `lane`, the `task` or
        the whole namespace, if one is given. `on_hard_limit` says what else a refusal does; with
        `cancel_flow` it cancels the `flow` of that id. `on_soft_limit="allow"` turns the warnings
        off.
        """
        namespace = self._namespace() if whole_namespace else None
        scope, scope_id = _scope(lane=lane, kind=task, namespace=namespace, flow=flow)
        definition = BudgetDefinition(
            budget_id=name,
            namespace=self._namespace(),
            scope_type=scope,
            scope_id=scope_id,
            enforcement_mode="warn" if warn_only else "strict",
            on_hard_limit=on_hard_limit,
            on_soft_limit=on_soft_limit,
            reset_interval_ms=_interval_ms(reset_every),
            hard_limits=limit_amounts("hard", hard),
            soft_limits=limit_amounts("soft", soft),
        )
        if on_hard_limit == rules.OnHardLimit.CANCEL_FLOW and flow is None:
            raise InvalidInput("on_hard_limit", "cancel_flow goes with the flow= to cancel")
        await (await self._engine()).create_budget(definition)
        return await self.status(name)

    async def change(
        self,
        name: str,
        *,
        hard: LimitAmounts | None = None,
        soft: LimitAmounts | None = None,
        reset_every: Duration | None = None,
        warn_only: bool | None = None,
        on_hard_limit: str | None = None,
        on_soft_limit: str | None = None,
    ) -> BudgetStatus:
        """Change what is given, at once and for every process; None removes a limit."""
        update = BudgetUpdate(
            hard_limits=None if hard is None else limit_amounts("hard", hard),
            soft_limits=None if soft is None else limit_amounts("soft", soft),
            enforcement_mode=None if warn_only is None else "warn" if warn_only else "strict",
            on_hard_limit=on_hard_limit,
            on_soft_limit=on_soft_limit,
            reset_interval_ms=None if reset_every is None else _interval_ms(reset_every),
        )
        engine = await self._engine()
        return await engine.update_budget(name, update, namespace=self._namespace())

    async def status(self, name: str) -> BudgetStatus:
        """What is used, reserved and left of it."""
        return await (await self._engine()).get_budget_status(name, namespace=self._namespace())

    async def reset(self, name: str) -> BudgetStatus:
        """Start a new period now, with nothing used."""
        await (await self._engine()).reset_budget(name, namespace=self._namespace())
        return await self.status(name)

    async def remove(self, name: str) -> None:
        """Forget a budget and what it has counted: it limits nothing any more.

        Raises `Conflict` while running attempts hold amounts of it.
        """
        await (await self._engine()).remove_budget(name, namespace=self._namespace())

    async def report(
        self,
        name: str,
        amounts: Amounts,
        *,
        key: str | None = None,
        connection: object = None,
    ) -> None:
        """Count what was used. Raises `BudgetExceeded`, and counts nothing, if it does not fit.

        A repeat with the same `key` counts once. Reports made at the same time are stored
        together. With `connection=` it counts if and when that connection's transaction commits;
        until then the budget is locked, so keep the transaction short.
        """
        usage = Usage(budget_id=name, amounts=amounts, namespace=self._namespace(), dedup_key=key)
        engine = await self._engine_on(connection)
        if connection is not None:
            outcome = usage_answer(await engine.post_to_budgets([usage]))
        else:
            outcome = usage_answer([await self._posting(engine).add(usage)])
        refuse_breach(name, outcome, amounts)
        warn_of_lookalikes(self._namespace(), name, outcome)

    def _posting(self, engine: Engine) -> Posts:
        """One group per engine: it belongs to the event loop that the engine was opened on."""
        if self._group is None or self._group[0] is not engine:
            self._group = (engine, Posts(engine.post_to_budgets))
        return self._group[1]


def refuse_breach(name: str, outcome: BudgetOutcome, amounts: Amounts) -> None:
    """Raise `BudgetExceeded` if a hard limit was passed."""
    if isinstance(outcome, UsageAlreadyApplied):
        outcome = outcome.prior_outcome
    if isinstance(outcome, HardBreach):
        raise BudgetExceeded(
            rules.describe_breach(name, outcome, amounts),
            budget=name,
            dimension=outcome.dimension,
            used=outcome.current_usage,
            reserved=outcome.reserved,
            limit=outcome.hard_limit,
        )


def warn_of_lookalikes(namespace: str, name: str, outcome: BudgetOutcome) -> None:
    """Log that a dimension without a limit looks like a limited one, once per process."""
    for sentence in lookalikes(name, outcome):
        _warn_once(namespace, sentence)


def lookalikes(name: str, outcome: BudgetOutcome) -> list[str]:
    """What to tell of dimensions that may be mistyped."""
    if not isinstance(outcome, UsageCounted | Reserved):
        return []
    return [
        f"budget {name} counts {strange} and has no limit on it; did you mean {known}?"
        for strange, known in outcome.lookalikes.items()
    ]


@lru_cache(maxsize=1_000)
def _warn_once(namespace: str, sentence: str) -> None:
    log.warning("%s (namespace %s)", sentence, namespace)


def limit_amounts(field: str, given: object) -> dict[str, int]:
    """Limits as budgets store them, where 0 means no limit."""
    if not isinstance(given, Mapping):
        raise InvalidInput(field, "must map dimensions to whole numbers", given)
    for name, amount in given.items():
        if amount == 0:
            raise InvalidInput(
                f"{field}[{name}]",
                "must be 1 or more, or None for no limit; to stop all runs, pause their lane",
                amount,
            )
    return {name: 0 if amount is None else amount for name, amount in given.items()}


def named_amounts(given: Mapping[str, int] | None, more: Mapping[str, int]) -> dict[str, int]:
    """Amounts given as a mapping and by keyword, combined."""
    return {**(given or {}), **more}


def _interval_ms(every: Duration | None) -> int:
    return 0 if every in (None, 0) else duration_ms("reset_every", every)


def _scope(**given: str | None) -> tuple[str, str]:
    chosen = {scope: value for scope, value in given.items() if value is not None}
    if len(chosen) > 1:
        raise InvalidInput("lane", "give one of lane, task, whole_namespace and flow", chosen)
    return next(iter(chosen.items()), (rules.BudgetScope.TENANT, ""))
