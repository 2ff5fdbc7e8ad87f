"""What happened: the rows of the append-only event log.

One table serves every subscriber. `category` is the stream a subscriber asks
for, `event_type` what happened in it. Events are appended in the transaction
that causes them; their ids are handed out by the store.
"""

import re
from bisect import bisect_right
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, TypedDict, TypeVar, Unpack

import msgspec
from msgspec import Struct, structs

from flowfabric.core import checks, ids
from flowfabric.core.records import Execution, SignalEffect, view_of
from flowfabric.core.states import TerminalOutcome
from flowfabric.errors import Corruption, HistoryChanged, InvalidInput


class EventCategory(StrEnum):
    BUDGET = "budget"
    COMPLETION = "completion"
    LEASE = "lease"
    OPERATOR = "operator"
    SIGNAL = "signal"
    TAG = "tag"


def check_category(category: str | None) -> EventCategory | None:
    """Check the category a reader wants; None stands for all."""
    return None if category is None else checks.check_choice("category", category, EventCategory)


class LeaseEventType(StrEnum):
    ACQUIRED = "acquired"
    RENEWED = "renewed"
    EXPIRED = "expired"
    RECLAIMED = "reclaimed"
    REVOKED = "revoked"


class TagEventType(StrEnum):
    ATTACHED = "attached"
    CLEARED = "cleared"
    """Set to the empty string; tag keys are never removed."""


class Event(Struct, frozen=True, kw_only=True):
    category: EventCategory
    event_type: str
    partition_key: int
    execution_id: ids.ExecutionId
    """Of a budget's event: the budget's id, spelled as one."""
    flow_id: ids.FlowId | None = None
    lease_id: ids.LeaseId | None = None
    lease_epoch: int | None = None
    attempt_index: int | None = None
    worker_instance_id: ids.WorkerInstanceId | None = None
    reason: str | None = None
    details: str | None = None
    """JSON text, for the few events that carry more than a reason."""
    namespace: ids.Namespace
    instance_tag: str | None = None
    occurred_at_ms: int


class StoredEvent(Event, frozen=True, kw_only=True):
    event_id: int


class EventFields(TypedDict, total=False):
    """What only some events about an execution carry."""

    lease_id: ids.LeaseId | None
    lease_epoch: int
    attempt_index: int
    worker_instance_id: ids.WorkerInstanceId | None
    reason: str | None
    details: str


def event_about(
    execution: Execution,
    category: EventCategory,
    event_type: str,
    now_ms: int,
    **fields: Unpack[EventFields],
) -> Event:
    return Event(
        category=category,
        event_type=event_type,
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        flow_id=execution.flow_id,
        namespace=execution.namespace,
        instance_tag=execution.instance_tag,
        occurred_at_ms=now_ms,
        **fields,
    )


def lease_event(
    execution: Execution, event_type: LeaseEventType, now_ms: int, reason: str | None = None
) -> Event:
    """An event about the lease `execution` holds; pass the record as it is while it holds it."""
    return event_about(
        execution,
        EventCategory.LEASE,
        event_type,
        now_ms,
        lease_id=execution.lease_id,
        lease_epoch=execution.lease_epoch,
        attempt_index=execution.current_attempt_index,
        worker_instance_id=execution.worker_instance_id,
        reason=reason,
    )


def completion_event(execution: Execution, outcome: TerminalOutcome, now_ms: int) -> Event:
    return event_about(
        execution,
        EventCategory.COMPLETION,
        outcome,
        now_ms,
        lease_epoch=execution.lease_epoch,
        attempt_index=execution.current_attempt_index,
    )


def operator_event(execution: Execution, event_type: str, now_ms: int, details: str) -> Event:
    return event_about(execution, EventCategory.OPERATOR, event_type, now_ms, details=details)


class TagDetails(Struct, frozen=True):
    """What the event of a tag carries."""

    key: str
    value: str


def tag_events(execution: Execution, tags: Mapping[str, str], now_ms: int) -> tuple[Event, ...]:
    """An event for each tag that an execution has been given, or that has another value now."""
    return tuple(
        event_about(execution, EventCategory.TAG, event_type, now_ms, details=details)
        for _, _, event_type, details in tag_rows(tags)
    )


def tag_rows(tags: Mapping[str, str]) -> list[tuple[str, str, TagEventType, str]]:
    """Each tag with the type and details of its event."""
    return [
        (
            key,
            value,
            TagEventType.ATTACHED if value else TagEventType.CLEARED,
            msgspec.json.encode(TagDetails(key, value)).decode(),
        )
        for key, value in tags.items()
    ]


# Where a reader of the event log is, and in which history -------------------
#
# A log can lose its end: a standby that lagged takes over, or a backup is restored. New
# events then get the numbers of those that were lost, and a reader who only remembers a number
# would skip them. So a cursor also remembers the event it stands on. If the log holds another
# one under that number, or none although it reaches around it, the reader gets an error, with a
# cursor to resume from: the last event that is certainly older than what was lost.

