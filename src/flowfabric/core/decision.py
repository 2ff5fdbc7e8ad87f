"""What an operation wants written: the only thing a store ever saves.

A decision holds whole records and events, so every change of state travels
with its history and both land in one transaction or not at all.
"""

from collections.abc import Iterable
from typing import Generic, TypeVar

from msgspec import Struct

from flowfabric.core.events import Event
from flowfabric.core.records import Record
from flowfabric.errors import FlowFabricError

Answer = TypeVar("Answer")


class Changes(Struct, frozen=True, kw_only=True):
    """Rows to insert, update and delete, and the events that tell of it."""

    inserts: tuple[Record, ...] = ()
    updates: tuple[Record, ...] = ()
    deletes: tuple[Record, ...] = ()
    events: tuple[Event, ...] = ()


NO_CHANGES = Changes()


class Decision(Struct, Generic[Answer], frozen=True, kw_only=True):
    """Changes plus what to tell the caller."""

    answer: Answer
    changes: Changes = NO_CHANGES


class Refusal(Exception):
    """A refused request that still leaves something to write.

    Noticing that a lease has expired is worth keeping even though the request
    that noticed it fails: the changes are committed, then `error` is raised.
    """

    def __init__(self, error: FlowFabricError, changes: Changes) -> None:
        super().__init__(str(error))
        self.error = error
        self.changes = changes


def combine(parts: Iterable[Changes]) -> Changes:
    """All changes as one, in which each row is written once, with its last version."""
    inserts: dict[RowKey, Record] = {}
    updates: dict[RowKey, Record] = {}
    deletes: dict[RowKey, Record] = {}
    events: list[Event] = []
    for part in parts:
        for record in part.inserts:
            key = row_key(record)
            # A row deleted before and inserted again is there all along.
            (inserts if deletes.pop(key, None) is None else updates)[key] = record
        for record in part.updates:
            key = row_key(record)
            (inserts if key in inserts else updates)[key] = record
        for record in part.deletes:
            key = row_key(record)
            updates.pop(key, None)
            if inserts.pop(key, None) is None:
                deletes[key] = record
        events.extend(part.events)
    return Changes(
        inserts=tuple(inserts.values()),
        updates=tuple(updates.values()),
        deletes=tuple(deletes.values()),
        events=tuple(events),
    )


RowKey = tuple[object, ...]


def row_key(record: Record) -> RowKey:
    """What identifies a row among all rows of all tables."""
    return (record.table, *(getattr(record, name) for name in record.key))
