"""A world on each store."""

from collections.abc import Callable, Iterator

import pytest

from tests.properties.world import IN_MEMORY, World


@pytest.fixture(params=["sqlite", "postgres"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "postgres":
        url = str(request.getfixturevalue("postgres_database"))
    else:
        url = IN_MEMORY
        record: Callable[[str], None] = request.getfixturevalue("exercised_store")
        record("sqlite memory")
    with World(url) as opened:
        yield opened
