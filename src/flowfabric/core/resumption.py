"""How a paused execution comes back, or ends.

`resume` is the one way from suspended to runnable: it closes the suspension and
every waitpoint of it, and leaves the attempt interrupted, so that the next claim
continues the same attempt. Nothing that arrives for the old waitpoints later can
touch the execution: they are closed, and a signal must name an open waitpoint of
the open suspension. What counted for a pause that ended unmet counts for the next
wait of the same name.
"""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec
from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import checks, decisions, records, states
from flowfabric.core.events import operator_event
from flowfabric.core.ids import SignalId, WaitpointKey
from flowfabric.core.policies import DURATION_MAX_MS
from flowfabric.core.results import AlreadySatisfied
from flowfabric.core.situations import Situation, into
from flowfabric.core.waitpoints import is_expired

RESUMED: Final = "resumed"
"""Why a suspension whose condition was met is closed."""
TIMED_OUT_RESUME: Final = "timed_out_auto_resume"
NEVER_COMMITTED: Final = "never_committed"
TRIGGERS: Final = ("signal", "operator", "auto_resume")
OBSERVABLE: Final = (RESUMED, TIMED_OUT_RESUME)
"""Close reasons after which the worker sees the signals."""


class Resumed(Struct, frozen=True, kw_only=True, tag=True):
    public_state: states.PublicState


