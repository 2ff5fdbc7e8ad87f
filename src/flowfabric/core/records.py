"""One frozen record per table row.

A record's fields are the table's columns, under the same names, so reading and
writing rows needs no per-table code (see `store/mapping.py`). Every table whose
rows belong to an execution or a flow starts with `partition_key`: the N of
`{fp:N}:<uuid>`. Fields typed `ExecutionId` hold the full id; the column beside
`partition_key` holds only its uuid.

Times are integer milliseconds since the epoch, named `…_ms`.
"""

from enum import StrEnum
from typing import ClassVar, TypeVar

from msgspec import Struct

from flowfabric.core import bounds, ids, states

S = TypeVar("S", bound=Struct)


def view_of(kind: type[S], source: Struct, /, **others: object) -> S:
    """A view with the fields of its source, except for `others`, which it shows differently."""
    names = [name for name in kind.__struct_fields__ if name not in others]
    return kind(**{name: getattr(source, name) for name in names}, **others)


class Record(Struct, frozen=True, kw_only=True):
    """A row. `table` names it, `key` lists the columns that identify it."""

    table: ClassVar[str]
    key: ClassVar[tuple[str, ...]]


class Execution(Record, frozen=True, kw_only=True):
    """One durable run: what it is, the state it is in, who holds it, and when it is due."""

    table: ClassVar[str] = "execution_now"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id")

    partition_key: int
    execution_id: ids.ExecutionId
    own_id: str | None = None
    """What its submitter calls it; its uuid is derived from it."""
    namespace: ids.Namespace
    lane_id: ids.LaneId
    execution_kind: str
    route_id: int
    priority: int
    creator_identity: str
    idempotency_key: str | None = None
    instance_tag: str | None = None
    flow_id: ids.FlowId | None = None
    parent_execution_id: str | None = None
    """The full id of the execution that submitted this one and may ask for its result."""

    lifecycle_phase: states.LifecyclePhase
    ownership_state: states.OwnershipState
    eligibility_state: states.EligibilityState
    blocking_reason: states.BlockingReason
    blocking_detail: str = ""
    terminal_outcome: states.TerminalOutcome = states.TerminalOutcome.NONE
    attempt_state: states.AttemptState
    public_state: states.PublicState
    """Derived from the dimensions above by `with_derived`; never set by hand."""
    ready: bool
    """Derived by `with_derived`: `claim` may hand this row to a worker."""

    total_attempt_count: int = 0
    current_attempt_index: int = 0
    current_attempt_id: ids.AttemptId | None = None
    retry_count: int = 0
    replay_count: int = 0
    lease_reclaim_count: int = 0
    worker_deaths: int = 0
    """How often in a row its lease ran out, without a sign of progress in between."""

    lease_id: ids.LeaseId | None = None
    lease_epoch: int = 0
    worker_id: ids.WorkerId | None = None
    worker_instance_id: ids.WorkerInstanceId | None = None
    lease_acquired_at_ms: int | None = None
    lease_expires_at_ms: int | None = None
    lease_last_renewed_at_ms: int | None = None
    lease_expired_at_ms: int | None = None
    lease_revoked_at_ms: int | None = None
    lease_revoke_reason: str | None = None
    final_lease_id: ids.LeaseId | None = None
    final_worker_id: ids.WorkerId | None = None
    final_worker_instance_id: ids.WorkerInstanceId | None = None
    """The lease under which the execution ended, and who held it."""

    created_at_ms: int
    started_at_ms: int | None = None
    completed_at_ms: int | None = None
    last_transition_at_ms: int
    last_mutation_at_ms: int
    delay_until_ms: int | None = None
    granted_until_ms: int | None = None
    """Until when it is kept for the worker it was granted to; see `StoredGrant`."""
    deadline_at_ms: int | None = None
    attempt_deadline_ms: int | None = None
    """When the running attempt times out; null while it is not running."""
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

    current_suspension_id: ids.SuspensionId | None = None
    current_waitpoint_id: ids.WaitpointId | None = None
    open_waitpoint_count: int = 0
    """Waitpoints still pending or active. Zero: there is nothing to load or close."""
    signal_count: int = 0
    keeps_signals: bool = False
    """There may be signals that no wait has taken. False: there are none."""
    cancel_requested: bool = False
    """Its flow was cancelled and its own cancellation is queued: no worker may claim it."""
    join_pending: bool = False
    """Whether edges into it keep it from being ready. Says nothing once it has ended."""
    last_capability_mismatch_at_ms: int | None = None
    failure_reason: str | None = None
    cancellation_reason: str | None = None
    cancelled_by: str | None = None

    payload: bytes = b""
    payload_encoding: str | None = None
    """The payload of the request; see `input`."""
    input: bytes | None = None
    input_encoding: str | None = None
    """What its join passed on, in place of the payload."""
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
    retention_ms: int = bounds.RETENTION_MS
    retention_failed_ms: int = bounds.RETENTION_FAILED_MS
    """All three come from the policy, so that claiming and completing need not decode it. The
    second keep time is for every end but success."""

    @property
    def called(self) -> str:
        """What people call it: the id they chose, else its uuid."""
        return self.own_id or ids.uuid_of(self.execution_id)

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
    execution_id: ids.ExecutionId
    attempt_index: int
    attempt_id: ids.AttemptId
    attempt_type: states.AttemptType
    attempt_state: states.AttemptLifecycle
    created_at_ms: int
    started_at_ms: int | None = None
    ended_at_ms: int | None = None
    suspended_at_ms: int | None = None
    resumed_at_ms: int | None = None
    suspension_id: str | None = None
    """What parks the attempt: a suspension's id, `worker_delay`, `waiting_children` or
    `blocked_by_code`."""
    blocked_on: str | None = None
    """The step at which changed code stopped it; see `core.changed_code`."""
    blocked_count: int = 0
    """How often in a row changed code has stopped it."""
    lease_id: ids.LeaseId | None = None
    lease_epoch: int = 0
    worker_id: ids.WorkerId | None = None
    worker_instance_id: ids.WorkerInstanceId | None = None
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
    execution_id: ids.ExecutionId
    tag_key: str
    tag_value: str
    created_at_ms: int


