"""`make bench`: every figure of this project, from one run against one Postgres.

Read the ratios: floor and engine run one after the other on the same machine, so
what else the machine is doing hits both. Name sections to run only those, as in
`python -m benchmarks executions flows`. `FLOWFABRIC_TEST_POSTGRES_URL` names
another server to measure.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import flowfabric
from benchmarks import costs, executions, flows, sdk, suspension
from benchmarks.floor import PostgresFloor, SqliteFloor
from benchmarks.report import console
from tests.postgres import create_database, drop_database, server_version, start_server

COUNTS = {1: 1_000, 10: 5_000, 100: 20_000}
BACKLOGS = (1_000, 1_000_000)

Section = Callable[[str, Path], Awaitable[None]]
"""Given the URL of a server and a directory of its own."""


async def measure_costs(server: str, directory: Path) -> None:
    async with database(server) as url:
        await costs.measure(url)


async def measure_executions(server: str, directory: Path) -> None:
    async with database(server) as url, await flowfabric.connect(url) as engine:
        floor = await PostgresFloor.open(url)
        version = await server_version(url)
        await executions.measure(f"Postgres {version}", engine, floor, COUNTS)
        await floor.close()
    await measure_claim_cost(server)
    floor_file = SqliteFloor(str(directory / "floor.db"))
    async with await flowfabric.connect(f"sqlite:///{directory}/executions.db") as engine:
        await executions.measure("SQLite", engine, floor_file, COUNTS)
    await floor_file.close()


async def measure_claim_cost(server: str) -> None:
    async with AsyncExitStack() as stack:
        engines: dict[int, flowfabric.Engine] = {}
        for waiting in BACKLOGS:
            url = await stack.enter_async_context(database(server))
            engine = await stack.enter_async_context(await flowfabric.connect(url))
            await executions.create(engine, 1)
            await executions.fill(url, waiting)
            engines[waiting] = engine
        await executions.claim_cost(engines)


async def measure_worker(server: str, directory: Path) -> None:
    async with database(server) as url:
        await sdk.measure("Postgres", url)
    await sdk.measure("SQLite", f"sqlite:///{directory}/worker.db")


async def measure_flows(server: str, directory: Path) -> None:
    async with database(server) as url, await flowfabric.connect(url) as engine:
        await flows.measure("Postgres", engine)
    async with await flowfabric.connect(f"sqlite:///{directory}/flows.db") as engine:
        await flows.measure("SQLite", engine)


async def measure_suspension(server: str, directory: Path) -> None:
    async with database(server) as url:
        await suspension.resume_latency("Postgres", url)
    async with database(server) as url, await flowfabric.connect(url) as engine:
        await suspension.idle_cost_on_postgres(engine, url)
    await suspension.resume_latency("SQLite", f"sqlite:///{directory}/signals.db")
    path = str(directory / "suspension.db")
    async with await flowfabric.connect(f"sqlite:///{path}") as engine:
        await suspension.idle_cost_on_sqlite(engine, path)


SECTIONS: dict[str, Section] = {
    "costs": measure_costs,
    "executions": measure_executions,
    "worker": measure_worker,
    "flows": measure_flows,
    "suspension": measure_suspension,
}


@asynccontextmanager
async def database(server: str) -> AsyncIterator[str]:
    """A fresh database with the current schema."""
    url = await create_database(server)
    try:
        await flowfabric.migrate(url)
        yield url
    finally:
        await drop_database(server, url)


async def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        sys.exit(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    server = start_server(durable=True)
    try:
        with tempfile.TemporaryDirectory() as directory:
            for name in names or SECTIONS:
                console.rule(name)
                await SECTIONS[name](server.url, Path(directory))
    finally:
        server.stop()
    console.print("Compare ratios, not absolutes: each row shares its machine with its own floor.")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
