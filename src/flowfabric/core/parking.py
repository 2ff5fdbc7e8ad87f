"""An attempt put aside: its worker is free, and the same attempt goes on later.

Parked until a time, or until other executions have ended (for code that does not fit, see
`core.changed_code`). What an
execution waits for is marked `awaited`; when a marked execution has ended, a reconciler makes
those that wait for it ready. Waking is a matter of "look again": the handler runs
again, finds the results there are, and parks for the rest.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import structs

from flowfabric.core import states
from flowfabric.core.bounds import TEXT_BYTES_MAX
from flowfabric.core.checks import and_more, shorten
from flowfabric.core.decisions import (
    NO_LEASE,
    UNBLOCKED,
    Changes,
    Decision,
    Field,
    Subject,
    Timing,
    change,
)
from flowfabric.core.events import LeaseEventType, lease_event
from flowfabric.core.executions import repeats
from flowfabric.core.ids import ExecutionId, partition_of
from flowfabric.core.leases import Fence, check_fence
from flowfabric.core.records import Execution, Waiter
from flowfabric.core.results import Delayed, Marked, Moved
from flowfabric.core.situations import RULES, Operation, Situation, into, situation_of
from flowfabric.errors import NotFound

WORKER_DELAY: Final = "worker_delay"
WAITING_CHILDREN: Final = "waiting_children"
PUT_ASIDE: Final = "put aside: "
"""What the detail of a delay begins with whose reason people should know."""
AWAITS_ITS_TURN: Final = (
    "on its last chance after its worker has died; a worker runs one such execution at a time"
)


def already_parked(subject: Subject, fence: Fence | None, marker: str) -> bool:
    """Whether this holder has parked it this way already, and it was not claimed since."""
    return (
        subject.execution.lifecycle_phase is states.LifecyclePhase.RUNNABLE
        and subject.execution.attempt_state is states.AttemptState.ATTEMPT_INTERRUPTED
        and repeats(subject.execution, fence)
        and subject.attempt is not None
        and subject.attempt.suspension_id == marker
    )


def park(
    subject: Subject,
    marker: str,
    now_ms: int,
    aside: Mapping[str, str],
    *,
    reason: str = "",
    blocked_on: str | None = None,
    blocked_count: int = 0,
    **fields: Field,
) -> Changes:
    """Release the lease but keep the attempt open; `marker` says what it waits for.

    `aside` is the situation it is put into.

    The lease event gives `reason`, or the marker. An attempt that parks for anything but
    changed code has passed the place where it was blocked. That is progress, so its worker
    deaths start again at zero.
    """
    before = subject.execution
    assert subject.attempt is not None, "an active execution has an attempt"
    parked: dict[str, Field] = {
        **NO_LEASE,
        **aside,
        "attempt_time_left_ms": time_left(before, now_ms),
        "worker_deaths": 0,
    }
    after = change(before, now_ms, **(parked | fields))
    attempt = structs.replace(
        subject.attempt,
        attempt_state=states.AttemptLifecycle.SUSPENDED,
        suspended_at_ms=now_ms,
        suspension_id=marker,
        blocked_on=blocked_on,
        blocked_count=blocked_count,
    )
    event = lease_event(before, LeaseEventType.REVOKED, now_ms, reason or marker)
    return Changes(updates=(after, attempt), events=(event,))


def time_left(execution: Execution, now_ms: int) -> int | None:
    """What remains of the attempt's timeout: parked time does not count against it."""
    if execution.attempt_deadline_ms is None:
        return None
    return max(1, execution.attempt_deadline_ms - now_ms)


# Until a time ---------------------------------------------------------------


def decide_delay(
    subject: Subject,
    fence: Fence | None,
    delay_until_ms: int,
    timing: Timing,
    *,
    begun: bool = True,
    why: str | None = None,
) -> Decision[Delayed]:
    """Put the attempt aside until a time. A time in the past is due at once.

    An execution that has not `begun` has made no progress: deaths of its workers still count.
    `why` is shown to people who ask why it is not running.
    """
    execution = subject.execution
    answer = Delayed(execution_id=execution.execution_id, public_state=states.PublicState.DELAYED)
    if already_parked(subject, fence, WORKER_DELAY):
        return Decision(answer=answer)
    check_fence(subject, fence, timing.now_ms)
    detail = f"delayed until {delay_until_ms}" if begun else AWAITS_ITS_TURN
    if why is not None:
        detail = shorten(f"{PUT_ASIDE}{why}", TEXT_BYTES_MAX)
    changes = park(
        subject,
        WORKER_DELAY,
        timing.now_ms,
        into(Situation.PARKED, detail),
        delay_until_ms=delay_until_ms,
        worker_deaths=0 if begun else execution.worker_deaths,
    )
    return Decision(answer=answer, changes=changes)


