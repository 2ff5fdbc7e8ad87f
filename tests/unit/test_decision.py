"""Combining what several decisions want written."""

from msgspec import structs

from flowfabric.core.decisions import NO_CHANGES, Changes, combine
from flowfabric.core.events import LeaseEventType, lease_event
from tests.unit.lives import NOW_MS, running

SUBJECT = running()
FIRST = SUBJECT.execution
assert SUBJECT.attempt is not None
ATTEMPT = SUBJECT.attempt
SECOND = structs.replace(FIRST, priority=2)
OTHER = structs.replace(FIRST, execution_id="{fp:86}:00000000-0000-4000-8000-000000000009")
EVENT = lease_event(FIRST, LeaseEventType.ACQUIRED, NOW_MS)
LATER = lease_event(FIRST, LeaseEventType.RENEWED, NOW_MS)


def test_each_row_is_written_once_with_its_last_version() -> None:
    assert combine(
        [
            Changes(updates=(FIRST, OTHER), events=(EVENT,)),
            NO_CHANGES,
            Changes(inserts=(ATTEMPT,), updates=(SECOND,), events=(LATER, EVENT)),
        ]
    ) == Changes(inserts=(ATTEMPT,), updates=(SECOND, OTHER), events=(EVENT, LATER, EVENT))


def test_an_inserted_row_that_changes_is_inserted_as_it_ends_up() -> None:
    assert combine([Changes(inserts=(FIRST,)), Changes(updates=(SECOND,))]) == Changes(
        inserts=(SECOND,)
    )


def test_a_row_inserted_and_deleted_is_never_written() -> None:
    assert combine([Changes(inserts=(FIRST,)), Changes(deletes=(SECOND,))]) == NO_CHANGES


def test_a_changed_row_that_is_deleted_is_only_deleted() -> None:
    assert combine([Changes(updates=(FIRST,)), Changes(deletes=(SECOND,))]) == Changes(
        deletes=(SECOND,)
    )


def test_a_deleted_row_that_comes_again_is_changed() -> None:
    assert combine([Changes(deletes=(FIRST,)), Changes(inserts=(SECOND,))]) == Changes(
        updates=(SECOND,)
    )


def test_rows_of_different_tables_never_meet() -> None:
    changes = Changes(updates=(FIRST, ATTEMPT))
    assert combine([changes, changes]) == changes
    assert combine([]) == NO_CHANGES
