"""What other people's transactions do to ours."""

import asyncio
from contextlib import suppress

import asyncpg

from benchmarks.chaos.arena import FAULT_AT_S, LOAD_S, Arena, Fault
from benchmarks.chaos.worker import job
from flowfabric.errors import KeyUndecided

KEY = "submitted in a transaction that stays open"


async def open_transaction(arena: Arena) -> None:
    """A job submitted in a transaction that stays open, and its key submitted by others too."""
    number = arena.submitted
    arena.submitted += 1
    stranger = await asyncpg.connect(arena.url)
    try:
        async with stranger.transaction():
            await arena.app.submit(job(number), idempotency_key=KEY, connection=stranger)
            others = [
                asyncio.create_task(arena.app.submit(job(number), idempotency_key=KEY))
                for _ in range(10)
            ]
            await asyncio.sleep(LOAD_S - FAULT_AT_S)
        for other in others:
            with suppress(KeyUndecided):
                await other
    finally:
        await stranger.close()


SCENARIOS: dict[str, Fault] = {"open foreign transaction": open_transaction}
