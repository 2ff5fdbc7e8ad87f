"""Handlers that go on in order of arrival: every run sees the order of the first one."""

import asyncio

import pytest

from flowfabric import App, Context, Retry
from tests.apps import blocked, working

AGAIN = Retry(max_retries=3, delay=0)


class Crash(RuntimeError):
    """The attempt ends here; the next one runs the handler again."""


async def turns(count: int) -> None:
    """Let others go first: `count` times around the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("how", ["steps", "failures", "sleeps", "children", "calls"])
async def test_outcomes_reach_the_handler_in_the_same_order_in_every_run(
    app: App, how: str
) -> None:
    orders: list[list[str]] = []

    @app.task
    async def greet(who: str) -> str:
        await asyncio.sleep(0.05 if who == "ada" else 0)
        return who

    async def named(who: str, delay_s: float) -> str:
        await asyncio.sleep(delay_s)
        if how == "failures":
            raise LookupError(who)
        return who

    @app.task(retry=AGAIN)
    async def all_of_them(ctx: Context) -> None:
        # Other branches come first in every run.
        people = ["ada", "bob", "cyd"]
        delays_s = dict(zip(people, (0.2, 0.1, 0.0), strict=True))

        async def branch(who: str) -> str:
            await turns(9 * ((people.index(who) + ctx.retry_count) % 3))
            if how == "sleeps":
                await ctx.sleep(delays_s[who])
                return who
            if how == "children":
                return await (await ctx.submit(greet, who)).result()
            try:
                return await ctx.step("name", named, who, delays_s[who])
            except LookupError as error:
                return str(error)

        order: list[str] = []
        made = (
            [ctx.step("name", named, who, delays_s[who]) for who in people]
            if how == "calls"
            else [branch(who) for who in people]
        )
        for each in asyncio.as_completed(made):
            order.append(await each)
            # Nothing but the order of arrival tells these apart.
            assert await ctx.step("note", order[-1].upper) == order[-1].upper()
        orders.append(order)
        if ctx.retry_count < 3:
            raise Crash

    async with working(app):
        await (await app.submit(all_of_them)).result(timeout="30s")
    assert len(orders) == 4
    assert all(order == orders[0] for order in orders)


async def test_a_handler_that_never_rests_gets_its_results(app: App) -> None:
    @app.task
    async def restless(ctx: Context) -> str:
        async def nothing() -> None:
            await asyncio.sleep(0)

        calls = [asyncio.ensure_future(ctx.step(name, str.upper, name)) for name in ("a", "b")]
        while not all(call.done() for call in calls):
            await asyncio.create_task(nothing())
        return "".join([call.result() for call in calls])

    async with working(app):
        assert await (await app.submit(restless)).result(timeout="30s") == "AB"


@pytest.mark.parametrize("sorts", [True, False])
async def test_a_list_filled_in_order_of_arrival_gives_no_item_the_result_of_another(
    app: App, sorts: bool
) -> None:
    sent: list[str] = []

    async def invoice(who: str) -> str:
        sent.append(f"invoice {who}")
        return f"invoice of {who}"

    async def mail(who: str, invoice: str) -> str:
        if len(sent) == 1:
            sent.append("failed")
            raise Crash
        sent.append(f"mail {who}: {invoice}")
        return sent[-1]

    @app.task(retry=AGAIN)
    async def bill(ctx: Context) -> list[str]:
        ready: list[str] = []

        async def check(who: str) -> None:
            await ctx.step("check", str, who)
            # Outside of steps, and done with in another order in every run.
            await asyncio.sleep(0.1 if (who == "ada") == (ctx.retry_count % 2 == 1) else 0)
            ready.append(who)

        await asyncio.gather(check("ada"), check("bob"))
        mails: list[str] = []
        for who in sorted(ready) if sorts else ready:
            made = await ctx.step("invoice", invoice, who)
            mails.append(await ctx.step("mail", mail, who, made))
        return mails

    async with working(app):
        run = await app.submit(bill)
        if sorts:
            mails = [f"mail {who}: invoice of {who}" for who in ("ada", "bob")]
            assert await run.result(timeout="30s") == mails
            assert sent == ["invoice ada", "failed", mails[0], "invoice bob", mails[1]]
        else:
            reason = await blocked(run)
            assert "may be in another order than before. Sort it" in reason
            assert sent == ["invoice ada", "failed"]
