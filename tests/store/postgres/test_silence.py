"""Connections over which nothing comes any more, though nobody closed them."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from flowfabric.errors import BackendErrorKind, ResourceExhausted, Transport
from flowfabric.outages import everything_within, statements_within
from flowfabric.store.base import Reader, Store
from flowfabric.store.postgres import pool
from flowfabric.store.postgres.pool import ROLLBACK_TIMEOUT_S
from flowfabric.store.urls import open_store
from tests.silence import Network, Way

PATIENCE_S = 0.5
AT_ONCE_S = ROLLBACK_TIMEOUT_S - PATIENCE_S
"""Sooner than anybody could have waited for an answer to a rollback, however busy the machine."""
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

    with statements_within(PATIENCE_S), pytest.raises(Transport) as failure:
        async with asyncio.timeout(AT_ONCE_S):
            await store.transact(go_silent)
    assert not failure.value.may_have_happened
    assert "nothing was changed" in str(failure.value)
    await store.ping()


async def test_a_connection_of_theirs_that_does_not_answer_is_ended(
    network: Network, store: Store
) -> None:
    async def ask(reader: Reader) -> int:
        return await reader.now_ms()

    theirs = await asyncpg.connect(network.url)
    await theirs.execute("begin")
    network.swallow()
    async with asyncio.timeout(AT_ONCE_S):
        with statements_within(PATIENCE_S), pytest.raises(Transport):
            await store.transact_on(theirs, ask, lock_wait_ms=1)
    # What they do next, such as to roll back, would not be answered either.
    assert theirs.is_closed()


async def test_who_gives_up_on_a_silent_connection_leaves_at_once(
    network: Network, store: Store
) -> None:
    network.swallow()
    async with asyncio.timeout(AT_ONCE_S):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await store.ping()


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


async def test_a_commit_whose_answer_is_lost_may_have_happened(
    network: Network, store: Store
) -> None:
    async def lose_the_answer(reader: Reader) -> None:
        await reader.now_ms()
        network.swallow((Way.ANSWERS,))

    with statements_within(PATIENCE_S), pytest.raises(Transport) as failure:
        await store.transact(lose_the_answer)
    assert failure.value.may_have_happened
    assert "same idempotency key" in str(failure.value)


async def test_who_waits_behind_others_is_told_with_them(
    network: Network, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COMMAND_TIMEOUT_S", "CONNECT_TIMEOUT_S"):
        monkeypatch.setattr(pool, name, PATIENCE_S)
    network.swallow(new_too=True)
    async with asyncio.timeout(AT_ONCE_S):
        told = await asyncio.gather(
            *(store.ping() for _ in range(3 * CONNECTIONS)), return_exceptions=True
        )
    assert {type(each) for each in told} == {Transport}


async def test_the_wait_for_a_connection_counts_as_well(store: Store) -> None:
    let_go = asyncio.Event()

    async def hold(reader: Reader) -> None:
        await let_go.wait()

    holders = [asyncio.create_task(store.read(hold)) for _ in range(CONNECTIONS)]
    await asyncio.sleep(0)
    async with asyncio.timeout(AT_ONCE_S):
        with everything_within(PATIENCE_S), pytest.raises(ResourceExhausted):
            await store.ping()
    let_go.set()
    await asyncio.gather(*holders)


async def test_statements_share_the_time_of_a_whole(network: Network, store: Store) -> None:
    async def ask_again_and_again(reader: Reader) -> None:
        while True:
            await reader.select("get_deployment")

    async with asyncio.timeout(AT_ONCE_S):
        with everything_within(PATIENCE_S), pytest.raises(Transport):
            await store.transact(ask_again_and_again)
