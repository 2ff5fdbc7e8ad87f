"""Another client of the database, who holds locks and watches who waits for them."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

import asyncpg

T = TypeVar("T")

WAITING = """
select count(*) from pg_stat_activity
 where datname = current_database() and wait_event_type = 'Lock'
"""
DEADLOCKS = "select deadlocks from pg_stat_database where datname = current_database()"


class Rival:
    """Statements run in the schema of the store, outside any transaction of the engine."""

    def __init__(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        self.connection = connection

    async def execute(self, statement: str) -> None:
        await self.connection.execute(statement)

    async def value(self, query: str) -> object:
        found: object = await self.connection.fetchval(query)
        return found

    async def count(self, query: str) -> int:
        return int(str(await self.value(query)))

    @asynccontextmanager
    async def holding(self, statement: str) -> AsyncIterator[None]:
        """Hold the locks that `statement` takes; what is done inside commits with them."""
        async with self.connection.transaction():
            await self.connection.execute(statement)
            yield

    async def until_waiting(self, count: int) -> None:
        """Return when so many others wait for a lock. The test's timeout bounds it."""
        while await self.count(WAITING) < count:
            # Within a transaction the view shows what it showed first, unless told otherwise.
            await self.execute("select pg_stat_clear_snapshot()")

    async def queued(self, *calls: Coroutine[object, object, T]) -> "list[asyncio.Task[T]]":
        """Start the calls one after the other, each when the one before waits for a lock."""
        tasks: list[asyncio.Task[T]] = []
        for call in calls:
            tasks.append(asyncio.create_task(call))
            await self.until_waiting(len(tasks))
        return tasks


@asynccontextmanager
async def connected(database: str) -> AsyncIterator[Rival]:
    connection = await asyncpg.connect(database, server_settings={"search_path": "flowfabric"})
    try:
        yield Rival(connection)
    finally:
        await connection.close()
