"""One suite for every store."""

from collections.abc import AsyncIterator

import pytest

from flowfabric import Engine, EngineConfig, connect
from flowfabric.testing import SettableClock
from tests.conformance.given import Given


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
def config() -> EngineConfig:
    """Parametrise `config` to test with another."""
    return EngineConfig()


@pytest.fixture
async def engine(
    store_url: str, clock: SettableClock, config: EngineConfig
) -> AsyncIterator[Engine]:
    async with await connect(store_url, config=config, clock=clock) as opened:
        yield opened


@pytest.fixture
def given(engine: Engine, clock: SettableClock) -> Given:
    return Given(engine, clock)
