"""Row verbs on one SQLite connection.

The verbs are `async` because the protocol is; none of them ever waits. The
writer's transaction holds the only write lock there is, so locking is reading.
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, TypeGuard, TypeVar

import msgspec
from msgspec import Struct

from flowfabric.core.decisions import Changes, writes_of
from flowfabric.core.events import Event
from flowfabric.core.records import Record
from flowfabric.errors import Corruption
from flowfabric.store import mapping
from flowfabric.store.base import (
    Clock,
    FetchedRows,
    Joined,
    Key,
    PackedRows,
    Parameter,
    Row,
    Value,
)
from flowfabric.store.rows import KnownRows, RowReader
from flowfabric.store.sqlite.connection import (
    STATEMENTS,
    FileConnection,
    MachineClock,
    in_trouble,
)
from flowfabric.store.statements import CLOCK, Program, Statement, named, program, taking

# Statements that follow from a record type, for one row at a time -----------


@lru_cache(maxsize=256)
def get_text(record: type[Struct]) -> str:
    table = mapping.table_of(record)
    columns = ", ".join(_shown(table, name) for name in table.names)
    return f"select {columns} from {table.name} where {_same_key(table)}"


@lru_cache(maxsize=256)
def insert_text(record: type[Struct]) -> str:
    table = mapping.table_of(record)
    names, given = list(table.names), _places(table.names)
    values = [_held(table, name, given) for name in names]
    if table.name in _PHASES:
        names.append("execution_rowid")
        values.append(_ROWID.format(*(given[name] for name in table.key)))
    return f"insert into {table.name} ({', '.join(names)}) values ({', '.join(values)})"


@lru_cache(maxsize=256)
def insert_new_text(record: type[Struct]) -> str:
    return f"{insert_text(record)} on conflict do nothing"


@lru_cache(maxsize=1024)
def update_text(record: type[Struct], columns: tuple[str, ...]) -> str:
    table = mapping.table_of(record)
    given = _places(columns)
    changes = ", ".join(f"{name} = {_held(table, name, given)}" for name in columns)
    return f"update {table.name} set {changes} where {_same_key(table)}"


@lru_cache(maxsize=256)
def delete_text(record: type[Struct]) -> str:
    table = mapping.table_of(record)
    return f"delete from {table.name} where {_same_key(table)}"


def _places(names: Sequence[str]) -> dict[str, str]:
    return {name: f"?{place}" for place, name in enumerate(names, 1)}


_PHASES: Final[Mapping[str, frozenset[str]]] = {
    "live": frozenset({
        "eligibility_state", "blocking_reason", "attempt_state", "current_attempt_id",
        "lease_last_renewed_at_ms", "started_at_ms",
    }),
    "ending": frozenset({
        "attempt_state", "current_attempt_id", "last_transition_at_ms", "last_mutation_at_ms",
    }),
}  # fmt: skip
"""Of the tables with rows of executions, columns that hold null where `mapping.USUAL` is right.

