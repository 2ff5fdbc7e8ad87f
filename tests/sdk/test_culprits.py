"""What a database cannot store is no outage: its submission fails, and those beside it do not."""

import asyncio
import sqlite3

import asyncpg

from flowfabric import App
from flowfabric.errors import NotStorable

REFUSING_POSTGRES = "alter table flowfabric.live add check (priority <> 13)"
REFUSING_SQLITE = """
create trigger refusing before insert on live when new.priority = 13
begin select raise(abort, 'thirteen cannot be stored'); end
"""


async def refuse_thirteen(url: str) -> None:
    """Have the database refuse what the engine accepts."""
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as file:
            file.execute(REFUSING_SQLITE)
        return
    connection = await asyncpg.connect(url)
    await connection.execute(REFUSING_POSTGRES)
    await connection.close()


async def test_what_the_database_refuses_is_refused_alone_and_at_once(store_url: str) -> None:
    async with App(store_url) as app:

        @app.task
        def work(number: int) -> None: ...

        await refuse_thirteen(store_url)
        async with asyncio.timeout(20):
            answers = await asyncio.gather(
                *(app.submit(work(number), priority=number) for number in range(50)),
                return_exceptions=True,
            )
        refused = {n: each for n, each in enumerate(answers) if isinstance(each, BaseException)}
        assert list(refused) == [13]
        assert isinstance(refused[13], NotStorable)
