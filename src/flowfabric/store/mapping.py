"""How a record becomes a row and a row a record, derived from the record's type.

Nothing is written down per table: the fields of a record are the columns, their
annotations say how they are stored. An `ExecutionId` is stored as its uuid alone
and gets its `{fp:N}:` back from the `partition_key` beside it. Enums are stored
as their values. The databases differ only in how they spell a uuid and a bool,
and both spellings are accepted here.
"""

import threading
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum, StrEnum
from functools import lru_cache
from operator import itemgetter
from string import Formatter
from typing import Final, NamedTuple, TypeGuard, TypeVar

import msgspec
from msgspec import Struct, structs

from flowfabric.core import ids, states
from flowfabric.core.bounds import RETENTION_FAILED_MS, RETENTION_MS
from flowfabric.core.decisions import NO_LEASE, Place, Writes, place_of
from flowfabric.core.events import Cursor, Event, LogEnd, StoredEvent
from flowfabric.core.records import Execution, Record
from flowfabric.errors import Corruption
from flowfabric.store.base import EventPage, Key, PackedRows, Row, Value, tuples_of

S = TypeVar("S", bound=Struct)
T = TypeVar("T")

PARTITION_KEY: Final = "partition_key"

_UUID_IDS: Final[frozenset[object]] = frozenset({
    ids.FlowId, ids.LeaseId, ids.AttemptId, ids.SuspensionId, ids.WaitpointId, ids.SignalId,
    ids.EdgeId, ids.BudgetId, ids.QuotaPolicyId, ids.GateId, ids.GateOwnerId,
})  # fmt: skip


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
    return place_of(record)[1]


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


class _Section(NamedTuple):
    """Where a joined row holds the columns of one table."""

    record: type[Record]
    names: tuple[str, ...]
    start: int
    end: int
    """The position of the column that is named after the table."""


def from_joined(
    records: Sequence[type[Record]], names: Iterable[str], values: Sequence[object]
) -> list[tuple[Record, object]]:
    """Records from a row of several tables, each with the value of the column named after it."""
    return [
        (
            _load(record, dict(zip(columns, values[start:end], strict=True))),
            values[end],
        )
        for record, columns, start, end in _sections(tuple(records), tuple(names))
        if values[end] is not None
    ]


@lru_cache(maxsize=256)
def _sections(records: tuple[type[Record], ...], names: tuple[str, ...]) -> tuple[_Section, ...]:
    found: list[_Section] = []
    left = {table_of(record).name: record for record in records}
    start = 0
    for position, name in enumerate(names):
        record = left.pop(name, None)
        if record is not None:
            found.append(_Section(record, names[start:position], start, position))
            start = position + 1
    assert not left, f"the statement returns no rows of {sorted(left)}"
    return tuple(found)


def values_of(kind: type[T], rows: Sequence[Row], partition_key: object = None) -> list[T]:
    """Rows of a statement as structs, as ids of executions, or as their first column."""
    names = _execution_id_names(kind)
    if names:
        rows = [_with_full_ids(row, names, partition_key) for row in rows]
    if _is_struct(kind):
        values: Sequence[object] = list(rows)
    elif names:
        values = [row[names[0]] for row in rows]
    else:
        values = [next(iter(row.values())) for row in rows]
    return _convert(kind, values)


def answers_of(kind: type[S], rows: Sequence[Row]) -> list[S]:
    """Rows of a statement as structs that are like arrays: of its columns, in their order."""
    if not isinstance(rows, PackedRows):
        return _convert(kind, tuples_of(rows))
    try:
        return rows.structs(kind)
    except msgspec.ValidationError as error:
        raise Corruption(f"a row is no {kind.__name__}: {error}") from error


_id_names: dict[object, tuple[str, ...]] = {ids.ExecutionId: ("execution_id",)}


def _execution_id_names(kind: type) -> tuple[str, ...]:
    names = _id_names.get(kind)
    if names is None:
        fields = structs.fields(kind) if _is_struct(kind) else ()
        names = tuple(field.name for field in fields if _bare(field.type) is ids.ExecutionId)
        _id_names[kind] = names
    return names


