"""Stores that lose the process around the commit of a transaction."""

from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from flowfabric.store.base import Body, Clock, Parameter, Row, UnlockedBody
from flowfabric.store.postgres.store import PostgresStore
from flowfabric.store.sqlite.store import SqliteStore

T = TypeVar("T")


class Crash(Exception):
    """The process is gone."""


class Crashes:
    """Loses the process around the commit of a transaction to come."""

    def __init__(self) -> None:
        self.next: tuple[int, bool] | None = None
        """After how many transactions, and whether that one still commits."""
        self.happened = 0

    async def around(self, once: Callable[[], Awaitable[T]]) -> T:
        if self.next is None:
            return await once()
        countdown, commits = self.next
        if countdown > 0:
            self.next = (countdown - 1, commits)
            return await once()
        self.next = None
        self.happened += 1
        if commits:
            await once()
        raise Crash

    async def around_try(self, once: Callable[[], Awaitable[T | None]]) -> T | None:
        """The same around what may find that it has to be done under lock."""
        due, self.next = self.next, None
        if due is None or due == (0, False):
            self.next = due
            return await self.around(once)
        answer = await once()
        self.next = due
        if answer is None:
            return None

        async def nothing_more() -> T | None:
            return answer

        return await self.around(nothing_more)


class CrashingSqlite(SqliteStore):
    def __init__(self, crashes: Crashes, clock: Clock | None = None) -> None:
        super().__init__(":memory:", clock=clock)
        self.crashes = crashes

    async def transact(self, body: Body[T], *, lock_wait_ms: int | None = None) -> T:
        return await self.crashes.around(lambda: super(CrashingSqlite, self).transact(body))

    async def try_unlocked(self, body: UnlockedBody[T]) -> T | None:
        return await self.crashes.around_try(lambda: super(CrashingSqlite, self).try_unlocked(body))

    async def execute_alone(
        self, name: str, topics: Collection[str] = (), /, **parameters: Parameter
    ) -> list[Row]:
        async def once() -> list[Row]:
            alone = super(CrashingSqlite, self).execute_alone
            return list(await alone(name, topics, **parameters))

        return await self.crashes.around(once)


class CrashingPostgres(PostgresStore):
    def __init__(self, url: str, crashes: Crashes, clock: Clock | None = None) -> None:
        super().__init__(url, clock=clock)
        self.crashes = crashes

    async def transact(self, body: Body[T], *, lock_wait_ms: int | None = None) -> T:
        return await self.crashes.around(lambda: super(CrashingPostgres, self).transact(body))

    async def try_unlocked(self, body: UnlockedBody[T]) -> T | None:
        return await self.crashes.around_try(
            lambda: super(CrashingPostgres, self).try_unlocked(body)
        )

    async def execute_alone(
        self, name: str, topics: Collection[str] = (), /, **parameters: Parameter
    ) -> list[Row]:
        async def once() -> list[Row]:
            alone = super(CrashingPostgres, self).execute_alone
            return list(await alone(name, topics, **parameters))

        return await self.crashes.around(once)
