"""Claims of work under limits.

Each is one transaction: find routes with work and lock their gates; count, by a statement of its
own, the slots in use at each; let the core share out what fits; claim that much, and count what
started. Routes take turns: each claim continues after the last route it looked at.

Work without limits pays nothing for this: each process remembers whether any is under limits.
"""

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec import Struct, structs

from flowfabric.core import gates
from flowfabric.core.decisions import Changes
from flowfabric.core.handles import Handle, HandleKind
from flowfabric.core.ids import (
    UUID_BYTES,
    AttemptId,
    FlowId,
    GateId,
    LaneId,
    LeaseId,
    Namespace,
    uuids_from,
)
from flowfabric.core.leases import WorkerIdentity
from flowfabric.core.states import AttemptType
from flowfabric.engine.gates import GATES_TOPIC, GateRow, gated_routes, load
from flowfabric.store.base import HintListener, Parameter, Store, Transaction
from flowfabric.store.mapping import answers_of

ASK_AGAIN_S: Final = 1.0
"""How long a process assumes that there is no new limited work before it asks."""
ASK_AGAIN_MAX_S: Final = 60.0
"""The same for a process that found none when it last asked: a hint announces the first."""
STEPS_MAX: Final = 1_000
"""Routes one claim looks at."""
ROUNDS_MAX: Final = 4
"""How often one claim looks again if less was ready than fitted, or others held a gate."""
ROUTES_MIN: Final = 16
"""One round locks the gates of this many routes, if they have work, however small the claim."""
LONG_SEARCH: Final = 100
QUIET_FACTOR: Final = 10
"""After a search through `LONG_SEARCH` routes found nothing, wait this many times as long."""
REMEMBERED_MAX: Final = 100_000


class ClaimQuery(Struct, frozen=True, kw_only=True):
    """The executions that a worker can run."""

    namespace: Namespace | None
    """None: every namespace."""
    lanes: tuple[LaneId, ...]
    kinds: tuple[str, ...] | None
    """None: every kind."""
    capabilities: tuple[str, ...]

    @property
    def parameters(self) -> dict[str, Parameter]:
        """As statements take them."""
        return structs.asdict(self)


class ClaimRequest(WorkerIdentity, frozen=True, kw_only=True):
    """The worker that claims, and for how long."""

    lease_ttl_ms: int
    lease_mark: bytes = b""
    """What the ids of its leases begin with, for a caller that may lose the answer."""
    renews_first: bool = False
    """Whether it renews the leases of what it begins, if workers have died over it."""

    def parameters(self, limit: int) -> dict[str, Parameter]:
        """As a statement takes them, with ids for the leases."""
        return {
            "worker_id": self.worker_id,
            "worker_instance_id": self.worker_instance_id,
            "lease_ttl_ms": self.lease_ttl_ms,
            "renews_first": self.renews_first,
            "limit": limit,
            "uuids": uuids_from(os.urandom(UUID_BYTES * limit), self.lease_mark),
        }


