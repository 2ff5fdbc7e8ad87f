"""A database that cannot hold every text is refused before anything is stored in it."""

import uuid
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import asyncpg
import pytest

from flowfabric import connect, migrate
from flowfabric.errors import Unavailable

NAME = f"in_latin1_{uuid.uuid4().hex}"


@pytest.fixture
async def latin1_database(postgres_server: str) -> AsyncIterator[str]:
    connection = await asyncpg.connect(postgres_server)
    await connection.execute(f"drop database if exists {NAME}")
    await connection.execute(
        f"create database {NAME} encoding 'LATIN1' locale 'C' template template0"
    )
    parts = urlsplit(postgres_server)
    yield f"{parts.scheme}://{parts.netloc}/{NAME}{f'?{parts.query}' if parts.query else ''}"
    await connection.execute(f"drop database {NAME} with (force)")
    await connection.close()


async def test_migrating_it_is_refused_and_leaves_nothing(latin1_database: str) -> None:
    with pytest.raises(Unavailable, match="encoding of the database is LATIN1, and must be UTF8"):
        await migrate(latin1_database)

    connection = await asyncpg.connect(latin1_database)
    schemas = await connection.fetchval(
        "select count(*) from pg_namespace where nspname = 'flowfabric'"
    )
    await connection.close()
    assert schemas == 0


async def test_opening_it_is_refused(latin1_database: str) -> None:
    with pytest.raises(Unavailable, match="encoding 'UTF8' template template0"):
        await connect(latin1_database)
