"""Whether an execution may be handed to a worker, and what keeps it from that.

There is one rule for every way to ready. Whoever creates, retries, delays, resumes,
reclaims, hands back, wakes, replays or promotes an execution says what its own reason to
wait is, if any; `transition.change` then asks here. So an execution whose join is open is
never ready, whichever way it came.

Two facts of the row stand for what other rows say: `join_pending` for the edges into the
execution, and `awaits_child` for the executions it parked itself for. Both change under
the lock of the row.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from flowfabric.core.model import Execution
from flowfabric.core.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)

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
    CANCELLATION = "cancellation"
    """Its cancellation is queued."""
    GATE = "gate"
    """A budget, a quota, a route, its lane or an operator."""
    ENDED = "ended"


HELD_BY_JOIN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "eligibility_state": EligibilityState.BLOCKED_BY_DEPENDENCIES,
        "blocking_reason": BlockingReason.WAITING_FOR_CHILDREN,
        "blocking_detail": "waiting for the executions it depends on",
    }
)


def held_by(execution: Execution) -> Hold:
    """The one reason why the execution is not ready; `NOTHING` if it is."""
    if (
        execution.lifecycle_phase is LifecyclePhase.TERMINAL
        or execution.terminal_outcome is not TerminalOutcome.NONE
    ):
        return Hold.ENDED
    if execution.cancel_requested:
        return Hold.CANCELLATION
    match execution.lifecycle_phase:
        case LifecyclePhase.SUSPENDED:
            return Hold.SIGNAL
        case LifecyclePhase.ACTIVE if execution.ownership_state in LOST_LEASE:
            # Work whose lease was lost needs nobody to release it first.
            return Hold.JOIN if execution.join_pending else Hold.NOTHING
        case LifecyclePhase.ACTIVE:
            return Hold.LEASE
        case LifecyclePhase.RUNNABLE if execution.ownership_state is OwnershipState.UNOWNED:
            return _waiting_for(execution)
        case _:
            return Hold.GATE


def _waiting_for(execution: Execution) -> Hold:
    match execution.eligibility_state:
        case EligibilityState.ELIGIBLE_NOW:
            return Hold.JOIN if execution.join_pending else Hold.NOTHING
        case EligibilityState.NOT_ELIGIBLE_UNTIL_TIME:
            return Hold.TIME
        case EligibilityState.BLOCKED_BY_DEPENDENCIES:
            return Hold.CHILD if execution.awaits_child else Hold.JOIN
        case _:
            return Hold.GATE


def is_ready(execution: Execution) -> bool:
    """Whether `claim` may hand the execution to a worker now."""
    return held_by(execution) is Hold.NOTHING


def takes_payload(execution: Execution) -> bool:
    """Whether a new payload may be put in: not while an attempt goes on, nor after the end.

    One that is parked goes on where it stopped. One whose lease was lost is over.
    """
    goes_on = (
        execution.attempt_state is AttemptState.ATTEMPT_INTERRUPTED
        and execution.ownership_state not in LOST_LEASE
    )
    return not goes_on and held_by(execution) not in (Hold.LEASE, Hold.SIGNAL, Hold.ENDED)


def falls_to_join(execution: Execution) -> bool:
    """Whether nothing but its open join keeps a waiting execution from being ready."""
    return (
        execution.join_pending
        and execution.lifecycle_phase is LifecyclePhase.RUNNABLE
        and execution.ownership_state is OwnershipState.UNOWNED
        and execution.eligibility_state is EligibilityState.ELIGIBLE_NOW
    )
