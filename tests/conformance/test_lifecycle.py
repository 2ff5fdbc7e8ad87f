"""Opening, preparing, asking the time, closing."""

import asyncio

import pytest
from msgspec import structs

from flowfabric import Engine, EngineConfig, __version__, connect
from flowfabric.core.bounds import BATCH_MAX
from flowfabric.core.ids import PartitionConfig
from flowfabric.engine.engine import FLAGS, Identity, Prepared
from flowfabric.errors import (
    HandleFromOtherBackend,
    InvalidHandle,
    InvalidInput,
    OperationTimeout,
    Unavailable,
)
from flowfabric.testing import SettableClock
from tests.conformance.given import WORKER, Given
from tests.conformance.observed import refuses, unchanged


async def test_preparing_a_prepared_database_does_nothing(engine: Engine, given: Given) -> None:
    await given.running()
    async with unchanged(engine):
        assert await engine.prepare() == Prepared(applied=())


async def test_a_ping_reaches_the_database(engine: Engine) -> None:
    async with unchanged(engine):
        await engine.ping()


async def test_the_time_is_the_store_clocks(engine: Engine, clock: SettableClock) -> None:
    assert await engine.server_time_ms() == clock.now_ms()
    later_ms = clock.advance("1h")
    assert await engine.server_time_ms() == later_ms


async def test_without_a_clock_of_its_own_the_time_moves_on(store_url: str) -> None:
    async with await connect(store_url) as engine:
        first = await engine.server_time_ms()
        assert first > 1_700_000_000_000
        while await engine.server_time_ms() == first:
            pass


async def test_the_engine_says_what_it_is(engine: Engine, store_url: str) -> None:
    label = "sqlite" if store_url.startswith("sqlite") else "postgres"
    assert engine.backend_label() == label
    major, minor, patch = (int(part) for part in __version__.split("."))
    capabilities = engine.capabilities()
    assert capabilities.identity == Identity(family=label, version=(major, minor, patch))
    assert capabilities.supports.keys() == FLAGS.keys()


async def test_a_capability_is_claimed_exactly_when_its_operation_exists(engine: Engine) -> None:
    supports = engine.capabilities().supports
    assert {flag for flag, has in supports.items() if has} == {
        flag for flag, operation in FLAGS.items() if callable(getattr(engine, operation, None))
    }
    assert {
        "cancel_execution",
        "change_priority",
        "replay_execution",
        "revoke_lease",
        "read_execution_state",
        "read_execution_info",
        "get_execution_result",
        "prepare",
        "list_expired_leases",
    } <= {flag for flag, has in supports.items() if has}


async def test_partitions_are_those_of_the_database(engine: Engine) -> None:
    assert engine.deployment.partitions == PartitionConfig(256, 32, 32)


@pytest.mark.parametrize("store_url", ["sqlite-file", "postgres"], indirect=True)
async def test_engines_on_one_database_share_it(
    engine: Engine, given: Given, store_url: str, clock: SettableClock
) -> None:
    running = await given.running()
    async with await connect(store_url, clock=clock) as other:
        await other.renew(running.handle)
        await other.complete(running.handle, b"by another process")
    assert await engine.get_execution_result(running.execution_id) == b"by another process"


async def test_a_handle_of_another_database_is_refused(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    running = await given.running()
    error = InvalidHandle if engine.backend_label() == "sqlite" else HandleFromOtherBackend
    async with await connect("sqlite:///:memory:", clock=clock) as other:
        with pytest.raises(error):
            await other.complete(running.handle)


# Closing


async def test_closing_waits_for_a_drain_and_then_refuses(
    store_url: str, clock: SettableClock
) -> None:
    engine = await connect(store_url, clock=clock)
    drained = []

    async def drain() -> None:
        await engine.ping()
        drained.append(True)

    await engine.shutdown_prepare(1_000, drain=drain)
    assert drained == [True]
    with pytest.raises(Unavailable):
        await engine.ping()
    with pytest.raises(Unavailable):
        await engine.claim(**WORKER)


async def test_a_drain_that_takes_too_long_is_an_error_after_closing(
    store_url: str, clock: SettableClock
) -> None:
    engine = await connect(store_url, clock=clock)

    async def drain() -> None:
        await asyncio.Event().wait()

    with pytest.raises(OperationTimeout) as caught:
        await engine.shutdown_prepare(1, drain=drain)
    assert (caught.value.op, caught.value.elapsed_ms) == ("shutdown_prepare", 1)
    with pytest.raises(Unavailable):
        await engine.ping()


async def test_a_drain_that_fails_still_closes(store_url: str, clock: SettableClock) -> None:
    engine = await connect(store_url, clock=clock)

    async def drain() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await engine.shutdown_prepare(drain=drain)
    with pytest.raises(Unavailable):
        await engine.ping()


async def test_closing_twice_is_harmless(store_url: str, clock: SettableClock) -> None:
    engine = await connect(store_url, clock=clock)
    await engine.shutdown_prepare()
    await engine.close()


async def test_a_bad_grace_closes_nothing(engine: Engine) -> None:
    bad: list[object] = [-1, 24 * 60 * 60 * 1_000 + 1, "5", None]
    for grace in bad:
        await refuses(engine, "grace_ms", "shutdown_prepare", grace)
    await engine.ping()


def test_bad_settings_are_refused() -> None:
    for field in ("keep", "keep_failed", "keep_events", "payload_bytes_max"):
        with pytest.raises(InvalidInput) as caught:
            structs.replace(EngineConfig(), **{field: -1})
        assert caught.value.field == field
    bad: list[object] = ["default", None, [5], [""], ["bad\nlane"], ["a"] * (BATCH_MAX + 1)]
    for lanes in bad:
        with pytest.raises(InvalidInput) as caught:
            structs.replace(EngineConfig(), lanes=lanes)
        assert caught.value.field == "lanes"


async def test_a_url_nobody_knows_is_refused() -> None:
    for url in ("", "sqlite:///", "mysql://x", "postgres:/x"):
        with pytest.raises(InvalidInput) as caught:
            await connect(url)
        assert caught.value.field == "url"
