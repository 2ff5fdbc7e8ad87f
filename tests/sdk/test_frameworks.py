"""Connections as frameworks hand them out: SQLAlchemy on aiosqlite, Django, psycopg2."""

import asyncio
import subprocess
import sys
from pathlib import Path

import aiosqlite
import psycopg2
import psycopg2.extras
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from flowfabric import App, Context, count
from flowfabric.core.states import PublicState
from flowfabric.errors import InvalidInput
from tests.apps import reached, working
from tests.cli.command import environment
from tests.sdk.test_joining import greeting, made, names

DJANGO = """
import sys

import django
from django.conf import settings
from django.db import connection, transaction

engine, name, port, host, user, url = sys.argv[1:]
database = {"ENGINE": f"django.db.backends.{engine}", "NAME": name}
if port:
    database |= {"HOST": host, "PORT": port, "USER": user}
settings.configure(DATABASES={"default": database})
django.setup()
"""

VIEW = """
from flowfabric import App
from flowfabric.errors import InvalidInput

app = App(url)


@app.task
def greet(name: str) -> str:
    return name


with connection.cursor() as cursor:
    cursor.execute("create table article (id integer)")
try:
    with transaction.atomic():
        app.blocking.submit(greet, "dropped", connection=connection)
        raise LookupError
except LookupError:
    pass
with transaction.atomic(), connection.cursor() as cursor:
    cursor.execute("insert into article values (1)")
    app.blocking.submit(greet, "kept", connection=connection)
    cursor.execute("insert into article values (2)")
try:
    app.blocking.submit(greet, "alone", connection=connection)
except InvalidInput as error:
    print(error)
connection.close()
app.blocking.close()
"""

VERBS = """
import asyncio

from flowfabric import App, Context, count

app = App(url)


@app.task
async def listen(ctx: Context) -> list[int]:
    return [each.payload for each in await ctx.wait_for(count(3, "go"))]


def everything(number: int) -> None:
    connected = {"connection": connection}
    app.blocking.submit_many([listen(), listen()], **connected)
    app.blocking.run(listen, "one").signal("go", number, **connected)
    app.blocking.signals.send("one", "go", number, **connected)
    app.blocking.signals.deliver(sys.stdin.read(), "go", number, **connected)
    app.blocking.budgets.report("team", {"tokens": number}, **connected)
    flow = app.flow("listening", flow_id="two")
    flow.add(listen())
    asyncio.run(flow.start(**connected))


try:
    with transaction.atomic():
        everything(1)
        raise LookupError
except LookupError:
    pass
sys.stdin.seek(0)
with transaction.atomic():
    everything(2)
connection.close()
app.blocking.close()
"""


@pytest.mark.parametrize("direct", [True, False])
async def test_with_aiosqlite_itself_and_through_an_async_session(
    tmp_path: Path, direct: bool
) -> None:
    path = tmp_path / "shop.db"
    async with made(f"sqlite:///{path}") as app:
        if direct:
            async with aiosqlite.connect(path) as connection:
                await connection.execute("create table article (id integer)")
                await connection.execute("insert into article values (1)")
                await app.submit(greeting(app, "dropped"), connection=connection)
                await connection.rollback()
                await connection.execute("insert into article values (2)")
                run = await app.submit(greeting(app, "kept"), connection=connection)
                await connection.commit()
        else:
            engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
            async with AsyncSession(engine) as session:
                await session.execute(text("create table article (id integer)"))
                await session.execute(text("insert into article values (1)"))
                await app.submit(greeting(app, "dropped"), connection=session)
                await session.rollback()
            async with AsyncSession(engine) as session, session.begin():
                await session.execute(text("insert into article values (2)"))
                run = await app.submit(greeting(app, "kept"), connection=session)
            await engine.dispose()
        assert await names(app) == ['{"name":"kept"}']
        async with working(app):
            assert await run.result(timeout="10s") == "hello kept"


