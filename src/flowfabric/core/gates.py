"""Gates: they hold work to the limits of `core.limits`, and to budgets.

Each value of the key of a policy has a *gate* of its own; a policy without a key has one, whose key
is empty. A budget has a gate too, which says only whether it is closed. Routes name their gates: a
claim from a route locks its gates, asks here how much fits, and takes that much.

Slots in use are derived, not counted: an execution takes one while it is leased, granted or
admitted by hand and has not ended; where the policy says so, also while its attempt is interrupted
and continues later. So nothing can leak, however an execution ends. A limit that keeps slots may
hold more than a claim can count: it remembers how many were spare, and counts again once those are
used up.

Only starts are counted, because nothing else remembers them: a window is at most `WINDOW_PARTS` +
1 pairs of a time and how many started by then, later than the time of the pair before it. Starts in
the same part of the window share one pair at its latest time, so a window never admits too
many and opens late by at most one part of it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Struct, structs

from flowfabric.core.bounds import GATES_PER_ROUTE_MAX
from flowfabric.core.checks import check_list, check_name
from flowfabric.core.ids import (
    ExecutionId,
    GateId,
    GateOwnerId,
    derived_uuid,
    parse_uuid,
)
from flowfabric.core.limits import DeclaredLimit, Limits, check_declared
from flowfabric.core.policies import span
from flowfabric.core.records import Record
from flowfabric.errors import (
    BudgetExceeded,
    ConcurrencyLimitExceeded,
    Corruption,
    InvalidInput,
    RateLimitExceeded,
)

WINDOW_PARTS: Final = 64
Window = tuple[tuple[int, int], ...]
"""When, and how many, oldest first."""


class GateOwner(StrEnum):
    """What a gate belongs to."""

    QUOTA = "quota"
    BUDGET = "budget"


class Gate(Record, frozen=True, kw_only=True):
    """A policy and a value of its key, or a budget."""

    table: ClassVar[str] = "gate"
    key: ClassVar[tuple[str, ...]] = ("gate_id",)

    gate_id: GateId
    owner_kind: GateOwner
    owner_id: GateOwnerId
    gate_key: str
    starts: str = "[]"
    """The window, as JSON."""
    opens_at_ms: int | None = None
    """Until then the window is full, under the limit that applied when it was last counted."""
    spare: int | None = None
    """At least this many slots are free: as many as at the last count, less the starts since. Only
    limits that keep slots know it, since only a start takes one of theirs.
    """
    closed: bool = False
    """A budget that is used up: nothing passes."""


class Admission(Record, frozen=True, kw_only=True):
    """A slot taken by hand for an execution. It counts until that life of the execution ends."""

    table: ClassVar[str] = "admission"
    key: ClassVar[tuple[str, ...]] = ("gate_id", "partition_key", "execution_id")

    gate_id: GateId
    partition_key: int
    execution_id: ExecutionId
    replay_count: int
    admitted_at_ms: int


class GateName(Struct, frozen=True, order=True):
    """What requests and routes know a gate by."""

    owner_kind: GateOwner
    owner_id: str
    key: str = ""

    @property
    def gate_id(self) -> GateId:
        return GateId(derived_uuid("gate", self.owner_id, self.key))

    def new(self) -> Gate:
        return Gate(
            gate_id=self.gate_id,
            owner_kind=self.owner_kind,
            owner_id=GateOwnerId(self.owner_id),
            gate_key=self.key,
        )


NO_GATES: Final = "[]"


def gate_ids_of(gates: Iterable[GateName]) -> str:
    """The ids of gates as routes keep them: a JSON array in order."""
    return msgspec.json.encode(sorted(each.gate_id for each in gates)).decode()


def check_gates(value: object) -> tuple[GateName, ...]:
    """The gates of a request, each once and in order."""
    names = set[GateName]()
    listed = sorted(value) if isinstance(value, set) else value
    for each in check_list("gates", listed, 0, GATES_PER_ROUTE_MAX):
        if not isinstance(each, GateName) or each.owner_kind not in list(GateOwner):
            raise InvalidInput("gates", "must be a list of GateName", each)
        parse_uuid("gates.owner_id", each.owner_id)
        check_gate_key(each.key)
        names.add(each)
    return tuple(sorted(names))


def check_gate_key(key: object) -> str:
    """A value of a limit's key; the empty text is that of a limit without one."""
    return "" if key == "" else check_name("key", key)


