"""Engines with many connections to one Postgres, which keeps the time itself."""

from collections.abc import AsyncIterator

import asyncpg
import pytest

from flowfabric import Engine, connect
from tests.races.rival import Rival

CONNECTIONS = 16


@pytest.fixture
async def engine(postgres_database: str) -> AsyncIterator[Engine]:
    async with await connect(postgres_database, pool_max=CONNECTIONS) as opened:
        yield opened


@pytest.fixture
async def rival(postgres_database: str) -> AsyncIterator[Rival]:
    connection = await asyncpg.connect(
        postgres_database, server_settings={"search_path": "flowfabric"}
    )
    yield Rival(connection)
    await connection.close()
