"""Deploys that leave something behind in a branch, or come before one; see docs/deploys.md."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext

import pytest

from flowfabric import Context
from tests.sdk.shops import Shop, branched, fetch

Code = Callable[[Shop, Context], Awaitable[str]]


async def named(shop: Shop, ctx: Context) -> str:
    with ctx.branch("ada"):
        await ctx.step("fetch", shop.effect, "ada")
    await ctx.wait_for_signal("packed")
    return await ctx.step("ship", shop.effect, "ship")


async def all_in_a_name(shop: Shop, ctx: Context) -> str:
    with ctx.branch("ada"):
        await ctx.step("fetch", shop.effect, "ada")
        await ctx.wait_for_signal("packed")
        return await ctx.step("ship", shop.effect, "ship")


async def several_names(shop: Shop, ctx: Context) -> str:
    async def one(who: str) -> str:
        with ctx.branch(who):
            return await ctx.step("fetch", shop.effect, who)

    got = await asyncio.gather(one("ada"), one("bob"))
    await ctx.wait_for_signal("packed")
    return ", ".join(got)


BEFORE = [named, all_in_a_name, several_names, branched]


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("old", BEFORE)
async def test_a_step_inserted_before_branches_blocks_the_run_until_it_is_accepted(
    shop: Shop, old: Code, accepted: bool
) -> None:
    async def old_code(ctx: Context) -> str:
        return await old(shop, ctx)

    async def new_code(ctx: Context) -> str:
        await ctx.step("notify", shop.effect, "notify")
        return await old(shop, ctx)

    execution_id = await shop.in_flight(old_code)
    if accepted:
        await shop.accepted(new_code, execution_id)
    else:
        assert "step 'notify' is not stored, but " in await shop.blocked(new_code, execution_id)
    assert set(shop.done.values()) == {1}
    assert shop.done["notify"] == int(accepted)


@pytest.mark.parametrize("named", [False, True])
async def test_a_change_accepted_in_one_branch_is_accepted_in_those_like_it(
    shop: Shop, named: bool
) -> None:
    def code(step: str) -> Callable[[Context], Coroutine[None, None, str]]:
        async def prepare(ctx: Context, who: str) -> None:
            await ctx.step(step, shop.effect, f"{step} {who}")
            await ctx.step("check", shop.effect, f"check {who}")
            if who == "ada":
                await ctx.wait_for_signal("packed")
                # It is parked, and comes by the accepted call again.
                await ctx.sleep(0.01)
                await ctx.step("ship", shop.effect, "ship")

        async def branch(ctx: Context, who: str) -> None:
            with ctx.branch(who) if named else nullcontext():
                await prepare(ctx, who)

        async def handler(ctx: Context) -> str:
            await asyncio.gather(branch(ctx, "ada"), branch(ctx, "bob"))
            return "done"

        return handler

    execution_id = await shop.in_flight(code("load"))
    assert await shop.accepted(code("fetch"), execution_id) == "done"
    assert set(shop.done.values()) == {1}
    assert {"fetch ada", "fetch bob", "ship"} <= shop.done.keys()


@pytest.mark.parametrize("old", BEFORE)
async def test_a_patch_before_branches_is_off_for_runs_that_passed_it(
    shop: Shop, old: Code
) -> None:
    async def old_code(ctx: Context) -> str:
        return await old(shop, ctx)

    async def new_code(ctx: Context) -> str:
        if await ctx.patched("notify"):
            await ctx.step("notify", shop.effect, "notify")
        return await old(shop, ctx)

    execution_id = await shop.in_flight(old_code)
    await shop.finishes(new_code, execution_id)
    assert "notify" not in shop.done
    assert set(shop.done.values()) == {1}


async def test_a_patch_beside_a_branch_is_off_for_runs_that_passed_it(shop: Shop) -> None:
    async def code(ctx: Context, *, patched: bool) -> str:
        async def beside() -> None:
            await ctx.wait_for_signal("packed")
            await ctx.step("late", shop.effect, "late")

        task = asyncio.create_task(beside())
        await ctx.step("reserve", shop.effect, "reserve")
        if patched and await ctx.patched("notify"):
            await ctx.step("notify", shop.effect, "notify")
        charged = await ctx.step("charge", shop.effect, "charge")
        await task
        return charged

    async def old_code(ctx: Context) -> str:
        return await code(ctx, patched=False)

    async def new_code(ctx: Context) -> str:
        return await code(ctx, patched=True)

    execution_id = await shop.in_flight(old_code)
    assert await shop.finishes(new_code, execution_id) == "charge"
    assert shop.done == {"reserve": 1, "charge": 1, "late": 1}


async def test_a_patch_beside_a_task_without_calls_is_off_too(shop: Shop) -> None:
    async def code(ctx: Context, *, patched: bool) -> str:
        over = asyncio.Event()
        task = asyncio.create_task(over.wait())
        await ctx.step("reserve", shop.effect, "reserve")
        if patched and await ctx.patched("notify"):
            await ctx.step("notify", shop.effect, "notify")
        charged = await ctx.step("charge", shop.effect, "charge")
        await ctx.wait_for_signal("packed")
        over.set()
        await task
        return charged

    async def old_code(ctx: Context) -> str:
        return await code(ctx, patched=False)

    async def new_code(ctx: Context) -> str:
        return await code(ctx, patched=True)

    execution_id = await shop.in_flight(old_code)
    assert await shop.finishes(new_code, execution_id) == "charge"
    assert shop.done == {"reserve": 1, "charge": 1}


@pytest.mark.parametrize("accepted", [False, True])
async def test_a_branch_removed_beside_others_blocks_the_run_at_the_next_new_call(
    shop: Shop, accepted: bool
) -> None:
    async def old_code(ctx: Context) -> str:
        got = await branched(shop, ctx)
        return got + await ctx.step("ship", shop.effect, "ship")

    async def new_code(ctx: Context) -> str:
        (got,) = await asyncio.gather(fetch(shop, ctx, "bob"))
        await ctx.wait_for_signal("packed")
        return got + await ctx.step("ship", shop.effect, "ship")

    execution_id = await shop.in_flight(old_code)
    if accepted:
        assert await shop.accepted(new_code, execution_id) == "fetch bobship"
        assert shop.done == {"fetch ada": 1, "fetch bob": 1, "ship": 1}
    else:
        why = await shop.blocked(new_code, execution_id)
        assert "step 'fetch' in the branch 'fetch[1]' is and has not been asked for" in why
