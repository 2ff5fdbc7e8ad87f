"""One frozen record per table row.

A record's fields are the table's columns, under the same names, so reading and
writing rows needs no per-table code (see `store/mapping.py`). Every table whose
rows belong to an execution or a flow starts with `partition_key`: the N of
`{fp:N}:<uuid>`. Fields typed `ExecutionId` hold the full id; the column beside
`partition_key` holds only its uuid.

Times are integer milliseconds since the epoch, named `…_ms`.
"""

from typing import ClassVar

from msgspec import Struct

from flowfabric.core.ids import (
    AttemptId,
    ExecutionId,
    FlowId,
    LaneId,
    LeaseId,
    Namespace,
    SuspensionId,
    WaitpointId,
    WorkerId,
    WorkerInstanceId,
    uuid_of,
)
from flowfabric.core.states import (
    AttemptLifecycle,
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    LaneState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)


class Record(Struct, frozen=True, kw_only=True):
    """A row. `table` names it, `key` lists the columns that identify it."""

    table: ClassVar[str]
    key: ClassVar[tuple[str, ...]]


class Execution(Record, frozen=True, kw_only=True):
    """One durable run: what it is, the state it is in, who holds it, and when it is due."""

    table: ClassVar[str] = "execution_now"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id")

    partition_key: int
    execution_id: ExecutionId
    own_id: str | None = None
    """What its submitter calls it; its uuid is derived from it."""
    namespace: Namespace
    lane_id: LaneId
    execution_kind: str
    route_id: int
    priority: int
    creator_identity: str
    idempotency_key: str | None = None
    instance_tag: str | None = None
    flow_id: FlowId | None = None
    parent_execution_id: str | None = None
    """The full id of the execution that submitted this one and may ask for its result."""

    lifecycle_phase: LifecyclePhase
    ownership_state: OwnershipState
    eligibility_state: EligibilityState
    blocking_reason: BlockingReason
    blocking_detail: str = ""
    terminal_outcome: TerminalOutcome = TerminalOutcome.NONE
    attempt_state: AttemptState
    public_state: PublicState
    """Derived from the dimensions above by `settle`; never set by hand."""
    ready: bool
    """Derived by `settle`: `claim` may hand this row to a worker."""

    total_attempt_count: int = 0
    current_attempt_index: int = 0
    current_attempt_id: AttemptId | None = None
    retry_count: int = 0
    replay_count: int = 0
    lease_reclaim_count: int = 0
    worker_deaths: int = 0
    """How often in a row its lease ran out, without a sign of progress in between."""

    lease_id: LeaseId | None = None
    lease_epoch: int = 0
    worker_id: WorkerId | None = None
    worker_instance_id: WorkerInstanceId | None = None
    lease_acquired_at_ms: int | None = None
    lease_expires_at_ms: int | None = None
    lease_last_renewed_at_ms: int | None = None
    lease_renewal_deadline_ms: int | None = None
    lease_expired_at_ms: int | None = None
    lease_revoked_at_ms: int | None = None
    lease_revoke_reason: str | None = None
    final_lease_id: LeaseId | None = None
    final_worker_id: WorkerId | None = None
    final_worker_instance_id: WorkerInstanceId | None = None
    """The lease under which the execution ended, and who held it."""

    created_at_ms: int
    started_at_ms: int | None = None
    completed_at_ms: int | None = None
    last_transition_at_ms: int
    last_mutation_at_ms: int
    delay_until_ms: int | None = None
    deadline_at_ms: int | None = None
    attempt_deadline_ms: int | None = None
    """When the running attempt times out; null while nobody runs it."""
    attempt_time_left_ms: int | None = None
    """What is left of the attempt timeout while the attempt is parked."""
    retain_until_ms: int | None = None
    """Set when the execution ends: after this it may be deleted."""

    pending_retry_reason: str | None = None
    pending_replay_reason: str | None = None
    pending_replay_requested_by: str | None = None
    pending_previous_attempt_index: int | None = None

    progress_pct: int | None = None
    progress_message: str | None = None
    progress_updated_at_ms: int | None = None

    current_suspension_id: SuspensionId | None = None
    current_waitpoint_id: WaitpointId | None = None
    open_waitpoint_count: int = 0
    """Waitpoints still pending or active. Zero tells that there is nothing to load or close."""
    signal_count: int = 0
    keeps_signals: bool = False
    """There may be signals no wait has taken. False tells that there is nothing to look for."""
    cancel_requested: bool = False
    """Its flow was cancelled and its own cancellation is on the way: nobody may claim it."""
    join_pending: bool = False
    """Whether edges into it keep it from being ready. Says nothing once it has ended."""
    last_capability_mismatch_at_ms: int | None = None
    failure_reason: str | None = None
    cancellation_reason: str | None = None
    cancelled_by: str | None = None

    payload: bytes = b""
    payload_encoding: str | None = None
    """What was asked for; see `input`."""
    input: bytes | None = None
    input_encoding: str | None = None
    """What its join passed on: it stands in for the payload."""
    next_input: bytes | None = None
    next_input_encoding: str | None = None
    """The same, while the execution is held: its input once it may be claimed again."""
    result: bytes | None = None
    result_encoding: str | None = None
    policy: str = "{}"
    awaited: bool = False
    """Whether another execution is parked until this one has ended."""
    awaits_child: bool = False
    """Whether it is parked itself until one of those it awaits has ended."""
    attempt_timeout_ms: int | None = None
    retention_ms: int | None = None
    retention_failed_ms: int | None = None
    """All three come from the policy, so that claiming and completing need not decode it. The
    second keep time is for every end but success."""

    @property
    def called(self) -> str:
        """What people call it: the id they chose, else its uuid."""
        return self.own_id or uuid_of(self.execution_id)

    @property
    def taken_payload(self) -> tuple[bytes, str | None]:
        """What a worker is given, and how it is encoded."""
        if self.input is not None:
            return self.input, self.input_encoding
        return self.payload, self.payload_encoding


