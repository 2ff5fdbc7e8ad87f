"""What happened: the rows of the append-only event log.

One table serves every subscriber. `category` is the stream a subscriber asks
for, `event_type` what happened in it. Events are appended in the transaction
that causes them; their ids are handed out by the store.
"""

from enum import StrEnum

from msgspec import Struct

from flowfabric.core.ids import ExecutionId, FlowId, LeaseId, Namespace, WorkerInstanceId
from flowfabric.core.records import Execution
from flowfabric.core.states import TerminalOutcome
from flowfabric.errors import InvalidInput


class EventCategory(StrEnum):
    COMPLETION = "completion"
    LEASE = "lease"
    OPERATOR = "operator"
    SIGNAL = "signal"


def check_category(category: str | None) -> EventCategory | None:
    """One that a reader asks for; None is all of them."""
    if category is None:
        return None
    if category not in list(EventCategory):
        raise InvalidInput("category", f"must be one of {', '.join(EventCategory)}", category)
    return EventCategory(category)


class LeaseEventType(StrEnum):
    ACQUIRED = "acquired"
    RENEWED = "renewed"
    EXPIRED = "expired"
    RECLAIMED = "reclaimed"
    REVOKED = "revoked"


class Event(Struct, frozen=True, kw_only=True):
    category: EventCategory
    event_type: str
    partition_key: int
    execution_id: ExecutionId
    flow_id: FlowId | None = None
    lease_id: LeaseId | None = None
    lease_epoch: int | None = None
    attempt_index: int | None = None
    worker_instance_id: WorkerInstanceId | None = None
    reason: str | None = None
    details: str | None = None
    """JSON text, for the few events that carry more than a reason."""
    namespace: Namespace
    instance_tag: str | None = None
    occurred_at_ms: int


class StoredEvent(Event, frozen=True, kw_only=True):
    event_id: int


def lease_event(
    execution: Execution, event_type: LeaseEventType, now_ms: int, reason: str | None = None
) -> Event:
    """An event about the lease `execution` holds; pass the record as it is while it holds it."""
    return Event(
        category=EventCategory.LEASE,
        event_type=event_type,
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        flow_id=execution.flow_id,
        lease_id=execution.lease_id,
        lease_epoch=execution.lease_epoch,
        attempt_index=execution.current_attempt_index,
        worker_instance_id=execution.worker_instance_id,
        reason=reason,
        namespace=execution.namespace,
        instance_tag=execution.instance_tag,
        occurred_at_ms=now_ms,
    )


def completion_event(execution: Execution, outcome: TerminalOutcome, now_ms: int) -> Event:
    return Event(
        category=EventCategory.COMPLETION,
        event_type=outcome,
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        flow_id=execution.flow_id,
        lease_epoch=execution.lease_epoch,
        attempt_index=execution.current_attempt_index,
        namespace=execution.namespace,
        instance_tag=execution.instance_tag,
        occurred_at_ms=now_ms,
    )


def operator_event(execution: Execution, event_type: str, now_ms: int, details: str) -> Event:
    return Event(
        category=EventCategory.OPERATOR,
        event_type=event_type,
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        flow_id=execution.flow_id,
        namespace=execution.namespace,
        instance_tag=execution.instance_tag,
        details=details,
        occurred_at_ms=now_ms,
    )