async def test_with_djangos_connection(store_url: str, tmp_path: Path) -> None:
    async with made(store_url) as app:
        await app.engine.ping()
    await _run_with_django(VIEW, store_url, tmp_path)
    async with made(store_url) as app:
        assert await names(app) == ['{"name":"kept"}']


async def test_every_verb_that_takes_a_connection_takes_djangos(
    store_url: str, tmp_path: Path
) -> None:
    app = App(store_url)

    @app.task
    async def listen(ctx: Context) -> list[object]:
        return [each.payload for each in await ctx.wait_for(count(3, "go"))]

    async with app, working(app):
        await app.budgets.create("team", hard={"tokens": 100})
        run = await app.submit(listen, execution_id="one")
        await reached(run, PublicState.SUSPENDED)
        token = await app.signals.token("one", "go")
        await _run_with_django(VERBS, store_url, tmp_path, token.reveal())
        assert await run.result("10s") == [2, 2, 2]
        assert (await app.budgets.status("team")).usage == {"tokens": 2}
        assert len((await app.engine.find_executions()).executions) == 4
        assert (await app.flow_run("two").summary()).total_members == 1


async def _run_with_django(program: str, url: str, folder: Path, given: str = "") -> None:
    script = folder / "views.py"
    script.write_text(DJANGO + program)
    (folder / "given").write_text(given)
    with (folder / "given").open() as standard_input:
        await asyncio.to_thread(
            subprocess.run,
            [sys.executable, str(script), *_django(url), url],
            check=True,
            stdin=standard_input,
            stdout=subprocess.DEVNULL,
            env=environment({}),
            timeout=60,
        )


def _django(url: str) -> list[str]:
    if url.startswith("sqlite"):
        return ["sqlite3", url.removeprefix("sqlite:///"), "", "", ""]
    given = psycopg2.extensions.parse_dsn(url)
    return [
        "postgresql",
        given["dbname"],
        given.get("port", "5432"),
        given.get("host", ""),
        given.get("user", ""),
    ]


async def test_with_psycopg2(postgres_database: str) -> None:
    app = made(postgres_database)

    def view() -> None:
        connection = psycopg2.connect(
            postgres_database, cursor_factory=psycopg2.extras.RealDictCursor
        )
        tagged = {"app.team": "50% of $1"}
        app.blocking.submit(greeting(app, "dropped"), connection=connection, tags=tagged)
        connection.rollback()
        app.blocking.submit(greeting(app, "kept"), connection=connection, tags=tagged)
        app.blocking.submit_many(
            [greeting(app, "a"), greeting(app, "b")], connection=connection, priority=3
        )
        repeat = [
            app.blocking.submit(greeting(app, "once"), connection=connection, idempotency_key="k")
            for _ in range(2)
        ]
        assert len({each.execution_id for each in repeat}) == 1
        connection.commit()
        connection.autocommit = True
        with pytest.raises(InvalidInput, match="no open transaction"):
            app.blocking.submit(greeting(app, "x"), connection=connection)
        connection.close()
        app.blocking.close()

    await asyncio.to_thread(view)
    async with app:
        assert await names(app) == [f'{{"name":"{each}"}}' for each in ("a", "b", "kept", "once")]
        async with working(app):
            page = await app.engine.find_executions()
            kept = next(each for each in page.executions if each.tags)
            assert kept.tags == {"app.team": "50% of $1"}
            run = app.run(app.tasks["greet"], kept.execution_id)
            assert await run.result(timeout="10s") == "hello kept"


def test_an_app_opens_again_for_a_second_event_loop(store_url: str) -> None:
    app = made(store_url)

    async def submit() -> str:
        run = await app.submit(greeting(app, "x"))
        return str(await run.state())

    assert [asyncio.run(submit()) for _ in range(3)] == ["waiting"] * 3

    async def closed() -> None:
        await app.close()

    asyncio.run(closed())


async def test_an_app_that_migrates_sets_up_its_database(empty_postgres_database: str) -> None:
    async with App(empty_postgres_database, migrate=True) as app:
        assert (await app.engine.find_executions()).executions == ()
