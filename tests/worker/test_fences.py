"""Business rows inside a fence: once per run, however long their transaction takes."""

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable

import asyncpg
import psycopg
import psycopg2
import pytest

from flowfabric import App, Context, DoNotRetry, Retry
from flowfabric.core.ids import uuid_of
from flowfabric.errors import ExecutionFailed, LockTimeout
from tests.apps import working
from tests.transactions import in_transaction

LEASE_S = 1.0
LEASES = 3
"""How many times the lease a transaction lasts."""


def overdue_for_others(url: str, ctx: Context) -> None:
    """Wait until the lease, as others see it, is over for longer than it lasts."""
    ended = "select lease_expires_at_ms from {schema}live where execution_id = '{uuid}'"
    uuid = uuid_of(ctx.execution_id)
    while True:
        if url.startswith("postgres"):
            with psycopg.connect(url) as looking:
                found = looking.execute(ended.format(schema="flowfabric.", uuid=uuid)).fetchone()
        else:
            with sqlite3.connect(url.removeprefix("sqlite:///")) as file:
                found = file.execute(ended.format(schema="", uuid=uuid)).fetchone()
        assert found is not None
        if time.time() * 1_000 > found[0] + (LEASES - 1) * LEASE_S * 1_000:
            return


async def with_asyncpg(url: str, ctx: Context) -> None:
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction(), ctx.fence(connection):
            await connection.execute("insert into article values (1)")
            await asyncio.to_thread(overdue_for_others, url, ctx)
    finally:
        await connection.close()


async def with_psycopg(url: str, ctx: Context) -> None:
    def publish() -> None:
        with psycopg.connect(url) as connection, ctx.fence(connection):
            connection.execute("insert into article values (1)")
            overdue_for_others(url, ctx)

    await asyncio.to_thread(publish)


async def with_sqlite(url: str, ctx: Context) -> None:
    def publish() -> None:
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        with connection, ctx.fence(connection):
            connection.execute("insert into article values (1)")
            overdue_for_others(url, ctx)
        connection.close()

    await asyncio.to_thread(publish)


def create_table(url: str) -> None:
    if url.startswith("postgres"):
        with psycopg.connect(url) as connection:
            connection.execute("create table article (id int)")
    else:
        with sqlite3.connect(url.removeprefix("sqlite:///")) as file:
            file.execute("create table article (id int)")


def count_rows(url: str) -> object:
    if url.startswith("postgres"):
        with psycopg.connect(url) as connection:
            found = connection.execute("select count(*) from article").fetchone()
    else:
        with sqlite3.connect(url.removeprefix("sqlite:///")) as file:
            found = file.execute("select count(*) from article").fetchone()
    assert found is not None
    return found[0]


@pytest.mark.parametrize("publishing", [with_asyncpg, with_psycopg, with_sqlite])
async def test_a_fence_longer_than_the_lease_commits_once_and_the_run_completes(
    app: App, publishing: Callable[[str, Context], Awaitable[None]]
) -> None:
    of_sqlite = publishing is with_sqlite
    if app.url.endswith(":memory:") or of_sqlite is not app.url.startswith("sqlite"):
        return

    @app.task
    async def publish(ctx: Context) -> int:
        await publishing(app.url, ctx)
        return ctx.attempt_index

    async with app:
        create_table(app.url)
        async with working(app, lease_ttl=LEASE_S):
            run = await app.submit(publish)
            assert await run.result(timeout="30s") == 0
        assert count_rows(app.url) == 1
        assert (await run.snapshot()).lease_reclaim_count == 0


async def terminated_asyncpg(url: str, ctx: Context) -> None:
    connection = await asyncpg.connect(url)
    async with connection.transaction(), ctx.fence(connection):
        pass
    connection.terminate()


async def asyncpg_terminated_inside(url: str, ctx: Context) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute("begin")
    async with ctx.fence(connection):
        connection.terminate()
        raise DoNotRetry("mine")


