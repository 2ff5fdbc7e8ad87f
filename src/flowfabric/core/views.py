"""What readers see of executions and flows: pure views over their records.

A stored value that no operation could have written is corruption, and named as such.
"""

from enum import StrEnum

import msgspec
from msgspec import Struct

from flowfabric.core import flow_joins
from flowfabric.core.changed_code import is_blocked
from flowfabric.core.flow_endings import holds_back
from flowfabric.core.flow_records import (
    CancellationPolicy,
    DependencyState,
    Edge,
    EdgeGroup,
    EdgeState,
    FlowRecord,
    FlowState,
    GroupState,
)
from flowfabric.core.ids import (
    AttemptId,
    EdgeId,
    ExecutionId,
    FlowId,
    LaneId,
    LeaseId,
    Namespace,
    SignalId,
    WaitpointId,
    WorkerInstanceId,
    parse_lane_id,
    parse_uuid,
)
from flowfabric.core.journal import branch_name
from flowfabric.core.policies import parse_policy
from flowfabric.core.records import Attempt, Execution, SignalRecord, Step, StepKind, failed_step
from flowfabric.core.situations import Hold, held_by
from flowfabric.core.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.errors import Corruption, InvalidInput


class AttemptSummary(Struct, frozen=True, kw_only=True):
    attempt_id: AttemptId
    attempt_index: int


class LeaseSummary(Struct, frozen=True, kw_only=True):
    lease_id: LeaseId
    lease_epoch: int
    attempt_index: int
    worker_instance_id: WorkerInstanceId
    expires_at_ms: int
    last_heartbeat_at_ms: int | None


class KeptSignal(Struct, frozen=True, kw_only=True):
    """A signal that no wait has taken yet."""

    name: str
    signal_id: SignalId
    source: str
    source_type: str
    received_at_ms: int
    payload_bytes: int