class Lane(Record, frozen=True, kw_only=True):
    """A named queue. Pausing stops claims, draining stops submissions, disabling stops both."""

    table: ClassVar[str] = "lane"
    key: ClassVar[tuple[str, ...]] = ("lane_id",)

    lane_id: ids.LaneId
    state: states.LaneState
    registered_at_ms: int
    registered_by: str
    state_changed_at_ms: int | None = None
    """Since when it is in this state; None: ever since it was registered."""


class GrantKind(StrEnum):
    """What a grant is good for."""

    CLAIM = "claim"
    """What waits for a worker."""
    RECLAIM = "reclaim"
    """What has lost its worker."""


class StoredGrant(Record, frozen=True, kw_only=True):
    """A short-lived right of one worker to claim one execution by id.

    It holds as long as the execution's `granted_until_ms` is its end. One that was left behind
    by whatever else happened to the execution means nothing, and goes when its time is over.
    """

    table: ClassVar[str] = "claim_grant"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id")

    partition_key: int
    execution_id: ids.ExecutionId
    route_id: int
    """That of the execution, so that those in use can be counted by route."""
    grant_id: str
    kind: GrantKind
    worker_id: ids.WorkerId
    worker_instance_id: ids.WorkerInstanceId
    issued_at_ms: int
    expires_at_ms: int
    counted_by: str = "[]"
    """The gates that counted it as a start, as JSON."""


class IdempotencyGuard(Record, frozen=True, kw_only=True):
    """Remembers which execution an idempotency key has created, as long as that one exists."""

    table: ClassVar[str] = "idempotency_guard"
    key: ClassVar[tuple[str, ...]] = ("namespace", "idempotency_key")

    namespace: ids.Namespace
    idempotency_key: str
    execution: str
    """The full execution id; the guard itself belongs to no partition."""
    fingerprint: bytes
    expires_at_ms: int | None = None
    """When the key is free although its execution exists, if its policy wants that."""

    def holds(self, now_ms: int) -> bool:
        return self.expires_at_ms is None or self.expires_at_ms > now_ms


# The attempt that needs no row ----------------------------------------------
#
# Most executions run once and succeed. All there is to know about such an attempt
# stands in the execution: who began it and when, and who ended it. So the first
# attempt under its first lease is not stored; it is read off the execution here. Any
# other end, a lost lease or a pause writes it down, and further attempts are stored
# from their start.

