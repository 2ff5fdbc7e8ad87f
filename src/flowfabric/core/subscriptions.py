"""What subscribers of the event log ask for, and what they are told.

One log serves all of them. A subscription is a place in it and a filter: an event passes if
everything the filter names is equal, and what an execution lacks, or an execution that is gone,
is equal to nothing.
"""

from enum import StrEnum
from typing import Final

import msgspec
from msgspec import Struct

from flowfabric.core.checks import check_name, check_tag_key, check_tag_value
from flowfabric.core.events import EventCategory, LeaseEventType, StoredEvent, check_category
from flowfabric.core.ids import ExecutionId, FlowId, parse_namespace
from flowfabric.core.records import SignalEffect
from flowfabric.core.states import TerminalOutcome
from flowfabric.errors import Corruption, InvalidInput


class EventFilter(Struct, frozen=True, kw_only=True):
    """Which events somebody wants; everything, unless it says otherwise."""

    namespace: str | None = None
    category: EventCategory | None = None
    execution_id: ExecutionId | None = None
    kind: str | None = None
    """Of the execution: a task's name, in any version, or in one (`mail@2`)."""
    tag: tuple[str, str] | None = None
    """A tag of the execution, and its value."""

    @property
    def needs_executions(self) -> bool:
        """Whether events alone do not tell."""
        return self.kind is not None or self.tag is not None

    def passes(self, event: StoredEvent) -> bool:
        """As far as the event tells."""
        return (
            self.namespace in (None, event.namespace)
            and self.category in (None, event.category)
            and self.execution_id in (None, event.execution_id)
        )


def check_filter(
    *,
    namespace: object,
    category: str | None,
    execution_id: ExecutionId | None,
    kind: object,
    tag: object,
) -> EventFilter:
    return EventFilter(
        namespace=None if namespace is None else parse_namespace(namespace),
        category=check_category(category),
        execution_id=execution_id,
        kind=None if kind is None else check_name("kind", kind),
        tag=None if tag is None else _check_tag(tag),
    )


def _check_tag(tag: object) -> tuple[str, str]:
    if not isinstance(tag, tuple | list) or len(tag) != 2:
        raise InvalidInput("tag", "must be a key and a value", tag)
    key, value = tag
    name = check_tag_key(key)
    return name, check_tag_value(name, value)


# Typed events ---------------------------------------------------------------------------


class CompletionOutcome(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"


class DeliveryEffect(StrEnum):
    SATISFIED = "satisfied"
    BUFFERED = "buffered"
    DEDUPED = "deduped"


class CompletionEvent(Struct, frozen=True, kw_only=True):
    """An execution has ended."""

    cursor: str
    execution_id: ExecutionId
    flow_id: FlowId | None
    outcome: str
    """One of `CompletionOutcome`."""
    at_ms: int


class LeaseHistoryEvent(Struct, frozen=True, kw_only=True):
    """A lease was given, kept, lost or taken away."""

    cursor: str
    execution_id: ExecutionId
    event_type: LeaseEventType
    lease_id: str | None
    worker_instance_id: str | None
    """Whose lease it is, or was."""
    revoked_by: str | None
    """Why it was released or taken away."""
    at_ms: int


class SignalDeliveryEvent(Struct, frozen=True, kw_only=True):
    """A signal was accepted."""

    cursor: str
    execution_id: ExecutionId
    signal_id: str
    waitpoint_id: str | None
    source_identity: str | None
    effect: str
    """One of `DeliveryEffect`, or what is stored."""
    at_ms: int


class SignalDetails(Struct, frozen=True):
    """What the event of a signal carries."""

    signal_id: str
    waitpoint_id: str | None = None
    source_identity: str | None = None


_OUTCOMES: Final = {
    TerminalOutcome.SUCCESS.value: CompletionOutcome.SUCCESS,
    TerminalOutcome.FAILED.value: CompletionOutcome.FAILURE,
    TerminalOutcome.CANCELLED.value: CompletionOutcome.CANCELLED,
    TerminalOutcome.EXPIRED.value: CompletionOutcome.EXPIRED,
    TerminalOutcome.SKIPPED.value: CompletionOutcome.SKIPPED,
}
_EFFECTS: Final = {
    SignalEffect.SATISFIED.value: DeliveryEffect.SATISFIED,
    SignalEffect.APPENDED.value: DeliveryEffect.BUFFERED,
    SignalEffect.BUFFERED.value: DeliveryEffect.BUFFERED,
    SignalEffect.KEPT.value: DeliveryEffect.BUFFERED,
    SignalEffect.APPENDED_DUPLICATE.value: DeliveryEffect.DEDUPED,
}


def completion_of(event: StoredEvent, cursor: str) -> CompletionEvent:
    return CompletionEvent(
        cursor=cursor,
        execution_id=event.execution_id,
        flow_id=event.flow_id,
        outcome=_OUTCOMES.get(event.event_type, event.event_type),
        at_ms=event.occurred_at_ms,
    )


def lease_history_of(event: StoredEvent, cursor: str) -> LeaseHistoryEvent:
    try:
        event_type = LeaseEventType(event.event_type)
    except ValueError:
        raise _damaged(event) from None
    revoked = event_type is LeaseEventType.REVOKED
    return LeaseHistoryEvent(
        cursor=cursor,
        execution_id=event.execution_id,
        event_type=event_type,
        lease_id=event.lease_id,
        worker_instance_id=event.worker_instance_id,
        revoked_by=(event.reason or "operator") if revoked else None,
        at_ms=event.occurred_at_ms,
    )


def signal_delivery_of(event: StoredEvent, cursor: str) -> SignalDeliveryEvent:
    try:
        details = msgspec.json.decode(event.details or "", type=SignalDetails)
    except msgspec.DecodeError:
        raise _damaged(event) from None
    return SignalDeliveryEvent(
        cursor=cursor,
        execution_id=event.execution_id,
        signal_id=details.signal_id,
        waitpoint_id=details.waitpoint_id,
        source_identity=details.source_identity,
        effect=_EFFECTS.get(event.event_type, event.event_type),
        at_ms=event.occurred_at_ms,
    )


def _damaged(event: StoredEvent) -> Corruption:
    return Corruption(
        f"event {event.event_id} of {event.execution_id} does not decode: {event.category}"
        f" {event.event_type!r}"
    )
