"""Changes as a store writes them: grouped by table, one write per row."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from flowfabric.core.records import Record
from flowfabric.core.transitions import Changes
from flowfabric.store.base import Key
from flowfabric.store.mapping import changed_columns, key_of, table_of

Place = tuple[type[Record], Key]
"""Which row of which table."""


class Writes(NamedTuple):
    inserts: dict[Place, Record]
    updates: dict[Place, Record]
    deletes: dict[Place, Record]


def place_of(record: Record) -> Place:
    return type(record), key_of(record)


def settle(changes: Changes, absent: Collection[Place] = ()) -> Writes:
    """One write per row: of several changes to a row in one decision, the last one counts.

    An update of a row that `lock` looked for and did not find is an insert.
    """
    writes = Writes({}, {}, {})
    for record in changes.inserts:
        place = place_of(record)
        assert place not in writes.inserts, f"inserted twice: {place}"
        writes.inserts[place] = record
    for record in changes.updates:
        place = place_of(record)
        is_new = place in writes.inserts or place in absent
        target = writes.inserts if is_new else writes.updates
        target[place] = record
    for record in changes.deletes:
        place = place_of(record)
        writes.updates.pop(place, None)
        if writes.inserts.pop(place, None) is None:
            writes.deletes[place] = record
    return writes


def by_type(records: Iterable[Record]) -> dict[type[Record], list[Record]]:
    groups: dict[type[Record], list[Record]] = {}
    for record in records:
        groups.setdefault(type(record), []).append(record)
    return groups


def columns_to_write(record: Record, before: Record | None) -> set[str]:
    """The columns that differ from what the transaction locked; all, if it did not lock it.

    Unchanged columns stay out of the statement so that a large payload is not
    sent back and stored again because a counter moved.
    """
    table = table_of(type(record))
    if before is None:
        return set(table.names) - set(table.key)
    return changed_columns(table, before, record)
