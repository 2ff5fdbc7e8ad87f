"""How executions end.

`finish` is the one terminal transition, whoever causes it: it ends the attempt,
frees the lease, closes the suspension and every waitpoint, drops any claim grant,
sets the time after which the row may be deleted, and appends the completion event.
The end of a flow's member is also queued for its dependents; the flow decides how
long to keep it.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec import structs

from flowfabric.core.decision import Changes
from flowfabric.core.events import LeaseEventType, completion_event, lease_event
from flowfabric.core.flow_records import CompletionDispatch
from flowfabric.core.keeping import kept_ms
from flowfabric.core.records import Attempt, Execution, Suspension, Waitpoint, WaitpointState
from flowfabric.core.situations import BY_OUTCOME, into
from flowfabric.core.states import AttemptLifecycle, AttemptState, OwnershipState, TerminalOutcome
from flowfabric.core.transition import NO_LEASE, Field, Subject, change, final_lease

NOTHING_MORE: Mapping[str, Field] = MappingProxyType({})


def finish(
    subject: Subject,
    outcome: TerminalOutcome,
    now_ms: int,
    *,
    retention_ms: int,
    attempt_end: AttemptLifecycle,
    reason: str,
    attempt_failure: str | None = None,
    attempt_category: str | None = None,
    attempt_fields: Mapping[str, Field] = NOTHING_MORE,
    lease_event_type: LeaseEventType = LeaseEventType.REVOKED,
    fields: Mapping[str, Field] = NOTHING_MORE,
) -> Changes:
    """End the execution with `outcome`.

    `retention_ms` is how long to keep it, unless its policy says otherwise.
    `reason` goes into the lease event when a live lease is released, and onto what
    is closed; `attempt_failure` onto the attempt. `fields` are further changes to
    the row, `attempt_fields` to that of the attempt.
    """
    before = subject.execution
    had_attempt = before.total_attempt_count > 0
    ended_fields: dict[str, Field] = {
        **NO_LEASE,
        **final_lease(before),
        **into(BY_OUTCOME[outcome]),
        "attempt_state": AttemptState.ATTEMPT_TERMINAL if had_attempt else before.attempt_state,
        "delay_until_ms": None,
        "awaits_child": False,
        "attempt_time_left_ms": None,
        "current_suspension_id": None,
        "current_waitpoint_id": None,
        "open_waitpoint_count": 0,
        "keeps_signals": before.keeps_signals or got_signals(subject.suspension),
        "completed_at_ms": now_ms,
        "retain_until_ms": None
        if before.flow_id
        else now_ms + kept_ms(before, outcome, retention_ms),
    }
    after = change(before, now_ms, **(ended_fields | dict(fields)))
    released = (
        (lease_event(before, lease_event_type, now_ms, reason),)
        if before.ownership_state is OwnershipState.LEASED
        else ()
    )
    return Changes(
        inserts=dispatch_of(after, now_ms),
        updates=(
            after,
            *end_attempt(
                subject.attempt,
                attempt_end,
                now_ms,
                attempt_failure,
                attempt_category,
                attempt_fields,
            ),
            *close_suspension(subject.suspension, reason, now_ms),
            *close_waitpoints(subject.waitpoints, reason, now_ms, with_execution=True),
        ),
        deletes=() if subject.grant is None else (subject.grant,),
        events=(*released, completion_event(after, outcome, now_ms)),
    )


def dispatch_of(ended: Execution, now_ms: int) -> tuple[CompletionDispatch, ...]:
    """What tells the dispatcher that a member of a flow has ended."""
    if ended.flow_id is None:
        return ()
    return (
        CompletionDispatch(
            partition_key=ended.partition_key,
            flow_id=ended.flow_id,
            execution_id=ended.execution_id,
            replay_count=ended.replay_count,
            outcome=ended.terminal_outcome,
            enqueued_at_ms=now_ms,
        ),
    )


def end_attempt(
    attempt: Attempt | None,
    end: AttemptLifecycle,
    now_ms: int,
    failure: str | None = None,
    category: str | None = None,
    fields: Mapping[str, Field] = NOTHING_MORE,
) -> tuple[Attempt, ...]:
    """The attempt's last version, or nothing when none is open."""
    if attempt is None or attempt.attempt_state.is_terminal:
        return ()
    return (
        structs.replace(
            attempt,
            attempt_state=end,
            ended_at_ms=now_ms,
            failure_reason=failure,
            failure_category=category,
            **fields,
        ),
    )


def close_suspension(
    suspension: Suspension | None, reason: str, now_ms: int
) -> tuple[Suspension, ...]:
    """The suspension's last version, or nothing when none is open."""
    if suspension is None:
        return ()
    return (structs.replace(suspension, closed_at_ms=now_ms, close_reason=reason),)


def got_signals(suspension: Suspension | None) -> bool:
    """Whether a pause that ends unmet may have signals to give back to later waits."""
    return suspension is not None and suspension.last_signal_at_ms is not None


def close_waitpoints(
    waitpoints: Iterable[Waitpoint], reason: str, now_ms: int, *, with_execution: bool = False
) -> tuple[Waitpoint, ...]:
    return tuple(
        structs.replace(
            waitpoint,
            state=WaitpointState.CLOSED,
            closed_at_ms=now_ms,
            close_reason=reason,
            ended_with_execution=with_execution,
        )
        for waitpoint in waitpoints
    )
