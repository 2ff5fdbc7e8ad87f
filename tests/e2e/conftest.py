"""Real processes on real databases."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.e2e.programs import Program, start

PATIENCE_S = 60


class Process:
    """A worker process and what it says."""

    def __init__(self, process: Program) -> None:
        self._process = process
        self._said = process.stdout

    async def says(self, text: str, *, more: bool = False) -> None:
        """Wait until it says so, or with `more` begins to."""
        async with asyncio.timeout(PATIENCE_S):
            while line := (await self._said.readline()).decode().strip():
                if line == text or (more and line.startswith(text)):
                    return
        raise AssertionError(f"it ended without saying {text!r}")

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            await self._said.read()
            return await self._process.wait()


@asynccontextmanager
async def python(module: str, *arguments: str, **variables: str) -> AsyncIterator[Program]:
    """A module run by a process of its own, which is killed unless it ends in time."""
    program = await start(module, *arguments, variables=variables)
    try:
        yield program
    finally:
        program.kill()
        await program.communicate()


@asynccontextmanager
async def worker_process(url: str, log: Path, lease_ttl: str = "2s") -> AsyncIterator[Process]:
    async with python("tests.e2e.program", url, str(log), LEASE_TTL=lease_ttl) as process:
        yield Process(process)


def steps_run(log: Path) -> Counter[str]:
    return Counter(log.read_text().splitlines())


@pytest.fixture(params=["sqlite-file", "postgres"])
def store_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    """A database of each kind that several connections can share."""
    return new_database(request.param)
