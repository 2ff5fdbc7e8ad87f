"""Deploys that remove or insert one of several calls of one name; see docs/deploys.md."""

import pytest

from flowfabric import Context
from tests.sdk.shops import Shop


async def old(shop: Shop, ctx: Context) -> str:
    await ctx.step("charge", shop.effect, "ada")
    await ctx.step("charge", shop.effect, "bob")
    await ctx.wait_for_signal("packed")
    return await ctx.step("charge", shop.effect, "cyd")


@pytest.mark.parametrize("accepted", [False, True])
async def test_what_a_removed_call_has_stored_goes_to_no_call_with_other_arguments(
    shop: Shop, accepted: bool
) -> None:
    async def old_code(ctx: Context) -> str:
        return await old(shop, ctx)

    async def new_code(ctx: Context) -> str:
        first = await ctx.step("charge", shop.effect, "bob")
        return f"{first}, {await ctx.step('charge', shop.effect, 'cyd')}"

    execution_id = await shop.in_flight(old_code)
    if accepted:
        assert await shop.accepted(new_code, execution_id) == "bob, cyd"
        assert shop.done == {"ada": 1, "bob": 1, "cyd": 1}
    else:
        why = await shop.blocked(new_code, execution_id)
        assert "step 'charge' (number 2) is not stored, but step 'charge' is" in why


@pytest.mark.parametrize("accepted", [False, True])
async def test_an_inserted_call_runs_once_it_is_accepted_and_those_after_it_do_not(
    shop: Shop, accepted: bool
) -> None:
    async def old_code(ctx: Context) -> str:
        return await old(shop, ctx)

    async def new_code(ctx: Context) -> str:
        zoe = await ctx.step("charge", shop.effect, "zoe")
        return f"{zoe}, {await old(shop, ctx)}"

    execution_id = await shop.in_flight(old_code)
    if accepted:
        assert await shop.accepted(new_code, execution_id) == "zoe, cyd"
        assert shop.done == {"zoe": 1, "ada": 1, "bob": 1, "cyd": 1}
    else:
        why = await shop.blocked(new_code, execution_id)
        assert "another call of this name has been given its result" in why
