"""What SQLite's errors mean to us."""

import sqlite3
from typing import Final

from flowfabric.error_kinds import BackendErrorKind
from flowfabric.errors import NotStorable, RetryExhausted, Transport
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
_ABOUT_DATA: Final = frozenset(
    {sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH}
)
_BROKEN: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


def busy(error: sqlite3.Error) -> bool:
    return _code(error) & _PRIMARY_CODE in _BUSY


def translate(error: BaseException) -> BaseException:
    """The error of ours that an SQLite error stands for; any other error as it is."""
    if not isinstance(error, sqlite3.Error):
        return error
    if _code(error) in _UNIQUE:
        columns = str(error).rpartition(": ")[2]
        return UniqueViolation(columns.partition(".")[0], str(error))
    if busy(error):
        return RetryExhausted(f"the database file stayed locked: {error}")
    if _code(error) & _PRIMARY_CODE in _ABOUT_DATA or isinstance(error, sqlite3.DataError):
        return NotStorable(BACKEND, f"{type(error).__name__}: {error}")
    kind = BackendErrorKind.TRANSPORT
    if _code(error) & _PRIMARY_CODE in _BROKEN or not isinstance(error, sqlite3.OperationalError):
        kind = BackendErrorKind.OTHER
    return Transport(BACKEND, f"{type(error).__name__}: {error}", kind=kind)


def _code(error: sqlite3.Error) -> int:
    # Errors the Python module raises by itself carry no code.
    return getattr(error, "sqlite_errorcode", 0)
