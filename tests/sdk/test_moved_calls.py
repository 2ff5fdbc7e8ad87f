"""Deploys that move calls from one line to another; see `test_deploys`."""

import asyncio

import pytest

from flowfabric import Context
from tests.sdk.shops import Shop, branched, fetch


async def in_turn(shop: Shop, ctx: Context) -> str:
    got = [await fetch(shop, ctx, "ada"), await fetch(shop, ctx, "bob")]
    await ctx.wait_for_signal("packed")
    return ", ".join(got)


async def named(shop: Shop, ctx: Context, prefix: str) -> str:
    async def one(who: str) -> str:
        with ctx.branch(f"{prefix} {who}"):
            return await fetch(shop, ctx, who)

    got = await asyncio.gather(one("ada"), one("bob"))
    await ctx.wait_for_signal("packed")
    return ", ".join(got)


async def named_before(shop: Shop, ctx: Context) -> str:
    return await named(shop, ctx, "for")


async def named_after(shop: Shop, ctx: Context) -> str:
    return await named(shop, ctx, "of")


MOVES = {
    "calls in turn become branches": (in_turn, branched, "in the function itself"),
    "branches become calls in turn": (branched, in_turn, "the branch 'fetch' is"),
    "a branch is renamed": (named_before, named_after, "in the branch 'for "),
    "a branch is named": (branched, named_after, "in the branch 'fetch["),
}


@pytest.mark.parametrize("move", MOVES)
async def test_calls_moved_from_one_line_to_another_block_the_run(shop: Shop, move: str) -> None:
    before, after, where = MOVES[move]

    async def old(ctx: Context) -> str:
        return await before(shop, ctx)

    async def new(ctx: Context) -> str:
        return await after(shop, ctx)

    execution_id = await shop.in_flight(old)
    assert where in await shop.blocked(new, execution_id)
    assert await shop.finishes(old, execution_id) == "fetch ada, fetch bob"
    assert shop.done == {"fetch ada": 1, "fetch bob": 1}


@pytest.mark.parametrize("move", MOVES)
async def test_one_acceptance_is_enough_for_calls_that_were_moved(shop: Shop, move: str) -> None:
    before, after, _ = MOVES[move]

    async def old(ctx: Context) -> str:
        return await before(shop, ctx)

    async def new(ctx: Context) -> str:
        return await after(shop, ctx)

    execution_id = await shop.in_flight(old)
    assert await shop.accepted(new, execution_id) == "fetch ada, fetch bob"
    assert shop.done == {"fetch ada": 2, "fetch bob": 2}


@pytest.mark.parametrize("named", [False, True])
async def test_a_branch_that_comes_late_blocks_no_other_that_looks_like_it(
    shop: Shop, named: bool
) -> None:
    runs = 0

    async def steps(ctx: Context, who: str) -> None:
        await ctx.step("load", shop.effect, "load")
        if who == "ada":
            await ctx.wait_for_signal("packed")
        await ctx.step("save", shop.effect, "save")

    async def handler(ctx: Context) -> str:
        nonlocal runs
        runs += 1

        async def branch(who: str) -> None:
            # Something outside of steps, which takes longer after a deploy.
            await asyncio.sleep(0.5 if who == "bob" and runs > 1 else 0)
            if named:
                with ctx.branch(who):
                    await steps(ctx, who)
            else:
                await steps(ctx, who)

        async with asyncio.TaskGroup() as group:
            group.create_task(branch("ada"))
            await asyncio.sleep(0.5 if runs > 1 else 0)
            group.create_task(branch("bob"))
        return "done"

    execution_id = await shop.in_flight(handler)
    assert await shop.finishes(handler, execution_id) == "done"
    assert shop.done == {"load": 2, "save": 2}