FIRST_EPOCH = 1
"""The epoch of an execution's first lease."""


def runs_first_attempt(execution: Execution) -> bool:
    """Whether the first lease is live, so that no attempt has been written down yet."""
    return (
        execution.lease_epoch == FIRST_EPOCH
        and execution.total_attempt_count == 1
        and execution.ownership_state is states.OwnershipState.LEASED
    )


def first_attempt(execution: Execution) -> Attempt | None:
    """The attempt of an execution whose first lease is still its last; else none."""
    if execution.lease_epoch != FIRST_EPOCH or execution.total_attempt_count != 1:
        return None
    assert execution.current_attempt_id is not None
    ended = execution.lifecycle_phase is states.LifecyclePhase.TERMINAL
    if ended and execution.terminal_outcome is not states.TerminalOutcome.SUCCESS:
        return None
    return Attempt(
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        attempt_index=execution.current_attempt_index,
        attempt_id=execution.current_attempt_id,
        attempt_type=states.AttemptType.INITIAL,
        attempt_state=states.AttemptLifecycle.ENDED_SUCCESS
        if ended
        else states.AttemptLifecycle.STARTED,
        created_at_ms=execution.started_at_ms or execution.created_at_ms,
        started_at_ms=execution.started_at_ms,
        ended_at_ms=execution.completed_at_ms,
        lease_id=execution.final_lease_id if ended else execution.lease_id,
        lease_epoch=execution.lease_epoch,
        worker_id=execution.final_worker_id if ended else execution.worker_id,
        worker_instance_id=(
            execution.final_worker_instance_id if ended else execution.worker_instance_id
        ),
    )


# The rows of suspensions, waitpoints and signals, and the words in them
#
# A suspension is one pause of one execution. It owns waitpoints: mailboxes that
# the outside reaches with a token. A signal is a named message to one waitpoint, or to
# whatever next waits under a name: a signal that no wait has taken yet is *kept*.
# All three are kept until the execution itself is deleted, so that what happened
# can be read back; what is still open is told by `Suspension.closed_at_ms` and
# `Waitpoint.state`.


class WaitpointState(StrEnum):
    PENDING = "pending"
    """Made before its suspension: signals are kept for it."""
    ACTIVE = "active"
    CLOSED = "closed"


class SuspensionReason(StrEnum):
    """Why an execution pauses; decides the blocking reason people see."""

    WAITING_FOR_SIGNAL = "waiting_for_signal"
    WAITING_FOR_APPROVAL = "waiting_for_approval"
    WAITING_FOR_CALLBACK = "waiting_for_callback"
    WAITING_FOR_TOOL_RESULT = "waiting_for_tool_result"
    WAITING_FOR_OPERATOR_REVIEW = "waiting_for_operator_review"
    PAUSED_BY_POLICY = "paused_by_policy"
    PAUSED_BY_BUDGET = "paused_by_budget"
    STEP_BOUNDARY = "step_boundary"
    MANUAL_PAUSE = "manual_pause"


class Requester(StrEnum):
    """Who requested the suspension."""

    WORKER = "worker"
    OPERATOR = "operator"
    POLICY = "policy"
    SYSTEM_TIMEOUT_POLICY = "system_timeout_policy"


class TimeoutBehavior(StrEnum):
    """What happens to an execution whose suspension lasted too long."""

    FAIL = "fail"
    CANCEL = "cancel"
    EXPIRE = "expire"
    AUTO_RESUME = "auto_resume_with_timeout_signal"
    ESCALATE = "escalate"


class SignalEffect(StrEnum):
    """What one signal did."""

    SATISFIED = "resume_condition_satisfied"
    APPENDED = "appended_to_waitpoint"
    APPENDED_DUPLICATE = "appended_to_waitpoint_duplicate"
    MATCHER_FAILED = "signal_ignored_matcher_failed"
    NOT_IN_CONDITION = "signal_ignored_not_in_condition"
    BUFFERED = "buffered_for_pending_waitpoint"
    KEPT = "kept_for_next_wait"
    """Nothing waited under its name: the next wait of that name takes it."""


