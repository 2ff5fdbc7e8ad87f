"""The event log: read page by page, or followed as it grows, from any place, through any filter.

A subscription reads pages after its cursor, so it misses nothing and repeats nothing, holds no
connection between two pages, and no more than one page in memory: a slow reader delays
no other. All subscriptions of a process wait together: one task listens for hints and looks now
and then for what came without one. Those that stand at the same place share their reads.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Generic, Self, TypedDict, TypeVar, Unpack

from msgspec import Struct
from msgspec.structs import replace

from flowfabric import errors
from flowfabric.batching import SharedReads
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.checks import check_int
from flowfabric.core.events import (
    RESUME_MARGIN_MS,
    CompletionEvent,
    Cursor,
    CursorSurroundings,
    EventCategory,
    EventFilter,
    InstanceTagEvent,
    LeaseHistoryEvent,
    LogEnd,
    ScannerFilter,
    SignalDeliveryEvent,
    StoredEvent,
    check_category,
    check_filter,
    completion_of,
    cursor_at,
    has_missed,
    history_changed,
    history_gone,
    instance_tag_of,
    is_of_this_history,
    lease_history_of,
    read_cursor,
    signal_delivery_of,
    write_cursor,
)
from flowfabric.core.ids import ExecutionId
from flowfabric.engine import shell, topics
from flowfabric.engine.shell import Shell
from flowfabric.logs import open_log
from flowfabric.outages import AFTER_ERROR_S, ASK_AGAIN, level_of, statements_within
from flowfabric.store.base import HintListener, Reader, Store


class EventLogPage(Struct, frozen=True, kw_only=True):
    events: tuple[StoredEvent, ...]
    cursor: str
    """Everything up to here has been seen; pass it as the next `after`. Opaque."""


class EventRow(Struct, frozen=True, kw_only=True):
    """The part of an event that a cursor remembers; only its number if the event is missing."""

    event_id: int
    occurred_at_ms: int | None
    execution_id: str | None

    @property
    def cursor(self) -> Cursor | None:
        if self.occurred_at_ms is None or self.execution_id is None:
            return None
        return cursor_at(self.event_id, self.occurred_at_ms, self.execution_id)


class PlaceRow(EventRow, frozen=True, kw_only=True):
    """An event, and the log around it."""

    first_id: int | None
    last_id: int | None
    gone_through: int


log = open_log(__name__)

T = TypeVar("T")

PAGE: Final = 256
LOOK_AGAIN_S: Final = 2.0
LOOK_AGAIN_MAX_S: Final = 5.0
"""How often to look without a hint: acquiring, renewing and releasing a lease sends none."""
LOST_HINT_S: Final = 10.0
"""How often to look for events that are always hinted, since a hint may be lost."""
LOOK_GAP_S: Final = 0.01
LOOK_TIMEOUT_S: Final = 5.0
COMMIT_WAIT_S: Final = 10.0
"""How long a page waits for an event whose number is taken: only for transactions open now, or a
number that was rolled back would hold it up for as long as others write."""
SUBSCRIPTIONS_MAX: Final = 10_000
"""Subscriptions that may wait in one process."""
FROM_NOW: Final = ""


class SubscriptionScope(TypedDict, total=False):
    """Where a subscription to one category begins, and whose executions it is about."""

    after: str | int
    """A cursor; from now on, unless given."""
    namespace: str | None
    tag: tuple[str, str] | None
    """A tag of the execution, and its value."""


class Told(Struct, frozen=True):
    """An event, and the cursor after it."""

    event: StoredEvent
    cursor: str


class Wanted(Struct, frozen=True, kw_only=True):
    """A page of the log, for a reader."""

    after: str
    category: EventCategory | None


class ToldPage(Struct, frozen=True, kw_only=True):
    told: tuple[Told, ...]
    cursor: str
    """Everything up to here has passed, or was filtered out."""


class Subscription(Generic[T]):
    """Events as they are logged, without end.

    `cursor` is how far it has read: `after=cursor` continues there, in any process.
    """

    def __init__(
        self,
        engine: "Subscriptions",
        start: LogEnd,
        wanted: EventFilter,
        make: Callable[[StoredEvent, str], T],
    ) -> None:
        self._engine = engine
        self._wanted = wanted
        self._make = make
        self._ready: list[Told] = []
        self._start = start
        self._through = self.cursor = write_cursor(start.after)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while not self._ready:
            page = await self._engine.next_events(self._through, self._wanted)
            self._take(page)
        return self._next()

    async def check(self) -> None:
        """Raise `HistoryChanged` now if the log has lost what the cursor has seen."""
        await self._engine.check_history(read_cursor(self._through))

    async def next_if_any(self) -> T | None:
        """The next event, if there is one already."""
        while not self._ready:
            page = await self._engine.next_events(self._through, self._wanted, waits=False)
            if page.cursor == self._through:
                return None
            self._take(page)
        return self._next()

    def _take(self, page: ToldPage) -> None:
        news = [told for told in page.told if self._start.is_news(told.event.event_id)]
        self._ready = news[::-1]
        self._through = page.cursor
        if not self._ready:
            self.cursor = page.cursor

    def _next(self) -> T:
        told = self._ready.pop()
        self.cursor = told.cursor if self._ready else self._through
        return self._make(told.event, told.cursor)


class Subscriptions(shell.Group):
    # Reading the event log, page by page, each reader in its own history

    def __init__(self, shell: Shell) -> None:
        super().__init__(shell)
        self._pages = SharedReads(self._read_wanted)
        self._log = LogWatch(shell.store)

    async def read_events(
        self, *, after: str | int = 0, limit: int = 256, category: str | None = None
    ) -> EventLogPage:
        """Events after a cursor, in order, none missing: see the store's promise.

        `after` is the cursor of a page, or the id of an event. Raises `HistoryChanged` when
        the log has lost what the cursor has seen, with the cursor to resume from.
        """
        check_int("limit", limit, 1, PAGE_MAX)
        return await self.read_log(read_cursor(after), limit, check_category(category))

    async def read_log(
        self, cursor: Cursor, limit: int, category: EventCategory | None, wait_s: float = 0.0
    ) -> EventLogPage:
        """Read a page, waiting up to `wait_s` for an event that is still to be committed."""
        page = await self.store.read_events(
            after=cursor.event_id, limit=limit, category=category, wait_s=wait_s
        )
        # Afterwards: the log may have been exchanged while it was read.
        await self.check_history(cursor)
        return EventLogPage(
            events=page.events,
            cursor=write_cursor(await self._end(cursor, page.events, page.cursor)),
        )

    async def end_of_log(self) -> LogEnd:
        """Where uncommitted events begin, and which of the later ones are committed already."""
        end = await self.store.end_of_events()
        found = (await self._around(end.after.event_id)).found
        return end if found is None else replace(end, after=found)

    async def _end(self, start: Cursor, events: Sequence[StoredEvent], end_id: int) -> Cursor:
        if events and events[-1].event_id == end_id:
            return _cursor_after(events[-1])
        if end_id == start.event_id and (start.mark is not None or end_id == 0):
            return start
        return (await self._around(end_id)).found or Cursor(end_id)

    async def check_history(self, cursor: Cursor) -> None:
        """Raise unless the log has what the cursor has seen, and what comes after it."""
        if not cursor.event_id:
            return
        around = await self._around(cursor.event_id)
        if not is_of_this_history(cursor, around):
            raise history_changed(cursor, await self._resume_from(cursor))
        if has_missed(cursor, around):
            raise history_gone(cursor)

    async def _around(self, event_id: int) -> CursorSurroundings:
        (row,) = await self.select_as(PlaceRow, "event_at", event_id=event_id)
        return CursorSurroundings(
            row.first_id, row.last_id, found=row.cursor, gone_through=row.gone_through
        )

    async def _resume_from(self, cursor: Cursor) -> Cursor | None:
        if cursor.occurred_at_ms is None:
            return None
        before_ms = cursor.occurred_at_ms - RESUME_MARGIN_MS

        rows = await self.select_as(EventRow, "event_before", at_ms=before_ms)
        return rows[0].cursor if rows else None

    async def subscribe_events(
        self,
        *,
        after: str | int = FROM_NOW,
        namespace: str | None = None,
        category: str | None = None,
        execution_id: str | None = None,
        kind: str | None = None,
        tag: tuple[str, str] | None = None,
    ) -> Subscription[Told]:
        """Every event from now on, or after a cursor, that passes the filter.

        Events come in order, each once per cursor; none is missed. Raises `HistoryChanged` when
        the log has lost what the cursor has seen; database outages are waited out.
        """
        wanted = check_filter(
            namespace=namespace,
            category=category,
            execution_id=None
            if execution_id is None
            else self.shell.check_execution_id(execution_id),
            kind=kind,
            tag=tag,
        )
        return Subscription(self, await self._start(after), wanted, Told)

    async def subscribe_completion(
        self, **scope: Unpack[SubscriptionScope]
    ) -> Subscription[CompletionEvent]:
        """The ends of executions."""
        return await self._subscribe(EventCategory.COMPLETION, completion_of, **scope)

    async def subscribe_lease_history(
        self, **scope: Unpack[SubscriptionScope]
    ) -> Subscription[LeaseHistoryEvent]:
        """Leases as they are acquired, renewed, lost and revoked."""
        return await self._subscribe(EventCategory.LEASE, lease_history_of, **scope)

    async def subscribe_signal_delivery(
        self, **scope: Unpack[SubscriptionScope]
    ) -> Subscription[SignalDeliveryEvent]:
        """Signals that executions accept."""
        return await self._subscribe(EventCategory.SIGNAL, signal_delivery_of, **scope)

    async def subscribe_instance_tags(
        self, **scope: Unpack[SubscriptionScope]
    ) -> Subscription[InstanceTagEvent]:
        """Tags set on executions, and changes of their values."""
        return await self._subscribe(EventCategory.TAG, instance_tag_of, **scope)

    async def _subscribe(
        self,
        category: EventCategory,
        make: Callable[[StoredEvent, str], T],
        *,
        after: str | int = FROM_NOW,
        namespace: str | None = None,
        tag: tuple[str, str] | None = None,
    ) -> Subscription[T]:
        wanted = check_filter(
            namespace=namespace, category=category, execution_id=None, kind=None, tag=tag
        )
        return Subscription(self, await self._start(after), wanted, make)

    async def next_events(self, after: str, wanted: EventFilter, *, waits: bool = True) -> ToldPage:
        """The next page of the log, once there is one; what the filter leaves of it."""
        asked = Wanted(after=after, category=wanted.category)
        if not waits:
            return await self._filtered(await self._read_wanted(asked), wanted)
        while True:
            try:
                page = await self._pages.share(asked)
                if page.cursor != after:
                    return await self._filtered(page, wanted)
            except ASK_AGAIN as error:
                log.log(level_of(error), "could not read events; trying again: %s", error)
                await asyncio.sleep(AFTER_ERROR_S)
                continue
            await self._log.wait(
                read_cursor(after).event_id,
                hinted=wanted.category not in (None, EventCategory.LEASE),
            )

    async def close_subscriptions(self) -> None:
        await self._log.close()

    async def _start(self, after: object) -> LogEnd:
        if after == FROM_NOW:
            return await self.end_of_log()
        cursor = read_cursor(after)
        return LogEnd(after=cursor, last_id=cursor.event_id)

    async def _read_wanted(self, wanted: Wanted) -> EventLogPage:
        return await self.read_log(read_cursor(wanted.after), PAGE, wanted.category, COMMIT_WAIT_S)

    async def _filtered(self, page: EventLogPage, wanted: EventFilter) -> ToldPage:
        events = [event for event in page.events if wanted.passes(event)]
        if events and wanted.needs_executions:
            ids = sorted({event.execution_id for event in events})
            like = await self.store.read(partial(_executions_like, ids=ids, wanted=wanted))
            events = [event for event in events if event.execution_id in like]
        return ToldPage(
            told=tuple(Told(event, write_cursor(_cursor_after(event))) for event in events),
            cursor=page.cursor,
        )


def _cursor_after(event: StoredEvent) -> Cursor:
    return cursor_at(event.event_id, event.occurred_at_ms, event.execution_id)


async def _executions_like(
    reader: Reader, ids: list[ExecutionId], wanted: EventFilter
) -> set[ExecutionId]:
    found = await reader.select_as(
        ExecutionId,
        "executions_like",
        **shell.id_columns(ids),
        execution_kind=wanted.kind,
        **ScannerFilter(namespace=wanted.namespace, tag=wanted.tag).parameters,
    )
    return set(found)


LOGGED: Final = (
    topics.EVENT_TOPIC,
    topics.COMPLETION_TOPIC,
    topics.LOST_TOPIC,
    topics.ATTEMPT_TOPIC,
)
"""The hints that follow a write to the log."""


class LogWatch:
    """Wakes all readers that wait for events."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[asyncio.Event, int] = {}
        self._unhinted: set[asyncio.Event] = set()
        """Waiters that also want events for which no hint is sent."""
        self._hints: HintListener | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def wait(self, after_id: int, *, hinted: bool) -> None:
        """Wait until the log reaches past an event, which may not be committed yet.

        `hinted`: what the caller waits for comes with a hint.
        """
        if self._closed:
            raise errors.Unavailable("subscriptions", "the engine was closed")
        if len(self._waiting) >= SUBSCRIPTIONS_MAX:
            raise errors.ResourceExhausted("subscriptions", SUBSCRIPTIONS_MAX)
        arrived = asyncio.Event()
        self._waiting[arrived] = after_id
        if not hinted:
            self._unhinted.add(arrived)
        if self._hints is not None:
            # A new waiter has to look at once.
            self._hints.wake()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="flowfabric-subscriptions")
        try:
            await arrived.wait()
        finally:
            del self._waiting[arrived]
            self._unhinted.discard(arrived)

    async def close(self) -> None:
        """Wake current waiters and refuse new ones."""
        self._closed = True
        for arrived in self._waiting:
            arrived.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        with self._store.hints(LOGGED) as hints:
            self._hints = hints
            while self._waiting:
                try:
                    with statements_within(LOOK_TIMEOUT_S):
                        if await self._look():
                            hints.found_work()
                except errors.FlowFabricError as error:
                    log.log(level_of(error), "could not look for events: %s", error)
                    await asyncio.sleep(AFTER_ERROR_S)
                await asyncio.sleep(LOOK_GAP_S)
                if self._waiting:
                    at_most_s = LOOK_AGAIN_MAX_S if self._unhinted else LOST_HINT_S
                    await hints.look_out(LOOK_AGAIN_S, at_most_s)

    async def _look(self) -> bool:
        (last_id,) = await self._store.read(lambda reader: reader.select_as(int, "last_event"))
        found = [arrived for arrived, after_id in self._waiting.items() if last_id > after_id]
        for arrived in found:
            arrived.set()
        return bool(found)