# Until others have ended ----------------------------------------------------


def decide_wait_children(subject: Subject, fence: Fence | None, timing: Timing) -> Decision[Moved]:
    """Put the attempt aside until the executions it depends on have ended.

    If they have, or if it depends on none, it is ready again at once.
    """
    execution = subject.execution
    if already_parked(subject, fence, WAITING_CHILDREN):
        state = execution.public_state
        return Decision(answer=Moved(execution_id=execution.execution_id, public_state=state))
    check_fence(subject, fence, timing.now_ms)
    changes = park(subject, WAITING_CHILDREN, timing.now_ms, into(Situation.RESUMABLE))
    parked = changes.updates[0]
    assert isinstance(parked, Execution)
    answer = Moved(execution_id=execution.execution_id, public_state=parked.public_state)
    return Decision(answer=answer, changes=changes)


def check_awaitable(waiting: Execution | None, awaited: Mapping[ExecutionId, Execution]) -> None:
    """Raise for executions of another namespace: they do not exist for the one that waits."""
    for execution_id, each in sorted(awaited.items()):
        if waiting is not None and each.namespace != waiting.namespace:
            raise NotFound("execution", execution_id)


def decide_await(
    subject: Subject,
    fence: Fence,
    awaited: Mapping[ExecutionId, Execution],
    until_ms: int | None,
    timing: Timing,
) -> Decision[Moved]:
    """Park until any of `awaited` has ended, or until `until_ms` at the latest.

    If one of them has ended already, the execution is ready again at once.
    """
    check_fence(subject, fence, timing.now_ms)
    ended = any(e.lifecycle_phase is states.LifecyclePhase.TERMINAL for e in awaited.values())
    due_ms = timing.now_ms if ended else until_ms
    situation = Situation.WAITING_CHILDREN if due_ms is None else Situation.PARKED
    reason = states.BlockingReason.WAITING_FOR_CHILDREN
    changes = park(
        subject,
        WAITING_CHILDREN,
        timing.now_ms,
        into(situation, _waits_for(list(awaited.values())), reason=reason),
        delay_until_ms=due_ms,
        awaits_child=True,
    )
    marked = tuple(
        change(execution, timing.now_ms, awaited=True)
        for execution in awaited.values()
        if execution.lifecycle_phase is not states.LifecyclePhase.TERMINAL and not execution.awaited
    )
    moved = changes.updates[0]
    assert isinstance(moved, Execution)
    return Decision(
        answer=Moved(execution_id=moved.execution_id, public_state=moved.public_state),
        changes=Changes(updates=(*changes.updates, *marked), events=changes.events),
    )


def new_waiter(awaited: ExecutionId, waiting: ExecutionId) -> Waiter:
    return Waiter(partition_key=partition_of(awaited), execution_id=awaited, waiting=waiting)


SHOWN_MAX: Final = 3


def _waits_for(awaited: Sequence[Execution]) -> str:
    """In the order of the ids: the stores give them in orders of their own."""
    first = sorted(awaited, key=lambda each: each.execution_id)[:SHOWN_MAX]
    shown = [f"{each.execution_kind} {each.called}" for each in first]
    return f"waiting for {and_more(shown, len(awaited))}"


def decide_wake(subject: Subject, timing: Timing) -> Decision[Marked | None]:
    """Make an execution ready that waited for others; nothing to do if it does not wait."""
    execution, attempt = subject.execution, subject.attempt
    waits = (
        situation_of(execution) in RULES[Operation.WAKE].leads
        and execution.awaits_child
        and attempt is not None
        and attempt.suspension_id == WAITING_CHILDREN
    )
    if not waits:
        return Decision(answer=None)
    after = change(execution, timing.now_ms, **UNBLOCKED, delay_until_ms=None, awaits_child=False)
    answer = Marked(execution_id=execution.execution_id, public_state=after.public_state)
    return Decision(answer=answer, changes=Changes(updates=(after,)))
