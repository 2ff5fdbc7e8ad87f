"""Statements that follow from a record type: by key, for any number of rows at once.

Several rows travel as one array per column and are put together by `unnest`. A
column that is null in every row travels as an empty array, which `unnest` fills up
with nulls. A single row travels as it is. In a large insert, a column that is the
same in every row travels once. All texts are cached, so each is prepared once per
connection.

Rows are looked up one by one through `lateral`. As a plain join the same would be
planned as a walk over the whole table whenever the table was nearly empty, and that
plan would stay in use while the table grows.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from flowfabric.core.events import Event
from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import Execution
from flowfabric.store import mapping
from flowfabric.store.base import Value

SCHEMA: Final = "flowfabric"
CHANNEL: Final = "flowfabric"
"""On which hints travel from process to process."""

CLOCK_MS: Final = "floor(extract(epoch from clock_timestamp()) * 1000)::bigint"

# Integers travel as bigint: they compare with and are assigned to narrower columns.
_TYPES: Final = {
    mapping.Kind.INT: "bigint",
    mapping.Kind.FLOAT: "double precision",
    mapping.Kind.BOOL: "boolean",
    mapping.Kind.TEXT: "text",
    mapping.Kind.BYTES: "bytea",
    mapping.Kind.UUID: "uuid",
}

EACH_EVENT: Final = frozenset(
    {"partition_key", "execution_id", "flow_id", "lease_id", "lease_epoch", "attempt_index"}
)
"""What the events of one row of the log need not have in common."""

EVENTS_PER_ROW: Final = 4096
"""How many ids the event log hands out at a time; the statements that read it know it too."""

EVENT_ROWS_MAX: Final = 100
"""How many rows of the event log one statement writes."""

LARGE_INSERT: Final = 50

Verb = Literal["insert", "update", "delete", "append"]


class Part(NamedTuple):
    """One of the writes of a `save`. `columns` are what travels, key columns included."""

    verb: Verb
    record: type[Struct]
    columns: tuple[str, ...]
    alone: bool
    """Whether it is about one row, which travels without arrays."""


class Seen(NamedTuple):
    """Rows of a type that a `save` compares before it writes."""

    record: type[Struct]
    alone: bool
    """Whether it is one row, whose key and version travel without arrays."""


class Batch:
    """The writes of one `save`, which become one statement and its parameters."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.values: list[Value | Sequence[Value]] = []
        self.updated = 0
        """How many rows the statement has to find and update."""

    def add(
        self,
        verb: Verb,
        record: type[Struct],
        columns: tuple[str, ...],
        rows: Sequence[Sequence[Value]],
    ) -> None:
        alone = len(rows) == 1
        self.parts.append(Part(verb, record, columns, alone))
        self.values += rows[0] if alone else arrays(rows)
        if verb == "update":
            self.updated += len(rows)

    def append(self, rows: Sequence[Sequence[Event]]) -> None:
        """Add rows to the event log, each of events that `rows_of_events` has put together."""
        table = mapping.table_of(Event)
        self.parts.append(Part("append", Event, table.names * len(rows), alone=False))
        for events in rows:
            columns = zip(*(mapping.to_values(event, table) for event in events), strict=True)
            self.values += [
                (None if column.count(None) == len(column) else column)
                if name in EACH_EVENT
                else column[0]
                for name, column in zip(table.names, columns, strict=True)
            ]


def rows_of_events(events: Iterable[Event]) -> list[list[Event]]:
    """Events as the log holds them: those of a kind in one row, as many as it has ids for.

    The first events of all executions go first, then their second ones, and so on: that
    brings those of a kind together, and keeps the order within each execution.
    """
    given = list(events)
    if len(given) == 1:
        return [given]
    turns: dict[ExecutionId, int] = {}
    in_turn: list[tuple[int, Event]] = []
    for event in given:
        turn = turns[event.execution_id] = turns.get(event.execution_id, 0) + 1
        in_turn.append((turn, event))
    in_turn.sort(key=lambda each: each[0])
    rows: list[list[Event]] = []
    for _, alike in groupby((event for _, event in in_turn), key=_in_common):
        together = list(alike)
        rows += (
            together[first : first + EVENTS_PER_ROW]
            for first in range(0, len(together), EVENTS_PER_ROW)
        )
    return rows


