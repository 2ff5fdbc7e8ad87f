"""A database with something of everything in it."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from flowfabric import Engine, connect


@pytest.fixture
def url(tmp_path: Path, exercised_store: Callable[[str], None]) -> str:
    exercised_store("sqlite file")
    return f"sqlite:///{tmp_path}/flowfabric.db"


@pytest.fixture
async def engine(url: str) -> AsyncIterator[Engine]:
    async with await connect(url) as opened:
        yield opened
