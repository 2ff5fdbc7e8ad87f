"""Row verbs on one Postgres connection."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from flowfabric.core.decisions import Changes, Place, place_of, writes_of
from flowfabric.core.records import Execution, Record
from flowfabric.errors import Corruption
from flowfabric.store import mapping
from flowfabric.store.base import Clock, Joined, Key, Parameter, Row, Value
from flowfabric.store.postgres import statements
from flowfabric.store.postgres.caller_connections import lost_in_transaction, tells_of_outage
from flowfabric.store.postgres.driver import UUID, DriverRow, Fetching
from flowfabric.store.rows import KnownRows, RowReader
from flowfabric.store.statements import numbered, ordered

R = TypeVar("R", bound=Record)
T = TypeVar("T")

STATEMENTS: Final = Path(__file__).parent / "sql"


_FOREIGN: Final = frozenset({UUID, list})
"""The types the driver returns besides those every store has."""


def plain(rows: Sequence[DriverRow]) -> list[Row]:
    """Rows with uuids as text and arrays as JSON, as SQLite has them."""
    found = [dict(row.items()) for row in rows]
    for name in _foreign_columns(found):
        for values in found:
            values[name] = _value(values[name])
    return list(found)


def _foreign_columns(rows: Sequence[Row]) -> list[str]:
    """Columns to convert: all values of one that are not null have the same type."""
    foreign: list[str] = []
    unknown = list(rows[0]) if rows else []
    for row in rows:
        foreign += [name for name in unknown if type(row[name]) in _FOREIGN]
        unknown = [name for name in unknown if row[name] is None]
        if not unknown:
            break
    return foreign


class PostgresReader(RowReader):
    """Row access without locks."""

    def __init__(self, connection: Fetching, clock: Clock | None) -> None:
        self._connection = connection
        self._clock = clock
        self._now_ms: int | None = None

    async def now_ms(self) -> int:
        if self._now_ms is None:
            self._now_ms = self._clock_ms()
        if self._now_ms is None:
            rows = await self._connection.fetch(f"select {statements.CLOCK_MS}")
            self._now_ms = _int(rows[0][0])
        return self._now_ms

    async def get(self, record: type[R], keys: Sequence[Key]) -> dict[Key, R]:
        if not keys:
            return {}
        rows = await self._connection.fetch(statements.get_text(record), *_key_arrays(record, keys))
        return _by_key(mapping.from_values(record, row) for row in rows)

    async def select(self, name: str, **parameters: Parameter) -> Sequence[Row]:
        return plain(await self._fetch(name, parameters))

    async def select_records(
        self, record: type[R], name: str, **parameters: Parameter
    ) -> Sequence[R]:
        rows = await self._fetch(name, parameters)
        records = [mapping.from_row(record, dict(row.items())) for row in rows]
        if numbered(name, STATEMENTS).locks:
            self._remember(records)
        return records

    async def select_joined(
        self, records: Sequence[type[Record]], name: str, **parameters: Parameter
    ) -> Sequence[Joined]:
        found: list[Joined] = []
        for row in await self._fetch(name, parameters):
            columns = tuple(row)
            joined = mapping.from_joined(records, row.keys(), columns)
            self._note_versions(joined, columns[-1])
            found.append(Joined(record for record, _ in joined))
        return found

    async def _fetch(self, name: str, parameters: Mapping[str, Parameter]) -> Sequence[DriverRow]:
        statement = numbered(name, STATEMENTS)
        values = ordered(statement, parameters, self._clock_ms)
        return await self._connection.fetch(statement.text, *values)

    def _note_versions(self, joined: Iterable[tuple[Record, object]], now_ms: object) -> None:
        """Note the versions of rows and when they were read; only `save` without locks cares."""

    def _clock_ms(self) -> int | None:
        return None if self._clock is None else self._clock.now_ms()


class PostgresTransaction(KnownRows, PostgresReader):
    """Row access inside one read-write transaction."""

    def __init__(self, connection: Fetching, clock: Clock | None) -> None:
        KnownRows.__init__(self)
        PostgresReader.__init__(self, connection, clock)

    async def lock(self, record: type[R], keys: Sequence[Key]) -> dict[Key, R]:
        if not keys:
            return {}
        found = await self._lock(record, keys)
        while record is Execution and len(found) < len(keys):
            # One that is about to change its phase is in neither table for a statement that
            # began before that.
            left = [key for key in keys if key not in found]
            missed = await self.get(record, left)
            if not missed:
                break
            found |= await self._lock(record, list(missed))
        self.note_absent(record, [key for key in keys if key not in found])
        return found

    async def _lock(self, record: type[R], keys: Sequence[Key]) -> dict[Key, R]:
        rows = await self._connection.fetch(
            statements.lock_text(record), *_key_arrays(record, keys)
        )
        if rows and self._now_ms is None:
            injected = self._clock_ms()
            self._now_ms = _int(rows[-1][-1]) if injected is None else injected
        records = [mapping.from_values(record, row) for row in rows]
        self._remember(records)
        return _by_key(records)

    async def insert_new(self, records: Sequence[R]) -> set[Key]:
        inserted: set[Key] = set()
        for kind, group in mapping.by_type(records).items():
            keys = {
                mapping.stored_key(mapping.table_of(kind), mapping.key_of(record)): record
                for record in group
            }
            new: list[statements.NewRows] = []
            for part in zip(*(mapping.parts_of(record) for record in group), strict=True):
                table = mapping.table_of(type(part[0]))
                new.append(
                    statements.new_rows(
                        table, [mapping.to_values(record, table) for record in part]
                    )
                )
            text = statements.insert_new_text(tuple((each.table, each.differing) for each in new))
            values = [value for each in new for value in each.values]
            rows = await self._connection.fetch(text, *values)
            fresh = [keys[tuple(_value(value) for value in row)] for row in rows]
            self._remember(fresh)
            inserted.update(mapping.key_of(record) for record in fresh)
        return inserted

    async def save(self, changes: Changes) -> None:
        writes = writes_of([changes], self._absent)
        rows = mapping.rows_of(writes, self._loaded)
        batch = statements.Batch()
        for kind, group in mapping.by_type(rows.inserts).items():
            _add_insert(batch, kind, group)
        was = {id(record): before for record, before in rows.updates}
        for kind, group in mapping.by_type(record for record, _ in rows.updates).items():
            _add_update(batch, kind, group, was)
        for kind, group in mapping.by_type(rows.deletes).items():
            table = mapping.table_of(kind)
            keys = [mapping.stored_key(table, mapping.key_of(record)) for record in group]
            batch.add("delete", kind, table.key, keys)
        events = statements.rows_of_events(changes.events)
        if events:
            batch.append(events[: statements.EVENT_ROWS_MAX])
        if batch.parts:
            await self._write(batch)
        for first in range(statements.EVENT_ROWS_MAX, len(events), statements.EVENT_ROWS_MAX):
            following = statements.Batch()
            following.append(events[first : first + statements.EVENT_ROWS_MAX])
            await self._write(following)
        for written in (writes.inserts, writes.updates):
            self._loaded |= written
            self._absent.difference_update(written)
        for place in writes.deletes:
            self._loaded.pop(place, None)

    def broken_by(self, error: BaseException) -> bool:
        return lost_in_transaction(self._connection) and tells_of_outage(error)

    async def _write(self, batch: statements.Batch) -> None:
        rows = await self._connection.fetch(statements.save_text(tuple(batch.parts)), *batch.values)
        missing = batch.updated - _int(rows[0][0])
        if missing:
            kinds = [part.record.__name__ for part in batch.parts if part.verb == "update"]
            raise Corruption(f"{missing} rows to update are gone: {kinds}")


TakeAlong = Callable[[Collection[str]], str | None]
"""A message that wakes others who wait for topics, for a statement to send if it commits."""


class Interfered(Exception):
    """What was read without a lock is no longer true; nothing was written."""


class UnlockedTransaction(PostgresTransaction):
    """Reads without locks, and one write that compares before it writes."""

    def __init__(self, connection: Fetching, clock: Clock | None, take_along: TakeAlong) -> None:
        super().__init__(connection, clock)
        self.has_written = False
        """Or may have: the statement was sent."""
        self.sends_hints = False
        """Whether the statement tells other processes what was hinted."""
        self._take_along = take_along
        self._versions: dict[Place, int] = {}

    def _note_versions(self, joined: Iterable[tuple[Record, object]], now_ms: object) -> None:
        self._now_ms = _int(now_ms)
        for record, version in joined:
            place = place_of(record)
            self._loaded[place] = record
            if isinstance(version, int):
                self._versions[place] = version

    async def save(self, changes: Changes) -> None:
        for record in changes.updates:
            place = place_of(record)
            known = place in self._versions or place in self._absent
            assert known, f"it updates what it has compared: {record}"
        await super().save(changes)

    async def _write(self, batch: statements.Batch) -> None:
        assert not self.has_written, "only a single statement is all or nothing"
        self.has_written = True
        seen: dict[type[Record], list[tuple[Value, ...]]] = {}
        for place, version in self._versions.items():
            record = self._loaded[place]
            kind = mapping.phase_table(record)
            seen.setdefault(kind, []).append(
                (*mapping.stored_key(mapping.table_of(kind), place[1]), version)
            )
        compared: list[Value | Sequence[Value]] = []
        for rows in seen.values():
            compared += rows[0] if len(rows) == 1 else statements.arrays(rows)
        parts = tuple(statements.Seen(kind, len(rows) == 1) for kind, rows in seen.items())
        text = statements.save_text(tuple(batch.parts), parts)
        hint = self._take_along(self.hinted)
        self.sends_hints = hint is not None
        values = (*batch.values, *compared, hint)
        ((same, _),) = await self._connection.fetch(text, *values)
        if not same:
            raise Interfered


def _add_insert(batch: statements.Batch, kind: type[Record], group: Sequence[Record]) -> None:
    table = mapping.table_of(kind)
    batch.add("insert", kind, table.names, [mapping.to_values(record, table) for record in group])


def _add_update(
    batch: statements.Batch,
    kind: type[Record],
    group: list[Record],
    was: Mapping[int, Record | None],
) -> None:
    """Write what changed in any of the rows, for all of them."""
    differing: set[str] = set()
    changed: list[Record] = []
    for record in group:
        columns = mapping.columns_to_write(record, was[id(record)])
        if columns:
            differing |= columns
            changed.append(record)
    if changed:
        table, (names, pick) = mapping.table_of(kind), _written(kind, frozenset(differing))
        rows = [pick(mapping.to_values(record, table)) for record in changed]
        batch.add("update", kind, names, rows)


@lru_cache(maxsize=1024)
def _written(
    kind: type[Record], differing: frozenset[str]
) -> "tuple[tuple[str, ...], itemgetter[tuple[Value, ...]]]":
    """The columns that an update of some of them writes, and how to pick them from a row."""
    table = mapping.table_of(kind)
    written = {*table.key, *differing}
    for together in mapping.follows(table.name):
        # What the one holds depends on the others.
        if not written.isdisjoint(together):
            written |= together
    positions = [place for place, name in enumerate(table.names) if name in written]
    return tuple(table.names[place] for place in positions), itemgetter(*positions)


def _key_arrays(record: type[Record], keys: Sequence[Key]) -> list[Sequence[Value]]:
    table = mapping.table_of(record)
    return statements.arrays(dict.fromkeys(mapping.stored_key(table, key) for key in keys))


def _by_key(records: Iterable[R]) -> dict[Key, R]:
    return {mapping.key_of(record): record for record in records}


def _value(value: object) -> Value:
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    if isinstance(value, UUID):
        return str(value)
    assert isinstance(value, list), (
        f"a statement returned a {type(value).__name__}: cast it in the statement"
    )
    return msgspec.json.encode(value).decode()


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
