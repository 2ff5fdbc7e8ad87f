"""A world on each store."""

from collections.abc import Callable, Iterator

import pytest

from tests.properties.world import IN_MEMORY, World


@pytest.fixture
def sqlite_world(exercised_store: Callable[[str], None]) -> Iterator[World]:
    exercised_store("sqlite memory")
    with World(IN_MEMORY) as world:
        yield world


@pytest.fixture
def postgres_world(postgres_database: str) -> Iterator[World]:
    with World(postgres_database) as world:
        yield world