async def closed_asyncpg(url: str, ctx: Context) -> None:
    connection = await asyncpg.connect(url)
    async with connection.transaction(), ctx.fence(connection):
        pass
    await connection.close()


async def closed_asyncpg_pool(url: str, ctx: Context) -> None:
    async with (
        asyncpg.create_pool(url, min_size=1, max_size=1) as pool,
        pool.acquire() as own,
        own.transaction(),
        ctx.fence(own),
    ):
        pass


async def closed_psycopg(url: str, ctx: Context) -> None:
    async with await psycopg.AsyncConnection.connect(url) as connection, ctx.fence(connection):
        pass


async def closed_psycopg2(url: str, ctx: Context) -> None:
    connection = psycopg2.connect(url)
    with ctx.fence(connection):
        pass
    connection.close()


@pytest.mark.parametrize(
    "ended",
    [
        terminated_asyncpg,
        asyncpg_terminated_inside,
        closed_asyncpg,
        closed_asyncpg_pool,
        closed_psycopg,
        closed_psycopg2,
    ],
)
async def test_a_handler_that_has_ended_its_connection_fails_with_its_own_error(
    postgres_database: str, ended: Callable[[str, Context], Awaitable[None]]
) -> None:
    app = App(postgres_database)

    @app.task(retry=Retry(max_retries=3))
    async def work(ctx: Context) -> None:
        await ended(app.url, ctx)
        raise DoNotRetry("mine")

    async with app, working(app):
        run = await app.submit(work)
        with pytest.raises(ExecutionFailed, match="mine"):
            await run.result(timeout="20s")
        shown = await run.snapshot()
        assert (shown.retry_count, shown.total_attempt_count) == (0, 1)


@pytest.fixture(params=["sqlite-file", "postgres"])
def shared_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    """A database that connections of the user's can reach."""
    return new_database(request.param)


async def say_how_far(ctx: Context, app: App) -> None:
    await ctx.progress(50)


async def make_a_waitpoint(ctx: Context, app: App) -> None:
    await ctx.waitpoint("go")


async def take_a_step(ctx: Context, app: App) -> None:
    def effect() -> None:
        raise AssertionError("it is refused before anything runs")

    await ctx.step("inside", effect)


async def ask_for_the_time(ctx: Context, app: App) -> None:
    await ctx.now()


async def submit_a_child(ctx: Context, app: App) -> None:
    await ctx.submit(app.tasks["publish"]())


async def say_so_from_a_thread(ctx: Context, app: App) -> None:
    await asyncio.to_thread(ctx.blocking.progress, 50)


async def open_another_fence(ctx: Context, app: App) -> None:
    async with in_transaction(app.url) as connection, ctx.fence(connection):
        raise AssertionError("one is open already")


VERBS = (
    say_how_far,
    make_a_waitpoint,
    take_a_step,
    ask_for_the_time,
    submit_a_child,
    say_so_from_a_thread,
    open_another_fence,
)


@pytest.mark.parametrize("verb", VERBS)
async def test_a_verb_that_would_wait_for_the_fence_around_it_is_refused_at_once(
    shared_url: str, verb: Callable[[Context, App], Awaitable[None]]
) -> None:
    app = App(shared_url)

    @app.task
    async def publish(ctx: Context) -> None:
        async with in_transaction(shared_url) as connection, ctx.fence(connection):
            await verb(ctx, app)

    async with app, working(app):
        run = await app.submit(publish)
        with pytest.raises(ExecutionFailed, match=r"cannot be used inside a fence|is already open"):
            await run.result(timeout="20s")


async def test_after_a_fence_every_verb_works_again(shared_url: str) -> None:
    app = App(shared_url)

    @app.task
    async def publish(ctx: Context) -> int:
        for _ in range(2):
            async with in_transaction(shared_url) as connection, ctx.fence(connection):
                pass
            await ctx.progress(50)
        return await ctx.step("outside", lambda: 7)

    async with app, working(app):
        assert await (await app.submit(publish)).result(timeout="20s") == 7


