"""The situations an execution can be in, and what each operation does in each of them.

Six columns say where an execution stands; together they make one of the situations named
here. `RULES` is the whole of it as a table: from which situations an operation acts and where
it may lead from there, and with which error it is refused elsewhere. What is in neither list
finds nothing to do. Readiness, the state diagram in the documentation and the test that drives
every situation through every operation follow from this table.

Three facts stand beside the situation. An open join (`join_pending`) keeps whatever would be
ready from being so; a grant (`granted_until_ms`) keeps it for the worker that has it; and a
queued cancellation (`cancel_requested`) keeps it from everything else.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from flowfabric import errors
from flowfabric.core.records import Execution
from flowfabric.core.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)


class Situation(StrEnum):
    """Where an execution stands."""

    WAITING = "waiting"
    """Ready: all it needs for its next attempt is a worker."""
    RESUMABLE = "resumable"
    """Ready: all it needs to continue its attempt is a worker."""
    DELAYED = "delayed"
    """It was submitted to start later."""
    RETRYING = "retrying"
    """An attempt failed; the next one starts later."""
    PARKED = "parked"
    """Its attempt sleeps, or waits for others for a limited time."""
    BLOCKED = "blocked"
    """Changed code stopped its attempt, which tries again from time to time."""
    HELD = "held"
    """It waits for the executions before it in its flow."""
    WAITING_CHILDREN = "waiting_children"
    """Its attempt waits for other executions to end."""
    SUSPENDED = "suspended"
    """Its attempt waits for a signal."""
    GATED = "gated"
    """A budget, a quota, a route, its lane or an operator keeps it back."""
    RUNNING = "running"
    """A worker has it."""
    OVERDUE_LEASE = "overdue_lease"
    """Its worker's lease has ended, and that is not recorded yet."""
    EXPIRED_LEASE = "expired_lease"
    """Its worker's lease has ended: ready for another worker."""
    REVOKED = "revoked"
    """An operator took the lease away: ready for another worker."""
    COMPLETED = "completed"
    """It returned a result."""
    FAILED = "failed"
    """It failed, and is not tried again."""
    CANCELLED = "cancelled"
    """It was cancelled."""
    EXPIRED = "expired"
    """It ran out of time."""
    SKIPPED = "skipped"
    """What it waited for in its flow can no longer happen."""


class Operation(StrEnum):
    """What can happen to an execution."""

    CLAIM = "claim"
    COMPLETE = "complete"
    FAIL = "fail"
    DELAY = "sleep"
    AWAIT = "wait for others"
    WAIT_CHILDREN = "wait for dependencies"
    SUSPEND = "suspend"
    BLOCK = "meet changed code"
    HAND_BACK = "hand back"
    RENEW = "renew"
    SIGNAL = "signal"
    PROMOTE = "time has come"
    WAKE = "others ended"
    RESOLVE_JOIN = "join decided"
    EXPIRE_LEASE = "lease found expired"
    EXPIRE_ATTEMPT = "attempt times out"
    EXPIRE_SUSPENSION = "wait times out"
    EXPIRE = "deadline passes"
    REVOKE = "revoke"
    RESUME = "resume"
    ACCEPT = "accept"
    KEEP_BACK = "keep back"
    LET_GO = "let go"
    REPRIORITISE = "reprioritise"
    REPRIORITISE_ANY = "reprioritise any runnable"
    CANCEL = "cancel"
    REPLAY = "replay"


READY: Final = (
    Situation.WAITING,
    Situation.RESUMABLE,
    Situation.EXPIRED_LEASE,
    Situation.REVOKED,
)
SET_ASIDE: Final = (
    Situation.DELAYED,
    Situation.RETRYING,
    Situation.PARKED,
    Situation.BLOCKED,
    Situation.HELD,
    Situation.WAITING_CHILDREN,
    Situation.SUSPENDED,
    Situation.GATED,
)
HELD_BY_WORKER: Final = (Situation.RUNNING, Situation.OVERDUE_LEASE)
ENDED: Final = (
    Situation.COMPLETED,
    Situation.FAILED,
    Situation.CANCELLED,
    Situation.EXPIRED,
    Situation.SKIPPED,
)
UNFINISHED: Final = (*READY, *SET_ASIDE, *HELD_BY_WORKER)

Error = type[errors.FlowFabricError]


class Rule(Struct, frozen=True):
    """What one operation does."""

    leads: Mapping[Situation, tuple[Situation, ...]]
    """Where it may lead, by the situation it finds."""
    refusals: Mapping[Situation, Error] = {}