def _in_common(event: Event) -> list[object]:
    return [
        getattr(event, name) for name in mapping.table_of(Event).names if name not in EACH_EVENT
    ]


def arrays(rows: Iterable[Sequence[Value]]) -> list[Sequence[Value]]:
    """Rows turned into one array per column."""
    return [
        () if column.count(None) == len(column) else column for column in zip(*rows, strict=True)
    ]


@lru_cache(maxsize=256)
def get_text(record: type[Struct]) -> str:
    table = mapping.table_of(record)
    return (
        f"select t.* from {_unnest(table, table.key, 1)}"
        f" cross join lateral ({_by_key(table)} limit 1) as t"
    )


@lru_cache(maxsize=256)
def lock_text(record: type[Struct]) -> str:
    """Locks rows in key order and reads the clock after each lock.

    The keys are sorted first, and each row is locked as the outer select comes to
    it. So the time in the last row is later than the last lock, however long that
    was waited for.
    """
    table = mapping.table_of(record)
    keys = f"select * from {_unnest(table, table.key, 1)} order by {', '.join(table.key)}"
    row = _locked_execution(table) if record is Execution else f"{_by_key(table)} for update"
    return f"select t.*, {CLOCK_MS} from ({keys}) as k cross join lateral ({row}) as t"


def _locked_execution(table: mapping.Table) -> str:
    """The row of its phase is what gets locked.

    One that changes its phase meanwhile has gone from one table, and is in the other one
    only for the next statement: it looks as if there were none.
    """
    same = " and ".join(f"e.{name} = p.{name}" for name in table.key)
    found = " and ".join(f"p.{name} = k.{name}" for name in table.key)
    request = mapping.table_of(mapping.RequestRow)
    rows: list[str] = []
    for part, rest in (
        (mapping.Live, mapping.BEFORE_THE_END),
        (mapping.EndingRow, mapping.AFTER_THE_END),
    ):
        phase = mapping.table_of(part)
        columns = ", ".join(
            _read(phase, name, "p")
            if name in phase.names
            else _read(request, name, "e")
            if name in request.names
            else f"r.{name}"
            if name in mapping.ROUTED
            else f"{_literal(rest[name])}::{_TYPES[kind]} as {name}"
            for name, kind in table.columns
        )
        rows.append(
            f"select * from (select {columns} from {SCHEMA}.{phase.name} as p"
            f" join {SCHEMA}.{request.name} as e on {same}"
            f" join {SCHEMA}.route as r on r.route_id = e.route_id"
            f" where {found} for update of p) as {phase.name}"
        )
    return " union all ".join(rows)


def _literal(value: object) -> str:
    return "null" if value is None else f"'{value}'"


class NewRows(NamedTuple):
    """Rows to insert: which columns differ among them, and the values of all columns."""

    table: mapping.Table
    differing: frozenset[str]
    values: list[Value | Sequence[Value]]


def new_rows(table: mapping.Table, rows: Sequence[Sequence[Value]]) -> NewRows:
    """Rows as `insert_new_text` takes them.

    Only a large batch looks for columns that are the same throughout: each such set
    of columns is a statement of its own, which is worth preparing for many rows only.
    """
    columns = arrays(rows)
    if len(rows) < LARGE_INSERT:
        return NewRows(table, frozenset(table.names), list(columns))
    same = [not column or column.count(column[0]) == len(column) for column in columns]
    return NewRows(
        table,
        frozenset(name for name, is_same in zip(table.names, same, strict=True) if not is_same),
        [
            (column[0] if column else None) if is_same else column
            for column, is_same in zip(columns, same, strict=True)
        ],
    )


@lru_cache(maxsize=1024)
def insert_new_text(rows: tuple[tuple[mapping.Table, frozenset[str]], ...]) -> str:
    """Insert rows whose key is free, and those that belong to them into further tables.

    For each table, say which of its columns differ among the rows.
    """
    (table, _), *_ = rows
    key = ", ".join(table.key)
    first, texts = 1, list[str]()
    for number, (each, differing) in enumerate(rows):
        texts.append(f"w{number} as ({_insert_new(each, differing, first, is_first=not number)})")
        first += len(each.names)
    return f"with {', '.join(texts)} select {key} from w0"


