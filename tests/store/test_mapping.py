"""Records become rows and come back unchanged, for every type of record there is."""

from enum import Enum
from typing import ClassVar, NewType

import pytest
from msgspec import Struct, structs

from flowfabric.core.decisions import Changes
from flowfabric.core.events import Event, StoredEvent
from flowfabric.core.flow_records import EndedUpstream
from flowfabric.core.ids import ExecutionId, FlowId
from flowfabric.core.records import Execution, Record
from flowfabric.errors import Corruption
from flowfabric.store.base import FetchedRows, Key, PackedRows, Reader, Store, Transaction, Value
from flowfabric.store.mapping import (
    AFTER_THE_END,
    BEFORE_THE_END,
    EndingRow,
    Kind,
    Live,
    RequestRow,
    answers_of,
    changed_columns,
    from_row,
    from_values,
    key_of,
    parts_of,
    stored_key,
    table_of,
    to_values,
)
from tests.store.records import (
    ENDED,
    NOW_MS,
    PARTITION,
    add_route,
    an_event,
    an_execution,
    key,
    save,
)

UUID = "0197f3a0-0000-7000-8000-000000000001"


def whole(record: type[Record]) -> list[type[Record]]:
    """The types that stand for whole rows; one that another extends is a part of its row."""
    larger = record.__subclasses__()
    return [each for part in larger for each in whole(part)] if larger else [record]


RECORDS = [each for each in whole(Record) if each is not EndedUpstream]
"""All but what is read along with others, and has no table."""


def filled(record: type[Record]) -> Record:
    """A record with a value in every field."""
    table = table_of(record)
    values: dict[str, object] = {
        Kind.INT: 5,
        Kind.FLOAT: 0.5,
        Kind.BOOL: True,
        Kind.TEXT: "ünïcode 'text'",
        Kind.BYTES: b"\x00\xff",
        Kind.UUID: UUID,
    }
    row = {column.name: values[column.kind] for column in table.columns}
    for field in structs.fields(record):
        for option in getattr(field.type, "__args__", (field.type,)):
            if isinstance(option, type) and issubclass(option, Enum):
                row[field.name] = next(iter(option)).value
    return from_row(record, row)


def emptied(record: Record) -> Record:
    """The same record with nothing in every field that may be empty."""
    optional = {
        field.name: None
        for field in structs.fields(type(record))
        if type(None) in getattr(field.type, "__args__", ())
    }
    return structs.replace(record, **optional)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_record_survives_the_way_to_a_row_and_back(record: type[Record]) -> None:
    for original in (filled(record), emptied(filled(record))):
        assert from_values(record, to_values(original, table_of(record))) == original


async def routed(store: Store, record: Record) -> Execution:
    """An execution with a route."""
    assert isinstance(record, Execution)
    return structs.replace(record, route_id=await add_route(store, record))


async def loaded(store: Store, original: Record) -> dict[Key, Record]:
    async def load(reader: Reader) -> dict[Key, Record]:
        return await reader.get(type(original), [key_of(original)])

    return await store.read(load)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
async def test_every_record_can_be_stored_and_read_back(store: Store, record: type[Record]) -> None:
    original = filled(record)
    if record is Execution:
        original = await routed(store, structs.replace(original, **BEFORE_THE_END))
    if record in (Live, EndingRow):
        await save(store, Changes(inserts=(filled(RequestRow),)))
    await save(store, Changes(inserts=(original,)))
    assert await loaded(store, original) == {key_of(original): original}
    await save(store, Changes(updates=(emptied(original),)))
    assert await loaded(store, original) == {key_of(original): emptied(original)}


async def test_an_execution_is_stored_whole_in_every_phase_of_its_life(store: Store) -> None:
    whole_life = await routed(store, filled(Execution))
    going_on = structs.replace(whole_life, **BEFORE_THE_END)
    ended = structs.replace(whole_life, **{**AFTER_THE_END, "terminal_outcome": "failed"})
    await save(store, Changes(inserts=(going_on,)))

    async def change(transaction: Transaction) -> None:
        await transaction.lock(Execution, [key_of(going_on)])
        await transaction.save(Changes(updates=(now,)))

    for now in (ended, emptied(ended), going_on, emptied(going_on), ended):
        await store.transact(change)
        assert await loaded(store, going_on) == {key_of(going_on): now}
    await save(store, Changes(deletes=(ended,)))
    assert await loaded(store, going_on) == {}


async def test_what_equals_another_column_stays_what_it_is_when_that_one_changes(
    store: Store,
) -> None:
    held = an_execution(
        lease_id=UUID,
        current_attempt_id=UUID,
        lease_acquired_at_ms=5,
        lease_last_renewed_at_ms=5,
        started_at_ms=5,
        lease_epoch=1,
    )
    taken_over = structs.replace(
        held, lease_id=UUID.replace("0197", "0198"), lease_acquired_at_ms=7, lease_epoch=2
    )
    moved = structs.replace(taken_over, last_transition_at_ms=NOW_MS + 1, priority=3)
    let_go = structs.replace(
        moved, lease_id=None, lease_acquired_at_ms=None, lease_last_renewed_at_ms=None
    )
    ended = structs.replace(let_go, **ENDED, final_lease_id=UUID)
    later = structs.replace(ended, completed_at_ms=NOW_MS + 9)
    await save(store, Changes(inserts=(held,)))

    async def change(transaction: Transaction) -> None:
        await transaction.lock(Execution, [key(held)])
        await transaction.save(Changes(updates=(now,)))

    for now in (taken_over, moved, let_go, ended, later, let_go, held):
        await store.transact(change)
        assert await loaded(store, held) == {key_of(held): now}