def _from(before: Iterable[Situation], *after: Situation) -> dict[Situation, tuple[Situation, ...]]:
    return dict.fromkeys(before, after)


def _by_holder(*after: Situation) -> Rule:
    """For the holder of the lease's fence. An overdue lease is noted on the way."""
    idle = (*READY, *SET_ASIDE, *ENDED)
    lost: dict[Situation, Error] = {
        Situation.OVERDUE_LEASE: errors.LeaseExpired,
        Situation.EXPIRED_LEASE: errors.LeaseExpired,
        Situation.REVOKED: errors.LeaseRevoked,
    }
    return Rule({Situation.RUNNING: after}, dict.fromkeys(idle, errors.ExecutionNotActive) | lost)


def _only_from(
    leads: Mapping[Situation, tuple[Situation, ...]],
    refusal: Error = errors.ExecutionNotEligible,
) -> Rule:
    """For an operation that is refused in every other situation."""
    return Rule(leads, {each: refusal for each in Situation if each not in leads})


_UNOWNED: Final = (Situation.WAITING, Situation.RESUMABLE)
_RUNNABLE: Final = (*_UNOWNED, *(each for each in SET_ASIDE if each is not Situation.SUSPENDED))
_UNABLE: Final = (Situation.SKIPPED, Situation.FAILED)
"""Its join cannot be satisfied any more, or passes on more than is allowed."""

RULES: Final[Mapping[Operation, Rule]] = {
    Operation.CLAIM: Rule(_from(READY, Situation.RUNNING)),
    Operation.COMPLETE: _by_holder(Situation.COMPLETED),
    Operation.FAIL: _by_holder(Situation.RETRYING, Situation.FAILED),
    Operation.DELAY: _by_holder(Situation.PARKED),
    Operation.AWAIT: _by_holder(Situation.WAITING_CHILDREN, Situation.PARKED),
    Operation.WAIT_CHILDREN: _by_holder(Situation.WAITING_CHILDREN, Situation.RESUMABLE),
    Operation.SUSPEND: _by_holder(Situation.SUSPENDED, Situation.RUNNING),
    Operation.BLOCK: _by_holder(Situation.BLOCKED),
    Operation.HAND_BACK: _by_holder(Situation.WAITING),
    Operation.RENEW: _by_holder(Situation.RUNNING),
    Operation.SIGNAL: Rule(
        {each: (each,) for each in UNFINISHED}
        | {Situation.SUSPENDED: (Situation.RESUMABLE, Situation.SUSPENDED)},
        dict.fromkeys(ENDED, errors.TargetNotSignalable),
    ),
    Operation.PROMOTE: Rule(
        _from((Situation.DELAYED, Situation.RETRYING), Situation.WAITING)
        | _from((Situation.PARKED, Situation.BLOCKED), Situation.RESUMABLE)
    ),
    Operation.WAKE: Rule(
        _from((Situation.WAITING_CHILDREN, Situation.PARKED), Situation.RESUMABLE)
    ),
    Operation.RESOLVE_JOIN: Rule(
        {each: (each, *_UNABLE) for each in UNFINISHED}
        | {
            Situation.HELD: (Situation.WAITING, Situation.DELAYED, *_UNABLE),
            Situation.WAITING_CHILDREN: (
                Situation.RESUMABLE,
                Situation.WAITING_CHILDREN,
                *_UNABLE,
            ),
        }
    ),
    Operation.EXPIRE_LEASE: Rule(
        {Situation.OVERDUE_LEASE: (Situation.EXPIRED_LEASE, Situation.FAILED)}
    ),
    Operation.EXPIRE_ATTEMPT: Rule(_from(HELD_BY_WORKER, Situation.RETRYING, Situation.EXPIRED)),
    Operation.EXPIRE_SUSPENSION: Rule(
        _from(
            (Situation.SUSPENDED,),
            Situation.RESUMABLE,
            Situation.SUSPENDED,
            Situation.FAILED,
            Situation.CANCELLED,
            Situation.EXPIRED,
        )
    ),
    Operation.EXPIRE: Rule(_from(UNFINISHED, Situation.EXPIRED)),
    Operation.REVOKE: Rule(
        {
            Situation.RUNNING: (Situation.REVOKED, Situation.FAILED),
            Situation.OVERDUE_LEASE: (Situation.EXPIRED_LEASE, Situation.FAILED),
        }
    ),
    Operation.RESUME: _only_from(
        _from((Situation.SUSPENDED,), Situation.RESUMABLE, Situation.PARKED),
        errors.ExecutionNotSuspended,
    ),
    Operation.ACCEPT: _only_from(_from((Situation.BLOCKED,), Situation.RESUMABLE)),
    Operation.KEEP_BACK: Rule(
        _from((*_UNOWNED, Situation.GATED), Situation.GATED),
        dict.fromkeys(ENDED, errors.ExecutionNotActive)
        | {
            each: errors.ExecutionNotEligible
            for each in UNFINISHED
            if each not in (*_UNOWNED, Situation.GATED)
        },
    ),
    Operation.LET_GO: _only_from(_from((Situation.GATED,), *_UNOWNED)),
    Operation.REPRIORITISE: _only_from({each: (each,) for each in _UNOWNED}),
    Operation.REPRIORITISE_ANY: _only_from({each: (each,) for each in _RUNNABLE}),
    Operation.CANCEL: Rule(
        _from(UNFINISHED, Situation.CANCELLED),
        {each: errors.InvalidInput for each in ENDED if each is not Situation.CANCELLED},
    ),
    Operation.REPLAY: Rule(
        _from(ENDED, Situation.WAITING), dict.fromkeys(UNFINISHED, errors.ExecutionNotTerminal)
    ),
}

