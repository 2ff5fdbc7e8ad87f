"""Executions that the code of their task no longer fits.

A handler that asks for a new step while stored steps of the same line are left over
would run effects again or leave them out. Its execution is *blocked* instead: parked
before anything runs, with nothing counted against it. It looks again by itself, less
and less often, and at once when a worker starts that serves its kind, since that may
bring code that fits. Or a person accepts the change.

What is accepted is a call as the code makes it: kind, name and number in its line. In its line,
and in all branches like that:

1. Such a call runs if it is new. What was stored when it was accepted and has not been asked for in
   its line by then is given up: it blocks nothing, and returns what it stored if it is asked for
   later. The same in every later run, where the call is found as it was stored.
2. The call has changed the numbers of those after it. So what is stored of its name, from its
   number on, goes to calls with the same arguments alone.
3. A call whose step was given to another is not new, and does not run, whatever is accepted.
"""

import re
from collections.abc import Collection, Iterable
from shlex import quote
from typing import Final, NamedTuple

from flowfabric.core import states
from flowfabric.core.decisions import (
    UNBLOCKED,
    Changes,
    Decision,
    Subject,
    Timing,
    change,
)
from flowfabric.core.events import operator_event
from flowfabric.core.journal import ROOT, MadeCall, StoredCall, siblings_name
from flowfabric.core.leases import Fence, check_fence
from flowfabric.core.parking import already_parked, park
from flowfabric.core.records import Attempt, Execution, Step, StepKind
from flowfabric.core.results import AlreadySatisfied, Changed, Delayed, Marked
from flowfabric.core.situations import Situation, into
from flowfabric.core.steps import accepted_key
from flowfabric.errors import ExecutionNotEligible

BLOCKED_BY_CODE: Final = "blocked_by_code"
"""What marks the attempt of a blocked execution."""
DEPLOY: Final = "deploy code that fits"
LOOK_AGAIN_MS: Final = 60_000
"""How long a blocked execution waits before it looks at the code again; each time twice that."""
LOOK_AGAIN_MS_MAX: Final = 60 * 60 * 1_000

_MARKED: Final = re.compile(r"([#~])(\d+)\+*$")
"""The number at the end of what is accepted. If there is none, it is 1."""


def decide_block(
    subject: Subject,
    fence: Fence,
    step_key: str | None,
    detail: str,
    timing: Timing,
    *,
    advice: str = DEPLOY,
) -> Decision[Delayed]:
    """Set the attempt aside because the code does not fit what is stored.

    `step_key` is the step that must not run, if it is one.
    """
    execution, attempt = subject.execution, subject.attempt
    answer = Delayed(execution_id=execution.execution_id, public_state=states.PublicState.DELAYED)
    if already_parked(subject, fence, BLOCKED_BY_CODE):
        return Decision(answer=answer)
    check_fence(subject, fence, timing.now_ms)
    assert attempt is not None, "an active execution has an attempt"
    changes = park(
        subject,
        BLOCKED_BY_CODE,
        timing.now_ms,
        into(Situation.BLOCKED, _with_advice(execution, step_key, f"{detail}; {advice}")),
        blocked_on=step_key,
        blocked_count=attempt.blocked_count + 1,
        delay_until_ms=timing.now_ms + look_again_ms(attempt),
    )
    return Decision(answer=answer, changes=changes)


def look_again_ms(attempt: Attempt) -> int:
    """How long to wait, by how often this attempt was blocked in a row before."""
    doublings = min(attempt.blocked_count, 30)
    return min(LOOK_AGAIN_MS << doublings, LOOK_AGAIN_MS_MAX)


def _with_advice(execution: Execution, step_key: str | None, detail: str) -> str:
    named = quote(execution.called)
    accept = f"or accept the change: flowfabric accept {named}"
    way_out = "or cancel it" if step_key is None else accept
    return f"{detail}, {way_out}"


def is_blocked(execution: Execution) -> bool:
    """Whether changed code has stopped it: delayed, until an operator or other code helps."""
    return blocked_by_code(execution.lifecycle_phase, execution.blocking_reason)


def blocked_by_code(phase: object, reason: object) -> bool:
    """`is_blocked` where only a part of the execution was read."""
    return (
        phase == states.LifecyclePhase.RUNNABLE and reason == states.BlockingReason.WAITING_FOR_CODE
    )


def decide_release(subject: Subject, timing: Timing) -> Decision[Marked | AlreadySatisfied]:
    """Let a blocked execution look at the code again at once."""
    execution = subject.execution
    if not is_blocked(execution):
        return Decision(answer=AlreadySatisfied(reason="not_blocked"))
    after = change(execution, timing.now_ms, **UNBLOCKED, delay_until_ms=None)
    answer = Marked(execution_id=execution.execution_id, public_state=after.public_state)
    return Decision(answer=answer, changes=Changes(updates=(after,)))


