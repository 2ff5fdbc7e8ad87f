"""Gates of routes, with the limits behind them: stored before the first execution that passes them.

Who declares a limit and uses it stores both in one go. How many pass is counted here; claims of
what waits at gates are in `engine.gated_claims`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct, structs

from flowfabric.core import gates
from flowfabric.core.bounds import GATED_ROUTES_MAX
from flowfabric.core.budgets import Budget, describe_closed, reached_namespace
from flowfabric.core.checks import split_kind
from flowfabric.core.decisions import Changes
from flowfabric.core.diagnosis import held_up_by_limits
from flowfabric.core.ids import (
    BudgetId,
    GateId,
    GateOwnerId,
)
from flowfabric.core.limits import DeclaredLimit, Limits, QuotaPolicy, declared_policy
from flowfabric.core.records import Execution
from flowfabric.errors import Conflict, Corruption, InvalidInput, NotFound, RetryExhausted
from flowfabric.store.base import Key, Reader, Transaction

GATES_TOPIC = "gates"
"""Limits have changed, or the first ones exist."""
gated_routes: Final[set[int]] = set()
"""Routes under limits that this process has claimed from: when an execution of theirs is released,
others may fit. Only hints follow from it, so it need not tell databases apart."""
HAVE_TRIES = 3
"""How often to store a limit again that others remove meanwhile."""


async def register(
    tx: Transaction,
    names: Collection[gates.GateName],
    limits: Collection[DeclaredLimit] = (),
) -> None:
    """Add gates that are new. A limit has to exist, unless it is declared along with its use; a
    budget may be used before it is created."""
    if not names:
        return
    await declare(tx, sorted(limits, key=lambda each: each.quota_policy_id))
    quotas = _owners(names, gates.GateOwner.QUOTA)
    known = await tx.get(QuotaPolicy, quotas)
    for key in quotas:
        if key not in known:
            raise NotFound("quota_policy", str(key[0]))
    gate_ids = sorted(each.gate_id for each in names)
    # Held until the routes that pass them exist: gates without routes are deleted.
    held = set(await tx.select_as(GateId, "hold_gates", gate_ids=gate_ids))
    new = [each for each in sorted(names) if each.gate_id not in held]
    # A budget may be used up already; under its lock that cannot change.
    budgets = await tx.lock(Budget, _owners(new, gates.GateOwner.BUDGET))
    closed = {budget.budget_id for budget in budgets.values() if budget.closed}
    await tx.insert_new(
        [structs.replace(each.new(), closed=each.owner_id in closed) for each in new]
    )
    tx.announce(GATES_TOPIC)


def _owners(names: Iterable[gates.GateName], kind: gates.GateOwner) -> list[Key]:
    """The keys of the policies or budgets that gates belong to."""
    return sorted({(each.owner_id,) for each in names if each.owner_kind is kind})


async def attach_to_routes(tx: Transaction, routes: Mapping[int, tuple[str, str, str]]) -> None:
    """Have routes pass the budgets for their namespace, lane or kind, in this order."""
    listed = sorted(routes.items())
    (limited,) = await tx.select_as(
        int,
        "attach_to_routes",
        route_ids=[route_id for route_id, _ in listed],
        namespaces=[namespace for _, (namespace, _, _) in listed],
        lane_ids=[lane_id for _, (_, lane_id, _) in listed],
        kinds=[kind for _, (_, _, kind) in listed],
        names=[split_kind(kind)[0] for _, (_, _, kind) in listed],
    )
    if limited:
        tx.announce(GATES_TOPIC)


async def attach_budget(tx: Transaction, budget: Budget) -> None:
    """Have the existing routes in a budget's scope pass it; `attach_to_routes` adds later ones."""
    await tx.select("hold_namespace", namespace=reached_namespace(budget))
    await register(tx, [gates.GateName(gates.GateOwner.BUDGET, budget.budget_id)])
    await tx.select("attach_budget", budget_id=budget.budget_id)


