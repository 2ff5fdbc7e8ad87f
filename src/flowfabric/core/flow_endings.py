"""What the end, the cancellation or the replay of one flow member does to others.

`resolve_edges` counts endings into the groups of the executions that wait for
them; `release` lets an execution go whose group has fired: it becomes ready, or is
skipped because what it waits for can no longer happen.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec
from msgspec import Struct, structs

from flowfabric.core import decisions
from flowfabric.core.bounds import CANCEL_WAIT_MS_MAX
from flowfabric.core.checks import check_choice, check_int
from flowfabric.core.events import Event, EventCategory
from flowfabric.core.executions import decide_replay
from flowfabric.core.flow_joins import count_endings, count_outcome, is_spared
from flowfabric.core.flow_records import (
    CancellationPolicy,
    CompletionDispatch,
    DependencyState,
    Edge,
    ExecutionInput,
    FlowRecord,
    FlowState,
    GroupState,
    JoinRecord,
    PendingCancel,
)
from flowfabric.core.ids import ExecutionId, make_execution_id
from flowfabric.core.records import Execution
from flowfabric.core.results import FlowCancelled, PartiallyCancelled, Replayed, SiblingCancelAction
from flowfabric.core.situations import HELD_BY_JOIN, Hold, held_by
from flowfabric.core.states import (
    AttemptLifecycle,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
)
from flowfabric.errors import FlowAlreadyTerminal, InvalidGraceMs, InvalidInput

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
    groups: tuple[JoinRecord, ...]
    fired: tuple[JoinRecord, ...]
    """The `groups` that fired now."""
    inputs: tuple[ExecutionInput, ...]


def resolve_edges(
    edges: Iterable[Edge],
    groups: Mapping[ExecutionId, JoinRecord],
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
        satisfied = ending.outcome is TerminalOutcome.SUCCESS
        state = DependencyState.SATISFIED if satisfied else DependencyState.IMPOSSIBLE
        resolved.append(
            structs.replace(
                edge, dep_state=state, resolved_at_ms=now_ms, resolved_outcome=ending.outcome
            )
        )
        # Kept for a join that can no longer hold, too: a replay may open it again.
        passes = satisfied and edge.data_passing_ref
        if passes and before.group_state is not GroupState.SATISFIED:
            inputs.append(_input(edge, ending, now_ms))
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


def _input(edge: Edge, ending: Ending, now_ms: int) -> ExecutionInput:
    return ExecutionInput(
        partition_key=edge.partition_key,
        execution_id=edge.downstream_id,
        edge_id=edge.edge_id,
        name=edge.data_passing_ref,
        value=ending.result,
        value_encoding=ending.result_encoding,
        replaces_payload=edge.replaces_payload,
        resolved_at_ms=now_ms,
    )


# Blocking and releasing ------------------------------------------------------


def waits_for_worker(execution: Execution) -> bool:
    """Runnable and not leased: only then may dependencies hold it back or release it."""
    return (
        execution.lifecycle_phase is LifecyclePhase.RUNNABLE
        and execution.ownership_state is OwnershipState.UNOWNED
    )


def holds_back(group: JoinRecord | None) -> bool:
    """Whether a join keeps its downstream from running. One without edges does not."""
    return group is not None and group.staged > 0 and group.group_state is not GroupState.SATISFIED


def block(execution: Execution, group: JoinRecord, now_ms: int) -> tuple[Execution, JoinRecord]:
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
        return decisions.change(execution, now_ms, **HELD_BY_JOIN, join_pending=True), group
    return decisions.change(execution, now_ms, join_pending=True), group


def release(
    subject: decisions.Subject,
    group: JoinRecord,
    inputs: Sequence[ExecutionInput],
    timing: decisions.Timing,
    inputs_bytes_max: int,
) -> decisions.Changes:
    """What a fired group does to its downstream.

    One that has ended, or is about to be cancelled, is left alone. Any other gets its inputs now
    or, while an attempt is open, once that is over.
    """
    execution = subject.execution
    if execution.lifecycle_phase is LifecyclePhase.TERMINAL or execution.cancel_requested:
        return decisions.NO_CHANGES
    if group.group_state is GroupState.IMPOSSIBLE:
        return _end(subject, TerminalOutcome.SKIPPED, DEPENDENCY_IMPOSSIBLE, timing)
    size = sum(len(each.value or b"") for each in inputs)
    if size > inputs_bytes_max:
        return _end(
            subject,
            TerminalOutcome.FAILED,
            INPUTS_TOO_LARGE,
            timing,
            failure_reason=f"{INPUTS_TOO_LARGE}: the results of its dependencies are {size} bytes"
            f" together, at most {inputs_bytes_max} are passed on; have them keep it elsewhere and"
            " return where",
        )
    fields = _unblocked(execution, group, timing.now_ms) | _payload(inputs)
    return decisions.Changes(
        updates=(decisions.change(execution, timing.now_ms, **fields, join_pending=False),)
    )


def _unblocked(execution: Execution, group: JoinRecord, now_ms: int) -> dict[str, decisions.Field]:
    """The columns after the join no longer blocks: the hold it had before, if any."""
    if not waits_for_worker(execution) or held_by(execution) is not Hold.JOIN:
        return {}
    prior = group.prior_eligibility
    delayed = prior is EligibilityState.NOT_ELIGIBLE_UNTIL_TIME
    due = execution.delay_until_ms is None or execution.delay_until_ms <= now_ms
    if prior in (None, EligibilityState.ELIGIBLE_NOW) or (delayed and due):
        return {**decisions.UNBLOCKED, "delay_until_ms": None}
    return {
        "eligibility_state": prior,
        "blocking_reason": group.prior_blocking_reason,
        "blocking_detail": group.prior_blocking_detail or "",
    }


def _payload(inputs: Sequence[ExecutionInput]) -> dict[str, decisions.Field]:
    """The newest result that is meant to, as the new input payload."""
    passed = [each for each in inputs if each.replaces_payload and each.value is not None]
    if not passed:
        return {}
    newest = max(passed, key=lambda each: (each.resolved_at_ms, each.edge_id))
    return {"next_input": newest.value, "next_input_encoding": newest.value_encoding}


def _end(
    subject: decisions.Subject,
    outcome: TerminalOutcome,
    reason: str,
    timing: decisions.Timing,
    **fields: decisions.Field,
) -> decisions.Changes:
    """End an execution that cannot run any more; a worker that has it is fenced at once."""
    failed = outcome is TerminalOutcome.FAILED
    return decisions.finish(
        subject,
        outcome,
        timing.now_ms,
        attempt_end=AttemptLifecycle.ENDED_FAILURE if failed else AttemptLifecycle.ENDED_CANCELLED,
        reason=reason,
        attempt_failure=reason,
        fields={"lease_epoch": subject.execution.lease_epoch + 1, **fields},
    )


# Cancelling a flow: which members go with it, and what the flow remembers of it

FLOW_CANCELLED = "flow_cancelled"
"""The reason members are given when the flow's cancellation named none."""

