"""A database that goes away while a handler works: nothing of that counts against its run."""

import asyncio
import gc
import logging
import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path

import asyncpg
import psycopg
import psycopg2
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from flowfabric import App, Context, testing
from flowfabric.core.states import PublicState
from flowfabric.errors import BackendErrorKind, ExecutionFailed, Transport
from flowfabric.outages import Outages
from flowfabric.worker import attempt
from tests.apps import working
from tests.silence import Network

# Longer than any test has patience: none of them is saved by a lease that expires.
LEASE_TTL = "1h"
FILL_THE_DISK = """
create function full_disk() returns trigger language plpgsql as
$$ begin raise exception 'could not extend file' using errcode = '53100'; end $$;
create trigger full_disk before insert on flowfabric.execution
   for each row execute function full_disk();
"""


@pytest.fixture
async def network(postgres_database: str) -> AsyncIterator[Network]:
    async with Network(postgres_database).open() as opened:
        yield opened


async def say_how_far(app: App, ctx: Context) -> object:
    await ctx.progress(50, "half")
    return None


async def submit_a_child(app: App, ctx: Context) -> object:
    child = await ctx.submit(app.tasks["echo"](7))
    return await child.result()


async def make_a_waitpoint(app: App, ctx: Context) -> object:
    return str(await ctx.waitpoint("go"))


async def take_a_step(app: App, ctx: Context) -> object:
    return await ctx.step("double", lambda: 14)


async def submit_through_the_app(app: App, ctx: Context) -> object:
    return (await app.submit(app.tasks["echo"](7))).execution_id


async def submit_inside_a_step(app: App, ctx: Context) -> object:
    async def submit() -> str:
        return (await app.submit(app.tasks["echo"](7))).execution_id

    return await ctx.step("submit", submit)


async def sleep(app: App, ctx: Context) -> object:
    await ctx.sleep(0.01)
    return None


async def wait_for_a_signal(app: App, ctx: Context) -> object:
    return await ctx.wait_for_signal("go", timeout=0.01, default=None)


async def ask_for_the_time(app: App, ctx: Context) -> object:
    return await ctx.now()


async def ask_for_a_patch(app: App, ctx: Context) -> object:
    return await ctx.patched("new prices")


async def look_at_its_tags(app: App, ctx: Context) -> object:
    return await ctx.tags()


async def return_at_once(app: App, ctx: Context) -> object:
    return None


VERBS = (
    sleep,
    wait_for_a_signal,
    ask_for_the_time,
    ask_for_a_patch,
    look_at_its_tags,
    return_at_once,
    say_how_far,
    submit_a_child,
    make_a_waitpoint,
    take_a_step,
    submit_through_the_app,
    submit_inside_a_step,
)


@pytest.mark.parametrize("verb", VERBS)
async def test_an_outage_under_a_verb_does_not_count_against_the_run(
    network: Network, verb: Callable[[App, Context], Awaitable[object]]
) -> None:
    app = App(network.url)
    begun, go_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def echo(number: int) -> int:
        return number

    @app.task
    async def work(ctx: Context) -> str:
        begun.set()
        await go_on.wait()
        await verb(app, ctx)
        return "done"

    async with app, working(app, lease_ttl=LEASE_TTL):
        run = await app.submit(work)
        await begun.wait()
        network.go_down()
        go_on.set()
        await network.was_tried(5)
        network.heal()
        assert await run.result(timeout="20s") == "done"
        shown = await run.snapshot()
        assert (shown.public_state, shown.retry_count, shown.lease_reclaim_count) == (
            PublicState.COMPLETED,
            0,
            0,
        )


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_fence_that_meets_an_outage_does_not_count_against_the_run(
    network: Network, driver: str
) -> None:
    app = App(network.url)
    connected: asyncio.Queue[None] = asyncio.Queue()
    go_on = asyncio.Event()

    @app.task
    async def work(ctx: Context) -> str:
        if driver == "asyncpg":
            connection = await asyncpg.connect(network.url)
            try:
                async with connection.transaction():
                    connected.put_nowait(None)
                    await go_on.wait()
                    async with ctx.fence(connection):
                        return "done"
            finally:
                connection.terminate()
        async with await psycopg.AsyncConnection.connect(network.url) as other:
            await other.execute("select 1")
            connected.put_nowait(None)
            await go_on.wait()
            async with ctx.fence(other):
                return "done"

    async with app, working(app, lease_ttl=LEASE_TTL):
        run = await app.submit(work)
        await connected.get()
        network.go_down()
        await network.was_tried(1)
        go_on.set()
        await network.was_tried(3)
        network.heal()
        assert await run.result(timeout="20s") == "done"
        shown = await run.snapshot()
        assert (shown.retry_count, shown.lease_reclaim_count) == (0, 0)


