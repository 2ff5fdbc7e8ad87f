"""Subscribers that die and resume, over a log that is written in every way it can be.

Writers pause between writing and committing, roll back, and are cut off; a neighbour keeps a
transaction of its own open all the while. Every subscriber ends with what was committed: all of
it, in order, each event once.
"""

import asyncio
import random
from pathlib import Path

import asyncpg
import pytest

from tests.e2e import programs
from tests.e2e.programs import Program

EVENTS = 100_000
WRITERS = 8
READERS = 4
PATIENCE_S = 300
NEIGHBOUR = "neighbour"
CUT = f"""
select pg_terminate_backend(pid)
  from pg_stat_activity
 where datname = current_database()
   and pid <> pg_backend_pid()
   and application_name <> '{NEIGHBOUR}'
 order by random()
 limit 1
"""
COMMITTED = "select event_id from flowfabric.event_log order by event_id"
DISTURBANCES_MIN = 20
KILL_EVERY = 6
KEPT_UP_MIN = 20_000


async def start(module: str, *arguments: str) -> Program:
    return await programs.start(f"tests.e2e.{module}", *arguments, stderr=programs.NOWHERE)


async def end(process: Program) -> None:
    process.kill()
    await process.communicate()


class Readers:
    """Subscribers that are killed now and then, and go on where they were."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self.files = [folder / f"reader-{number}" for number in range(READERS)]
        self._running: list[Program] = []

    async def start(self) -> None:
        self._running = [await start("log_reader", self._url, str(each)) for each in self.files]

    async def kill(self, number: int) -> None:
        await end(self._running[number])
        self._running[number] = await start("log_reader", self._url, str(self.files[number]))

    async def finish(self, last_id: int) -> None:
        await self.close()
        self._running = [
            await start("log_reader", self._url, str(each), str(last_id)) for each in self.files
        ]
        for each in self._running:
            assert await each.wait() == 0

    async def close(self) -> None:
        for each in self._running:
            await end(each)


def seen(path: Path) -> list[int]:
    """The events of every whole line."""
    return [int(line.split()[0]) for line in path.read_text().split("\n")[:-1]]


@pytest.mark.timeout(PATIENCE_S + 60)
async def test_every_subscriber_gets_exactly_what_was_committed(
    postgres_database: str, tmp_path: Path
) -> None:
    url = postgres_database
    chance = random.Random(7)
    readers = Readers(url, tmp_path)
    neighbour = await asyncpg.connect(url, server_settings={"application_name": NEIGHBOUR})
    operator = await asyncpg.connect(url, server_settings={"application_name": NEIGHBOUR})
    writers: list[Program] = []
    disturbances = 0
    try:
        await neighbour.execute("create table own (n int)")
        await neighbour.execute("begin; insert into own values (1)")
        async with asyncio.timeout(PATIENCE_S):
            await readers.start()
            writers += [
                await start("log_writer", url, str(EVENTS // WRITERS), str(seed))
                for seed in range(WRITERS)
            ]
            writing = {asyncio.create_task(each.wait()) for each in writers}
            while writing:
                _, writing = await asyncio.wait(writing, timeout=chance.uniform(0.1, 0.5))
                await operator.execute(CUT)
                disturbances += 1
                if disturbances % KILL_EVERY == 0:
                    await readers.kill(chance.randrange(READERS))
            # Whoever is far behind does not meet what commits late.
            kept_up = [len(seen(path)) for path in readers.files]
            assert [each.returncode for each in writers] == [0] * WRITERS
            committed = [int(row[0]) for row in await operator.fetch(COMMITTED)]
            await readers.finish(committed[-1])
    finally:
        for each in writers:
            await end(each)
        await readers.close()
        await neighbour.close()
        await operator.close()
    assert disturbances >= DISTURBANCES_MIN
    assert max(kept_up) > KEPT_UP_MIN, kept_up
    assert len(committed) >= EVENTS
    for path in readers.files:
        assert seen(path) == committed
