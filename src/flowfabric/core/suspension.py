"""How an execution pauses.

A worker that holds the lease parks its attempt behind waitpoints. It may make a
waitpoint beforehand (`pending`) and hand out its token. Signals that arrive early
are kept, at a waitpoint or under a name, and count from the start for the next
suspension that waits under that name, in the order they came, as far as it needs
them; the others stay kept. If they meet the condition, the worker keeps its lease
and goes on: nothing was ever parked.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import bounds, checks, conditions, records
from flowfabric.core.decisions import Changes, Decision, Subject, Timing, change
from flowfabric.core.executions import repeats
from flowfabric.core.ids import SignalId, SuspensionId, WaitpointId, parse_uuid
from flowfabric.core.leases import Fence, check_fence
from flowfabric.core.parking import park
from flowfabric.core.policies import DURATION_MAX_MS, parse_policy
from flowfabric.core.resumption import NORMAL, RESUMED, ResumePolicy, check_resume_policy
from flowfabric.core.situations import Situation, into
from flowfabric.core.states import BlockingReason, LifecyclePhase
from flowfabric.core.waitpoints import (
    BoundWaitpoint,
    SuspensionDetails,
    UsePending,
    announce,
    check_bindings,
    check_keys,
    check_same_key,
    check_waitpoint_room,
    details_of,
    is_expired,
    new_waitpoint,
    pending_again,
    signing_key,
    token_expired,
    unannounced,
)

# Requests to suspend, checked as far as possible without looking at the execution


class SuspendRequest(Struct, frozen=True, kw_only=True):
    """A checked request to suspend."""

    suspension_id: SuspensionId
    bindings: tuple[BoundWaitpoint | UsePending, ...]
    """The first is the primary one."""
    condition: conditions.Condition
    resume_policy: ResumePolicy
    reason_code: records.SuspensionReason
    requested_by: records.Requester
    timeout_at_ms: int | None
    timeout_behavior: records.TimeoutBehavior | None
    timeout_in_ms: int | None
    """The timeout counted from when the execution suspends, by the store's clock."""
    continuation_metadata_pointer: str | None
    idempotency_key: str | None
    take_pending: bool
    """Take over every pending waitpoint of the condition's names in place of fresh ones."""

    @property
    def fresh(self) -> tuple[BoundWaitpoint, ...]:
        return tuple(each for each in self.bindings if isinstance(each, BoundWaitpoint))

    @property
    def pending(self) -> tuple[UsePending, ...]:
        return tuple(each for each in self.bindings if isinstance(each, UsePending))


def check_suspend(
    *,
    new_id: Callable[[], str],
    resume_condition: object,
    waitpoints: object = None,
    suspension_id: object = None,
    resume_policy: object = NORMAL,
    reason_code: object = records.SuspensionReason.WAITING_FOR_SIGNAL,
    requested_by: object = records.Requester.WORKER,
    timeout_at_ms: object = None,
    timeout_in_ms: object = None,
    timeout_behavior: object = None,
    continuation_metadata_pointer: object = None,
    idempotency_key: object = None,
    take_pending: object = False,
) -> SuspendRequest:
    """Check a request as far as possible without looking at the execution.

    The suspension and each waitpoint that the caller leaves unnamed gets a `new_id`.
    """
    condition = conditions.check_condition(resume_condition)
    taking = checks.check_bool("take_pending", take_pending)
    bindings = check_bindings(waitpoints, condition, new_id, take_pending=taking)
    timeouts = [each for each in (timeout_at_ms, timeout_in_ms) if each is not None]
    if len(timeouts) > 1:
        raise errors.InvalidInput("timeout_in_ms", "give either timeout_at_ms or timeout_in_ms")
    if isinstance(condition, conditions.TimeoutOnly) and not timeouts:
        raise errors.InvalidInput(
            "timeout_at_ms",
            "timeout_only_without_deadline: without a timeout nothing would ever end this",
        )
    return SuspendRequest(
        suspension_id=SuspensionId(
            parse_uuid("suspension_id", new_id() if suspension_id is None else suspension_id)
        ),
        bindings=bindings,
        condition=condition,
        resume_policy=check_resume_policy(resume_policy),
        reason_code=checks.check_choice("reason_code", reason_code, records.SuspensionReason),
        requested_by=checks.check_choice("requested_by", requested_by, records.Requester),
        timeout_at_ms=checks.check_optional_time("timeout_at_ms", timeout_at_ms),
        timeout_behavior=None if timeout_behavior is None else check_behavior(timeout_behavior),
        timeout_in_ms=checks.check_optional_int("timeout_in_ms", timeout_in_ms, 0, DURATION_MAX_MS),
        continuation_metadata_pointer=checks.check_optional_text(
            "continuation_metadata_pointer",
            continuation_metadata_pointer,
            bytes_max=bounds.TEXT_BYTES_MAX,
        ),
        idempotency_key=checks.check_optional_text(
            "idempotency_key", idempotency_key, bytes_max=bounds.IDEMPOTENCY_KEY_BYTES_MAX
        )
        or None,
        take_pending=taking,
    )


