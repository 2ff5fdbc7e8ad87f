"""Why an execution is not running: one sentence, and the same as data."""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from flowfabric.core.checks import split_kind
from flowfabric.core.conditions import Progress
from flowfabric.core.ids import ExecutionId
from flowfabric.core.join_facts import JoinFacts
from flowfabric.core.leases import lease_is_dead
from flowfabric.core.policies import in_words, span
from flowfabric.core.records import Execution, FailedStep, Lane
from flowfabric.core.situations import Hold, held_by
from flowfabric.core.states import (
    BlockingReason,
    EligibilityState,
    LaneState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
)


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


class Surroundings(Struct, frozen=True, kw_only=True):
    """What else decides whether an execution runs."""

    lane: Lane | None
    required: tuple[str, ...]
    ahead: int | None
    """Ready executions of the same route that go first; None when there are more than counted."""
    served: bool
    """Whether somebody claimed from this route lately."""
    attended: bool = True
    """Whether any worker is there, of whatever route: each sees to what is due."""
    now_ms: int
    other_versions: tuple[int, ...] = ()
    """The versions of the same task that somebody claimed lately."""
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
    failed_step: FailedStep | None = None
    """The step whose failure ended its last attempt."""


def explain(execution: Execution, around: Surroundings) -> Explanation:
    cause, sentence, detail = _reason(execution, around)
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
    )


def _remark(execution: Execution, around: Surroundings) -> str:
    """What lists cannot tell from the execution alone."""
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
    match execution.lifecycle_phase:
        case LifecyclePhase.TERMINAL:
            return _ended(execution, around)
        case LifecyclePhase.SUSPENDED:
            return _suspended(execution, around)
        case LifecyclePhase.ACTIVE if execution.ownership_state is OwnershipState.LEASED:
            return _running(execution, around)
    if execution.eligibility_state is EligibilityState.NOT_ELIGIBLE_UNTIL_TIME:
        return _delayed(execution, around)
    if not execution.ready:
        why = execution.blocking_detail or execution.blocking_reason
        return Cause.BLOCKED, f"It is blocked: {why}.", _blocking(execution)
    return _queued(execution, around)


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
    return Cause.SUSPENDED, sentence, detail


def _times_out(at_ms: int, around: Surroundings) -> str:
    left_ms = at_ms - around.now_ms
    if left_ms > 0:
        return f" It times out in {span(left_ms)}."
    if around.attended:
        return " It has timed out: a worker sees to it shortly."
    return f" It should have timed out {span(-left_ms)} ago, but no worker is there: start one."


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
    # What is due and stays delayed has nobody who looks after it.
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
        sentence = f"Its lane {execution.lane_id!r} is {lane_state}: resume the lane."
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
    return Cause.QUEUED, f"It is next in line{_after(around.ahead)}.", detail


def _nobody(execution: Execution, around: Surroundings) -> str:
    """That no worker is there that would run it, and what to do."""
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
        f" {execution.execution_kind!r}{needs}: start one that does."
    )


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
