"""`make bench`: every figure of this project, from one run against one Postgres.

Read the ratios: floor and engine run one after the other on the same machine, so
what else the machine is doing hits both. `FLOWFABRIC_TEST_POSTGRES_URL` names
another server to measure.
"""

import asyncio
import tempfile
from pathlib import Path

import flowfabric
from benchmarks import executions, flows
from benchmarks.floor import PostgresFloor, SqliteFloor
from benchmarks.report import console
from tests.postgres import create_database, drop_database, server_version, start_server

COUNTS = {1: 1_000, 10: 5_000, 100: 20_000}
BACKLOGS = (1_000, 1_000_000)


async def on_postgres(url: str) -> None:
    await flowfabric.migrate(url)
    floor = await PostgresFloor.open(url)
    async with await flowfabric.connect(url) as engine:
        version = await server_version(url)
        await executions.measure(f"Postgres {version}", engine, floor, COUNTS)
        await executions.create(engine, 1_000)
        await executions.claim_cost(engine, url, BACKLOGS)
        await flows.measure(f"Postgres {version}", engine)
    await floor.close()


async def on_sqlite(directory: Path) -> None:
    floor = SqliteFloor(str(directory / "floor.db"))
    async with await flowfabric.connect(f"sqlite:///{directory}/engine.db") as engine:
        await executions.measure("SQLite, file", engine, floor, COUNTS)
        await flows.measure("SQLite, file", engine)
    await floor.close()


async def main() -> None:
    server = start_server(durable=True)
    try:
        url = await create_database(server.url)
        await on_postgres(url)
        await drop_database(server.url, url)
    finally:
        server.stop()
    with tempfile.TemporaryDirectory() as directory:
        await on_sqlite(Path(directory))
    console.print("Every row compares with its own floor; absolute figures depend on the machine.")


asyncio.run(main())