class ClaimRow(Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """A row of `claim_ready`, by its columns in their order.

    A store may leave out the last ones for a first attempt without a deadline and a flow.
    """

    payload: bytes
    partition_key: int
    execution_id: str
    lease_id: LeaseId
    lane_id: LaneId
    lease_expires_at_ms: int
    namespace: Namespace
    execution_kind: str
    priority: int
    created_at_ms: int
    route_id: int
    payload_encoding: str | None
    deadline_at_ms: int | None = None
    attempt_deadline_ms: int | None = None
    flow_id: FlowId | None = None
    kind: HandleKind = HandleKind.FRESH
    lease_epoch: int = 1
    attempt_index: int = 0
    attempt_id: AttemptId | None = None
    """None stands for the id of the lease under which it begins."""
    attempt_type: AttemptType = AttemptType.INITIAL
    retry_count: int = 0
    worker_deaths: int | None = None
    progress: str | None = None


class FoundRow(Struct, frozen=True, kw_only=True):
    """A row of `find_gated_routes`; the last one has no route."""

    route_id: int | None
    priority: int | None
    resumes: bool | None
    gate_ids: str | None
    cap_max: int | None
    looked_at: int | None
    steps: int | None
    opens_at_ms: int | None

    @property
    def route(self) -> gates.WaitingRoute:
        assert self.route_id is not None
        return gates.WaitingRoute(
            route_id=self.route_id,
            gate_ids=_ids(self.gate_ids),
            priority=self.priority or 0,
            resumes=bool(self.resumes),
        )


class Search(Struct, frozen=True, kw_only=True):
    """Routes with limited work for a worker, and their gates."""

    routes: list[gates.WaitingRoute]
    loaded: list[GateRow]
    end: FoundRow
    """How far the search went."""

    @property
    def states(self) -> dict[GateId, gates.GateState]:
        return {each.gate_id: each.state for each in self.loaded}


async def search_routes(tx: Transaction, query: ClaimQuery, after: int, limit: int) -> Search:
    """Find routes with limited work for a worker, after one of them; lock and load their gates."""
    *found, end = await tx.select_as(
        FoundRow,
        "find_gated_routes",
        **query.parameters,
        after=after,
        limit=limit,
        steps_max=STEPS_MAX,
    )
    loaded = await load(tx, _ids(end.gate_ids), counted_max=end.cap_max)
    return Search(routes=[each.route for each in found], loaded=loaded, end=end)


class Round(Struct, frozen=True, kw_only=True):
    """What one transaction has claimed."""

    rows: Sequence[ClaimRow]
    looked_at: int | None
    """The last route of the search; None if there was none after it."""
    steps: int
    opens_in_ms: int | None


class Known(Struct, kw_only=True):
    """What a process remembers of the work that a worker could do."""

    is_limited: bool = False
    """Whether any of it is under limits."""
    asked_at_s: float | None = None
    after: int = 0
    """The route that was looked at last."""
    quiet_until_s: float = 0.0
    freed_at_s: float | None = None
    """When it last looked for work kept back until a worker like this one comes."""


class GatedClaims:
    """Claims of work under limits, for the workers of a process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[ClaimQuery, Known] = {}
        self._hints: HintListener | None = None
        self._leases: dict[LeaseId, None] = {}
        self.again_in_s: float | None = None
        """The time after which the last claim may find more, as far as it knows."""

    async def serves(self, query: ClaimQuery) -> bool:
        """Whether there is limited work that a worker could do."""
        if self._hints is None:
            self._hints = self._store.hints([GATES_TOPIC])
        if self._hints.take():
            self._known.clear()
        if query not in self._known and len(self._known) >= REMEMBERED_MAX:
            self._known.clear()
        known, now_s = self._known.setdefault(query, Known()), time.monotonic()
        awaits_hint = self._store.hints_are_live and not known.is_limited
        again_s = ASK_AGAIN_MAX_S if awaits_hint else ASK_AGAIN_S
        if known.asked_at_s is None or now_s - known.asked_at_s > again_s:
            (known.is_limited,) = await self._store.read(
                lambda reader: reader.select_as(
                    bool, "has_gated", lanes=query.lanes, kinds=query.kinds
                )
            )
            known.asked_at_s = now_s
        return known.is_limited

    def may_be_kept_back(self, query: ClaimQuery) -> bool:
        """Whether it is time to look for work kept back until a worker like this one comes.

        Work that any worker can run is never kept back by claims.
        """
        if not query.capabilities:
            return False
        known, now_s = self._known.setdefault(query, Known()), time.monotonic()
        again_s = ASK_AGAIN_MAX_S if self._store.hints_are_live else ASK_AGAIN_S
        if known.freed_at_s is not None and now_s - known.freed_at_s < again_s:
            return False
        known.freed_at_s = now_s
        return True

    async def claim(self, query: ClaimQuery, request: ClaimRequest, limit: int) -> list[ClaimRow]:
        """Claim at most `limit`."""
        known = self._known.setdefault(query, Known())
        began_s = time.monotonic()
        if began_s < known.quiet_until_s:
            self.again_in_s = known.quiet_until_s - began_s
            return []
        claimed: list[ClaimRow] = []
        for _ in range(ROUNDS_MAX):
            left = limit - len(claimed)
            claim_round = partial(_claim_round, query, request, known.after, left)
            made = await self._store.transact(claim_round)
            claimed += made.rows
            known.after = made.looked_at or 0
            if len(claimed) >= limit or (made.looked_at is None and not made.rows):
                break
        if made.opens_in_ms is not None:
            self.again_in_s = max(1, made.opens_in_ms) / 1_000
        if not claimed and made.steps >= LONG_SEARCH:
            took_s = time.monotonic() - began_s
            known.quiet_until_s = began_s + took_s * QUIET_FACTOR
        if len(self._leases) > REMEMBERED_MAX:
            self._leases.clear()
        self._leases.update(dict.fromkeys(row.lease_id for row in claimed))
        return claimed

    def lanes_released(self, handles: Sequence[Handle]) -> set[LaneId]:
        """Lanes whose work may wait for a slot that one of these leases held until now."""
        if not self._leases:
            return set()
        return {each.lane_id for each in handles if self._leases.pop(each.lease_id, self) is None}


async def _claim_round(
    query: ClaimQuery, request: ClaimRequest, after: int, limit: int, tx: Transaction
) -> Round:
    """Claim limited work in one transaction, from the routes after one of them."""
    routes_max = max(limit, ROUTES_MIN)
    search = await search_routes(tx, query, after, routes_max)
    if not search.routes and after:
        # There is none after the last: begin again with the first.
        search = await search_routes(tx, query, 0, routes_max)
    now_ms = search.loaded[0].now_ms if search.loaded else await tx.now_ms()
    states = search.states
    allowed = gates.allot(search.routes, states, limit, now_ms)
    claimed = await _take(tx, query, request, allowed, limit) if allowed else []
    if claimed:
        gate_ids = {each.route_id: each.gate_ids for each in search.routes}
        starting = [row.route_id for row in claimed if row.kind is not HandleKind.RESUMED]
        started = Counter(gate_id for route_id in starting for gate_id in gate_ids[route_id])
        # They count at the time they started.
        at_ms = claimed[0].lease_expires_at_ms - request.lease_ttl_ms
        await count_starts(tx, states, started, at_ms)
    opens_at_ms = gates.next_opening_ms(states.values(), now_ms) or search.end.opens_at_ms
    return Round(
        rows=claimed,
        looked_at=search.end.looked_at,
        steps=search.end.steps or 0,
        opens_in_ms=None if opens_at_ms is None else max(0, opens_at_ms - now_ms),
    )


async def _take(
    tx: Transaction,
    query: ClaimQuery,
    request: ClaimRequest,
    allowed: Sequence[gates.Allowance],
    limit: int,
) -> list[ClaimRow]:
    gated_routes.update(each.route_id for each in allowed)
    rows = await tx.select(
        "claim_ready",
        **query.parameters | {"kinds": ()},
        **request.parameters(limit),
        allowed=msgspec.json.encode(allowed).decode(),
    )
    return answers_of(ClaimRow, rows)


async def count_starts(
    tx: Transaction,
    states: Mapping[GateId, gates.GateState],
    started: Mapping[GateId, int],
    now_ms: int,
) -> None:
    """Have locked gates remember these starts, and how many slots they have to spare."""
    after = [
        (state, state.after(started.get(gate_id, 0), now_ms))
        for gate_id, state in sorted(states.items())
        if state.limits.remembers
    ]
    changed = tuple(gate for state, gate in after if gate != state.gate)
    if changed:
        await tx.save(Changes(updates=changed))


def _ids(text: str | None) -> tuple[GateId, ...]:
    return () if text is None else tuple(msgspec.json.decode(text, type=list[GateId]))
