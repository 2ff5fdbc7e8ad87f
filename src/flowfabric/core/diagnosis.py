"""Why an execution is not running, and whether anything will ever move it.

An execution that has not ended is ready, leased, or waits for exactly one thing that is sure
to come or can be sent: a time, a waitpoint, a join, a child, a queued cancellation, or a gate
that an operator opens. One that has none of these would wait for ever, and so would
those that wait for each other in a ring. A ready one's join holds, and claims find it
by its route. A row goes with what it belongs to.

Operations keep it so; the audit looks whether they did, on any database.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from shlex import quote
from typing import Final

from msgspec import Struct, structs

from flowfabric.core.checks import split_kind
from flowfabric.core.conditions import Progress
from flowfabric.core.flow_joins import needed_count, resolved_count
from flowfabric.core.flow_records import EdgeGroup, GroupState
from flowfabric.core.gates import GateFacts
from flowfabric.core.ids import ExecutionId
from flowfabric.core.leases import lease_is_dead
from flowfabric.core.policies import in_words, span
from flowfabric.core.records import Execution, FailedStep, Lane
from flowfabric.core.situations import Hold, held_by, resumes
from flowfabric.core.states import (
    BlockingReason,
    EligibilityState,
    LaneState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
)
from flowfabric.errors import Corruption

# What an execution with an open join waits for, in words and as data, at the time of reading


class Upstream(Struct, frozen=True, kw_only=True):
    """An upstream whose ending has not been counted."""

    execution_id: ExecutionId
    name: str
    """What people call it: the name of its node, or of its task."""
    public_state: PublicState
    blocked: bool = False
    """Changed code has stopped it."""
    over: bool = False
    """It ended before its downstream was replayed: only a replay of its own can count."""


class JoinFacts(Struct, frozen=True, kw_only=True):
    group: EdgeGroup
    upstreams: tuple[Upstream, ...]
    """The first few of the unresolved ones."""

    @property
    def unresolved(self) -> int:
        return self.group.staged - resolved_count(self.group)

    def sentence(self) -> str:
        group, needed = self.group, needed_count(self.group)
        if group.staged < needed:
            return (
                f"It waits for {needed} dependencies to succeed and has only {group.staged}: add"
                f" {needed - group.staged} more, or cancel it."
            )
        some = f"{needed} of its {group.staged} dependencies"
        every = "its only dependency" if needed == 1 else f"all of its {needed} dependencies"
        what = every if needed == group.staged else some
        left = f"; {self.unresolved} not resolved: {self._named()}" if self.upstreams else ""
        return f"It waits for {what} to succeed, {group.succeeded} so far{left}."

    def detail(self) -> dict[str, str | int | None]:
        return {
            "dependencies": self.group.staged,
            "needed": needed_count(self.group),
            "succeeded": self.group.succeeded,
            "unresolved": self.unresolved,
            "upstreams": ",".join(each.execution_id for each in self.upstreams),
        }

    def remark(self) -> str:
        """For lists: who has not ended yet."""
        more = self.unresolved - len(self.upstreams)
        named = ", ".join(each.name for each in self.upstreams)
        rest = f" and {more} more" if more > 0 else ""
        return f"{self.group.succeeded} of {needed_count(self.group)}: still {named}{rest}"

    def _named(self) -> str:
        named = ", ".join(
            f"{each.name} {each.execution_id}"
            f" ({'blocked by changed code' if each.blocked else each.public_state}"
            f"{': replay it too' if each.over else ''})"
            for each in self.upstreams
        )
        more = self.unresolved - len(self.upstreams)
        return named + (f" and {more} more" if more > 0 else "")


# Why an execution is not running: one sentence, and the same as data --------


class Cause(StrEnum):
    RUNNING = "running"
    ENDED = "ended"
    SUSPENDED = "suspended"
    DELAYED = "delayed"
    BLOCKED = "blocked"
    CANCELLING = "cancelling"
    CODE_CHANGED = "code_changed"
    LANE_CLOSED = "lane_closed"
    NO_WORKER = "no_worker"
    LEASE_LOST = "lease_lost"
    GRANTED = "granted"
    LIMITED = "limited"
    QUEUED = "queued"


class Explanation(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    own_id: str | None = None
    public_state: PublicState
    cause: Cause
    sentence: str
    remark: str = ""
    """The same in a few words, for lists."""
    detail: dict[str, str | int | None] = {}
    needs_somebody: bool = False
    """It waits until somebody acts: starts a worker, opens its lane, deploys other code."""

    def __str__(self) -> str:
        return self.sentence


class Surroundings(Struct, frozen=True, kw_only=True):
    """What else decides whether an execution runs."""

    lane: Lane | None
    required: tuple[str, ...]
    ahead: int | None
    """Ready executions of the same route that go first; None when there are more than counted."""
    served: bool
    """Whether a worker claimed from this route recently."""
    attended: bool = True
    """Whether any worker runs at all: every worker runs the reconcilers."""
    now_ms: int
    other_versions: tuple[int, ...] = ()
    """The versions of the same task that workers claimed recently."""
    waits_for: tuple[str, ...] = ()
    """The names of its open waitpoints, which signals are sent to."""
    progress: Progress | None = None
    """How far the condition is that it is suspended on."""
    join: JoinFacts | None = None
    """What its open join waits for."""
    kept: Mapping[str, int] = {}
    """How many signals it keeps for its next waits, by name."""
    times_out_at_ms: int | None = None
    """When the wait ends that it is suspended on, met or not."""
    set_aside: str = ""
    """Why signals that met the wait it is suspended on did not count after all."""
    failed_step: FailedStep | None = None
    """The step whose failure ended its last attempt."""
    granted_to: str | None = None
    """The worker it is kept for."""
    gates: Sequence[GateFacts] = ()
    """The limits and budgets it is under."""


DEFAULT_LANE: Final = "default"
PROGRAM: Final = "module:app"
"""Stands for the program of a worker, whose name the database does not know."""
WORKER_COMMAND: Final = f"flowfabric worker {PROGRAM}"
NEED_SOMEBODY: Final = frozenset({Cause.NO_WORKER, Cause.LANE_CLOSED, Cause.CODE_CHANGED})


def explain(execution: Execution, around: Surroundings) -> Explanation:
    cause, sentence, detail = _reason(execution, around)
    unattended = not around.attended and _moved_by_workers(execution, cause, around)
    if unattended:
        sentence += f" No worker is there: start one ({WORKER_COMMAND})."
    if around.kept:
        sentence += _keeping(around.kept)
        detail = detail | {"kept_signals": sum(around.kept.values())}
    return Explanation(
        execution_id=execution.execution_id,
        own_id=execution.own_id,
        public_state=execution.public_state,
        cause=cause,
        sentence=sentence,
        remark=_remark(execution, around),
        detail=detail,
        needs_somebody=unattended or cause in NEED_SOMEBODY,
    )


def _moved_by_workers(execution: Execution, cause: Cause, around: Surroundings) -> bool:
    """Whether any worker, or the reconcilers it runs, would move it on as things are."""
    match cause:
        case Cause.CANCELLING | Cause.LEASE_LOST:
            return True
        case Cause.GRANTED:
            return (execution.granted_until_ms or around.now_ms) < around.now_ms
        case Cause.SUSPENDED if around.times_out_at_ms is not None:
            return around.times_out_at_ms <= around.now_ms
        case Cause.BLOCKED:
            return held_by(execution) in (Hold.JOIN, Hold.CHILD)
        case _:
            return False


def _remark(execution: Execution, around: Surroundings) -> str:
    """What the execution's own row does not say."""
    if execution.ready:
        goes_on = resumes(execution)
        obstacles = (each.obstacle(around.now_ms, resumes=goes_on) for each in around.gates)
        return next(filter(None, obstacles), "")
    if held_by(execution) is Hold.JOIN and around.join is not None:
        return around.join.remark()
    at = around.progress
    if execution.lifecycle_phase is not LifecyclePhase.SUSPENDED or at is None or not at.left:
        return ""
    names = ", ".join(at.left)
    if at.wanted == 1:
        return f"waits for {names}"
    return f"{at.came} of {at.wanted}: still {names}"


