"""The floor: what the database itself costs, with one minimal table and the same durability.

One table with an id, a state and a payload; claim marks rows, complete marks them
again. No lease, no history, no events: nothing a durable engine could do without
would be cheaper than this. Everything we measure is shown beside it.
"""

import sqlite3
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Protocol

import asyncpg

SCHEMA = """
create table job (
    id bigint primary key, state text not null, worker text, payload {blob} not null,
    result {blob}
)"""
READY = "create index job_ready on job (id) where state = 'ready'"
PAYLOAD = b"x" * 100
SETTINGS = {"enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}
"""Without these, a plan made while the table is small scans it when it has grown."""


class Floor(Protocol):
    """Each does so many in batches and returns the seconds it took."""

    async def create(self, count: int, batch: int) -> float: ...

    async def claim_and_complete(self, count: int, batch: int) -> float: ...


async def one_at_a_time_ms(floor: Floor, count: int) -> list[float]:
    """How long each job takes to be claimed and completed alone."""
    await floor.create(count, count)
    return [await floor.claim_and_complete(1, 1) * 1_000 for _ in range(count)]


class PostgresFloor:
    def __init__(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        self._connection = connection
        self._last = 0

    @classmethod
    @asynccontextmanager
    async def opened(cls, url: str) -> AsyncIterator["PostgresFloor"]:
        async with cls.joined(url) as floor:
            await floor._connection.execute(SCHEMA.format(blob="bytea"))
            await floor._connection.execute(READY)
            yield floor
            await floor._connection.execute("drop table job")

    @classmethod
    @asynccontextmanager
    async def joined(cls, url: str) -> AsyncIterator["PostgresFloor"]:
        """The floor that another process has opened, to drain it together."""
        connection = await asyncpg.connect(url, server_settings=SETTINGS)
        try:
            yield cls(connection)
        finally:
            await connection.close()

    async def create(self, count: int, batch: int) -> float:
        started = time.perf_counter()
        for _ in range(count // batch):
            ids = list(range(self._last, self._last + batch))
            self._last += batch
            await self._connection.execute(
                "insert into job (id, state, payload)"
                " select id, 'ready', payload from unnest($1::bigint[], $2::bytea[])"
                " as j (id, payload)",
                ids,
                [PAYLOAD] * batch,
            )
        return time.perf_counter() - started

    async def claim_and_complete(self, count: int, batch: int) -> float:
        started = time.perf_counter()
        for _ in range(count // batch):
            await self.turn(batch)
        return time.perf_counter() - started

    async def turn(self, batch: int) -> int:
        """Claim and complete one batch; return how many jobs it had."""
        rows = await self._connection.fetch(
            "with best as materialized (select id from job where state = 'ready'"
            " order by id limit $1 for update skip locked)"
            " update job set state = 'running', worker = 'w' from best"
            " where job.id = best.id returning job.id, job.payload",
            batch,
        )
        await self._connection.execute(
            "update job set state = 'done', result = j.result"
            " from unnest($1::bigint[], $2::bytea[]) as j (id, result) where job.id = j.id",
            [row["id"] for row in rows],
            [b"ok"] * len(rows),
        )
        return len(rows)


class SqliteFloor:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._last = 0

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator["SqliteFloor"]:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = full")
            connection.execute(SCHEMA.format(blob="blob"))
            connection.execute(READY)
            yield cls(connection)

    async def create(self, count: int, batch: int) -> float:
        started = time.perf_counter()
        for _ in range(count // batch):
            ids = range(self._last, self._last + batch)
            self._last += batch
            self._connection.execute("begin immediate")
            self._connection.executemany(
                "insert into job (id, state, payload) values (?, 'ready', ?)",
                [(each, PAYLOAD) for each in ids],
            )
            self._connection.execute("commit")
        return time.perf_counter() - started

    async def claim_and_complete(self, count: int, batch: int) -> float:
        started = time.perf_counter()
        for _ in range(count // batch):
            self._connection.execute("begin immediate")
            claimed = self._claim(batch)
            self._connection.execute("commit")
            self._connection.execute("begin immediate")
            self._complete(claimed)
            self._connection.execute("commit")
        return time.perf_counter() - started

    async def claim_while_completing(self, count: int, batch: int) -> float:
        """The same with half the commits: each completes one batch and claims the next."""
        started = time.perf_counter()
        claimed: list[tuple[int, bytes]] = []
        for _ in range(count // batch):
            self._connection.execute("begin immediate")
            self._complete(claimed)
            claimed = self._claim(batch)
            self._connection.execute("commit")
        self._connection.execute("begin immediate")
        self._complete(claimed)
        self._connection.execute("commit")
        return time.perf_counter() - started

    def _claim(self, batch: int) -> list[tuple[int, bytes]]:
        return self._connection.execute(
            "update job set state = 'running', worker = 'w' where id in ("
            " select id from job where state = 'ready' order by id limit ?)"
            " returning id, payload",
            (batch,),
        ).fetchall()

    def _complete(self, claimed: Iterable[tuple[int, bytes]]) -> None:
        self._connection.executemany(
            "update job set state = 'done', result = ? where id = ?",
            [(b"ok", row[0]) for row in claimed],
        )