async def turned(
    tx: Transaction, before: Mapping[BudgetId, Budget], after: Sequence[Budget]
) -> list[gates.Gate]:
    """The gates of budgets that close or open, to be saved with them."""
    closed = {
        gates.GateName(gates.GateOwner.BUDGET, each.budget_id).gate_id: each.closed
        for each in after
        if each.closed is not before[each.budget_id].closed
    }
    if not closed:
        return []
    if not all(closed.values()):
        tx.hint(GATES_TOPIC)
    locked = await tx.lock(gates.Gate, [(gate_id,) for gate_id in sorted(closed)])
    return [structs.replace(each, closed=closed[each.gate_id]) for each in locked.values()]


# Limits as programs declare them and people set them -------------------------


async def declare(tx: Transaction, limits: Sequence[DeclaredLimit]) -> list[QuotaPolicy]:
    """Apply what a program declares, unless another value was set at run time."""
    if not limits:
        return []
    now_ms = await tx.now_ms()
    wanted = {(each.quota_policy_id,): each.policy(now_ms) for each in limits}
    known = await tx.get(QuotaPolicy, sorted(wanted))
    after = {key: declared_policy(known.get(key), each) for key, each in wanted.items()}
    if after != known:
        for key, each in wanted.items():
            if key not in known:
                await check_name_free(tx, each)
        locked = await have_policies(tx, list(wanted.values()))
        after = {key: declared_policy(locked[key], each) for key, each in wanted.items()}
        await save_policies(tx, locked, list(after.values()))
    return [after[(each.quota_policy_id,)] for each in limits]


async def have_policies(
    tx: Transaction, wanted: Sequence[QuotaPolicy]
) -> Mapping[Key, QuotaPolicy]:
    """Lock the policies with these ids; those that do not exist are stored first."""
    new = {(each.quota_policy_id,): each for each in wanted}
    for _ in range(HAVE_TRIES):
        await tx.insert_new(list(new.values()))
        locked = await tx.lock(QuotaPolicy, sorted(new))
        missing = [each for key, each in new.items() if key not in locked]
        if not missing:
            return locked
        # Another process took the name just now, or has removed the policy.
        for each in missing:
            await check_name_free(tx, each)
    raise RetryExhausted("limits that others remove while they are declared or set")


async def check_name_free(tx: Transaction, policy: QuotaPolicy) -> None:
    """Raise `Conflict` if another policy of the namespace has the name."""
    same_name = await tx.select_as(
        str, "quota_policy_id_by_name", namespace=policy.namespace, called=policy.name
    )
    for quota_policy_id in same_name:
        if quota_policy_id != policy.quota_policy_id:
            raise Conflict(
                f"quota policy {policy.name!r} exists already in namespace {policy.namespace!r},"
                f" with id {quota_policy_id}; give another name"
            )


async def save_policies(
    tx: Transaction,
    before: Mapping[Key, QuotaPolicy],
    after: Sequence[QuotaPolicy],
) -> None:
    """Write what changed. Windows that were full may have room now, or other claims may."""
    await tx.save(Changes(updates=tuple(after)))
    for policy in after:
        if before[(policy.quota_policy_id,)].spec != policy.spec:
            await tx.select("open_gates", owner_id=policy.quota_policy_id)
            tx.hint(GATES_TOPIC)


# The gates of routes, counted ------------------------------------------------


def check_count(total: int) -> None:
    """Refuse more routes with gates than there may be."""
    if total > GATED_ROUTES_MAX:
        raise InvalidInput(
            "gates",
            f"there may be {GATED_ROUTES_MAX} values of keys that limit work in a database; those"
            " that nothing uses are forgotten after a day",
        )


COUNTED_EACH_TIME_MAX: Final = 1_000
"""Up to this many slots, a limit that keeps slots counts them for each claim; above it, the gate
remembers how many are spare."""


