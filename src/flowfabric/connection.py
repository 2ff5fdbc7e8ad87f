"""From a URL to an open engine."""

from flowfabric.config import EngineConfig
from flowfabric.engine.engine import Engine
from flowfabric.store.base import Clock
from flowfabric.store.urls import open_store


async def connect(
    url: str, *, config: EngineConfig | None = None, clock: Clock | None = None, pool_max: int = 10
) -> Engine:
    """Open an engine on `sqlite:///path.db`, `sqlite:///:memory:` or `postgresql://…`.

    A SQLite database is set up on first use; a Postgres database by `migrate`.
    """
    return await Engine.open(open_store(url, clock=clock, pool_max=pool_max), config)


async def migrate(url: str) -> tuple[str, ...]:
    """Bring the schema at `url` up to date; return the migrations applied."""
    store = open_store(url)
    try:
        return tuple(await store.migrate())
    finally:
        await store.close()
