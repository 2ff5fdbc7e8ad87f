"""What goes wrong on the way to the server, or with a process that stands still."""

import asyncio
import signal
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Final

from benchmarks.chaos.arena import Arena, Fault, Route, Ways
from benchmarks.chaos.pooler import PROGRAM, pooled
from benchmarks.chaos.worker import LEASE_S
from tests.silence import BOTH, Network, Way

SILENCE_S: Final = LEASE_S + 2
"""Long enough that others take over what was cut off."""
SERVER_GIVES_UP_S: Final = LEASE_S + 1
"""When the server, which probes for clients that are in a fence, notices that one is gone."""


@asynccontextmanager
async def one_through_the_network(url: str) -> AsyncIterator[Ways]:
    async with Network(url).open() as network:
        yield Ways((network.url, url), url, network=network)


@asynccontextmanager
async def workers_through_the_network(url: str) -> AsyncIterator[Ways]:
    async with Network(url).open() as network:
        yield Ways((network.url,), url, network=network)


@asynccontextmanager
async def through_a_pooler(url: str) -> AsyncIterator[Ways]:
    async with pooled(url) as pooler:
        yield Ways((pooler.url,), pooler.url, pooler=pooler)


def swallowing(ways: Collection[Way]) -> Fault:
    async def swallow(arena: Arena) -> None:
        """One of two workers is cut off, and nothing tells it."""
        network = arena.ways.network
        assert network is not None
        await arena.until_holding(arena.workers[0])
        network.swallow(ways, new_too=True)
        await asyncio.sleep(SERVER_GIVES_UP_S)
        network.let_the_server_give_up()
        await asyncio.sleep(SILENCE_S - SERVER_GIVES_UP_S)
        network.heal()

    return swallow


async def forget_connections(arena: Arena) -> None:
    """Every connection there is falls silent for good; new ones work."""
    network = arena.ways.network
    assert network is not None
    network.swallow()
    await asyncio.sleep(SERVER_GIVES_UP_S)
    network.let_the_server_give_up()


async def stop_a_worker(arena: Arena) -> None:
    """A process stands still for longer than its leases, then goes on."""
    worker = arena.workers[0]
    await arena.until_holding(worker)
    worker.send_signal(signal.SIGSTOP)
    await asyncio.sleep(SILENCE_S)
    worker.send_signal(signal.SIGCONT)


async def restart_pooler(arena: Arena) -> None:
    pooler = arena.ways.pooler
    assert pooler is not None
    await pooler.kill()
    await asyncio.sleep(1)
    await pooler.start()


SCENARIOS: dict[str, Fault] = {
    "swallowed packets": swallowing(BOTH),
    "half-open, nothing sent": swallowing((Way.REQUESTS,)),
    "half-open, nothing heard": swallowing((Way.ANSWERS,)),
    "forgotten connections": forget_connections,
    "stopped worker": stop_a_worker,
    **({"pgbouncer killed": restart_pooler} if PROGRAM else {}),
}
ROUTES: dict[str, Route] = {
    "swallowed packets": one_through_the_network,
    "half-open, nothing sent": one_through_the_network,
    "half-open, nothing heard": one_through_the_network,
    "forgotten connections": workers_through_the_network,
    "pgbouncer killed": through_a_pooler,
}
"""Those in which something stands between us and the server."""
