"""Checks of requests to budgets: definitions, changes and amounts.

Bad input is refused before anything is written, with an error that names the field.
"""

from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import Final

from msgspec import Struct, structs

from flowfabric.core import budgets, ids
from flowfabric.core.bounds import AMOUNT_MAX
from flowfabric.core.budgets import Budget
from flowfabric.core.checks import (
    check_choice,
    check_int,
    check_list,
    check_name,
    check_optional_text,
)
from flowfabric.core.policies import DURATION_MAX_MS
from flowfabric.errors import InvalidBudgetScope, InvalidInput

DIMENSIONS_MAX: Final = 64
"""Dimensions one call may name."""
DIMENSION_BYTES_MAX: Final = 128
DEDUP_KEY_BYTES_MAX: Final = 512
RESET_INTERVAL_MS_MIN: Final = 1_000


class BudgetDefinition(Struct, frozen=True, kw_only=True):
    """A request to have a budget.

    Limits are mappings by dimension, or lists beside `dimensions`; 0 is no limit.
    """

    budget_id: str
    """A uuid, or a name that stands for one within the namespace."""
    namespace: str = "default"
    scope_type: str = budgets.BudgetScope.TENANT
    scope_id: str = ""
    enforcement_mode: str = budgets.EnforcementMode.STRICT
    on_hard_limit: str = budgets.OnHardLimit.REJECT
    on_soft_limit: str = budgets.OnSoftLimit.WARN
    reset_interval_ms: int = 0
    dimensions: Sequence[str] | None = None
    hard_limits: Mapping[str, int] | Sequence[int] = {}
    soft_limits: Mapping[str, int] | Sequence[int] = {}


class BudgetUpdate(Struct, frozen=True, kw_only=True):
    """What to change; None leaves it. Limits of dimensions that are not named stay."""

    hard_limits: Mapping[str, int] | None = None
    soft_limits: Mapping[str, int] | None = None
    enforcement_mode: str | None = None
    on_hard_limit: str | None = None
    on_soft_limit: str | None = None
    reset_interval_ms: int | None = None


class UsageDimensions(Struct, frozen=True, kw_only=True):
    """What a worker has used. A repeat with the same `dedup_key` is counted once."""

    input_tokens: int = 0
    output_tokens: int = 0
    wall_ms: int | None = None
    custom: Mapping[str, int] = {}
    dedup_key: str | None = None


def check_definition(definition: object, now_ms: int) -> Budget:
    """The defined budget as a new one. Raises on the first field that is wrong."""
    if not isinstance(definition, BudgetDefinition):
        raise InvalidInput("definition", "must be a BudgetDefinition", definition)
    namespace = ids.parse_namespace(definition.namespace)
    budget_id = ids.named_budget_id(definition.budget_id, namespace)
    hard, soft = _check_limits(definition)
    try:
        scope_type = check_choice("scope_type", definition.scope_type, budgets.BudgetScope)
    except InvalidInput as error:
        raise InvalidBudgetScope(str(error)) from None
    budget = Budget(
        budget_id=budget_id,
        namespace=namespace,
        name=definition.budget_id,
        scope_type=scope_type,
        scope_id=_check_scope_id(scope_type, definition.scope_id),
        hard_limits=budgets.encode_amounts(hard),
        soft_limits=budgets.encode_amounts(soft),
        created_at_ms=now_ms,
        updated_at_ms=now_ms,
    )
    return _under_terms(budget, structs.asdict(definition), now_ms)


_DEFINED: Final = (
    "scope_type", "scope_id", "enforcement_mode", "on_hard_limit", "on_soft_limit",
    "reset_interval_ms", "hard_limits", "soft_limits",
)  # fmt: skip


def defined(existing: Budget, wanted: Budget) -> Budget:
    """A budget that was only reported to, now that it is created: its usage stays."""
    fields = {name: getattr(wanted, name) for name in (*_DEFINED, "name", "next_reset_at_ms")}
    return structs.replace(existing, declared=True, **fields)


def differs(existing: Budget, wanted: Budget) -> bool:
    return any(getattr(existing, name) != getattr(wanted, name) for name in _DEFINED)


def updated(account: budgets.Account, update: object, now_ms: int) -> budgets.Account:
    """The account under other terms."""
    if not isinstance(update, BudgetUpdate):
        raise InvalidInput("update", "must be a BudgetUpdate", update)
    changes = {name: value for name, value in structs.asdict(update).items() if value is not None}
    hard = {**account.hard, **check_amounts("hard_limits", changes.get("hard_limits", {}))}
    soft = {**account.soft, **check_amounts("soft_limits", changes.get("soft_limits", {}))}
    _check_soft(hard, soft)
    _check_count(hard.keys() | soft.keys())
    budget = _under_terms(account.budget, changes, now_ms)
    return structs.replace(account, budget=budget, hard=hard, soft=soft)


def _under_terms(budget: Budget, terms: Mapping[str, object], now_ms: int) -> Budget:
    """The budget under these terms, checked. A new interval counts from now."""
    fields = {name: check(terms[name]) for name, check in _TERMS.items() if name in terms}
    if "reset_interval_ms" in terms:
        interval_ms = check_interval(terms["reset_interval_ms"])
        fields["next_reset_at_ms"] = now_ms + interval_ms if interval_ms else None
    return structs.replace(budget, **fields)


def check_amounts(field: str, value: object) -> dict[str, int]:
    """Amounts by dimension."""
    if not isinstance(value, Mapping):
        raise InvalidInput(field, "must map dimensions to whole numbers", value)
    _check_count(value)
    return {
        check_dimension(field, name): check_int(f"{field}[{name}]", amount, 0, AMOUNT_MAX)
        for name, amount in value.items()
    }