class Suspension(Record, frozen=True, kw_only=True):
    """One pause. Open while `closed_at_ms` is null; an execution has at most one open."""

    table: ClassVar[str] = "suspension"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "suspension_id")

    partition_key: int
    execution_id: ids.ExecutionId
    suspension_id: ids.SuspensionId
    attempt_index: int
    waitpoint_id: ids.WaitpointId
    """The primary waitpoint: the first one bound."""
    reason_code: SuspensionReason
    requested_by: Requester
    resume_condition: str
    """JSON, see `core.conditions`."""
    resume_policy: str
    """JSON, see `core.resumption.ResumePolicy`."""
    timeout_at_ms: int | None
    timeout_behavior: TimeoutBehavior | None
    """Null once the timeout has escalated."""
    continuation_metadata_pointer: str | None
    created_at_ms: int
    last_signal_at_ms: int | None = None
    satisfied_at_ms: int | None = None
    closed_at_ms: int | None = None
    close_reason: str | None = None
    closer_signal_id: ids.SignalId | None = None
    """The signal that met the condition."""


class Waitpoint(Record, frozen=True, kw_only=True):
    """A mailbox. Its token is not stored: it is computed from the key named by `token_kid`."""

    table: ClassVar[str] = "waitpoint"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "waitpoint_id")

    partition_key: int
    execution_id: ids.ExecutionId
    waitpoint_id: ids.WaitpointId
    waitpoint_key: ids.WaitpointKey
    suspension_id: ids.SuspensionId | None
    attempt_index: int
    ordinal: int = 0
    """Its place among the waitpoints of the suspension; the primary one is 0."""
    state: WaitpointState
    token_kid: str
    token_fingerprint: str
    required_signal_names: str = "[]"
    """JSON list: the names the condition waits for here; empty when any will do."""
    own_name_only: bool = False
    """Refuses signals whose name is not its key: its token is good for that name alone."""
    created_at_ms: int
    activated_at_ms: int | None = None
    expires_at_ms: int | None = None
    token_expires_at_ms: int | None = None
    """From then on its token is refused, whatever the waitpoint itself still takes."""
    satisfied_at_ms: int | None = None
    closed_at_ms: int | None = None
    close_reason: str | None = None
    ended_with_execution: bool = False
    """Closed by its execution's end: a replay that asks for it opens it again."""
    signal_count: int = 0
    matched_signal_count: int = 0
    last_signal_at_ms: int | None = None


class SignalFacts(Record, frozen=True, kw_only=True):
    """What conditions look at in a signal: its row without the message."""

    table: ClassVar[str] = "signal"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "signal_id")

    partition_key: int
    execution_id: ids.ExecutionId
    signal_id: ids.SignalId
    sequence: int
    """Counts the signals of one execution in the order they were accepted."""
    waitpoint_id: ids.WaitpointId
    """Of a signal that met no waitpoint: `mailbox_id` of its name, which no waitpoint has."""
    waitpoint_key: ids.WaitpointKey
    suspension_id: ids.SuspensionId | None
    """The pause that took it; null while it is kept."""
    signal_name: str
    source_type: str
    source_identity: str
    observed_effect: SignalEffect
    matched: bool = False
    """Accepted by some part of the condition."""
    satisfier: bool = False
    """Brought the condition forward."""


class SignalRecord(SignalFacts, frozen=True, kw_only=True):
    """One delivered message."""

    signal_category: str
    correlation_id: str = ""
    idempotency_key: str | None = None
    target_scope: str
    created_at_ms: int
    """When the sender says it was made; decides nothing."""
    accepted_at_ms: int
    payload: bytes | None = None
    payload_encoding: str


class SignalDedup(Record, frozen=True, kw_only=True):
    """Remembers which signal an idempotency key already delivered."""

    table: ClassVar[str] = "signal_dedup"
    key: ClassVar[tuple[str, ...]] = (
        "partition_key",
        "execution_id",
        "waitpoint_id",
        "idempotency_key",
    )

    partition_key: int
    execution_id: ids.ExecutionId
    waitpoint_id: ids.WaitpointId
    idempotency_key: str
    signal_id: ids.SignalId
    expires_at_ms: int | None
    """Null: it holds as long as the execution exists."""

    def holds(self, now_ms: int) -> bool:
        return self.expires_at_ms is None or self.expires_at_ms > now_ms