BY_OUTCOME: Final = {
    TerminalOutcome.SUCCESS: Situation.COMPLETED,
    TerminalOutcome.FAILED: Situation.FAILED,
    TerminalOutcome.CANCELLED: Situation.CANCELLED,
    TerminalOutcome.EXPIRED: Situation.EXPIRED,
    TerminalOutcome.SKIPPED: Situation.SKIPPED,
    # A row that ended without saying how is damaged; see `derive_public_state`.
    TerminalOutcome.NONE: Situation.FAILED,
}


def _columns(
    phase: LifecyclePhase,
    ownership: OwnershipState,
    eligibility: EligibilityState,
    reason: BlockingReason,
    attempt: AttemptState | None = None,
) -> dict[str, str]:
    columns: dict[str, str] = {
        "lifecycle_phase": phase,
        "ownership_state": ownership,
        "eligibility_state": eligibility,
        "blocking_reason": reason,
    }
    return columns if attempt is None else columns | {"attempt_state": attempt}


def _runnable(
    eligibility: EligibilityState, reason: BlockingReason, attempt: AttemptState | None = None
) -> dict[str, str]:
    unowned = OwnershipState.UNOWNED
    return _columns(LifecyclePhase.RUNNABLE, unowned, eligibility, reason, attempt)


def _active(
    ownership: OwnershipState, reason: BlockingReason, attempt: AttemptState
) -> dict[str, str]:
    no_matter = EligibilityState.NOT_APPLICABLE
    return _columns(LifecyclePhase.ACTIVE, ownership, no_matter, reason, attempt)


_NOW: Final = (EligibilityState.ELIGIBLE_NOW, BlockingReason.WAITING_FOR_WORKER)
_LATER: Final = EligibilityState.NOT_ELIGIBLE_UNTIL_TIME
_OTHERS: Final = (
    EligibilityState.BLOCKED_BY_DEPENDENCIES,
    BlockingReason.WAITING_FOR_CHILDREN,
)
_GOES_ON: Final = AttemptState.ATTEMPT_INTERRUPTED
_OVER: Final = _columns(
    LifecyclePhase.TERMINAL,
    OwnershipState.UNOWNED,
    EligibilityState.NOT_APPLICABLE,
    BlockingReason.NONE,
)
_ROWS: Final[Mapping[Situation, Mapping[str, str]]] = {
    Situation.WAITING: _runnable(*_NOW),
    Situation.RESUMABLE: _runnable(*_NOW, _GOES_ON),
    Situation.DELAYED: _runnable(_LATER, BlockingReason.WAITING_FOR_DELAY),
    Situation.RETRYING: _runnable(
        _LATER, BlockingReason.WAITING_FOR_RETRY_BACKOFF, AttemptState.PENDING_RETRY_ATTEMPT
    ),
    Situation.PARKED: _runnable(_LATER, BlockingReason.WAITING_FOR_DELAY, _GOES_ON),
    Situation.BLOCKED: _runnable(_LATER, BlockingReason.WAITING_FOR_CODE, _GOES_ON),
    Situation.HELD: _runnable(*_OTHERS),
    Situation.WAITING_CHILDREN: _runnable(*_OTHERS, _GOES_ON),
    Situation.SUSPENDED: _columns(
        LifecyclePhase.SUSPENDED,
        OwnershipState.UNOWNED,
        EligibilityState.NOT_APPLICABLE,
        BlockingReason.WAITING_FOR_SIGNAL,
        _GOES_ON,
    ),
    Situation.RUNNING: _active(
        OwnershipState.LEASED, BlockingReason.NONE, AttemptState.RUNNING_ATTEMPT
    ),
    Situation.EXPIRED_LEASE: _active(
        OwnershipState.LEASE_EXPIRED_RECLAIMABLE, BlockingReason.WAITING_FOR_WORKER, _GOES_ON
    ),
    Situation.REVOKED: _active(
        OwnershipState.LEASE_REVOKED, BlockingReason.WAITING_FOR_WORKER, _GOES_ON
    ),
    **{
        situation: _OVER | {"terminal_outcome": outcome}
        for outcome, situation in BY_OUTCOME.items()
        if outcome is not TerminalOutcome.NONE
    },
}
"""The columns of each situation an operation leads to; which attempt is next, it says itself."""


