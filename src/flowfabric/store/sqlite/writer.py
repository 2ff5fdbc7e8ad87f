"""The thread that does all writing.

Units of work queue up for a thread. It runs as many as are waiting, all but the first
inside a savepoint, and commits them together: one disk flush serves them all. A unit that
fails is rolled back to where it began and the others never notice. No caller hears
of success before the commit.
"""

import asyncio
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

from flowfabric.errors import DatabaseGone, FileLocked
from flowfabric.outages import OUTAGES, OutageWatch
from flowfabric.store.base import Clock, Row, drive
from flowfabric.store.sqlite.connection import (
    FileConnection,
    FileIdentity,
    data_version,
    translate,
)
from flowfabric.store.sqlite.transaction import SqliteTransaction

T = TypeVar("T")

SqliteBody = Callable[[SqliteTransaction], Awaitable[T]]
UnitRows = Sequence[Row]

GROUP_MAX: Final = 64
"""How many units of work are committed together at most."""
LOCKED_S: Final = 3.0
"""How long another process may keep the file locked before that is logged."""
AT_ONCE_S: Final = 0.001
"""How long a transaction takes to begin at most if no other process keeps the file locked."""
MUCH_TO_READ: Final = 10
"""How many rows are worth waking the event loop for before they are committed."""
LOCKED: Final = "another process keeps the file locked"


class WriterJob(Protocol):
    """Something for the writer to do.

    `settle` is called on the event loop, after the commit; `prepare` may be called there before.
    """

    failure: BaseException | None
    hinted: set[str]
    wrote: bool
    """Whether its commit reached the file; one that changed nothing does not."""

    @property
    def abandoned(self) -> bool: ...

    @property
    def has_much_to_read(self) -> bool: ...

    def run(self, connection: sqlite3.Connection, clock: Clock) -> None: ...

    def prepare(self) -> None: ...

    def settle(self) -> None: ...


class Job(Generic[T]):
    """Something to do, and the future of the caller who waits for its result."""

    def __init__(self, future: "asyncio.Future[T]") -> None:
        self.failure: BaseException | None = None
        self.hinted: set[str] = set()
        self.wrote = True
        self._future = future
        self._result: list[T] = []

    @property
    def abandoned(self) -> bool:
        return self._future.cancelled()

    @property
    def has_much_to_read(self) -> bool:
        return False

    def prepare(self) -> None:
        """Make the result of what was found. Nobody is told of it before `settle`."""

    def settle(self) -> None:
        if self._future.done():
            return
        if self.failure is not None:
            self._future.set_exception(translate(self.failure))
        else:
            self._future.set_result(self._result[0])


class Unit(Job[T]):
    """A unit of work."""

    def __init__(self, body: SqliteBody[T], future: "asyncio.Future[T]") -> None:
        super().__init__(future)
        self._body = body

    def run(self, connection: sqlite3.Connection, clock: Clock) -> None:
        transaction = SqliteTransaction(connection, clock)
        self._result.append(drive(self._body(transaction)))
        self.hinted = transaction.hinted


class RowsUnit(Job[T]):
    """A unit of work that finds rows; `read` makes the result of them, on the event loop."""

    def __init__(
        self, body: SqliteBody[UnitRows], read: Callable[[UnitRows], T], future: "asyncio.Future[T]"
    ) -> None:
        super().__init__(future)
        self._body = body
        self._read = read
        self._found: UnitRows | None = None

    @property
    def has_much_to_read(self) -> bool:
        return self._found is not None and len(self._found) >= MUCH_TO_READ

    def run(self, connection: sqlite3.Connection, clock: Clock) -> None:
        transaction = SqliteTransaction(connection, clock)
        self._found = drive(self._body(transaction))
        self.hinted = transaction.hinted

    def prepare(self) -> None:
        if self._found is None or self.abandoned:
            return
        found, self._found = self._found, None
        try:
            self._result.append(self._read(found))
        except Exception as error:
            self.failure = error

    def settle(self) -> None:
        if self.failure is None:
            self.prepare()
        super().settle()