def decide_accept(subject: Subject, accepted: Step | None, timing: Timing) -> Decision[Changed]:
    """Allow the step a blocked execution asked for, and let it run at once. Safe to repeat."""
    execution, attempt = subject.execution, subject.attempt
    answer = Changed(execution_id=execution.execution_id)
    blocked_on = None if attempt is None else attempt.blocked_on
    if blocked_on is None and is_blocked(execution):
        raise ExecutionNotEligible(
            f"{execution.execution_id} cannot be accepted: that allows changed steps to run, and"
            f" changes nothing that is stored. It is blocked: {execution.blocking_detail}"
        )
    if blocked_on is None or execution.lifecycle_phase is not states.LifecyclePhase.RUNNABLE:
        raise ExecutionNotEligible(
            f"{execution.called} is {execution.public_state}: only an execution that changed"
            " code has blocked can accept the change; `flowfabric why` tells what it waits for"
        )
    record = Step(
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        step_key=accepted_key(blocked_on),
        kind=StepKind.ACCEPT,
        attempt_index=execution.current_attempt_index,
        recorded_at_ms=timing.now_ms,
    )
    released = decide_release(subject, timing).changes
    if accepted is not None:
        return Decision(answer=answer, changes=released)
    event = operator_event(execution, "changes_accepted", timing.now_ms, blocked_on)
    return Decision(
        answer=answer,
        changes=Changes(inserts=(record,), updates=released.updates, events=(event,)),
    )


# What was accepted, as a run meets it ------------------------------------------


class _Accepted(NamedTuple):
    mark: str
    number: int
    at_ms: int


class Acceptances:
    """What has been accepted of one run."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[_Accepted]] = {}
        self._keys: set[str] = set()

    def take_in(self, step: Step) -> None:
        what = step.step_key.removeprefix(accepted_key(""))
        marked = _MARKED.search(what)
        name = what if marked is None else what[: marked.start()]
        mark, number = ("#", "1") if marked is None else marked.groups()
        found = self._by_name.setdefault(name, [])
        found.append(_Accepted(mark, int(number), step.recorded_at_ms))
        self._keys.add(what)

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def name(self, line: str, call: MadeCall | StoredCall) -> str:
        """What a person accepts who lets a call run: of another name each time."""
        mark, number = _place(call)
        name = siblings_name(line, call)
        if (mark, number) != ("#", 1) or _MARKED.search(name) or name in self._keys:
            name = f"{name}{mark}{number}"
        while name in self._keys:
            name += "+"
        return name

    def given_up(
        self, line: str, call: MadeCall | StoredCall, stored: Step | None, steps: Iterable[Step]
    ) -> Collection[str] | None:
        """The keys of what is given up where a call is made, and is `stored` now.

        None if the call is not accepted, or was stored before that.
        """
        if not self._by_name:
            return None
        accepted = self._by_name.get(siblings_name(line, call), ())
        times = [each.at_ms for each in accepted if _lets_run(each, line, call, stored)]
        if not times:
            return None
        return [step.step_key for step in steps if step.recorded_at_ms <= max(times)]

    def only_equal(self, line: str, steps: Iterable[tuple[StoredCall, Step]]) -> Collection[str]:
        """The keys of what is stored of a line and is for calls with the same arguments alone."""
        return frozenset(
            kept.key
            for kept, step in steps
            if kept.kind in (StepKind.CALL, StepKind.SUBMIT)
            if any(
                _shifts(each, kept, step)
                for each in self._by_name.get(siblings_name(line, kept), ())
            )
        )


def _lets_run(
    accepted: _Accepted, line: str, call: MadeCall | StoredCall, stored: Step | None
) -> bool:
    """Whether a call runs, or has run, because of what was accepted."""
    if stored is not None and stored.recorded_at_ms < accepted.at_ms:
        return False
    mark, number = _place(call)
    # Branches like this one may come to other numbers.
    return line != ROOT or (mark, accepted.mark) != ("#", "#") or number >= accepted.number


def _shifts(accepted: _Accepted, kept: StoredCall, step: Step) -> bool:
    """Whether the number of a stored call means another call since then."""
    mark, number = _place(kept)
    is_before = step.recorded_at_ms <= accepted.at_ms
    return accepted.mark == mark and number >= accepted.number > 0 and is_before


def _place(call: MadeCall | StoredCall) -> tuple[str, int]:
    """Where it comes in the order of the code; 0 if that is a matter of who comes first."""
    if not call.parallel:
        return "#", call.number
    return "~", -call.after if call.after is not None and call.after < 0 else 0