def into(
    situation: Situation, detail: str = "", *, reason: BlockingReason | None = None
) -> dict[str, str]:
    """The columns that put an execution into a situation; `detail` says why, for people.

    `reason` replaces the usual one of a situation that there are several ways into.
    """
    columns = {**_ROWS[situation], "blocking_detail": detail}
    return columns if reason is None else columns | {"blocking_reason": reason}


GATES: Final[Mapping[BlockingReason, EligibilityState]] = {
    BlockingReason.WAITING_FOR_BUDGET: EligibilityState.BLOCKED_BY_BUDGET,
    BlockingReason.WAITING_FOR_QUOTA: EligibilityState.BLOCKED_BY_QUOTA,
    BlockingReason.WAITING_FOR_CAPABLE_WORKER: EligibilityState.BLOCKED_BY_ROUTE,
    BlockingReason.PAUSED_BY_OPERATOR: EligibilityState.BLOCKED_BY_OPERATOR,
    BlockingReason.PAUSED_BY_POLICY: EligibilityState.BLOCKED_BY_LANE_STATE,
}
GATE_REASONS: Final = tuple(GATES)
"""Why an execution can be kept back."""


def gated(reason: BlockingReason, detail: str) -> dict[str, str]:
    """The columns of an execution that is kept back; they do not change which attempt is next."""
    return {**_runnable(GATES[reason], reason), "blocking_detail": detail}


def situation_of(execution: Execution, now_ms: int = 0) -> Situation:
    """The situation of any row, damaged ones included. Without a time no lease is overdue."""
    outcome = execution.terminal_outcome
    phase = execution.lifecycle_phase
    if phase is LifecyclePhase.TERMINAL or outcome is not TerminalOutcome.NONE:
        return BY_OUTCOME[outcome]
    if phase is LifecyclePhase.SUSPENDED:
        return Situation.SUSPENDED
    if phase is LifecyclePhase.ACTIVE:
        return _active_one(execution, now_ms)
    if phase is LifecyclePhase.RUNNABLE and execution.ownership_state is OwnershipState.UNOWNED:
        return _set_aside(execution)
    return Situation.GATED


def _active_one(execution: Execution, now_ms: int) -> Situation:
    match execution.ownership_state:
        case OwnershipState.LEASE_EXPIRED_RECLAIMABLE:
            return Situation.EXPIRED_LEASE
        case OwnershipState.LEASE_REVOKED:
            return Situation.REVOKED
        case _:
            ends_ms = execution.lease_expires_at_ms
            overdue = ends_ms is not None and ends_ms <= now_ms
            return Situation.OVERDUE_LEASE if overdue else Situation.RUNNING


def _set_aside(execution: Execution) -> Situation:
    goes_on = execution.attempt_state is AttemptState.ATTEMPT_INTERRUPTED
    match execution.eligibility_state:
        case EligibilityState.ELIGIBLE_NOW:
            return Situation.RESUMABLE if goes_on else Situation.WAITING
        case EligibilityState.BLOCKED_BY_DEPENDENCIES:
            return Situation.WAITING_CHILDREN if goes_on else Situation.HELD
        case EligibilityState.NOT_ELIGIBLE_UNTIL_TIME if goes_on:
            by_code = execution.blocking_reason is BlockingReason.WAITING_FOR_CODE
            return Situation.BLOCKED if by_code else Situation.PARKED
        case EligibilityState.NOT_ELIGIBLE_UNTIL_TIME:
            retries = execution.attempt_state is AttemptState.PENDING_RETRY_ATTEMPT
            return Situation.RETRYING if retries else Situation.DELAYED
        case _:
            return Situation.GATED


