"""What readers see of flows: pure views over their records."""

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, structs

from flowfabric.core.flow_endings import holds_back
from flowfabric.core.flow_joins import (
    EdgeDependencyPolicy,
    policy_of,
    resolved_count,
    with_last_end,
)
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
from flowfabric.core.ids import EdgeId, ExecutionId, FlowId, Namespace
from flowfabric.core.records import Execution
from flowfabric.core.situations import Hold, held_by
from flowfabric.core.states import LifecyclePhase, OwnershipState, PublicState, TerminalOutcome

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
    policy: EdgeDependencyPolicy
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
    """Whether changed code has stopped it: delayed, until somebody does something about it."""
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
        policy=policy_of(group),
        total_deps=group.staged,
        satisfied_count=group.succeeded,
        failed_count=group.failed,
        skipped_count=group.skipped,
        running_count=group.staged - resolved_count(group),
        group_state=group.group_state,
        fired_at_ms=group.fired_at_ms,
        cancel_reason=group.cancel_reason,
    )


def closing(flow: FlowRecord) -> bool:
    """Whether the flow was cancelled, and the ends of its members are not all counted yet."""
    cancelled = flow.public_flow_state is FlowState.CANCELLED
    return cancelled and flow.derived_state is FlowState.OPEN


def status_of(flow: FlowRecord, *, going: bool) -> FlowStatus:
    """Whether it has ended, and how. `going` tells of a closing flow whether members go on."""
    if closing(flow):
        return FlowStatus.ACTIVE if going else FlowStatus.CANCELLED
    if flow.derived_state is FlowState.OPEN:
        return FlowStatus.ACTIVE
    return FlowStatus(flow.derived_state)


ENDED_BADLY = (PublicState.FAILED, PublicState.EXPIRED)
HELD_UP = (
    PublicState.SUSPENDED,
    PublicState.DELAYED,
    PublicState.RATE_LIMITED,
    PublicState.WAITING_CHILDREN,
)
ENDED = (*ENDED_BADLY, PublicState.CANCELLED, PublicState.COMPLETED, PublicState.SKIPPED)


class MemberCounts(Struct, frozen=True):
    """How many members are in which state."""

    by_state: Mapping[PublicState, int]
    spared: int = 0
    """Of the cancelled ones: those that a join no longer needed."""
    ends_ms: tuple[int, ...] = ()
    """When the last in each state ended, if that was asked for."""


def derive_flow_state(members: MemberCounts, *, cancelled: bool) -> FlowState:
    """What the members' states make of the flow. An empty flow is open."""
    counts = members.by_state

    def any_in(*states: PublicState) -> bool:
        return any(counts.get(state) for state in states)

    total = sum(counts.values())
    if total == sum(counts.get(state, 0) for state in ENDED) and (total or cancelled):
        if cancelled:
            return FlowState.CANCELLED
        unwanted = counts.get(PublicState.CANCELLED, 0) - members.spared
        bad = unwanted or any_in(*ENDED_BADLY)
        return FlowState.FAILED if bad else FlowState.COMPLETED
    if any_in(PublicState.ACTIVE):
        return FlowState.RUNNING
    return FlowState.BLOCKED if any_in(*HELD_UP) else FlowState.OPEN


def flow_summary(flow: FlowRecord, members: MemberCounts, now_ms: int) -> FlowSummary:
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
        public_flow_state=derive_flow_state(
            members, cancelled=flow.public_flow_state is FlowState.CANCELLED
        ),
        members_spared=members.spared,
        **shown,
    )


def recounted(flow: FlowRecord, ended: MemberCounts) -> FlowRecord:
    """The flow with its counters, and the time of the last end, set to what was found."""
    counts = {f"members_{state}": ended.by_state.get(state, 0) for state in ENDED}
    counted = structs.replace(flow, members_spared=ended.spared, **counts)
    return with_last_end(counted, ended.ends_ms)


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
