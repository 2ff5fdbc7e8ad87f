"""The state of an execution: six independent dimensions and one derived label.

The dimensions are what the engine decides by; `PublicState` is what people see.
The label is a function of three of the dimensions and is computed in one place,
`derive_public_state`, whenever a row is written. No other code chooses it.
"""

from enum import StrEnum
from typing import Final, assert_never


class LifecyclePhase(StrEnum):
    """Where the execution is in its life."""

    SUBMITTED = "submitted"
    RUNNABLE = "runnable"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    TERMINAL = "terminal"


class OwnershipState(StrEnum):
    """Who holds the execution."""

    UNOWNED = "unowned"
    LEASED = "leased"
    LEASE_EXPIRED_RECLAIMABLE = "lease_expired_reclaimable"
    LEASE_REVOKED = "lease_revoked"


class EligibilityState(StrEnum):
    """Whether a runnable execution may be claimed."""

    ELIGIBLE_NOW = "eligible_now"
    NOT_ELIGIBLE_UNTIL_TIME = "not_eligible_until_time"
    BLOCKED_BY_DEPENDENCIES = "blocked_by_dependencies"
    BLOCKED_BY_BUDGET = "blocked_by_budget"
    BLOCKED_BY_QUOTA = "blocked_by_quota"
    BLOCKED_BY_ROUTE = "blocked_by_route"
    BLOCKED_BY_LANE_STATE = "blocked_by_lane_state"
    BLOCKED_BY_OPERATOR = "blocked_by_operator"
    NOT_APPLICABLE = "not_applicable"


class BlockingReason(StrEnum):
    """What the execution waits for."""

    NONE = "none"
    WAITING_FOR_WORKER = "waiting_for_worker"
    WAITING_FOR_RETRY_BACKOFF = "waiting_for_retry_backoff"
    WAITING_FOR_RESUME_DELAY = "waiting_for_resume_delay"
    WAITING_FOR_DELAY = "waiting_for_delay"
    WAITING_FOR_SIGNAL = "waiting_for_signal"
    WAITING_FOR_APPROVAL = "waiting_for_approval"
    WAITING_FOR_CALLBACK = "waiting_for_callback"
    WAITING_FOR_TOOL_RESULT = "waiting_for_tool_result"
    WAITING_FOR_CHILDREN = "waiting_for_children"
    WAITING_FOR_BUDGET = "waiting_for_budget"
    WAITING_FOR_QUOTA = "waiting_for_quota"
    WAITING_FOR_CAPABLE_WORKER = "waiting_for_capable_worker"
    WAITING_FOR_LOCALITY_MATCH = "waiting_for_locality_match"
    PAUSED_BY_OPERATOR = "paused_by_operator"
    PAUSED_BY_POLICY = "paused_by_policy"
    PAUSED_BY_FLOW_CANCEL = "paused_by_flow_cancel"
    WAITING_FOR_CODE = "waiting_for_code"


class TerminalOutcome(StrEnum):
    """How the execution ended; `none` until it has."""

    NONE = "none"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"


class AttemptState(StrEnum):
    """What the execution's current or next attempt is doing."""

    NONE = "none"
    PENDING_FIRST_ATTEMPT = "pending_first_attempt"
    RUNNING_ATTEMPT = "running_attempt"
    ATTEMPT_INTERRUPTED = "attempt_interrupted"
    PENDING_RETRY_ATTEMPT = "pending_retry_attempt"
    PENDING_REPLAY_ATTEMPT = "pending_replay_attempt"
    ATTEMPT_TERMINAL = "attempt_terminal"


class PublicState(StrEnum):
    """The one word people see. `resumable` is understood but never derived."""

    WAITING = "waiting"
    DELAYED = "delayed"
    RATE_LIMITED = "rate_limited"
    WAITING_CHILDREN = "waiting_children"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    RESUMABLE = "resumable"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"