def check_deltas(verb: str, dimensions: object, deltas: object) -> dict[str, int]:
    """Amounts as two lists; a dimension that is named twice is their sum."""
    names = check_list("dimensions", dimensions, 0, 2**31)
    amounts = check_list("deltas", deltas, 0, 2**31)
    if len(names) != len(amounts):
        raise InvalidInput("deltas", f"{verb}: dimensions and deltas length mismatch", len(amounts))
    _check_count(names)
    summed: dict[str, int] = {}
    for name, amount in zip(names, amounts, strict=True):
        dimension = check_dimension("dimensions", name)
        delta = check_int(f"deltas[{dimension}]", amount, 0, AMOUNT_MAX)
        summed[dimension] = check_int(
            f"deltas[{dimension}]", summed.get(dimension, 0) + delta, 0, AMOUNT_MAX
        )
    return summed


def check_usage(usage: object) -> dict[str, int]:
    """All that a worker has used, as one mapping."""
    if not isinstance(usage, UsageDimensions):
        raise InvalidInput("usage", "must be UsageDimensions", usage)
    named = {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "wall_ms": 0 if usage.wall_ms is None else usage.wall_ms,
    }
    checked = {name: check_int(name, n, 0, AMOUNT_MAX) for name, n in named.items()}
    custom = check_amounts("custom", usage.custom)
    total = budgets.plus(custom, {name: n for name, n in checked.items() if n})
    _check_count(total)
    return total


def check_dimension(field: str, name: object) -> str:
    checked = check_name(field, name, bytes_max=DIMENSION_BYTES_MAX)
    if checked.startswith("_"):
        raise InvalidInput(field, "a dimension must not begin with _", name)
    return checked


def check_dedup_key(field: str, value: object) -> str | None:
    """None if missing or empty."""
    return check_optional_text(field, value, bytes_max=DEDUP_KEY_BYTES_MAX) or None


def check_mode(value: object) -> budgets.EnforcementMode:
    """`hard` is another word for `strict`."""
    mode = budgets.EnforcementMode.STRICT if value == "hard" else value
    return check_choice("enforcement_mode", mode, budgets.EnforcementMode)


def check_interval(value: object) -> int:
    if value == 0 and not isinstance(value, bool):
        return 0
    return check_int("reset_interval_ms", value, RESET_INTERVAL_MS_MIN, DURATION_MAX_MS)


_TERMS: Final[Mapping[str, Callable[[object], object]]] = {
    "enforcement_mode": check_mode,
    "on_hard_limit": partial(check_choice, "on_hard_limit", choices=budgets.OnHardLimit),
    "on_soft_limit": partial(check_choice, "on_soft_limit", choices=budgets.OnSoftLimit),
    "reset_interval_ms": check_interval,
}
"""What a definition and an update have in common, and how it is checked."""


def _check_limits(definition: BudgetDefinition) -> tuple[dict[str, int], dict[str, int]]:
    hard, soft = definition.hard_limits, definition.soft_limits
    if definition.dimensions is not None:
        hard, soft = _paired(definition.dimensions, hard, soft)
    checked = check_amounts("hard_limits", hard), check_amounts("soft_limits", soft)
    _check_count(checked[0].keys() | checked[1].keys())
    _check_soft(*checked)
    return checked


def _paired(
    dimensions: object, hard: object, soft: object
) -> tuple[dict[str, int], dict[str, int]]:
    """Limits given as lists beside the dimensions."""
    names = check_list("dimensions", dimensions, 0, 2**31)
    lists = [check_list("hard_limits", hard, 0, 2**31), check_list("soft_limits", soft, 0, 2**31)]
    if any(len(each) != len(names) for each in lists):
        problem = "create_budget: dimensions / hard_limits / soft_limits length mismatch"
        raise InvalidInput("dimensions", problem, len(names))
    _check_count(names)
    checked = [check_dimension("dimensions", name) for name in names]
    if len(set(checked)) < len(checked):
        raise InvalidInput("dimensions", "must name each dimension once", checked)
    paired = [
        {
            name: check_int(f"limits[{name}]", limit, 0, AMOUNT_MAX)
            for name, limit in zip(checked, each, strict=True)
        }
        for each in lists
    ]
    return paired[0], paired[1]


def _check_soft(hard: budgets.Amounts, soft: budgets.Amounts) -> None:
    for name, limit in soft.items():
        if 0 < hard.get(name, 0) < limit:
            problem = f"must not be above the hard limit of {hard[name]}"
            raise InvalidInput(f"soft_limits[{name}]", problem, limit)


def _check_scope_id(scope_type: budgets.BudgetScope, scope_id: object) -> str:
    try:
        match scope_type:
            case budgets.BudgetScope.TENANT:
                return "" if scope_id == "" else check_name("scope_id", scope_id)
            case budgets.BudgetScope.LANE:
                return ids.parse_lane_id(scope_id, "scope_id")
            case budgets.BudgetScope.NAMESPACE:
                return ids.parse_namespace(scope_id)
            case (
                budgets.BudgetScope.EXECUTION | budgets.BudgetScope.FLOW | budgets.BudgetScope.KIND
            ):
                return check_name("scope_id", scope_id)
    except InvalidInput as error:
        raise InvalidBudgetScope(f"scope_id of scope {scope_type}: {error}") from error


def _check_count(dimensions: Sized) -> None:
    count = len(dimensions)
    if count > DIMENSIONS_MAX:
        problem = f"too_many_dimensions: limit={DIMENSIONS_MAX}, got={count}"
        raise InvalidInput("dimensions", problem, count)
