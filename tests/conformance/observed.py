"""The whole state of a store, and what an operation made of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
from msgspec import Struct, structs

from flowfabric import Engine, FlowFabricError
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.events import Event, StoredEvent
from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import Attempt, Execution, Lane, StoredGrant
from flowfabric.engine.shell import execution_key
from flowfabric.errors import InvalidInput
from flowfabric.store.base import Key, Reader

E = TypeVar("E", bound=FlowFabricError)


class Rows(Struct, frozen=True, kw_only=True):
    executions: dict[Key, Execution]
    attempts: dict[Key, Attempt]
    grants: dict[Key, StoredGrant]


class State(Struct, frozen=True, kw_only=True):
    executions: dict[Key, Execution]
    tags: dict[ExecutionId, dict[str, str]]
    attempts: dict[Key, Attempt]
    grants: dict[Key, StoredGrant]
    lanes: tuple[Lane, ...]
    events: tuple[StoredEvent, ...]


async def state_of(engine: Engine) -> State:
    """Everything there is, for tests with no more of it than fits on a page."""
    page = await engine.find_executions(limit=PAGE_MAX)
    assert page.next_cursor is None
    tags = {snapshot.execution_id: snapshot.tags for snapshot in page.executions}
    keys = [execution_key(execution_id) for execution_id in tags]
    # One index more than were counted: an attempt too many would show.
    attempt_keys = [
        (*execution_key(snapshot.execution_id), index)
        for snapshot in page.executions
        for index in range(snapshot.total_attempt_count + 1)
    ]

    async def body(reader: Reader) -> Rows:
        return Rows(
            executions=await reader.get(Execution, keys),
            attempts=await reader.get(Attempt, attempt_keys),
            grants=await reader.get(StoredGrant, keys),
        )

    rows = await engine.store.read(body)
    return State(
        executions=rows.executions,
        tags=tags,
        attempts=rows.attempts,
        grants=rows.grants,
        lanes=(await engine.list_lanes(limit=PAGE_MAX)).lanes,
        events=(await engine.read_events(limit=PAGE_MAX)).events,
    )


async def execution_of(engine: Engine, execution_id: str) -> Execution:
    """The stored record, for tests that look at more of it than users see."""
    key = execution_key(engine.check_execution_id(execution_id))

    async def body(reader: Reader) -> Execution:
        return (await reader.get(Execution, [key]))[key]

    return await engine.store.read(body)


def without_id(event: StoredEvent) -> Event:
    """The event as it was appended: ids differ from store to store."""
    fields = structs.asdict(event)
    del fields["event_id"]
    return Event(**fields)


async def cursor_of(engine: Engine) -> str:
    """The end of the event log."""
    return (await engine.read_events(limit=PAGE_MAX)).cursor


async def events_since(engine: Engine, cursor: str | int = 0) -> list[Event]:
    page = await engine.read_events(after=cursor, limit=PAGE_MAX)
    return [without_id(event) for event in page.events]


@asynccontextmanager
async def unchanged(engine: Engine) -> AsyncIterator[None]:
    """Nothing is written inside."""
    before = await state_of(engine)
    yield
    assert await state_of(engine) == before


@asynccontextmanager
async def refused(engine: Engine, error: type[E]) -> AsyncIterator[pytest.ExceptionInfo[E]]:
    """`error` is raised inside, and nothing is written."""
    async with unchanged(engine):
        with pytest.raises(error) as caught:
            yield caught


async def call(engine: Engine, operation: str, *arguments: object, **named: object) -> object:
    """Call an operation with any arguments, also of a wrong type."""
    return await getattr(engine, operation)(*arguments, **named)


async def refuses(
    engine: Engine, field: str, operation: str, *arguments: object, **named: object
) -> None:
    """Bad input is refused and `field` named. Arguments may be of a wrong type.

    Put it inside `unchanged`: one look at the store serves a whole table.
    """
    asked = f"{operation}(*{arguments}, **{named})"
    refusal = None
    try:
        await call(engine, operation, *arguments, **named)
    except InvalidInput as error:
        refusal = error
    assert refusal is not None, f"{asked} was not refused"
    assert refusal.field == field, f"{asked}: {refusal}"
