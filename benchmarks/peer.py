"""PgQueuer beside us: an environment for it, made on demand, and its program in a process.

The environment lies in the user's cache, not in ours, so that neither sees the other's packages.
"""

import asyncio
import os
import sys
import venv
from pathlib import Path

import msgspec

from benchmarks.meter import Cost
from benchmarks.report import console

REQUIREMENTS = ("pgqueuer==1.6.0", "asyncpg==0.32.0", "uvloop==0.22.1")
"""The driver is the one of our own environment."""
ROOT = Path(__file__).parent.parent
INSTALL_TIMEOUT_S = 180
RUN_TIMEOUT_S = 120


class Failed(Exception):
    """A program of PgQueuer's environment did not do its work; the message is what it said."""


class Peer:
    """Its measurements, each in a process of its own."""

    def __init__(self, python: Path) -> None:
        self._python = python

    @classmethod
    async def ready(cls) -> "Peer | None":
        """None if it cannot be installed here; says so, and all else can still be measured."""
        version = f"py{sys.version_info.major}.{sys.version_info.minor}"
        folder = _cache() / "_".join((*REQUIREMENTS, version))
        python, complete = folder / "bin" / "python", folder / "complete"
        if not complete.exists():
            try:
                await asyncio.to_thread(venv.create, folder, clear=True, with_pip=True)
                install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
                await _output(python, *install, *REQUIREMENTS, timeout_s=INSTALL_TIMEOUT_S)
            except (Failed, OSError) as error:
                console.print(f"No figures of PgQueuer, which cannot be installed: {error}")
                return None
            complete.touch()
        return cls(python)

    async def submit_and_drain(self, url: str, jobs: int, batch: int) -> tuple[Cost, Cost]:
        output = await self._run("drain", url, jobs, batch)
        return msgspec.json.decode(output, type=tuple[Cost, Cost])

    async def start_latencies(self, url: str, samples: int) -> list[float]:
        return msgspec.json.decode(await self._run("latency", url, samples), type=list[float])

    async def _run(self, what: str, url: str, *numbers: int) -> bytes:
        program = ("-m", "benchmarks.pgqueuer_program", what, url, *map(str, numbers))
        return await _output(self._python, *program, timeout_s=RUN_TIMEOUT_S)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "flowfabric-benchmarks"


async def _output(python: Path, *arguments: str, timeout_s: float) -> bytes:
    process = await asyncio.create_subprocess_exec(
        python, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, said = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise Failed(f"not done after {timeout_s:.0f} seconds") from None
    if process.returncode != 0:
        raise Failed(said.decode().strip())
    return output
