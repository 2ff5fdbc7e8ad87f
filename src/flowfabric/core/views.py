"""What readers see of executions and flows: pure views over their records.

A stored value that no operation could have written is corruption, and named as such.
"""

from enum import StrEnum

import msgspec
from msgspec import Struct

from flowfabric.core import flow_joins, flow_records, ids, records, states
from flowfabric.core.changed_code import is_blocked
from flowfabric.core.flow_endings import holds_back
from flowfabric.core.journal import branch_name
from flowfabric.core.policies import parse_policy
from flowfabric.core.situations import Hold, held_by
from flowfabric.errors import Corruption, InvalidInput


class AttemptSummary(Struct, frozen=True, kw_only=True):
    attempt_id: ids.AttemptId
    attempt_index: int


class LeaseSummary(Struct, frozen=True, kw_only=True):
    lease_id: ids.LeaseId
    lease_epoch: int
    attempt_index: int
    worker_instance_id: ids.WorkerInstanceId
    expires_at_ms: int
    last_heartbeat_at_ms: int | None


class KeptSignal(Struct, frozen=True, kw_only=True):
    """A signal that no wait has taken yet."""

    name: str
    signal_id: ids.SignalId
    source: str
    source_type: str
    received_at_ms: int
    payload_bytes: int


class ExecutionSnapshot(Struct, frozen=True, kw_only=True):
    execution_id: ids.ExecutionId
    own_id: str | None
    flow_id: ids.FlowId | None
    parent_execution_id: str | None
    lane_id: ids.LaneId
    namespace: ids.Namespace
    execution_kind: str
    priority: int
    public_state: states.PublicState
    blocked: bool
    """Whether changed code has stopped it. Its public state is `delayed` then, and its
    `blocking_detail` says what does not fit."""
    blocking_reason: states.BlockingReason | None
    blocking_detail: str | None
    current_attempt: AttemptSummary | None
    current_lease: LeaseSummary | None
    current_waitpoint: ids.WaitpointId | None
    created_at_ms: int
    started_at_ms: int | None
    completed_at_ms: int | None
    last_mutation_at_ms: int
    total_attempt_count: int
    retry_count: int
    lease_reclaim_count: int
    replay_count: int
    progress_pct: int | None
    progress_message: str | None
    failure_reason: str | None
    cancellation_reason: str | None
    cancelled_by: str | None
    delay_until_ms: int | None
    deadline_at_ms: int | None
    tags: dict[str, str]
    kept_signals: tuple[KeptSignal, ...] = ()
    """Kept for its next waits, in order, at most `KEPT_SIGNALS_SHOWN_MAX`. Lists leave it empty."""
    kept_signal_count: int = 0
    """How many there are altogether."""


class StateVector(Struct, frozen=True, kw_only=True):
    lifecycle_phase: states.LifecyclePhase
    ownership_state: states.OwnershipState
    eligibility_state: states.EligibilityState
    blocking_reason: states.BlockingReason
    terminal_outcome: states.TerminalOutcome
    attempt_state: states.AttemptState
    public_state: states.PublicState


class ExecutionInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The full state vector; times as decimal text and left out until they are known, as clients of
    the wire expect them."""

    execution_id: ids.ExecutionId
    namespace: ids.Namespace
    lane_id: ids.LaneId
    priority: int
    execution_kind: str
    state_vector: StateVector
    public_state: states.PublicState
    created_at: str
    started_at: str | None = None
    completed_at: str | None = None
    current_attempt_index: int
    flow_id: ids.FlowId | None
    parent_execution_id: str | None
    blocking_detail: str


class ExecutionContext(Struct, frozen=True, kw_only=True):
    """What a worker needs to run an execution it has claimed by id."""

    input_payload: bytes
    payload_encoding: str | None
    execution_kind: str
    tags: dict[str, str]


def snapshot(execution: records.Execution, tags: dict[str, str]) -> ExecutionSnapshot:
    reason = execution.blocking_reason
    return records.view_of(
        ExecutionSnapshot,
        execution,
        flow_id=stored_flow_id(execution),
        lane_id=stored_lane_id(execution.lane_id),
        blocked=is_blocked(execution),
        blocking_reason=None if reason is states.BlockingReason.NONE else reason,
        blocking_detail=execution.blocking_detail or None,
        current_attempt=attempt_summary(execution),
        current_lease=lease_summary(execution),
        current_waitpoint=execution.current_waitpoint_id,
        tags=dict(sorted(tags.items())),
        kept_signals=(),
        kept_signal_count=0,
    )


def kept_signal(signal: records.SignalRecord) -> KeptSignal:
    return KeptSignal(
        name=signal.signal_name,
        signal_id=signal.signal_id,
        source=signal.source_identity,
        source_type=signal.source_type,
        received_at_ms=signal.accepted_at_ms,
        payload_bytes=len(signal.payload or b""),
    )


def attempt_summary(execution: records.Execution) -> AttemptSummary | None:
    if execution.current_attempt_id is None:
        return None
    return AttemptSummary(
        attempt_id=execution.current_attempt_id, attempt_index=execution.current_attempt_index
    )


def lease_summary(execution: records.Execution) -> LeaseSummary | None:
    if execution.worker_instance_id is None or execution.lease_expires_at_ms is None:
        return None
    if execution.lease_id is None:
        raise Corruption(f"lease_id: {execution.execution_id} has a holder and no lease")
    return records.view_of(
        LeaseSummary,
        execution,
        attempt_index=execution.current_attempt_index,
        expires_at_ms=execution.lease_expires_at_ms,
        last_heartbeat_at_ms=execution.lease_last_renewed_at_ms,
    )


def stored_lane_id(lane_id: str) -> ids.LaneId:
    try:
        return ids.parse_lane_id(lane_id)
    except InvalidInput as error:
        raise Corruption(f"a stored lane is none: {error}") from error


def stored_flow_id(execution: records.Execution) -> ids.FlowId | None:
    if execution.flow_id is None:
        return None
    try:
        return ids.FlowId(ids.parse_uuid("flow_id", execution.flow_id))
    except InvalidInput as error:
        raise Corruption(f"{execution.execution_id} is of no flow: {error}") from error


def info(execution: records.Execution) -> ExecutionInfo:
    return records.view_of(
        ExecutionInfo,
        execution,
        state_vector=records.view_of(StateVector, execution),
        created_at=str(execution.created_at_ms),
        started_at=_text(execution.started_at_ms),
        completed_at=_text(execution.completed_at_ms),
    )


CORE_FIELDS = {
    "attempt_index": "current_attempt_index",
    "cancel_reason": "cancellation_reason",
    "completed_at": "completed_at_ms",
    "current_worker_instance_id": "worker_instance_id",
    "terminal_at_ms": "completed_at_ms",
    **{
        name: name
        for name in (
            "attempt_state", "blocking_reason", "cancellation_reason", "cancelled_by",
            "created_at_ms", "current_attempt_index", "current_waitpoint_id", "deadline_at_ms",
            "eligibility_state", "flow_id", "lane_id", "lifecycle_phase", "ownership_state",
            "parent_execution_id", "priority", "public_state",
        )
    },
}  # fmt: skip
"""The names `read_exec_core_fields` serves straight from the record."""


def core_fields(
    execution: records.Execution | None, names: tuple[str, ...], required: tuple[str, ...]
) -> dict[str, str | None]:
    """The named fields as text; names we do not serve, and fields not set, are None."""
    if execution is None:
        return dict.fromkeys(names)
    lists = {
        "required_capabilities": ",".join(required),
        "budget_ids": ",".join(parse_policy(execution.policy).budget_ids),
    }
    return {
        name: lists[name]
        if name in lists
        else _text(getattr(execution, CORE_FIELDS[name]))
        if name in CORE_FIELDS
        else None
        for name in names
    }


def _text(value: object) -> str | None:
    return None if value is None else str(value)


# One execution with all that belongs to it: its steps, its attempts, its children


class StepView(Struct, frozen=True, kw_only=True):
    """What a handler has done: a step with its result, or the error it ended with."""

    step_key: str
    name: str
    branch: str
    """Which of the handler's parallel branches it belongs to; empty for the handler itself."""
    kind: records.StepKind
    result: bytes | None
    """As stored: JSON, unless the app's codec says otherwise."""
    error: str | None
    recorded_at_ms: int
    duration_ms: int | None
    """How long its function ran; None where there is none, as for a sleep."""
    wake_at_ms: int | None
    attempt_index: int


class ChildView(Struct, frozen=True, kw_only=True):
    execution_id: ids.ExecutionId
    own_id: str | None = None
    """What its parent called it, if it gave it an id."""
    execution_kind: str
    public_state: states.PublicState
    created_at_ms: int


class ExecutionDetails(ExecutionSnapshot, frozen=True, kw_only=True):
    """A snapshot, and all that belongs to the execution."""

    steps: tuple[StepView, ...]
    """In the order they were made in. The one whose failure ended the last attempt comes last: it
    is not stored, and the next attempt tries it again."""
    attempts: tuple[records.Attempt, ...]
    """Oldest first; a failed one has its traceback."""
    children: tuple[ChildView, ...]
    """What it submitted and is still stored, oldest first."""