class AttemptLifecycle(StrEnum):
    """The life of one attempt's own record."""

    CREATED = "created"
    STARTED = "started"
    SUSPENDED = "suspended"
    ENDED_SUCCESS = "ended_success"
    ENDED_FAILURE = "ended_failure"
    ENDED_CANCELLED = "ended_cancelled"
    INTERRUPTED_RECLAIMED = "interrupted_reclaimed"

    @property
    def is_terminal(self) -> bool:
        return self not in (
            AttemptLifecycle.CREATED,
            AttemptLifecycle.STARTED,
            AttemptLifecycle.SUSPENDED,
        )


class AttemptType(StrEnum):
    """Why an attempt was made."""

    INITIAL = "initial"
    RETRY = "retry"
    RECLAIM = "reclaim"
    REPLAY = "replay"
    FALLBACK = "fallback"


class LaneState(StrEnum):
    """Whether a lane takes work and hands it out."""

    ACTIVE = "active"
    PAUSED = "paused"
    DRAINING = "draining"
    DISABLED = "disabled"


class FailureClass(StrEnum):
    """What a worker says about a failure."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    INFRA_CRASH = "infra_crash"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


TERMINAL_STATES: Final[frozenset[PublicState]] = frozenset(
    {
        PublicState.COMPLETED,
        PublicState.FAILED,
        PublicState.CANCELLED,
        PublicState.EXPIRED,
        PublicState.SKIPPED,
    }
)


def has_ended(state: PublicState) -> str:
    """That something ended in this state, after its name."""
    was = state in (PublicState.CANCELLED, PublicState.SKIPPED)
    return f"{'was' if was else 'has'} {state}"


_BY_OUTCOME: Final = {
    TerminalOutcome.SUCCESS: PublicState.COMPLETED,
    TerminalOutcome.FAILED: PublicState.FAILED,
    TerminalOutcome.CANCELLED: PublicState.CANCELLED,
    TerminalOutcome.EXPIRED: PublicState.EXPIRED,
    TerminalOutcome.SKIPPED: PublicState.SKIPPED,
    # A row that ended without saying how is damaged; showing it as failed gets it looked at.
    TerminalOutcome.NONE: PublicState.FAILED,
}

_BY_ELIGIBILITY: Final = {
    EligibilityState.ELIGIBLE_NOW: PublicState.WAITING,
    EligibilityState.NOT_ELIGIBLE_UNTIL_TIME: PublicState.DELAYED,
    EligibilityState.BLOCKED_BY_DEPENDENCIES: PublicState.WAITING_CHILDREN,
    EligibilityState.BLOCKED_BY_BUDGET: PublicState.RATE_LIMITED,
    EligibilityState.BLOCKED_BY_QUOTA: PublicState.RATE_LIMITED,
    EligibilityState.BLOCKED_BY_ROUTE: PublicState.WAITING,
    EligibilityState.BLOCKED_BY_LANE_STATE: PublicState.WAITING,
    EligibilityState.BLOCKED_BY_OPERATOR: PublicState.WAITING,
    EligibilityState.NOT_APPLICABLE: PublicState.WAITING,
}


def derive_public_state(
    phase: LifecyclePhase, eligibility: EligibilityState, outcome: TerminalOutcome
) -> PublicState:
    """The label for any combination of dimensions, damaged ones included. Never raises.

    Ownership plays no part: work whose lease expired or was revoked is still `active`
    until someone takes it over.
    """
    match phase:
        case LifecyclePhase.TERMINAL:
            return _BY_OUTCOME[outcome]
        case LifecyclePhase.SUSPENDED:
            return PublicState.SUSPENDED
        case LifecyclePhase.ACTIVE:
            return PublicState.ACTIVE
        case LifecyclePhase.RUNNABLE:
            return _BY_ELIGIBILITY[eligibility]
        case LifecyclePhase.SUBMITTED:
            return PublicState.WAITING
        case _:
            assert_never(phase)
