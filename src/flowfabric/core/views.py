"""What readers see of an execution: pure views over its record.

A stored value that no operation could have written is corruption, and named as such.
"""

from msgspec import Struct

from flowfabric.core.ids import (
    AttemptId,
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
from flowfabric.core.policies import parse_policy
from flowfabric.core.records import Execution, SignalRecord
from flowfabric.core.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.core.steps import is_blocked
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


class StateVector(Struct, frozen=True, kw_only=True):
    lifecycle_phase: LifecyclePhase
    ownership_state: OwnershipState
    eligibility_state: EligibilityState
    blocking_reason: BlockingReason
    terminal_outcome: TerminalOutcome
    attempt_state: AttemptState
    public_state: PublicState


class ExecutionInfo(Struct, frozen=True, kw_only=True):
    """The full state vector; times as decimal text, as clients of the wire expect them."""

    execution_id: ExecutionId
    namespace: Namespace
    lane_id: LaneId
    priority: int
    execution_kind: str
    state_vector: StateVector
    public_state: PublicState
    created_at: str
    started_at: str | None
    completed_at: str | None
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
