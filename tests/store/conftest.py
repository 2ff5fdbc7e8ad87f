"""The stores under test."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from flowfabric.store.base import Store
from flowfabric.store.postgres.store import PostgresStore
from flowfabric.store.urls import open_store
from tests import postgres
from tests.store.records import SetClock, add_route, an_execution


@pytest.fixture(scope="session")
def postgres_template(postgres_server: str) -> Iterator[str]:
    """A database that the store has migrated by itself, without the engine."""

    async def prepare() -> str:
        url = await postgres.create_database(postgres_server)
        await PostgresStore(url).migrate()
        return url

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        url = runner.run(prepare())
        yield url
        runner.run(postgres.drop_database(postgres_server, url))


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
async def store(store_url: str, clock: SetClock) -> AsyncIterator[Store]:
    """An open store, each kind in turn, with a route for executions."""
    opened = open_store(store_url, clock=clock)
    await opened.open()
    await add_route(opened, an_execution())
    yield opened
    await opened.close()


@pytest.fixture
async def postgres_store(postgres_database: str) -> AsyncIterator[PostgresStore]:
    """An open store that takes its time from the server, with a route for executions."""
    opened = PostgresStore(postgres_database)
    await opened.open()
    await add_route(opened, an_execution())
    yield opened
    await opened.close()
