"""The rows of flows: containers of executions, and who waits for whom inside them.

An edge says that one execution (downstream) waits for another (upstream). All edges
into one execution form its *edge group*, which holds the join policy and counts how
the upstreams ended. A group leaves `pending` once: it *fires*.

To change a flow's edges or groups, lock the flow's row.
"""

from enum import StrEnum
from typing import ClassVar

from flowfabric.core.ids import EdgeId, ExecutionId, FlowId, Namespace
from flowfabric.core.records import Record
from flowfabric.core.states import BlockingReason, EligibilityState, TerminalOutcome


class FlowState(StrEnum):
    """What a flow looks like from outside. A flow row stores `open` and the ended ones."""

    OPEN = "open"
    RUNNING = "running"
    BLOCKED = "blocked"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class EdgeState(StrEnum):
    """A pending edge already holds its downstream back; an applied one also counts."""

    PENDING = "pending"
    APPLIED = "applied"


class DependencyState(StrEnum):
    UNSATISFIED = "unsatisfied"
    SATISFIED = "satisfied"
    IMPOSSIBLE = "impossible"


class GroupState(StrEnum):
    PENDING = "pending"
    SATISFIED = "satisfied"
    IMPOSSIBLE = "impossible"


class PolicyKind(StrEnum):
    ALL_OF = "all_of"
    ANY_OF = "any_of"
    QUORUM = "quorum"


class OnSatisfied(StrEnum):
    """What becomes of upstreams that are no longer needed."""

    CANCEL_REMAINING = "cancel_remaining"
    LET_RUN = "let_run"


class CancellationPolicy(StrEnum):
    """Which members are cancelled with a flow."""

    FLOW_ONLY = "flow_only"
    CANCEL_ALL = "cancel_all"
    CANCEL_PENDING = "cancel_pending"


class FlowRecord(Record, frozen=True, kw_only=True):
    table: ClassVar[str] = "flow"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "flow_id")

    partition_key: int
    flow_id: FlowId
    namespace: Namespace
    flow_kind: str
    public_flow_state: FlowState
    """`open` until cancelled: whether the graph may change."""
    derived_state: FlowState
    """`open` until every member has ended; then how they did."""
    graph_revision: int = 0
    node_count: int = 0
    edge_count: int = 0
    members_completed: int = 0
    members_failed: int = 0
    members_cancelled: int = 0
    members_expired: int = 0
    members_skipped: int = 0
    """Endings whose effects on other members have been worked off."""
    members_spared: int = 0
    """Of the cancelled ones: those that a join no longer needed."""
    created_at_ms: int
    last_mutation_at_ms: int
    cancelled_at_ms: int | None = None
    cancel_reason: str | None = None
    cancellation_policy: CancellationPolicy | None = None
    last_ended_at_ms: int | None = None
    """When the latest of those members ended that are counted as ended."""
    ended_at_ms: int | None = None
    member_retention_ms: int = 0
    member_retention_failed_ms: int = 0
    """The longest keep times of its members."""
    retain_until_ms: int | None = None
    """Set when the flow ends: after this it and all its members may be deleted."""
    going: bool = False
    """Whether its members are being deleted."""


class FlowTag(Record, frozen=True, kw_only=True):
    table: ClassVar[str] = "flow_tag"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "flow_id", "tag_key")

    partition_key: int
    flow_id: FlowId
    tag_key: str
    tag_value: str


class Edge(Record, frozen=True, kw_only=True):
    table: ClassVar[str] = "edge"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "flow_id", "edge_id")

    partition_key: int
    flow_id: FlowId
    edge_id: EdgeId
    upstream_id: ExecutionId
    downstream_id: ExecutionId
    dependency_kind: str
    data_passing_ref: str = ""
    """Under which name the upstream's result reaches the downstream; empty for not at all."""
    replaces_payload: bool = True
    """Whether a passed result also becomes the downstream's input payload."""
    edge_state: EdgeState
    dep_state: DependencyState = DependencyState.UNSATISFIED
    created_at_ms: int
    applied_at_ms: int | None = None
    resolved_at_ms: int | None = None
    resolved_outcome: TerminalOutcome | None = None
    counts_from_replay: int = 0
    """The first life of the upstream, by its replays, whose end counts.

    When the downstream is replayed, what its upstreams failed before then no longer does.
    """


class JoinRecord(Record, frozen=True, kw_only=True):
    """All edges into one execution. An execution is in one flow for life, so it has one group."""

    table: ClassVar[str] = "edge_group"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "downstream_id")

    partition_key: int
    downstream_id: ExecutionId
    flow_id: FlowId
    policy_kind: PolicyKind
    k: int
    """How many successes a quorum needs; 1 for `any_of`, 0 for `all_of`."""
    on_satisfied: OnSatisfied
    staged: int = 0
    """Edges there are, applied or not."""
    applied: int = 0
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    named_inputs: int = 0
    """Edges that pass their upstream's result."""
    group_state: GroupState = GroupState.PENDING
    fired_at_ms: int | None = None
    cancel_reason: str | None = None
    """Why upstreams that had not ended were cancelled when the group fired."""
    prior_eligibility: EligibilityState | None = None
    prior_blocking_reason: BlockingReason | None = None
    prior_blocking_detail: str | None = None
    """What held the downstream back before its first edge did; it applies again afterwards."""


class ExecutionInput(Record, frozen=True, kw_only=True):
    """An upstream's result, kept for the downstream from the moment the edge resolves."""

    table: ClassVar[str] = "execution_input"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "edge_id")

    partition_key: int
    execution_id: ExecutionId
    edge_id: EdgeId
    name: str
    value: bytes | None
    value_encoding: str | None
    replaces_payload: bool
    resolved_at_ms: int


class CompletionDispatch(Record, frozen=True, kw_only=True):
    """A flow member has ended, and its dependents have not been told yet."""

    table: ClassVar[str] = "completion_dispatch"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "flow_id", "execution_id", "replay_count")

    partition_key: int
    flow_id: FlowId
    execution_id: ExecutionId
    replay_count: int
    """Which life of the execution ended; an earlier one no longer matters."""
    outcome: TerminalOutcome
    enqueued_at_ms: int


class EndedUpstream(Record, frozen=True, kw_only=True):
    """What a queued ending left: read along with it, and stored with the execution."""

    table: ClassVar[str] = "ended_upstream"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id")

    partition_key: int
    execution_id: ExecutionId
    current_replay_count: int
    cancellation_reason: str | None
    result: bytes | None
    """Only where an edge passes it on."""
    result_encoding: str | None


class PendingCancel(Record, frozen=True, kw_only=True):
    """A flow member to cancel, by its flow's cancellation or a join's policy."""

    table: ClassVar[str] = "pending_cancel"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id")

    partition_key: int
    execution_id: ExecutionId
    flow_id: FlowId
    downstream_id: ExecutionId | None = None
    """The join that no longer needs it; none when the whole flow is cancelled."""
    reason: str
    only_waiting: bool = False
    """Leave it alone if a worker has it by now."""
    enqueued_at_ms: int
    due_at_ms: int
    """When to try next; later than queued once it has failed."""
    attempts: int = 0
    """How often cancelling it has failed."""


class FlowAudit(Record, frozen=True, kw_only=True):
    """How far the slow audit of every member and every wait has come. There is one row."""

    table: ClassVar[str] = "flow_audit"
    key: ClassVar[tuple[str, ...]] = ("audit_id",)

    audit_id: int = 1
    next_flow_id: str
    next_execution_id: str
    """The member from which the look continues, inclusive."""
    after_waiter: str = ""
    """The last one looked at of those that wait for others."""
    due_at_ms: int