def check_behavior(behavior: object) -> records.TimeoutBehavior:
    if behavior == "auto_resume":
        return records.TimeoutBehavior.AUTO_RESUME
    return checks.check_choice("timeout_behavior", behavior, records.TimeoutBehavior)


# The answer to a suspend, so that a repeat gets the same --------------------


def outcome_of(
    subject: Subject,
    request: SuspendRequest,
    suspension: records.Suspension,
    already_satisfied: bool,
    now_ms: int,
) -> records.SuspendDedup:
    """The lease that suspended and what came of it; stored if the request has a key."""
    execution = subject.execution
    assert execution.lease_id is not None
    assert execution.current_attempt_id is not None
    assert execution.worker_instance_id is not None
    assert execution.lease_expires_at_ms is not None
    assert execution.lease_last_renewed_at_ms is not None
    return records.SuspendDedup(
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        idempotency_key=request.idempotency_key or "",
        suspension_id=suspension.suspension_id,
        already_satisfied=already_satisfied,
        lease_id=execution.lease_id,
        lease_epoch=execution.lease_epoch,
        attempt_id=execution.current_attempt_id,
        attempt_index=execution.current_attempt_index,
        worker_instance_id=execution.worker_instance_id,
        lease_ttl_ms=execution.lease_expires_at_ms - execution.lease_last_renewed_at_ms,
        expires_at_ms=now_ms + dedup_ttl_ms(suspension.timeout_at_ms, now_ms),
    )


def dedup_ttl_ms(timeout_at_ms: int | None, now_ms: int) -> int:
    """As long as the suspension can last, and a little more."""
    if timeout_at_ms is None:
        return bounds.SUSPEND_DEDUP_TTL_MS_MAX
    lasts_ms = max(timeout_at_ms - now_ms, 0)
    return min(lasts_ms + bounds.SUSPEND_DEDUP_GRACE_MS, bounds.SUSPEND_DEDUP_TTL_MS_MAX)


def may_repeat(execution: records.Execution, dedup: records.SuspendDedup, fence: Fence) -> bool:
    """Whether the caller got that answer, or holds the execution now."""
    return (fence.lease_id, fence.lease_epoch, fence.attempt_id) in (
        (dedup.lease_id, dedup.lease_epoch, dedup.attempt_id),
        (execution.lease_id, execution.lease_epoch, execution.current_attempt_id),
    )


# Signals that no wait has taken yet -----------------------------------------
#
# An execution keeps what reaches it before it waits: at a pending waitpoint, or under a
# name that nothing waits for so far. The next wait of that name takes kept signals in the
# order they came, those it can use (`conditions.observe`) until it is met. What it cannot
# use stays for the wait after it, as does what reaches it while it lasts and cannot be used;
# what it took but was not met by goes back. So a signal counts once, and one that was
# accepted is never lost.


class TakenSignals(Struct, frozen=True, kw_only=True):
    """Which kept signals the suspension takes."""

    signals: tuple[records.SignalFacts, ...] = ()
    """Those it takes."""
    closer: SignalId | None = None
    left: int = 0
    """How many stay kept."""

    def counted(self, waitpoint: records.Waitpoint) -> records.Waitpoint:
        """The waitpoint with those of its signals that count."""
        own = (each for each in self.signals if each.waitpoint_id == waitpoint.waitpoint_id)
        return structs.replace(waitpoint, matched_signal_count=sum(each.matched for each in own))


def take(
    condition: conditions.Condition,
    suspension: records.Suspension,
    kept: Sequence[records.SignalFacts],
) -> TakenSignals:
    """Use kept signals, in the order they came, until the condition is met."""
    taken: list[records.SignalFacts] = []
    for signal in kept:
        seen = conditions.observe(condition, taken, signal)
        if not seen.satisfier:
            continue
        taken.append(
            structs.replace(
                signal, suspension_id=suspension.suspension_id, matched=True, satisfier=True
            )
        )
        if seen.effect is records.SignalEffect.SATISFIED:
            left = len(kept) - len(taken)
            return TakenSignals(signals=tuple(taken), closer=signal.signal_id, left=left)
    return TakenSignals(signals=tuple(taken), left=len(kept) - len(taken))