START: Final = "0"
"""Before the first event."""
RESUME_MARGIN_MS: Final = 60_000
"""How far before its event a cursor resumes: what was lost may be that much older."""

_EVENT_ID_MAX: Final = 2**62
_CURSOR: Final = re.compile(r"(\d{1,19})(?:-(\d{1,15})-([0-9a-f]{12}))?", re.ASCII)
_MARK_CHARS: Final = 12


class Cursor(Struct, frozen=True):
    """After which event; without a time and a mark, its number is taken on trust."""

    event_id: int
    occurred_at_ms: int | None = None
    mark: str | None = None


class CursorSurroundings(Struct, frozen=True):
    """What the log holds where a cursor stands; its first and last number, if it holds any."""

    first_id: int | None
    last_id: int | None
    found: Cursor | None
    gone_through: int = 0
    """The newest event that was deleted for its age."""


class LogEnd(Struct, frozen=True, kw_only=True):
    """Where a reader of future commits begins.

    Numbers are handed out before their events are committed: one that is missing may still be
    filled. So reading begins before the first of those, and what was there already is left out.
    """

    after: Cursor
    last_id: int
    missing: tuple[tuple[int, int], ...] = ()
    """The numbers between both that no event had: the first and the last of each run."""

    def is_news(self, event_id: int) -> bool:
        """Whether an event is new since then."""
        if event_id > self.last_id:
            return True
        place = bisect_right(self.missing, event_id, key=lambda run: run[0])
        return place > 0 and event_id <= self.missing[place - 1][1]


def cursor_at(event_id: int, occurred_at_ms: int, execution_id: str) -> Cursor:
    return Cursor(event_id, occurred_at_ms, execution_id[-_MARK_CHARS:])


def write_cursor(cursor: Cursor) -> str:
    if cursor.mark is None:
        return str(cursor.event_id)
    return f"{cursor.event_id}-{cursor.occurred_at_ms}-{cursor.mark}"


def read_cursor(given: object) -> Cursor:
    """A cursor from text that `write_cursor` made, or from the number of an event."""
    if isinstance(given, int) and not isinstance(given, bool):
        given = str(given)
    if not isinstance(given, str):
        raise InvalidInput("after", "must be a cursor, or the number of an event", given)
    parts = _CURSOR.fullmatch(given)
    if parts is None or int(parts[1]) > _EVENT_ID_MAX:
        raise InvalidInput("after", "must be a cursor from `read_events`, or an event's id", given)
    return Cursor(int(parts[1]), None if parts[2] is None else int(parts[2]), parts[3])


def is_of_this_history(cursor: Cursor, around: CursorSurroundings) -> bool:
    """Whether the cursor stands in this log's history; deletion by retention does not count
    against it."""
    if cursor.event_id == 0 or around.last_id is None or around.first_id is None:
        return True
    if around.found is not None:
        return cursor.mark is None or around.found == cursor
    if cursor.mark is None:
        return cursor.event_id <= around.last_id
    return cursor.event_id < around.first_id


def has_missed(cursor: Cursor, around: CursorSurroundings) -> bool:
    """Whether retention has deleted events that come after a cursor."""
    return 0 < cursor.event_id < around.gone_through


def history_gone(cursor: Cursor) -> HistoryChanged:
    return HistoryChanged(
        f"events that came after cursor {write_cursor(cursor)} were deleted for their age, see"
        f" keep_events. Read on with after={START!r}: that is what the log still holds",
        START,
    )


def history_changed(cursor: Cursor, resume_after: Cursor | None) -> HistoryChanged:
    resume = START if resume_after is None else write_cursor(resume_after)
    return HistoryChanged(
        f"the event log does not hold what cursor {write_cursor(cursor)} has seen: a standby that"
        " lagged took over, or a backup was restored. Read on with"
        f" after={resume!r}: nothing is missed, and some events come again",
        resume,
    )


# What subscribers of the event log ask for, and what they get ----------
#
# One log serves all of them. A subscription is a place in it and a filter: an event passes if
# everything the filter names is equal, and what an execution lacks, or an execution that is
# gone, is equal to nothing.


class ScannerFilter(Struct, frozen=True, kw_only=True):
    """Whose executions a reconciler or a reader acts on; everyone's by default."""

    namespace: str | None = None
    tag: tuple[str, str] | None = None
    """A tag of the execution, and its value."""

    @property
    def parameters(self) -> dict[str, str | None]:
        """As statements take it."""
        key, value = (None, None) if self.tag is None else self.tag
        return {"namespace": self.namespace, "tag_key": key, "tag_value": value}


EVERYBODY: Final = ScannerFilter()


def check_scanner_filter(only: object) -> ScannerFilter:
    if not isinstance(only, ScannerFilter):
        raise InvalidInput("only", "must be a ScannerFilter", only)
    return ScannerFilter(
        namespace=checks.optional(ids.parse_namespace, only.namespace),
        tag=None if only.tag is None else _check_tag(only.tag),
    )


