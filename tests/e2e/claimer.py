"""A process that claims limited work as fast as it can, until it is killed or told to stop.

Some of what it claims it does not complete: somebody else finds its lease expired.
"""

import asyncio
import random
import sys
from contextlib import suppress

from flowfabric import Engine, connect
from flowfabric.core.results import Claimed
from flowfabric.errors import ExecutionNotActive, LeaseConflict, StateConflict

AT_ONCE = 2
LEASE_TTL_MS = 1_000
LOST = (ExecutionNotActive, LeaseConflict, StateConflict)


async def work(engine: Engine, name: str, stopping: asyncio.Event) -> None:
    while not stopping.is_set():
        claimed = await engine.claim_many(
            ["default"],
            limit=random.randint(1, 4),
            worker_id=name,
            worker_instance_id=name,
            lease_ttl_ms=LEASE_TTL_MS,
            max_wait_ms=200,
        )
        await asyncio.sleep(random.random() / 50)
        done = [each for each in claimed if random.random() < 0.95]
        await asyncio.gather(*(complete(engine, each) for each in done))
        await engine.expire_due_leases()


async def complete(engine: Engine, claimed: Claimed) -> None:
    # On a busy machine the lease may be over: the work is another process's then.
    with suppress(*LOST):
        await engine.complete(claimed.handle)


async def main(url: str, name: str) -> None:
    stopping = asyncio.Event()
    async with await connect(url, pool_max=2) as engine:
        working = asyncio.gather(*(work(engine, name, stopping) for _ in range(AT_ONCE)))
        # Told to stop by the end of its input.
        await asyncio.to_thread(sys.stdin.read)
        stopping.set()
        await working


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
