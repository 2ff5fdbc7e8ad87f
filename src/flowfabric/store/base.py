"""What the engine asks of a database.

A store loads, locks and writes rows and appends events; it decides nothing.
Units of work are plain `async def body(tx)` functions handed to `transact` or
`read`. Postgres awaits them over the network. SQLite runs the same function on
its writer thread, where no await ever really waits, and commits many of them
together. So a body may await `tx` and nothing else, and may be run again from
the start when the database asks for it.

Rows are reached in two ways. By key: `get`, `lock` and `save` work for every
record type, from one mapping. By search: `select` runs a statement file
(`sql/<name>.sql`, the same name in both dialects).

Locks are taken in one order everywhere, by key within a kind: ARCHITECTURE.md has it,
under "Invariants".
"""

import inspect
import types
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Protocol, Self, TypeVar, overload

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from flowfabric.core.decisions import Changes
from flowfabric.core.events import LogEnd, StoredEvent
from flowfabric.core.records import Record
from flowfabric.errors import Bug

R = TypeVar("R", bound=Record)
S = TypeVar("S", bound=Struct)
T = TypeVar("T")

Value = str | int | bool | float | bytes | None
Parameter = (
    Value
    | Sequence[str]
    | Sequence[int]
    | Sequence[bytes | None]
    | Sequence[str | None]
    | Sequence[int | None]
)
Row = Mapping[str, Value]
Key = tuple[str | int, ...]


