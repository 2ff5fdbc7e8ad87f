"""PostgreSQL as the store: a pool, transactions that retry, hints and events.

`READ COMMITTED` plus row locks. Deadlocks and serialization failures run the body
again; a connection that turns out to be dead when a transaction starts is
replaced; everything else is translated into an error of ours and raised.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from flowfabric.core.events import LogEnd
from flowfabric.core.handles import POSTGRES_TAG
from flowfabric.errors import Bug, FlowFabricError, RetryExhausted, Unavailable
from flowfabric.outages import OutageWatch
from flowfabric.store import base
from flowfabric.store.caller_connections import unwrap, unwrap_sync
from flowfabric.store.hints import HintingStore, topics_in
from flowfabric.store.migrate import AppliedMigration, Migration, check, load, pending
from flowfabric.store.postgres import caller_connections, driver, pool
from flowfabric.store.postgres.events import WRITERS, EventLog
from flowfabric.store.postgres.hints import ANNOUNCE, HintExchange
from flowfabric.store.postgres.statements import CHANNEL, CLOCK_MS, SCHEMA
from flowfabric.store.postgres.transaction import (
    STATEMENTS,
    Interfered,
    PostgresReader,
    PostgresTransaction,
    UnlockedTransaction,
)
from flowfabric.store.statements import HINT, numbered, ordered

# Bringing a Postgres schema up to date, by one process at a time ------------

ENCODING: Final = "UTF8"
MIGRATIONS: Final = Path(__file__).parent / "migrations"

LOCK_KEY: Final = 0x666C6F77666162
"""`flowfab` in ASCII: the advisory lock migrations are applied under."""

_LEDGER_EXISTS: Final = (
    f"select to_regclass('{SCHEMA}.schema_migration') is not null,"
    " current_setting('server_encoding')"
)
_APPLIED: Final = (
    "select version, name, checksum, backward_compatible"
    f" from {SCHEMA}.schema_migration order by version"
)
_TIMEOUT_S: Final = 3_600
"""How long a migration may take, and the wait for that of another process."""
_LOCK: Final = f"set local lock_timeout = 0; select pg_advisory_xact_lock({LOCK_KEY})"
_LEDGER: Final = f"""
create schema if not exists {SCHEMA};
set local search_path = {SCHEMA}, public;
create table if not exists schema_migration (
    version              integer primary key,
    name                 text not null,
    checksum             text not null,
    backward_compatible  boolean not null,
    applied_at_ms        bigint not null
)
"""


async def read_ledger(connection: driver.Usable) -> list[AppliedMigration]:
    """What was applied, oldest first; nothing, if the schema does not exist.

    Refuses a database that cannot hold every text: it would take a failure's reason today and
    break on another tomorrow.
    """
    ((exists, encoding),) = await connection.fetch(_LEDGER_EXISTS)
    if encoding != ENCODING:
        raise Unavailable(
            "postgres",
            f"the encoding of the database is {encoding!s}, and must be {ENCODING}, which holds any"
            " text; make another: create database … encoding 'UTF8' template template0",
        )
    if not exists:
        return []
    rows = await connection.fetch(_APPLIED)
    return msgspec.convert([tuple(row) for row in rows], list[AppliedMigration])


async def apply_pending(connection: driver.Connection) -> list[str]:
    """Apply what is missing, all or nothing; return the names."""
    await connection.execute("begin")
    try:
        await connection.execute(_LOCK, timeout=_TIMEOUT_S)
        await connection.execute(_LEDGER)
        migrations = pending(load(MIGRATIONS), await read_ledger(connection))
        for migration in migrations:
            await _apply(connection, migration)
    except BaseException:
        await connection.execute("rollback")
        raise
    await connection.execute("commit")
    return [migration.name for migration in migrations]


async def _apply(connection: driver.Connection, migration: Migration) -> None:
    await connection.execute(migration.text, timeout=_TIMEOUT_S)
    await connection.execute(
        f"insert into {SCHEMA}.schema_migration values ($1, $2, $3, $4, {CLOCK_MS})",
        migration.version,
        migration.name,
        migration.checksum,
        migration.backward_compatible,
    )


T = TypeVar("T")

TRIES_MAX: Final = 4
BACKOFF_MS: Final = 5


class _Stale(Exception):
    """The connection died while it lay in the pool; nothing has happened yet."""


class PostgresStore(HintingStore):
    """A store on one Postgres database. Belongs to the event loop that opened it."""

    label = "postgres"
    writes_beside = True
    backend_tag = POSTGRES_TAG

    def __init__(
        self,
        url: str,
        *,
        clock: base.Clock | None = None,
        pool_max: int = 10,
        acquire_timeout_s: float = pool.ACQUIRE_TIMEOUT_S,
        statement_cache_size: int | None = None,
        listen_url: str | None = None,
    ) -> None:
        """`statement_cache_size=0` says that a transaction-mode pooler is in between.

        Most such poolers are noticed by themselves. `listen_url` is a way past it, for hints.
        """
        super().__init__()
        self._clock = clock
        self._connections = pool.Connections(
            url,
            pool_max=pool_max,
            acquire_timeout_s=acquire_timeout_s,
            statement_cache_size=(
                pool.STATEMENT_CACHE_SIZE if statement_cache_size is None else statement_cache_size
            ),
            listen_url=listen_url,
        )
        self._database: caller_connections.Database | None = None
        """Ours, with which connections of callers are compared."""
        self._exchange = HintExchange(self._board, self._connections)
        self._events = EventLog(self.execute_alone, self._event_writers)

    async def open(self) -> None:
        async with self._translated():
            await self._connections.open()
            try:
                async with self._connections.acquire() as connection:
                    check(load(MIGRATIONS), await read_ledger(connection))
                    self._database = await caller_connections.read_database(connection)
            except BaseException:
                await self._connections.close()
                raise
        self._exchange.start()

    async def close(self) -> None:
        await self._exchange.stop()
        await self._connections.close()

    async def migrate(self) -> Sequence[str]:
        async with self._translated():
            connection = await self._connections.connect()
            try:
                return await apply_pending(connection)
            finally:
                await connection.close(timeout=pool.ROLLBACK_TIMEOUT_S)

    async def ping(self) -> None:
        async with self._translated(), self._connections.acquire() as connection:
            await connection.execute("select 1")

    async def transact(self, body: base.Body[T], *, lock_wait_ms: int | None = None) -> T:
        async def once() -> T:
            async with self._connections.acquire() as connection:
                return await self._transact_on(connection, body, lock_wait_ms)

        return await self._retried(once)

    def transact_apart(self, body: base.Body[T]) -> T:
        async def transact(connection: driver.Connection) -> T:
            try:
                return await self._transact_on(connection, body, None)
            except _Stale as stale:
                raise stale.__cause__ or stale from None

        return self._apart(transact)

    def _apart(self, work: Callable[[driver.Connection], Awaitable[T]]) -> T:
        """Run `work` on a connection of its own, on the calling thread."""

        async def once() -> T:
            async with self._translated():
                connection = await self._connections.connect()
                try:
                    return await work(connection)
                finally:
                    await connection.close(timeout=pool.ROLLBACK_TIMEOUT_S)

        # The calling thread may have a loop that runs.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, once()).result()

    async def try_unlocked(self, body: base.UnlockedBody[T]) -> T | None:
        async def once() -> T | None:
            async with self._connections.acquire() as connection:
                return await self._try_unlocked_on(connection, body)

        try:
            return await self._retried(once)
        except base.UniqueViolation:
            return None

    async def transact_on(
        self, connection: object, body: base.Body[T], *, lock_wait_ms: int | None = None
    ) -> T:
        with caller_connections.OurWords() as said:
            said.connection = theirs = caller_connections.joined(await unwrap(connection))
            return await self._join(theirs, body, lock_wait_ms, self._read_database)

    def transact_on_sync(
        self, connection: object, body: base.Body[T], *, lock_wait_ms: int | None = None
    ) -> T:
        async def apart() -> caller_connections.Database:
            return self._apart(caller_connections.read_database)

        with caller_connections.OurWords() as said:
            said.connection = theirs = caller_connections.joined_sync(unwrap_sync(connection))
            return base.drive(self._join(theirs, body, lock_wait_ms, apart))

    async def _join(
        self,
        theirs: driver.Fetching,
        body: base.Body[T],
        lock_wait_ms: int | None,
        read_ours: Callable[[], Awaitable[caller_connections.Database]],
    ) -> T:
        connection = caller_connections.answering(theirs, lock_wait_ms)
        transaction = PostgresTransaction(connection, self._clock)
        if self._database is None:
            self._database = await read_ours()
        found = await caller_connections.look(connection, self._database)
        if found.database != self._database:
            # Ours may have been made again, as from a backup.
            self._database = await read_ours()
            self._database.check_same(found.database)
        await caller_connections.enter(connection, found, lock_wait_ms)
        try:
            async with caller_connections.whole(connection):
                result = await body(transaction)
        except FlowFabricError:
            # Refused by us, so their transaction is sound and may go on.
            await caller_connections.leave(connection, found, set())
            raise
        await caller_connections.leave(connection, found, transaction.hinted)
        return result

    async def _read_database(self) -> caller_connections.Database:
        async def once() -> caller_connections.Database:
            async with self._connections.acquire() as connection, self._scope(connection):
                return await caller_connections.read_database(connection)

        return await self._retried(once)

    async def read(self, body: base.ReadBody[T]) -> T:
        async def once() -> T:
            async with self._connections.acquire() as connection, self._scope(connection):
                return await body(PostgresReader(connection, self._clock))

        return await self._retried(once)

    async def execute_alone(
        self, name: str, topics: Collection[str] = (), /, **parameters: base.Parameter
    ) -> Sequence[base.Row]:
        statement = numbered(name, STATEMENTS)
        values = ordered(statement, parameters, self._clock_ms)
        along: str | None = None
        if HINT in statement.parameters:
            along = values[statement.parameters.index(HINT)] = self._exchange.take_along(topics)

        async def once() -> Sequence[base.Row]:
            async with self._connections.acquire() as connection, self._scope(connection):
                try:
                    rows = await connection.fetch(statement.text, *values)
                except driver.DRIVER_ERRORS as error:
                    driver.note_unanswered(error)
                    raise
            return base.FetchedRows(tuple(rows[0].keys()) if rows else (), rows)

        answer = await self._retried(once)
        woken = {*topics, *topics_in(answer)} if answer else set[str]()
        if along is None:
            self._exchange.publish(woken)
        elif answer:
            self._board.publish(woken)
        else:
            self._exchange.take_back()
        return answer

    async def execute_and_read(
        self, name: str, read: Callable[[Sequence[base.Row]], T], /, **parameters: base.Parameter
    ) -> T:
        return read(await self.execute_alone(name, **parameters))

    async def read_events(
        self, *, after: int, limit: int, category: str | None = None, wait_s: float = 0.0
    ) -> base.EventPage:
        return await self._events.page(after=after, limit=limit, category=category, wait_s=wait_s)

    async def end_of_events(self) -> LogEnd:
        return await self._events.end()

    def hint(self, topic: str) -> None:
        self._exchange.publish({topic})

    # Inside ---------------------------------------------------------------

    async def _transact_on(
        self, connection: driver.Usable, body: base.Body[T], lock_wait_ms: int | None
    ) -> T:
        transaction = PostgresTransaction(connection, self._clock)
        async with self._transaction(connection, lock_wait_ms):
            result = await body(transaction)
            if transaction.announced:
                payloads = self._exchange.payloads(transaction.announced)
                await connection.fetch(ANNOUNCE, CHANNEL, payloads)
        self._board.publish(transaction.announced)
        if hinted := transaction.hinted - transaction.announced:
            self._exchange.publish(hinted)
        return result

    async def _try_unlocked_on(
        self, connection: driver.Usable, body: base.UnlockedBody[T]
    ) -> T | None:
        transaction = UnlockedTransaction(connection, self._clock, self._exchange.take_along)
        try:
            async with self._scope(connection):
                result = await body(transaction)
        except (Interfered, FlowFabricError):
            return None
        except driver.DRIVER_ERRORS as error:
            if transaction.has_written:
                driver.note_unanswered(error)
                raise
            if not driver.connection_lost(error):
                raise
            _drop(connection)
            raise _Stale from error
        if transaction.sends_hints:
            self._board.publish(transaction.hinted)
        elif transaction.has_written:
            self._exchange.publish(transaction.hinted)
        return result

    def _scope(self, connection: driver.Usable) -> AbstractAsyncContextManager[None]:
        """Statements that commit one by one; behind a pooler they need a transaction around."""
        return self._transaction(connection) if self._connections.behind_pooler else nullcontext()

    @asynccontextmanager
    async def _transaction(
        self, connection: driver.Usable, lock_wait_ms: int | None = None
    ) -> AsyncIterator[None]:
        begin = self._connections.begin
        if lock_wait_ms is not None:
            begin = f"{begin}; set local lock_timeout = {lock_wait_ms}"
        try:
            await connection.execute(begin)
        except driver.DRIVER_ERRORS as error:
            _drop(connection)
            if driver.connection_lost(error):
                raise _Stale from error
            raise
        try:
            yield
            ended = await _commit(connection)
        except (TimeoutError, asyncio.CancelledError):
            # The pool sees to it: the server may not answer, and the caller has waited enough.
            raise
        except BaseException:
            await _roll_back(connection)
            raise
        # The server answers ROLLBACK when a statement had failed and the body went on.
        if ended == "ROLLBACK":
            raise Bug("a transaction went on after one of its statements had failed")

    async def _retried(self, once: Callable[[], Awaitable[T]]) -> T:
        """Run `once`, again after collisions, and translate what it raises."""
        with OutageWatch(self._connections.database):
            for tries_left in reversed(range(TRIES_MAX)):
                try:
                    return await once()
                except _Stale as stale:
                    failure = stale.__cause__
                    assert isinstance(failure, Exception)
                    if tries_left == 0:
                        raise driver.translate(failure, self._connections.server) from failure
                    self._connections.distrust()
                except driver.DRIVER_ERRORS as error:
                    if driver.demoted(error):
                        self._connections.distrust()
                    if not driver.collided(error):
                        raise driver.translate(error, self._connections.server) from error
                    if tries_left == 0:
                        raise RetryExhausted(f"gave up after {TRIES_MAX} tries: {error}") from error
                await asyncio.sleep(_backoff_s(TRIES_MAX - 1 - tries_left))
        raise AssertionError("the last try returns or raises")

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        with OutageWatch(self._connections.database):
            try:
                yield
            except driver.DRIVER_ERRORS as error:
                raise driver.translate(error, self._connections.server) from error

    async def _event_writers(self) -> frozenset[str]:
        async def once() -> frozenset[str]:
            async with self._connections.acquire() as connection:
                return frozenset(str(row[0]) for row in await connection.fetch(WRITERS))

        return await self._retried(once)

    def _clock_ms(self) -> int | None:
        return None if self._clock is None else self._clock.now_ms()


async def _commit(connection: driver.Usable) -> str:
    try:
        return await connection.execute("commit")
    except driver.DRIVER_ERRORS as error:
        driver.note_unanswered(error)
        raise


async def _roll_back(connection: driver.Usable) -> None:
    """End the transaction without effect, if need be by ending the connection."""
    try:
        await connection.execute("rollback", timeout=pool.ROLLBACK_TIMEOUT_S)
    except driver.DRIVER_ERRORS:
        _drop(connection)


def _drop(connection: driver.Usable) -> None:
    """End a connection; the pool may have noticed already that it is dead."""
    with suppress(driver.InterfaceError):
        connection.terminate()


def _backoff_s(tries: int) -> float:
    """Half to all of 5, 10, 20 ms."""
    return BACKOFF_MS * (1 << tries) * random.uniform(0.5, 1.0) / 1000