async def test_a_run_does_not_complete_after_its_fence_has_met_an_outage(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the handler makes of the error: its driver says something else of it."""
    app = App(network.url)
    connected: asyncio.Queue[None] = asyncio.Queue()
    go_on = asyncio.Event()
    runs = 0

    async def one(ctx: Context) -> str:
        connection = await asyncpg.connect(network.url)
        try:
            async with connection.transaction():
                connected.put_nowait(None)
                await go_on.wait()
                async with ctx.fence(connection):
                    return "done"
        finally:
            connection.terminate()

    @app.task
    async def work(ctx: Context) -> list[str]:
        nonlocal runs
        runs += 1
        left_behind = asyncio.create_task(one(ctx))
        found = await asyncio.gather(one(ctx), one(ctx), return_exceptions=True)
        await asyncio.wait([left_behind])
        return [str(each) for each in found]

    async with app, working(app, lease_ttl=LEASE_TTL):
        run = await app.submit(work)
        for _ in range(3):
            await connected.get()
        network.go_down()
        await network.was_tried(1)
        go_on.set()
        await network.was_tried(3)
        network.heal()
        assert await run.result(timeout="20s") == ["done", "done"]
        shown = await run.snapshot()
        assert (runs, shown.retry_count, shown.total_attempt_count) == (2, 0, 1)
    gc.collect()
    assert "never retrieved" not in caplog.text


Committing = Callable[[str, Context, Callable[[], Awaitable[None]]], Awaitable[None]]
"""Runs something between the end of a fence and the commit of its transaction."""


async def commit_asyncpg(url: str, ctx: Context, before: Callable[[], Awaitable[None]]) -> None:
    async with (
        asyncpg.create_pool(url, min_size=1, max_size=1) as pool,
        pool.acquire() as own,
        own.transaction(),
    ):
        async with ctx.fence(own):
            pass
        await before()


async def commit_and_terminate(
    url: str, ctx: Context, before: Callable[[], Awaitable[None]]
) -> None:
    own = await asyncpg.connect(url)
    try:
        async with own.transaction():
            async with ctx.fence(own):
                pass
            await before()
    finally:
        own.terminate()


async def commit_psycopg(url: str, ctx: Context, before: Callable[[], Awaitable[None]]) -> None:
    async with await psycopg.AsyncConnection.connect(url) as own:
        async with ctx.fence(own):
            pass
        await before()


async def commit_psycopg2(url: str, ctx: Context, before: Callable[[], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()

    def commit() -> None:
        own = psycopg2.connect(url)
        try:
            with ctx.fence(own):
                pass
            asyncio.run_coroutine_threadsafe(_awaited(before), loop).result()
            own.commit()
        finally:
            own.close()

    await asyncio.to_thread(commit)


async def _awaited(call: Callable[[], Awaitable[None]]) -> None:
    await call()


async def commit_sqlalchemy(url: str, ctx: Context, before: Callable[[], Awaitable[None]]) -> None:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"))
    try:
        async with AsyncSession(engine) as session, session.begin():
            async with ctx.fence(session):
                pass
            await before()
    finally:
        await engine.dispose()


@pytest.mark.parametrize(
    "commit",
    [commit_asyncpg, commit_and_terminate, commit_psycopg, commit_psycopg2, commit_sqlalchemy],
)
async def test_a_commit_after_a_fence_that_meets_an_outage_does_not_count_against_the_run(
    network: Network, commit: Committing
) -> None:
    app = App(network.url)
    fenced, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        fenced.set()
        await go_on.wait()

    @app.task
    async def work(ctx: Context) -> str:
        await commit(network.url, ctx, wait)
        return "done"

    async with app, working(app, lease_ttl=LEASE_TTL):
        run = await app.submit(work)
        await fenced.wait()
        network.go_down()
        await network.was_tried(1)
        # Back before the handler notices: its renewals may be answered already.
        network.heal()
        go_on.set()
        assert await run.result(timeout="20s") == "done"
        shown = await run.snapshot()
        assert (shown.retry_count, shown.total_attempt_count) == (0, 1)


@pytest.mark.parametrize("commit", [commit_asyncpg, commit_and_terminate])
async def test_another_server_that_goes_away_after_a_fence_is_a_failure(
    postgres_database: str, network: Network, commit: Committing
) -> None:
    app = App(postgres_database)

    @app.task
    async def work(ctx: Context) -> None:
        await commit(postgres_database, ctx, lambda: asyncio.sleep(0))
        other = await asyncpg.connect(network.url)
        try:
            async with other.transaction():
                network.go_down()
                await other.execute("select 1")
        finally:
            other.terminate()

    async with app, working(app):
        run = await app.submit(work)
        with pytest.raises(ExecutionFailed, match="connection"):
            await run.result(timeout="20s")


async def test_a_commit_on_a_full_disk_after_a_fence_does_not_count_against_the_run(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path / 'work.db'}"
    app = App(url)
    runs = 0

    @app.task
    async def work(ctx: Context) -> str:
        nonlocal runs
        runs += 1
        own = sqlite3.connect(tmp_path / "work.db")
        with closing(own), own:
            if runs == 1:
                own.execute("create table article (text)")
                (pages,) = own.execute("pragma page_count").fetchone()
                own.execute(f"pragma max_page_count = {pages}")
            with ctx.fence(own):
                pass
            if runs == 1:
                own.execute("insert into article values (zeroblob(1000000))")
        return "done"

    async with app, working(app):
        run = await app.submit(work)
        assert await run.result(timeout="20s") == "done"
        shown = await run.snapshot()
        assert (runs, shown.retry_count, shown.total_attempt_count) == (2, 0, 1)


async def test_an_outage_is_told_of_once_when_it_begins_and_once_when_it_ends(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(network.url)
    begun, go_on = asyncio.Event(), asyncio.Event()

    @app.task
    async def work(ctx: Context) -> str:
        begun.set()
        await go_on.wait()
        await ctx.step("inside", str.upper, "a")
        return "done"

    # Renewals, claims, reports, reconcilers, presence and the wait for the result: all meet it.
    async with app, working(app, lease_ttl="20s"):
        run = await app.submit(work)
        await begun.wait()
        caplog.clear()
        network.go_down()
        go_on.set()
        await network.was_tried(60)
        network.heal()
        assert await run.result(timeout="20s") == "done"
    told = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("flowfabric") and record.levelno >= logging.WARNING
    ]
    assert len(told) == 2, told
    assert re.fullmatch(r"the database \S+ at 127.0.0.1:\d+ does not answer: .*", told[0])
    assert re.fullmatch(r"the database \S+ at 127.0.0.1:\d+ answers again, after .* s", told[1])


async def test_a_worker_started_during_an_outage_waits_as_a_running_one_does(
    network: Network, postgres_database: str
) -> None:
    app, outside = App(network.url), App(postgres_database)
    for each in (app, outside):

        @each.task
        async def echo(number: int) -> int:
            return number

    network.go_down()
    stop = asyncio.Event()
    worker = asyncio.create_task(app.run_worker(stop=stop, signals=False))
    await network.was_tried(3)
    network.heal()
    async with outside:
        run = await outside.submit(outside.tasks["echo"](7))
        assert await run.result(timeout="20s") == 7
    stop.set()
    await worker
    await app.close()


async def test_a_worker_that_waits_for_the_database_can_be_stopped(network: Network) -> None:
    app = App(network.url)
    network.go_down()
    stop = asyncio.Event()
    worker = asyncio.create_task(app.run_worker(stop=stop, signals=False))
    await network.was_tried(2)
    stop.set()
    await worker
    await app.close()


async def test_a_full_disk_under_a_submission_does_not_count_against_the_run(
    postgres_database: str,
) -> None:
    app = App(postgres_database)

    @app.task
    async def echo(number: int) -> int:
        return number

    @app.task
    async def work(ctx: Context) -> None:
        await app.submit(echo, 7)

    async with app, asyncpg.create_pool(postgres_database, min_size=1) as operator:
        run = await app.submit(work)
        await operator.execute(FILL_THE_DISK)
        async with working(app):
            while await run.state() is not PublicState.DELAYED:
                pass
            await operator.execute("drop trigger full_disk on flowfabric.execution")
            await run.result(timeout="20s")
        assert (await run.snapshot()).total_attempt_count == 1


async def test_a_run_that_met_an_outage_the_log_does_not_tell_of_says_which(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attempt, "OUTAGES", Outages())
    async with testing.engine() as app:

        @app.task
        async def work(ctx: Context) -> None:
            raise Transport("postgres", "it only reads", kind=BackendErrorKind.CLUSTER)

        run = await app.submit(work)
        await app.drain()
        assert await run.state() is PublicState.DELAYED
        assert (await run.snapshot()).retry_count == 0
        met = "Transport: transport (postgres): it only reads"
        told = f"It was put aside: it met an outage, which is no failure, and runs again: {met}."
        assert (await run.why()).sentence.endswith(told)
    assert [(each.levelno, each.getMessage()) for each in caplog.records] == [
        (logging.WARNING, f"met an outage, and runs again: {met}")
    ]