def _keeping(kept: Mapping[str, int]) -> str:
    each = ", ".join(f"{name!r}" if n == 1 else f"{name!r} ({n})" for name, n in kept.items())
    total = sum(kept.values())
    kept_for = "1 signal is kept" if total == 1 else f"{total} signals are kept"
    return f" {kept_for} for its next waits: {each}."


Reason = tuple[Cause, str, dict[str, str | int | None]]


def _reason(execution: Execution, around: Surroundings) -> Reason:
    hold = held_by(execution)
    if hold is Hold.CANCELLATION:
        sentence = "It is about to be cancelled with its flow: a reconciler does it shortly."
        return Cause.CANCELLING, sentence, {"flow_id": execution.flow_id}
    if hold is Hold.JOIN and around.join is not None:
        detail = _blocking(execution) | around.join.detail()
        return Cause.BLOCKED, around.join.sentence(), detail
    if hold is Hold.GRANT:
        return _granted(execution, around)
    match execution.lifecycle_phase:
        case LifecyclePhase.TERMINAL:
            return _ended(execution, around)
        case LifecyclePhase.SUSPENDED:
            return _suspended(execution, around)
        case LifecyclePhase.ACTIVE if execution.ownership_state is OwnershipState.LEASED:
            return _running(execution, around)
    if execution.eligibility_state is EligibilityState.NOT_ELIGIBLE_UNTIL_TIME:
        return _delayed(execution, around)
    if execution.blocking_reason is BlockingReason.WAITING_FOR_CAPABLE_WORKER:
        return _unserved(execution, around)
    if not execution.ready:
        why = execution.blocking_detail or execution.blocking_reason
        how = "is" if why.startswith("waiting for ") else "is kept back:"
        return Cause.BLOCKED, f"It {how} {why}.", _blocking(execution)
    return _queued(execution, around)