class Attempt(Record, frozen=True, kw_only=True):
    """One try. Delay and suspension keep it; retry, reclaim and replay start another."""

    table: ClassVar[str] = "attempt"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "attempt_index")

    partition_key: int
    execution_id: ExecutionId
    attempt_index: int
    attempt_id: AttemptId
    attempt_type: AttemptType
    attempt_state: AttemptLifecycle
    created_at_ms: int
    started_at_ms: int | None = None
    ended_at_ms: int | None = None
    suspended_at_ms: int | None = None
    resumed_at_ms: int | None = None
    suspension_id: str | None = None
    """What parks the attempt: a suspension's id, `worker_delay`, `waiting_children` or
    `blocked_by_code`."""
    blocked_on: str | None = None
    """The step at which changed code stopped it; see `core.blocking`."""
    blocked_count: int = 0
    """How often in a row changed code has stopped it."""
    lease_id: LeaseId | None = None
    lease_epoch: int = 0
    worker_id: WorkerId | None = None
    worker_instance_id: WorkerInstanceId | None = None
    failure_reason: str | None = None
    failure_category: str | None = None
    failure_traceback: str | None = None
    failed_step_key: str | None = None
    failed_step_name: str | None = None
    failed_step_line: str | None = None
    failed_step_error: str | None = None
    failed_step_duration_ms: int | None = None
    """The step whose failure ended the attempt; see `FailedStep`."""
    retry_reason: str | None = None
    previous_attempt_index: int | None = None
    replay_reason: str | None = None
    replay_requested_by: str | None = None
    replayed_from_attempt_index: int | None = None
    reclaim_reason: str | None = None


class ExecutionTag(Record, frozen=True, kw_only=True):
    """One tag. `created_at_ms` is the execution's, so that lists by tag page by time."""

    table: ClassVar[str] = "execution_tag"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "tag_key")

    partition_key: int
    execution_id: ExecutionId
    tag_key: str
    tag_value: str
    created_at_ms: int


class Lane(Record, frozen=True, kw_only=True):
    """A named queue. Pausing stops claims, draining stops submissions, disabling stops both."""

    table: ClassVar[str] = "lane"
    key: ClassVar[tuple[str, ...]] = ("lane_id",)

    lane_id: LaneId
    state: LaneState
    registered_at_ms: int
    registered_by: str
    state_changed_at_ms: int | None = None
    """Since when it is in this state; None: ever since it was registered."""


class ClaimGrant(Record, frozen=True, kw_only=True):
    """A short-lived right of one worker to claim one execution by id."""

    table: ClassVar[str] = "claim_grant"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id")

    partition_key: int
    execution_id: ExecutionId
    grant_id: str
    kind: str
    worker_id: WorkerId
    worker_instance_id: WorkerInstanceId
    issued_at_ms: int
    expires_at_ms: int


class IdempotencyGuard(Record, frozen=True, kw_only=True):
    """Remembers which execution an idempotency key has created, as long as that one exists."""

    table: ClassVar[str] = "idempotency_guard"
    key: ClassVar[tuple[str, ...]] = ("namespace", "idempotency_key")

    namespace: Namespace
    idempotency_key: str
    execution: str
    """The full execution id; the guard itself belongs to no partition."""
    fingerprint: bytes
    expires_at_ms: int | None = None
    """When the key is free although its execution exists, if its policy wants that."""

    def holds(self, now_ms: int) -> bool:
        return self.expires_at_ms is None or self.expires_at_ms > now_ms


class WorkerPresence(Record, frozen=True, kw_only=True):
    """What a worker last asked for. Tells whether anybody serves a route; decides nothing."""

    table: ClassVar[str] = "worker_presence"
    key: ClassVar[tuple[str, ...]] = ("worker_instance_id",)

    worker_instance_id: WorkerInstanceId
    worker_id: WorkerId
    namespace: Namespace | None
    """Null for a worker that serves every namespace."""
    lanes: str
    """JSON lists; `kinds` is null for a worker that takes every kind."""
    kinds: str | None
    capabilities: str
    last_seen_ms: int
