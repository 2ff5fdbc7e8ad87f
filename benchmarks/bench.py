"""What every section is given: a server, fresh databases, PgQueuer, and where goals are noted."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from benchmarks.peer import Peer
from benchmarks.report import Goal
from flowfabric import migrate
from tests.postgres import create_database, drop_database

WAL_FILES = 60
"""What `min_wal_size` keeps, less a few."""


@dataclass(frozen=True)
class Scale:
    """How many rows the grown databases hold."""

    ended: int
    others: int


async def wear_in(server: str) -> None:
    """Give the server files of WAL to recycle, as one in use has them.

    A new one fills each with zeroes first, at the expense of the next commit: some
    three microseconds per job that no production server spends.
    """
    connection = await asyncpg.connect(server)
    try:
        for _ in range(WAL_FILES):
            await connection.execute("select pg_logical_emit_message(false, 'bench', '')")
            await connection.execute("select pg_switch_wal()")
    finally:
        await connection.close()
    await checkpoint(server)


async def checkpoint(server: str) -> None:
    """Recycle what WAL there is."""
    connection = await asyncpg.connect(server)
    try:
        await connection.execute("checkpoint")
    finally:
        await connection.close()


@dataclass(frozen=True)
class Bench:
    """One run."""

    server: str
    directory: Path
    peer: Peer | None
    scale: Scale
    goals: list[Goal]

    @asynccontextmanager
    async def database(self, *, migrated: bool = True) -> AsyncIterator[str]:
        """The URL of a fresh database, with our schema or empty."""
        url = await create_database(self.server)
        try:
            if migrated:
                await migrate(url)
            await checkpoint(self.server)
            yield url
        finally:
            await drop_database(self.server, url)

    def file(self, name: str) -> Path:
        """Where a SQLite file of a section may lie."""
        return self.directory / f"{name}.db"

    def at_most(self, limit: float, measured: float, what: str) -> None:
        self.goals.append(Goal(what, measured, limit, measured <= limit, "at most"))

    def at_least(self, limit: float, measured: float, what: str) -> None:
        self.goals.append(Goal(what, measured, limit, measured >= limit, "at least"))
