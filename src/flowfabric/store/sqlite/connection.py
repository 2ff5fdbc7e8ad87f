"""Opening a database file the way we want it."""

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from flowfabric.core.ids import UUID_BYTES, uuid_text
from flowfabric.store.sqlite.failures import busy

Synchronous = Literal["off", "normal", "full", "extra"]

BUSY_TIMEOUT_MS: Final = 30_000
CACHE_KIB: Final = 64 * 1024
STATEMENTS_CACHED: Final = 512
MEMORY: Final = ":memory:"

_WAL_PAUSE_S: Final = 0.01

_CLAIMING: Final = """
create temp table claiming (
    place integer primary key, execution_rowid unique, partition_key, execution_id, kind,
    reclaim_reason, attempt_type, pending_retry_reason, pending_replay_reason,
    pending_replay_requested_by, pending_previous_attempt_index, previous_index, namespace,
    attempt_timeout_ms
)"""
"""Where a claim notes the rows it took, as they were; see `claim_ready.sql`."""

_CREATING: Final = """
create temp table creating (
    place integer primary key, route_id, namespace, lane_id, execution_kind, payload_encoding,
    priority, creator_identity, policy, attempt_timeout_ms, retention_ms, retention_failed_ms
)"""
"""What the executions that `create_ready.sql` creates have in common."""

_COMPLETING: Final = """
create temp table completing (
    execution_rowid integer primary key, partition_key, execution_id, attempt_index, lease_epoch,
    position, result, result_encoding
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


def connect(
    path: str,
    synchronous: Synchronous,
    *,
    busy_timeout_ms: int = BUSY_TIMEOUT_MS,
    check: Callable[[sqlite3.Connection], None] | None = None,
) -> sqlite3.Connection:
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
    )
    try:
        if check is not None:
            check(connection)
        _prepare(connection, path, synchronous)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: str, synchronous: Synchronous) -> None:
    if path != MEMORY:
        _use_wal(connection)
    for setting in (
        f"synchronous = {synchronous}",
        f"cache_size = -{CACHE_KIB}",
        "foreign_keys = off",
        "temp_store = memory",
        "journal_size_limit = 67108864",
    ):
        connection.execute(f"pragma {setting}")
    # Newer SQLite has it built in; lists of bytes travel to statements as hexadecimal.
    connection.create_function("unhex", 1, _unhex, deterministic=True)
    connection.create_function("uuid_at", 2, _uuid_at, deterministic=True)
    for scratch in (_CREATING, _CLAIMING, _COMPLETING, _RENEWING, _TRIMMING, _DOOMED):
        connection.execute(scratch)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL. Of two processes that do so at once, one is told it is busy."""
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


def _uuid_at(uuids: bytes, place: int) -> str:
    return uuid_text(uuids[place * UUID_BYTES : (place + 1) * UUID_BYTES])


def _unhex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)
