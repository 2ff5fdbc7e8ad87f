"""A process that takes work back from quiet workers until its standard input ends."""

import asyncio
import sys

from flowfabric import connect


async def sweep(url: str) -> None:
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    async with await connect(url, pool_max=1) as engine:
        print("ready", flush=True)
        while not ended.done():
            await engine.expire_due_leases()


if __name__ == "__main__":
    asyncio.run(sweep(sys.argv[1]))
