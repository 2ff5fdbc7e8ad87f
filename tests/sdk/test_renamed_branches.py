"""Deploys that rename a branch: blocked before any effect; see docs/deploys.md."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from flowfabric import Context
from tests.sdk.shops import Shop, fetch

Body = Callable[[Shop, Context, str], Awaitable[object]]
"""What is done in a branch of this name."""


async def a_step(shop: Shop, ctx: Context, name: str) -> None:
    with ctx.branch(name):
        await fetch(shop, ctx, "ada")


async def after_a_sleep(shop: Shop, ctx: Context, name: str) -> None:
    with ctx.branch(name):
        await ctx.sleep(0.01)
        await ctx.uuid()
        await fetch(shop, ctx, "ada")


async def several_steps(shop: Shop, ctx: Context, name: str) -> None:
    with ctx.branch(name):
        await fetch(shop, ctx, "ada")
        await ctx.step("mail", shop.effect, "mail ada")


async def tasks_of_its_own(shop: Shop, ctx: Context, name: str) -> None:
    with ctx.branch(name):
        await asyncio.gather(fetch(shop, ctx, "ada"), fetch(shop, ctx, "bob"))


async def inside_another(shop: Shop, ctx: Context, name: str) -> None:
    with ctx.branch("people"):
        await ctx.step("list", shop.effect, "list")
        await a_step(shop, ctx, name)


async def around_another(shop: Shop, ctx: Context, name: str) -> None:
    with ctx.branch(name):
        await a_step(shop, ctx, "ada")


async def beside_the_same_without_a_name(shop: Shop, ctx: Context, name: str) -> None:
    await ctx.step("fetch", shop.effect, "fetch ada", "again")
    await ctx.step("fetch", shop.effect, "fetch ada")
    await a_step(shop, ctx, name)


async def in_a_task(shop: Shop, ctx: Context, name: str) -> None:
    await asyncio.gather(a_step(shop, ctx, name))


async def beside_others(shop: Shop, ctx: Context, name: str) -> None:
    async def other() -> None:
        with ctx.branch("other"):
            await fetch(shop, ctx, "bob")

    await asyncio.gather(other(), a_step(shop, ctx, name))


async def beside_work(shop: Shop, ctx: Context, name: str) -> None:
    working = asyncio.create_task(asyncio.Event().wait())
    await asyncio.sleep(0)
    await a_step(shop, ctx, name)
    working.cancel()


async def two_at_once(shop: Shop, ctx: Context, name: str) -> None:
    async def one(who: str) -> None:
        with ctx.branch(f"{name} {who}"):
            await fetch(shop, ctx, who)

    await asyncio.gather(one("ada"), one("bob"))


BODIES: list[Body] = [
    a_step,
    after_a_sleep,
    several_steps,
    tasks_of_its_own,
    inside_another,
    around_another,
    beside_the_same_without_a_name,
    in_a_task,
    beside_others,
    beside_work,
    two_at_once,
]


def code(shop: Shop, body: Body, name: str, *, beside: bool) -> Callable[[Context], Awaitable[str]]:
    """The branch comes before the wait for a signal, or beside it."""

    async def handler(ctx: Context) -> str:
        if beside:
            await asyncio.gather(body(shop, ctx, name), ctx.wait_for_signal("packed"))
        else:
            await body(shop, ctx, name)
            await ctx.wait_for_signal("packed")
        return str(await ctx.step("ship", shop.effect, "ship"))

    return handler


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("body", BODIES)
async def test_a_renamed_branch_blocks_the_run_before_its_effects(
    shop: Shop, body: Body, beside: bool
) -> None:
    old, new = (code(shop, body, name, beside=beside) for name in ("for", "of"))
    execution_id = await shop.in_flight(old)
    done = shop.done.copy()
    await shop.blocked(new, execution_id)
    assert await shop.finishes(old, execution_id) == "ship"
    assert shop.done == {**done, "ship": 1}
