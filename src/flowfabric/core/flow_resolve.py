"""What the end of one flow member does to others.

`resolve_edges` counts endings into the groups of the executions that wait for
them; `release` lets an execution go whose group has fired: it becomes ready, or is
skipped because what it waits for can no longer happen.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, structs

from flowfabric.core.executions import Timing
from flowfabric.core.flow_joins import count_outcome
from flowfabric.core.flow_records import (
    DependencyState,
    Edge,
    EdgeGroup,
    ExecutionInput,
    GroupState,
)
from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import Execution
from flowfabric.core.situations import HELD_BY_JOIN, Hold, held_by
from flowfabric.core.states import (
    AttemptLifecycle,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)
from flowfabric.core.transitions import (
    NO_CHANGES,
    UNBLOCKED,
    Changes,
    Field,
    Subject,
    change,
    finish,
)

DEPENDENCY_IMPOSSIBLE = "dependency_impossible"
INPUTS_TOO_LARGE = "inputs_too_large"


class Ending(Struct, frozen=True, kw_only=True):
    """How an upstream ended, and what it left."""

    outcome: TerminalOutcome
    replay_count: int = 0
    """Which life of the upstream ended."""
    result: bytes | None = None
    result_encoding: str | None = None


def counts(edge: Edge, ending: Ending) -> bool:
    """Whether an ending is news to an open edge, and not from before its downstream's replay."""
    return (
        edge.dep_state is DependencyState.UNSATISFIED
        and ending.replay_count >= edge.counts_from_replay
    )


class Resolution(Struct, frozen=True, kw_only=True):
    edges: tuple[Edge, ...]
    groups: tuple[EdgeGroup, ...]
    fired: tuple[EdgeGroup, ...]
    """Those of `groups` that fired now."""
    inputs: tuple[ExecutionInput, ...]


def resolve_edges(
    edges: Iterable[Edge],
    groups: Mapping[ExecutionId, EdgeGroup],
    endings: Mapping[ExecutionId, Ending],
    now_ms: int,
) -> Resolution:
    """Resolve applied edges whose upstream is among `endings`; each edge resolves once.

    An ending from before the downstream's replay resolves nothing.
    """
    current = dict(groups)
    resolved: list[Edge] = []
    inputs: list[ExecutionInput] = []
    for edge in edges:
        ending = endings[edge.upstream_id]
        if not counts(edge, ending):
            continue
        before = current[edge.downstream_id]
        current[edge.downstream_id] = count_outcome(before, ending.outcome, now_ms)
        after = _resolved(edge, ending.outcome, now_ms)
        resolved.append(after)
        # Kept for a join that can no longer hold, too: a replay may open it again.
        if (
            after.dep_state is DependencyState.SATISFIED
            and before.group_state is not GroupState.SATISFIED
        ):
            inputs += _input(after, ending)
    changed = tuple(group for key, group in current.items() if group is not groups[key])
    return Resolution(
        edges=tuple(resolved),
        groups=changed,
        fired=tuple(
            group
            for group in changed
            if group.fired_at_ms is not None and groups[group.downstream_id].fired_at_ms is None
        ),
        inputs=tuple(inputs),
    )


def _resolved(edge: Edge, outcome: TerminalOutcome, now_ms: int) -> Edge:
    satisfied = outcome is TerminalOutcome.SUCCESS
    return structs.replace(
        edge,
        dep_state=DependencyState.SATISFIED if satisfied else DependencyState.IMPOSSIBLE,
        resolved_at_ms=now_ms,
        resolved_outcome=outcome,
    )


def _input(edge: Edge, ending: Ending) -> tuple[ExecutionInput, ...]:
    if not edge.data_passing_ref:
        return ()
    assert edge.resolved_at_ms is not None
    return (
        ExecutionInput(
            partition_key=edge.partition_key,
            execution_id=edge.downstream_id,
            edge_id=edge.edge_id,
            name=edge.data_passing_ref,
            value=ending.result,
            value_encoding=ending.result_encoding,
            replaces_payload=edge.replaces_payload,
            resolved_at_ms=edge.resolved_at_ms,
        ),
    )


# Blocking and releasing ------------------------------------------------------


def waits_for_worker(execution: Execution) -> bool:
    """Runnable and held by nobody: only then may dependencies hold it back or let it go."""
    return (
        execution.lifecycle_phase is LifecyclePhase.RUNNABLE
        and execution.ownership_state is OwnershipState.UNOWNED
    )