class Probe(Job[int]):
    """Asks whether another connection has written to the file. Needs no transaction."""

    def run(self, connection: sqlite3.Connection, clock: Clock) -> None:
        try:
            self._result.append(data_version(connection))
        except sqlite3.Error as error:
            self.failure = error


class News:
    """Calls for the event loop to make, told together; the writer's thread alone adds them.

    Once it is told, the event loop needs Python for a while, for which this thread would have to
    wait between any two statements. So it is told as a long step of SQLite begins, or when there
    is nothing else to do.
    """

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._calls: deque[Callable[[], None]] = deque()

    def add(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def tell(self) -> None:
        if self._calls:
            assert self.loop is not None, "only a thread has anything to tell"
            self.loop.call_soon_threadsafe(self.make)

    def make(self) -> None:
        """Make the calls, on the event loop."""
        while self._calls:
            self._calls.popleft()()


class Committer:
    """Runs work in transactions on the one connection that writes."""

    def __init__(
        self,
        connection: FileConnection,
        clock: Clock,
        identity: FileIdentity,
        *,
        on_disk: bool,
    ) -> None:
        self.connection = connection
        self.clock = clock
        self._identity = identity
        self._on_disk = on_disk
        self._begin_waits = False
        self.news = News()
        connection.before_step = self.news.tell
        self.waiting_since_s: float | None = None
        """Since when another process keeps the file locked, by the monotonic clock, if one does."""

    def run(
        self,
        first: WriterJob,
        others: Iterable[WriterJob] = (),
        before_commit: Callable[[list[WriterJob]], None] | None = None,
    ) -> list[WriterJob]:
        """Run and commit together `first` and what `others` yields; return all, done or failed.

        Much to read ends a group: what waits behind it is run while the event loop reads it.
        """
        group, waiting = [first], iter(others)
        try:
            self._begin()
            self._run_first(first)
            self.news.tell()
            while not group[-1].has_much_to_read and (work := next(waiting, None)) is not None:
                group.append(work)
                self._run_next(work)
            self._commit(group, before_commit)
        except (sqlite3.Error, DatabaseGone) as error:
            self._give_up(group, error)
        return group

    def _begin(self) -> None:
        if self._begin_waits:
            # Other processes write as well, and may do so for long: nobody has to wait for them.
            self.news.tell()
        self.waiting_since_s = since_s = time.monotonic()
        try:
            self.connection.execute("begin immediate")
        finally:
            self.waiting_since_s = None
            self._begin_waits = time.monotonic() - since_s > AT_ONCE_S

    def _commit(
        self, group: list[WriterJob], before_commit: Callable[[list[WriterJob]], None] | None
    ) -> None:
        """Refused means not stored: a file that is gone is noticed before it is written to."""
        before = self._identity.check()
        if before_commit is not None:
            before_commit(group)
        self.connection.execute("commit")
        after = self._identity.check()
        wrote = not self._on_disk or after != before
        for work in group:
            work.wrote = wrote

    def _run_first(self, work: WriterJob) -> None:
        """The first of a group has nothing before it to keep.

        Within a savepoint SQLite keeps a copy of each page it changes, and writes out those
        that became empty.
        """
        if not work.abandoned and not self._succeeds(work):
            self.connection.execute("rollback")
            self._begin()

    def _run_next(self, work: WriterJob) -> None:
        if work.abandoned:
            return
        self.connection.execute("savepoint unit")
        if not self._succeeds(work):
            self.connection.execute("rollback to unit")
        self.connection.execute("release unit")

    def _succeeds(self, work: WriterJob) -> bool:
        try:
            work.run(self.connection, self.clock)
        except BaseException as error:
            work.failure = error
            # Some failures, such as a full disk, end the whole transaction.
            if not self.connection.in_transaction:
                raise sqlite3.OperationalError("the transaction was rolled back") from error
            return False
        return True

    def _give_up(self, group: list[WriterJob], error: Exception) -> None:
        """Nothing of the group was written, or nowhere; all of it failed, unless it had already."""
        if self.connection.in_transaction:
            self.connection.execute("rollback")
        for work in group:
            work.failure = work.failure or error


class Writer:
    """Hands work to the committer: on a thread for a file, at once for memory.

    Memory has no disk to wait for, so a second thread would only cost time.
    """

    def __init__(
        self,
        committer: Committer,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[set[str]], None],
        *,
        named: str,
        threaded: bool,
    ) -> None:
        """`named` is what people know the database by."""
        self._named = named
        self._committer = committer
        self._loop = loop
        self._publish = publish
        self._queue: queue.SimpleQueue[WriterJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._look: asyncio.TimerHandle | None = None
        self._is_locked = False
        """Whether it was logged that another process keeps the file locked."""
        self._news = committer.news
        self._news.loop = loop
        if threaded:
            self._thread = threading.Thread(target=self._run, name="flowfabric-sqlite", daemon=True)
            self._thread.start()

    async def transact(self, body: SqliteBody[T]) -> T:
        future: asyncio.Future[T] = self._loop.create_future()
        return await self._answer(Unit(body, future), future)

    async def transact_and_read(
        self, body: SqliteBody[UnitRows], read: Callable[[UnitRows], T]
    ) -> T:
        """What `read` makes of what `body` finds, which it may do while the disk is flushed."""
        future: asyncio.Future[T] = self._loop.create_future()
        return await self._answer(RowsUnit(body, read, future), future)

    async def data_version(self) -> int:
        """A number that changes when another process commits, and not when we do."""
        future: asyncio.Future[int] = self._loop.create_future()
        self._hand_over(Probe(future))
        return await future

    def close(self) -> None:
        """Finish what is queued, then end the thread. Blocks."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        self._committer.connection.close()

    async def _answer(self, unit: WriterJob, future: "asyncio.Future[T]") -> T:
        with OutageWatch(self._named, writing=True) as watch:
            self._hand_over(unit)
            result = await future
            watch.wrote = unit.wrote
        return result

    def _hand_over(self, work: WriterJob) -> None:
        if self._thread is not None:
            self._queue.put(work)
            if self._look is None:
                self._look = self._loop.call_later(LOCKED_S, self._look_for_lock)
        else:
            self._settle(self._committer.run(work))

    def _look_for_lock(self) -> None:
        """Log once that the thread waits for another process."""
        self._look = None
        since_s = self._committer.waiting_since_s
        if since_s is None:
            return
        left_s = since_s + LOCKED_S - time.monotonic()
        if left_s <= 0:
            self._news.make()
            self._is_locked = True
            OUTAGES.failed(self._named, FileLocked(LOCKED), since_s, writing=True)
        self._look = self._loop.call_later(left_s if left_s > 0 else LOCKED_S, self._look_for_lock)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            if isinstance(work, Probe):
                work.run(self._committer.connection, self._committer.clock)
                done: list[WriterJob] = [work]
            else:
                done = self._committer.run(work, self._queued(), self._prepare_early)
            self._news.add(partial(self._settle, done))
            if self._queue.empty():
                self._news.tell()
        self._news.tell()

    def _prepare_early(self, group: list[WriterJob]) -> None:
        """Have the event loop read rows while this thread writes them and waits for the disk."""
        for work in group:
            if work.failure is None and work.has_much_to_read:
                self._news.add(work.prepare)
        self._news.tell()

    def _queued(self) -> Iterator[WriterJob]:
        """What has queued up meanwhile, up to a limit."""
        for _ in range(GROUP_MAX - 1):
            try:
                work = self._queue.get_nowait()
            except queue.Empty:
                return
            if work is None:
                self._queue.put(None)
                return
            yield work

    def _settle(self, group: list[WriterJob]) -> None:
        hinted: set[str] = set()
        for work in group:
            work.settle()
            if work.failure is None:
                hinted |= work.hinted
                # A probe is answered whether or not others can write.
                if self._is_locked and not isinstance(work, Probe):
                    self._is_locked = False
                    OUTAGES.answered(self._named, time.monotonic())
        if hinted:
            self._publish(hinted)
