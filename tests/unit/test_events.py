"""Events as subscribers are told of them."""

import pytest
from msgspec import structs

from flowfabric.core import events
from flowfabric.core.events import EventCategory, StoredEvent
from flowfabric.core.ids import ExecutionId, Namespace
from flowfabric.errors import Corruption

STORED = StoredEvent(
    category=EventCategory.COMPLETION,
    event_type="success",
    partition_key=7,
    execution_id=ExecutionId("{fp:7}:550e8400-e29b-41d4-a716-446655440000"),
    namespace=Namespace("default"),
    occurred_at_ms=5,
    event_id=1,
)


@pytest.mark.parametrize(
    ("stored", "outcome"),
    [
        ("success", "success"),
        ("failed", "failure"),
        ("cancelled", "cancelled"),
        ("expired", "expired"),
        ("skipped", "skipped"),
        ("invented later", "invented later"),
    ],
)
def test_an_ending_is_told_by_its_outcome(stored: str, outcome: str) -> None:
    told = events.completion_of(structs.replace(STORED, event_type=stored), "1")
    assert (told.outcome, told.at_ms, told.cursor) == (outcome, 5, "1")


@pytest.mark.parametrize(
    ("stored", "effect"),
    [
        ("resume_condition_satisfied", "satisfied"),
        ("appended_to_waitpoint", "buffered"),
        ("appended_to_waitpoint_duplicate", "deduped"),
        ("signal_ignored_not_in_condition", "signal_ignored_not_in_condition"),
    ],
)
def test_a_signal_is_told_by_its_effect(stored: str, effect: str) -> None:
    details = '{"signal_id": "s-1", "source_identity": "ann"}'
    event = structs.replace(
        STORED, category=EventCategory.SIGNAL, event_type=stored, details=details
    )
    told = events.signal_delivery_of(event, "1")
    assert (told.effect, told.signal_id, told.waitpoint_id) == (effect, "s-1", None)


def test_what_does_not_decode_is_said_to_be_damaged() -> None:
    for tell in (events.lease_history_of, events.signal_delivery_of, events.instance_tag_of):
        with pytest.raises(Corruption, match="event 1 of"):
            tell(STORED, "1")


@pytest.mark.parametrize(
    ("event_id", "news"),
    [(9, False), (10, True), (14, True), (15, False), (20, True), (21, False), (30, False)],
)
def test_news_are_what_fills_a_gap_or_comes_after_the_end(event_id: int, news: bool) -> None:
    end = events.LogEnd(after=events.Cursor(9), last_id=30, missing=((10, 14), (20, 20)))
    assert end.is_news(event_id) is news
    assert end.is_news(31)


def test_after_a_cursor_everything_is_news() -> None:
    assert events.LogEnd(after=events.Cursor(9), last_id=9).is_news(10)
