"""Taking part in the caller's own transaction, and waking whoever waits for an execution."""

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import asyncpg
import psycopg
import pytest
from msgspec import structs

from flowfabric import Engine
from flowfabric.core.bounds import FENCE_MS_MAX, ROUTE_KEEP_MS
from flowfabric.core.creation import NewExecution
from flowfabric.core.results import Created
from flowfabric.core.states import PublicState
from flowfabric.engine.shell import Swept
from flowfabric.errors import IdempotencyConflict, InvalidInput, LeaseExpired
from flowfabric.testing import SettableClock
from tests.conformance.auditing import complaints_of
from tests.conformance.given import NOBODY, WORKER, Given

Connected = Callable[
    [], AbstractAsyncContextManager[tuple[object, Callable[[str], Awaitable[None]]]]
]
WORK = NewExecution(execution_kind="joined")


@pytest.fixture
def connected(store_url: str) -> Connected:
    """A connection of the user's own, in a transaction, and a way to end it."""
    if store_url.startswith("postgres"):
        return lambda: _postgres(store_url)
    return lambda: _sqlite(store_url.removeprefix("sqlite:///"))


@asynccontextmanager
async def _postgres(url: str) -> AsyncIterator[tuple[object, Callable[[str], Awaitable[None]]]]:
    connection = await asyncpg.connect(url)

    async def end(how: str) -> None:
        await connection.execute(how)

    try:
        await connection.execute("begin")
        yield connection, end
    finally:
        await connection.close()


@asynccontextmanager
async def _sqlite(path: str) -> AsyncIterator[tuple[object, Callable[[str], Awaitable[None]]]]:
    connection = sqlite3.connect(path, isolation_level=None)

    async def end(how: str) -> None:
        connection.execute(how)

    try:
        connection.execute("begin immediate")
        yield connection, end
    finally:
        connection.close()


@pytest.mark.parametrize(("how", "exists"), [("commit", True), ("rollback", False)])
async def test_executions_exist_if_and_when_the_caller_commits(
    engine: Engine, connected: Connected, store_url: str, how: str, exists: bool
) -> None:
    async with connected() as (connection, end):
        if store_url.endswith(":memory:"):
            with pytest.raises(InvalidInput, match="connection"):
                await engine.create_executions_on(connection, [WORK])
            return
        (created,) = await engine.create_executions_on(connection, [WORK])
        assert isinstance(created, Created)
        assert await engine.read_execution_state(created.execution_id) is None
        await end(how)
    state = await engine.read_execution_state(created.execution_id)
    assert state == (PublicState.WAITING if exists else None)


@pytest.mark.parametrize(
    "bad",
    [
        NewExecution(execution_kind="joined", namespace="shop", execution_id=NOBODY),
        NewExecution(execution_kind="joined", idempotency_key="k", strict=True, input_payload=b"2"),
        NewExecution(execution_kind="other", execution_id=NOBODY, strict=True),
    ],
    ids=["of another namespace", "another payload under its key", "another kind under its id"],
)
async def test_what_is_refused_leaves_nothing_in_the_callers_transaction(
    engine: Engine, connected: Connected, store_url: str, bad: NewExecution
) -> None:
    """It may go on: what it has written besides is committed."""
    if store_url.endswith(":memory:"):
        return
    known = structs.replace(WORK, execution_id=NOBODY, idempotency_key="k")
    fresh = structs.replace(WORK, idempotency_key="fresh")
    await engine.create_executions([known])
    await engine.know_routes([engine.check_request(each) for each in (bad, fresh)])
    async with connected() as (connection, end):
        with pytest.raises(IdempotencyConflict):
            await engine.create_executions_on(connection, [fresh, bad])
        (kept,) = await engine.create_executions_on(connection, [fresh])
        await end("commit")
    assert isinstance(kept, Created)
    page = await engine.find_executions()
    assert {each.execution_id for each in page.executions} == {
        kept.execution_id,
        engine.check_execution_id(NOBODY),
    }
    assert await complaints_of(engine) == []


@pytest.mark.parametrize("sync", [False, True])
async def test_a_kind_that_was_forgotten_is_registered_again_for_the_callers_transaction(
    engine: Engine,
    clock: SettableClock,
    connected: Connected,
    store_url: str,
    sync: bool,
) -> None:
    if store_url.endswith(":memory:"):
        return
    await engine.know_routes([engine.check_request(WORK)])
    clock.advance(ms=ROUTE_KEEP_MS)
    assert await engine.trim_routes() == Swept(acted=1, full=False)
    if sync and store_url.startswith("postgres"):
        with psycopg.connect(store_url) as connection:
            (created,) = engine.create_executions_on_sync(connection, [WORK])
    else:
        async with connected() as (own, end):
            (created,) = (
                engine.create_executions_on_sync(own, [WORK])
                if sync
                else await engine.create_executions_on(own, [WORK])
            )
            await end("commit")
    claimed = await engine.claim(**WORKER)
    assert claimed is not None
    assert claimed.execution_id == created.execution_id
    assert await complaints_of(engine) == []


