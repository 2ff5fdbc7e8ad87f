"""Transactions of a program's own, on whatever database it uses."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiosqlite
import asyncpg


@asynccontextmanager
async def in_transaction(url: str) -> AsyncIterator[object]:
    """A connection with an open transaction, committed at the end."""
    if url.startswith("sqlite"):
        async with aiosqlite.connect(url.removeprefix("sqlite:///")) as file:
            await file.execute("begin")
            yield file
            await file.commit()
        return
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            yield connection
    finally:
        connection.terminate()
