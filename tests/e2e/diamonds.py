"""Those who work on flows, in processes of their own.

    python -m tests.e2e.diamonds worker URL NAME
    python -m tests.e2e.diamonds dispatcher URL NAME

The work of a node is a row in the application's own table, written in a transaction
that holds the node's fence. The table has no unique constraint, and a node looks for
its row before it writes one: two at a time would both find none.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from flowfabric import App, Context, WorkerSettings, connect
from flowfabric.reconcilers import Supervisor

LEASE_TTL = "2s"
DEATHS_MAX = 1_000
"""Workers die so often here that a node may well meet several deaths in a row."""
WORK_S = 0.02
"""How long a node holds its transaction open: long enough to die in it."""

diamonds = App("sqlite:///never-opened.db")


class Application:
    def __init__(self, pool: "asyncpg.Pool[asyncpg.Record]") -> None:
        self.pool = pool


async def leave_effect(ctx: Context) -> None:
    pool = ctx.get(Application).pool
    async with pool.acquire() as connection, connection.transaction(), ctx.fence(connection):
        done = await connection.fetchval(
            "select count(*) from effect where node = $1", ctx.execution_id
        )
        await asyncio.sleep(WORK_S)
        if not done:
            await connection.execute("insert into effect (node) values ($1)", ctx.execution_id)


@diamonds.task(max_worker_deaths=DEATHS_MAX)
async def begin(ctx: Context, number: int) -> list[str]:
    await leave_effect(ctx)
    return [f"{number}"]


@diamonds.task(max_worker_deaths=DEATHS_MAX)
async def middle(ctx: Context, before: list[str], name: str) -> list[str]:
    await leave_effect(ctx)
    return [*before, name]


@diamonds.task(max_worker_deaths=DEATHS_MAX)
async def finish(ctx: Context, left: list[str], right: list[str]) -> list[str]:
    await leave_effect(ctx)
    return left + right


async def work(url: str, name: str) -> None:
    app = App(url)
    app.adopt(diamonds)

    @asynccontextmanager
    async def application() -> AsyncIterator[Application]:
        async with asyncpg.create_pool(url, min_size=1, max_size=5) as pool:
            yield Application(pool)

    app.provide(Application, application)
    settings = WorkerSettings(
        concurrency=5,
        prefetch=0,
        lease_ttl=LEASE_TTL,
        worker_id="w",
        worker_instance_id=name,
        reconcile=False,
    )
    async with app:
        await app.run_worker(settings=settings)


async def dispatch(url: str) -> None:
    async with await connect(url, pool_max=3) as engine, Supervisor(engine):
        await asyncio.Event().wait()


if __name__ == "__main__":
    _, role, url, name = sys.argv
    asyncio.run(work(url, name) if role == "worker" else dispatch(url))
