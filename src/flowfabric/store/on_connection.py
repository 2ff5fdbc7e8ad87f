"""A store that works inside the open transaction of somebody else's connection.

Whatever is asked of it becomes part of that transaction, reads included: they see
what it has written. Nothing is committed here, and nothing is tried twice.
"""

from collections.abc import Collection, Sequence
from typing import TypeVar

from flowfabric.store.base import (
    Body,
    EventPage,
    HintListener,
    Parameter,
    ReadBody,
    Row,
    Store,
    Transaction,
    UnlockedBody,
)

T = TypeVar("T")


class OnConnection:
    """`sync` for connections that are not async: units then run on the calling thread."""

    def __init__(self, store: Store, connection: object, *, sync: bool) -> None:
        self._store = store
        self._connection = connection
        self._sync = sync
        self.label = store.label
        self.writes_beside = False
        self.backend_tag = store.backend_tag

    async def transact(self, body: Body[T], *, lock_wait_ms: int | None = None) -> T:
        if self._sync:
            return self._store.transact_on_sync(self._connection, body, lock_wait_ms=lock_wait_ms)
        return await self._store.transact_on(self._connection, body, lock_wait_ms=lock_wait_ms)

    async def try_unlocked(self, body: UnlockedBody[T]) -> T | None:
        return None

    async def read(self, body: ReadBody[T]) -> T:
        return await self.transact(body)

    async def execute_alone(
        self, name: str, topics: Collection[str] = (), /, **parameters: Parameter
    ) -> Sequence[Row]:
        async def run(tx: Transaction) -> Sequence[Row]:
            for topic in topics:
                tx.hint(topic)
            return await tx.select(name, **parameters)

        return await self.transact(run)

    # The rest has nothing to do with the transaction.

    async def open(self) -> None:
        """It is open as long as the connection is."""

    async def close(self) -> None:
        """The connection is not ours."""

    async def migrate(self) -> Sequence[str]:
        return await self._store.migrate()

    async def ping(self) -> None:
        await self._store.ping()

    def transact_apart(self, body: Body[T]) -> T:
        return self._store.transact_apart(body)

    async def transact_on(
        self, connection: object, body: Body[T], *, lock_wait_ms: int | None = None
    ) -> T:
        return await self._store.transact_on(connection, body, lock_wait_ms=lock_wait_ms)

    def transact_on_sync(
        self, connection: object, body: Body[T], *, lock_wait_ms: int | None = None
    ) -> T:
        return self._store.transact_on_sync(connection, body, lock_wait_ms=lock_wait_ms)

    async def read_events(
        self, *, after: int, limit: int, category: str | None = None, wait_s: float = 0.0
    ) -> EventPage:
        return await self._store.read_events(
            after=after, limit=limit, category=category, wait_s=wait_s
        )

    async def end_of_events(self) -> int:
        return await self._store.end_of_events()

    def hint(self, topic: str) -> None:
        self._store.hint(topic)

    def hints(self, topics: Sequence[str]) -> HintListener:
        return self._store.hints(topics)

    @property
    def hints_are_live(self) -> bool:
        return self._store.hints_are_live
