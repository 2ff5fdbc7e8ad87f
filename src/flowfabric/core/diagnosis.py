"""Why an execution is not running: one sentence for people, and the same as data."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from shlex import quote
from typing import Final

from msgspec import Struct, structs

from flowfabric.core.checks import and_more, closest, split_kind
from flowfabric.core.conditions import Progress
from flowfabric.core.flow_joins import needed_count, resolved_count
from flowfabric.core.flow_records import JoinRecord
from flowfabric.core.gates import GateFacts
from flowfabric.core.ids import ExecutionId, uuid_of
from flowfabric.core.leases import lease_is_dead
from flowfabric.core.parking import PUT_ASIDE
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

Detail = dict[str, str | int | None]
"""An explanation as data."""

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
    group: JoinRecord
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

    def detail(self) -> Detail:
        return {
            "dependencies": self.group.staged,
            "needed": needed_count(self.group),
            "succeeded": self.group.succeeded,
            "unresolved": self.unresolved,
            "upstreams": ",".join(each.execution_id for each in self.upstreams),
        }

    def remark(self) -> str:
        """A short remark for lists: which upstreams have not ended."""
        named = and_more([each.name for each in self.upstreams], self.unresolved)
        return f"{self.group.succeeded} of {needed_count(self.group)}: still {named}"

    def _named(self) -> str:
        named = [
            f"{each.name} {each.execution_id}"
            f" ({'blocked by changed code' if each.blocked else each.public_state}"
            f"{': replay it too' if each.over else ''})"
            for each in self.upstreams
        ]
        return and_more(named, self.unresolved)


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
    detail: Detail = {}
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
    other_kinds: frozenset[str] = frozenset()
    """The kinds that workers of its lane serve, unless one of them serves its own."""
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
        detail={name: _plain(value) for name, value in detail.items()},
        needs_somebody=unattended or cause in NEED_SOMEBODY,
    )


def _plain(value: str | int | None) -> str | int | None:
    """A state as its text: where details travel, nothing says which state it is."""
    return str(value) if isinstance(value, str) else value


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


Reason = tuple[Cause, str, Detail]


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
    was = "was " if execution.public_state is PublicState.CANCELLED else ""
    sentence = f"It {was}{execution.public_state}{where}{because}."
    return Cause.ENDED, sentence, {"completed_at_ms": execution.completed_at_ms} | detail


def _failed_at(step: FailedStep | None) -> tuple[str, Detail]:
    if step is None:
        return "", {}
    detail: Detail = {
        "failed_step": step.name,
        "failed_step_key": step.step_key,
    }
    return f" at step {step.name!r}", detail


def _running(execution: Execution, around: Surroundings) -> Reason:
    now_ms = around.now_ms
    detail: Detail = {
        "worker_instance_id": execution.worker_instance_id,
        "lease_expires_at_ms": execution.lease_expires_at_ms,
    }
    if lease_is_dead(execution, now_ms):
        late = span(now_ms - (execution.lease_expires_at_ms or now_ms))
        worker = f"Its worker {execution.worker_instance_id}"
        if around.attended:
            sentence = (
                f"{worker} went quiet {late} ago, or keeps it in a fence: another worker takes it"
                " over."
            )
        else:
            sentence = f"{worker} has been gone for {late}."
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
        sentence = f"It should have {_done_when_due(execution)} {span(-left_ms)} ago.{nobody}"
    else:
        sentence = f"It is due ({what}): a worker takes it up shortly."
    where, failed = _failed_at(around.failed_step)
    if execution.blocking_reason is BlockingReason.WAITING_FOR_RETRY_BACKOFF:
        last = execution.current_attempt_index + 1
        why = in_words(execution.pending_retry_reason or "", execution.policy)
        sentence += f" Try {last} failed{where}: {why}."
    if (execution.blocking_detail or "").startswith(PUT_ASIDE):
        sentence += f" It was {execution.blocking_detail}."
    detail = {"delay_until_ms": until, "blocking_reason": execution.blocking_reason}
    return Cause.NO_WORKER if nobody else Cause.DELAYED, sentence, detail | failed


def _done_when_due(execution: Execution) -> str:
    if execution.blocking_reason is BlockingReason.WAITING_FOR_RETRY_BACKOFF:
        return "been tried again"
    return "continued" if resumes(execution) else "started"


def _blocking(execution: Execution) -> Detail:
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
    detail: Detail = {
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


def _limited(execution: Execution, around: Surroundings, detail: Detail) -> Reason | None:
    """Says which limit holds it up, with its numbers."""
    for each in around.gates:
        obstacle = each.obstacle(around.now_ms, resumes=resumes(execution))
        if obstacle is None:
            continue
        ahead = "many" if around.ahead is None else str(around.ahead)
        what = "" if each.limit is None else f" its limit {each.limit!r}:"
        gate = each.state.gate
        numbers: Detail = {
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
    """Says that no worker would run it, and what to do."""
    if around.other_versions:
        name, version = split_kind(execution.execution_kind)
        return (
            f"No worker serves version {version} of {name!r} any more, though some serve"
            f" version {', '.join(map(str, around.other_versions))}: keep version {version} in"
            " the program until its runs have ended."
        )
    needs = f" with capabilities {', '.join(around.required)}" if around.required else ""
    missing = (
        f"No running worker has a task {execution.execution_kind!r} in lane"
        f" {execution.lane_id!r}{needs}"
    )
    if meant := closest(execution.execution_kind, sorted(around.other_kinds)):
        return f"{missing}; did you mean {meant!r}?"
    return f"{missing}: start one that does ({_worker_command(execution, around)})."


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


# What an execution waits for through others, and when whoever waits is told of it again

Gist = tuple[str, ...]


def awaits_others(execution: Execution) -> bool:
    """Whether the end of an execution that it has asked for would move it."""
    return (
        execution.awaits_child
        and not execution.ready
        and execution.lifecycle_phase is LifecyclePhase.RUNNABLE
    )


def held_up_by(why: Explanation, other: Explanation) -> Explanation:
    """Why an execution waits, if that is until somebody acts on another one."""
    called = other.own_id or uuid_of(other.execution_id)
    return structs.replace(
        why,
        sentence=f"{why.sentence} About {called}: {other.sentence}",
        detail=why.detail | {"held_up_by": other.execution_id, "held_up_cause": other.cause},
        needs_somebody=True,
    )


def gist(why: Explanation) -> Gist:
    """The part of an explanation worth reporting when it changes: not times, nor the queue."""
    lasting = {
        name: value
        for name, value in why.detail.items()
        if name != "ahead" and not name.endswith("_ms")
    }
    return (why.cause, *(f"{name}={value}" for name, value in sorted(lasting.items())))