# Signals that met a wait and that its worker cannot use -----------------------
#
# Only the code that waits knows which payloads fit it. If one does not, its worker ends the
# wait as if it had not been met: the other signals go back to those that are kept, tokens
# work again, and the next wait takes up both. The signals themselves stay with the old wait.

SET_ASIDE: Final = "signals_set_aside: "
"""What the close reason of such a wait begins with."""


class MetWait(Struct, frozen=True, kw_only=True):
    """A suspension that was met, with all that belongs to it."""

    suspension: records.Suspension
    waitpoints: Sequence[records.Waitpoint]
    signals: Sequence[records.SignalFacts]
    """Those that met it."""
    dedups: Sequence[records.SignalDedup]
    """What their idempotency keys have delivered."""


class SetAside(Struct, frozen=True, kw_only=True):
    """A request to set aside signals that met a wait."""

    suspension_id: SuspensionId
    signal_ids: frozenset[SignalId]
    reason: str


def decide_set_aside(
    subject: Subject, fence: Fence, request: SetAside, wait: MetWait | None, timing: Timing
) -> Decision[bool]:
    """Give back what a wait took, except for some signals; false if that was done before.

    Of signals that are all given back, none is named: the wait goes on, for more than these.
    """
    check_fence(subject, fence, timing.now_ms)
    if wait is None:
        raise errors.NotFound("suspension", request.suspension_id)
    suspension, execution = wait.suspension, subject.execution
    if (suspension.close_reason or "").startswith(SET_ASIDE):
        return Decision(answer=False)
    if suspension.close_reason != RESUMED:
        raise errors.InvalidInput(
            "suspension_id", "was not met by signals", suspension.suspension_id
        )
    refused = tuple(each for each in wait.signals if each.signal_id in request.signal_ids)
    if len(refused) != len(request.signal_ids):
        named = sorted(request.signal_ids)
        raise errors.InvalidInput("signal_ids", "must have counted for the suspension", named)
    room = bounds.OPEN_WAITPOINTS_MAX - execution.open_waitpoint_count
    opened = tuple(map(_pending_until_token_expires, _closed_by(wait, timing.now_ms)[:room]))
    unmet = structs.replace(
        suspension,
        satisfied_at_ms=None,
        closer_signal_id=None,
        close_reason=checks.shorten(f"{SET_ASIDE}{request.reason}", bounds.TEXT_BYTES_MAX),
    )
    after = change(
        execution,
        timing.now_ms,
        open_waitpoint_count=execution.open_waitpoint_count + len(opened),
        keeps_signals=execution.keeps_signals or len(wait.signals) > len(refused),
    )
    left_out = (structs.replace(each, satisfier=False) for each in refused)
    # The sender may correct the payload and reuse the key.
    freed = tuple(each for each in wait.dedups if each.signal_id in request.signal_ids)
    changes = Changes(updates=(after, unmet, *opened, *left_out), deletes=freed)
    return Decision(answer=True, changes=changes)


def _closed_by(wait: MetWait, now_ms: int) -> list[records.Waitpoint]:
    """The waitpoints that its end has closed, and that would be open without it."""
    return [
        each
        for each in wait.waitpoints
        if each.state is records.WaitpointState.CLOSED
        and (each.expires_at_ms is None or each.expires_at_ms > now_ms)
        and not token_expired(each, now_ms)
    ]


def _pending_until_token_expires(waitpoint: records.Waitpoint) -> records.Waitpoint:
    """Open again for the next wait, which leaves out what has expired."""
    ends = (waitpoint.expires_at_ms, waitpoint.token_expires_at_ms)
    until_ms = min((each for each in ends if each is not None), default=None)
    return structs.replace(pending_again(waitpoint), expires_at_ms=until_ms)


def set_aside_reason(suspension: records.Suspension | None) -> str:
    """Why the signals of a suspension were set aside; empty if they were not."""
    closed_by = (suspension and suspension.close_reason) or ""
    return closed_by.removeprefix(SET_ASIDE) if closed_by.startswith(SET_ASIDE) else ""