def _granted(execution: Execution, around: Surroundings) -> Reason:
    until_ms = execution.granted_until_ms or around.now_ms
    left_ms = until_ms - around.now_ms
    if left_ms >= 0:
        when = f"It has {span(left_ms)} left to claim it."
    elif around.attended:
        when = "It has not claimed it: a worker sees to that shortly."
    else:
        when = f"It has not claimed it for {span(-left_ms)}."
    detail = {"worker_id": around.granted_to, "granted_until_ms": until_ms}
    return Cause.GRANTED, f"It is kept for worker {around.granted_to}. {when}", detail


def _unserved(execution: Execution, around: Surroundings) -> Reason:
    detail = _blocking(execution) | {"required_capabilities": ",".join(around.required)}
    if around.served:
        return Cause.BLOCKED, "It is kept back until its worker says that it is there.", detail
    return Cause.NO_WORKER, _nobody(execution, around), detail


def _suspended(execution: Execution, around: Surroundings) -> Reason:
    at = around.progress
    named = ", ".join(repr(name) for name in around.waits_for if name)
    if at is not None and at.came and at.left:
        still = ", ".join(map(repr, at.left))
        sentence = f"It is suspended, with {at.came} of {at.wanted} signals: still {still}."
    elif not named:
        sentence = f"It is suspended: {execution.blocking_detail or execution.blocking_reason}."
    elif execution.blocking_reason is BlockingReason.WAITING_FOR_SIGNAL:
        sentence = f"It is suspended until it gets a signal: {named}."
    else:
        sentence = f"It is suspended ({execution.blocking_reason}) until it gets a signal: {named}."
    detail = _blocking(execution)
    if around.times_out_at_ms is not None:
        sentence += _times_out(around.times_out_at_ms, around)
        detail |= {"times_out_at_ms": around.times_out_at_ms}
    if around.set_aside:
        sentence += f" The last one was set aside: {around.set_aside}. Send another."
        detail |= {"set_aside": around.set_aside}
    return Cause.SUSPENDED, sentence, detail


def _times_out(at_ms: int, around: Surroundings) -> str:
    left_ms = at_ms - around.now_ms
    if left_ms > 0:
        return f" It times out in {span(left_ms)}."
    if around.attended:
        return " It has timed out: a worker sees to it shortly."
    return f" It should have timed out {span(-left_ms)} ago."


