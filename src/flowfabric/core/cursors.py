"""Where a reader of the event log is, and in which history.

A log can lose its end: a standby that lagged takes over, or a backup is restored. New
events then get the numbers of those that were lost, and a reader who only remembers a number
would skip them. So a cursor also remembers the event it stands on. If the log holds another
one under that number, or none although it reaches around it, the reader is told, with a
cursor to resume from: the last event that is certainly older than what was lost.
"""

import re
from typing import Final

from msgspec import Struct

from flowfabric.errors import HistoryChanged, InvalidInput

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
    """Whether the log may have been read up to here. What retention deleted is not missed."""
    if cursor.event_id == 0 or around.last_id is None or around.first_id is None:
        return True
    if around.found is not None:
        return cursor.mark is None or around.found == cursor
    if cursor.mark is None:
        return cursor.event_id <= around.last_id
    return cursor.event_id < around.first_id


def history_changed(cursor: Cursor, resume_after: Cursor | None) -> HistoryChanged:
    resume = START if resume_after is None else write_cursor(resume_after)
    return HistoryChanged(
        f"the event log does not hold what cursor {write_cursor(cursor)} has seen: a standby that"
        " lagged took over, or a backup was restored. Read on with"
        f" after={resume!r}: nothing is missed, and some events come again",
        resume,
    )
