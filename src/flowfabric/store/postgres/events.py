"""Reading the event log without missing an event.

Ids are handed out when a row is inserted and seen when it commits, so a reader
can meet 7 before 6 exists. A missing id is either still to come or was rolled
back. A transaction that was given an id holds a write lock on the table until its
transaction is over, and gives it up only after its rows can be seen. So: look
who holds one now, wait for exactly those to end, look again. What is missing
below the highest id seen before that will never come. Transactions that do not
write events, and those that start later, are never waited for.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from flowfabric.core.events import Cursor, LogEnd
from flowfabric.outages import patience_s, statements_within
from flowfabric.store.base import EventPage, Parameter, Row
from flowfabric.store.mapping import EVENTS_MAX, WINDOW, EventWindow, log_end, page, values_of
from flowfabric.store.postgres.statements import SCHEMA

LOOK_FIRST_S: Final = 0.002
LOOK_MAX_S: Final = 0.05
FINAL_S: Final = 1.0
"""How long that is relied on: another server may take over, with a log that ends earlier."""
END_WAIT_S: Final = 0.2
"""How long the end of the log waits for those who write now: then nothing has to be left out."""
READ_TIMEOUT_S: Final = 10.0
"""How long a statement of a reader may take: it notices a silent network as a worker does."""

WRITERS: Final = f"""
select distinct virtualtransaction
  from pg_catalog.pg_locks
 where locktype = 'relation'
   and relation = '{SCHEMA}.event'::regclass
   and database = (select oid from pg_catalog.pg_database where datname = current_database())
   and mode = 'RowExclusiveLock'
   and granted
"""


class Select(Protocol):
    """Runs one named statement by itself; nothing is held between two of them."""

    async def __call__(self, name: str, /, **parameters: Parameter) -> Sequence[Row]: ...


class EventLog:
    """The log as its readers see it: complete up to some id."""

    def __init__(self, select: Select, writers: Callable[[], Awaitable[frozenset[str]]]) -> None:
        self._select = select
        self._writers = writers
        self._final_id = 0
        """Up to here nothing more can appear, as was found a moment ago."""
        self._final_until_s = 0.0

    async def page(
        self, *, after: int, limit: int, category: str | None, wait_s: float
    ) -> EventPage:
        assert 0 < limit <= EVENTS_MAX, f"a page has 1 to {EVENTS_MAX} events"
        window = limit if category is None else WINDOW
        with statements_within(patience_s(READ_TIMEOUT_S) or READ_TIMEOUT_S):
            through = await self._complete_through(after, window, wait_s)
            if through == after:
                return EventPage(events=(), cursor=after)
            rows = await self._select(
                "read_events", after=after, through=through, category=category, limit=limit
            )
        return page(rows, through=through, limit=limit)

    async def end(self) -> LogEnd:
        """After the last id there is, if none below it can still be filled; else before those."""
        (last_id,) = values_of(int, await self._select("last_event"))
        if await self._end_within(END_WAIT_S):
            return LogEnd(after=Cursor(last_id), last_id=last_id)
        return log_end(await self._select("event_end"))

    async def _end_within(self, wait_s: float) -> bool:
        """Whether all who write now have ended by then."""
        deadline = time.monotonic() + wait_s
        pause_s = LOOK_FIRST_S
        writers = await self._writers()
        while writers and time.monotonic() + pause_s < deadline:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LOOK_MAX_S)
            writers &= await self._writers()
        return not writers

    async def _complete_through(self, after: int, window: int, wait_s: float) -> int:
        """The id up to which nothing more can appear; `after` if the next one still may."""
        if after < self._final_id and time.monotonic() < self._final_until_s:
            return self._final_id
        found = await self._window(after, window)
        if found.unbroken > after or found.last == after:
            return found.unbroken
        # One wait is enough for all that is missing by now.
        last = (await self._window(after, WINDOW)).last
        deadline = time.monotonic() + wait_s
        pause_s = LOOK_FIRST_S
        writers = await self._writers()
        while True:
            found = await self._window(after, window)
            if found.unbroken > after:
                return found.unbroken
            if not writers:
                self._final_id, self._final_until_s = last, time.monotonic() + FINAL_S
                return last
            if time.monotonic() + pause_s > deadline:
                return after
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LOOK_MAX_S)
            writers &= await self._writers()

    async def _window(self, after: int, window: int) -> EventWindow:
        rows = await self._select("event_window", after=after, window=window)
        (found,) = values_of(EventWindow, rows)
        return found