async def test_a_fence_keeps_the_lease_for_as_long_as_the_callers_transaction_lasts(
    engine: Engine, given: Given, clock: SettableClock, connected: Connected, store_url: str
) -> None:
    held = await given.running(ttl_ms=1_000)
    async with connected() as (connection, end):
        if store_url.endswith(":memory:"):
            with pytest.raises(InvalidInput, match="connection"):
                await engine.enter_fence_on(connection, held.handle)
            return
        await engine.enter_fence_on(connection, held.handle)
        clock.advance(ms=5_000)
        await engine.leave_fence_on(connection, held.handle)
        await end("commit")
    assert await engine.expire_due_leases() == Swept(acted=0, full=False)
    await engine.complete(held.handle, b"done")
    assert await engine.get_execution_result(held.execution_id) == b"done"


async def test_a_fence_that_was_rolled_back_has_kept_nothing(
    engine: Engine, given: Given, clock: SettableClock, connected: Connected, store_url: str
) -> None:
    if store_url.endswith(":memory:"):
        return
    held = await given.running(ttl_ms=1_000)
    async with connected() as (connection, end):
        await engine.enter_fence_on(connection, held.handle)
        clock.advance(ms=1_000)
        await engine.leave_fence_on(connection, held.handle)
        await end("rollback")
    with pytest.raises(LeaseExpired):
        await engine.complete(held.handle, b"too late")


async def test_nobody_enters_a_fence_without_a_lease(
    engine: Engine, given: Given, clock: SettableClock, connected: Connected, store_url: str
) -> None:
    if store_url.endswith(":memory:"):
        return
    held = await given.running(ttl_ms=1_000)
    clock.advance(ms=1_000)
    async with connected() as (connection, _):
        with pytest.raises(LeaseExpired):
            await engine.enter_fence_on(connection, held.handle)


async def test_a_transaction_that_takes_longer_than_a_fence_may_last_is_refused_at_its_end(
    engine: Engine, given: Given, clock: SettableClock, connected: Connected, store_url: str
) -> None:
    if store_url.endswith(":memory:"):
        return
    held = await given.running(ttl_ms=1_000)
    async with connected() as (connection, _):
        await engine.enter_fence_on(connection, held.handle)
        clock.advance(ms=FENCE_MS_MAX)
        with pytest.raises(LeaseExpired):
            await engine.leave_fence_on(connection, held.handle)


async def test_a_connection_that_is_not_async_joins_on_the_calling_thread(
    engine: Engine, given: Given, connected: Connected, store_url: str
) -> None:
    held = await given.running()
    async with connected() as (connection, end):
        if not store_url.startswith("sqlite") or store_url.endswith(":memory:"):
            with pytest.raises(InvalidInput, match="connection"):
                engine.create_executions_on_sync(connection, [WORK])
            with pytest.raises(InvalidInput, match="connection"):
                engine.enter_fence_on_sync(connection, held.handle)
            return
        engine.enter_fence_on_sync(connection, held.handle)
        engine.leave_fence_on_sync(connection, held.handle)
        (created,) = engine.create_executions_on_sync(connection, [WORK])
        await end("commit")
    assert await engine.read_execution_state(created.execution_id) is PublicState.WAITING


async def test_checked_requests_are_created_as_they_are(engine: Engine) -> None:
    checked = engine.check_request(WORK)
    assert await engine.create_checked([checked]) == [
        Created(execution_id=checked.execution_id, public_state=PublicState.WAITING)
    ]


async def test_whoever_waits_is_woken_when_the_awaited_has_ended(
    engine: Engine, given: Given
) -> None:
    parent = await given.running()
    child = await given.running()
    await engine.await_executions(parent.handle, [child.execution_id])
    assert await engine.wake_awaiting() == Swept(acted=0, full=False)
    await engine.complete(child.handle)
    assert await engine.wake_awaiting() == Swept(acted=1, full=False)
    assert await engine.read_execution_state(parent.execution_id) is PublicState.WAITING
    assert await engine.wake_awaiting() == Swept(acted=0, full=False)