class GateRow(Struct, frozen=True, kw_only=True):
    """A row of `count_gate_use`."""

    gate_id: GateId
    owner_kind: gates.GateOwner
    owner_id: GateOwnerId
    gate_key: str
    starts: str
    opens_at_ms: int | None
    closed: bool
    spare: int | None
    window_ms: int
    rate: int
    cap: int
    jitter_ms: int
    keeps: bool
    has_policy: bool
    counted: bool
    """Whether the slots in use were counted: there is a cap, and no slot is known to be spare."""
    has_many_routes: bool
    in_use: int
    now_ms: int

    @property
    def state(self) -> gates.GateState:
        return gates.GateState(
            gate=msgspec.convert(self, gates.Gate, from_attributes=True),
            limits=msgspec.convert(self, Limits, from_attributes=True),
            in_use=self.in_use if self.counted or self.spare is None else self.cap - self.spare,
            is_costly=self.spare is not None
            or self.has_many_routes
            or self.in_use > COUNTED_EACH_TIME_MAX,
        )


async def load(
    reader: Reader,
    gate_ids: Sequence[GateId],
    *,
    always: bool = False,
    counted_max: int | None = None,
) -> list[GateRow]:
    """Gates as they are now. Slots in use are counted where they are limited, or `always`."""
    if not gate_ids:
        return []
    return await reader.select_as(
        GateRow,
        "count_gate_use",
        gate_ids=gate_ids,
        counts_all=always,
        counted_max=counted_max,
    )


class RouteGate(Struct, frozen=True, kw_only=True):
    """A row of `gates_of_routes`."""

    gate_id: GateId
    route_id: int


async def gates_of(reader: Reader, route_id: int) -> list[GateId]:
    """The gates of a route, in order."""
    return list(await reader.select_as(GateId, "gates_of_routes", route_ids=[route_id]))


async def routes_gates(reader: Reader, route_ids: Collection[int]) -> Sequence[RouteGate]:
    """The gates of routes, with each that passes them."""
    if not route_ids:
        return ()
    return await reader.select_as(RouteGate, "gates_of_routes", route_ids=sorted(route_ids))


async def gate_facts(
    reader: Reader, route_ids: Collection[int]
) -> dict[int, list[gates.GateFacts]]:
    """The gates of routes that have any, the one that holds up longest first."""
    passed = await routes_gates(reader, route_ids)
    loaded = await load(reader, sorted({each.gate_id for each in passed}), always=True)
    owners = sorted({(each.owner_id,) for each in loaded})
    policies = await reader.get(QuotaPolicy, owners)
    budgets = await reader.get(Budget, owners)
    facts: dict[GateId, gates.GateFacts] = {}
    until_ms: dict[GateId, float] = {}
    for row in loaded:
        policy, budget = policies.get((row.owner_id,)), budgets.get((row.owner_id,))
        facts[row.gate_id] = gates.GateFacts(
            limit=None if policy is None else policy.name,
            budget="" if budget is None else _described(budget, row.now_ms),
            state=row.state,
        )
        until_ms[row.gate_id] = facts[row.gate_id].holds_until_ms(row.now_ms)
    by_route: dict[int, list[gates.GateFacts]] = {}
    for each in sorted(passed, key=lambda each: -until_ms.get(each.gate_id, 0)):
        if each.gate_id in facts:
            by_route.setdefault(each.route_id, []).append(facts[each.gate_id])
    return by_route


def _described(budget: Budget, now_ms: int) -> str:
    try:
        return describe_closed(budget, now_ms)
    except Corruption as error:
        return str(error)


async def held_up(reader: Reader, executions: Sequence[Execution]) -> list[Execution]:
    """Ready executions as their limits leave them: where one is full, they wait for that."""
    ready = {each.route_id for each in executions if each.ready}
    facts = await gate_facts(reader, ready) if ready else {}
    if not facts:
        return list(executions)
    now_ms = await reader.now_ms()
    return [
        held_up_by_limits(each, facts.get(each.route_id, ()), now_ms) if each.ready else each
        for each in executions
    ]
