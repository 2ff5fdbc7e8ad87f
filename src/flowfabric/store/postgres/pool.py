"""Connections to Postgres, set up the way our statements expect.

Everything lives in the schema `flowfabric`. Normally each connection is told so
once, when it is made. A transaction-mode pooler (PgBouncer) hands every
transaction to another server connection and refuses session settings; behind one,
each transaction sets what it needs itself and nothing is prepared ahead.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

from flowfabric.errors import InvalidInput, ResourceExhausted, Unavailable
from flowfabric.store.postgres.driver import (
    Connection,
    InterfaceError,
    Pool,
    PostgresError,
    connect,
    create_pool,
)
from flowfabric.store.postgres.generated import SCHEMA

ACQUIRE_TIMEOUT_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 10.0
COMMAND_TIMEOUT_S: Final = 60.0
ROLLBACK_TIMEOUT_S: Final = 5.0
QUERIES_MAX: Final = 10_000_000
"""A connection is replaced after that many; a new one has to prepare everything again."""
IDLE_LIFETIME_S: Final = 300.0
STATEMENT_CACHE_SIZE: Final = 500

SEARCH_PATH: Final = f"{SCHEMA}, public"

# Every statement finds its rows through an index. A plan made while a table was
# small must not turn into a scan when it has grown, so scans and the joins that
# need them are off and statements are planned once. A client that vanished must
# not keep its locks.
_SETTINGS: Final = {
    "search_path": SEARCH_PATH,
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "60s",
}


_BEGIN: Final = "begin isolation level read committed"


class Connections:
    """A pool, and whether a transaction-mode pooler stands between it and the server."""

    def __init__(
        self, url: str, *, pool_max: int, acquire_timeout_s: float, statement_cache_size: int
    ) -> None:
        self.pool_max = pool_max
        self.behind_pooler = statement_cache_size == 0
        self._url = url
        self._acquire_timeout_s = acquire_timeout_s
        self._statement_cache_size = statement_cache_size
        self._pool: Pool | None = None
        self._spare: Connection | None = None
        """Kept from the pool for the next caller: giving it back costs a task each time."""
        self._kept_at_s = 0.0
        self._waiting = 0
        """Callers who wait for the pool to have a connection."""

    async def open(self) -> None:
        if not self.behind_pooler:
            self.behind_pooler = await self._settings_are_refused()
        with _readable_url():
            self._pool = await create_pool(
                self._url,
                min_size=1,
                max_size=self.pool_max,
                max_queries=QUERIES_MAX,
                max_inactive_connection_lifetime=IDLE_LIFETIME_S,
                timeout=CONNECT_TIMEOUT_S,
                command_timeout=COMMAND_TIMEOUT_S,
                statement_cache_size=0 if self.behind_pooler else self._statement_cache_size,
                max_cached_statement_lifetime=0,
                server_settings=self._server_settings(),
                reset=_clean_up,
            )

    async def close(self) -> None:
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await self._give_back_spare(pool)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await pool.close()
            except TimeoutError:
                pool.terminate()

    async def connect(self) -> Connection:
        """A connection outside the pool."""
        with _readable_url():
            return await connect(
                self._url,
                timeout=CONNECT_TIMEOUT_S,
                command_timeout=COMMAND_TIMEOUT_S,
                statement_cache_size=0,
                server_settings=self._server_settings(),
            )

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        """A pooled connection, returned outside any transaction."""
        # Kept, because the store may be closed while the connection is out.
        pool = self._pool
        if pool is None:
            raise Unavailable("store", "it is not open")
        connection = await self._take_spare(pool) or await self._acquire_from(pool)
        try:
            if self._pool is not pool:
                # Closed while we waited for our turn; the driver closes it under our hands.
                raise Unavailable("store", "it is not open")
            yield connection
        except BaseException:
            # Whatever is still under way on it, the pool waits for.
            await pool.release(connection)
            raise
        if self._may_keep(connection, pool):
            self._spare, self._kept_at_s = connection, time.monotonic()
        else:
            await pool.release(connection)

    async def _take_spare(self, pool: Pool) -> Connection | None:
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        # What stands between us and the server may have forgotten one that lay idle for long.
        if _is_clean(spare) and time.monotonic() - self._kept_at_s < IDLE_LIFETIME_S:
            return spare
        with suppress(InterfaceError):
            spare.terminate()
        await pool.release(spare)
        return None

    async def _acquire_from(self, pool: Pool) -> Connection:
        # The driver starts a task for a timeout, which an idle connection does not need.
        timeout_s = None if pool.get_idle_size() else self._acquire_timeout_s
        self._waiting += 1
        try:
            return await pool.acquire(timeout=timeout_s)
        except InterfaceError as error:
            if self._pool is None:
                raise Unavailable("store", "it is not open") from error
            raise
        except TimeoutError as error:
            if pool.get_idle_size() == 0 and pool.get_size() >= self.pool_max:
                raise ResourceExhausted("postgres connections", self.pool_max) from error
            raise
        finally:
            self._waiting -= 1

    def _may_keep(self, connection: Connection, pool: Pool) -> bool:
        return (
            self._pool is pool
            and self._spare is None
            and self._waiting == 0
            and _is_clean(connection)
        )

    async def _give_back_spare(self, pool: Pool) -> None:
        if self._spare is not None:
            spare, self._spare = self._spare, None
            await pool.release(spare)

    async def distrust(self) -> None:
        """Replace every connection before its next use: one was found dead, others may be."""
        if self._pool is not None:
            await self._pool.expire_connections()
            await self._give_back_spare(self._pool)

    @property
    def begin(self) -> str:
        """How a transaction starts."""
        if not self.behind_pooler:
            return _BEGIN
        settings = (f"set local {name} = {_literal(value)}" for name, value in _SETTINGS.items())
        return "; ".join((_BEGIN, *settings))

    def _server_settings(self) -> dict[str, str]:
        return {} if self.behind_pooler else {**_SETTINGS, "application_name": "flowfabric"}

    async def _settings_are_refused(self) -> bool:
        """Whether session settings do not reach the server, which only a pooler explains."""
        try:
            connection = await self.connect()
        except PostgresError as error:
            if "startup parameter" in str(error):
                return True
            raise
        try:
            rows = await connection.fetch("show search_path")
            return rows[0][0] != _SETTINGS["search_path"]
        finally:
            await connection.close(timeout=CONNECT_TIMEOUT_S)


@contextmanager
def _readable_url() -> Iterator[None]:
    """Refuse a URL the driver makes nothing of. What it says may repeat the password."""
    try:
        yield
    except InterfaceError:
        raise
    except (ValueError, OverflowError):
        raise InvalidInput(
            "url",
            "must be postgresql://user:password@host:port/database, with"
            " / ? # [ ] @ : % in user and password percent-encoded",
        ) from None


def _literal(value: str) -> str:
    return value if value.startswith(SCHEMA) else f"'{value}'"


def _is_clean(connection: Connection) -> bool:
    """Whether the next caller can use it as it is."""
    try:
        return not (connection.is_closed() or connection.is_in_transaction())
    except InterfaceError:
        # The pool has taken back a connection that died.
        return False


async def _clean_up(connection: Connection) -> None:
    """Connections come back clean, unless the caller was cancelled in the middle of a commit.

    The driver's own reset would cost a round trip each time.
    """
    if connection.is_in_transaction():
        await connection.execute("rollback", timeout=ROLLBACK_TIMEOUT_S)