SHORT_JOIN = "quorum_lacks_edges"
"""The reason for those whose quorum had too few edges when the flow was closed."""

RETRY_MS_MIN = 1_000
RETRY_MS_MAX = 60_000
RETRY_DOUBLINGS_MAX = 6
"""How long to leave a member alone whose cancellation failed: twice as long each time."""

_ALIASES = {"cancel_flow_only": CancellationPolicy.FLOW_ONLY}

_REACH = {
    CancellationPolicy.FLOW_ONLY: 0,
    CancellationPolicy.CANCEL_PENDING: 1,
    CancellationPolicy.CANCEL_ALL: 2,
}


class NoWait(Struct, frozen=True, tag=True):
    """Return as soon as the cancellation is recorded."""


class WaitTimeout(Struct, frozen=True, tag=True):
    """Wait this long for the members to be cancelled."""

    timeout_ms: int


class WaitIndefinite(Struct, frozen=True, tag=True):
    """Wait until the members are cancelled, within the engine's own limit."""


CancelWait = NoWait | WaitTimeout | WaitIndefinite


def check_cancellation_policy(policy: object) -> CancellationPolicy:
    return _ALIASES.get(str(policy)) or check_choice(
        "cancellation_policy", policy, CancellationPolicy
    )


def check_grace(grace_ms: object) -> None:
    """Cancellation has no grace period; the argument is only validated."""
    if grace_ms is None:
        return
    if not isinstance(grace_ms, int) or isinstance(grace_ms, bool) or not 0 <= grace_ms < 2**53:
        raise InvalidGraceMs("grace_ms: must be an integer from 0 to 2^53-1")


