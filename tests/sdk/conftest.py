"""An app on every store."""

from collections.abc import AsyncIterator, Callable

import pytest

from flowfabric import App
from tests.sdk.shops import Shop


@pytest.fixture(params=["sqlite-file", "postgres"])
def store_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    """A database of each kind that several connections can share."""
    return new_database(request.param)


@pytest.fixture
async def waiting_app(store_url: str) -> AsyncIterator[App]:
    async with App(store_url) as made:
        yield made
        made.blocking.close()


@pytest.fixture
def shop(store_url: str) -> Shop:
    return Shop(store_url)
