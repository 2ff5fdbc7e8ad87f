"""What it takes to get a connection: as few handshakes and questions as possible."""

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit
from uuid import UUID

import pytest

from flowfabric.errors import Transport
from flowfabric.outages import statements_within
from flowfabric.store.base import Reader, Store
from flowfabric.store.postgres.driver import connect, know_arrays
from flowfabric.store.postgres.pool import Connections
from flowfabric.store.urls import open_store
from tests.silence import Network

VALUES = {
    "bool": [True],
    "bytea": [b"a"],
    "int2": [2],
    "int4": [4],
    "int8": [8],
    "float8": [0.5],
    "uuid": [UUID(int=7)],
}


@pytest.fixture
async def network(postgres_database: str) -> AsyncIterator[Network]:
    async with Network(postgres_database).open() as opened:
        yield opened


@pytest.fixture
async def store(network: Network) -> AsyncIterator[Store]:
    made = open_store(network.url)
    await made.open()
    yield made
    await made.close()


async def test_opening_makes_one_connection(network: Network, store: Store) -> None:
    await store.ping()
    assert network.made == 1


async def test_who_can_have_one_that_is_given_back_makes_none(
    network: Network, store: Store
) -> None:
    taken, let_go = asyncio.Event(), asyncio.Event()

    async def hold(reader: Reader) -> None:
        taken.set()
        await let_go.wait()

    holding = asyncio.create_task(store.read(hold))
    await taken.wait()
    waiting = asyncio.create_task(store.ping())
    let_go.set()
    await asyncio.gather(holding, waiting)
    assert network.made == 1


async def test_who_waits_while_all_are_taken_gets_a_new_one(network: Network, store: Store) -> None:
    async def ask_beside(reader: Reader) -> None:
        await store.ping()

    await store.read(ask_beside)
    assert network.made == 2


async def test_arrays_are_known_without_asking(postgres_database: str) -> None:
    connection = await connect(
        postgres_database,
        timeout=10,
        command_timeout=10,
        statement_cache_size=100,
        max_cached_statement_lifetime=0,
        max_cacheable_statement_size=0,
        server_settings={},
    )
    asking = "select count(*) from pg_prepared_statements where statement ~ 'typeinfo[_]tree'"
    know_arrays(connection)
    for name, values in VALUES.items():
        rows = await connection.fetch(f"select $1::{name}[]", values)
        assert [row[0] for row in rows] == [values]
    ((asked,),) = await connection.fetch(asking)
    assert asked == 0
    await connection.close()


async def test_the_longest_statements_are_prepared_once(postgres_database: str) -> None:
    """The driver would have the server plan them anew each time."""
    connections = Connections(
        postgres_database, pool_max=1, acquire_timeout_s=30, statement_cache_size=10
    )
    await connections.open()
    try:
        async with connections.acquire() as connection:
            for _ in range(2):
                await connection.fetch(f"select 'long' as found /* {100_000 * '.'} */")
            ((prepared,),) = await connection.fetch(
                "select count(*) from pg_prepared_statements where statement ~ '^select .long. as'"
            )
    finally:
        await connections.close()
    assert prepared == 1


@pytest.mark.parametrize(
    ("address", "named"),
    [
        pytest.param("127.0.0.1:9", "127.0.0.1:9", id="refused"),
        pytest.param("nowhere.invalid", "nowhere.invalid:5432", id="unknown, at the usual port"),
    ],
)
async def test_who_cannot_connect_is_told_where_and_never_the_password(
    address: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGPORT", raising=False)
    store = open_store(f"postgresql://user:secret@{address}/shop")
    with pytest.raises(Transport, match=rf"^transport \(postgres\): {named}: ") as raised:
        await store.open()
    assert "secret" not in str(raised.value)


async def test_who_gets_no_answer_is_told_from_where(network: Network, store: Store) -> None:
    network.swallow(new_too=True)
    with statements_within(0.1), pytest.raises(Transport) as raised:
        await store.ping()
    server = f"127.0.0.1:{urlsplit(network.url).port}"
    assert str(raised.value).startswith(f"transport (postgres): {server} gave no answer in time")