class ExecutionSnapshot(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    own_id: str | None
    flow_id: FlowId | None
    parent_execution_id: str | None
    lane_id: LaneId
    namespace: Namespace
    execution_kind: str
    priority: int
    public_state: PublicState
    blocked: bool
    """Whether changed code has stopped it. Its public state is `delayed` then, and its
    `blocking_detail` says what does not fit."""
    blocking_reason: BlockingReason | None
    blocking_detail: str | None
    current_attempt: AttemptSummary | None
    current_lease: LeaseSummary | None
    current_waitpoint: WaitpointId | None
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
    lifecycle_phase: LifecyclePhase
    ownership_state: OwnershipState
    eligibility_state: EligibilityState
    blocking_reason: BlockingReason
    terminal_outcome: TerminalOutcome
    attempt_state: AttemptState
    public_state: PublicState


class ExecutionInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The full state vector; times as decimal text and left out until they are known, as clients of
    the wire expect them."""

    execution_id: ExecutionId
    namespace: Namespace
    lane_id: LaneId
    priority: int
    execution_kind: str
    state_vector: StateVector
    public_state: PublicState
    created_at: str
    started_at: str | None = None
    completed_at: str | None = None
    current_attempt_index: int
    flow_id: FlowId | None
    parent_execution_id: str | None
    blocking_detail: str


class ExecutionContext(Struct, frozen=True, kw_only=True):
    """What a worker needs to run an execution it has claimed by id."""

    input_payload: bytes
    payload_encoding: str | None
    execution_kind: str
    tags: dict[str, str]


def snapshot(execution: Execution, tags: dict[str, str]) -> ExecutionSnapshot:
    shared = {
        name: getattr(execution, name)
        for name in ExecutionSnapshot.__struct_fields__
        if name in Execution.__struct_fields__
    }
    reason = execution.blocking_reason
    return ExecutionSnapshot(
        **shared
        | {
            "flow_id": stored_flow_id(execution),
            "lane_id": stored_lane_id(execution.lane_id),
            "blocked": is_blocked(execution),
            "blocking_reason": None if reason is BlockingReason.NONE else reason,
            "blocking_detail": execution.blocking_detail or None,
            "current_attempt": attempt_summary(execution),
            "current_lease": lease_summary(execution),
            "current_waitpoint": execution.current_waitpoint_id,
            "tags": dict(sorted(tags.items())),
        }
    )


def kept_signal(signal: SignalRecord) -> KeptSignal:
    return KeptSignal(
        name=signal.signal_name,
        signal_id=signal.signal_id,
        source=signal.source_identity,
        source_type=signal.source_type,
        received_at_ms=signal.accepted_at_ms,
        payload_bytes=len(signal.payload or b""),
    )


def attempt_summary(execution: Execution) -> AttemptSummary | None:
    if execution.current_attempt_id is None:
        return None
    return AttemptSummary(
        attempt_id=execution.current_attempt_id, attempt_index=execution.current_attempt_index
    )


def lease_summary(execution: Execution) -> LeaseSummary | None:
    if execution.worker_instance_id is None or execution.lease_expires_at_ms is None:
        return None
    if execution.lease_id is None:
        raise Corruption(f"lease_id: {execution.execution_id} has a holder and no lease")
    return LeaseSummary(
        lease_id=execution.lease_id,
        lease_epoch=execution.lease_epoch,
        attempt_index=execution.current_attempt_index,
        worker_instance_id=execution.worker_instance_id,
        expires_at_ms=execution.lease_expires_at_ms,
        last_heartbeat_at_ms=execution.lease_last_renewed_at_ms,
    )


def stored_lane_id(lane_id: str) -> LaneId:
    try:
        return parse_lane_id(lane_id)
    except InvalidInput as error:
        raise Corruption(f"a stored lane is none: {error}") from error


def stored_flow_id(execution: Execution) -> FlowId | None:
    if execution.flow_id is None:
        return None
    try:
        return FlowId(parse_uuid("flow_id", execution.flow_id))
    except InvalidInput as error:
        raise Corruption(f"{execution.execution_id} is of no flow: {error}") from error


def info(execution: Execution) -> ExecutionInfo:
    return ExecutionInfo(
        execution_id=execution.execution_id,
        namespace=execution.namespace,
        lane_id=execution.lane_id,
        priority=execution.priority,
        execution_kind=execution.execution_kind,
        state_vector=StateVector(
            lifecycle_phase=execution.lifecycle_phase,
            ownership_state=execution.ownership_state,
            eligibility_state=execution.eligibility_state,
            blocking_reason=execution.blocking_reason,
            terminal_outcome=execution.terminal_outcome,
            attempt_state=execution.attempt_state,
            public_state=execution.public_state,
        ),
        public_state=execution.public_state,
        created_at=str(execution.created_at_ms),
        started_at=_text(execution.started_at_ms),
        completed_at=_text(execution.completed_at_ms),
        current_attempt_index=execution.current_attempt_index,
        flow_id=execution.flow_id,
        parent_execution_id=execution.parent_execution_id,
        blocking_detail=execution.blocking_detail,
    )


CORE_FIELDS = {
    "attempt_index": "current_attempt_index",
    "blocking_reason": "blocking_reason",
    "cancel_reason": "cancellation_reason",
    "cancellation_reason": "cancellation_reason",
    "cancelled_by": "cancelled_by",
    "completed_at": "completed_at_ms",
    "created_at_ms": "created_at_ms",
    "current_attempt_index": "current_attempt_index",
    "current_waitpoint_id": "current_waitpoint_id",
    "current_worker_instance_id": "worker_instance_id",
    "deadline_at_ms": "deadline_at_ms",
    "eligibility_state": "eligibility_state",
    "flow_id": "flow_id",
    "attempt_state": "attempt_state",
    "lane_id": "lane_id",
    "lifecycle_phase": "lifecycle_phase",
    "ownership_state": "ownership_state",
    "parent_execution_id": "parent_execution_id",
    "priority": "priority",
    "public_state": "public_state",
    "terminal_at_ms": "completed_at_ms",
}
"""The names `read_exec_core_fields` serves straight from the record."""


def core_fields(
    execution: Execution | None, names: tuple[str, ...], required: tuple[str, ...]
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
    kind: StepKind
    result: bytes | None
    """As stored: JSON, unless the app's codec says otherwise."""
    error: str | None
    recorded_at_ms: int
    duration_ms: int | None
    """How long its function ran; None where there is none, as for a sleep."""
    wake_at_ms: int | None
    attempt_index: int


class ChildView(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    execution_kind: str
    public_state: PublicState
    created_at_ms: int


class ExecutionDetails(ExecutionSnapshot, frozen=True, kw_only=True):
    """A snapshot, and all that belongs to the execution."""

    steps: tuple[StepView, ...]
    """In the order they were made in. The one whose failure ended the last attempt comes last: it
    is not stored, and the next attempt tries it again."""
    attempts: tuple[Attempt, ...]
    """Oldest first; a failed one has its traceback."""
    children: tuple[ChildView, ...]
    """What it submitted and is still stored, oldest first."""


def step_view(step: Step) -> StepView:
    return StepView(
        step_key=step.step_key,
        name=step.name or step.step_key,
        branch=branch_name(step.line),
        kind=step.kind,
        result=step.result,
        error=_error(step.failure),
        recorded_at_ms=step.recorded_at_ms,
        duration_ms=step.duration_ms,
        wake_at_ms=step.wake_at_ms,
        attempt_index=step.attempt_index,
    )


def failed_view(attempt: Attempt) -> StepView | None:
    """The step whose failure ended an attempt, as it would look if it were stored."""
    failed = failed_step(attempt)
    if failed is None:
        return None
    return StepView(
        step_key=failed.step_key,
        name=failed.name or failed.step_key,
        branch=branch_name(failed.line),
        kind=StepKind.CALL,
        result=None,
        error=failed.error,
        recorded_at_ms=attempt.ended_at_ms or attempt.created_at_ms,
        duration_ms=failed.duration_ms,
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
    execution: Execution,
    tags: dict[str, str],
    *,
    steps: tuple[Step, ...],
    attempts: tuple[Attempt, ...],
    children: tuple[ChildView, ...],
) -> ExecutionDetails:
    seen = snapshot(execution, tags)
    failed = failed_view(attempts[-1]) if attempts else None
    stored = {step.step_key for step in steps}
    shared = {name: getattr(seen, name) for name in ExecutionSnapshot.__struct_fields__}
    return ExecutionDetails(
        **shared,
        steps=(
            *(step_view(step) for step in steps),
            *([failed] if failed is not None and failed.step_key not in stored else ()),
        ),
        attempts=attempts,
        children=children,
    )


# What readers see of flows: pure views over their records -------------------

ALL_REQUIRED = "all_required"
CREATED_BY = "engine"


class EdgeSnapshot(Struct, frozen=True, kw_only=True):
    edge_id: EdgeId
    flow_id: FlowId
    upstream_execution_id: ExecutionId
    downstream_execution_id: ExecutionId
    dependency_kind: str
    satisfaction_condition: str
    data_passing_ref: str | None
    edge_state: EdgeState
    dep_state: DependencyState
    resolved_outcome: TerminalOutcome | None
    resolved_at_ms: int | None
    created_at_ms: int
    created_by: str


class EdgeGroupSnapshot(Struct, frozen=True, kw_only=True):
    downstream_execution_id: ExecutionId
    policy: flow_joins.EdgeDependencyPolicy
    total_deps: int
    satisfied_count: int
    failed_count: int
    skipped_count: int
    running_count: int
    group_state: GroupState
    fired_at_ms: int | None
    cancel_reason: str | None


class FlowSnapshot(Struct, frozen=True, kw_only=True):
    flow_id: FlowId
    flow_kind: str
    namespace: Namespace
    public_flow_state: FlowState
    """`open` or `cancelled`: whether the graph may change."""
    state: FlowState
    """How the flow is doing, derived from its members."""
    graph_revision: int
    node_count: int
    edge_count: int
    created_at_ms: int
    last_mutation_at_ms: int
    cancelled_at_ms: int | None
    cancel_reason: str | None
    cancellation_policy: CancellationPolicy | None
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
    flow_id: FlowId
    flow_kind: str
    namespace: Namespace
    created_at_ms: int
    status: FlowStatus


class FlowSummary(Struct, frozen=True, kw_only=True):
    """How many members are in which state, counted now."""

    flow_id: FlowId
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
    public_flow_state: FlowState
    last_summary_update_at_ms: int
    """When they were counted."""


class FlowMember(Struct, frozen=True, kw_only=True):
    execution_id: ExecutionId
    execution_kind: str
    public_state: PublicState
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


def edge_snapshot(edge: Edge) -> EdgeSnapshot:
    return EdgeSnapshot(
        edge_id=edge.edge_id,
        flow_id=edge.flow_id,
        upstream_execution_id=edge.upstream_id,
        downstream_execution_id=edge.downstream_id,
        dependency_kind=edge.dependency_kind,
        satisfaction_condition=ALL_REQUIRED,
        data_passing_ref=edge.data_passing_ref or None,
        edge_state=edge.edge_state,
        dep_state=edge.dep_state,
        resolved_outcome=edge.resolved_outcome,
        resolved_at_ms=edge.resolved_at_ms,
        created_at_ms=edge.created_at_ms,
        created_by=CREATED_BY,
    )


def group_snapshot(group: EdgeGroup) -> EdgeGroupSnapshot:
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


def closing(flow: FlowRecord) -> bool:
    """Whether the flow was cancelled, and the ends of its members are not all counted yet."""
    cancelled = flow.public_flow_state is FlowState.CANCELLED
    return cancelled and flow.derived_state is FlowState.OPEN


def status_of(flow: FlowRecord, *, going: bool) -> FlowStatus:
    """Whether it has ended, and how. `going`: members of a closing flow are still running."""
    if closing(flow):
        return FlowStatus.ACTIVE if going else FlowStatus.CANCELLED
    if flow.derived_state is FlowState.OPEN:
        return FlowStatus.ACTIVE
    return FlowStatus(flow.derived_state)


def flow_summary(flow: FlowRecord, members: flow_joins.MemberCounts, now_ms: int) -> FlowSummary:
    counts = members.by_state
    shown = {f"members_{state}": count for state, count in counts.items()}
    # Understood but never derived; it counts as what it would be.
    waiting = shown.pop(f"members_{PublicState.RESUMABLE}", 0)
    shown["members_waiting"] = shown.get("members_waiting", 0) + waiting
    return FlowSummary(
        flow_id=flow.flow_id,
        total_members=sum(counts.values()),
        sampled_members=sum(counts.values()),
        last_summary_update_at_ms=now_ms,
        public_flow_state=flow_joins.derive_flow_state(
            members, cancelled=flow.public_flow_state is FlowState.CANCELLED
        ),
        members_spared=members.spared,
        **shown,
    )


def eligibility(execution: Execution | None, group: EdgeGroup | None) -> EligibilityStatus:
    """Whether dependencies let the execution run; the first reason against it counts."""
    if execution is None:
        return EligibilityStatus.NOT_FOUND
    if execution.lifecycle_phase is not LifecyclePhase.RUNNABLE:
        return EligibilityStatus.NOT_RUNNABLE
    if execution.ownership_state is not OwnershipState.UNOWNED:
        return EligibilityStatus.OWNED
    if execution.terminal_outcome is not TerminalOutcome.NONE:
        return EligibilityStatus.TERMINAL
    if group is not None and group.group_state is GroupState.IMPOSSIBLE:
        return EligibilityStatus.IMPOSSIBLE
    if holds_back(group) or held_by(execution) is Hold.CHILD:
        return EligibilityStatus.BLOCKED_BY_DEPENDENCIES
    return EligibilityStatus.ELIGIBLE