class ResumePolicy(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """How the execution comes back. Only the delay is acted upon; the rest is kept for readers."""

    resume_target: Literal["runnable"] = "runnable"
    consume_matched_signals: bool = True
    retain_signal_buffer_until_closed: bool = False
    resume_delay_ms: int | None = None
    close_waitpoint_on_resume: bool = True


NORMAL: Final = ResumePolicy()
RESUME_TARGET: Final = NORMAL.resume_target
RESUME_FLAGS: Final = (
    "consume_matched_signals",
    "retain_signal_buffer_until_closed",
    "close_waitpoint_on_resume",
)


def check_resume_policy(policy: object) -> ResumePolicy:
    if not isinstance(policy, ResumePolicy):
        raise errors.InvalidInput("resume_policy", "must be a ResumePolicy", policy)
    if policy.resume_delay_ms is not None:
        checks.check_int(
            "resume_policy.resume_delay_ms", policy.resume_delay_ms, 0, DURATION_MAX_MS
        )
    if policy.resume_target != RESUME_TARGET:
        raise errors.InvalidInput(
            "resume_policy.resume_target", f"must be {RESUME_TARGET}", policy.resume_target
        )
    for flag in RESUME_FLAGS:
        checks.check_bool(f"resume_policy.{flag}", getattr(policy, flag))
    return policy


def stored_policy(suspension: records.Suspension) -> ResumePolicy:
    try:
        return msgspec.json.decode(suspension.resume_policy, type=ResumePolicy)
    except msgspec.DecodeError as error:
        raise errors.Corruption(f"a stored resume policy does not decode: {error}") from error


class SuspensionExpired(Struct, frozen=True, kw_only=True, tag="Expired"):
    behavior_applied: records.TimeoutBehavior


class WaitpointsClosed(Struct, frozen=True, kw_only=True, tag="Closed"):
    """How many waitpoints were closed; none when they were closed before."""

    closed: int


ExpireResult = SuspensionExpired | AlreadySatisfied


def resume(
    subject: decisions.Subject,
    reason: str,
    now_ms: int,
    *,
    delay_ms: int = 0,
    cause: str = "",
    suspension_fields: Mapping[str, decisions.Field] = decisions.NOTHING_MORE,
) -> decisions.Changes:
    """Close the open suspension and make the execution runnable, now or after a delay."""
    before, suspension = subject.execution, subject.suspension
    assert suspension is not None, "only a suspended execution resumes"
    own = tuple(w for w in subject.waitpoints if w.suspension_id == suspension.suspension_id)
    until_ms = now_ms + delay_ms
    timed: dict[str, decisions.Field] = {
        **into(
            Situation.PARKED,
            f"resumes after {delay_ms} ms{cause}",
            reason=states.BlockingReason.WAITING_FOR_RESUME_DELAY,
        ),
        "delay_until_ms": until_ms,
    }
    at_once: dict[str, decisions.Field] = {**into(Situation.RESUMABLE)}
    after = decisions.change(
        before,
        now_ms,
        current_suspension_id=None,
        current_waitpoint_id=None,
        open_waitpoint_count=before.open_waitpoint_count - len(own),
        keeps_signals=before.keeps_signals
        or (reason != RESUMED and decisions.got_signals(suspension)),
        **(timed if delay_ms else at_once),
    )
    (closed,) = decisions.close_suspension(suspension, reason, now_ms)
    closed = structs.replace(closed, **suspension_fields)
    satisfied_at_ms = now_ms if reason == RESUMED else None
    waitpoints = (
        structs.replace(waitpoint, satisfied_at_ms=satisfied_at_ms)
        for waitpoint in decisions.close_waitpoints(own, reason, now_ms)
    )
    return decisions.Changes(updates=(after, closed, *waitpoints))


def check_suspended(subject: decisions.Subject) -> records.Suspension:
    execution = subject.execution
    if (
        execution.lifecycle_phase is not states.LifecyclePhase.SUSPENDED
        or subject.suspension is None
    ):
        raise errors.ExecutionNotSuspended(
            f"{execution.called} is {execution.public_state}, not suspended"
        )
    return subject.suspension


def decide_resume(
    subject: decisions.Subject, trigger: str, delay_ms: int, timing: decisions.Timing
) -> decisions.Decision[Resumed]:
    """Resume whatever the condition says."""
    suspension = check_suspended(subject)
    changes = resume(subject, f"resumed_by_{trigger}", timing.now_ms, delay_ms=delay_ms)
    after = changes.updates[0]
    assert isinstance(after, records.Execution)
    details = {
        "suspension_id": suspension.suspension_id,
        "trigger_type": trigger,
        "resume_delay_ms": delay_ms,
    }
    event = operator_event(after, "resumed", timing.now_ms, msgspec.json.encode(details).decode())
    return decisions.Decision(
        answer=Resumed(public_state=after.public_state),
        changes=structs.replace(changes, events=(event,)),
    )


# Time ---------------------------------------------------------------------------


def decide_expire_suspension(
    subject: decisions.Subject, signal_id: SignalId, timing: decisions.Timing
) -> decisions.Decision[ExpireResult]:
    """Apply the suspension's timeout behaviour, if its time is over.

    `signal_id` names the signal that tells a resumed worker of the timeout.
    """
    execution, suspension = subject.execution, subject.suspension
    if execution.lifecycle_phase is not states.LifecyclePhase.SUSPENDED:
        return decisions.Decision(answer=AlreadySatisfied(reason="not_suspended_cleaned"))
    if suspension is None:
        return decisions.Decision(answer=AlreadySatisfied(reason="no_active_suspension_cleaned"))
    if suspension.timeout_at_ms is None or suspension.timeout_at_ms > timing.now_ms:
        return decisions.Decision(answer=AlreadySatisfied(reason="not_yet_due"))
    behavior = suspension.timeout_behavior or records.TimeoutBehavior.FAIL
    match behavior:
        case records.TimeoutBehavior.AUTO_RESUME:
            changes = _resume_by_timeout(subject, suspension, signal_id, timing.now_ms)
        case records.TimeoutBehavior.ESCALATE:
            changes = _escalate(subject, suspension, timing.now_ms)
        case records.TimeoutBehavior.FAIL:
            changes = _end(subject, behavior, states.TerminalOutcome.FAILED, timing)
        case records.TimeoutBehavior.CANCEL:
            changes = _end(subject, behavior, states.TerminalOutcome.CANCELLED, timing)
        case records.TimeoutBehavior.EXPIRE:
            changes = _end(subject, behavior, states.TerminalOutcome.EXPIRED, timing)
    return decisions.Decision(answer=SuspensionExpired(behavior_applied=behavior), changes=changes)


def _end(
    subject: decisions.Subject,
    behavior: records.TimeoutBehavior,
    outcome: states.TerminalOutcome,
    timing: decisions.Timing,
) -> decisions.Changes:
    why = f"suspension_timeout:{behavior}"
    cancelled = outcome is states.TerminalOutcome.CANCELLED
    fields: dict[str, decisions.Field] = {"failure_reason": why}
    if cancelled:
        fields |= {"cancellation_reason": why, "cancelled_by": "suspension_timeout"}
    return decisions.finish(
        subject,
        outcome,
        timing.now_ms,
        attempt_end=states.AttemptLifecycle.ENDED_CANCELLED
        if cancelled
        else states.AttemptLifecycle.ENDED_FAILURE,
        reason=f"timed_out_{behavior}",
        attempt_failure=why,
        attempt_category="timeout",
        fields=fields,
    )


def _resume_by_timeout(
    subject: decisions.Subject, suspension: records.Suspension, signal_id: SignalId, now_ms: int
) -> decisions.Changes:
    before = subject.execution
    primary = next(
        (w for w in subject.waitpoints if w.waitpoint_id == suspension.waitpoint_id), None
    )
    signal = records.SignalRecord(
        partition_key=before.partition_key,
        execution_id=before.execution_id,
        signal_id=signal_id,
        sequence=before.signal_count,
        waitpoint_id=suspension.waitpoint_id,
        waitpoint_key=primary.waitpoint_key if primary else WaitpointKey(""),
        suspension_id=suspension.suspension_id,
        signal_name="timeout",
        signal_category="system",
        source_type="system",
        source_identity="suspension_timeout",
        observed_effect=records.SignalEffect.SATISFIED,
        satisfier=True,
        target_scope="execution",
        created_at_ms=now_ms,
        accepted_at_ms=now_ms,
        payload_encoding="json",
    )
    counted = structs.replace(before, signal_count=before.signal_count + 1)
    changes = resume(
        structs.replace(subject, execution=counted),
        TIMED_OUT_RESUME,
        now_ms,
        suspension_fields={"closer_signal_id": signal_id},
    )
    return structs.replace(changes, inserts=(signal,))


def _escalate(
    subject: decisions.Subject, suspension: records.Suspension, now_ms: int
) -> decisions.Changes:
    """Escalate: the suspension stays open without a timeout until an operator acts."""
    after = decisions.change(
        subject.execution,
        now_ms,
        **into(
            Situation.SUSPENDED,
            f"suspension timeout at {suspension.timeout_at_ms}: needs an operator",
            reason=states.BlockingReason.PAUSED_BY_OPERATOR,
        ),
    )
    escalated = structs.replace(
        suspension,
        reason_code=records.SuspensionReason.WAITING_FOR_OPERATOR_REVIEW,
        timeout_at_ms=None,
        timeout_behavior=None,
    )
    kept = (
        structs.replace(waitpoint, expires_at_ms=None)
        for waitpoint in subject.waitpoints
        if waitpoint.suspension_id == suspension.suspension_id
    )
    return decisions.Changes(updates=(after, escalated, *kept))


def decide_expire_waitpoints(
    subject: decisions.Subject, timing: decisions.Timing
) -> decisions.Decision[WaitpointsClosed]:
    """Close the pending waitpoints that no suspension took over in time."""
    expired = [w for w in subject.waitpoints if is_expired(w, timing.now_ms)]
    return _close(subject, expired, NEVER_COMMITTED, timing.now_ms)


def decide_close_waitpoint(
    subject: decisions.Subject,
    waitpoint: records.Waitpoint | None,
    reason: str,
    administrative: bool,
    now_ms: int,
) -> decisions.Decision[WaitpointsClosed]:
    """Close one waitpoint to further signals. This never wakes the execution."""
    if waitpoint is None:
        raise errors.WaitpointNotFound("there is no such waitpoint")
    if waitpoint.state is records.WaitpointState.CLOSED:
        return decisions.Decision(answer=WaitpointsClosed(closed=0))
    if waitpoint.state is records.WaitpointState.ACTIVE and not administrative:
        raise errors.WaitpointNotOpen(
            f"waitpoint {waitpoint.waitpoint_id} belongs to an open suspension:"
            " only an operator may close it"
        )
    return _close(subject, [waitpoint], reason, now_ms)


def _close(
    subject: decisions.Subject, waitpoints: list[records.Waitpoint], reason: str, now_ms: int
) -> decisions.Decision[WaitpointsClosed]:
    if not waitpoints:
        return decisions.Decision(answer=WaitpointsClosed(closed=0))
    before = subject.execution
    after = decisions.change(
        before, now_ms, open_waitpoint_count=before.open_waitpoint_count - len(waitpoints)
    )
    return decisions.Decision(
        answer=WaitpointsClosed(closed=len(waitpoints)),
        changes=decisions.Changes(
            updates=(after, *decisions.close_waitpoints(waitpoints, reason, now_ms))
        ),
    )
