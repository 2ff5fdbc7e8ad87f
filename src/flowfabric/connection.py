"""From a URL to an open engine."""

import os
from shlex import quote
from typing import Final

from flowfabric.codec import Codec, CodedValues
from flowfabric.config import EngineConfig
from flowfabric.engine.engine import Engine
from flowfabric.errors import SchemaTooOld, Unavailable
from flowfabric.store.base import Clock
from flowfabric.store.urls import HTTP, open_store, redact

TOKEN_VARIABLE: Final = "FLOWFABRIC_TOKEN"


async def connect(
    url: str,
    *,
    config: EngineConfig | None = None,
    clock: Clock | None = None,
    pool_max: int = 10,
    listen_url: str | None = None,
    set_up: bool = True,
    codec: Codec | None = None,
    token: str | None = None,
) -> Engine:
    """Open an engine on `sqlite:///path.db`, `sqlite:///:memory:` or `postgresql://…`.

    A SQLite database is set up on first use, unless `set_up` says no; a Postgres database
    by `migrate`. All payloads go through the `codec`, if there is one. `http://…` connects to a
    server instead, with the `token`, or the one in FLOWFABRIC_TOKEN.
    """
    if url.startswith(HTTP):
        return await _reach(url, token)
    store = open_store(url, clock=clock, pool_max=pool_max, listen_url=listen_url, set_up=set_up)
    try:
        return await Engine.open(store, config, None if codec is None else CodedValues(codec))
    except SchemaTooOld as error:
        # A masked URL cannot be pasted into a shell.
        pasted = quote(url) if redact(url) == url else None
        raise SchemaTooOld(error.found, error.expected, pasted) from None


async def _reach(url: str, token: str | None) -> Engine:
    # Imported here: it needs an extra that programs with a database need not install.
    try:
        from flowfabric.remote import RemoteEngine
    except ModuleNotFoundError as error:
        raise Unavailable(
            "http", f"needs {error.name}: pip install 'flowfabric[remote]'"
        ) from error
    return await RemoteEngine.reach(url, token or os.environ.get(TOKEN_VARIABLE) or None)


async def migrate(url: str) -> tuple[str, ...]:
    """Bring the schema at `url` up to date; return the migrations applied."""
    store = open_store(url)
    try:
        return tuple(await store.migrate())
    finally:
        await store.close()
