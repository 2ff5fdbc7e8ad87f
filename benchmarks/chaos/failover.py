"""A standby that lagged takes over from a primary that died.

What the primary acknowledged while nothing reached the standby is lost, and only that.
Submitters repeat what they have keys for, and a reader of events, whose cursor is ahead of
the log, is told and resumes: it has seen every event there is in the end.
"""

import asyncio
import itertools
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import asyncpg

from benchmarks.chaos.arena import PATIENCE_S, Arena, Ways, under_load, working
from benchmarks.chaos.verdict import NOTHING_HIT, RECOVERY_MAX_MS, Verdict, judge
from flowfabric import App, Engine, migrate
from flowfabric.errors import FlowFabricError, HistoryChanged
from tests.postgres import Server, create_database, start_bundled
from tests.silence import Network

NAME: Final = "lagging failover"
LAG_S: Final = 2.0
PROMOTION_S: Final = 60
READ_AGAIN_S: Final = 0.05


class EventReader:
    """Reads the log from its start, and remembers what it saw and how often it was told."""

    def __init__(self, engine: Engine) -> None:
        self.told = 0
        self.seen: set[tuple[int, str, int]] = set()
        self._engine = engine
        self._cursor = "0"

    async def run(self) -> None:
        while True:
            try:
                found = await self.read()
            except FlowFabricError:
                found = 0
            if not found:
                await asyncio.sleep(READ_AGAIN_S)

    async def read(self) -> int:
        try:
            page = await self._engine.read_events(after=self._cursor, limit=500)
        except HistoryChanged as changed:
            self.told += 1
            self._cursor = changed.resume_after
            return 0
        self._cursor = page.cursor
        self.seen |= {
            (each.event_id, each.execution_id, each.occurred_at_ms) for each in page.events
        }
        return len(page.events)

    async def read_all(self) -> None:
        while await self.read():
            pass


async def play() -> Verdict:
    async with AsyncExitStack() as stack:
        primary = await asyncio.to_thread(start_bundled, durable=True)
        stack.callback(primary.stop)
        url = await create_database(primary.url)
        await migrate(url)
        standby = await asyncio.to_thread(start_bundled, durable=True, standby_of=primary.url)
        stack.callback(standby.stop)
        network = await stack.enter_async_context(Network(url).open())
        app = await stack.enter_async_context(App(network.url))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ways = Ways((network.url,), network.url, network=network)
        ready = Arena(primary, network.url, app, ways, Path(folder) / "holds")
        within = await stack.enter_async_context(working(ready))
        return await _fail_over(within, standby, standby.url.rpartition("/")[0] + "/" + _name(url))


async def _fail_over(within: Arena, standby: Server, standby_url: str) -> Verdict:
    reader = EventReader(within.app.engine)
    reading = asyncio.create_task(reader.run())
    load = await under_load(within)
    had = set(within.acknowledged)
    await _hold_back(standby.url, await _position(within.server.url))
    await asyncio.sleep(LAG_S)
    fault_ms = time.time_ns() // 1_000_000
    await _switch(within, standby_url)
    lost = await _lost(within, standby_url)
    await load
    await _repeat(within)
    await within.reach(within.submitted)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await reader.read_all()
    final = EventReader(within.app.engine)
    await final.read_all()
    missed = final.seen - reader.seen
    problems = {
        NOTHING_HIT: not lost or not reader.told,
        f"{len(had & lost)} were lost that the standby had": bool(had & lost),
        f"{len(missed)} events were missed": bool(missed),
    }
    return await judge(
        within,
        NAME,
        fault_ms,
        lost=len(lost),
        found=[problem for problem, is_so in problems.items() if is_so],
        recovery_max_ms=RECOVERY_MAX_MS + round(LAG_S * 1_000),
        remark=f"reader told {reader.told}×, missed {len(missed)} of {len(final.seen):,} events",
    )


async def _position(url: str) -> object:
    """How far the primary has written."""
    connection = await asyncpg.connect(url)
    try:
        position: object = await connection.fetchval("select pg_current_wal_flush_lsn()::text")
        return position
    finally:
        await connection.close()


async def _hold_back(url: str, position: object) -> None:
    """Let nothing reach the standby any more once it has come that far."""
    connection = await asyncpg.connect(url)

    async def until(question: str, *args: object) -> None:
        async with asyncio.timeout(PATIENCE_S):
            for _ in itertools.count():
                if await connection.fetchval(question, *args):
                    return
                await asyncio.sleep(READ_AGAIN_S)

    try:
        await until("select pg_last_wal_replay_lsn() >= $1::text::pg_lsn", position)
        await connection.execute("alter system set primary_conninfo = ''")
        await connection.execute("select pg_reload_conf()")
        await until("select count(*) = 0 from pg_stat_wal_receiver")
    finally:
        await connection.close()


async def _switch(within: Arena, standby_url: str) -> None:
    """Kill the primary, promote the standby, and lead everybody there."""
    network = within.ways.network
    assert network is not None
    network.go_down()
    await asyncio.to_thread(within.server.stop)
    connection = await asyncpg.connect(standby_url)
    try:
        assert await connection.fetchval("select pg_promote(true, $1)", PROMOTION_S)
    finally:
        await connection.close()
    network.lead_to(standby_url)


async def _lost(within: Arena, standby_url: str) -> set[str]:
    """What was acknowledged and is not there, looked up before anybody is let in."""
    network = within.ways.network
    assert network is not None
    connection = await asyncpg.connect(standby_url)
    try:
        rows = await connection.fetch("select idempotency_key from flowfabric.idempotency_guard")
    finally:
        await connection.close()
    lost = within.acknowledged - {row[0] for row in rows}
    network.heal()
    return lost


async def _repeat(within: Arena) -> None:
    """Submit everything again: what is there is found by its key."""
    count, within.submitted = within.submitted, 0
    await within.submit(count)


def _name(url: str) -> str:
    return url.rpartition("/")[2]
