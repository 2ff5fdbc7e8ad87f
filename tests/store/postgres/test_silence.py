"""Connections over which nothing comes any more, though nobody closed them."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from flowfabric.error_kinds import BackendErrorKind
from flowfabric.errors import Transport
from flowfabric.patience import statements_within
from flowfabric.store.base import Reader, Store
from flowfabric.store.urls import open_store
from tests.silence import Network

PATIENCE_S = 0.5
CONNECTIONS = 4


@pytest.fixture
async def network(postgres_database: str) -> AsyncIterator[Network]:
    async with Network(postgres_database).open() as opened:
        yield opened


@pytest.fixture
async def store(network: Network) -> AsyncIterator[Store]:
    made = open_store(network.url, pool_max=CONNECTIONS)
    await made.open()
    await fill(made)
    yield made
    network.heal()
    await made.close()


async def fill(store: Store) -> None:
    """Use all connections of the pool at once."""
    everybody = asyncio.Barrier(CONNECTIONS)

    async def together(reader: Reader) -> None:
        await everybody.wait()

    await asyncio.gather(*(store.read(together) for _ in range(CONNECTIONS)))


async def test_after_one_timeout_no_idle_connection_is_used_again(
    network: Network, store: Store
) -> None:
    network.swallow()
    with statements_within(PATIENCE_S):
        with pytest.raises(Transport) as failure:
            await store.ping()
        assert failure.value.kind is BackendErrorKind.TIMEOUT
        # All of them were silent, and none costs its own timeout.
        await fill(store)


async def test_a_transaction_that_falls_silent_half_way_holds_up_nobody(
    network: Network, store: Store
) -> None:
    async def go_silent(reader: Reader) -> int:
        await reader.now_ms()
        network.swallow()
        return len(await reader.select("get_deployment"))

    started_s = time.monotonic()
    with statements_within(PATIENCE_S), pytest.raises(Transport):
        await store.transact(go_silent)
    assert time.monotonic() - started_s < 2 * PATIENCE_S
    await store.ping()


async def test_who_gives_up_on_a_silent_connection_leaves_at_once(
    network: Network, store: Store
) -> None:
    network.swallow()
    started_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            await store.ping()
    assert time.monotonic() - started_s < 2 * PATIENCE_S


async def test_a_reader_of_events_notices(network: Network, store: Store) -> None:
    network.swallow()
    with statements_within(PATIENCE_S):
        with pytest.raises(Transport):
            await store.read_events(after=0, limit=10)
        assert (await store.read_events(after=0, limit=10)).events == ()


async def test_a_network_that_swallows_new_connections_too_is_an_outage_like_another(
    network: Network, store: Store
) -> None:
    network.swallow(new_too=True)
    with statements_within(PATIENCE_S):
        for _ in range(2):
            with pytest.raises(Transport):
                await store.ping()
    network.heal()
    await store.ping()
