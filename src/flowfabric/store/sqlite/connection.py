"""A database file: opened the way we want it, its clock, and what SQLite's errors mean to us."""

import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from flowfabric import errors
from flowfabric.core.clock import Anchor, decide_anchor
from flowfabric.core.ids import UUID_BYTES, uuid_text
from flowfabric.store.base import UniqueViolation
from flowfabric.store.statements import Program, program

# What SQLite's errors mean to us --------------------------------------------

BACKEND: Final = "sqlite"

_UNIQUE: Final = frozenset(
    {
        sqlite3.SQLITE_CONSTRAINT_UNIQUE,
        sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY,
        sqlite3.SQLITE_CONSTRAINT_ROWID,
    }
)
_PRIMARY_CODE: Final = 0xFF
_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_TROUBLE: Final = _BUSY | {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
_ABOUT_DATA: Final = frozenset(
    {sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH}
)
_BROKEN: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


def busy(error: sqlite3.Error) -> bool:
    return _code(error) & _PRIMARY_CODE in _BUSY


def in_trouble(error: BaseException) -> bool:
    """Whether the file cannot be written for now: its disk is full or fails, others lock it."""
    return isinstance(error, sqlite3.Error) and _code(error) & _PRIMARY_CODE in _TROUBLE


def only_reads(error: sqlite3.Error) -> bool:
    return _code(error) & _PRIMARY_CODE == sqlite3.SQLITE_READONLY


def translate(error: BaseException) -> BaseException:
    """The error of ours that an SQLite error stands for; any other error as it is."""
    if not isinstance(error, sqlite3.Error):
        return error
    if _code(error) in _UNIQUE:
        columns = str(error).rpartition(": ")[2]
        return UniqueViolation(columns.partition(".")[0], str(error))
    if _code(error) == sqlite3.SQLITE_BUSY_SNAPSHOT:
        return errors.RetryExhausted(
            "another process wrote after your transaction had read: roll it back and run it"
            " again, or begin it with BEGIN IMMEDIATE"
        )
    if busy(error):
        return errors.FileLocked(f"the database file stayed locked: {error}")
    if _code(error) & _PRIMARY_CODE in _ABOUT_DATA or isinstance(error, sqlite3.DataError):
        return errors.NotStorable(BACKEND, f"{type(error).__name__}: {error}")
    kind = errors.BackendErrorKind.TRANSPORT
    if _code(error) & _PRIMARY_CODE in _BROKEN or not isinstance(error, sqlite3.OperationalError):
        kind = errors.BackendErrorKind.OTHER
    return errors.Transport(BACKEND, f"{type(error).__name__}: {error}", kind=kind)


_NOT_OPENED: Final = frozenset(
    {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}
)


def translate_opening(error: sqlite3.Error, path: str) -> BaseException:
    """The same for a file that could not be opened: which file, and why, if that can be told.

    What an operator has to mend is no outage that passes by itself.
    """
    if _code(error) & _PRIMARY_CODE in _NOT_OPENED:
        reason = why_not(Path(path).absolute())
        if reason is not None:
            return errors.Unavailable(BACKEND, f"{path} cannot be opened: {reason}")
    ours = translate(error)
    if isinstance(ours, errors.Transport):
        return errors.Transport(BACKEND, f"{path}: {type(error).__name__}: {error}", kind=ours.kind)
    return ours


def why_not(path: Path) -> str | None:
    """What keeps this process from opening a file and writing to it, in words."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no directory {folder}; create it"
    if path.is_dir():
        return "it is a directory; name a file"
    # SQLite keeps a log beside the file, so that even a reader has to write there.
    for each in (folder, path):
        if each.exists() and not os.access(each, os.W_OK):
            if os.statvfs(each).f_flag & os.ST_RDONLY:
                return f"{folder} is on a read-only file system; make it writable"
            return f"this process may not write to {each}; give it permission"
    return None


def _code(error: sqlite3.Error) -> int:
    # Errors the Python module raises by itself carry no code.
    return getattr(error, "sqlite_errorcode", 0)


# Opening a database file the way we want it ---------------------------------

Synchronous = Literal["off", "normal", "full", "extra"]

BUSY_TIMEOUT_MS: Final = 30_000
CACHE_KIB: Final = 64 * 1024
CHECKPOINT_PAGES: Final = 4096
"""How much is logged before it goes to its places; what changes often goes there once."""
STATEMENTS: Final = Path(__file__).parent / "sql"
PROGRAMS: Final = ("claim_free", "claim_ready", "complete_leased")
"""Files of statements that run in one step. Each connection has them from the start: what is
created in a transaction is gone if that is rolled back."""
STATEMENTS_CACHED: Final = 512
MEMORY: Final = ":memory:"

_WAL_PAUSE_S: Final = 0.01

_CLAIMING: Final = """
create temp table claiming (
    place integer primary key, execution_rowid integer, again, kind default 'fresh',
    attempt_type default 'initial', reason
)"""
"""Which rows a claim has chosen; see `claim_ready.sql`."""
_CLAIMING_AGAIN: Final = (
    "create index temp.claiming_again on claiming (execution_rowid) where again"
)
"""The few of them that somebody has had before: where there are none, none are looked at."""

_CREATING: Final = """
create temp table creating (
    place integer primary key, first_rowid, route_id, namespace, payload_encoding, priority,
    creator_identity, policy, attempt_timeout_ms, retention_ms, retention_failed_ms, until_ms,
    deadline_at_ms, idempotency_ttl_ms, instance_tag, tag_rows
)"""
"""What the executions that `create_new.sql` creates have in common."""

_COMPLETING: Final = """
create temp table completing (
    execution_rowid integer primary key, position, lease_epoch, flow_id, awaited
)"""
"""What `complete_leased.sql` ends."""

_RENEWING: Final = """
create temp table renewing (execution_rowid integer primary key, position, lease_ttl_ms)"""
"""What `renew_leased.sql` extends."""

_TRIMMING: Final = """
create temp table trimming (
    execution_rowid integer primary key, partition_key, execution_id, needed
)"""
_DOOMED: Final = "create temp view doomed as select * from trimming where not needed"
"""Where retention notes the rows it looks at, and those it deletes; see `trim_executions.sql`."""


class Given:
    """The lists that a statement has been given; it asks for their values one by one.

    That is cheaper than binding each of them, and than any form in which one value could hold
    them all.
    """

    def __init__(self) -> None:
        self.lists: Mapping[str, Sequence[str | bytes | int | None]] = {}

    def value(self, name: str, position: int) -> str | bytes | int | None:
        """A list that is empty where others are not says nothing of any row."""
        values = self.lists[name]
        return values[position] if values else None


def _nothing() -> None:
    pass


class FileConnection(sqlite3.Connection):
    """A connection of ours, with what our statements need."""

    given: Given
    before_step: Callable[[], None] = staticmethod(_nothing)
    """Called before a long step, during which other threads have Python for themselves."""

    def run(self, program: Program, values: Sequence[str | int | float | bytes | None]) -> None:
        self.before_step()
        self.execute(program.call, values)


def connect(
    path: str,
    synchronous: Synchronous,
    *,
    busy_timeout_ms: int = BUSY_TIMEOUT_MS,
    check: Callable[[sqlite3.Connection], None] | None = None,
) -> FileConnection:
    """A connection on which transactions are begun and ended by hand.

    With `check`, the file has to exist, and is left as it is unless `check` passes it.
    """
    connection = sqlite3.connect(
        path if check is None else f"{Path(path).absolute().as_uri()}?mode=rw",
        timeout=busy_timeout_ms / 1000,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=STATEMENTS_CACHED,
        uri=check is not None,
        factory=FileConnection,
    )
    try:
        if check is not None:
            check(connection)
        _prepare(connection, path, synchronous)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: FileConnection, path: str, synchronous: Synchronous) -> None:
    if path != MEMORY:
        _use_wal(connection)
    for setting in (
        f"synchronous = {synchronous}",
        f"cache_size = -{CACHE_KIB}",
        "foreign_keys = off",
        "temp_store = memory",
        f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
        "journal_size_limit = 67108864",
    ):
        connection.execute(f"pragma {setting}")
    # Newer SQLite has it built in; lists of bytes travel to statements as hexadecimal.
    connection.create_function("unhex", 1, _unhex, deterministic=True)
    connection.create_function("uuid_head", 1, _uuid_head, deterministic=True)
    connection.given = Given()
    connection.create_function("given", 2, connection.given.value)
    for scratch in (
        _CREATING,
        _CLAIMING,
        _CLAIMING_AGAIN,
        _COMPLETING,
        _RENEWING,
        _TRIMMING,
        _DOOMED,
    ):
        connection.execute(scratch)
    for name in PROGRAMS:
        made = program(name, STATEMENTS)
        assert made is not None, f"{name} is no program"
        for part in made.creation:
            connection.execute(part)


def data_version(connection: sqlite3.Connection) -> int:
    """A number that changes when another connection commits, and not when this one does."""
    version: int = connection.execute("pragma data_version").fetchone()[0]
    return version


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL. Of two processes that do so at once, one finds it busy."""
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute("pragma journal_mode = wal")
        except sqlite3.OperationalError as error:
            if not busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(_WAL_PAUSE_S)
        else:
            return


def _uuid_head(uuids: bytes) -> str:
    """The first uuid up to its last hyphen."""
    return uuid_text(uuids[:UUID_BYTES])[:-12]


def _unhex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


# Whether a path still names the file that was opened, and the files that SQLite keeps beside it
#
# A file that is deleted, or replaced by another, stays open where it was opened: writing to
# it succeeds, and what was written is gone with the last process that has it open. The same
# goes for the log of the latest commits, `-wal`, and for `-shm`, through which processes
# share it: SQLite deletes neither while we have them open. So the paths are looked up again
# before every read, and before and after every commit.

LogState = tuple[int, int]
"""Something that changes when a commit writes to the file."""
_NOBODY: Final = (0, 0)
_BESIDE: Final = ("", "-wal", "-shm")


class FileIdentity:
    """The files that a path named when this was made."""

    def __init__(self, path: str) -> None:
        # The process may change its directory.
        path = path if path == MEMORY else os.path.abspath(path)
        self._log = f"{path}-wal"
        paths = () if path == MEMORY else tuple(f"{path}{ending}" for ending in _BESIDE)
        opened = {each: _look_up(each) for each in paths}
        self._opened = {
            each: (found.st_dev, found.st_ino) for each, found in opened.items() if found
        }

    def check(self) -> LogState:
        """Raise unless the paths still name those files; return the state of the log."""
        log = _NOBODY
        for path, opened in self._opened.items():
            found = _look_up(path)
            if found is None or (found.st_dev, found.st_ino) != opened:
                what = "replaced" if os.path.exists(path) else "deleted"
                raise errors.DatabaseGone(
                    "sqlite",
                    f"{path} was {what} while it was in use, so nothing can be read from or"
                    " stored in it any more; put the file back, or start this process again",
                )
            if path == self._log:
                log = found.st_size, found.st_mtime_ns
        return log


def _look_up(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


# The clock of a machine, as all its processes on one file read it -----------
#
# Its anchor lies in the file. A writer that finds that the wall clock was set
# moves the anchor, and with it the ends of leases and attempts, in the same transaction.
# A reader counts from the anchor as it is. Only Linux tells one start of the machine from
# another; elsewhere the wall clock is all there is.

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_FIND: Final = "select boot_id, started_at_ms from clock"
_PUT: Final = "insert or replace into clock (singleton, boot_id, started_at_ms) values (1, ?, ?)"
_MOVE: Final = """
update live
   set lease_expires_at_ms = lease_expires_at_ms + :moved_ms,
       attempt_deadline_ms = attempt_deadline_ms + :moved_ms
 where ownership_state = 'leased'
   and lifecycle_phase = 'active'
"""


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _uptime_ms() -> int:
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", 0)) // 1_000_000


def _boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


@dataclass(frozen=True)
class Machine:
    """What a machine knows of time."""

    boot_id: str | None
    wall_ms: Callable[[], int] = _wall_ms
    uptime_ms: Callable[[], int] = _uptime_ms


THIS_MACHINE: Final = Machine(_boot_id())


class MachineClock:
    """A clock that goes on evenly while the wall clock is set."""

    def __init__(self, machine: Machine = THIS_MACHINE) -> None:
        self._machine = machine

    def now_ms(self) -> int:
        return self._machine.wall_ms()

    def now_on(self, connection: sqlite3.Connection, *, writes: bool) -> int:
        """The time in the file of `connection`; `writes` says whether it may be written to."""
        machine = self._machine
        if machine.boot_id is None:
            return machine.wall_ms()
        row = connection.execute(_FIND).fetchone()
        known = None if row is None else Anchor(boot_id=row[0], started_at_ms=row[1])
        uptime_ms = machine.uptime_ms()
        decided = decide_anchor(
            known, boot_id=machine.boot_id, wall_ms=machine.wall_ms(), uptime_ms=uptime_ms
        )
        anchor = decided.anchor
        if anchor != known:
            if writes:
                connection.execute(_PUT, (anchor.boot_id, anchor.started_at_ms))
                connection.execute(_MOVE, {"moved_ms": decided.moved_ms})
            elif known is not None and known.boot_id == anchor.boot_id:
                anchor = known
        return anchor.started_at_ms + uptime_ms
