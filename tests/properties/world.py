"""An engine that synchronous properties can drive, and everything it has stored.

`World` owns an event loop, a clock that stands still and an engine. Each example of a
property starts in a store without executions; routes and past events stay.
"""

import asyncio
import os
from collections.abc import Coroutine, Iterable
from typing import TypeVar

from msgspec import Struct, structs

from flowfabric import Engine, EngineConfig, connect
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.decisions import Changes, Subject
from flowfabric.core.events import START, Event, StoredEvent
from flowfabric.core.flow_records import CompletionDispatch
from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import Attempt, Execution, Record, StoredGrant, first_attempt
from flowfabric.engine.shell import execution_key
from flowfabric.store.base import Reader, Transaction
from flowfabric.testing import SettableClock

T = TypeVar("T")

START_MS = 1_700_000_000_000
RETENTION_MS = 5_000
THOROUGH = "FLOWFABRIC_TEST_THOROUGH"
THOROUGH_TIMES = 20
POSTGRES_COSTS = 5
"""How many examples in memory take as long as one over a connection."""
IN_MEMORY = "sqlite:///:memory:"


class Life(Struct, frozen=True, kw_only=True):
    """Every row of one execution."""

    execution: Execution
    attempts: tuple[Attempt, ...]
    grant: StoredGrant | None
    dispatches: tuple[CompletionDispatch, ...] = ()
    """Endings its dependents have not been told of."""

    @property
    def subject(self) -> Subject:
        """What an operation locks before it decides about this execution."""
        current = self.attempts[self.execution.current_attempt_index] if self.attempts else None
        # Whatever else happens to it leaves its grant behind, which ends by itself.
        grant = None if self.execution.granted_until_ms is None else self.grant
        return Subject(execution=self.execution, attempt=current, grant=grant)

    def after(self, changes: Changes) -> "Life":
        """The rows once `changes`, which concern this execution alone, are saved."""
        attempts = {attempt.attempt_index: attempt for attempt in self.attempts}
        life = self
        for record in (*changes.inserts, *changes.updates):
            match record:
                case Execution():
                    life = structs.replace(life, execution=record)
                case Attempt():
                    attempts[record.attempt_index] = record
                case StoredGrant():
                    life = structs.replace(life, grant=record)
                case CompletionDispatch():
                    life = structs.replace(life, dispatches=(*life.dispatches, record))
                case _:
                    raise AssertionError(f"no place for a {type(record).__name__}")
        if any(isinstance(record, StoredGrant) for record in changes.deletes):
            life = structs.replace(life, grant=None)
        stored = tuple(attempts[i] for i in sorted(attempts))
        return structs.replace(life, attempts=stored or implied(life.execution))


def implied(execution: Execution) -> tuple[Attempt, ...]:
    """The attempt that has no row of its own, if there is one."""
    first = first_attempt(execution)
    return () if first is None else (first,)


Lives = dict[ExecutionId, Life]


class World:
    """Use as a context; call `begin` before each example."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.config = EngineConfig(keep=RETENTION_MS / 1_000, keep_failed=RETENTION_MS / 1_000)
        self.clock = SettableClock(START_MS)
        self._loop = asyncio.new_event_loop()
        self._engine: Engine | None = None
        self._cursor = START

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._engine is not None:
            self.run(self._engine.close())
        self._loop.close()

    def examples(self, usual: int) -> int:
        """How many examples to try here: more when the environment asks for thoroughness."""
        affordable = usual if self.url == IN_MEMORY else usual // POSTGRES_COSTS
        return affordable * THOROUGH_TIMES if os.environ.get(THOROUGH) else affordable

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "no example has begun"
        return self._engine

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def run(self, work: Coroutine[object, object, T]) -> T:
        return self._loop.run_until_complete(work)

    def begin(self) -> None:
        """Start from a store without executions, at `START_MS`."""
        self.clock.set_ms(START_MS)
        self.run(self._begin())

    async def _begin(self) -> None:
        if self._engine is None:
            self._engine = await connect(self.url, config=self.config, clock=self.clock)
        page = await self._engine.find_executions(limit=PAGE_MAX)
        assert page.next_cursor is None
        await self._delete([snapshot.execution_id for snapshot in page.executions])
        # The clock goes back between two histories, so that retention leaves a log with gaps.
        self._cursor = START
        await self._read_new_events()

    async def _delete(self, execution_ids: list[ExecutionId]) -> None:
        lives = (await self.lives(execution_ids)).values()
        rows: list[Record] = [life.execution for life in lives]
        rows += [attempt for life in lives for attempt in life.attempts]
        rows += [life.grant for life in lives if life.grant is not None]

        async def body(tx: Transaction) -> None:
            await tx.save(Changes(deletes=tuple(rows)))

        await self.engine.store.transact(body)

    def look(self, execution_ids: Iterable[ExecutionId]) -> tuple[Lives, list[Event]]:
        """Every row of the executions that exist, and the events since the last look."""
        return self.run(self._look(list(execution_ids)))

    async def _look(self, execution_ids: list[ExecutionId]) -> tuple[Lives, list[Event]]:
        return await self.lives(execution_ids), await self._read_new_events()

    async def lives(self, execution_ids: list[ExecutionId]) -> Lives:
        """Every row of the executions that exist."""
        keys = [execution_key(execution_id) for execution_id in execution_ids]

        async def body(reader: Reader) -> Lives:
            executions = await reader.get(Execution, keys)
            grants = await reader.get(StoredGrant, keys)
            lives: Lives = {}
            for key, execution in executions.items():
                attempts = await reader.select_records(
                    Attempt,
                    "list_attempts",
                    partition_key=execution.partition_key,
                    execution_id=execution.execution_id[-36:],
                )
                lives[execution.execution_id] = Life(
                    execution=execution,
                    attempts=tuple(attempts) or implied(execution),
                    grant=grants.get(key),
                    dispatches=await _dispatches(reader, execution),
                )
            return lives

        return await self.engine.store.read(body)

    async def _read_new_events(self) -> list[Event]:
        found: list[StoredEvent] = []
        while True:
            page = await self.engine.read_events(after=self._cursor, limit=PAGE_MAX)
            self._cursor = page.cursor
            found += page.events
            if len(page.events) < PAGE_MAX:
                return [_without_id(event) for event in found]


async def _dispatches(reader: Reader, execution: Execution) -> tuple[CompletionDispatch, ...]:
    if execution.flow_id is None:
        return ()
    home = (execution.partition_key, execution.flow_id, execution.execution_id)
    found = await reader.get(
        CompletionDispatch, [(*home, life) for life in range(execution.replay_count + 1)]
    )
    return tuple(found[key] for key in sorted(found))


def _without_id(event: StoredEvent) -> Event:
    fields = structs.asdict(event)
    del fields["event_id"]
    return Event(**fields)
