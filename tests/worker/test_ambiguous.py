"""Calls that nothing tells apart: refused before anything runs, with a way out."""

import asyncio
import itertools
from collections import Counter

from flowfabric import App, Context
from flowfabric.core.states import PublicState
from tests.apps import blocked, reached, working


async def test_a_parallel_call_that_may_be_another_is_refused_with_a_way_out(app: App) -> None:
    ran: Counter[str] = Counter()
    moments = itertools.count()
    fetched = asyncio.Event()

    async def prepare() -> None:
        await fetched.wait()

    async def fetch(at: float) -> float:
        ran["fetch"] += 1
        fetched.set()
        return at

    @app.task
    async def both(ctx: Context) -> float:
        beside = asyncio.create_task(ctx.step("prepare", prepare))
        await asyncio.sleep(0)
        # Another time in every run, as from time.time(), while a branch is under way.
        found = await ctx.step("fetch", fetch, float(next(moments)))
        await beside
        ran["past"] += 1
        await ctx.wait_for_signal("go")
        return found

    async with working(app):
        run = await app.submit(both)
        await reached(run, PublicState.SUSPENDED)
        assert ran == {"fetch": 1, "past": 1}
        await run.signal("go")
        why = await blocked(run)
    assert "step 'fetch' may be the one that is stored or another one" in why
    assert "give each branch a name: with ctx.branch(name)" in why
    assert ran == {"fetch": 1, "past": 1}, "it is refused before anything runs"
