"""What must not be, and whether anything will ever move an execution.

An execution that has not ended is ready, leased, or waits for exactly one thing that is sure
to come or can be sent: a time, a waitpoint, a join, a child, a queued cancellation, or a gate
that an operator opens. One that has none of these would wait for ever, and so would
those that wait for each other in a ring. A ready one's join holds, and claims find it
by its route. A row goes with what it belongs to.

Operations keep it so; the audit looks whether they did, on any database.
"""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from flowfabric.core.checks import and_more
from flowfabric.core.flow_records import GroupState
from flowfabric.core.ids import ExecutionId
from flowfabric.core.situations import GATES
from flowfabric.core.states import EligibilityState, LifecyclePhase, OwnershipState

RING_NAMED_MAX = 3
"""How many of those that wait for each other a complaint names."""


class Circumstances(Struct, frozen=True, kw_only=True):
    """The part of an execution that says what will move it. Columns of `audit_executions.sql`."""

    lifecycle_phase: LifecyclePhase
    ownership_state: OwnershipState
    eligibility_state: EligibilityState
    ready: bool
    cancel_requested: bool
    in_flow: bool
    flow_exists: bool
    route_exists: bool = True
    """Claims find it: they go by routes."""
    delay_until_ms: int | None = None
    granted_until_ms: int | None = None
    lease_expires_at_ms: int | None = None
    retain_until_ms: int | None = None
    suspended: bool = False
    """It has an open suspension."""
    suspension_due_ms: int | None = None
    open_waitpoints: int = 0
    granted: bool = False
    """There is a grant, which time will end."""
    group_state: GroupState | None = None
    group_staged: int = 0
    join_pending: bool = False
    """What the execution itself knows about its join."""
    join_moves: bool = False
    """Something will resolve one of the edges into it, or it waits for more of them."""
    awaits_child: bool = False
    """It waits for an execution that has not ended, or whose end is being dispatched."""
    cancel_queued: bool = False


class Mover(StrEnum):
    """What will move an execution on."""

    READY = "ready"
    LEASE = "lease"
    DUE_TIME = "due_time"
    WAITPOINT = "waitpoint"
    JOIN = "join"
    CHILD = "child"
    CANCELLATION = "cancellation"
    GATE = "gate"


class Wrong(StrEnum):
    """What an audit can find."""

    UNOWNED = "unowned"
    JOIN_OPEN = "join_open"
    JOIN_MISREAD = "join_misread"
    MISCOUNTED = "miscounted"
    FLOW_GONE = "flow_gone"
    ROUTE_GONE = "route_gone"
    KEPT_FOR_EVER = "kept_for_ever"
    STRAY = "stray"
    RING = "ring"


ADVICE = {
    Wrong.UNOWNED: "nothing will move it: cancel it, and replay it if it is still wanted",
    Wrong.JOIN_OPEN: "a worker may run it before what it waits for: pause its lane, and cancel it",
    Wrong.JOIN_MISREAD: "it does not know how its join stands: cancel it, and replay it if wanted",
    Wrong.MISCOUNTED: "counts of its flow or join are wrong: see project_flow_summary",
    Wrong.FLOW_GONE: "its flow is gone: cancel it if it has not ended",
    Wrong.ROUTE_GONE: "no worker finds it, nor after a replay: cancel it and submit it again",
    Wrong.KEPT_FOR_EVER: "it has ended and will never be deleted: replay and cancel it",
    Wrong.STRAY: "it belongs to an execution that is gone, and can be deleted",
    Wrong.RING: "nothing will move it: cancel one of those that wait for each other",
}


class Complaint(Struct, frozen=True, kw_only=True):
    """One inconsistency."""

    wrong: Wrong
    execution_id: ExecutionId
    detail: str

    @property
    def advice(self) -> str:
        return ADVICE[self.wrong]


class AuditPage(Struct, frozen=True, kw_only=True):
    complaints: tuple[Complaint, ...]
    cursor: str | None
    """Where the next page begins; none after the last."""


