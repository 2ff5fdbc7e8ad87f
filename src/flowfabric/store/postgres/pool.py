"""Connections to Postgres, set up the way our statements expect.

Everything lives in the schema `flowfabric`. Normally each connection is told so
once, when it is made. A transaction-mode pooler (PgBouncer) hands every
transaction to another server connection and refuses session settings; behind one,
each transaction sets what it needs itself and nothing is prepared ahead.

A network may swallow what is sent without closing anything. So a statement that
times out ends its connection at once, waiting for no answer, and with it every idle
one: they went the same way. The kernel is told to give up early as well.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from msgspec import Struct

from flowfabric.errors import InvalidInput, ResourceExhausted, Unavailable
from flowfabric.outages import patience_s
from flowfabric.store.postgres import driver
from flowfabric.store.postgres.statements import SCHEMA

ACQUIRE_TIMEOUT_S: Final = 30.0
"""How long to wait for a connection while others get answers on theirs."""
CONNECT_TIMEOUT_S: Final = 10.0
COMMAND_TIMEOUT_S: Final = 10.0
"""How long a statement may take whose caller does not say."""
ROLLBACK_TIMEOUT_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 10.0
GROW_AFTER_S: Final = 0.005
"""Most statements are answered sooner than a connection is made for the next."""
IDLE_LIFETIME_S: Final = 300.0
"""A firewall may have dropped a connection that was idle for longer."""
STATEMENT_CACHE_SIZE: Final = 500
DEFAULT_PORT: Final = 5432

SEARCH_PATH: Final = f"{SCHEMA}, public"

# Every statement finds its rows through an index. A plan made while a table was
# small must not turn into a scan when it has grown, so scans and the joins that
# need them are off and statements are planned once. A client that vanished must
# not keep its locks: our transactions are never idle for long. A row that is locked is
# waited for twice, behind those that wait already and then for its holder: both waits together
# are shorter than the ten seconds that clients have, so that a lock is not taken for an outage.
_SETTINGS: Final = {
    "search_path": SEARCH_PATH,
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "lock_timeout": "4s",
    "idle_in_transaction_session_timeout": "5s",
}
_SESSION_SETTINGS: Final = {
    "application_name": "flowfabric",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
"""So that the server notices a client that is gone, too."""


_PATH_IS_SET: Final = f"select 1 / (current_setting('search_path') = '{SEARCH_PATH}')::int"
_BEGIN: Final = "begin isolation level read committed"


class IdleConnection(Struct, frozen=True):
    """An idle connection."""

    connection: driver.Connection
    since_s: float


class Turn(NamedTuple):
    """A caller waiting for a connection; None says that there may be room to make one."""

    future: "asyncio.Future[driver.Connection | None]"
    late_at_s: float
    """From when on it has waited longer than it would for an answer."""


class Timed:
    """A connection whose statements have a time limit."""

    def __init__(self, connection: driver.Connection, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    async def execute(self, query: str, *args: object, timeout: float | None = None) -> str:
        return await self._connection.execute(query, *args, timeout=self._bounded(timeout))

    async def fetch(
        self, query: str, *args: object, timeout: float | None = None
    ) -> Sequence[driver.DriverRow]:
        return await self._connection.fetch(query, *args, timeout=self._bounded(timeout))

    def terminate(self) -> None:
        self._connection.terminate()

    def _bounded(self, timeout_s: float | None) -> float | None:
        # Asked for each time: less may be left.
        return patience_s(self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s))


class Acquired:
    """A connection of a pool for as long as it is used as a context.

    No generator: event loops end those that are left when they end, and an app that was not
    closed needs a connection just then.
    """

    __slots__ = ("_connection", "_connections")

    def __init__(self, connections: "Connections") -> None:
        self._connections = connections
        self._connection: driver.Connection | None = None

    async def __aenter__(self) -> driver.Usable:
        self._connection = connection = await self._connections.take()
        return Timed(connection, patience_s() or COMMAND_TIMEOUT_S)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *rest: object
    ) -> None:
        if self._connection is not None:
            self._connections.release(self._connection, error)


class Connections:
    """A pool, and whether a transaction-mode pooler stands between it and the server."""

    def __init__(
        self,
        url: str,
        *,
        pool_max: int,
        acquire_timeout_s: float,
        statement_cache_size: int,
        listen_url: str | None = None,
    ) -> None:
        self.pool_max = pool_max
        self.behind_pooler = statement_cache_size == 0
        self.server, self.database = _named(url)
        """Where it listens, and what people know the database by; without the password."""
        self.on_suspicion: Callable[[], None] | None = None
        """Called when a statement has timed out: the network may swallow packets."""
        self._url = url
        self._listen_url = listen_url or url
        self._acquire_timeout_s = acquire_timeout_s
        self._statement_cache_size = statement_cache_size
        self._is_open = False
        self._idle: list[IdleConnection] = []
        self._generations: dict[driver.Connection, int] = {}
        """Every connection there is, and in which generation it was made."""
        self._generation = 0
        self._connecting = 0
        self._waiting: deque[Turn] = deque()
        """Callers who wait for a connection, or for room to make one."""
        self._recovering: set[asyncio.Task[None]] = set()
        self._growing: set[asyncio.Task[None]] = set()
        self._all_gone = asyncio.Event()

    async def open(self) -> None:
        self._is_open = True
        try:
            connection = await self.take()
            if not self.behind_pooler and await self._settings_are_ignored(connection):
                self.behind_pooler = True
                self._drop(connection)
                connection = await self.take()
            self._give_back(connection)
        except BaseException:
            self._is_open = False
            for found in list(self._generations):
                self._drop(found)
            raise

    async def close(self) -> None:
        self._is_open = False
        # Each has begun after this, and so counts itself out.
        await asyncio.sleep(0)
        for growing in self._growing:
            growing.cancel()
        await asyncio.gather(*self._growing, return_exceptions=True)
        for waiting in self._waiting:
            if not waiting.future.done():
                waiting.future.set_result(None)
        idle, self._idle = self._idle, []
        await asyncio.gather(*(self._part(each.connection) for each in idle))
        if self._generations:
            # Let the callers of those in use have their answers.
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._all_gone.wait()
        for recovering in self._recovering:
            recovering.cancel()
        await asyncio.gather(*self._recovering, return_exceptions=True)
        for connection in list(self._generations):
            self._drop(connection)

    async def connect(self) -> driver.Connection:
        """A connection outside the pool."""
        return await self._connect(self._url, 0, COMMAND_TIMEOUT_S)

    async def connect_to_listen(self, command_timeout_s: float) -> driver.Connection:
        """One for hints, past any transaction-mode pooler if we know a way."""
        return await self._connect(self._listen_url, 0, command_timeout_s)

    def acquire(self) -> "Acquired":
        """A pooled connection, returned outside any transaction."""
        return Acquired(self)

    def release(self, connection: driver.Connection, error: BaseException | None) -> None:
        """A connection was used, with this error if any."""
        if error is None:
            self._give_back(connection)
        elif isinstance(error, TimeoutError):
            self._drop(connection)
            self.suspect()
        elif connection.is_closed():
            self._drop(connection)
        elif isinstance(error, asyncio.CancelledError) or connection.is_in_transaction():
            # Whatever is still under way on it ends without its caller.
            self._recover(connection)
        else:
            self._give_back(connection)

    def suspect(self) -> None:
        """A statement timed out. Idle connections go the same way, so none is used again."""
        idle, self._idle = self._idle, []
        for each in idle:
            self._drop(each.connection)
        self._refuse_late()
        if self.on_suspicion is not None:
            self.on_suspicion()

    def _refuse_late(self) -> None:
        """Those who have waited long enough hear of the silence without a try of their own."""
        now_s = time.monotonic()
        for turn in self._waiting:
            if turn.late_at_s <= now_s and not turn.future.done():
                turn.future.set_exception(TimeoutError())

    def distrust(self) -> None:
        """Replace every connection before its next use: one was found dead, others may be."""
        self._generation += 1
        idle, self._idle = self._idle, []
        for each in idle:
            self._drop(each.connection)

    @property
    def begin(self) -> str:
        """How a transaction starts."""
        if not self.behind_pooler:
            return _BEGIN
        settings = (f"set local {name} = {_literal(value)}" for name, value in _SETTINGS.items())
        return "; ".join((_BEGIN, *settings))

    # Taking ---------------------------------------------------------------

    async def take(self) -> driver.Connection:
        deadline_s: float | None = None
        while self._is_open:
            while self._idle:
                idle = self._idle.pop()
                if time.monotonic() - idle.since_s < IDLE_LIFETIME_S and _is_clean(idle.connection):
                    return idle.connection
                self._drop(idle.connection)
            grows = len(self._generations) + self._connecting < self.pool_max
            if grows:
                self._connecting += 1
                if not self._generations:
                    return await self._connect_first()
            if deadline_s is None:
                deadline_s = time.monotonic() + (patience_s(self._acquire_timeout_s) or 0.0)
            handed_over = await self._wait_for_turn(deadline_s - time.monotonic(), grows=grows)
            if handed_over is not None:
                return handed_over
        raise Unavailable("store", "it is not open")

    async def _wait_for_turn(self, timeout_s: float, *, grows: bool) -> driver.Connection | None:
        """A connection that was given back, or one made meanwhile if the pool `grows`.

        None when there may be room for another.
        """
        future: asyncio.Future[driver.Connection | None] = (
            asyncio.get_running_loop().create_future()
        )
        turn = Turn(future, time.monotonic() + (patience_s() or COMMAND_TIMEOUT_S))
        self._waiting.append(turn)
        if grows:
            _start(self._growing, self._grow(turn))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(future)
        except BaseException as error:
            if future.done() and future.exception() is None:
                # It came at the same moment: another caller gets it.
                connection = future.result()
                self._wake_next() if connection is None else self._give_back(connection)
            if len(self._generations) < self.pool_max or future.done():
                raise
            if isinstance(error, TimeoutError):
                raise ResourceExhausted("postgres connections", self.pool_max) from error
            raise
        finally:
            with suppress(ValueError):
                self._waiting.remove(turn)

    async def _connect_first(self) -> driver.Connection:
        """Open a new connection: none is idle."""
        try:
            return await self._connect_pooled()
        except BaseException:
            self._wake_next()
            raise

    async def _grow(self, turn: Turn) -> None:
        """Another connection, for the caller that waited longest; on failure, it gets the error."""
        wanted = False
        try:
            await asyncio.sleep(GROW_AFTER_S)
            wanted = bool(self._waiting)
        finally:
            if not wanted:
                self._connecting -= 1
        if not wanted:
            return
        try:
            self._give_back(await self._connect_pooled())
        except Exception as error:
            if turn in self._waiting and not turn.future.done():
                turn.future.set_exception(error)
            self._wake_next()

    async def _connect_pooled(self) -> driver.Connection:
        """One that the caller has counted as being made."""
        generation = self._generation
        try:
            cached = 0 if self.behind_pooler else self._statement_cache_size
            connection = await self._connect(self._url, cached, COMMAND_TIMEOUT_S)
        finally:
            self._connecting -= 1
        if not self._is_open:
            connection.terminate()
            raise Unavailable("store", "it is not open")
        self._generations[connection] = generation
        self._all_gone.clear()
        return connection

    async def _connect(
        self, url: str, statement_cache_size: int, command_timeout_s: float
    ) -> driver.Connection:
        settings = self._server_settings()
        while True:
            try:
                with _readable_url():
                    connection = await driver.connect(
                        url,
                        timeout=patience_s(CONNECT_TIMEOUT_S) or CONNECT_TIMEOUT_S,
                        command_timeout=command_timeout_s,
                        statement_cache_size=0 if self.behind_pooler else statement_cache_size,
                        max_cached_statement_lifetime=0,
                        max_cacheable_statement_size=0,
                        server_settings=settings,
                    )
            except driver.PostgresError as error:
                if not (settings and driver.setting_refused(error)):
                    raise
                # Only a pooler does that. The first to connect finds out, open or not.
                self.behind_pooler, settings = True, {}
            else:
                driver.give_up_early(connection)
                driver.know_arrays(connection)
                return connection

    # Giving back ----------------------------------------------------------

    def _give_back(self, connection: driver.Connection) -> None:
        trusted = self._generations.get(connection) == self._generation
        if not (self._is_open and trusted and _is_clean(connection)):
            self._drop(connection)
            return
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.future.done():
                turn.future.set_result(connection)
                return
        self._idle.append(IdleConnection(connection, time.monotonic()))

    def _drop(self, connection: driver.Connection) -> None:
        """End a connection without waiting for the server to agree."""
        with suppress(driver.InterfaceError):
            connection.terminate()
        if self._generations.pop(connection, None) is not None:
            self._wake_next()
        if not self._generations:
            self._all_gone.set()

    def _wake_next(self) -> None:
        """There may be room for another connection."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.future.done():
                turn.future.set_result(None)
                return

    def _recover(self, connection: driver.Connection) -> None:
        _start(self._recovering, self._clean_up(connection))

    async def _clean_up(self, connection: driver.Connection) -> None:
        """Wait until the driver has cancelled what was under way, and end its transaction."""
        try:
            # The driver waits for the cancellation outside any timeout of its own.
            async with asyncio.timeout(ROLLBACK_TIMEOUT_S):
                await connection.execute("rollback")
        except TimeoutError:
            self._drop(connection)
            self.suspect()
        except (*driver.DRIVER_ERRORS, asyncio.CancelledError):
            self._drop(connection)
        else:
            self._give_back(connection)

    async def _part(self, connection: driver.Connection) -> None:
        """End an idle connection politely, if the server listens."""
        with suppress(*driver.DRIVER_ERRORS):
            await connection.close(timeout=ROLLBACK_TIMEOUT_S)
        self._drop(connection)

    def _server_settings(self) -> dict[str, str]:
        return {} if self.behind_pooler else {**_SETTINGS, **_SESSION_SETTINGS}

    async def _settings_are_ignored(self, connection: driver.Connection) -> bool:
        """Whether session settings do not reach the server, which only a pooler explains.

        Asked in a way that needs nothing prepared.
        """
        try:
            await connection.execute(_PATH_IS_SET, timeout=patience_s(COMMAND_TIMEOUT_S))
        except driver.PostgresError as error:
            if not driver.divided_by_zero(error):
                raise
            return True
        return False


def _start(tasks: set[asyncio.Task[None]], work: Coroutine[object, object, None]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


@contextmanager
def _readable_url() -> Iterator[None]:
    """Refuse a URL the driver makes nothing of. What it says may repeat the password."""
    try:
        yield
    except driver.InterfaceError:
        raise
    except (ValueError, OverflowError):
        raise InvalidInput(
            "url",
            "must be postgresql://user:password@host:port/database, with"
            " / ? # [ ] @ : % in user and password percent-encoded",
        ) from None


def _named(url: str) -> tuple[str, str]:
    """The server, with its port, and the database on it."""
    try:
        parts = urlsplit(url)
        port = parts.port or os.environ.get("PGPORT") or DEFAULT_PORT
    except ValueError:
        return "the server", "postgres"
    server = f"{parts.hostname}:{port}" if parts.hostname else "the local server"
    return server, f"the database {parts.path.removeprefix('/')} at {server}"


def _literal(value: str) -> str:
    return value if value.startswith(SCHEMA) else f"'{value}'"


def _is_clean(connection: driver.Connection) -> bool:
    """Whether the next caller can use it as it is."""
    return not (connection.is_closed() or connection.is_in_transaction())