def _is_struct(kind: object) -> TypeGuard[type[Struct]]:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _with_full_ids(row: Row, names: Iterable[str], partition_key: object) -> Row:
    partition = row.get(PARTITION_KEY, partition_key)
    full = {
        name: f"{{fp:{partition}}}:{row[name]!s}" for name in names if row.get(name) is not None
    }
    return {**row, **full}


def _convert(kind: type[T], values: Sequence[object]) -> list[T]:
    try:
        # Not strict: one database has booleans, the other zero and one.
        found: list[T] = msgspec.convert(values, types.GenericAlias(list, (kind,)), strict=False)
    except msgspec.ValidationError as error:
        raise Corruption(f"a row is no {kind.__name__}: {error}") from error
    return found


_preparing: Final = threading.Lock()
_prepared: Final[set[type[Struct]]] = set()


def prepare_structs() -> None:
    """Have msgspec look at the fields of every struct of ours, before several threads decode any.

    msgspec registers a struct before it has inspected all its fields: a thread that decodes one
    while another looks at it crashes the process.
    """
    with _preparing:
        for kind in set(_structs_below(Struct)) - _prepared:
            # A struct that cannot be decoded is only ever made by our own code.
            with suppress(TypeError):
                msgspec.json.Decoder(kind)
            _prepared.add(kind)


def _structs_below(base: type[Struct]) -> Iterator[type[Struct]]:
    for kind in base.__subclasses__():
        if kind.__module__.startswith("flowfabric."):
            yield kind
        yield from _structs_below(kind)


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


# Changes as a store writes them: grouped by table --------------------------


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


# One page of the event log, from the rows both databases return -------------

WINDOW: Final = 10_000
"""How many events a page looks through at most for those of its category."""

EVENTS_MAX: Final = 10_000


def page(rows: Sequence[Row], *, through: int, limit: int) -> EventPage:
    """A page of what was found up to `through`. A full page ends at its last event."""
    events = tuple(from_row(StoredEvent, row) for row in rows)
    cursor = events[-1].event_id if len(events) == limit else through
    return EventPage(events=events, cursor=cursor)


class EventWindow(Struct, frozen=True):
    """The row of `event_window`."""

    unbroken: int
    """The end of the unbroken run of ids."""
    last: int


class EndRow(Struct, frozen=True):
    """A row of `event_end`: one at least, else one for each gap."""

    last_id: int | None
    before_gap: int | None
    gap_first: int | None
    gap_last: int | None


def log_end(rows: Sequence[Row]) -> LogEnd:
    """The end of the log, from the rows of `event_end`."""
    ends = values_of(EndRow, rows)
    last_id = ends[0].last_id or 0
    gaps = [
        (row.gap_first, row.gap_last)
        for row in ends
        if row.gap_first is not None and row.gap_last is not None
    ]
    return LogEnd(
        after=Cursor(ends[0].before_gap or 0 if gaps else last_id),
        last_id=last_id,
        missing=tuple(gaps),
    )


# An execution is stored by phase of its life, in three tables ---------------
#
# `execution` is what was requested: written once, never updated. `live` is what is going
# on: narrow, and there exactly as long as the execution has not ended. `ending` is how it
# ended; a replay takes it back. So the rows that change are as few as the work in hand,
# however many executions have ended.
#
# To the core an execution is one record, `Execution`, which is read from a view over the
# three. Here a change of that record becomes the writes of the tables.

