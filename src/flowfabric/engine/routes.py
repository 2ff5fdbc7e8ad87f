"""Routes: who may run what, and which limits it passes.

Each distinct (namespace, lane, kind, required capabilities, gates) is one small row;
executions point at it. Claims pick routes first and rows second.

A route that no execution uses and no process has looked up in a day is deleted. Processes
remember the ids of those they use and ask for them again every hour. An id may still be out of
date, so a transaction that creates executions first checks that its routes exist, and holds them
until it ends.
"""

import time
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from flowfabric.core.bounds import GATED_ROUTES_MAX, ROUTE_CACHE_MS, ROUTE_KEEP_MS, ROUTES_MAX
from flowfabric.core.creation import Checked, Terms
from flowfabric.core.ids import parse_lane_id
from flowfabric.core.records import Lane
from flowfabric.core.states import LaneState
from flowfabric.engine import gates
from flowfabric.errors import InvalidInput
from flowfabric.store.base import Reader, Store, Transaction


class Route(NamedTuple):
    """Who may run what, and what limits it."""

    namespace: str
    lane_id: str
    execution_kind: str
    capabilities: tuple[str, ...]
    gate_ids: str
    """As JSON."""


class StoredRoute(Struct, frozen=True, kw_only=True):
    route_id: int
    namespace: str
    lane_id: str
    execution_kind: str
    capabilities: str
    gate_ids: str

    @property
    def route(self) -> Route:
        required = tuple(msgspec.json.decode(self.capabilities, type=list[str]))
        return Route(self.namespace, self.lane_id, self.execution_kind, required, self.gate_ids)


class InternedRoute(StoredRoute, frozen=True, kw_only=True):
    total: int
    """Routes in the database."""
    gated_total: int


class HeldRoute(StoredRoute, frozen=True, kw_only=True):
    state: LaneState
    """Of its lane."""


def route_of(terms: Terms) -> Route:
    return Route(
        terms.namespace,
        terms.lane_id,
        terms.execution_kind,
        terms.required_capabilities,
        terms.gate_ids,
    )


def routes_of(checked: Sequence[Checked]) -> set[Route]:
    shared = {id(each.terms): each.terms for each in checked}
    return {route_of(terms) for terms in shared.values()}


class Registration:
    """The lanes and routes of requests that are not among the known ones."""

    def __init__(self, checked: Sequence[Checked], known_routes: Container[Route]) -> None:
        self.unknown = sorted(each for each in routes_of(checked) if each not in known_routes)
        self._gates = {gate for each in checked for gate in each.terms.gates}
        self._limits = {limit for each in checked for limit in each.terms.limits}

    async def run(self, tx: Transaction) -> dict[Route, int]:
        """Register them and return their ids."""
        await register_lanes(
            tx, sorted({route.lane_id for route in self.unknown}), "create_execution"
        )
        await gates.register(tx, self._gates, self._limits)
        rows = await tx.select_as(
            InternedRoute,
            "intern_routes",
            namespaces=[route.namespace for route in self.unknown],
            lane_ids=[route.lane_id for route in self.unknown],
            execution_kinds=[route.execution_kind for route in self.unknown],
            capabilities=[
                msgspec.json.encode(route.capabilities).decode() for route in self.unknown
            ],
            gate_ids=[route.gate_ids for route in self.unknown],
            now_ms=await tx.now_ms(),
            retain_until_ms=await tx.now_ms() + ROUTE_KEEP_MS,
            count_max=ROUTES_MAX,
            gated_max=GATED_ROUTES_MAX,
        )
        gates.check_count(max(row.gated_total for row in rows))
        if max(row.total for row in rows) > ROUTES_MAX:
            raise InvalidInput(
                "execution_kind",
                f"there may be {ROUTES_MAX} kinds in a database, counted by namespace, lane and"
                " required capabilities; those that nothing uses are forgotten after a day",
                self.unknown[0].execution_kind,
            )
        found = {row.route: row.route_id for row in rows}
        await gates.attach_to_routes(tx, {number: route[:3] for route, number in found.items()})
        return found


async def hold_routes(tx: Transaction, known: Mapping[Route, int]) -> dict[Route, LaneState]:
    """The known routes that still exist under their ids, with the state of their lanes.

    They stay until the transaction ends.
    """
    if not known:
        return {}
    rows = await tx.select_as(HeldRoute, "hold_routes", route_ids=sorted(known.values()))
    # An id may have been given to another route since.
    return {row.route: row.state for row in rows if known.get(row.route) == row.route_id}


class KnowsRoutes:
    """Remembers the routes this process has used recently."""

    store: Store

    def __init__(self) -> None:
        self.routes: dict[Route, int] = {}
        """Their ids: read them after `forget_routes`."""
        self._routes_since_s = time.monotonic()

    async def know_routes(self, checked: Sequence[Checked], *, apart: bool = False) -> None:
        """Register lanes and routes that this process does not know, in a transaction of their own.

        With `apart`, on the calling thread and without waiting.
        """
        self.forget_routes()
        if not routes_of(checked) <= self.routes.keys():
            run = Registration(checked, self.routes).run
            found = self.store.transact_apart(run) if apart else await self.store.transact(run)
            self.routes.update(found)

    def forget_routes(self) -> None:
        """Forget ids after a while, so that they are looked up again: unused routes are deleted."""
        if time.monotonic() - self._routes_since_s > ROUTE_CACHE_MS / 1_000:
            # A transaction that is creating right now keeps the one it holds.
            self.routes, self._routes_since_s = {}, time.monotonic()


async def register_lanes(tx: Transaction, lane_ids: Sequence[str], registered_by: str) -> None:
    """Add lanes the registry does not know yet; others stay as they are."""
    now_ms = await tx.now_ms()
    await tx.insert_new(
        [
            Lane(
                lane_id=parse_lane_id(lane_id),
                state=LaneState.ACTIVE,
                registered_at_ms=now_ms,
                registered_by=registered_by,
            )
            for lane_id in sorted(lane_ids)
        ]
    )


async def required_capabilities(reader: Reader, route_id: int) -> tuple[str, ...]:
    (required,) = await reader.select_as(str, "capabilities_of_route", route_id=route_id)
    return tuple(msgspec.json.decode(required, type=list[str]))