BLOCKING: Final[Mapping[records.SuspensionReason, BlockingReason]] = {
    records.SuspensionReason.WAITING_FOR_SIGNAL: BlockingReason.WAITING_FOR_SIGNAL,
    records.SuspensionReason.STEP_BOUNDARY: BlockingReason.WAITING_FOR_SIGNAL,
    records.SuspensionReason.WAITING_FOR_APPROVAL: BlockingReason.WAITING_FOR_APPROVAL,
    records.SuspensionReason.WAITING_FOR_CALLBACK: BlockingReason.WAITING_FOR_CALLBACK,
    records.SuspensionReason.WAITING_FOR_TOOL_RESULT: BlockingReason.WAITING_FOR_TOOL_RESULT,
    records.SuspensionReason.WAITING_FOR_OPERATOR_REVIEW: BlockingReason.PAUSED_BY_OPERATOR,
    records.SuspensionReason.MANUAL_PAUSE: BlockingReason.PAUSED_BY_OPERATOR,
    records.SuspensionReason.PAUSED_BY_POLICY: BlockingReason.PAUSED_BY_POLICY,
    records.SuspensionReason.PAUSED_BY_BUDGET: BlockingReason.WAITING_FOR_BUDGET,
}


class SuspendAnswer(Struct, frozen=True, kw_only=True):
    """The outcome of a suspend."""

    details: SuspensionDetails
    outcome: records.SuspendDedup


class SuspendFindings(Struct, frozen=True, kw_only=True):
    """The rows that a suspend depends on, besides the execution's own."""

    keys: Sequence[records.HmacKey]
    bound: Mapping[WaitpointId, records.Waitpoint] = {}
    """Rows that already have an id the request names."""
    kept: Sequence[records.SignalFacts] = ()
    """Signals no wait has taken, under any name, in order."""
    suspension_id_taken: bool = False
    expired_dedup: records.SuspendDedup | None = None


def decide_suspend(
    subject: Subject,
    fence: Fence,
    request: SuspendRequest,
    found: SuspendFindings,
    timing: Timing,
) -> Decision[SuspendAnswer]:
    """Park the attempt until the condition is met; continue at once if early signals meet it."""
    _check_may_suspend(subject, fence, timing)
    request = with_default_timeout(request, subject.execution, timing.now_ms)
    opened = _opened(subject, request, found, timing.now_ms)
    suspension = opened.suspension
    seen = take(request.condition, suspension, found.kept)
    if seen.closer is None:
        changes = _paused(subject, request, opened, seen, timing.now_ms)
    else:
        changes = _satisfied(subject, opened, seen, timing.now_ms)
    outcome = outcome_of(subject, request, suspension, seen.closer is not None, timing.now_ms)
    details = details_of(suspension, opened.waitpoints, found.keys, timing.now_ms)
    return Decision(
        answer=SuspendAnswer(details=details, outcome=outcome),
        changes=_remembering(changes, request, outcome, found),
    )


def decide_take(
    subject: Subject,
    fence: Fence,
    request: SuspendRequest,
    found: SuspendFindings,
    timing: Timing,
    *,
    announced: Sequence[BoundWaitpoint] = (),
) -> Decision[bool]:
    """Let kept signals meet the condition, if they can; otherwise leave them.

    For a worker whose handler waits in one branch while another works. `announced` are
    waitpoints to make for a wait that is not met, where its names have none.
    """
    _check_may_suspend(subject, fence, timing)
    opened = _opened(subject, request, found, timing.now_ms)
    seen = take(request.condition, opened.suspension, found.kept)
    if seen.closer is None:
        missing = unannounced(subject, announced, timing.now_ms)
        changes = announce(subject, missing, signing_key(found.keys), timing.now_ms)
        return Decision(answer=False, changes=changes)
    changes = _satisfied(subject, opened, seen, timing.now_ms)
    # A pause of the same name, begun before this answer arrived, is answered the same.
    outcome = outcome_of(subject, request, opened.suspension, True, timing.now_ms)
    return Decision(answer=True, changes=_remembering(changes, request, outcome, found))


def _remembering(
    changes: Changes,
    request: SuspendRequest,
    outcome: records.SuspendDedup,
    found: SuspendFindings,
) -> Changes:
    """The changes, and the outcome for repeats if the request has a key."""
    if request.idempotency_key is None:
        return changes
    if found.expired_dedup is None:
        return structs.replace(changes, inserts=(*changes.inserts, outcome))
    return structs.replace(changes, updates=(*changes.updates, outcome))


