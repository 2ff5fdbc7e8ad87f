"""How a record becomes a row and a row a record, derived from the record's type.

Nothing is written down per table: the fields of a record are the columns, their
annotations say how they are stored. An `ExecutionId` is stored as its uuid alone
and gets its `{fp:N}:` back from the `partition_key` beside it. Enums are stored
as their values. The databases differ only in how they spell a uuid and a bool,
and both spellings are accepted here.
"""

import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, StrEnum
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec import Struct, structs

from flowfabric.core import ids
from flowfabric.core.events import Event
from flowfabric.core.records import Record
from flowfabric.errors import Corruption
from flowfabric.store.base import Key, Value

S = TypeVar("S", bound=Struct)

PARTITION_KEY: Final = "partition_key"

_UUID_IDS: Final[frozenset[object]] = frozenset(
    {
        ids.FlowId,
        ids.LeaseId,
        ids.AttemptId,
        ids.SuspensionId,
        ids.WaitpointId,
        ids.SignalId,
        ids.EdgeId,
        ids.BudgetId,
        ids.QuotaPolicyId,
    }
)


class Kind(StrEnum):
    """How a column is stored."""

    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    TEXT = "text"
    BYTES = "bytes"
    UUID = "uuid"


class Column(NamedTuple):
    name: str
    kind: Kind


class Table(NamedTuple):
    """Where a record type is stored. Columns are in the order of the record's fields."""

    name: str
    columns: tuple[Column, ...]
    names: tuple[str, ...]
    key: tuple[str, ...]
    key_positions: tuple[int, ...]
    execution_ids: tuple[int, ...]
    """Positions of the columns that hold the uuid of an execution id."""
    uuid_names: tuple[str, ...]
    bool_names: tuple[str, ...]

    def kinds(self, names: Iterable[str]) -> tuple[Kind, ...]:
        by_name = dict(self.columns)
        return tuple(by_name[name] for name in names)


_tables: dict[type[Struct], Table] = {}


def table_of(record: type[Struct]) -> Table:
    """The table of a record type, or of the event log."""
    table = _tables.get(record)
    if table is None:
        table = _tables[record] = _derive(record)
    return table


def key_of(record: Record) -> Key:
    """What `get` and `lock` find this record by."""
    return tuple(getattr(record, name) for name in record.key)


def stored_key(table: Table, key: Key) -> tuple[Value, ...]:
    """A key as the database spells it."""
    assert len(key) == len(table.key), f"a key of {table.name} is {table.key}"
    return tuple(
        str(part)[-ids.UUID_CHARS :] if position in table.execution_ids else part
        for position, part in zip(table.key_positions, key, strict=True)
    )


def to_values(record: Struct, table: Table) -> tuple[Value, ...]:
    """The record's values in column order, as the database spells them."""
    values = structs.astuple(record)
    if not table.execution_ids:
        return values
    stored = list(values)
    for position in table.execution_ids:
        if stored[position] is not None:
            stored[position] = stored[position][-ids.UUID_CHARS :]
    return tuple(stored)


def changed_columns(table: Table, before: Struct, after: Struct) -> set[str]:
    pairs = zip(table.names, structs.astuple(before), structs.astuple(after), strict=True)
    return {name for name, old, new in pairs if old is not new and old != new}


def from_values(record: type[S], values: Iterable[object]) -> S:
    """A record from values in column order; values beyond the last column are ignored."""
    return _load(record, dict(zip(table_of(record).names, values, strict=False)))


def from_row(record: type[S], row: Mapping[str, object]) -> S:
    """A record from a row that has at least its columns, in any order."""
    return _load(record, dict(row.items()))


def from_joined(
    records: Sequence[type[Record]], columns: Iterable[tuple[str, object]]
) -> list[tuple[Record, object]]:
    """Records from a row of several tables, each with the value of the column named after it."""
    found: list[tuple[Record, object]] = []
    left = {table_of(record).name: record for record in records}
    data: dict[str, object] = {}
    for name, value in columns:
        record = left.pop(name, None)
        if record is None:
            data[name] = value
            continue
        if value is not None:
            found.append((from_row(record, data), value))
        data = {}
    assert not left, f"the statement returns no rows of {sorted(left)}"
    return found


def _load(record: type[S], data: dict[str, object]) -> S:
    table = table_of(record)
    try:
        for name in table.uuid_names:
            if data[name] is not None:
                data[name] = str(data[name])
        for name in table.bool_names:
            if data[name] is not None:
                data[name] = bool(data[name])
        for position in table.execution_ids:
            name = table.names[position]
            if data[name] is not None:
                data[name] = f"{{fp:{data[PARTITION_KEY]}}}:{data[name]}"
        return msgspec.convert(data, record)
    except KeyError as error:
        raise Corruption(f"a row of {table.name} lacks the column {error}") from error
    except msgspec.ValidationError as error:
        raise Corruption(f"a row of {table.name} does not decode: {error}") from error


def _derive(record: type[Struct]) -> Table:
    fields = structs.fields(record)
    columns = tuple(Column(field.name, _kind(record, field)) for field in fields)
    names = tuple(column.name for column in columns)
    name, key = _identity(record)
    execution_ids = tuple(
        position for position, field in enumerate(fields) if _bare(field.type) is ids.ExecutionId
    )
    if execution_ids and PARTITION_KEY not in names:
        raise TypeError(f"{record.__name__} holds an ExecutionId and needs {PARTITION_KEY}")
    return Table(
        name=name,
        columns=columns,
        names=names,
        key=key,
        key_positions=tuple(names.index(part) for part in key if part in names),
        execution_ids=execution_ids,
        uuid_names=tuple(column.name for column in columns if column.kind is Kind.UUID),
        bool_names=tuple(column.name for column in columns if column.kind is Kind.BOOL),
    )


def _identity(record: type[Struct]) -> tuple[str, tuple[str, ...]]:
    if issubclass(record, Record):
        return record.table, record.key
    if issubclass(record, Event):
        return "event", ("event_id",)
    raise TypeError(f"{record.__name__} is neither a record nor an event")


def _bare(annotation: object) -> object:
    """An annotation without its `| None`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [part for part in typing.get_args(annotation) if part is not types.NoneType]
        if len(inner) == 1:
            return inner[0]
    return annotation


def _kind(record: type[Struct], field: structs.FieldInfo) -> Kind:
    annotation = _bare(field.type)
    if annotation is ids.ExecutionId or annotation in _UUID_IDS:
        return Kind.UUID
    while isinstance(annotation, typing.NewType):
        annotation = annotation.__supertype__
    for python, kind in _KINDS:
        if isinstance(annotation, type) and issubclass(annotation, python):
            return kind
    raise TypeError(f"{record.__name__}.{field.name}: {field.type} cannot be a column")


# In this order: a bool is an int, and a StrEnum is text.
_KINDS: Final[tuple[tuple[type, Kind], ...]] = (
    (bool, Kind.BOOL),
    (Enum, Kind.TEXT),
    (int, Kind.INT),
    (float, Kind.FLOAT),
    (str, Kind.TEXT),
    (bytes, Kind.BYTES),
)