def test_nothing_is_lost_that_a_phase_does_not_store() -> None:
    going_on = structs.replace(filled(Execution), **BEFORE_THE_END)
    with pytest.raises(AssertionError, match="result would be lost"):
        parts_of(structs.replace(going_on, result=b"42"))
    ended = structs.replace(filled(Execution), **AFTER_THE_END)
    with pytest.raises(AssertionError, match="lease_id would be lost"):
        parts_of(structs.replace(ended, lease_id=UUID))


async def test_an_event_comes_back_with_an_id(store: Store) -> None:
    event = an_event(an_execution(), "why")
    await save(store, Changes(events=(event, event)))
    page = await store.read_events(after=0, limit=10)
    first, second = (each.event_id for each in page.events)
    assert (second, page.cursor) == (first + 1, second)
    assert page.events == tuple(
        StoredEvent(event_id=number, **structs.asdict(event)) for number in (first, second)
    )


def test_an_execution_id_is_stored_as_its_uuid() -> None:
    execution = an_execution()
    table = table_of(Execution)
    assert stored_key(table, key(execution)) == (PARTITION, execution.execution_id[-36:])
    values = dict(zip(table.names, to_values(execution, table), strict=True))
    assert values["execution_id"] == execution.execution_id[-36:]


def test_a_record_type_added_later_needs_no_code() -> None:
    Colour = NewType("Colour", str)

    class Link(Record, frozen=True, kw_only=True):
        table: ClassVar[str] = "link"
        key: ClassVar[tuple[str, ...]] = ("partition_key", "upstream")

        partition_key: int
        upstream: ExecutionId
        downstream: ExecutionId | None = None
        flow_id: FlowId
        colour: Colour
        weight: float = 1.0

    table = table_of(Link)
    assert [kind for _, kind in table.columns] == [
        Kind.INT, Kind.UUID, Kind.UUID, Kind.UUID, Kind.TEXT, Kind.FLOAT,
    ]  # fmt: skip
    row = (3, UUID, UUID, UUID, "red", 2.0)
    link = from_values(Link, row)
    assert link.upstream == link.downstream == f"{{fp:3}}:{UUID}"
    assert to_values(link, table) == row


def test_a_field_that_is_no_column_is_refused_by_name() -> None:
    class Odd(Record, frozen=True, kw_only=True):
        table: ClassVar[str] = "odd"
        key: ClassVar[tuple[str, ...]] = ("parts",)
        parts: list[str]

    with pytest.raises(TypeError, match=r"Odd\.parts"):
        table_of(Odd)


def test_an_execution_id_without_its_partition_is_refused() -> None:
    class Loose(Record, frozen=True, kw_only=True):
        table: ClassVar[str] = "loose"
        key: ClassVar[tuple[str, ...]] = ("execution_id",)
        execution_id: ExecutionId

    with pytest.raises(TypeError, match="partition_key"):
        table_of(Loose)


def test_a_row_that_does_not_decode_is_corruption() -> None:
    table = table_of(Execution)
    row = dict(zip(table.names, to_values(an_execution(), table), strict=True))
    with pytest.raises(Corruption, match="lifecycle_phase"):
        from_row(Execution, row | {"lifecycle_phase": "dancing"})
    del row["priority"]
    with pytest.raises(Corruption, match="priority"):
        from_row(Execution, row)


def test_only_what_differs_is_changed() -> None:
    before = an_execution()
    after = structs.replace(before, priority=9, result=b"42")
    assert changed_columns(table_of(Execution), before, after) == {"priority", "result"}


def test_events_have_the_columns_of_their_table() -> None:
    assert table_of(Event).name == "event"
    stored: type[Struct] = StoredEvent
    assert set(table_of(stored).names) == {"event_id", *table_of(Event).names}


class Answer(Struct, array_like=True):
    payload: bytes
    number: int
    sure: bool = True


PACKED = PackedRows(["payload", "payload number sure"], [(b"\xff", '["",1]'), (b"", '["",2,0]')])


def test_packed_rows_are_rows_like_others() -> None:
    first = {"payload": b"\xff", "number": 1}
    second = {"payload": b"", "number": 2, "sure": 0}
    assert (len(PACKED), list(PACKED), PACKED[1]) == (2, [first, second], second)
    assert PACKED.tuples() == [(b"\xff", 1), (b"", 2, 0)]


def test_packed_rows_are_read_as_structs() -> None:
    answers = [Answer(b"\xff", 1), Answer(b"", 2, sure=False)]
    assert answers_of(Answer, PACKED) == answers
    rows: list[tuple[Value, ...]] = [(b"\xff", 1, 1), (b"", 2, 0)]
    assert answers_of(Answer, FetchedRows(["payload", "number", "sure"], rows)) == answers
    with pytest.raises(Corruption, match="a row is no Answer"):
        answers_of(Answer, PackedRows(["payload", "payload number"], [(b"", '["","one"]')]))