class FetchedRows(Sequence[Row]):
    """Rows as the driver returned them; each becomes a mapping when it is read.

    For a wide row that costs several times what reading its values does: see `tuples_of`.
    """

    def __init__(self, columns: Sequence[str], rows: Sequence[Iterable[Value]]) -> None:
        """Each row has its values in the order of the columns."""
        self.columns = columns
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> "FetchedRows": ...
    def __getitem__(self, place: int | slice) -> "Row | FetchedRows":
        if isinstance(place, slice):
            return FetchedRows(self.columns, self._values()[place])
        return dict(zip(self.columns, self._values()[place], strict=False))

    def __iter__(self) -> Iterator[Row]:
        return (dict(zip(self.columns, row, strict=False)) for row in self._values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def tuples(self) -> list[tuple[object, ...]]:
        return [tuple(row) for row in self._values()]

    def _values(self) -> Sequence[Iterable[Value]]:
        return self._rows


class PackedRows(FetchedRows):
    """Rows whose last column is a JSON array of all values; its name lists theirs.

    What is bytes comes first, in columns of its own, and is empty text in the array. Nothing is
    taken apart before somebody reads it: that need not be the thread that has the connection.
    """

    def __init__(self, columns: Sequence[str], rows: Sequence[tuple[Value, ...]]) -> None:
        super().__init__(_names_in(columns[-1]), rows)
        self._packed = rows
        self._unpacked: list[tuple[Value, ...]] | None = None

    def structs(self, kind: type[S]) -> list[S]:
        """The rows as structs that are like arrays, without a list for each."""
        form = types.GenericAlias(list, (kind,))
        # Not strict: one database has booleans, the other zero and one.
        found: list[S] = msgspec.json.decode(self._text(), type=form, strict=False)
        for place, name in enumerate(self.columns[: len(self._packed[0]) - 1]):
            for each, row in zip(found, self._packed, strict=True):
                force_setattr(each, name, row[place])
        return found

    def _values(self) -> Sequence[tuple[Value, ...]]:
        if self._unpacked is None:
            arrays = msgspec.json.decode(self._text(), type=list[list[str | int | None]])
            self._unpacked = [
                (*row[:-1], *values[len(row) - 1 :])
                for row, values in zip(self._packed, arrays, strict=True)
            ]
        return self._unpacked

    def _text(self) -> str:
        return f"[{','.join([str(row[-1]) for row in self._packed])}]"


@lru_cache(maxsize=64)
def _names_in(packed: str) -> tuple[str, ...]:
    return tuple(packed.split())


def tuples_of(rows: Sequence[Row]) -> list[tuple[object, ...]]:
    """The values of rows, in the order of the statement's columns."""
    if isinstance(rows, FetchedRows):
        return rows.tuples()
    return [tuple(row.values()) for row in rows]


class UniqueViolation(Exception):
    """A row would have broken a unique constraint of `table`. Raised out of `transact`.

    For the engine, which turns it into an answer; it never reaches users.
    """

    def __init__(self, table: str, detail: str) -> None:
        super().__init__(f"{table}: {detail}")
        self.table = table


class Clock(Protocol):
    """A source of time for tests and for SQLite; Postgres otherwise asks its server."""

    def now_ms(self) -> int: ...


class Reader(Protocol):
    """Row access without locks."""

    async def now_ms(self) -> int:
        """The store's time: one value per unit of work, read after its first locks."""
        ...

    async def get(self, record: type[R], keys: Sequence[Key]) -> dict[Key, R]:
        """Rows by key, those that exist."""
        ...

    async def get_one(self, record: type[R], key: Key) -> R | None:
        """The row with this key, if it exists."""
        ...

    async def select(self, name: str, **parameters: Parameter) -> Sequence[Row]:
        """Rows of the statement `sql/<name>.sql`. `:name` in the file is a parameter here."""
        ...

    async def select_as(self, kind: type[T], name: str, **parameters: Parameter) -> list[T]:
        """The same as values of a type: a struct with a field per column, or the first column.

        An `ExecutionId` is made of its uuid and a `partition_key`, of the row or else the one
        among the parameters.
        """
        ...

    async def select_records(
        self, record: type[R], name: str, **parameters: Parameter
    ) -> Sequence[R]:
        """The same, for statements that return whole rows of one table."""
        ...

    async def select_joined(
        self, records: Sequence[type[Record]], name: str, **parameters: Parameter
    ) -> "Sequence[Joined]":
        """The same, for statements that return whole rows of several tables, side by side.

        The columns of each table are followed by one that has the table's name: null where
        there is no row.
        """
        ...


class Saving(Reader, Protocol):
    """Row access that ends in a write."""

    def note_absent(self, record: type[R], keys: Sequence[Key]) -> None:
        """Record that these rows do not exist, as `lock` would."""
        ...

    async def save(self, changes: Changes) -> None:
        """Write changes: inserts, then updates, deletes, and events.

        An update of a row that was looked for and not found inserts it.
        """
        ...

    def hint(self, topic: str) -> None:
        """Wake those who wait for `topic`, once this has been committed."""
        ...


class Transaction(Saving, Protocol):
    """Row access inside one read-write transaction."""

    async def lock(self, record: type[R], keys: Sequence[Key]) -> dict[Key, R]:
        """Rows by key, locked until the end of the transaction, in key order."""
        ...

    async def lock_one(self, record: type[R], key: Key) -> R | None:
        """The row with this key, locked, if it exists."""
        ...

    async def insert_new(self, records: Sequence[R]) -> set[Key]:
        """Insert rows whose key is free, and whatever else is theirs alone; return the keys.
        Others are left alone."""
        ...

    def announce(self, topic: str) -> None:
        """Hint a topic that listeners rarely poll: other processes hear of it with the
        commit, even if this one ends at once. That costs a statement."""
        ...

    def broken_by(self, error: BaseException) -> bool:
        """Whether this error means that the database went away before the commit.

        Also answers later, for a transaction of a caller that was joined.
        """
        ...


class Joined:
    """Rows of several tables that a statement found together."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = {type(record): record for record in records}

    def get(self, record: type[R]) -> R | None:
        """The row of that table, if there was one."""
        found = self._records.get(record)
        assert found is None or isinstance(found, record)
        return found


class Unlocked(Saving, Protocol):
    """Row access that holds no locks: `save` writes if no row has changed.

    It is called once and last, after hints, and updates nothing but rows that it compares.
    """

    async def select_joined(
        self, records: Sequence[type[Record]], name: str, **parameters: Parameter
    ) -> Sequence[Joined]:
        """The same, where a number in the column after a table says that `save` is to compare
        the row's version. The last column of all is the time.
        """
        ...


Body = Callable[[Transaction], Awaitable[T]]
UnlockedBody = Callable[[Unlocked], Awaitable[T]]
ReadBody = Callable[[Reader], Awaitable[T]]


class EventPage(Struct, frozen=True, kw_only=True):
    events: tuple[StoredEvent, ...]
    cursor: int
    """Everything up to here has been seen; pass it as the next `after`."""


class HintListener(Protocol):
    """Hints that arrive between two waits are kept for the next `wait`. Use as a context."""

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a hint; return whether one came.

        Hints can be lost, so look at the database after every wait. Where hints
        from other processes do not arrive at all, the wait ends sooner than
        `timeout_s`, the sooner the more recently there was something to do.
        """
        ...

    async def look_out(self, first_s: float, max_s: float) -> bool:
        """Wait for a hint: `first_s` at first, then longer while there is nothing to do."""
        ...

    def take(self) -> bool:
        """Return without waiting whether a hint came, and forget it."""
        ...

    def wake(self) -> None:
        """End the wait, or the next one, as a hint would."""
        ...

    def found_work(self) -> None:
        """There was something to do: where hints do not arrive, look again soon."""
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


class Store(Protocol):
    label: str
    """`postgres` or `sqlite`."""
    writes_beside: bool
    """Whether others can write while a transaction is open."""
    backend_tag: int
    """The byte that marks this store's worker handles."""

    async def open(self) -> None:
        """Connect, and refuse a schema that is too old or too new."""
        ...

    async def close(self) -> None: ...

    async def migrate(self) -> Sequence[str]:
        """Bring the schema up to date; return the names of the migrations applied."""
        ...

    async def ping(self) -> None: ...

    async def transact(self, body: Body[T], *, lock_wait_ms: int | None = None) -> T:
        """Run `body` in one transaction. Deadlocks and serialization failures run it again.

        Raises `LockTimeout` when another transaction keeps a row locked, where writers do not
        take turns anyway after `lock_wait_ms`.
        """
        ...

    def transact_apart(self, body: Body[T]) -> T:
        """The same on a connection of its own, on the calling thread, whatever loop it has.

        Only where `writes_beside`.
        """
        ...

    async def try_unlocked(self, body: UnlockedBody[T]) -> T | None:
        """Run `body` in two round trips: one reads, one writes if nothing has changed since.

        None, and nothing written, when a row has changed, when a new row exists already, and when
        `body` refuses: `transact` then finds out under lock what is true.
        """
        ...

    async def transact_on(
        self, connection: object, body: Body[T], *, lock_wait_ms: int | None = None
    ) -> T:
        """Run `body` once, inside the open transaction of the caller's connection.

        Nothing is committed here, and hints are sent once the transaction commits. After a
        `LockTimeout`, as after any refusal of ours, their transaction is sound.
        """
        ...

    def transact_on_sync(
        self, connection: object, body: Body[T], *, lock_wait_ms: int | None = None
    ) -> T:
        """The same on the calling thread, for connections that are not async."""
        ...

    async def read(self, body: ReadBody[T]) -> T:
        """Run `body` without locks, on one connection.

        SQLite gives it one snapshot. On Postgres each statement sees what is
        committed when it starts: read rows that must agree in one statement.
        """
        ...

    async def execute_alone(
        self, name: str, topics: Collection[str] = (), /, **parameters: Parameter
    ) -> Sequence[Row]:
        """Run the statement `sql/<name>.sql` as a transaction of its own, in one round trip.

        Once it has committed, those who wait for `topics` are woken, and for those it returns in
        a column `topic`. No row says that nothing was done.
        It returns numbers, texts and bytes; uuids are cast to text in the file.
        A file for SQLite may hold several statements, separated by lines `-- next`;
        the rows are those of the last one. `given('results', 3)` is there the fourth value of
        a list.
        """
        ...

    async def execute_and_read(
        self, name: str, read: Callable[[Sequence[Row]], T], /, **parameters: Parameter
    ) -> T:
        """What `read` makes of the rows of such a statement, which wakes nobody.

        SQLite may call it while the disk is flushed: it must leave no trace, as the transaction
        may yet fail.
        """
        ...

    async def read_events(
        self, *, after: int, limit: int, category: str | None = None, wait_s: float = 0.0
    ) -> EventPage:
        """Events with ids above `after`, in order, without ever passing one still to be committed.

        When the very next event is still to be committed, waits up to `wait_s` for
        it and then returns an empty page with the same cursor. It does not wait for
        events that no transaction has begun to write; that is what hints are for.
        """
        ...

    async def end_of_events(self) -> LogEnd:
        """Where to begin for every event that is not committed yet, and for none that is."""
        ...

    def hint(self, topic: str) -> None:
        """Wake those who wait for `topic` now: for what `execute_alone` has committed."""
        ...

    def hints(self, topics: Sequence[str]) -> HintListener:
        """Listen for hints on any of `topics`, from this process and others."""
        ...

    def is_awaited(self, topic: str) -> bool:
        """Whether anyone in this process listens for `topic`."""
        ...

    @property
    def hints_are_live(self) -> bool:
        """Whether hints from other processes arrive; if not, waits are short and callers poll."""
        ...


class PassingStore:
    """Delegates everything except units of work to another store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.label = store.label
        self.backend_tag = store.backend_tag
        self.writes_beside = store.writes_beside
        self.migrate, self.ping = store.migrate, store.ping
        self.transact_apart = store.transact_apart
        self.transact_on, self.transact_on_sync = store.transact_on, store.transact_on_sync
        self.read_events, self.end_of_events = store.read_events, store.end_of_events
        self.hint, self.hints, self.is_awaited = store.hint, store.hints, store.is_awaited

    @property
    def hints_are_live(self) -> bool:
        return self.store.hints_are_live


# Running a unit of work that never really waits -----------------------------


def drive(unit: Awaitable[T]) -> T:
    """Run to its end a coroutine that never really waits."""
    steps = unit.__await__()
    try:
        next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
    if inspect.iscoroutine(unit):
        unit.close()
    raise Bug("a unit of work awaited something other than its transaction")