_KEY: Final = ("partition_key", "execution_id")
_REQUESTED: Final = (
    "route_id", "created_at_ms", "attempt_timeout_ms", "retention_ms", "retention_failed_ms",
    "creator_identity", "policy", "payload", "payload_encoding", "own_id", "idempotency_key",
    "parent_execution_id",
)  # fmt: skip
ROUTED: Final = ("namespace", "lane_id", "execution_kind")
"""What its route says of an execution, which stays as long as one that uses it."""
_COPIED: Final = ("route_id", "created_at_ms")
"""Columns of the request that the other tables repeat, for their indexes."""
_COPIED_LIVE: Final = (*_COPIED, "attempt_timeout_ms", "retention_ms")
"""And in `live`, so that neither a claim nor a completion has to read the request."""
AFTER_THE_END: Final[Mapping[str, object]] = {
    "lifecycle_phase": states.LifecyclePhase.TERMINAL,
    "ownership_state": states.OwnershipState.UNOWNED,
    "eligibility_state": states.EligibilityState.NOT_APPLICABLE,
    "blocking_reason": states.BlockingReason.NONE,
    "blocking_detail": "",
    "ready": False,
    **NO_LEASE,
    "delay_until_ms": None,
    "granted_until_ms": None,
    "attempt_time_left_ms": None,
    "current_suspension_id": None,
    "current_waitpoint_id": None,
    "open_waitpoint_count": 0,
    "awaits_child": False,
}
"""What only `live` holds, and what it is once the execution has ended."""
BEFORE_THE_END: Final[Mapping[str, object]] = {
    "terminal_outcome": states.TerminalOutcome.NONE,
    **dict.fromkeys((
        "completed_at_ms", "retain_until_ms", "final_lease_id", "final_worker_id",
        "final_worker_instance_id", "failure_reason", "cancellation_reason", "cancelled_by",
        "result", "result_encoding",
    )),
}  # fmt: skip
"""What only `ending` holds, and what it is before."""


def _by_phase(waiting: StrEnum, other: StrEnum) -> str:
    runnable = states.LifecyclePhase.RUNNABLE
    return f"case {{lifecycle_phase}} when '{runnable}' then '{waiting}' else '{other}' end"


_NAMES: Final = tuple(field.name for field in structs.fields(Execution))
STATES: Final = frozenset(
    field.name
    for field in structs.fields(Execution)
    if isinstance(field.type, type) and issubclass(field.type, StrEnum)
)
"""Columns with a closed set of values."""
_ZEROES: Final = {
    field.name: "false" if field.default is False else repr(field.default)
    for field in structs.fields(Execution)
    if field.default in (0, "")
}
USUAL: Final[Mapping[str, Mapping[str, str]]] = {
    "execution": {
        "creator_identity": "''",
        "policy": "'{{}}'",
        "retention_ms": str(RETENTION_MS),
        "retention_failed_ms": str(RETENTION_FAILED_MS),
    },
    "live": {
        **_ZEROES,
        "eligibility_state": _by_phase(
            states.EligibilityState.ELIGIBLE_NOW, states.EligibilityState.NOT_APPLICABLE
        ),
        "blocking_reason": _by_phase(
            states.BlockingReason.WAITING_FOR_WORKER, states.BlockingReason.NONE
        ),
        "attempt_state": _by_phase(
            states.AttemptState.PENDING_FIRST_ATTEMPT, states.AttemptState.RUNNING_ATTEMPT
        ),
        "total_attempt_count": "coalesce({lease_epoch}, 0)",
        "last_transition_at_ms": "coalesce({lease_acquired_at_ms}, {created_at_ms})",
        "last_mutation_at_ms": (
            "coalesce({last_transition_at_ms}, {lease_acquired_at_ms}, {created_at_ms})"
        ),
        "lease_last_renewed_at_ms": "{lease_acquired_at_ms}",
        "started_at_ms": "{lease_acquired_at_ms}",
        "current_attempt_id": "{lease_id}",
        "retention_ms": str(RETENTION_MS),
    },
    "ending": {
        **_ZEROES,
        "priority": "0",
        "attempt_state": f"'{states.AttemptState.ATTEMPT_TERMINAL}'",
        "total_attempt_count": "coalesce({lease_epoch}, 0)",
        "last_mutation_at_ms": "{completed_at_ms}",
        "last_transition_at_ms": "{completed_at_ms}",
        "current_attempt_id": "{final_lease_id}",
    },
}
"""By table, what a column nearly always is, as SQL spells it: a store need not write it then.

It may follow from other columns, of which each stands in braces.
"""