class EventFilter(Struct, frozen=True, kw_only=True):
    """Which events a reader wants: all of them, unless it says otherwise."""

    namespace: str | None = None
    category: EventCategory | None = None
    execution_id: ids.ExecutionId | None = None
    kind: str | None = None
    """Of the execution: a task's name, in any version, or in one (`mail@2`)."""
    tag: tuple[str, str] | None = None
    """A tag of the execution, and its value."""

    @property
    def needs_executions(self) -> bool:
        """Whether it also needs the executions: events alone do not say."""
        return self.kind is not None or self.tag is not None

    def passes(self, event: StoredEvent) -> bool:
        """As far as the event alone says."""
        return (
            self.namespace in (None, event.namespace)
            and self.category in (None, event.category)
            and self.execution_id in (None, event.execution_id)
        )


def check_filter(
    *,
    namespace: object,
    category: str | None,
    execution_id: ids.ExecutionId | None,
    kind: object,
    tag: object,
) -> EventFilter:
    return EventFilter(
        namespace=checks.optional(ids.parse_namespace, namespace),
        category=check_category(category),
        execution_id=execution_id,
        kind=None if kind is None else checks.check_name("kind", kind),
        tag=None if tag is None else _check_tag(tag),
    )


def _check_tag(tag: object) -> tuple[str, str]:
    if not isinstance(tag, tuple | list) or len(tag) != 2:
        raise InvalidInput("tag", "must be a key and a value", tag)
    key, value = tag
    name = checks.check_tag_key(key)
    return name, checks.check_tag_value(name, value)


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


class TypedEvent(Struct, frozen=True, kw_only=True):
    cursor: str
    execution_id: ids.ExecutionId
    at_ms: int


class CompletionEvent(TypedEvent, frozen=True, kw_only=True):
    """An execution has ended."""

    flow_id: ids.FlowId | None
    outcome: str
    """One of `CompletionOutcome`."""


class LeaseHistoryEvent(TypedEvent, frozen=True, kw_only=True):
    """A lease was acquired, renewed, lost or revoked."""

    event_type: LeaseEventType
    lease_id: str | None
    worker_instance_id: str | None
    """Whose lease it is, or was."""
    revoked_by: str | None
    """Why it was released or taken away."""


class SignalDeliveryEvent(TypedEvent, frozen=True, kw_only=True):
    """A signal was accepted."""

    signal_id: str
    waitpoint_id: str | None
    source_identity: str | None
    effect: str
    """One of `DeliveryEffect`, or what is stored."""


class InstanceTagEvent(TypedEvent, frozen=True, kw_only=True):
    """A tag was set on an execution, or given another value."""

    event_type: TagEventType
    tag: str
    value: str
    """Empty for one that was cleared."""


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


E = TypeVar("E", bound=TypedEvent)


def _typed(kind: type[E], event: StoredEvent, cursor: str, **details: object) -> E:
    return view_of(kind, event, cursor=cursor, at_ms=event.occurred_at_ms, **details)


def completion_of(event: StoredEvent, cursor: str) -> CompletionEvent:
    outcome = _OUTCOMES.get(event.event_type, event.event_type)
    return _typed(CompletionEvent, event, cursor, outcome=outcome)


def lease_history_of(event: StoredEvent, cursor: str) -> LeaseHistoryEvent:
    try:
        event_type = LeaseEventType(event.event_type)
    except ValueError:
        raise damaged(event) from None
    revoked = event_type is LeaseEventType.REVOKED
    revoked_by = (event.reason or "operator") if revoked else None
    return _typed(LeaseHistoryEvent, event, cursor, event_type=event_type, revoked_by=revoked_by)


def signal_delivery_of(event: StoredEvent, cursor: str) -> SignalDeliveryEvent:
    try:
        details = msgspec.json.decode(event.details or "", type=SignalDetails)
    except msgspec.DecodeError:
        raise damaged(event) from None
    effect = _EFFECTS.get(event.event_type, event.event_type)
    return _typed(SignalDeliveryEvent, event, cursor, effect=effect, **structs.asdict(details))


def instance_tag_of(event: StoredEvent, cursor: str) -> InstanceTagEvent:
    try:
        details = msgspec.json.decode(event.details or "", type=TagDetails)
        event_type = TagEventType(event.event_type)
    except (msgspec.DecodeError, ValueError):
        raise damaged(event) from None
    return _typed(
        InstanceTagEvent,
        event,
        cursor,
        event_type=event_type,
        tag=details.key,
        value=details.value,
    )


def damaged(event: StoredEvent) -> Corruption:
    """An event that does not decode."""
    return Corruption(
        f"event {event.event_id} of {event.execution_id} does not decode: {event.category}"
        f" {event.event_type!r}"
    )
