"""A world on each store."""

from collections.abc import Callable, Iterator

import pytest

from tests.properties.world import World


@pytest.fixture(params=["sqlite-memory", "postgres"])
def world(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> Iterator[World]:
    with World(new_database(request.param)) as opened:
        yield opened