A row that grows when it is claimed makes its page overflow.
"""
_ROWID: Final = (
    "(select execution_rowid from execution where partition_key = {} and execution_id = {})"
)
"""The number by which the rows of an execution are known, for those tables."""


def _held(table: mapping.Table, name: str, given: Mapping[str, str]) -> str:
    """A value as a column of its table holds it; `given` are those of its row."""
    if name not in _PHASES.get(table.name, ()):
        return given[name]
    return f"nullif({given[name]}, {mapping.USUAL[table.name][name].format_map(given)})"


def _shown(table: mapping.Table, name: str) -> str:
    """The value that a column stands for."""
    if name not in _PHASES.get(table.name, ()):
        return name
    columns = {each: each for each in table.names}
    return f"coalesce({name}, {mapping.USUAL[table.name][name].format_map(columns)})"


@lru_cache(maxsize=1024)
def _written(record: type[Record], changed: frozenset[str]) -> tuple[int, ...]:
    """The positions of the columns to write when some have changed."""
    table = mapping.table_of(record)
    written = set(changed)
    for together in mapping.follows(table.name):
        # What the one holds depends on the others.
        if not changed.isdisjoint(together):
            written |= together
    return tuple(place for place, name in enumerate(table.names) if name in written)


def _same_key(table: mapping.Table) -> str:
    if table.name in _PHASES:
        return f"execution_rowid = {_ROWID.format('?', '?')}"
    return " and ".join(f"{name} = ?" for name in table.key)


R = TypeVar("R", bound=Record)
T = TypeVar("T")

ROWS: Final = "rows"
"""Stands for all list parameters of a statement together; see `_zipped`."""

SAME_MIN: Final = 10
"""How long a list is at least whose values are looked through for whether they are the same."""

_Bindings = Mapping[str, Value]


class SqliteReader(RowReader):
    """Row access without locks."""

    _writes = False

    def __init__(self, connection: sqlite3.Connection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._now_ms: int | None = None

    async def now_ms(self) -> int:
        if self._now_ms is None:
            self._now_ms = self._time_ms()
        return self._now_ms

    async def get(self, record: type[R], keys: Sequence[Key]) -> dict[Key, R]:
        table = mapping.table_of(record)
        text = get_text(record)
        found: dict[Key, R] = {}
        for key in dict.fromkeys(keys):
            row = self._connection.execute(text, mapping.stored_key(table, key)).fetchone()
            if row is not None:
                loaded = mapping.from_values(record, row)
                found[mapping.key_of(loaded)] = loaded
        return found

    async def select(self, name: str, **parameters: Parameter) -> Sequence[Row]:
        return list(self.fetch(name, parameters))

    async def select_records(
        self, record: type[R], name: str, **parameters: Parameter
    ) -> Sequence[R]:
        records = [mapping.from_row(record, row) for row in await self.select(name, **parameters)]
        self._remember(records)
        return records

    async def select_joined(
        self, records: Sequence[type[Record]], name: str, **parameters: Parameter
    ) -> Sequence[Joined]:
        """Needs no comparing of versions: there is no other writer before a transaction is over."""
        found: list[Joined] = []
        fetched = self.fetch(name, parameters)
        for row in fetched.tuples():
            joined = [record for record, _ in mapping.from_joined(records, fetched.columns, row)]
            self._remember(joined)
            found.append(Joined(joined))
        return found

    def fetch(self, name: str, parameters: Mapping[str, Parameter]) -> FetchedRows:
        """The rows of the last statement of a file."""
        same = _same(taking(name, STATEMENTS), parameters)
        bindings = {**self._bind(name, parameters), **same}
        together = program(name, STATEMENTS)
        if together is not None:
            last = named(name, STATEMENTS)[-1]
            self._run(together, bindings, same)
        else:
            *others, last = named(name, STATEMENTS, frozenset(same))
            self._execute_all(others, bindings)
        cursor = self._execute(last, bindings)
        columns = [column[0] for column in cursor.description or ()]
        rows: list[tuple[Value, ...]] = cursor.fetchall()
        packed = rows and " " in columns[-1]
        return PackedRows(columns, rows) if packed else FetchedRows(columns, rows)

    def _run(self, together: Program, bindings: _Bindings, same: _Bindings) -> None:
        assert isinstance(self._connection, FileConnection), "programs belong to our connections"
        values = [bindings[name] for name in together.parameters]
        for name in together.lists:
            values += (name not in same, same.get(name))
        self._connection.run(together, values)

    def _execute_all(self, statements: Iterable[Statement], bindings: _Bindings) -> None:
        wrote = False
        for statement in statements:
            if wrote or not statement.if_any:
                cursor = self._execute(statement, bindings)
                wrote = wrote if statement.if_any else cursor.rowcount > 0

    def _execute(self, statement: Statement, bindings: _Bindings) -> sqlite3.Cursor:
        values = tuple(map(bindings.__getitem__, statement.parameters))
        return self._connection.execute(statement.by_number, values)

    def _bind(self, name: str, parameters: Mapping[str, Parameter]) -> _Bindings:
        wanted = taking(name, STATEMENTS)
        if ROWS in wanted.parameters:
            parameters = _zipped(parameters)
        wanted.check(parameters)
        if wanted.lists:
            assert isinstance(self._connection, FileConnection), (
                f"{name} is not for callers' connections"
            )
            self._connection.given.lists = {
                name: value for name, value in parameters.items() if _is_list(value)
            }
        bindings = {
            name: _binding(value) for name, value in parameters.items() if name in wanted.parameters
        }
        if CLOCK in wanted.parameters and bindings.get(CLOCK) is None:
            bindings[CLOCK] = self._time_ms()
        return bindings

    def _time_ms(self) -> int:
        if isinstance(self._clock, MachineClock):
            return self._clock.now_on(self._connection, writes=self._writes)
        return self._clock.now_ms()


class SqliteTransaction(KnownRows, SqliteReader):
    """Row access inside the writer's transaction."""

    _writes = True

    def __init__(self, connection: sqlite3.Connection, clock: Clock) -> None:
        KnownRows.__init__(self)
        SqliteReader.__init__(self, connection, clock)

    async def lock(self, record: type[R], keys: Sequence[Key]) -> dict[Key, R]:
        found = await self.get(record, keys)
        self._remember(found.values())
        self.note_absent(record, [key for key in keys if key not in found])
        return found

    async def insert_new(self, records: Sequence[R]) -> set[Key]:
        inserted: set[Key] = set()
        for record in records:
            first, *others = mapping.parts_of(record)
            values = mapping.to_values(first, mapping.table_of(type(first)))
            if self._connection.execute(insert_new_text(type(first)), values).rowcount:
                for each in others:
                    self._insert(each)
                self._remember([record])
                inserted.add(mapping.key_of(record))
        return inserted

    async def save(self, changes: Changes) -> None:
        writes = writes_of([changes], self._absent)
        rows = mapping.rows_of(writes, self._loaded)
        for record in rows.inserts:
            self._insert(record)
        for record, before in rows.updates:
            self._update(record, before)
        for record in rows.deletes:
            key = mapping.stored_key(mapping.table_of(type(record)), mapping.key_of(record))
            self._connection.execute(delete_text(type(record)), key)
        for place in writes.deletes:
            self._loaded.pop(place, None)
        if changes.events:
            table = mapping.table_of(Event)
            events = [mapping.to_values(event, table) for event in changes.events]
            self._connection.executemany(insert_text(Event), events)
        self._remember(writes.inserts.values())
        self._remember(writes.updates.values())

    def broken_by(self, error: BaseException) -> bool:
        return in_trouble(error)

    def _insert(self, record: Record) -> None:
        values = mapping.to_values(record, mapping.table_of(type(record)))
        self._connection.execute(insert_text(type(record)), values)

    def _update(self, record: Record, before: Record | None) -> None:
        table = mapping.table_of(type(record))
        changed = mapping.columns_to_write(record, before)
        if not changed:
            return
        positions = _written(type(record), frozenset(changed))
        values = mapping.to_values(record, table)
        key = mapping.stored_key(table, mapping.key_of(record))
        text = update_text(type(record), tuple(table.names[i] for i in positions))
        cursor = self._connection.execute(text, [*(values[i] for i in positions), *key])
        if cursor.rowcount != 1:
            raise Corruption(f"the row to update is gone: {table.name} {mapping.key_of(record)}")