def step_view(step: records.Step) -> StepView:
    return records.view_of(
        StepView,
        step,
        name=step.name or step.step_key,
        branch=branch_name(step.line),
        error=_error(step.failure),
    )


def failed_view(attempt: records.Attempt) -> StepView | None:
    """The step whose failure ended an attempt, as it would look if it were stored."""
    failed = records.failed_step(attempt)
    if failed is None:
        return None
    return records.view_of(
        StepView,
        failed,
        name=failed.name or failed.step_key,
        branch=branch_name(failed.line),
        kind=records.StepKind.CALL,
        result=None,
        recorded_at_ms=attempt.ended_at_ms or attempt.created_at_ms,
        wake_at_ms=None,
        attempt_index=attempt.attempt_index,
    )


def _error(failure: bytes | None) -> str | None:
    """What was stored of a failure, in a line; each kind of step has its own form."""
    if failure is None:
        return None
    try:
        meaning: object = msgspec.json.decode(failure)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return failure.decode(errors="replace")
    if not isinstance(meaning, dict):
        return str(meaning)
    what = meaning.get("name") or meaning.get("public_state") or "failed"
    why = meaning.get("message") or meaning.get("reason") or ""
    return f"{what}: {why}"


def details(
    execution: records.Execution,
    tags: dict[str, str],
    *,
    steps: tuple[records.Step, ...],
    attempts: tuple[records.Attempt, ...],
    children: tuple[ChildView, ...],
) -> ExecutionDetails:
    failed = failed_view(attempts[-1]) if attempts else None
    views = [step_view(step) for step in steps]
    if failed is not None and failed.step_key not in {step.step_key for step in steps}:
        views.append(failed)
    seen = snapshot(execution, tags)
    return records.view_of(
        ExecutionDetails, seen, steps=tuple(views), attempts=attempts, children=children
    )


# What readers see of flows: pure views over their records -------------------

ALL_REQUIRED = "all_required"
CREATED_BY = "engine"


class EdgeSnapshot(Struct, frozen=True, kw_only=True):
    edge_id: ids.EdgeId
    flow_id: ids.FlowId
    upstream_execution_id: ids.ExecutionId
    downstream_execution_id: ids.ExecutionId
    dependency_kind: str
    satisfaction_condition: str
    data_passing_ref: str | None
    edge_state: flow_records.EdgeState
    dep_state: flow_records.DependencyState
    resolved_outcome: states.TerminalOutcome | None
    resolved_at_ms: int | None
    created_at_ms: int
    created_by: str


class EdgeGroupSnapshot(Struct, frozen=True, kw_only=True):
    downstream_execution_id: ids.ExecutionId
    policy: flow_joins.EdgeDependencyPolicy
    total_deps: int
    satisfied_count: int
    failed_count: int
    skipped_count: int
    running_count: int
    group_state: flow_records.GroupState
    fired_at_ms: int | None
    cancel_reason: str | None


class FlowSnapshot(Struct, frozen=True, kw_only=True):
    flow_id: ids.FlowId
    flow_kind: str
    namespace: ids.Namespace
    public_flow_state: flow_records.FlowState
    """`open` or `cancelled`: whether the graph may change."""
    state: flow_records.FlowState
    """How the flow is doing, derived from its members."""
    graph_revision: int
    node_count: int
    edge_count: int
    created_at_ms: int
    last_mutation_at_ms: int
    cancelled_at_ms: int | None
    cancel_reason: str | None
    cancellation_policy: flow_records.CancellationPolicy | None
    ended_at_ms: int | None
    tags: dict[str, str]
    edge_groups: tuple[EdgeGroupSnapshot, ...]
    """All of them, by ascending downstream id."""


class FlowStatus(StrEnum):
    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class FlowListItem(Struct, frozen=True, kw_only=True):
    flow_id: ids.FlowId
    flow_kind: str
    namespace: ids.Namespace
    created_at_ms: int
    status: FlowStatus


class FlowSummary(Struct, frozen=True, kw_only=True):
    """How many members are in which state, counted now."""

    flow_id: ids.FlowId
    total_members: int
    sampled_members: int
    """How many of them were looked at: all."""
    members_completed: int = 0
    members_failed: int = 0
    members_cancelled: int = 0
    members_expired: int = 0
    members_skipped: int = 0
    members_active: int = 0
    members_suspended: int = 0
    members_waiting: int = 0
    members_delayed: int = 0
    members_rate_limited: int = 0
    members_waiting_children: int = 0
    members_spared: int = 0
    """Of the cancelled ones: those that a join no longer needed."""
    public_flow_state: flow_records.FlowState
    last_summary_update_at_ms: int
    """When they were counted."""


