"""An app on every store."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from flowfabric import App


@pytest.fixture(params=["sqlite-file", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_database"))
    record: Callable[[str], None] = request.getfixturevalue("exercised_store")
    record("sqlite file")
    return f"sqlite:///{tmp_path}/flowfabric.db"


@pytest.fixture
async def waiting_app(store_url: str) -> AsyncIterator[App]:
    async with App(store_url) as made:
        yield made
        made.blocking.close()