def _insert_new(
    table: mapping.Table, differing: frozenset[str], first: int, *, is_first: bool
) -> str:
    key = ", ".join(table.key)
    names = ", ".join(table.names)
    varying = [name for name in table.names if name in differing]
    places = dict(zip(table.names, _places(table, table.names, first), strict=True))
    given = {name: f"k.{name}" if name in differing else places[name] for name in table.names}
    values = ", ".join(written(table, name, given) for name in table.names)
    arrays = ", ".join(f"{places[name]}[]" for name in varying)
    rows = f"select {values} from unnest({arrays}) as k({', '.join(varying)})"
    if not is_first:
        # Usually all are new. Only otherwise is it worth looking which.
        same = " and ".join(
            f"w0.{name} = {f'k.{name}' if name in differing else places[name]}"
            for name in table.key
        )
        rows += (
            f" where case when (select count(*) from w0) = (select count(*) from unnest({arrays}))"
            f" then true else exists (select from w0 where {same}) end"
        )
    insert = f"insert into {SCHEMA}.{table.name} ({names}) {rows}"
    # In whatever index: where two insert the same row at once, the one that comes second may
    # meet the other in any of them.
    return f"{insert} on conflict do nothing returning {key}" if is_first else insert


@lru_cache(maxsize=1024)
def save_text(parts: tuple[Part, ...], seen: tuple[Seen, ...] = ()) -> str:
    """All writes of a decision as one statement, which returns how many rows it updated.

    With `seen`, it writes only if rows of these types are still what they were, and
    returns whether they are. It takes their keys and versions after everything else, and last
    of all a message to other processes, if there is one.
    """
    texts: list[str] = []
    counts: list[str] = []
    first = 1
    when = "(select same from seen)" if seen else ""
    for number, part in enumerate(parts):
        texts.append(f"w{number} as ({_write(part, first, when)})")
        if part.verb == "update":
            counts.append(f"(select count(*) from w{number})")
        first += len(part.columns)
    if not seen:
        return f"with {', '.join(texts)} select {' + '.join(counts) or '0'} as updated"
    hint = f"${first + sum(len(mapping.table_of(each.record).key) + 1 for each in seen)}"
    notify = f"case when same and {hint}::text is not null"
    notify += f" then pg_notify('{CHANNEL}', {hint})::text end"
    return f"with {_seen(seen, first)}, {', '.join(texts)} select same, {notify} from seen"


def _seen(seen: tuple[Seen, ...], first: int) -> str:
    """Locks rows in the order of their types, and tells whether all have their old versions."""
    tests: list[str] = []
    for record, alone in seen:
        table = mapping.table_of(record)
        places = _places(table, table.key, first, suffix="" if alone else "[]")
        version = f"${first + len(places)}::bigint"
        if alone:
            key = dict(zip(table.key, places, strict=True))
            tests.append(f"({_same_version(table, key, version)}) is not null")
        else:
            key = {name: f"k.{name}" for name in table.key}
            tests.append(
                f"(select count(*) from (select * from unnest({', '.join(places)}, {version}[])"
                f" as k({', '.join(table.key)}, version) order by {', '.join(table.key)}) as k"
                f" cross join lateral ({_same_version(table, key, 'k.version')}) as t)"
                f" = cardinality({version}[])"
            )
        first += len(places) + 1
    return f"seen as materialized (select {' and '.join(tests)} as same)"


def _same_version(table: mapping.Table, key: Mapping[str, str], version: str) -> str:
    """Locks a row that is still as it was.

    The holder of a row is about to change it: waiting for that would be in vain.
    """
    same = " and ".join(f"r.{name} = {value}" for name, value in key.items())
    return (
        f"select 1 from {SCHEMA}.{table.name} as r"
        f" where {same} and r.xmin::text::bigint = {version} for update skip locked"
    )


