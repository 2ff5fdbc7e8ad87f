"""What a handler knows about itself, and what it is given beside its arguments."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from flowfabric import App, Context, provided, testing
from flowfabric.errors import InvalidInput
from flowfabric.testing import SettableClock
from tests.apps import working


class Database:
    """Nothing that could be stored."""

    def __init__(self) -> None:
        self.rows: list[int] = []


@dataclass
class Settings:
    """Something that could be stored as well."""

    town: str


@asynccontextmanager
async def open_database() -> AsyncIterator[Database]:
    yield Database()


async def test_a_handler_knows_its_tags_attempt_and_lease(waiting_app: App) -> None:
    seen: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()

    @waiting_app.task
    async def look(ctx: Context) -> None:
        seen.put_nowait((await ctx.tags(), ctx.attempt_id, ctx.lease_remaining))

    @waiting_app.task
    def look_in_a_thread(ctx: Context) -> None:
        given = (ctx.blocking.tags(), ctx.blocking.scheduled_for(), ctx.lease_remaining)
        seen.put_nowait(given)

    async with working(waiting_app, lease_ttl="30s"):
        run = await waiting_app.submit(look, tags={"Kunde": "Ada", "app.team": "x"})
        tags, attempt_id, remaining = await seen.get()
        assert tags == {"Kunde": "Ada", "app.team": "x"}
        (attempt,) = await waiting_app.engine.list_attempts(run.execution_id)
        assert attempt_id == attempt.attempt_id
        assert isinstance(remaining, timedelta)
        assert timedelta(0) < remaining <= timedelta(seconds=30)
        plain = await waiting_app.submit(look_in_a_thread)
        await plain.result(timeout="20s")
        assert (await seen.get())[:2] == ({}, None)


async def test_a_scheduled_handler_knows_the_due_time_it_stands_for() -> None:
    app = App()
    seen: list[object] = []

    @app.schedule("0 6 * * *", timezone="Europe/Rome")
    async def report(ctx: Context) -> None:
        seen.append((await ctx.scheduled_for(), ctx.lease_remaining > timedelta(hours=1)))

    clock = SettableClock(int(datetime(2026, 3, 28, 12, tzinfo=UTC).timestamp() * 1_000))
    async with testing.engine(clock, app=app) as local:
        clock.advance("1d")
        await local.drain()
    assert seen == [(datetime(2026, 3, 29, 4, tzinfo=UTC), True)]


async def test_resources_are_filled_in_wherever_they_stand(waiting_app: App) -> None:
    app = waiting_app
    app.provide(Database, open_database)
    app.provide(Settings, lambda: Settings("Rome"))

    @app.task
    async def insert(ctx: Context, db: Database, row: int, *, settings: Settings) -> str:
        db.rows.append(row)
        assert ctx.get(Database) is db
        return f"{db.rows} in {settings.town}"

    @app.task
    def count(row: int, db: Database = provided(Database)) -> int:
        return len(db.rows) + row

    assert insert.arguments.names == ("row",)
    async with working(app):
        run = await app.submit(app.tasks["insert"](7))
        assert await run.result(timeout="20s") == "[7] in Rome"
        assert await (await app.submit(count, 41)).result(timeout="20s") == 42


def test_what_is_no_resource_is_an_argument_and_mistakes_are_refused() -> None:
    app = App()

    @app.task
    async def early(settings: Settings) -> str:
        return settings.town

    app.provide(Settings, lambda: Settings("Rome"))
    assert early(Settings("Oslo")).payload == b'{"settings":{"town":"Oslo"}}'

    async def unknown(db: Database) -> None: ...

    with pytest.raises(InvalidInput, match=r"call app\.provide\(Database, …\) before"):
        app.task(unknown)

    async def swallowed(settings: Settings, *rows: int) -> None: ...

    with pytest.raises(InvalidInput, match="must come before settings"):
        app.task(swallowed)

    def elsewhere(settings: Settings) -> None: ...

    with pytest.raises(InvalidInput, match="another process"):
        app.task(executor="process")(elsewhere)