def wait_ms(wait: object) -> int | None:
    """How long to wait; none for not at all."""
    match wait:
        case NoWait():
            return None
        case WaitTimeout(timeout_ms=timeout_ms):
            return check_int("wait.timeout_ms", timeout_ms, 0, CANCEL_WAIT_MS_MAX)
        case WaitIndefinite():
            return CANCEL_WAIT_MS_MAX
        case _:
            raise InvalidInput("wait", "must be NoWait, WaitTimeout or WaitIndefinite", wait)


def repeats_cancel(flow: FlowRecord, policy: CancellationPolicy) -> bool:
    """Whether the flow was cancelled before, and its members at least as far as `policy` goes."""
    decided = flow.cancellation_policy
    return decided is not None and _REACH[policy] <= _REACH[decided]


def cancelled_flow(
    flow: FlowRecord, policy: CancellationPolicy, reason: str, now_ms: int
) -> FlowRecord:
    """The flow, closed. A flow closed before keeps its closing time and is cancelled further."""
    first = flow.cancelled_at_ms is None
    return structs.replace(
        flow,
        public_flow_state=FlowState.CANCELLED,
        cancelled_at_ms=now_ms if first else flow.cancelled_at_ms,
        cancel_reason=reason or flow.cancel_reason or "",
        cancellation_policy=policy,
        last_mutation_at_ms=now_ms,
        # A flow whose members had all ended ends again, as cancelled.
        ended_at_ms=None if first else flow.ended_at_ms,
    )


def flow_cancel_event(flow: FlowRecord, member_count: int, now_ms: int) -> Event:
    """Operators' log. An event about a whole flow carries the flow's uuid as its subject."""
    details: dict[str, str | int | None] = {
        "flow_id": flow.flow_id,
        "cancellation_policy": flow.cancellation_policy,
        "reason": flow.cancel_reason,
        "member_count": member_count,
    }
    return Event(
        category=EventCategory.OPERATOR,
        event_type="flow_cancel_requested",
        partition_key=flow.partition_key,
        execution_id=make_execution_id(flow.partition_key, flow.flow_id),
        flow_id=flow.flow_id,
        namespace=flow.namespace,
        details=msgspec.json.encode(details).decode(),
        occurred_at_ms=now_ms,
    )


def postponed(row: PendingCancel, now_ms: int) -> PendingCancel:
    """The row after cancelling its member failed; it waits longer each time."""
    pause_ms = min(RETRY_MS_MAX, RETRY_MS_MIN << min(row.attempts, RETRY_DOUBLINGS_MAX))
    return structs.replace(row, attempts=row.attempts + 1, due_at_ms=now_ms + pause_ms)


def reconciled(group: JoinRecord | None, queued: int, unended: int) -> SiblingCancelAction:
    """What happens to upstreams queued because a join no longer needs them."""
    if not queued:
        return SiblingCancelAction.NO_OP
    if group is None or group.cancel_reason is None:
        return SiblingCancelAction.SREMMED_STALE
    return SiblingCancelAction.NO_OP if unended else SiblingCancelAction.COMPLETED_DRAIN


