"""What work costs: CPU of this process and of Postgres apart, and bytes of WAL.

These figures hold on a noisy machine, where rates do not: they count the work, not the time
it took. Nothing here knows FlowFabric, so that other libraries are measured by the same rule.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import asyncpg

TICK_US = 1_000_000 / os.sysconf("SC_CLK_TCK")


@dataclass
class Cost:
    """Of so many jobs together."""

    jobs: int
    python_us: float = 0.0
    postgres_us: float = 0.0
    wal_bytes: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.jobs / self.seconds

    def each(self, total: float) -> float:
        return total / self.jobs

    def __add__(self, other: "Cost") -> "Cost":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Cost(*(mine + theirs for mine, theirs in pairs))


class Meter:
    """Reads what this process and all processes of one server, if any, have used so far."""

    def __init__(
        self, connection: "asyncpg.Connection[asyncpg.Record] | None" = None, postmaster: int = 0
    ) -> None:
        self._connection = connection
        self._postmaster = postmaster

    @classmethod
    @asynccontextmanager
    async def opened(cls, url: str) -> AsyncIterator["Meter"]:
        """Of the Postgres at `url`, which must run on this machine; a SQLite file has no server."""
        if url.startswith("sqlite:"):
            yield cls()
            return
        connection = await asyncpg.connect(url)
        try:
            yield cls(
                connection, _parent(int(await connection.fetchval("select pg_backend_pid()")))
            )
        finally:
            await connection.close()

    @asynccontextmanager
    async def measuring(self, jobs: int) -> AsyncIterator[Cost]:
        """The cost of the block, filled in when it ends."""
        cost = Cost(jobs)
        before = await self._wal_bytes()
        postgres_us, python_ns = self._postgres_us(), time.process_time_ns()
        started_s = time.perf_counter()
        yield cost
        cost.seconds = time.perf_counter() - started_s
        cost.python_us = (time.process_time_ns() - python_ns) / 1_000
        cost.postgres_us = self._postgres_us() - postgres_us
        cost.wal_bytes = await self._wal_bytes() - before

    async def _wal_bytes(self) -> int:
        if self._connection is None:
            return 0
        return int(
            await self._connection.fetchval(
                "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')"
            )
        )

    def _postgres_us(self) -> float:
        """Of the server and its backends, including those that have ended."""
        if self._connection is None:
            return 0
        ticks = sum(_ticks(self._postmaster, reaped=True))
        for process in Path("/proc").glob("[0-9]*"):
            pid = int(process.name)
            try:
                if _parent(pid) == self._postmaster:
                    ticks += sum(_ticks(pid, reaped=False))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return ticks * TICK_US


async def busy_share(seconds: float = 1.0) -> float:
    """How busy the machine is while we do nothing: 1 means that all its cores are."""

    def ticks() -> tuple[int, int]:
        spent = [int(each) for each in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        # Idle, and idle while waiting for a disk.
        return sum(spent), spent[3] + spent[4]

    total, idle = ticks()
    await asyncio.sleep(seconds)
    total_after, idle_after = ticks()
    return 1 - (idle_after - idle) / (total_after - total)


def process_ticks(pid: int) -> int:
    """User and system time of one process."""
    return sum(_ticks(pid, reaped=False))


def _stat(pid: int) -> list[str]:
    """Fields of `/proc/<pid>/stat` from the third on; the second may contain spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _ticks(pid: int, *, reaped: bool) -> list[int]:
    """User and system time, with that of children it has waited for if `reaped`."""
    return [int(value) for value in _stat(pid)[11 : 15 if reaped else 13]]
