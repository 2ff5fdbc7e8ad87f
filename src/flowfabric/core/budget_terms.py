"""Checks of requests to budgets: definitions, changes and amounts.

Bad input is refused before anything is written, with an error that names the field.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct, structs

from flowfabric.core import budgets, ids
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


def check_definition(definition: object, now_ms: int) -> budgets.Budget:
    """The budget asked for, as if it were new. Raises on the first field that is wrong."""
    if not isinstance(definition, BudgetDefinition):
        raise InvalidInput("definition", "must be a BudgetDefinition", definition)
    namespace = ids.parse_namespace(definition.namespace)
    budget_id = ids.named_budget_id(definition.budget_id, namespace)
    hard, soft = _check_limits(definition)
    interval_ms = check_interval(definition.reset_interval_ms)
    try:
        scope_type = check_choice("scope_type", definition.scope_type, budgets.BudgetScope)
    except InvalidInput as error:
        raise InvalidBudgetScope(str(error)) from None
    return budgets.Budget(
        budget_id=budget_id,
        namespace=namespace,
        name=definition.budget_id,
        scope_type=scope_type,
        scope_id=_check_scope_id(scope_type, definition.scope_id),
        enforcement_mode=check_mode(definition.enforcement_mode),
        on_hard_limit=check_choice("on_hard_limit", definition.on_hard_limit, budgets.OnHardLimit),
        on_soft_limit=check_choice("on_soft_limit", definition.on_soft_limit, budgets.OnSoftLimit),
        reset_interval_ms=interval_ms,
        hard_limits=budgets.encode_amounts(hard),
        soft_limits=budgets.encode_amounts(soft),
        next_reset_at_ms=now_ms + interval_ms if interval_ms else None,
        created_at_ms=now_ms,
        updated_at_ms=now_ms,
    )


_DEFINED: Final = (
    "scope_type", "scope_id", "enforcement_mode", "on_hard_limit", "on_soft_limit",
    "reset_interval_ms", "hard_limits", "soft_limits",
)  # fmt: skip


def defined(existing: budgets.Budget, wanted: budgets.Budget) -> budgets.Budget:
    """A budget that was only reported to, now that it is created: its usage stays."""
    fields = {name: getattr(wanted, name) for name in (*_DEFINED, "name", "next_reset_at_ms")}
    return structs.replace(existing, declared=True, **fields)


def differs(existing: budgets.Budget, wanted: budgets.Budget) -> bool:
    return any(getattr(existing, name) != getattr(wanted, name) for name in _DEFINED)


def updated(account: budgets.Account, update: object, now_ms: int) -> budgets.Account:
    """The account under other terms. A new interval counts from now."""
    if not isinstance(update, BudgetUpdate):
        raise InvalidInput("update", "must be a BudgetUpdate", update)
    hard = {**account.hard, **check_amounts("hard_limits", update.hard_limits or budgets.NOTHING)}
    soft = {**account.soft, **check_amounts("soft_limits", update.soft_limits or budgets.NOTHING)}
    _check_soft(hard, soft)
    if len(hard.keys() | soft.keys()) > DIMENSIONS_MAX:
        raise _too_many(len(hard.keys() | soft.keys()))
    budget = account.budget
    if update.enforcement_mode is not None:
        mode = check_mode(update.enforcement_mode)
        budget = structs.replace(budget, enforcement_mode=mode)
    if update.on_hard_limit is not None:
        action = check_choice("on_hard_limit", update.on_hard_limit, budgets.OnHardLimit)
        budget = structs.replace(budget, on_hard_limit=action)
    if update.on_soft_limit is not None:
        reaction = check_choice("on_soft_limit", update.on_soft_limit, budgets.OnSoftLimit)
        budget = structs.replace(budget, on_soft_limit=reaction)
    if update.reset_interval_ms is not None:
        interval_ms = check_interval(update.reset_interval_ms)
        next_ms = now_ms + interval_ms if interval_ms else None
        budget = structs.replace(budget, reset_interval_ms=interval_ms, next_reset_at_ms=next_ms)
    return structs.replace(account, budget=budget, hard=hard, soft=soft)


def check_amounts(field: str, value: object) -> dict[str, int]:
    """Amounts by dimension."""
    if not isinstance(value, Mapping):
        raise InvalidInput(field, "must map dimensions to whole numbers", value)
    if len(value) > DIMENSIONS_MAX:
        raise _too_many(len(value))
    return {
        check_dimension(field, name): check_int(f"{field}[{name}]", amount, 0, budgets.AMOUNT_MAX)
        for name, amount in value.items()
    }


def check_deltas(verb: str, dimensions: object, deltas: object) -> dict[str, int]:
    """Amounts as two lists; a dimension that is named twice is their sum."""
    names = check_list("dimensions", dimensions, 0, 2**31)
    amounts = check_list("deltas", deltas, 0, 2**31)
    if len(names) != len(amounts):
        raise InvalidInput("deltas", f"{verb}: dimensions and deltas length mismatch", len(amounts))
    if len(names) > DIMENSIONS_MAX:
        raise _too_many(len(names))
    summed: dict[str, int] = {}
    for name, amount in zip(names, amounts, strict=True):
        dimension = check_dimension("dimensions", name)
        delta = check_int(f"deltas[{dimension}]", amount, 0, budgets.AMOUNT_MAX)
        summed[dimension] = check_int(
            f"deltas[{dimension}]", summed.get(dimension, 0) + delta, 0, budgets.AMOUNT_MAX
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
    checked = {name: check_int(name, n, 0, budgets.AMOUNT_MAX) for name, n in named.items()}
    custom = check_amounts("custom", usage.custom)
    total = budgets.plus(custom, {name: n for name, n in checked.items() if n})
    if len(total) > DIMENSIONS_MAX:
        raise _too_many(len(total))
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
    given = budgets.EnforcementMode.STRICT if value == "hard" else value
    return check_choice("enforcement_mode", given, budgets.EnforcementMode)


def check_interval(value: object) -> int:
    if value == 0 and not isinstance(value, bool):
        return 0
    return check_int("reset_interval_ms", value, RESET_INTERVAL_MS_MIN, DURATION_MAX_MS)


def _check_limits(definition: BudgetDefinition) -> tuple[dict[str, int], dict[str, int]]:
    hard, soft = definition.hard_limits, definition.soft_limits
    if definition.dimensions is not None:
        hard, soft = _paired(definition.dimensions, hard, soft)
    checked = check_amounts("hard_limits", hard), check_amounts("soft_limits", soft)
    both = checked[0].keys() | checked[1].keys()
    if len(both) > DIMENSIONS_MAX:
        raise _too_many(len(both))
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
    if len(names) > DIMENSIONS_MAX:
        raise _too_many(len(names))
    checked = [check_dimension("dimensions", name) for name in names]
    if len(set(checked)) < len(checked):
        raise InvalidInput("dimensions", "must name each dimension once", checked)
    paired = [
        {
            name: check_int(f"limits[{name}]", limit, 0, budgets.AMOUNT_MAX)
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


def _too_many(count: int) -> InvalidInput:
    return InvalidInput(
        "dimensions", f"too_many_dimensions: limit={DIMENSIONS_MAX}, got={count}", count
    )
