"""Deploys that change what a function calls while branches of it are under way."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import pytest

from flowfabric import Context
from tests.sdk.shops import Shop

Use = Callable[[Shop, Context, str], Awaitable[object]]
Code = Callable[[Shop, Context, Use], Awaitable[str]]


async def use(shop: Shop, ctx: Context, who: str) -> object:
    return await ctx.step("use", shop.effect, f"use {who}")


async def use_renamed(shop: Shop, ctx: Context, who: str) -> object:
    return await ctx.step("used", shop.effect, f"use {who}")


async def use_inserted(shop: Shop, ctx: Context, who: str) -> object:
    await ctx.step("notify", shop.effect, f"notify {who}")
    return await use(shop, ctx, who)


async def use_of_another_kind(shop: Shop, ctx: Context, who: str) -> object:
    return await ctx.uuid()


async def fetched(shop: Shop, ctx: Context, who: str) -> str:
    await ctx.step("fetch", shop.effect, f"fetch {who}")
    if who == "bob":
        await ctx.wait_for_signal("packed")
    return who


async def as_completed(shop: Shop, ctx: Context, use: Use) -> str:
    for each in asyncio.as_completed([fetched(shop, ctx, "ada"), fetched(shop, ctx, "bob")]):
        await use(shop, ctx, await each)
    return "done"


async def as_waited(shop: Shop, ctx: Context, use: Use) -> str:
    pending = {asyncio.create_task(fetched(shop, ctx, who)) for who in ("ada", "bob")}
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await use(shop, ctx, task.result())
    return "done"


async def beside_a_task(shop: Shop, ctx: Context, use: Use) -> str:
    task = asyncio.create_task(fetched(shop, ctx, "bob"))
    await ctx.step("reserve", shop.effect, "reserve")
    await use(shop, ctx, "ada")
    await task
    return "done"


async def in_the_body_of_a_group(shop: Shop, ctx: Context, use: Use) -> str:
    async with asyncio.TaskGroup() as group:
        group.create_task(fetched(shop, ctx, "bob"))
        await ctx.step("reserve", shop.effect, "reserve")
        await use(shop, ctx, "ada")
    return "done"


async def beside_a_task_without_calls(shop: Shop, ctx: Context, use: Use) -> str:
    over = asyncio.Event()
    task = asyncio.create_task(over.wait())
    await ctx.step("reserve", shop.effect, "reserve")
    await use(shop, ctx, "ada")
    await ctx.wait_for_signal("packed")
    over.set()
    await task
    return "done"


CODES = [
    as_completed,
    as_waited,
    beside_a_task,
    in_the_body_of_a_group,
    beside_a_task_without_calls,
]
CHANGES = [use_renamed, use_inserted, use_of_another_kind]


def deployed(shop: Shop, code: Code, use: Use) -> Callable[[Context], Coroutine[None, None, str]]:
    async def handler(ctx: Context) -> str:
        return await code(shop, ctx, use)

    return handler


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("code", CODES)
async def test_another_call_beside_a_branch_blocks_the_run_until_the_old_code_is_back(
    shop: Shop, code: Code, change: Use
) -> None:
    execution_id = await shop.in_flight(deployed(shop, code, use))
    why = await shop.blocked(deployed(shop, code, change), execution_id)
    assert "is not stored, but step 'use' is and has not been asked for" in why
    assert await shop.finishes(deployed(shop, code, use), execution_id) == "done"
    assert set(shop.done.values()) == {1}


@pytest.mark.parametrize("code", CODES)
async def test_another_call_beside_a_branch_runs_when_it_is_accepted(
    shop: Shop, code: Code
) -> None:
    execution_id = await shop.in_flight(deployed(shop, code, use))
    assert await shop.accepted(deployed(shop, code, use_inserted), execution_id) == "done"
    assert set(shop.done.values()) == {1}
    assert shop.done["notify ada"] == 1


async def test_old_code_fits_again_after_new_code_had_other_branches(shop: Shop) -> None:
    async def renamed(shop: Shop, ctx: Context, who: str) -> object:
        return await use(shop, ctx, who)

    async def spawned(shop: Shop, ctx: Context, use: Use) -> str:
        coming = [fetched(shop, ctx, "ada"), fetched(shop, ctx, "bob")]
        tasks = [
            asyncio.ensure_future(use(shop, ctx, await each))
            for each in asyncio.as_completed(coming)
        ]
        await asyncio.gather(*tasks)
        return "done"

    execution_id = await shop.in_flight(deployed(shop, spawned, use))
    why = await shop.blocked(deployed(shop, spawned, renamed), execution_id)
    assert "step 'use' in the branch 'use[1]' is and has not been asked for" in why
    assert await shop.finishes(deployed(shop, spawned, use), execution_id) == "done"
    assert set(shop.done.values()) == {1}


async def test_finished_tasks_may_come_in_another_order_beside_one_under_way(shop: Shop) -> None:
    async def fetch(ctx: Context, who: str) -> str:
        return await ctx.step("fetch", shop.effect, f"fetch {who}")

    async def under_way(ctx: Context, over: asyncio.Event) -> None:
        await ctx.uuid()
        await over.wait()

    async def code(ctx: Context, *, reverse: bool) -> str:
        over = asyncio.Event()
        beside = asyncio.create_task(under_way(ctx, over))
        tasks = [asyncio.create_task(fetch(ctx, who)) for who in ("ada", "bob")]

        async def both() -> None:
            await asyncio.wait(tasks)

        await ctx.step("both", both)
        first = True
        # A set of tasks has them in this order, or in that.
        for task in sorted(tasks, key=lambda task: task.result(), reverse=reverse):
            await ctx.step(f"use {task.result()}", shop.effect, f"use {task.result()}")
            if first:
                await ctx.wait_for_signal("packed")
            first = False
        over.set()
        await beside
        return "done"

    async def one_way(ctx: Context) -> str:
        return await code(ctx, reverse=False)

    async def the_other_way(ctx: Context) -> str:
        return await code(ctx, reverse=True)

    execution_id = await shop.in_flight(one_way)
    assert await shop.finishes(the_other_way, execution_id) == "done"
    assert set(shop.done.values()) == {1}
    assert len(shop.done) == 4


async def test_tasks_that_ended_during_several_calls_may_come_in_another_order(
    shop: Shop,
) -> None:
    async def code(ctx: Context, *, reverse: bool) -> str:
        over, bob_may = asyncio.Event(), asyncio.Event()

        async def under_way() -> None:
            await ctx.uuid()
            await over.wait()

        async def load(who: str) -> str:
            if who == "bob":
                await bob_may.wait()
            return await shop.effect(f"fetch {who}")

        async def fetch(who: str) -> str:
            await ctx.step("fetch", load, who)
            return who

        async def wait(task: asyncio.Task[str]) -> None:
            await asyncio.wait([task])

        beside = asyncio.create_task(under_way())
        ada, bob = (asyncio.create_task(fetch(who)) for who in ("ada", "bob"))
        await ctx.step("wait for ada", wait, ada)
        bob_may.set()
        await ctx.step("wait for bob", wait, bob)
        done, _ = await asyncio.wait([ada, bob])
        # A set of tasks has them in this order, or in that.
        first, second = sorted((task.result() for task in done), reverse=reverse)
        await ctx.step(f"use {first}", shop.effect, f"use {first}")
        await ctx.wait_for_signal("packed")
        await ctx.step(f"use {second}", shop.effect, f"use {second}")
        over.set()
        await beside
        return "done"

    async def one_way(ctx: Context) -> str:
        return await code(ctx, reverse=False)

    async def the_other_way(ctx: Context) -> str:
        return await code(ctx, reverse=True)

    execution_id = await shop.in_flight(one_way)
    assert await shop.finishes(the_other_way, execution_id) == "done"
    assert set(shop.done.values()) == {1}
    assert len(shop.done) == 4


@pytest.mark.parametrize("at_once", [1, 2])
async def test_branches_with_names_may_come_in_another_order(shop: Shop, at_once: int) -> None:
    async def fetch(ctx: Context, who: str) -> None:
        with ctx.branch(who):
            await ctx.step("fetch", shop.effect, f"fetch {who}")
            # Every branch asks for these, with the same arguments or none.
            await ctx.uuid()
            await ctx.step("log", str.upper, "fetched")

    async def code(ctx: Context, *people: str) -> str:
        for first in range(0, len(people), at_once):
            await asyncio.gather(*(fetch(ctx, who) for who in people[first : first + at_once]))
            if first == 0:
                with ctx.branch("gate"):
                    await ctx.wait_for_signal("packed")
        return "done"

    async def one_way(ctx: Context) -> str:
        return await code(ctx, "ada", "bob", "cy", "dan")

    async def the_other_way(ctx: Context) -> str:
        return await code(ctx, "dan", "cy", "bob", "ada")

    execution_id = await shop.in_flight(one_way)
    assert await shop.finishes(the_other_way, execution_id) == "done"
    assert shop.done == {f"fetch {who}": 1 for who in ("ada", "bob", "cy", "dan")}
