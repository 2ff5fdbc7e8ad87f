"""One suite for every store."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

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


@pytest.fixture(params=["sqlite-memory", "sqlite-file", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_database"))
    record: Callable[[str], None] = request.getfixturevalue("exercised_store")
    if request.param == "sqlite-memory":
        record("sqlite memory")
        return "sqlite:///:memory:"
    record("sqlite file")
    return f"sqlite:///{tmp_path}/flowfabric.db"


@pytest.fixture
async def engine(
    store_url: str, clock: SettableClock, config: EngineConfig
) -> AsyncIterator[Engine]:
    async with await connect(store_url, config=config, clock=clock) as opened:
        yield opened


@pytest.fixture
def given(engine: Engine, clock: SettableClock) -> Given:
    return Given(engine, clock)