# Whether an execution may be handed to a worker, and what keeps it from that
#
# There is one rule for every way to ready. An operation that creates, retries, delays,
# resumes, reclaims, hands back, wakes, replays or promotes an execution says what its own reason to
# wait is, if any; `decisions.change` then asks here. So an execution whose join is open is
# never ready, whichever way it came.
#
# Two facts of the row stand for what other rows say: `join_pending` for the edges into the
# execution, and `awaits_child` for the executions it parked itself for. Both change under
# the lock of the row.

LOST_LEASE: Final = (OwnershipState.LEASE_EXPIRED_RECLAIMABLE, OwnershipState.LEASE_REVOKED)


class Hold(StrEnum):
    """What an execution waits for: the one thing that will move it."""

    NOTHING = "nothing"
    """Nothing but a worker: it is ready."""
    LEASE = "lease"
    """A worker has it."""
    TIME = "time"
    JOIN = "join"
    """Edges into it that have not resolved."""
    CHILD = "child"
    """The end of an execution it parked itself for."""
    SIGNAL = "signal"
    GRANT = "grant"
    """The worker it was granted to, or the end of the grant."""
    CANCELLATION = "cancellation"
    """Its cancellation is queued."""
    GATE = "gate"
    """A budget, a quota, a route, its lane or an operator."""
    ENDED = "ended"


HELD_BY_JOIN: Final[Mapping[str, str]] = MappingProxyType(
    into(Situation.HELD, "waiting for the executions it depends on")
)


_HOLDS: Final[Mapping[Situation, Hold]] = {
    **dict.fromkeys(RULES[Operation.CLAIM].leads, Hold.NOTHING),
    **dict.fromkeys(HELD_BY_WORKER, Hold.LEASE),
    **dict.fromkeys(RULES[Operation.PROMOTE].leads, Hold.TIME),
    Situation.HELD: Hold.JOIN,
    Situation.WAITING_CHILDREN: Hold.JOIN,
    Situation.SUSPENDED: Hold.SIGNAL,
    Situation.GATED: Hold.GATE,
    **dict.fromkeys(ENDED, Hold.ENDED),
}
_TAKES_PAYLOAD: Final = frozenset(
    {
        Situation.WAITING,
        Situation.DELAYED,
        Situation.RETRYING,
        Situation.HELD,
        Situation.GATED,
        Situation.EXPIRED_LEASE,
        Situation.REVOKED,
    }
)


def held_by(execution: Execution) -> Hold:
    """The one reason why the execution is not ready; `NOTHING` if it is."""
    hold = _HOLDS[situation_of(execution)]
    if hold is Hold.ENDED:
        return hold
    if execution.cancel_requested:
        return Hold.CANCELLATION
    if hold is Hold.NOTHING and execution.join_pending:
        return Hold.JOIN
    if hold is Hold.JOIN and execution.awaits_child:
        return Hold.CHILD
    if hold is Hold.NOTHING and execution.granted_until_ms is not None:
        return Hold.GRANT
    return hold


def resumes(execution: Execution) -> bool:
    """Whether a claim would continue the interrupted attempt."""
    return (
        execution.lifecycle_phase is LifecyclePhase.RUNNABLE
        and execution.attempt_state is AttemptState.ATTEMPT_INTERRUPTED
    )


def is_ready(execution: Execution) -> bool:
    """Whether `claim` may hand the execution to a worker now."""
    return held_by(execution) is Hold.NOTHING


def keeps_grant(execution: Execution) -> bool:
    """Whether a grant can still be used: whatever takes the execution elsewhere ends it."""
    return situation_of(execution) in READY


def takes_payload(execution: Execution) -> bool:
    """Whether its payload may be replaced: not while an attempt is open, nor after the end.

    A parked attempt continues where it stopped; one whose lease was lost is over.
    """
    return situation_of(execution) in _TAKES_PAYLOAD


def falls_to_join(execution: Execution) -> bool:
    """Whether nothing but its open join keeps a waiting execution from being ready."""
    if not execution.join_pending:
        return False
    return situation_of(execution) in (Situation.WAITING, Situation.RESUMABLE)