def _write(part: Part, first: int, when: str) -> str:
    table = mapping.table_of(part.record)
    if part.verb == "append":
        return _append(table, part.columns, first, when)
    if part.verb == "insert":
        return _insert(table, part.columns, first, when, alone=part.alone)
    names = [name for name in part.columns if name not in table.key]
    if part.alone:
        place = dict(zip(part.columns, _places(table, part.columns, first), strict=True))
        changes = ", ".join(f"{name} = {written(table, name, place)}" for name in names)
        where = " and ".join(f"{name} = {place[name]}" for name in table.key)
        rows = ""
    else:
        given = {name: f"k.{name}" for name in part.columns}
        changes = ", ".join(f"{name} = {written(table, name, given)}" for name in names)
        # Whoever writes a row has locked it, so that its version stays what it is.
        where = "t.ctid = found.row_version"
        rows = f"{_unnest(table, part.columns, first)} cross join lateral ({_version(table)})"
        rows = f"{rows} as found"
    if when:
        where = f"{where} and {when}"
    if part.verb == "delete":
        using = f" using {rows}" if rows else ""
        return f"delete from {SCHEMA}.{table.name} as t{using} where {where}"
    source = f" from {rows}" if rows else ""
    returning = "" if when else " returning 1"
    return f"update {SCHEMA}.{table.name} as t set {changes}{source} where {where}{returning}"


def _append(table: mapping.Table, columns: tuple[str, ...], first: int, when: str) -> str:
    """`columns` are those of the table, once for each row."""
    values = [
        f"{place}[]" if name in EACH_EVENT else place
        for name, place in zip(columns, _places(table, columns, first), strict=True)
    ]
    width = len(table.names)
    rows = (", ".join(values[at : at + width]) for at in range(0, len(values), width))
    return _inserted(table, table.names, f"values {', '.join(f'({row})' for row in rows)}", when)


def _insert(
    table: mapping.Table, columns: tuple[str, ...], first: int, when: str, *, alone: bool
) -> str:
    if alone:
        given = dict(zip(columns, _places(table, columns, first), strict=True))
        rows = ""
    else:
        given = {name: name for name in columns}
        rows = f" from {_unnest(table, columns, first)}"
    rows = f"select {', '.join(written(table, name, given) for name in columns)}{rows}"
    return _inserted(table, columns, rows, when)


def _inserted(table: mapping.Table, columns: tuple[str, ...], rows: str, when: str) -> str:
    if when:
        rows = f"select * from ({rows}) as k where {when}"
    return f"insert into {SCHEMA}.{table.name} ({', '.join(columns)}) {rows}"


def _by_key(table: mapping.Table) -> str:
    columns = ", ".join(_read(table, name, "r") for name in table.names)
    same = " and ".join(f"r.{name} = k.{name}" for name in table.key)
    return f"select {columns} from {SCHEMA}.{table.name} as r where {same}"


def _version(table: mapping.Table) -> str:
    same = " and ".join(f"r.{name} = k.{name}" for name in table.key)
    return f"select r.ctid as row_version from {SCHEMA}.{table.name} as r where {same} limit 1"


def written(table: mapping.Table, name: str, given: Mapping[str, str]) -> str:
    """A value as a column of its table holds it; `given` are those of its row."""
    usual = mapping.USUAL.get(table.name, {})
    value = given[name]
    if name in usual:
        value = f"nullif({value}, {usual[name].format_map(given)})"
    return f"{value}::{SCHEMA}.{name}" if usual and name in mapping.STATES else value


def _read(table: mapping.Table, name: str, row: str) -> str:
    """The value that a column holds."""
    usual = mapping.USUAL.get(table.name, {})
    value = f"{row}.{name}::text" if usual and name in mapping.STATES else f"{row}.{name}"
    if name in usual:
        columns = {each: f"{row}.{each}" for each in table.names}
        value = f"coalesce({value}, {usual[name].format_map(columns)})"
    return f"{value} as {name}"


def _unnest(table: mapping.Table, columns: tuple[str, ...], first: int) -> str:
    places = ", ".join(_places(table, columns, first, suffix="[]"))
    return f"unnest({places}) as k({', '.join(columns)})"


def _places(
    table: mapping.Table, columns: tuple[str, ...], first: int, suffix: str = ""
) -> list[str]:
    kinds = table.kinds(columns)
    return [f"${first + i}::{_TYPES[kind]}{suffix}" for i, kind in enumerate(kinds)]
