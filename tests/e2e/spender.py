"""A process that spends from one budget as fast as it can, until it is killed or told to stop.

Each of its workers claims an execution, reserves, settles with less, and completes; where there
is no room it reports one unit at a time. It writes what was confirmed, a line each.
"""

import asyncio
import random
import sys
from contextlib import suppress

from flowfabric import Engine, connect
from flowfabric.core.budgets import HardBreach, UsageCounted
from flowfabric.core.results import Claimed
from flowfabric.errors import ExecutionNotActive, LeaseConflict, StateConflict

AT_ONCE = 4
ASKED = 40
LEASE_TTL_MS = 1_500
LOST = (ExecutionNotActive, LeaseConflict, StateConflict)


async def spend(engine: Engine, name: str, stopping: asyncio.Event) -> None:
    while not stopping.is_set():
        claimed = await engine.claim(
            worker_id=name,
            worker_instance_id=name,
            lease_ttl_ms=LEASE_TTL_MS,
            max_wait_ms=1_000,
        )
        if claimed is not None:
            # On a busy machine the lease may be over: the work is another process's then.
            with suppress(*LOST):
                await spend_one(engine, claimed)


async def spend_one(engine: Engine, claimed: Claimed) -> None:
    held = await engine.reserve_budget(
        claimed.handle, "team", {"tokens": ASKED}, reservation_id=claimed.lease_id
    )
    if isinstance(held, HardBreach):
        told = await engine.report_usage_admin("team", ["tokens"], [1])
        used = 1
    else:
        used = random.randint(0, ASKED)
        told = await engine.settle_reservation("team", claimed.lease_id, {"tokens": used})
    if told == UsageCounted():
        print(used, flush=True)
    # Some leave what they hold behind, and do not complete.
    if random.random() < 0.9:
        await engine.complete(claimed.handle)


async def main(url: str, name: str) -> None:
    stopping = asyncio.Event()
    async with await connect(url, pool_max=2) as engine:
        spending = asyncio.gather(*(spend(engine, name, stopping) for _ in range(AT_ONCE)))
        # Told to stop by the end of its input.
        await asyncio.to_thread(sys.stdin.read)
        stopping.set()
        await spending


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
