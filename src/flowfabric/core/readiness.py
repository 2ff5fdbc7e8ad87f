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

from flowfabric.core.records import Execution
from flowfabric.core.situations import (
    ENDED,
    HELD_BY_WORKER,
    RULES,
    Operation,
    Situation,
    into,
    situation_of,
)
from flowfabric.core.states import OwnershipState

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
    return hold


def is_ready(execution: Execution) -> bool:
    """Whether `claim` may hand the execution to a worker now."""
    return held_by(execution) is Hold.NOTHING


def takes_payload(execution: Execution) -> bool:
    """Whether a new payload may be put in: not while an attempt goes on, nor after the end.

    One that is parked goes on where it stopped. One whose lease was lost is over.
    """
    return situation_of(execution) in _TAKES_PAYLOAD


def falls_to_join(execution: Execution) -> bool:
    """Whether nothing but its open join keeps a waiting execution from being ready."""
    if not execution.join_pending:
        return False
    return situation_of(execution) in (Situation.WAITING, Situation.RESUMABLE)