def with_pending(
    request: SuspendRequest, waitpoints: Sequence[records.Waitpoint], now_ms: int
) -> SuspendRequest:
    """The request with every pending waitpoint of its names in place of a fresh one."""
    if not request.take_pending:
        return request
    bindings: list[BoundWaitpoint | UsePending] = []
    for binding in request.bindings:
        made = [
            UsePending(waitpoint_id=each.waitpoint_id, any_attempt=True)
            for each in sorted(waitpoints, key=lambda each: (each.created_at_ms, each.waitpoint_id))
            if isinstance(binding, BoundWaitpoint)
            and each.waitpoint_key == binding.waitpoint_key
            and each.state is records.WaitpointState.PENDING
            and not is_expired(each, now_ms)
        ]
        bindings += made or [binding]
    return structs.replace(request, bindings=tuple(bindings))


def _check_may_suspend(subject: Subject, fence: Fence, timing: Timing) -> None:
    execution = subject.execution
    if execution.lifecycle_phase is LifecyclePhase.SUSPENDED and repeats(execution, fence):
        raise errors.AlreadySuspended(f"{execution.called} is suspended already")
    index = fence.attempt_index
    check_fence(subject, structs.replace(fence, attempt_index=None), timing.now_ms)
    if index not in (None, execution.current_attempt_index):
        raise errors.InvalidLeaseForSuspend(
            f"attempt {index} of {execution.called} is not the current one"
        )
    assert subject.suspension is None, "an active execution has no open suspension"


def with_default_timeout(
    request: SuspendRequest, execution: records.Execution, now_ms: int
) -> SuspendRequest:
    """The request with the execution's own policy for what it leaves open."""
    policy = parse_policy(execution.policy).suspension_policy
    timeout_at_ms = request.timeout_at_ms
    if request.timeout_in_ms is not None:
        timeout_at_ms = min(now_ms + request.timeout_in_ms, bounds.TIME_MS_MAX)
    behavior = request.timeout_behavior or records.TimeoutBehavior.FAIL
    if policy is not None:
        behavior = request.timeout_behavior or policy.timeout_behavior
        if timeout_at_ms is None and policy.default_timeout_ms is not None:
            timeout_at_ms = min(now_ms + policy.default_timeout_ms, bounds.TIME_MS_MAX)
    earliest_ms = now_ms - bounds.SUSPEND_CLOCK_SKEW_MS
    if timeout_at_ms is not None and timeout_at_ms < earliest_ms:
        raise errors.InvalidInput(
            "timeout_at_ms", f"timeout_at_in_past: must be {earliest_ms} or later", timeout_at_ms
        )
    return structs.replace(request, timeout_at_ms=timeout_at_ms, timeout_behavior=behavior)


class _Opened(Struct, frozen=True, kw_only=True):
    """A suspension and its waitpoints: fresh ones, and those that have a row already."""

    suspension: records.Suspension
    waitpoints: tuple[records.Waitpoint, ...]
    fresh: tuple[records.Waitpoint, ...]
    taken_over: tuple[records.Waitpoint, ...]


def _opened(
    subject: Subject, request: SuspendRequest, found: SuspendFindings, now_ms: int
) -> _Opened:
    execution = subject.execution
    if found.suspension_id_taken:
        raise errors.InvalidInput("suspension_id", "was used before", request.suspension_id)
    for bound in request.fresh:
        if bound.waitpoint_id in found.bound:
            raise errors.WaitpointAlreadyExists(f"waitpoint {bound.waitpoint_id} exists already")
    waitpoints = tuple(
        _taken_over(execution, binding, found, now_ms)
        if isinstance(binding, UsePending)
        else new_waitpoint(execution, binding, signing_key(found.keys), now_ms)
        for binding in request.bindings
    )
    if isinstance(request.condition, conditions.Single):
        check_same_key(waitpoints[0].waitpoint_key, request.condition)
    check_keys([waitpoint.waitpoint_key for waitpoint in waitpoints], request.condition)
    conditions.check_countable(request.condition, waitpoints, found.kept)
    check_waitpoint_room(execution, len(request.fresh))
    active = tuple(
        structs.replace(
            waitpoint,
            state=records.WaitpointState.ACTIVE,
            suspension_id=request.suspension_id,
            attempt_index=execution.current_attempt_index,
            ordinal=ordinal,
            activated_at_ms=now_ms,
            expires_at_ms=request.timeout_at_ms,
            required_signal_names=msgspec.json.encode(
                conditions.required_signal_names(request.condition, waitpoint.waitpoint_key)
            ).decode(),
        )
        for ordinal, waitpoint in enumerate(waitpoints)
    )
    return _Opened(
        suspension=_new_suspension(execution, request, active[0].waitpoint_id, now_ms),
        waitpoints=active,
        fresh=tuple(each for each in active if each.waitpoint_id not in found.bound),
        taken_over=tuple(each for each in active if each.waitpoint_id in found.bound),
    )


