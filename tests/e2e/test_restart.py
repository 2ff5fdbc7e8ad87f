"""The database goes away and comes back."""

import asyncio
from collections import Counter

import asyncpg
import pytest

from flowfabric import App, Context, migrate
from flowfabric.core.states import PublicState
from tests import postgres
from tests.apps import working
from tests.e2e.conftest import PATIENCE_S

RUNNING = 5_000


@pytest.mark.timeout(5 * PATIENCE_S)
@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_a_restart_in_the_middle_of_many_running_executions_loses_and_repeats_none(
    mode: str,
) -> None:
    # Not one that the environment names: only our own may be restarted.
    server = await asyncio.to_thread(postgres.start_bundled, durable=True)
    try:
        await migrate(server.url)
        await survive(server, mode)
    finally:
        await asyncio.to_thread(server.stop)


async def survive(server: postgres.Server, mode: str) -> None:
    assert server.restart is not None
    ran: Counter[int] = Counter()
    all_running, finish = asyncio.Event(), asyncio.Event()
    app = App(server.url)

    @app.task
    async def work(ctx: Context, number: int) -> int:
        ran[number] += 1
        if len(ran) == RUNNING:
            all_running.set()
        await finish.wait()
        return await ctx.step("double", lambda: 2 * number)

    async with app, working(app, concurrency=RUNNING):
        runs = await app.submit_many([work(number) for number in range(RUNNING)])
        async with asyncio.timeout(60):
            await all_running.wait()
        restarting = asyncio.create_task(asyncio.to_thread(server.restart, mode))
        finish.set()
        await restarting
        results = await asyncio.gather(*(run.result(timeout="60s") for run in runs))
        snapshots = [await run.snapshot() for run in runs[:50]]
    assert results == [2 * number for number in range(RUNNING)]
    assert set(ran.values()) == {1}
    assert {(s.public_state, s.total_attempt_count) for s in snapshots} == {
        (PublicState.COMPLETED, 1)
    }


async def test_a_worker_whose_every_connection_is_killed_goes_on_working(
    postgres_database: str,
) -> None:
    app = App(postgres_database)

    @app.task
    async def echo(number: int) -> int:
        return number

    async with app, working(app):
        for number in range(3):
            killer = await asyncpg.connect(postgres_database)
            await killer.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
            await killer.close()
            run = await app.submit(echo, number)
            assert await run.result(timeout="20s") == number
