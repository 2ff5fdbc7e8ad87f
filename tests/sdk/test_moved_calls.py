"""Deploys that move calls from one line to another; see `test_deploys`."""

import asyncio
from contextlib import nullcontext

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


async def in_one_branch(shop: Shop, ctx: Context, name: str = "") -> str:
    """Each of the calls, in a branch of its own name inside its task if `name` says so."""

    async def one(who: str) -> str:
        with ctx.branch(f"{name} {who}") if name else nullcontext():
            return await fetch(shop, ctx, who)

    got = await asyncio.gather(one("ada"), one("bob"))
    await ctx.wait_for_signal("packed")
    return ", ".join(got)


async def named_inside(shop: Shop, ctx: Context) -> str:
    return await in_one_branch(shop, ctx, "for")


async def deeper(shop: Shop, ctx: Context) -> str:
    async def outer() -> tuple[str, str]:
        return await asyncio.gather(fetch(shop, ctx, "ada"), fetch(shop, ctx, "bob"))

    (got,) = await asyncio.gather(outer())
    await ctx.wait_for_signal("packed")
    return ", ".join(got)


async def two_branches(shop: Shop, ctx: Context, people: str = "ada bob") -> str:
    """One branch for `people`, after another; the others have one of their own."""
    got: list[str] = []

    async def several(names: str) -> None:
        got.extend([await fetch(shop, ctx, who) for who in names.split()])

    async def alone() -> None:
        if people != "ada bob":
            got.append(await fetch(shop, ctx, "ada"))

    # By the arguments it is the same branch, whatever it fetches.
    async def rest(_: str) -> None:
        await several(people)

    await asyncio.gather(alone(), rest("ada bob"))
    await ctx.wait_for_signal("packed")
    return ", ".join(sorted(got))


async def moved_out(shop: Shop, ctx: Context) -> str:
    return await two_branches(shop, ctx, "bob")


MOVES = {
    "a call is named inside its task": (in_one_branch, named_inside, "in the branch 'one["),
    "branches move a task deeper": (branched, deeper, "in the branch 'fetch["),
    "a call moves out of a branch that goes on": (two_branches, moved_out, "the branch 'rest["),
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
    assert shop.done == {"fetch ada": 2, "fetch bob": 1 if after is moved_out else 2}


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


async def test_what_a_cancelled_branch_did_not_ask_for_blocks_no_call_that_looks_like_it(
    shop: Shop,
) -> None:
    """Its own work outside of steps takes longer in later runs, and it is given up before."""
    runs = 0

    async def handler(ctx: Context) -> str:
        nonlocal runs
        runs += 1

        async def branch() -> None:
            await asyncio.sleep(5 if runs > 1 else 0)
            await ctx.step("save", shop.effect, "save")
            await asyncio.get_running_loop().create_future()

        async def fails() -> None:
            raise LookupError(await ctx.step("look", shop.effect, "look"))

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(branch())
                await asyncio.sleep(0 if runs > 1 else 0.1)
                group.create_task(fails())
        except* LookupError:
            pass
        await ctx.wait_for_signal("packed")
        return await ctx.step("save", shop.effect, "save")

    execution_id = await shop.in_flight(handler)
    assert await shop.finishes(handler, execution_id) == "save"
    assert shop.done == {"save": 2, "look": 1}
