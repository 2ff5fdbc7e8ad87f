"""Running ended flow members again."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec import Struct, structs

from flowfabric.core.executions import Timing, decide_replay
from flowfabric.core.flow_joins import count_endings, is_spared
from flowfabric.core.flow_records import (
    CompletionDispatch,
    DependencyState,
    Edge,
    EdgeGroup,
    ExecutionInput,
    FlowRecord,
    FlowState,
    GroupState,
)
from flowfabric.core.flow_resolve import Ending, block, release
from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import Execution
from flowfabric.core.results import Replayed
from flowfabric.core.states import TerminalOutcome
from flowfabric.core.transitions import Changes, Decision, Subject, combine
from flowfabric.errors import FlowAlreadyTerminal

NO_PRIOR: Final[Mapping[str, None]] = MappingProxyType(
    {"prior_eligibility": None, "prior_blocking_reason": None, "prior_blocking_detail": None}
)
"""A replayed execution was held back by nothing before."""


class Reopened(Struct, frozen=True, kw_only=True):
    """A join as it waits again."""

    group: EdgeGroup
    edges: tuple[Edge, ...]
    """Edges that wait again; those that were satisfied stay so."""


def check_replayable(flow: FlowRecord) -> None:
    if flow.public_flow_state is FlowState.CANCELLED:
        raise FlowAlreadyTerminal(f"flow {flow.flow_id} is cancelled: its members stay as they are")


def reopen(
    group: EdgeGroup, edges: Sequence[Edge], endings: Mapping[ExecutionId, Ending]
) -> Reopened:
    """Forget the failures of the join's upstreams, told or not; what they do next counts."""
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
            **NO_PRIOR,
        ),
        edges=tuple(
            _reopened(edge, endings.get(edge.upstream_id))
            for edge in edges
            if edge.dep_state is not DependencyState.SATISFIED
        ),
    )


def _reopened(edge: Edge, ending: Ending | None) -> Edge:
    """The edge as it waits for the upstream's next life, or for this one if that may succeed."""
    counts_from_replay = edge.counts_from_replay
    if ending is not None and ending.outcome is not TerminalOutcome.SUCCESS:
        counts_from_replay = ending.replay_count + 1
    return structs.replace(
        edge,
        dep_state=DependencyState.UNSATISFIED,
        resolved_at_ms=None,
        resolved_outcome=None,
        counts_from_replay=counts_from_replay,
    )


def uncount(
    flow: FlowRecord, execution: Execution, untold: CompletionDispatch | None
) -> FlowRecord:
    """The flow after an ended member came back; one nobody was told of was never counted."""
    if untold is not None or execution.terminal_outcome is TerminalOutcome.NONE:
        return flow
    outcome = execution.terminal_outcome
    spared = is_spared(outcome, execution.cancellation_reason)
    return count_endings(flow, [outcome], by=-1, spared=int(spared))


class MemberJoin(Struct, frozen=True, kw_only=True):
    """What a member's edges mean to its replay."""

    group: EdgeGroup
    reopened: Reopened | None
    """None when the join was satisfied: it stays so, and its inputs are passed on again."""
    inputs: tuple[ExecutionInput, ...] = ()
    inputs_bytes_max: int


def decide_member_replay(
    subject: Subject,
    joined: MemberJoin | None,
    reason: str | None,
    requested_by: str | None,
    timing: Timing,
) -> Decision[Replayed]:
    """Like any replay, but a member with dependencies goes through its join again."""
    decision = decide_replay(subject, reason, requested_by, timing)
    if joined is None:
        return decision
    after = decision.changes.updates[0]
    assert isinstance(after, Execution)
    if joined.reopened is not None:
        return _wait_again(subject, after, joined.reopened, decision, timing)
    group = structs.replace(joined.group, **NO_PRIOR)
    held, group = block(after, group, timing.now_ms)
    released = release(
        structs.replace(subject, execution=held),
        group,
        joined.inputs,
        timing,
        joined.inputs_bytes_max,
    )
    free = released.updates[0]
    assert isinstance(free, Execution)
    return Decision(
        answer=Replayed(public_state=free.public_state),
        changes=combine([decision.changes, released]),
    )


def _wait_again(
    subject: Subject,
    after: Execution,
    reopened: Reopened,
    decision: Decision[Replayed],
    timing: Timing,
) -> Decision[Replayed]:
    waiting, group = block(after, reopened.group, timing.now_ms)
    (event,) = decision.changes.events
    skipped = subject.execution.terminal_outcome is TerminalOutcome.SKIPPED
    details = {"branch": "skipped_flow_member" if skipped else "normal", "groups_reset": 1}
    told = structs.replace(event, details=msgspec.json.encode(details).decode())
    return Decision(
        answer=Replayed(public_state=waiting.public_state),
        changes=Changes(
            updates=(waiting, *decision.changes.updates[1:], group, *reopened.edges),
            events=(told,),
        ),
    )
