"""Running ended flow members again."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct, structs

from flowfabric.core.decision import Changes, Decision
from flowfabric.core.execution import Timing
from flowfabric.core.flow_build import count_endings
from flowfabric.core.flow_model import (
    CompletionDispatch,
    DependencyState,
    Edge,
    EdgeGroup,
    Flow,
    FlowState,
    GroupState,
)
from flowfabric.core.flow_policy import is_spared
from flowfabric.core.flow_resolve import block
from flowfabric.core.model import Execution
from flowfabric.core.operator import decide_replay
from flowfabric.core.results import Replayed
from flowfabric.core.states import EligibilityState, TerminalOutcome
from flowfabric.core.transition import Subject
from flowfabric.errors import FlowAlreadyTerminal


class Reopened(Struct, frozen=True, kw_only=True):
    """A join as it waits again."""

    group: EdgeGroup
    edges: tuple[Edge, ...]
    """Edges that wait again; those that were satisfied stay so."""

    @property
    def unsatisfied(self) -> int:
        return self.group.staged - self.group.succeeded


def check_replayable(flow: Flow) -> None:
    if flow.public_flow_state is FlowState.CANCELLED:
        raise FlowAlreadyTerminal(f"flow {flow.flow_id} is cancelled: its members stay as they are")


def reopen(group: EdgeGroup, edges: Sequence[Edge], now_ms: int) -> Reopened:
    """Forget the failures of the join's upstreams; they count again once they end again."""
    failed = [edge for edge in edges if edge.dep_state is DependencyState.IMPOSSIBLE]
    satisfied = sum(edge.dep_state is DependencyState.SATISFIED for edge in edges)
    return Reopened(
        group=structs.replace(
            group,
            succeeded=satisfied,
            failed=0,
            skipped=0,
            group_state=GroupState.PENDING,
            fired_at_ms=None,
            cancel_reason=None,
            prior_eligibility=EligibilityState.ELIGIBLE_NOW,
            prior_blocking_reason=None,
            prior_blocking_detail=None,
        ),
        edges=tuple(
            structs.replace(
                edge,
                dep_state=DependencyState.UNSATISFIED,
                resolved_at_ms=None,
                resolved_outcome=None,
                reopened_at_ms=now_ms,
            )
            for edge in failed
        ),
    )


def uncount(flow: Flow, execution: Execution, untold: CompletionDispatch | None) -> Flow:
    """The flow after an ended member came back; one nobody was told of was never counted."""
    if untold is not None or execution.terminal_outcome is TerminalOutcome.NONE:
        return flow
    outcome = execution.terminal_outcome
    spared = is_spared(outcome, execution.cancellation_reason)
    return count_endings(flow, [outcome], by=-1, spared=int(spared))


def decide_member_replay(
    subject: Subject,
    reopened: Reopened | None,
    reason: str | None,
    requested_by: str | None,
    timing: Timing,
) -> Decision[Replayed]:
    """Like any replay, but a member whose join is open again waits for it."""
    decision = decide_replay(subject, reason, requested_by, timing)
    if reopened is None:
        return decision
    after, *attempts = decision.changes.updates
    (event,) = decision.changes.events
    assert isinstance(after, Execution)
    waiting, group = block(
        after,
        reopened.group,
        f"{reopened.unsatisfied} dep(s) unsatisfied after replay",
        timing.now_ms,
    )
    skipped = subject.execution.terminal_outcome is TerminalOutcome.SKIPPED
    details = {"branch": "skipped_flow_member" if skipped else "normal", "groups_reset": 1}
    told = structs.replace(event, details=msgspec.json.encode(details).decode())
    return Decision(
        answer=Replayed(public_state=waiting.public_state),
        changes=Changes(updates=(waiting, *attempts, group, *reopened.edges), events=(told,)),
    )