class SuspendDedup(Record, frozen=True, kw_only=True):
    """Remembers, for a while, what a suspend with this key was answered, and to whom."""

    table: ClassVar[str] = "suspend_dedup"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "idempotency_key")

    partition_key: int
    execution_id: ids.ExecutionId
    idempotency_key: str
    suspension_id: ids.SuspensionId
    already_satisfied: bool
    lease_id: ids.LeaseId
    lease_epoch: int
    attempt_id: ids.AttemptId
    attempt_index: int
    worker_instance_id: ids.WorkerInstanceId
    lease_ttl_ms: int
    expires_at_ms: int


class HmacKey(Record, frozen=True, kw_only=True):
    """A key that signs waitpoint tokens. The one without an end is the current one.

    Past its end its secret is wiped; the row stays, so that its id is never used again.
    """

    table: ClassVar[str] = "waitpoint_hmac"
    key: ClassVar[tuple[str, ...]] = ("kid",)

    kid: str
    secret: bytes
    activated_at_ms: int
    expires_at_ms: int | None = None

    def __repr__(self) -> str:
        return f"HmacKey({self.kid!r}, expires_at_ms={self.expires_at_ms})"


# Rows of durable steps: what a handler has done, and which executions wait for which


class StepKind(StrEnum):
    """What a step is. Asking for a recorded step as another kind means the code has changed."""

    CALL = "call"
    SLEEP = "sleep"
    NOW = "now"
    RANDOM = "random"
    UUID = "uuid"
    SUBMIT = "submit"
    CHILD = "child"
    WAITPOINT = "waitpoint"
    SIGNAL = "signal"
    USAGE = "usage"
    PATCH = "patch"
    """Remembers that a changed piece of code is on for this execution."""
    ACCEPT = "accept"
    """Not of the handler: a person allowed a step that changed code asks for."""


class Step(Record, frozen=True, kw_only=True):
    """One finished step. It belongs to the execution, whichever attempt made it."""

    table: ClassVar[str] = "step"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "step_key")

    partition_key: int
    execution_id: ids.ExecutionId
    step_key: str
    """A name nothing else of the execution has; see `journal.step_key`."""
    after_key: str | None = None
    """The step before it in the same line, for reading them in order."""
    kind: StepKind
    line: str = ""
    """The line it belongs to; empty for the function itself."""
    name: str = ""
    digest: str = ""
    """Of its arguments."""
    number: int = 1
    parallel: bool = False
    """Whether the handler called it while earlier ones of its line were under way."""
    asked_after: int | None = None
    """For a parallel step: the position of the last outcome delivered before it; or minus its
    number, if no other line was making calls; None if the order may differ between runs. For
    other steps: 0 inside a named branch that ran beside others."""
    position: int | None = None
    """The place of its outcome among all that reached the handler; none, if it has not yet."""
    result: bytes | None = None
    failure: bytes | None = None
    """How it ended without a result, as the handler saw it."""
    wake_at_ms: int | None = None
    """When a sleep ends."""
    duration_ms: int | None = None
    """How long the function of a step ran, by the clock of its worker."""
    attempt_index: int
    recorded_at_ms: int


class FailedStep(Struct, frozen=True, kw_only=True):
    """The step whose failure ended an attempt.

    It is kept with the attempt and not as a step, so that the next attempt tries it again.
    """

    step_key: str
    name: str
    line: str = ""
    error: str
    """What the step raised; the handler may have raised something else in its place."""
    duration_ms: int | None = None


def failed_step(attempt: Attempt) -> FailedStep | None:
    if attempt.failed_step_key is None:
        return None
    return FailedStep(
        step_key=attempt.failed_step_key,
        name=attempt.failed_step_name or "",
        line=attempt.failed_step_line or "",
        error=attempt.failed_step_error or "",
        duration_ms=attempt.failed_step_duration_ms,
    )


class Waiter(Record, frozen=True, kw_only=True):
    """An execution that waits for the end of another, or has waited for it.

    It keeps the other from being deleted until it has ended itself.
    """

    table: ClassVar[str] = "waiter"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "waiting")

    partition_key: int
    execution_id: ids.ExecutionId
    """The one that is waited for."""
    waiting: str
    """The full id of the one that waits."""
