"""Keeping an execution back from every worker, and letting it go.

The caller gives the reason: a budget or a quota is used up, no registered worker can run it, or
an operator or a policy pauses it. An execution that waits for anything else is refused: that wait
comes first, and the reason may no longer hold once it is over.

What limits hold up is not kept back: it stays ready (`diagnosis.held_up_by_limits`).
"""

from flowfabric import errors
from flowfabric.core import transitions
from flowfabric.core.grants import not_eligible
from flowfabric.core.leases import not_active
from flowfabric.core.records import Execution
from flowfabric.core.results import Blocked, Unblocked
from flowfabric.core.situations import GATE_REASONS, Situation, gated, situation_of
from flowfabric.core.states import BlockingReason, LifecyclePhase


def check_gate_reason(field: str, reason: object) -> BlockingReason:
    if not isinstance(reason, str) or reason not in GATE_REASONS:
        raise errors.InvalidBlockingReason(
            field, f"must be one of {', '.join(GATE_REASONS)}", reason
        )
    return BlockingReason(reason)


def decide_keep_back(
    subject: transitions.Subject, reason: BlockingReason, detail: str, timing: transitions.Timing
) -> transitions.Decision[Blocked]:
    """Keep a waiting execution from every worker. Whatever else it waits for comes first."""
    execution = subject.execution
    if execution.lifecycle_phase is LifecyclePhase.TERMINAL:
        raise not_active(execution)
    situation = situation_of(execution)
    waits = situation in (Situation.WAITING, Situation.RESUMABLE)
    if not (waits or (situation is Situation.GATED and _by_admission(execution))):
        raise not_eligible(execution)
    kept = transitions.change(execution, timing.now_ms, **gated(reason, detail))
    return transitions.Decision(
        answer=Blocked(execution_id=execution.execution_id, reason=reason),
        changes=transitions.Changes(updates=(kept,)),
    )


def decide_let_go(
    subject: transitions.Subject, expected: BlockingReason | None, timing: transitions.Timing
) -> transitions.Decision[Unblocked]:
    """Let an execution go that was kept back, for the reason expected if one is given."""
    execution = subject.execution
    if situation_of(execution) is not Situation.GATED or not _by_admission(execution):
        raise errors.ExecutionNotEligible(
            f"{execution.called} is {execution.public_state} and not kept back"
        )
    if expected not in (None, execution.blocking_reason):
        raise errors.ExecutionNotEligible(
            f"{execution.called} is kept back for {execution.blocking_reason}, not {expected}"
        )
    free = transitions.change(execution, timing.now_ms, **transitions.UNBLOCKED)
    return transitions.Decision(
        answer=Unblocked(execution_id=execution.execution_id),
        changes=transitions.Changes(updates=(free,)),
    )


def _by_admission(execution: Execution) -> bool:
    return execution.blocking_reason in GATE_REASONS