def _taken_over(
    execution: records.Execution, pending: UsePending, found: SuspendFindings, now_ms: int
) -> records.Waitpoint:
    waitpoint = found.bound.get(WaitpointId(pending.waitpoint_id))
    if waitpoint is None:
        raise errors.WaitpointNotFound(f"waitpoint {pending.waitpoint_id} does not exist")
    if waitpoint.state is not records.WaitpointState.PENDING:
        raise errors.WaitpointNotPending(f"waitpoint {waitpoint.waitpoint_id} is {waitpoint.state}")
    if waitpoint.attempt_index != execution.current_attempt_index and not pending.any_attempt:
        raise errors.InvalidWaitpointForExecution(
            f"waitpoint {waitpoint.waitpoint_id} was made by attempt {waitpoint.attempt_index}"
        )
    if is_expired(waitpoint, now_ms):
        raise errors.PendingWaitpointExpired(
            f"waitpoint {waitpoint.waitpoint_id} expired at {waitpoint.expires_at_ms}"
        )
    return waitpoint


def _new_suspension(
    execution: records.Execution, request: SuspendRequest, primary: WaitpointId, now_ms: int
) -> records.Suspension:
    return records.Suspension(
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        suspension_id=request.suspension_id,
        attempt_index=execution.current_attempt_index,
        waitpoint_id=primary,
        reason_code=request.reason_code,
        requested_by=request.requested_by,
        resume_condition=conditions.encode_condition(request.condition),
        resume_policy=msgspec.json.encode(request.resume_policy).decode(),
        timeout_at_ms=request.timeout_at_ms,
        timeout_behavior=request.timeout_behavior,
        continuation_metadata_pointer=request.continuation_metadata_pointer,
        created_at_ms=now_ms,
    )


def _paused(
    subject: Subject, request: SuspendRequest, opened: _Opened, seen: TakenSignals, now_ms: int
) -> Changes:
    suspension = opened.suspension
    names = ", ".join(conditions.referenced_waitpoint_keys(request.condition))
    detail = f"{suspension.reason_code}: {names}" if names else suspension.reason_code
    waits = into(
        Situation.SUSPENDED,
        checks.shorten(detail, bounds.TEXT_BYTES_MAX),
        reason=BLOCKING[suspension.reason_code],
    )
    changes = park(
        subject,
        suspension.suspension_id,
        now_ms,
        waits,
        reason="suspend",
        current_suspension_id=suspension.suspension_id,
        current_waitpoint_id=suspension.waitpoint_id,
        open_waitpoint_count=subject.execution.open_waitpoint_count + len(opened.fresh),
        # What it has taken it gives back should it end unmet.
        keeps_signals=bool(seen.left or seen.signals),
    )
    counted = (seen.counted(each) for each in opened.taken_over)
    return structs.replace(
        changes,
        inserts=(suspension, *opened.fresh),
        updates=(*changes.updates, *counted, *seen.signals),
    )


def _satisfied(subject: Subject, opened: _Opened, seen: TakenSignals, now_ms: int) -> Changes:
    """The record of a pause that never happened; the worker keeps its lease."""
    before = subject.execution
    ended = structs.replace(
        opened.suspension,
        satisfied_at_ms=now_ms,
        closed_at_ms=now_ms,
        close_reason=RESUMED,
        closer_signal_id=seen.closer,
    )
    open_count = before.open_waitpoint_count - len(opened.taken_over)
    after = change(before, now_ms, open_waitpoint_count=open_count, keeps_signals=bool(seen.left))

    def closed(waitpoint: records.Waitpoint) -> records.Waitpoint:
        return structs.replace(
            seen.counted(waitpoint),
            state=records.WaitpointState.CLOSED,
            satisfied_at_ms=now_ms,
            closed_at_ms=now_ms,
            close_reason=RESUMED,
        )

    return Changes(
        inserts=(ended, *map(closed, opened.fresh)),
        updates=(after, *map(closed, opened.taken_over), *seen.signals),
    )