def _ended(execution: Execution, around: Surroundings) -> Reason:
    why = in_words(execution.failure_reason or "", execution.policy)
    why = why or execution.cancellation_reason or ""
    because = f": {why}" if why else ""
    where, detail = _failed_at(around.failed_step)
    sentence = f"It has ended as {execution.public_state}{where}{because}."
    return Cause.ENDED, sentence, {"completed_at_ms": execution.completed_at_ms} | detail


def _failed_at(step: FailedStep | None) -> tuple[str, dict[str, str | int | None]]:
    if step is None:
        return "", {}
    detail: dict[str, str | int | None] = {
        "failed_step": step.name,
        "failed_step_key": step.step_key,
    }
    return f" at step {step.name!r}", detail


def _running(execution: Execution, around: Surroundings) -> Reason:
    now_ms = around.now_ms
    detail: dict[str, str | int | None] = {
        "worker_instance_id": execution.worker_instance_id,
        "lease_expires_at_ms": execution.lease_expires_at_ms,
    }
    if lease_is_dead(execution, now_ms):
        late = span(now_ms - (execution.lease_expires_at_ms or now_ms))
        sentence = (
            f"Its lease ended {late} ago and nobody has taken it over yet: its worker"
            f" {execution.worker_instance_id} went quiet, or keeps it in a fence."
        )
        return Cause.LEASE_LOST, sentence, detail
    sentence = (
        f"It is running: try {execution.current_attempt_index + 1} on worker"
        f" {execution.worker_instance_id}."
    )
    if around.waits_for:
        sentence += f" It takes signals meanwhile: {', '.join(map(repr, around.waits_for))}."
    return Cause.RUNNING, sentence, detail


def _delayed(execution: Execution, around: Surroundings) -> Reason:
    until = execution.delay_until_ms or around.now_ms
    left_ms = until - around.now_ms
    # If it is due and still delayed, no worker attends to it.
    nobody = "" if left_ms > 0 or around.served else f" {_nobody(execution, around)}"
    if execution.blocking_reason is BlockingReason.WAITING_FOR_CODE:
        again = f" A worker looks again {f'in {span(left_ms)}' if left_ms > 0 else 'shortly'}."
        sentence = f"It is blocked: {execution.blocking_detail}.{nobody or again}"
        return Cause.CODE_CHANGED, sentence, _blocking(execution) | {"delay_until_ms": until}
    what = str(execution.blocking_reason).removeprefix("waiting_for_").replace("_", " ")
    if left_ms > 0:
        sentence = f"It waits {span(left_ms)} more ({what})."
    elif nobody:
        sentence = f"It has been due for {span(-left_ms)} ({what}).{nobody}"
    else:
        sentence = f"It is due ({what}): a worker takes it up shortly."
    where, failed = _failed_at(around.failed_step)
    if execution.blocking_reason is BlockingReason.WAITING_FOR_RETRY_BACKOFF:
        last = execution.current_attempt_index + 1
        why = in_words(execution.pending_retry_reason or "", execution.policy)
        sentence += f" Try {last} failed{where}: {why}."
    detail = {"delay_until_ms": until, "blocking_reason": execution.blocking_reason}
    return Cause.NO_WORKER if nobody else Cause.DELAYED, sentence, detail | failed


def _blocking(execution: Execution) -> dict[str, str | int | None]:
    return {
        "blocking_reason": execution.blocking_reason,
        "blocking_detail": execution.blocking_detail,
    }


