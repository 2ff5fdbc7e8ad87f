"""A worker of one execution that does what it is told, on the engine alone.

    python -m tests.e2e.hands URL NAME LEASE_TTL_MS

It runs the reconcilers, claims the first execution it can get, says its handle, and
completes when a line arrives on its standard input.
"""

import asyncio
import sys

from flowfabric import connect
from flowfabric.core.handles import to_wire
from flowfabric.reconcilers import Supervisor

PATIENCE_MS = 60_000


async def work(url: str, name: str, lease_ttl_ms: int) -> None:
    async with await connect(url) as engine, Supervisor(engine):
        print("ready", flush=True)
        claimed = await engine.claim(
            worker_id=name,
            worker_instance_id=f"{name}-1",
            lease_ttl_ms=lease_ttl_ms,
            max_wait_ms=PATIENCE_MS,
        )
        assert claimed is not None
        print(to_wire(claimed.handle).hex(), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        await engine.complete(claimed.handle, name.encode())
        print("completed", flush=True)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2], int(sys.argv[3])))