def holds_back(group: EdgeGroup | None) -> bool:
    """Whether a join keeps its downstream from running. One without edges does not."""
    return group is not None and group.staged > 0 and group.group_state is not GroupState.SATISFIED


def block(execution: Execution, group: EdgeGroup, now_ms: int) -> tuple[Execution, EdgeGroup]:
    """Have the execution wait for its join, from now on or once it waits for a worker again.

    What holds it back until then is kept in the group, unless it is a child it awaits.
    """
    if (
        waits_for_worker(execution)
        and not execution.awaits_child
        and execution.eligibility_state is not EligibilityState.BLOCKED_BY_DEPENDENCIES
    ):
        group = structs.replace(
            group,
            prior_eligibility=execution.eligibility_state,
            prior_blocking_reason=execution.blocking_reason,
            prior_blocking_detail=execution.blocking_detail,
        )
        return change(execution, now_ms, **HELD_BY_JOIN, join_pending=True), group
    return change(execution, now_ms, join_pending=True), group


def release(
    subject: Subject,
    group: EdgeGroup,
    inputs: Sequence[ExecutionInput],
    timing: Timing,
    inputs_bytes_max: int,
) -> Changes:
    """What a fired group does to its downstream.

    One that has ended, or is about to be cancelled, is left alone. Any other gets its
    inputs now, or when the attempt that goes on is over, whichever way it becomes ready.
    """
    execution = subject.execution
    if execution.lifecycle_phase is LifecyclePhase.TERMINAL or execution.cancel_requested:
        return NO_CHANGES
    if group.group_state is GroupState.IMPOSSIBLE:
        return _skip(subject, timing)
    size = sum(len(each.value or b"") for each in inputs)
    if size > inputs_bytes_max:
        return _refuse_inputs(subject, size, inputs_bytes_max, timing)
    fields = _unblocked(execution, group, timing.now_ms) | _payload(inputs)
    return Changes(updates=(change(execution, timing.now_ms, **fields, join_pending=False),))


def _unblocked(execution: Execution, group: EdgeGroup, now_ms: int) -> dict[str, Field]:
    """What becomes of the block by the join: what held the execution back before, or nothing."""
    if not waits_for_worker(execution) or held_by(execution) is not Hold.JOIN:
        return {}
    prior = group.prior_eligibility
    delayed = prior is EligibilityState.NOT_ELIGIBLE_UNTIL_TIME
    due = execution.delay_until_ms is None or execution.delay_until_ms <= now_ms
    if prior in (None, EligibilityState.ELIGIBLE_NOW) or (delayed and due):
        return {**UNBLOCKED, "delay_until_ms": None}
    return {
        "eligibility_state": prior,
        "blocking_reason": group.prior_blocking_reason,
        "blocking_detail": group.prior_blocking_detail or "",
    }


def _payload(inputs: Sequence[ExecutionInput]) -> dict[str, Field]:
    """The newest result that is meant to, as the new input payload."""
    passed = [each for each in inputs if each.replaces_payload and each.value is not None]
    if not passed:
        return {}
    newest = max(passed, key=lambda each: (each.resolved_at_ms, each.edge_id))
    return {"next_input": newest.value, "next_input_encoding": newest.value_encoding}


def _skip(subject: Subject, timing: Timing) -> Changes:
    return finish(
        subject,
        TerminalOutcome.SKIPPED,
        timing.now_ms,
        retention_ms=timing.retention_ms,
        attempt_end=AttemptLifecycle.ENDED_CANCELLED,
        reason=DEPENDENCY_IMPOSSIBLE,
        attempt_failure=DEPENDENCY_IMPOSSIBLE,
        fields=_fenced(subject),
    )


def _fenced(subject: Subject) -> dict[str, Field]:
    """Whoever runs it is fenced at once."""
    return {"lease_epoch": subject.execution.lease_epoch + 1}


def _refuse_inputs(subject: Subject, size: int, bytes_max: int, timing: Timing) -> Changes:
    return finish(
        subject,
        TerminalOutcome.FAILED,
        timing.now_ms,
        retention_ms=timing.retention_ms,
        attempt_end=AttemptLifecycle.ENDED_FAILURE,
        reason=INPUTS_TOO_LARGE,
        attempt_failure=INPUTS_TOO_LARGE,
        fields={
            **_fenced(subject),
            "failure_reason": f"{INPUTS_TOO_LARGE}: the results of its dependencies are {size}"
            f" bytes together, at most {bytes_max} are passed on; have them keep it elsewhere and"
            " return where",
        },
    )
