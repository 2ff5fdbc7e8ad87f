"""Reading the event log, page by page, each reader in its own history."""

from collections.abc import Sequence

from msgspec import Struct

from flowfabric.core.checks import check_int
from flowfabric.core.events import (
    RESUME_MARGIN_MS,
    Cursor,
    CursorSurroundings,
    EventCategory,
    StoredEvent,
    check_category,
    cursor_at,
    history_changed,
    is_of_this_history,
    read_cursor,
    write_cursor,
)
from flowfabric.core.limits import PAGE_MAX
from flowfabric.engine.unit import Operations
from flowfabric.store.base import Reader, Row


class EventLogPage(Struct, frozen=True, kw_only=True):
    events: tuple[StoredEvent, ...]
    cursor: str
    """Everything up to here has been seen; pass it as the next `after`. Opaque."""


class EventReads(Operations):
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
        """The same, waiting so long for an event that is still to be committed."""
        page = await self.store.read_events(
            after=cursor.event_id, limit=limit, category=category, wait_s=wait_s
        )
        # Afterwards: the log may have been exchanged while it was read.
        if cursor.event_id:
            await self._check_history(cursor)
        return EventLogPage(
            events=page.events,
            cursor=write_cursor(await self._end(cursor, page.events, page.cursor)),
        )

    async def end_of_log(self) -> Cursor:
        """After everything there is now; whatever is still to be committed comes after it."""
        end_id = await self.store.end_of_events()
        return (await self._around(end_id)).found or Cursor(end_id)

    async def _end(self, start: Cursor, events: Sequence[StoredEvent], end_id: int) -> Cursor:
        if events and events[-1].event_id == end_id:
            return cursor_at(end_id, events[-1].occurred_at_ms, events[-1].execution_id)
        if end_id == start.event_id and (start.mark is not None or end_id == 0):
            return start
        return (await self._around(end_id)).found or Cursor(end_id)

    async def _check_history(self, cursor: Cursor) -> None:
        if is_of_this_history(cursor, await self._around(cursor.event_id)):
            return
        raise history_changed(cursor, await self._resume_from(cursor))

    async def _around(self, event_id: int) -> CursorSurroundings:
        async def body(reader: Reader) -> CursorSurroundings:
            (row,) = await reader.select("event_at", event_id=event_id)
            return CursorSurroundings(
                first_id=_number(row["first_id"]),
                last_id=_number(row["last_id"]),
                found=_cursor(row),
            )

        return await self.store.read(body)

    async def _resume_from(self, cursor: Cursor) -> Cursor | None:
        if cursor.occurred_at_ms is None:
            return None
        before_ms = cursor.occurred_at_ms - RESUME_MARGIN_MS

        async def body(reader: Reader) -> Cursor | None:
            rows = await reader.select("event_before", at_ms=before_ms)
            return _cursor(rows[0]) if rows else None

        return await self.store.read(body)


def _cursor(row: Row) -> Cursor | None:
    if row["execution_id"] is None:
        return None
    return cursor_at(
        int(str(row["event_id"])), int(str(row["occurred_at_ms"])), str(row["execution_id"])
    )


def _number(value: object) -> int | None:
    return None if value is None else int(str(value))
