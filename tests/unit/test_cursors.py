"""Which history a reader of the event log is in."""

import pytest
from hypothesis import given
from hypothesis.strategies import from_regex, integers

from flowfabric.core.events import (
    Cursor,
    CursorSurroundings,
    cursor_at,
    has_missed,
    history_changed,
    is_of_this_history,
    read_cursor,
    write_cursor,
)

SEEN = cursor_at(50, 1_000, "{fp:3}:00000000-0000-4000-8000-0123456789ab")
OTHER = cursor_at(50, 1_000, "{fp:3}:00000000-0000-4000-8000-ffffffffffff")
LATER = cursor_at(50, 2_000, "{fp:3}:00000000-0000-4000-8000-0123456789ab")


@pytest.mark.parametrize(
    ("cursor", "around", "same"),
    [
        pytest.param(SEEN, CursorSurroundings(1, 90, SEEN), True, id="it is there"),
        pytest.param(SEEN, CursorSurroundings(1, 90, OTHER), False, id="another has its number"),
        pytest.param(SEEN, CursorSurroundings(1, 90, LATER), False, id="the same at another time"),
        pytest.param(SEEN, CursorSurroundings(1, 40, None), False, id="the log ends before it"),
        pytest.param(SEEN, CursorSurroundings(1, 90, None), False, id="the log has a gap there"),
        pytest.param(SEEN, CursorSurroundings(60, 90, None), True, id="retention deleted it"),
        pytest.param(SEEN, CursorSurroundings(None, None, None), True, id="retention deleted all"),
        pytest.param(Cursor(0), CursorSurroundings(1, 90, None), True, id="before the first"),
        pytest.param(Cursor(50), CursorSurroundings(1, 90, OTHER), True, id="a number on trust"),
        pytest.param(Cursor(50), CursorSurroundings(1, 40, None), False, id="a number ahead"),
        pytest.param(Cursor(50), CursorSurroundings(1, 90, None), True, id="a number between two"),
    ],
)
def test_a_cursor_is_of_the_history_that_holds_its_event(
    cursor: Cursor, around: CursorSurroundings, same: bool
) -> None:
    assert is_of_this_history(cursor, around) is same


@pytest.mark.parametrize(
    ("cursor", "gone_through", "missed"),
    [
        pytest.param(SEEN, 0, False, id="nothing was deleted"),
        pytest.param(SEEN, 49, False, id="what it has seen was deleted"),
        pytest.param(SEEN, 50, False, id="all it has seen was deleted, and nothing else"),
        pytest.param(SEEN, 51, True, id="more than it has seen was deleted"),
        pytest.param(Cursor(50), 51, True, id="a number"),
        pytest.param(Cursor(0), 51, False, id="the start of what there is"),
    ],
)
def test_a_cursor_has_missed_what_was_deleted_after_it(
    cursor: Cursor, gone_through: int, missed: bool
) -> None:
    assert has_missed(cursor, CursorSurroundings(60, 90, None, gone_through)) is missed


@given(integers(0, 2**62), integers(0, 10**14), from_regex(r"[0-9a-f]{12}", fullmatch=True))
def test_a_cursor_is_read_as_it_was_written(event_id: int, at_ms: int, mark: str) -> None:
    for cursor in (Cursor(event_id, at_ms, mark), Cursor(event_id)):
        assert read_cursor(write_cursor(cursor)) == cursor


def test_who_cannot_resume_elsewhere_begins_anew() -> None:
    assert history_changed(SEEN, None).resume_after == "0"
    assert history_changed(SEEN, OTHER).resume_after == write_cursor(OTHER)