class FlowMember(Struct, frozen=True, kw_only=True):
    execution_id: ids.ExecutionId
    execution_kind: str
    public_state: states.PublicState
    blocked: bool = False
    """Whether changed code has stopped it: delayed, until an operator or other code helps."""
    tags: dict[str, str] = {}


class EligibilityStatus(StrEnum):
    NOT_FOUND = "not_found"
    NOT_RUNNABLE = "not_runnable"
    OWNED = "owned"
    TERMINAL = "terminal"
    IMPOSSIBLE = "impossible"
    BLOCKED_BY_DEPENDENCIES = "blocked_by_dependencies"
    ELIGIBLE = "eligible"


def edge_snapshot(edge: flow_records.Edge) -> EdgeSnapshot:
    return records.view_of(
        EdgeSnapshot,
        edge,
        upstream_execution_id=edge.upstream_id,
        downstream_execution_id=edge.downstream_id,
        satisfaction_condition=ALL_REQUIRED,
        data_passing_ref=edge.data_passing_ref or None,
        created_by=CREATED_BY,
    )


def group_snapshot(group: flow_records.JoinRecord) -> EdgeGroupSnapshot:
    return EdgeGroupSnapshot(
        downstream_execution_id=group.downstream_id,
        policy=flow_joins.policy_of(group),
        total_deps=group.staged,
        satisfied_count=group.succeeded,
        failed_count=group.failed,
        skipped_count=group.skipped,
        running_count=group.staged - flow_joins.resolved_count(group),
        group_state=group.group_state,
        fired_at_ms=group.fired_at_ms,
        cancel_reason=group.cancel_reason,
    )


def closing(flow: flow_records.FlowRecord) -> bool:
    """Whether the flow was cancelled, and the ends of its members are not all counted yet."""
    cancelled = flow.public_flow_state is flow_records.FlowState.CANCELLED
    return cancelled and flow.derived_state is flow_records.FlowState.OPEN


def status_of(flow: flow_records.FlowRecord, *, going: bool) -> FlowStatus:
    """Whether it has ended, and how. `going`: members of a closing flow are still running."""
    if closing(flow):
        return FlowStatus.ACTIVE if going else FlowStatus.CANCELLED
    if flow.derived_state is flow_records.FlowState.OPEN:
        return FlowStatus.ACTIVE
    return FlowStatus(flow.derived_state)


def flow_summary(
    flow: flow_records.FlowRecord, members: flow_joins.MemberCounts, now_ms: int
) -> FlowSummary:
    counts = members.by_state
    shown = {f"members_{state}": count for state, count in counts.items()}
    # Understood but never derived; it counts as what it would be.
    waiting = shown.pop(f"members_{states.PublicState.RESUMABLE}", 0)
    shown["members_waiting"] = shown.get("members_waiting", 0) + waiting
    return FlowSummary(
        flow_id=flow.flow_id,
        total_members=sum(counts.values()),
        sampled_members=sum(counts.values()),
        last_summary_update_at_ms=now_ms,
        public_flow_state=flow_joins.derive_flow_state(
            members, cancelled=flow.public_flow_state is flow_records.FlowState.CANCELLED
        ),
        members_spared=members.spared,
        **shown,
    )


def eligibility(
    execution: records.Execution | None, group: flow_records.JoinRecord | None
) -> EligibilityStatus:
    """Whether dependencies let the execution run; the first reason against it counts."""
    if execution is None:
        return EligibilityStatus.NOT_FOUND
    if execution.lifecycle_phase is not states.LifecyclePhase.RUNNABLE:
        return EligibilityStatus.NOT_RUNNABLE
    if execution.ownership_state is not states.OwnershipState.UNOWNED:
        return EligibilityStatus.OWNED
    if execution.terminal_outcome is not states.TerminalOutcome.NONE:
        return EligibilityStatus.TERMINAL
    if group is not None and group.group_state is flow_records.GroupState.IMPOSSIBLE:
        return EligibilityStatus.IMPOSSIBLE
    if holds_back(group) or held_by(execution) is Hold.CHILD:
        return EligibilityStatus.BLOCKED_BY_DEPENDENCIES
    return EligibilityStatus.ELIGIBLE