def mover(about: Circumstances) -> Mover | None:
    """What will move an execution that has not ended; None if nothing will."""
    if about.cancel_requested:
        return Mover.CANCELLATION if about.cancel_queued else None
    if about.ready:
        return Mover.READY
    if about.granted_until_ms is not None:
        return Mover.DUE_TIME if about.granted else None
    match about.lifecycle_phase:
        case LifecyclePhase.ACTIVE if about.ownership_state is OwnershipState.LEASED:
            return None if about.lease_expires_at_ms is None else Mover.LEASE
        case LifecyclePhase.ACTIVE:
            return Mover.JOIN if join_is_open(about) and about.join_moves else None
        case LifecyclePhase.SUSPENDED:
            awaited = about.suspension_due_ms is not None or about.open_waitpoints > 0
            return Mover.WAITPOINT if about.suspended and awaited else None
        case LifecyclePhase.RUNNABLE:
            return _blocked_mover(about)
        case _:
            return None


def _blocked_mover(about: Circumstances) -> Mover | None:
    state = about.eligibility_state
    if state is EligibilityState.NOT_ELIGIBLE_UNTIL_TIME:
        return None if about.delay_until_ms is None else Mover.DUE_TIME
    if state is EligibilityState.BLOCKED_BY_DEPENDENCIES:
        if about.awaits_child:
            return Mover.CHILD
        return Mover.JOIN if join_is_open(about) and about.join_moves else None
    return Mover.GATE if state in GATES.values() else None


Waits = Mapping[ExecutionId, Collection[ExecutionId]]
"""What executions wait for that only the end of these will move."""


def rings(waits: Waits) -> dict[ExecutionId, tuple[ExecutionId, ...]]:
    """Executions that wait for themselves through others, and the shortest such ring.

    An execution is woken by the first end among those it waits for. So it is stuck only if all of
    them are; one that is not in `waits` is not stuck.
    """
    stuck = dict(waits)
    while free := [each for each in stuck if not all(other in stuck for other in stuck[each])]:
        for each in free:
            del stuck[each]
    ways = {each: _way_back(each, stuck) for each in sorted(stuck)}
    return {each: way for each, way in ways.items() if way}


def _way_back(start: ExecutionId, waits: Waits) -> tuple[ExecutionId, ...]:
    """From what `start` waits for up to itself; empty if there is no way."""
    came_from: dict[ExecutionId, ExecutionId] = {}
    frontier = [start]
    while frontier and start not in came_from:
        following: list[ExecutionId] = []
        for each in frontier:
            for other in sorted(waits[each]):
                if other not in came_from:
                    came_from[other] = each
                    following.append(other)
        frontier = following
    if start not in came_from:
        return ()
    way = [start]
    while (before := came_from[way[-1]]) != start:
        way.append(before)
    return tuple(reversed(way))


def ring_complaint(execution_id: ExecutionId, way: Sequence[ExecutionId]) -> Complaint:
    others = way[:-1]
    by = f" by way of {and_more(others[:RING_NAMED_MAX], len(others))}" if others else ""
    return Complaint(wrong=Wrong.RING, execution_id=execution_id, detail=f"it waits for itself{by}")


def join_is_open(about: Circumstances) -> bool:
    """Whether a join with edges still waits for one of its upstreams."""
    return about.group_staged > 0 and about.group_state is GroupState.PENDING


def wrongs(about: Circumstances) -> list[Wrong]:
    """Everything that must not be about one execution."""
    found: list[Wrong] = [] if about.route_exists else [Wrong.ROUTE_GONE]
    if about.lifecycle_phase is LifecyclePhase.TERMINAL:
        kept = about.retain_until_ms is None and not (about.in_flow and about.flow_exists)
        return [*found, Wrong.KEPT_FOR_EVER] if kept else found
    if about.in_flow and not about.flow_exists:
        found.append(Wrong.FLOW_GONE)
    if mover(about) is None:
        found.append(Wrong.UNOWNED)
    if about.ready and join_is_open(about):
        found.append(Wrong.JOIN_OPEN)
    # A member about to be cancelled no longer learns how its join went.
    if about.join_pending != join_is_open(about) and not about.cancel_requested:
        found.append(Wrong.JOIN_MISREAD)
    return found
