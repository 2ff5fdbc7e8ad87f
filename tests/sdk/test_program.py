"""The program the documentation opens with, from its first line to its result."""

import asyncio

from msgspec import Struct

from flowfabric import App, Context, Quorum, Retry
from flowfabric.core.states import PublicState
from flowfabric.testing import SettableClock, engine
from tests.apps import working


class Draft(Struct):
    text: str
    tokens: int


async def write_draft(article_id: int) -> Draft:
    return Draft(f"article {article_id}", 900)


def push_live(draft: Draft, verdict: object) -> str:
    return f"{draft.text} is live: {verdict}"


app = App("sqlite:///flowfabric.db")


@app.task(retry=Retry(max_retries=5), timeout="2m")
async def publish(ctx: Context, article_id: int) -> str:
    draft = await ctx.step("write", write_draft, article_id)
    decision = await ctx.wait_for_signal("approved", timeout="2d")
    await ctx.sleep("10m")
    return await ctx.step("push", push_live, draft, decision.payload)


@app.task
async def fetch(ctx: Context, url: str) -> str:
    return f"<{url}>"


@app.task
async def summarise(ctx: Context, pages: list[str]) -> int:
    return len(pages)


@app.schedule("0 6 * * *", timezone="Europe/Rome", catch_up="latest")
def morning_report(ctx: Context) -> None:
    reports.append(ctx.execution_id)


reports: list[str] = []


async def test_an_article_is_written_approved_and_published_later() -> None:
    clock = SettableClock()
    async with engine(clock, app=app) as local:
        run = await local.submit(
            publish, 42, priority=10, idempotency_key="article-42", tags={"cms.team": "sport"}
        )
        again = await local.submit(publish, 42, priority=10, idempotency_key="article-42")
        assert again.execution_id == run.execution_id
        await local.drain()
        assert await run.state() is PublicState.SUSPENDED
        await run.signal("approved", "well done")
        await local.drain()
        assert await run.state() is PublicState.DELAYED
        clock.advance("10m")
        await local.drain()
        assert await run.result() == "article 42 is live: well done"
        snapshot = await run.snapshot()
        assert (snapshot.priority, snapshot.tags) == (10, {"cms.team": "sport"})
        assert snapshot.total_attempt_count == 1


async def test_the_report_is_made_every_morning() -> None:
    clock = SettableClock()
    async with engine(clock, app=app) as local:
        await local.drain()
        reports.clear()
        for _ in range(3):
            clock.advance("1d")
            await local.drain()
        assert len(set(reports)) == len(reports) == 3


async def test_three_pages_are_enough_for_the_report(store_url: str) -> None:
    real = App(store_url)
    real.adopt(app)
    async with real, working(real):
        flow = real.flow("nightly")
        pages = [flow.add(fetch, url) for url in ("a", "b", "c", "d")]
        report = flow.add(summarise, join=pages, when=Quorum(3, cancel_remaining=True))
        run = await flow.start()
        assert 3 <= await run.result(report, timeout="60s") <= 4


async def test_a_view_without_a_loop_gets_the_same(store_url: str) -> None:
    real = App(store_url)
    real.adopt(app)

    def view() -> str:
        with real.blocking as blocking:
            return blocking.submit(fetch, "x").result(timeout=30)

    async with real, working(real):
        assert await asyncio.to_thread(view) == "<x>"
