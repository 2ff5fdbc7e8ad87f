"""Statements that follow from a record type: by key, for any number of rows at once.

Rows travel as one array per column and are put together by `unnest`. A column
that is null in every row travels as an empty array, which `unnest` fills up with
nulls. All texts are cached, so each is prepared once per connection.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from flowfabric.store.base import Value
from flowfabric.store.mapping import Kind, Table, table_of

SCHEMA: Final = "flowfabric"

CLOCK_MS: Final = "floor(extract(epoch from clock_timestamp()) * 1000)::bigint"

# Integers travel as bigint: they compare with and are assigned to narrower columns.
_ARRAYS: Final = {
    Kind.INT: "bigint[]",
    Kind.FLOAT: "double precision[]",
    Kind.BOOL: "boolean[]",
    Kind.TEXT: "text[]",
    Kind.BYTES: "bytea[]",
    Kind.UUID: "uuid[]",
}

Verb = Literal["insert", "update", "delete"]


class Part(NamedTuple):
    """One of the writes of a `save`. `columns` are what travels, key columns included."""

    verb: Verb
    record: type[Struct]
    columns: tuple[str, ...]


def arrays(rows: Iterable[Sequence[Value]]) -> list[Sequence[Value]]:
    """Rows turned into one array per column."""
    return [
        () if column.count(None) == len(column) else column for column in zip(*rows, strict=True)
    ]


@lru_cache(maxsize=256)
def get_text(record: type[Struct]) -> str:
    table = table_of(record)
    columns = ", ".join(f"t.{name}" for name in table.names)
    return (
        f"select {columns} from {_unnest(table, table.key, 1)}"
        f" join {SCHEMA}.{table.name} as t on {_same_key(table)}"
    )


@lru_cache(maxsize=256)
def lock_text(record: type[Struct]) -> str:
    """Locks rows in key order and reads the clock after each lock.

    Rows are locked above the sort and below the outer select. So the time in the
    last row is later than the last lock, however long that was waited for.
    """
    table = table_of(record)
    order = ", ".join(f"t.{name}" for name in table.key)
    return (
        f"select locked.*, {CLOCK_MS} from ({get_text(record)}"
        f" order by {order} for update of t) as locked"
    )


@lru_cache(maxsize=256)
def insert_new_text(record: type[Struct]) -> str:
    table = table_of(record)
    key = ", ".join(table.key)
    return f"{_insert(table, table.names, 1)} on conflict ({key}) do nothing returning {key}"


@lru_cache(maxsize=1024)
def save_text(parts: tuple[Part, ...]) -> str:
    """All writes of a decision as one statement, which returns how many rows it updated."""
    texts: list[str] = []
    counts: list[str] = []
    first = 1
    for number, part in enumerate(parts):
        texts.append(f"w{number} as ({_write(part, first)})")
        if part.verb == "update":
            counts.append(f"(select count(*) from w{number})")
        first += len(part.columns)
    return f"with {', '.join(texts)} select {' + '.join(counts) or '0'} as updated"


def _write(part: Part, first: int) -> str:
    table = table_of(part.record)
    if part.verb == "insert":
        return _insert(table, part.columns, first)
    rows = _unnest(table, part.columns, first)
    if part.verb == "delete":
        return f"delete from {SCHEMA}.{table.name} as t using {rows} where {_same_key(table)}"
    changes = ", ".join(f"{name} = k.{name}" for name in part.columns if name not in table.key)
    return (
        f"update {SCHEMA}.{table.name} as t set {changes} from {rows}"
        f" where {_same_key(table)} returning 1"
    )


def _insert(table: Table, columns: tuple[str, ...], first: int) -> str:
    names = ", ".join(columns)
    rows = _unnest(table, columns, first)
    return f"insert into {SCHEMA}.{table.name} ({names}) select {names} from {rows}"


def _unnest(table: Table, columns: tuple[str, ...], first: int) -> str:
    kinds = table.kinds(columns)
    places = ", ".join(f"${first + i}::{_ARRAYS[kind]}" for i, kind in enumerate(kinds))
    return f"unnest({places}) as k({', '.join(columns)})"


def _same_key(table: Table) -> str:
    return " and ".join(f"t.{name} = k.{name}" for name in table.key)
