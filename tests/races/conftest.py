"""Engines with many connections to one Postgres, which keeps the time itself."""

from collections.abc import AsyncIterator

import pytest

from flowfabric import Engine, connect
from tests.races.rival import Rival, connected

CONNECTIONS = 16


@pytest.fixture
async def engine(postgres_database: str) -> AsyncIterator[Engine]:
    async with await connect(postgres_database, pool_max=CONNECTIONS) as opened:
        yield opened


@pytest.fixture
async def rival(postgres_database: str) -> AsyncIterator[Rival]:
    async with connected(postgres_database) as client:
        yield client
