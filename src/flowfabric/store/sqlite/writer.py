"""The one thread that writes.

Units of work queue up for it. It runs as many as are waiting, each inside a
savepoint, and commits them together: one disk flush serves them all. A unit that
fails is rolled back to its savepoint and the others never notice. Nobody hears
of success before the commit.
"""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from flowfabric.store.base import Body, Clock
from flowfabric.store.drive import drive
from flowfabric.store.sqlite.failures import translate
from flowfabric.store.sqlite.transaction import SqliteTransaction

T = TypeVar("T")

GROUP_MAX: Final = 64
"""How many units of work are committed together at most."""


class Work(Protocol):
    """Something for the writer to do. `settle` is called on the event loop, after the commit."""

    failure: Exception | None
    hinted: set[str]

    @property
    def abandoned(self) -> bool: ...

    def run(self, connection: sqlite3.Connection, clock: Clock) -> None: ...

    def settle(self) -> None: ...


class Unit(Generic[T]):
    """A unit of work and the future of whoever waits for it."""

    def __init__(self, body: Body[T], future: "asyncio.Future[T]") -> None:
        self.failure: Exception | None = None
        self.hinted: set[str] = set()
        self._body = body
        self._future = future
        self._result: list[T] = []

    @property
    def abandoned(self) -> bool:
        return self._future.cancelled()

    def run(self, connection: sqlite3.Connection, clock: Clock) -> None:
        transaction = SqliteTransaction(connection, clock)
        self._result.append(drive(self._body(transaction)))
        self.hinted = transaction.hinted

    def settle(self) -> None:
        if self._future.done():
            return
        if self.failure is not None:
            self._future.set_exception(translate(self.failure))
        else:
            self._future.set_result(self._result[0])


class Probe:
    """Asks whether another connection has written to the file. Needs no transaction."""

    def __init__(self, future: "asyncio.Future[int]") -> None:
        self.failure: Exception | None = None
        self.hinted: set[str] = set()
        self._future = future
        self._version = 0

    @property
    def abandoned(self) -> bool:
        return self._future.cancelled()

    def run(self, connection: sqlite3.Connection, clock: Clock) -> None:
        self._version = connection.execute("pragma data_version").fetchone()[0]

    def settle(self) -> None:
        if not self._future.done():
            self._future.set_result(self._version)


class Writer:
    """Runs work on its own thread and connection."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        publish: Callable[[set[str]], None],
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._loop = loop
        self._publish = publish
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="flowfabric-sqlite", daemon=True)
        self._thread.start()

    async def transact(self, body: Body[T]) -> T:
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(Unit(body, future))
        return await future

    async def data_version(self) -> int:
        """A number that changes when somebody else commits, and not when we do."""
        future: asyncio.Future[int] = self._loop.create_future()
        self._queue.put(Probe(future))
        return await future

    def close(self) -> None:
        """Finish what is queued, then end the thread. Blocks."""
        self._queue.put(None)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        more = True
        while more and (work := self._queue.get()) is not None:
            if isinstance(work, Probe):
                work.run(self._connection, self._clock)
                self._loop.call_soon_threadsafe(work.settle)
            else:
                more = self._run_group(work)

    def _run_group(self, first: Work) -> bool:
        """Run and commit `first` and what waits behind it; tell whether to go on."""
        group = [first]
        more = True
        try:
            self._connection.execute("begin immediate")
            self._run_one(first)
            while more and len(group) < GROUP_MAX and not self._queue.empty():
                work = self._queue.get()
                if work is None:
                    more = False
                else:
                    group.append(work)
                    self._run_one(work)
            self._connection.execute("commit")
        except sqlite3.Error as error:
            self._give_up(group, error)
        self._loop.call_soon_threadsafe(self._settle, group)
        return more

    def _run_one(self, work: Work) -> None:
        if work.abandoned:
            return
        self._connection.execute("savepoint unit")
        try:
            work.run(self._connection, self._clock)
        except Exception as error:
            work.failure = error
            # Some failures, such as a full disk, end the whole transaction.
            if not self._connection.in_transaction:
                raise sqlite3.OperationalError("the transaction was rolled back") from error
            self._connection.execute("rollback to unit")
        self._connection.execute("release unit")

    def _give_up(self, group: list[Work], error: sqlite3.Error) -> None:
        """Nothing of the group was written; all of it failed, unless it had already."""
        if self._connection.in_transaction:
            self._connection.execute("rollback")
        for work in group:
            work.failure = work.failure or error

    def _settle(self, group: list[Work]) -> None:
        hinted: set[str] = set()
        for work in group:
            work.settle()
            if work.failure is None:
                hinted |= work.hinted
        if hinted:
            self._publish(hinted)
