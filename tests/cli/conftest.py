"""A database with something of everything in it."""

from collections.abc import AsyncIterator, Callable

import pytest

from flowfabric import Engine, connect


@pytest.fixture
def url(new_database: Callable[[str], str]) -> str:
    return new_database("sqlite-file")


@pytest.fixture
async def engine(url: str) -> AsyncIterator[Engine]:
    async with await connect(url) as opened:
        yield opened
