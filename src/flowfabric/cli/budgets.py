"""`budgets`: list, show, create, set, reset, remove, report."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

import click
import msgspec
from msgspec import structs
from rich.text import Text

from flowfabric.budgets import lookalikes, refuse_breach
from flowfabric.cli import options, screen
from flowfabric.cli.screen import fixed, right, spare, whole
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.budget_terms import BudgetDefinition, BudgetUpdate
from flowfabric.core.budgets import EnforcementMode, OnHardLimit, OnSoftLimit, lookalike
from flowfabric.core.policies import span
from flowfabric.engine.budgets import BudgetStatus
from flowfabric.engine.engine import Engine
from flowfabric.engine.paging import pages

F = TypeVar("F", bound=Callable[..., object])
P = ParamSpec("P")
T = TypeVar("T")

COLUMNS: Final = (
    whole("BUDGET"),
    whole("DIMENSION"),
    right("USED"),
    spare("RESERVED"),
    spare("SOFT"),
    right("HARD"),
    fixed("STATE"),
    spare("RESET"),
)


class Amount(click.ParamType[tuple[str, int]]):
    """`tokens=1000`; underscores in the number are fine."""

    name = "dimension=amount"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        dimension, _, amount = str(value).rpartition("=")
        try:
            return dimension, int(amount)
        except ValueError:
            self.fail(f"{value!r} is not of the form tokens=1000", param, ctx)


class LimitAmount(Amount):
    """`tokens=1000`, or `tokens=none` for no limit."""

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        dimension, _, amount = str(value).rpartition("=")
        if amount == "none":
            return dimension, 0
        converted = super().convert(value, param, ctx)
        if converted[1] == 0:
            none = f"write {dimension}=none for no limit"
            self.fail(f"0 is not allowed: {none}; to stop runs, pause their lane", param, ctx)
        return converted


class ResetInterval(click.ParamType[int]):
    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        return 0 if value in ("0", "never") else options.duration_of("reset-every", str(value))


def terms_options(command: Callable[Concatenate[BudgetUpdate, P], T]) -> Callable[P, T]:
    """Adds the options for limits and terms; the command gets them as its first argument."""

    @_limit_option("--hard", "Limit that is enforced; tokens=none removes it.")
    @_limit_option("--soft", "Limit that reports warn about.")
    @click.option(
        "--reset-every",
        "reset_interval_ms",
        type=ResetInterval(),
        help="Start a new period this often, such as 1d; never if omitted.",
    )
    @click.option(
        "--mode",
        "enforcement_mode",
        type=_choice(EnforcementMode),
        help="Whether hard limits refuse, or only warn.",
    )
    @click.option(
        "--on-hard-limit",
        type=_choice(OnHardLimit),
        help="What else happens when a hard limit refuses.",
    )
    @click.option(
        "--on-soft-limit",
        type=_choice(OnSoftLimit),
        help="Whether passing a soft limit is reported.",
    )
    @click.pass_context
    @wraps(command)
    def wrapped(context: click.Context, /, *args: P.args, **kwargs: P.kwargs) -> T:
        given = dict(kwargs)
        terms = {name: given.pop(name) for name in BudgetUpdate.__struct_fields__}
        return context.invoke(command, msgspec.convert(terms, BudgetUpdate), *args, **given)

    return wrapped


def _limit_option(flag: str, help_text: str) -> Callable[[F], F]:
    return click.option(
        flag,
        f"{flag[2:]}_limits",
        type=LimitAmount(),
        multiple=True,
        callback=lambda _context, _option, limits: dict(limits) or None,
        help=help_text,
    )


def _choice(kind: type[StrEnum]) -> click.Choice[str]:
    return click.Choice([each.value for each in kind])


@click.group("budgets")
def budgets() -> None:
    """See and change budgets: what runs may spend and have spent."""


@budgets.command("list")
@options.on_engine("any")
async def list_budgets(engine: Engine, target: options.Target) -> None:
    """List budgets. With --json: one per line."""
    found = pages(
        lambda at: engine.list_budgets(namespace=target.scope(), cursor=at, limit=PAGE_MAX)
    )
    await _show(engine, target, [budget async for page in found for budget in page.budgets])


@budgets.command("show")
@click.argument("budget")
@options.on_engine("own")
async def show_budget(engine: Engine, target: options.Target, budget: str) -> None:
    """Show what is used, reserved and left of BUDGET."""
    await _show_one(engine, target, budget)


@budgets.command("create")
@click.argument("budget")
@terms_options
@click.option("--lane", help="Attach everything that runs in this lane.")
@click.option("--task", help="Attach all runs of this task.")
@options.on_engine("own")
async def create_budget(
    engine: Engine,
    target: options.Target,
    terms: BudgetUpdate,
    budget: str,
    lane: str | None,
    task: str | None,
) -> None:
    """Create BUDGET, unless it exists under the same terms."""
    if lane is not None and task is not None:
        raise click.UsageError("give --lane or --task, not both")
    scope, scope_id = ("lane", lane) if lane is not None else ("kind", task)
    given = {name: term for name, term in structs.asdict(terms).items() if term is not None}
    definition = BudgetDefinition(
        budget_id=budget,
        namespace=target.own_namespace(),
        scope_type="tenant" if scope_id is None else scope,
        scope_id=scope_id or "",
        **given,
    )
    await engine.create_budget(definition, if_exists="error")
    await _show_one(engine, target, budget)


@budgets.command("set")
@click.argument("budget")
@terms_options
@options.on_engine("own")
async def set_budget(
    engine: Engine, target: options.Target, terms: BudgetUpdate, budget: str
) -> None:
    """Change limits and terms of BUDGET, at once and for everybody."""
    namespace = target.own_namespace()
    before = await engine.get_budget_status(budget, namespace=namespace)
    changed = await engine.update_budget(budget, terms, namespace=namespace)
    known = _dimensions(before)
    for name in sorted({*(terms.hard_limits or {}), *(terms.soft_limits or {})} - {*known}):
        if meant := lookalike(name, known):
            sentence = f"budget {budget} had no dimension {name} before; did you mean {meant}?"
            screen.err().print(Text(sentence, style="yellow"))
    await _show(engine, target, [changed])


@budgets.command("reset")
@click.argument("budget")
@options.on_engine("own")
async def reset_budget(engine: Engine, target: options.Target, budget: str) -> None:
    """Start a new period of BUDGET now, with nothing used."""
    await engine.reset_budget(budget, namespace=target.own_namespace())
    await _show_one(engine, target, budget)


@budgets.command("remove")
@click.argument("budget")
@options.on_engine("own")
async def remove_budget(engine: Engine, target: options.Target, budget: str) -> None:
    """Forget BUDGET and what it has counted: it limits nothing any more.

    Refused while running attempts hold amounts of it.
    """
    removed = await engine.remove_budget(budget, namespace=target.own_namespace())
    screen.answer(removed, f"{budget} is removed", as_json=target.json)


@budgets.command("report")
@click.argument("budget")
@click.argument("amounts", type=Amount(), nargs=-1, required=True, metavar="DIMENSION=AMOUNT...")
@click.option("--key", help="Count it once, however often it is reported under this key.")
@options.on_engine("own")
async def report_usage(
    engine: Engine,
    target: options.Target,
    budget: str,
    amounts: Sequence[tuple[str, int]],
    key: str | None,
) -> None:
    """Count usage of BUDGET, such as tokens=812."""
    outcome = await engine.report_usage_admin(
        budget,
        [name for name, _ in amounts],
        [amount for _, amount in amounts],
        dedup_key=key,
        namespace=target.own_namespace(),
    )
    refuse_breach(budget, outcome, dict(amounts))
    for sentence in lookalikes(budget, outcome):
        screen.err().print(Text(sentence, style="yellow"))
    await _show_one(engine, target, budget)


async def _show_one(engine: Engine, target: options.Target, budget: str) -> None:
    status = await engine.get_budget_status(budget, namespace=target.own_namespace())
    await _show(engine, target, [status])


async def _show(engine: Engine, target: options.Target, found: Sequence[BudgetStatus]) -> None:
    now_ms = await engine.server_time_ms()
    rows = [row for budget in found for row in _rows(budget, now_ms)]
    screen.show(found, COLUMNS, rows, as_json=target.json, nothing="No budgets.")


def _rows(budget: BudgetStatus, now_ms: int) -> list[tuple[str | Text, ...]]:
    """A row per dimension; only the first has the name, and a state that is about none of them."""
    every = f" every {span(budget.reset_interval_ms)}" if budget.reset_interval_ms else ""
    reset = f"{screen.ago(budget.next_reset_at_ms, now_ms)}{every}" if every else ""
    names = _dimensions(budget) or ("",)
    state, about = _state(budget)
    return [
        (
            screen.named(budget.namespace, budget.name) if name == names[0] else "",
            name,
            _amount(budget.usage, name) or ("0" if name else ""),
            _amount(budget.reserved, name),
            _amount(budget.soft_limits, name),
            _amount(budget.hard_limits, name),
            state if name in (about or names[:1]) else "",
            reset if name == names[0] else "",
        )
        for name in names
    ]


def _amount(amounts: Mapping[str, int], name: str) -> str:
    amount = amounts.get(name, 0)
    return f"{amount:,}" if amount else ""


def _dimensions(budget: BudgetStatus) -> tuple[str, ...]:
    return tuple(sorted({*budget.usage, *budget.hard_limits, *budget.soft_limits}))


def _state(budget: BudgetStatus) -> tuple[Text, Sequence[str]]:
    """The state, and the dimensions it is about."""
    if not budget.declared:
        return Text("undeclared", style="dim"), ()
    if budget.closed:
        return Text("used up", style="red"), _beyond(budget, budget.hard_limits, 0)
    if budget.enforcement_mode == EnforcementMode.WARN:
        return Text("warns", style="yellow"), ()
    above = _beyond(budget, budget.soft_limits, 1)
    if budget.on_soft_limit == OnSoftLimit.WARN and above:
        return Text("above soft", style="yellow"), above
    return Text("open", style="green"), ()


def _beyond(budget: BudgetStatus, limits: Mapping[str, int], by: int) -> list[str]:
    """The dimensions whose limits are passed by so much."""
    return [name for name, limit in limits.items() if 0 < limit <= budget.usage.get(name, 0) - by]