# What routes and requests name ----------------------------------------------


class LimitUse(Struct, frozen=True, kw_only=True):
    """A declared limit, and the value of its key that an execution has."""

    limit: DeclaredLimit
    key: str = ""

    @property
    def gate(self) -> GateName:
        return GateName(GateOwner.QUOTA, self.limit.quota_policy_id, self.key)


def check_uses(value: object) -> tuple[LimitUse, ...]:
    """The limits a request names, each with a value of its key."""
    uses: list[LimitUse] = []
    for each in check_list("limits", value, 0, GATES_PER_ROUTE_MAX):
        if not isinstance(each, LimitUse):
            raise InvalidInput("limits", "must be a list of LimitUse", each)
        check_declared(each.limit)
        check_gate_key(each.key)
        uses.append(each)
    return tuple(uses)


# The window -----------------------------------------------------------------


_WINDOW: Final = msgspec.json.Decoder(tuple[tuple[int, Annotated[int, msgspec.Meta(ge=0)]], ...])


def read_window(text: str) -> Window:
    try:
        return _WINDOW.decode(text)
    except msgspec.DecodeError as error:
        raise Corruption(f"the stored starts of a gate do not decode: {error}") from error


def written(window: Window) -> str:
    return msgspec.json.encode(window).decode()


def trimmed(window: Window, window_ms: int, now_ms: int) -> Window:
    """The window without starts that are too old to count, or too far in the future.

    A clock that was set back leaves starts ahead of it. They count like others as long as they lie
    within a window; what lies beyond would keep everything waiting until the clock is there again.
    """
    first_ms, last_ms = now_ms - window_ms, now_ms + window_ms
    return tuple(each for each in window if first_ms < each[0] <= last_ms)


def counted(window: Window) -> int:
    return sum(count for _, count in window)


def pushed(window: Window, count: int, window_ms: int, now_ms: int) -> Window:
    """The window with `count` more starts now, or at its latest time if the clock was set back."""
    assert window_ms > 0, "starts are counted where a window limits them"
    kept = trimmed(window, window_ms, now_ms)
    if count <= 0:
        return kept
    at_ms = max(now_ms, kept[-1][0]) if kept else now_ms
    if kept and kept[-1][0] // _part_ms(window_ms) == at_ms // _part_ms(window_ms):
        return (*kept[:-1], (at_ms, kept[-1][1] + count))
    return (*kept, (at_ms, count))


def withdrawn(window: Window, at_ms: int, window_ms: int) -> Window:
    """The window without one start that was counted at `at_ms` and never began.

    Nothing changes if it has left the window: other parts hold other starts.
    """
    part_ms = _part_ms(window_ms)
    for place, (until_ms, count) in enumerate(window):
        if until_ms >= at_ms and until_ms // part_ms == at_ms // part_ms:
            left = ((until_ms, count - 1),) if count > 1 else ()
            return (*window[:place], *left, *window[place + 1 :])
    return window


def starts_left(limits: Limits, window: Window, now_ms: int) -> int | None:
    """How many more may start now; None if nothing limits them."""
    if not limits.rate:
        return None
    return max(0, limits.rate - counted(trimmed(window, limits.window_ms, now_ms)))


def opens_at_ms(limits: Limits, window: Window, now_ms: int) -> int | None:
    """When a full window lets the next one start; None if it is not full."""
    if starts_left(limits, window, now_ms) != 0:
        return None
    kept = trimmed(window, limits.window_ms, now_ms)
    excess = counted(kept) - limits.rate
    for at_ms, count in kept:
        excess -= count
        if excess < 0:
            return at_ms + limits.window_ms
    return now_ms


