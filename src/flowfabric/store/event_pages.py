"""One page of the event log, from the rows both databases return."""

from collections.abc import Sequence
from typing import Final

from flowfabric.core.events import StoredEvent
from flowfabric.store.base import EventPage, Row
from flowfabric.store.mapping import from_row

WINDOW: Final = 10_000
"""How many events a page looks through at most for those of its category."""

EVENTS_MAX: Final = 10_000


def page(rows: Sequence[Row], *, through: int, limit: int) -> EventPage:
    """A page of what was found up to `through`. A full page ends at its last event."""
    events = tuple(from_row(StoredEvent, row) for row in rows)
    cursor = events[-1].event_id if len(events) == limit else through
    return EventPage(events=events, cursor=cursor)


def window_of(rows: Sequence[Row]) -> tuple[int, int]:
    """The end of the unbroken run of ids, and the last id, of `event_window`."""
    unbroken, last = rows[0]["unbroken"], rows[0]["last"]
    assert isinstance(unbroken, int)
    assert isinstance(last, int)
    return unbroken, last