async def test_a_fence_waits_for_that_of_another_branch_however_long_it_lasts(
    postgres_database: str,
) -> None:
    """Longer than a fence waits before it asks again."""
    app = App(postgres_database)
    order: list[str] = []
    entered = asyncio.Event()

    async def first(ctx: Context) -> None:
        async with in_transaction(postgres_database) as connection, ctx.fence(connection):
            entered.set()
            await asyncio.to_thread(overdue_for_others, postgres_database, ctx)
            order.append("first")

    async def second(ctx: Context) -> None:
        await entered.wait()
        async with in_transaction(postgres_database) as connection, ctx.fence(connection):
            order.append("second")

    @app.task
    async def publish(ctx: Context) -> None:
        await asyncio.gather(first(ctx), second(ctx))

    async with app, working(app, lease_ttl=LEASE_S):
        run = await app.submit(publish)
        await run.result(timeout="60s")
    assert order == ["first", "second"]


async def test_waiting_for_the_fences_of_other_branches_is_no_outage(
    postgres_database: str,
) -> None:
    """Together they last longer than one statement may take."""
    app = App(postgres_database)
    runs = 0

    async def insert(ctx: Context, number: int) -> int:
        connection = await asyncpg.connect(postgres_database)
        try:
            async with connection.transaction(), ctx.fence(connection):
                await connection.execute("insert into article values ($1)", number)
                await connection.execute("select pg_sleep(0.8)")
        finally:
            await connection.close()
        return number

    @app.task
    async def publish(ctx: Context) -> list[int]:
        nonlocal runs
        runs += 1
        return await asyncio.gather(*(insert(ctx, number) for number in range(6)))

    async with app, working(app, lease_ttl=LEASE_S):
        create_table(postgres_database)
        run = await app.submit(publish)
        assert await run.result(timeout="60s") == list(range(6))
    assert (runs, count_rows(postgres_database)) == (1, 6)


async def test_fences_in_threads_take_turns_with_those_of_branches(postgres_database: str) -> None:
    app = App(postgres_database)
    inside = most = 0

    async def in_branch(ctx: Context) -> None:
        nonlocal inside, most
        async with in_transaction(postgres_database) as connection, ctx.fence(connection):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    def in_thread(ctx: Context) -> None:
        nonlocal inside, most
        with psycopg.connect(postgres_database) as connection, ctx.fence(connection):
            inside += 1
            most = max(most, inside)
            connection.execute("select pg_sleep(0.01)")
            inside -= 1

    @app.task
    async def publish(ctx: Context) -> None:
        threads = (asyncio.to_thread(in_thread, ctx) for _ in range(4))
        await asyncio.gather(*threads, *(in_branch(ctx) for _ in range(4)))

    async with app, working(app):
        await (await app.submit(publish)).result(timeout="20s")
    assert (inside, most) == (0, 1)


async def test_what_needs_the_run_during_a_long_fence_is_told_of_the_lock_and_of_no_outage(
    postgres_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(postgres_database)
    entered, over = asyncio.Event(), asyncio.Event()

    @app.task
    async def publish(ctx: Context) -> None:
        async with in_transaction(postgres_database) as connection, ctx.fence(connection):
            entered.set()
            await over.wait()

    async with app, working(app):
        run = await app.submit(publish)
        await entered.wait()
        # Whoever comes second waits for the first one, and then for the fence.
        asked = await asyncio.gather(
            run.cancel("stop"),
            *(run.signal("go", number) for number in range(3)),
            return_exceptions=True,
        )
        over.set()
        assert [type(each) for each in asked] == [LockTimeout] * 4
        assert "perhaps a fence, and is still open; try again" in str(asked[1])
        await run.result(timeout="20s")
    assert "does not answer" not in caplog.text
