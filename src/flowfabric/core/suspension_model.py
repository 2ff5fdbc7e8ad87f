"""The rows of suspensions, waitpoints and signals, and the words in them.

A suspension is one pause of one execution. It owns waitpoints: mailboxes that
the outside reaches with a token. A signal is a named message to one waitpoint, or to
whatever next waits under a name: a signal that no wait has taken yet is *kept*.
All three are kept until the execution itself is deleted, so that what happened
can be read back; what is still open is told by `Suspension.closed_at_ms` and
`Waitpoint.state`.
"""

from enum import StrEnum
from typing import ClassVar

from flowfabric.core.ids import (
    AttemptId,
    ExecutionId,
    LeaseId,
    SignalId,
    SuspensionId,
    WaitpointId,
    WaitpointKey,
    WorkerInstanceId,
)
from flowfabric.core.model import Record


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
    """Who asked for the suspension."""

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
    execution_id: ExecutionId
    suspension_id: SuspensionId
    attempt_index: int
    waitpoint_id: WaitpointId
    """The primary waitpoint: the first one bound."""
    reason_code: SuspensionReason
    requested_by: Requester
    resume_condition: str
    """JSON, see `core.conditions`."""
    resume_policy: str
    """JSON, see `core.suspension.ResumePolicy`."""
    timeout_at_ms: int | None
    timeout_behavior: TimeoutBehavior | None
    """Null once the timeout has escalated."""
    continuation_metadata_pointer: str | None
    created_at_ms: int
    last_signal_at_ms: int | None = None
    satisfied_at_ms: int | None = None
    closed_at_ms: int | None = None
    close_reason: str | None = None
    closer_signal_id: SignalId | None = None
    """The signal that met the condition."""


class Waitpoint(Record, frozen=True, kw_only=True):
    """A mailbox. Its token is not stored: it is computed from the key named by `token_kid`."""

    table: ClassVar[str] = "waitpoint"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "waitpoint_id")

    partition_key: int
    execution_id: ExecutionId
    waitpoint_id: WaitpointId
    waitpoint_key: WaitpointKey
    suspension_id: SuspensionId | None
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
    execution_id: ExecutionId
    signal_id: SignalId
    sequence: int
    """Counts the signals of one execution in the order they were accepted."""
    waitpoint_id: WaitpointId
    """Of a signal that met no waitpoint: `mailbox_id` of its name, which no waitpoint has."""
    waitpoint_key: WaitpointKey
    suspension_id: SuspensionId | None
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
    execution_id: ExecutionId
    waitpoint_id: WaitpointId
    idempotency_key: str
    signal_id: SignalId
    expires_at_ms: int | None
    """Null: it holds as long as the execution exists."""

    def holds(self, now_ms: int) -> bool:
        return self.expires_at_ms is None or self.expires_at_ms > now_ms


class SuspendDedup(Record, frozen=True, kw_only=True):
    """Remembers, for a while, what a suspend with this key was answered, and to whom."""

    table: ClassVar[str] = "suspend_dedup"
    key: ClassVar[tuple[str, ...]] = ("partition_key", "execution_id", "idempotency_key")

    partition_key: int
    execution_id: ExecutionId
    idempotency_key: str
    suspension_id: SuspensionId
    already_satisfied: bool
    lease_id: LeaseId
    lease_epoch: int
    attempt_id: AttemptId
    attempt_index: int
    worker_instance_id: WorkerInstanceId
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
