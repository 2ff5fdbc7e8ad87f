"""An app on every store."""

from collections.abc import AsyncIterator

import pytest

from flowfabric import App


@pytest.fixture
async def app(store_url: str) -> AsyncIterator[App]:
    made = App(store_url)
    yield made
    await made.close()