def _part_ms(window_ms: int) -> int:
    return -(-window_ms // WINDOW_PARTS)


# What fits ------------------------------------------------------------------


class GateState(Struct, frozen=True, kw_only=True):
    """A gate under lock: its limits, recent starts, and what is held now."""

    gate: Gate
    limits: Limits = Limits()
    in_use: int = 0
    """An upper bound, if the gate has slots to spare and they were not counted."""
    is_costly: bool = False
    """Whether counting the slots in use takes long."""

    @property
    def window(self) -> Window:
        """What started, where that is limited."""
        return read_window(self.gate.starts) if self.limits.rate else ()

    def opens_at_ms(self, now_ms: int) -> int | None:
        return opens_at_ms(self.limits, self.window, now_ms)

    def room(self, now_ms: int) -> "Room":
        if self.gate.closed:
            return Room(slots=0, starts=0)
        cap = self.limits.cap
        return Room(
            slots=max(0, cap - self.in_use) if cap else None,
            starts=starts_left(self.limits, self.window, now_ms),
            keeps=self.limits.keeps,
        )

    def after(self, count: int, now_ms: int) -> Gate:
        """The gate once `count` more have started."""
        left = self.limits.cap - self.in_use - count
        remembers = left > 0 and self.limits.keeps and self.is_costly
        gate = structs.replace(self.gate, spare=left if remembers else None)
        if not self.limits.rate or not count:
            return gate
        window = pushed(self.window, count, self.limits.window_ms, now_ms)
        return self._with(gate, window, now_ms)

    def without(self, times_ms: Iterable[int], now_ms: int) -> Gate:
        """The gate without starts that were counted at these times and never began."""
        window = self.window
        for at_ms in times_ms:
            window = withdrawn(window, at_ms, self.limits.window_ms)
        return self._with(self.gate, window, now_ms)

    def _with(self, gate: Gate, window: Window, now_ms: int) -> Gate:
        full_until_ms = opens_at_ms(self.limits, window, now_ms)
        return structs.replace(gate, starts=written(window), opens_at_ms=full_until_ms)


class Room(Struct, kw_only=True):
    """How many fit; None means unlimited. Starting takes a slot and a start, resuming a slot."""

    slots: int | None = None
    starts: int | None = None
    keeps: bool = False
    """Whether an execution that resumes has its slot already."""

    def has_slot(self, *, resumes: bool) -> bool:
        return self.slots != 0 or (resumes and self.keeps)

    def take(self, *, starts: bool) -> None:
        """Take room for one more. If it turns out to resume, more room is left."""
        if self.slots and (starts or not self.keeps):
            self.slots -= 1
        if self.starts and starts:
            self.starts -= 1


class WaitingRoute(Struct, frozen=True, kw_only=True):
    """A route that has work to do."""

    route_id: int
    gate_ids: tuple[GateId, ...]
    priority: int
    """The highest of the executions that wait."""
    resumes: bool = False
    """Whether any of them continues an attempt, which needs no start."""


class Allowance(Struct, frozen=True, kw_only=True):
    """How many of a route may be claimed, and how many of these may be starts."""

    route_id: int
    slots: int
    starts: int

    def fitting(self, queue: Sequence[bool]) -> list[int]:
        """The places of a queue that may be claimed: the best that fit.

        Executions that resume an attempt pass those that would have to start one and may not.
        """
        taken: list[int] = []
        starts = self.starts
        for place, resumes in enumerate(queue):
            if len(taken) < self.slots and (resumes or starts > 0):
                starts -= not resumes
                taken.append(place)
        return taken


def allot(
    routes: Sequence[WaitingRoute],
    gates: Mapping[GateId, GateState],
    limit: int,
    now_ms: int,
) -> list[Allowance]:
    """Share out what fits, one each in turn: no route gets two before each got what it can.

    Routes with the highest priority come first, then those whose turn it is. A route with a gate
    that is missing from `gates` gets nothing.
    """
    left = {gate_id: state.room(now_ms) for gate_id, state in gates.items()}
    slots, starts = Counter[int](), Counter[int]()
    turn = sorted(
        (each for each in routes if all(gate_id in left for gate_id in each.gate_ids)),
        key=lambda each: -each.priority,
    )
    while turn and limit > 0:
        served: list[WaitingRoute] = []
        for route in turn:
            if len(served) == limit:
                break
            rooms = [left[gate_id] for gate_id in route.gate_ids]
            may_start = all(each.slots != 0 and each.starts != 0 for each in rooms)
            may_resume = route.resumes and all(each.has_slot(resumes=True) for each in rooms)
            if may_start or may_resume:
                for each in rooms:
                    each.take(starts=may_start)
                slots[route.route_id] += 1
                starts[route.route_id] += may_start
                served.append(route)
        limit -= len(served)
        turn = served
    return [
        Allowance(route_id=route_id, slots=count, starts=starts[route_id])
        for route_id, count in slots.items()
    ]


def next_opening_ms(states: Iterable[GateState], now_ms: int) -> int | None:
    """When the first of the full windows opens."""
    times = (state.opens_at_ms(now_ms) for state in states)
    return min((each for each in times if each is not None), default=None)


def check_room(state: GateState, called: str, now_ms: int, *, resumes: bool) -> None:
    """Raise unless one more execution fits."""
    if state.gate.closed:
        raise BudgetExceeded(f"a budget of {called} is used up")
    limits, room = state.limits, state.room(now_ms)
    if not room.has_slot(resumes=resumes):
        raise ConcurrencyLimitExceeded(f"{called}: {state.in_use} of {limits.cap} are in use")
    if room.starts == 0 and not resumes:
        raise RateLimitExceeded(
            f"{called}: {limits.rate} have started in the last {limits.window_ms} ms"
        )


# What people see --------------------------------------------------------


class GateFacts(Struct, frozen=True, kw_only=True):
    """A gate that an execution has to pass, as `why` shows it."""

    limit: str | None
    """The name of the policy; None for a budget."""
    budget: str = ""
    """The state of a budget, in words."""
    state: GateState

    def holds_until_ms(self, now_ms: int) -> float:
        """Until when it keeps others from starting, as far as that is known; 0 if it does not."""
        if self.state.gate.closed:
            return math.inf
        try:
            opens_at = self.state.opens_at_ms(now_ms)
        except Corruption:
            return math.inf
        if opens_at is not None:
            return opens_at
        return 0 if self.state.room(now_ms).slots != 0 else now_ms

    def obstacle(self, now_ms: int, *, resumes: bool = False) -> str | None:
        """Why an execution cannot pass now; None if it can."""
        gate, limits, room = self.state.gate, self.state.limits, self.state.room(now_ms)
        whose = f" for {gate.gate_key}" if gate.gate_key else ""
        if gate.closed:
            return self.budget
        if not room.has_slot(resumes=resumes):
            doing = "running or suspended" if limits.keeps else "running"
            return f"{self.state.in_use} of {limits.cap} {doing}{whose}"
        opens_at = self.state.opens_at_ms(now_ms)
        if opens_at is None or resumes:
            return None
        started = counted(trimmed(self.state.window, limits.window_ms, now_ms))
        return (
            f"{started} of {limits.rate} started in the last {span(limits.window_ms)}{whose}, room"
            f" in {span(opens_at - now_ms)}"
        )


# Slots taken by hand --------------------------------------------------------


class Admitted(Struct, frozen=True, tag=True):
    """The execution holds a slot until it ends or is released."""


class AlreadyAdmitted(Struct, frozen=True, tag=True):
    """It held one before; nothing was counted."""


class RateExceeded(Struct, frozen=True, kw_only=True, tag=True):
    retry_after_ms: int


class ConcurrencyExceeded(Struct, frozen=True, tag=True):
    """All slots are taken. Nothing was counted."""


AdmissionOutcome = Admitted | AlreadyAdmitted | RateExceeded | ConcurrencyExceeded


def decide_admission(
    state: GateState, jitter_ms: int, chance: float, now_ms: int
) -> AdmissionOutcome:
    """Whether one more fits. `chance` is uniform in [0, 1)."""
    room = state.room(now_ms)
    if room.starts == 0:
        wait_ms = max(0, (state.opens_at_ms(now_ms) or now_ms) - now_ms)
        return RateExceeded(retry_after_ms=wait_ms + int(chance * (jitter_ms + 1)))
    if room.slots == 0:
        return ConcurrencyExceeded()
    return Admitted()
