"""Whom a change wakes: the topics of hints, and which of them concern it.

A hint only saves waiting. Everyone who listens also looks now and then without one.
"""

from collections.abc import Iterable

from flowfabric.core import decisions
from flowfabric.core.events import EventCategory
from flowfabric.core.flow_records import CompletionDispatch
from flowfabric.core.records import Attempt, Execution, Suspension, Waitpoint, WaitpointState
from flowfabric.core.situations import LOST_LEASE
from flowfabric.core.states import LifecyclePhase, OwnershipState, TerminalOutcome
from flowfabric.engine.gates import gated_routes
from flowfabric.store import base, hints

DUE_HINT_WITHIN_MS = 5_000
"""Anything due sooner than this wakes the reconcilers, which look at least this often."""

COMPLETION_TOPIC = "completion"
DISPATCH_TOPIC = f"{hints.ANYBODY}dispatch"
MEMBER_CANCEL_TOPIC = "member_cancel"
DUE_TOPIC = "due"
LOST_TOPIC = "lost"
ATTEMPT_TOPIC = "attempt"
"""An attempt ended otherwise than by completing its execution."""
EVENT_TOPIC = "event"
"""Something was logged that is not about a lease alone: of those there are many."""


def ready_topic(lane_id: str) -> str:
    return f"ready:{lane_id}"


def topics_after(
    *,
    lanes: Iterable[str] = (),
    ended: bool = False,
    awaited: bool = False,
    in_flow: bool = False,
    due_in_ms: int | None = None,
) -> set[str]:
    """Which topics a change of executions concerns: the rule for rows and for set-based statements.

    Workers of `lanes`, where something may be claimed now; those who wait for an end, in
    other runs (`awaited`) and flows too; reconcilers, if time does something to them soon.
    """
    topics = {ready_topic(lane_id) for lane_id in lanes}
    if ended:
        topics.add(COMPLETION_TOPIC)
    if ended and in_flow:
        topics.add(DISPATCH_TOPIC)
    if (ended and awaited) or (due_in_ms is not None and due_in_ms <= DUE_HINT_WITHIN_MS):
        topics.add(DUE_TOPIC)
    return topics


def hint_about(tx: base.Saving, changes: decisions.Changes, now_ms: int) -> None:
    """Wake workers for what became ready, waiters for what ended, reconcilers for what is due."""
    topics: set[str] = set()
    if any(event.category is not EventCategory.LEASE for event in changes.events):
        topics.add(EVENT_TOPIC)
    for record in (*changes.inserts, *changes.updates):
        match record:
            case Execution():
                topics |= _topics_of(record, now_ms)
            case Suspension() | Waitpoint():
                topics |= topics_after(due_in_ms=_open_until_ms(record) - now_ms)
            case CompletionDispatch():
                topics.add(DISPATCH_TOPIC)
            case Attempt() if record.attempt_state.is_terminal:
                topics.add(ATTEMPT_TOPIC)
    for topic in topics:
        tx.hint(topic)


def hint_locked(tx: base.Saving, executions: Iterable[Execution]) -> None:
    """Wake workers for ready executions that are locked here: claims pass them by until then."""
    for lane_id in {execution.lane_id for execution in executions if execution.ready}:
        tx.hint(ready_topic(lane_id))


def hint_if_soon(tx: base.Saving, due_at_ms: int | None, now_ms: int) -> None:
    """Wake the reconcilers if something is due before they would look anyway."""
    for topic in topics_after(due_in_ms=None if due_at_ms is None else due_at_ms - now_ms):
        tx.hint(topic)


def _topics_of(execution: Execution, now_ms: int) -> set[str]:
    gated = execution.route_id in gated_routes
    leased = execution.ownership_state is OwnershipState.LEASED
    ended = execution.lifecycle_phase is LifecyclePhase.TERMINAL
    topics = topics_after(
        # A slot that a gated execution frees may be room for another one.
        lanes=[execution.lane_id] if execution.ready or (gated and not leased) else (),
        ended=ended,
        awaited=execution.awaited,
        due_in_ms=None if ended else due_at_ms(execution) - now_ms,
    )
    return topics | {LOST_TOPIC} if taken_away(execution) else topics


def taken_away(execution: Execution) -> bool:
    """Whether a worker may still be running an execution that it no longer owns."""
    return execution.ownership_state in LOST_LEASE or (
        execution.total_attempt_count > 0
        and execution.terminal_outcome in (TerminalOutcome.CANCELLED, TerminalOutcome.EXPIRED)
    )


_NEVER_MS = 2**62


def due_at_ms(execution: Execution) -> int:
    """When time will next do something to the execution."""
    times = (
        execution.delay_until_ms,
        execution.granted_until_ms,
        execution.lease_expires_at_ms,
        execution.attempt_deadline_ms,
        execution.deadline_at_ms,
    )
    return min((t for t in times if t is not None), default=_NEVER_MS)


def _open_until_ms(record: Suspension | Waitpoint) -> int:
    """When time will close what is still open."""
    if isinstance(record, Suspension):
        until_ms = record.timeout_at_ms if record.closed_at_ms is None else None
    else:
        until_ms = record.expires_at_ms if record.state is WaitpointState.PENDING else None
    return _NEVER_MS if until_ms is None else until_ms
