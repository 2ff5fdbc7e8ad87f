"""What SQLite's errors mean to us."""

import os
import sqlite3
from pathlib import Path
from typing import Final

from flowfabric.error_kinds import BackendErrorKind
from flowfabric.errors import NotStorable, RetryExhausted, Transport, Unavailable
from flowfabric.store.base import UniqueViolation

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


def translate(error: BaseException) -> BaseException:
    """The error of ours that an SQLite error stands for; any other error as it is."""
    if not isinstance(error, sqlite3.Error):
        return error
    if _code(error) in _UNIQUE:
        columns = str(error).rpartition(": ")[2]
        return UniqueViolation(columns.partition(".")[0], str(error))
    if _code(error) == sqlite3.SQLITE_BUSY_SNAPSHOT:
        return RetryExhausted(
            "another process wrote after your transaction had read: roll it back and run it"
            " again, or begin it with BEGIN IMMEDIATE"
        )
    if busy(error):
        return RetryExhausted(f"the database file stayed locked: {error}")
    if _code(error) & _PRIMARY_CODE in _ABOUT_DATA or isinstance(error, sqlite3.DataError):
        return NotStorable(BACKEND, f"{type(error).__name__}: {error}")
    kind = BackendErrorKind.TRANSPORT
    if _code(error) & _PRIMARY_CODE in _BROKEN or not isinstance(error, sqlite3.OperationalError):
        kind = BackendErrorKind.OTHER
    return Transport(BACKEND, f"{type(error).__name__}: {error}", kind=kind)


_NOT_OPENED: Final = frozenset(
    {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}
)


def translate_opening(error: sqlite3.Error, path: str) -> BaseException:
    """The same for a file that could not be opened: which file, and why, if that can be told.

    What somebody has to mend first is no outage that passes by itself.
    """
    if _code(error) & _PRIMARY_CODE in _NOT_OPENED:
        reason = _why_not(Path(path).absolute())
        if reason is not None:
            return Unavailable(BACKEND, f"{path} cannot be opened: {reason}")
    ours = translate(error)
    if isinstance(ours, Transport):
        return Transport(BACKEND, f"{path}: {type(error).__name__}: {error}", kind=ours.kind)
    return ours


def _why_not(path: Path) -> str | None:
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