def _queued(execution: Execution, around: Surroundings) -> Reason:
    lane_state = LaneState.ACTIVE if around.lane is None else around.lane.state
    if lane_state in (LaneState.PAUSED, LaneState.DISABLED):
        resume = f"flowfabric lanes resume {quote(execution.lane_id)}"
        sentence = f"Its lane {execution.lane_id!r} is {lane_state}: resume the lane ({resume})."
        return Cause.LANE_CLOSED, sentence, {"lane_id": execution.lane_id, "state": lane_state}
    detail: dict[str, str | int | None] = {
        "lane_id": execution.lane_id,
        "execution_kind": execution.execution_kind,
        "required_capabilities": ",".join(around.required),
        "ahead": around.ahead,
    }
    if not around.served:
        return Cause.NO_WORKER, _nobody(execution, around), detail
    if execution.ownership_state is not OwnershipState.UNOWNED:
        return Cause.LEASE_LOST, f"Its worker was lost ({execution.blocking_detail}).", detail
    return _limited(execution, around, detail) or (
        Cause.QUEUED,
        f"It is next in line{_after(around.ahead)}.",
        detail,
    )


def _limited(
    execution: Execution, around: Surroundings, detail: dict[str, str | int | None]
) -> Reason | None:
    """That a limit holds it up, with the numbers."""
    for each in around.gates:
        obstacle = each.obstacle(around.now_ms, resumes=resumes(execution))
        if obstacle is None:
            continue
        ahead = "many" if around.ahead is None else str(around.ahead)
        what = "" if each.limit is None else f" its limit {each.limit!r}:"
        gate = each.state.gate
        numbers: dict[str, str | int | None] = {
            "limit": each.limit,
            "key": gate.gate_key,
            "running": each.state.in_use,
            "concurrency": each.state.limits.cap,
            "rate": each.state.limits.rate,
            "opens_at_ms": gate.opens_at_ms,
        }
        return Cause.LIMITED, f"It waits for{what} {obstacle}; {ahead} ahead.", detail | numbers
    return None


def _nobody(execution: Execution, around: Surroundings) -> str:
    """That no worker would run it, and what to do."""
    if around.other_versions:
        name, version = split_kind(execution.execution_kind)
        return (
            f"No worker serves version {version} of {name!r} any more, though some serve"
            f" version {', '.join(map(str, around.other_versions))}: keep version {version} in"
            " the program until its runs have ended."
        )
    needs = f" with capabilities {', '.join(around.required)}" if around.required else ""
    return (
        f"No worker has asked lately for lane {execution.lane_id!r}, kind"
        f" {execution.execution_kind!r}{needs}: start one that does"
        f" ({_worker_command(execution, around)})."
    )


def _worker_command(execution: Execution, around: Surroundings) -> str:
    lane = "" if execution.lane_id == DEFAULT_LANE else f" --lane {quote(execution.lane_id)}"
    needs = "".join(f" --capability {quote(each)}" for each in around.required)
    return f"{WORKER_COMMAND}{lane}{needs}"


def _after(ahead: int | None) -> str:
    match ahead:
        case None:
            return " after many others of its kind"
        case 0:
            return ""
        case 1:
            return " after 1 other of its kind"
        case _:
            return f" after {ahead} others of its kind"


def held_up_by_limits(execution: Execution, facts: Iterable[GateFacts], now_ms: int) -> Execution:
    """A ready execution as readers see it: waiting for the first of its limits that is full.

    A limit that cannot be read lets nothing through; it must not keep others from being listed.
    """
    for each in facts:
        try:
            obstacle = each.obstacle(now_ms, resumes=resumes(execution))
        except Corruption as error:
            obstacle = str(error)
        if obstacle is not None:
            budget = each.limit is None
            reason = (
                BlockingReason.WAITING_FOR_BUDGET if budget else BlockingReason.WAITING_FOR_QUOTA
            )
            return structs.replace(execution, blocking_reason=reason, blocking_detail=obstacle)
    return execution


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


_GATES = (
    EligibilityState.BLOCKED_BY_BUDGET,
    EligibilityState.BLOCKED_BY_QUOTA,
    EligibilityState.BLOCKED_BY_ROUTE,
    EligibilityState.BLOCKED_BY_LANE_STATE,
    EligibilityState.BLOCKED_BY_OPERATOR,
)


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
    return Mover.GATE if state in _GATES else None


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
    named = ", ".join(others[:RING_NAMED_MAX])
    more = f" and {len(others) - RING_NAMED_MAX} more" if len(others) > RING_NAMED_MAX else ""
    by = f" by way of {named}{more}" if others else ""
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
