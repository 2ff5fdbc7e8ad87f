"""What every section is given: a server, fresh databases, PgQueuer, and where goals are noted."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peer import Peer
from benchmarks.report import Goal
from flowfabric import migrate
from tests.postgres import create_database, drop_database


@dataclass(frozen=True)
class Scale:
    """How many rows the grown databases hold."""

    ended: int
    others: int


@dataclass(frozen=True)
class Bench:
    """One run."""

    server: str
    directory: Path
    peer: Peer | None
    scale: Scale
    goals: list[Goal] = field(default_factory=list)

    @asynccontextmanager
    async def database(self, *, migrated: bool = True) -> AsyncIterator[str]:
        """The URL of a fresh database, with our schema or empty."""
        url = await create_database(self.server)
        try:
            if migrated:
                await migrate(url)
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