@lru_cache
def follows(table: str) -> tuple[frozenset[str], ...]:
    """Columns of a table of which one is held as the others tell, each time with these."""
    return tuple(
        frozenset([name, *(part for _, part, _, _ in Formatter().parse(text) if part)])
        for name, text in USUAL.get(table, {}).items()
    )


_POSITIONS: Final = {name: position for position, name in enumerate(_NAMES)}


def _part(name: str, table: str, columns: Iterable[str]) -> type[Record]:
    wanted = set(columns)
    types = {field.name: field.type for field in structs.fields(Execution)}
    part = msgspec.defstruct(
        name,
        [(each, types[each]) for each in _NAMES if each in wanted],
        bases=(Record,),
        namespace={"table": table, "key": _KEY},
        module=__name__,
        frozen=True,
    )
    assert issubclass(part, Record)
    return part


RequestRow: Final = _part("Request", "execution", {*_KEY, *_REQUESTED})
_CHANGING: Final = set(_NAMES) - {*_REQUESTED, *ROUTED}
Live: Final = _part("Live", "live", {*_KEY, *_COPIED_LIVE} | _CHANGING - BEFORE_THE_END.keys())
EndingRow: Final = _part("Ending", "ending", {*_KEY, *_COPIED} | _CHANGING - AFTER_THE_END.keys())


def _picker(names: Iterable[str]) -> "itemgetter[tuple[object, ...]]":
    return itemgetter(*(_POSITIONS[name] for name in names))


_PICKERS: Final = {
    part: _picker(field.name for field in structs.fields(part))
    for part in (RequestRow, Live, EndingRow)
}
_RESTS: Final = {
    part: (rest, _picker(rest), tuple(rest.values()))
    for part, rest in ((Live, BEFORE_THE_END), (EndingRow, AFTER_THE_END))
}
"""What the table of a phase does not hold, and what it is read as then."""


class RowWrites(NamedTuple):
    """What to write, table by table. An update goes with what the row was, where that is known."""

    inserts: Sequence[Record]
    updates: Sequence[tuple[Record, Record | None]]
    deletes: Sequence[Record]


def rows_of(writes: Writes, loaded: Mapping[Place, Record]) -> RowWrites:
    """The writes of a decision as writes of tables."""
    inserts: list[Record] = []
    updates: list[tuple[Record, Record | None]] = []
    deletes: list[Record] = []
    for record in writes.inserts.values():
        inserts += parts_of(record)
    for place, record in writes.updates.items():
        before = loaded.get(place)
        if not isinstance(record, Execution):
            updates.append((record, before))
            continue
        request, new = parts_of(record)
        if not isinstance(before, Execution):
            updates += (request, None), (new, None)
            continue
        request_before, old = parts_of(before)
        updates.append((request, request_before))
        if type(old) is type(new):
            updates.append((new, old))
        else:
            deletes.append(old)
            inserts.append(new)
    for record in writes.deletes.values():
        deletes += reversed(parts_of(record))
    return RowWrites(inserts, updates, deletes)


def parts_of(record: Record) -> tuple[Record, ...]:
    """The rows a record consists of; the first one is there as long as any.

    The other one is that of `live` or `ending`.
    """
    if not isinstance(record, Execution):
        return (record,)
    values = structs.astuple(record)
    phase = phase_table(record)
    names, rest, expected = _RESTS[phase]
    if rest(values) != expected:
        lost = [name for name in names if getattr(record, name) != names[name]]
        raise AssertionError(f"{', '.join(lost)} would be lost: {record}")
    return RequestRow(*_PICKERS[RequestRow](values)), phase(*_PICKERS[phase](values))


def phase_table(record: Record) -> type[Record]:
    """The table with the row of a record that changes."""
    if not isinstance(record, Execution):
        return type(record)
    return EndingRow if record.lifecycle_phase is states.LifecyclePhase.TERMINAL else Live
