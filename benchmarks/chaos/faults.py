"""What goes wrong with workers, with the server, and with its neighbours."""

import asyncio
import time
from contextlib import AsyncExitStack

import asyncpg

from benchmarks.chaos.arena import FAULT_AT_S, LOAD_S, Arena, Fault, steady

BURST = 2_000
NEIGHBOURS_MAX = 300

ACTIVITY = """
select pg_terminate_backend(pid) from pg_stat_activity
 where datname = current_database() and pid <> pg_backend_pid()
   and application_name = 'flowfabric'"""


async def nothing(arena: Arena) -> None:
    """No fault at all."""


async def restart(arena: Arena) -> None:
    assert arena.server.restart is not None
    await asyncio.to_thread(arena.server.restart, "immediate")


async def kill_backends(arena: Arena) -> None:
    await arena.ask(ACTIVITY)


async def exhaust_connections(arena: Arena) -> None:
    """Take every connection the server has, then kill the workers' own."""
    async with AsyncExitStack() as stack:
        for _ in range(NEIGHBOURS_MAX):
            try:
                neighbour = await asyncpg.connect(arena.url)
            except (OSError, asyncpg.PostgresError):
                break
            stack.push_async_callback(neighbour.close)
        killer: asyncpg.Connection = neighbour
        await killer.execute(ACTIVITY)
        await asyncio.sleep(1)


async def kill_worker(arena: Arena) -> None:
    await arena.kill_worker()


async def kill_workers_again_and_again(arena: Arena) -> None:
    for _ in range(4):
        await arena.kill_worker()
        await asyncio.sleep(1)


async def idle_in_transaction(arena: Arena) -> None:
    """A neighbour that holds a snapshot, and so everything dead, for as long as the load lasts."""
    neighbour = await asyncpg.connect(arena.url)
    try:
        async with neighbour.transaction(isolation="repeatable_read"):
            await neighbour.fetchval("select count(*) from flowfabric.execution")
            await asyncio.sleep(LOAD_S - FAULT_AT_S)
    finally:
        await neighbour.close()


async def active_readers(arena: Arena) -> None:
    async def read(until_s: float) -> None:
        reader = await asyncpg.connect(arena.url)
        try:
            while time.monotonic() < until_s:
                await reader.fetchval("select sum(length(payload)) from flowfabric.execution")
        finally:
            await reader.close()

    until_s = time.monotonic() + LOAD_S - FAULT_AT_S
    await asyncio.gather(*(read(until_s) for _ in range(4)))


async def burst(arena: Arena) -> None:
    await arena.submit(BURST)


async def sustained_load(arena: Arena) -> None:
    """Twice the stream for twice as long."""
    await steady(arena, 2 * LOAD_S)


SCENARIOS: dict[str, Fault] = {
    "clean": nothing,
    "postgres restart": restart,
    "every backend killed": kill_backends,
    "connections exhausted": exhaust_connections,
    "crash recovery": kill_worker,
    "repeated kill -9": kill_workers_again_and_again,
    "idle in transaction": idle_in_transaction,
    "sustained load": sustained_load,
    "active readers": active_readers,
    "burst": burst,
}
KILLS_WORK = ("crash recovery", "repeated kill -9")
"""Scenarios in which jobs lose the process they run in."""
