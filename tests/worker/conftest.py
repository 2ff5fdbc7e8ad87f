"""An app on every store."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from flowfabric import App


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
async def app(store_url: str) -> AsyncIterator[App]:
    made = App(store_url)
    yield made
    await made.close()
