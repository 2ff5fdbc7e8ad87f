"""A writer of events that takes its time between writing and committing, or changes its mind.

python -m tests.e2e.log_writer URL EVENTS SEED
"""

import asyncio
import random
import sys
import uuid

import asyncpg

from flowfabric.store.postgres.pool import SEARCH_PATH

ROLLED_BACK = 0.1
PAUSE_S = 0.05
ROW_MAX = 25
INSERT = """
insert into event (occurred_at_ms, category, event_type, namespace, partition_key, execution_id)
values (1, 'lease', 'acquired', 'default', $1::smallint[], $2::uuid[])
"""
LOST = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
)


async def write(url: str, events: int, chance: random.Random) -> None:
    written = 0
    while written < events:
        try:
            connection = await asyncpg.connect(url, server_settings={"search_path": SEARCH_PATH})
            try:
                while written < events:
                    written += await write_some(connection, chance)
            finally:
                connection.terminate()
        except LOST:
            # Cut off. Whether the last of it was committed, the log will tell.
            continue


async def write_some(
    connection: "asyncpg.Connection[asyncpg.Record]", chance: random.Random
) -> int:
    transaction = connection.transaction()
    await transaction.start()
    written = 0
    for _ in range(chance.randint(1, 3)):
        count = chance.randint(1, ROW_MAX)
        ids = [uuid.UUID(int=chance.getrandbits(128)) for _ in range(count)]
        await connection.execute(INSERT, [7] * count, ids)
        written += count
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() * PAUSE_S)
    if chance.random() < ROLLED_BACK:
        await transaction.rollback()
        return 0
    await transaction.commit()
    return written


if __name__ == "__main__":
    _, url, events, seed = sys.argv
    asyncio.run(write(url, int(events), random.Random(int(seed))))