def all_but(
    header: FlowCancelled, failed: tuple[ExecutionId, ...]
) -> FlowCancelled | PartiallyCancelled:
    """The answer when some members could not be cancelled yet; they stay queued."""
    if not failed:
        return header
    lost = set(failed)
    return PartiallyCancelled(
        cancellation_policy=header.cancellation_policy,
        member_execution_ids=tuple(i for i in header.member_execution_ids if i not in lost),
        failed_member_execution_ids=failed,
    )


# Running ended flow members again -------------------------------------------


NO_PRIOR = MappingProxyType(
    {"prior_eligibility": None, "prior_blocking_reason": None, "prior_blocking_detail": None}
)
"""A replayed execution was held back by nothing before."""


class ReplayedJoin(Struct, frozen=True, kw_only=True):
    """The join of a member that is replayed: open again, or satisfied as before."""

    group: JoinRecord
    reopened: tuple[Edge, ...] | None = None
    """Edges that wait again. None when the join stays satisfied and passes its inputs on again."""
    succeeded: Mapping[ExecutionId, Ending] = {}
    """Upstreams of those edges that count at once."""
    inputs: Sequence[ExecutionInput] = ()


def check_replayable(flow: FlowRecord) -> None:
    if flow.public_flow_state is FlowState.CANCELLED:
        raise FlowAlreadyTerminal(f"flow {flow.flow_id} is cancelled: its members stay as they are")


def reopen(
    group: JoinRecord, edges: Sequence[Edge], endings: Mapping[ExecutionId, Ending]
) -> ReplayedJoin:
    """Forget the failures of the join's upstreams, dispatched or not; what they do next counts."""
    waiting = [edge for edge in edges if edge.dep_state is not DependencyState.SATISFIED]
    return ReplayedJoin(
        group=structs.replace(
            group,
            succeeded=len(edges) - len(waiting),
            failed=0,
            skipped=0,
            group_state=GroupState.PENDING,
            fired_at_ms=None,
            cancel_reason=None,
            **NO_PRIOR,
        ),
        reopened=tuple(_reopened(edge, endings.get(edge.upstream_id)) for edge in waiting),
        succeeded={
            upstream: ending
            for upstream, ending in endings.items()
            if ending.outcome is TerminalOutcome.SUCCESS
        },
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
    """The flow after an ended member was replayed; an ending that was not dispatched was not
    counted.
    """
    if untold is not None or execution.terminal_outcome is TerminalOutcome.NONE:
        return flow
    outcome = execution.terminal_outcome
    spared = is_spared(outcome, execution.cancellation_reason)
    return count_endings(flow, [outcome], by=-1, spared=int(spared))


def decide_member_replay(
    subject: decisions.Subject,
    join: ReplayedJoin | None,
    reason: str | None,
    requested_by: str | None,
    timing: decisions.Timing,
    *,
    inputs_bytes_max: int,
) -> decisions.Decision[Replayed]:
    """Like any replay, but a member with dependencies goes through its join again."""
    decision = decide_replay(subject, reason, requested_by, timing)
    if join is None:
        return decision
    replayed, *others = decision.changes.updates
    assert isinstance(replayed, Execution)
    held, group = block(replayed, structs.replace(join.group, **NO_PRIOR), timing.now_ms)
    if join.reopened is not None:
        (event,) = decision.changes.events
        skipped = subject.execution.terminal_outcome is TerminalOutcome.SKIPPED
        details = {"branch": "skipped_flow_member" if skipped else "normal", "groups_reset": 1}
        changes = decisions.Changes(
            updates=(held, *others, group, *join.reopened),
            events=(structs.replace(event, details=msgspec.json.encode(details).decode()),),
        )
        return decisions.Decision(answer=Replayed(public_state=held.public_state), changes=changes)
    waiting = structs.replace(subject, execution=held)
    released = release(waiting, group, join.inputs, timing, inputs_bytes_max)
    free = released.updates[0]
    assert isinstance(free, Execution)
    return decisions.Decision(
        answer=Replayed(public_state=free.public_state),
        changes=decisions.combine([decision.changes, released]),
    )