def _is_list(value: Parameter) -> TypeGuard[Sequence[str | bytes | int | None]]:
    return value is not None and not isinstance(value, str | int | float | bytes)


def _same(wanted: Statement, parameters: Mapping[str, Parameter]) -> dict[str, str | bytes | None]:
    """The lists with the same text or bytes, or nothing, throughout, and what it is.

    SQLite asks Python for each value that a statement is given: a quarter of a microsecond.
    """
    same: dict[str, str | bytes | None] = {}
    for name in wanted.lists.difference(wanted.parameters):
        values = parameters.get(name)
        if not _is_list(values):
            continue
        first = values[0] if values else None
        if (first is None or isinstance(first, str | bytes)) and (
            not values or (len(values) >= SAME_MIN and values.count(first) == len(values))
        ):
            same[name] = first
    return same


def _binding(value: Parameter) -> Value:
    """A parameter as SQLite takes it: a list becomes a JSON array, its bytes hexadecimal."""
    if not _is_list(value):
        assert value is None or isinstance(value, str | int | float | bytes)
        return value
    return msgspec.json.encode(_elements(value)).decode()


def _elements(values: Sequence[str | bytes | int | None]) -> list[object]:
    return [part.hex() if isinstance(part, bytes) else part for part in values]


def _zipped(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """All list parameters as one, `:rows`: a JSON array of objects named after them.

    Joining several `json_each` on their position compares each with each. A list that is empty
    where others are not says nothing of any row.
    """
    lists = {name: _elements(value) for name, value in parameters.items() if _is_list(value)}
    scalars = {name: value for name, value in parameters.items() if name not in lists}
    lists = {name: parts for name, parts in lists.items() if parts}
    rows = [dict(zip(lists, row, strict=False)) for row in zip(*lists.values(), strict=True)]
    return scalars | {ROWS: msgspec.json.encode(rows).decode()}
