"""Deploys of changed code over runs in flight, each with the outcome that docs/deploys.md states.

Every run begins with the same old code and waits for a signal; then the worker is replaced
by one with other code, and the signal is sent. *Blocked* means that nothing new ran, nothing
failed, and that the run goes on when code that fits is deployed, or when somebody accepts the
change.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from flowfabric import App, Context, all_of, any_of, count
from flowfabric.core.conditions import Condition
from flowfabric.core.diagnosis import Cause
from flowfabric.core.states import PublicState
from flowfabric.errors import ExecutionCancelled, ExecutionNotEligible
from tests.apps import ASK_AGAIN_S, blocked, reached, working
from tests.sdk.quotes import (
    NEW,
    OLD,
    Asking,
    Quotes,
    asked_by_signal,
    asked_in_a_step,
    asked_of_a_child,
)
from tests.sdk.shops import Shop, branched, run_of

ONCE_EACH = {"reserve": 1, "charge": 1, "ship": 1}


# Harmless


async def test_the_same_code_goes_on_where_the_run_was(shop: Shop) -> None:
    execution_id = await shop.in_flight()
    assert await shop.finishes(shop.old, execution_id) == "ship"
    assert shop.done == ONCE_EACH


async def test_a_step_inserted_after_all_stored_ones_just_runs(shop: Shop) -> None:
    async def new(ctx: Context) -> str:
        await ctx.step("reserve", shop.effect, "reserve")
        await ctx.step("charge", shop.effect, "charge")
        await ctx.step("notify", shop.effect, "notify")
        await ctx.wait_for_signal("packed")
        return await ctx.step("ship", shop.effect, "ship")

    execution_id = await shop.in_flight()
    assert await shop.finishes(new, execution_id) == "ship"
    assert shop.done == {**ONCE_EACH, "notify": 1}


async def waits_for_boxed(shop: Shop, ctx: Context) -> str:
    await ctx.step("reserve", shop.effect, "reserve")
    await ctx.step("charge", shop.effect, "charge")
    await ctx.wait_for_signal("boxed")
    return await ctx.step("ship", shop.effect, "ship")


async def test_a_signal_of_the_old_name_does_not_end_a_renamed_wait(shop: Shop) -> None:
    async def new(ctx: Context) -> str:
        return await waits_for_boxed(shop, ctx)

    execution_id = await shop.in_flight()
    async with shop.deployed(new) as app:
        run = run_of(app, execution_id)
        await reached(run, PublicState.SUSPENDED)
        assert (await run.why()).sentence == "It is suspended until it gets a signal: 'boxed'."
        await run.signal("boxed")
        assert await run.result(timeout="20s") == "ship"
    assert shop.done == ONCE_EACH


@pytest.mark.parametrize(
    ("asked", "asks", "sent"),
    [
        (any_of("packed", "boxed"), all_of("packed", "boxed"), ("packed", "boxed")),
        (any_of("packed", "boxed"), all_of("packed", "boxed"), ("boxed", "packed")),
        (count(1, "packed"), count(2, "packed"), ("packed", "packed")),
    ],
)
async def test_a_wait_that_asks_for_more_by_now_goes_on_with_what_came(
    shop: Shop, asked: Condition, asks: Condition, sent: tuple[str, str]
) -> None:
    def waiting_for(condition: Condition) -> Callable[[Context], Awaitable[str]]:
        async def order(ctx: Context) -> str:
            await ctx.step("charge", shop.effect, "charge")
            came = await ctx.wait_for(condition)
            await ctx.step("ship", shop.effect, "ship")
            return ", ".join(each.source for each in came)

        return order

    async with shop.deployed(waiting_for(asked)) as app:
        execution_id = (await app.submit(app.tasks["order"]())).execution_id
        await reached(run_of(app, execution_id), PublicState.SUSPENDED)
    async with shop.deployed(waiting_for(asks)) as app:
        run = run_of(app, execution_id)
        assert (await run.signal(sent[0], source="ada")).resumed
        async with asyncio.timeout(20):
            for _ in itertools.count():
                sentence = (await run.why()).sentence
                if "1 of 2 signals" in sentence:
                    break
                await asyncio.sleep(ASK_AGAIN_S)
        assert "set aside" not in sentence
        assert shop.done == {"charge": 1}
        await run.signal(sent[1], source="bob")
        assert sorted(str(await run.result(timeout="20s")).split(", ")) == ["ada", "bob"]
    assert shop.done == {"charge": 1, "ship": 1}


async def test_a_wait_is_renamed_once_a_signal_of_the_old_name_wakes_the_run(shop: Shop) -> None:
    async def new(ctx: Context) -> str:
        return await waits_for_boxed(shop, ctx)

    async with shop.deployed(shop.old) as app:
        execution_id = (await app.submit(app.tasks["order"]())).execution_id
        await reached(run_of(app, execution_id), PublicState.SUSPENDED)
    async with shop.deployed(new) as app:
        run = run_of(app, execution_id)
        early = await run.signal("boxed")
        assert (early.resumed, early.kept) == (False, True)
        assert (await run.signal("packed")).resumed
        assert await run.result(timeout="20s") == "ship"
    assert shop.done == ONCE_EACH


async def test_stored_steps_that_the_code_ends_without_are_no_problem(shop: Shop) -> None:
    async def new(ctx: Context) -> str:
        return await ctx.step("reserve", shop.effect, "reserve")

    execution_id = await shop.in_flight()
    assert await shop.finishes(new, execution_id) == "reserve"
    assert shop.done == {"reserve": 1, "charge": 1}


async def test_stored_steps_in_another_order_run_once_each(shop: Shop) -> None:
    async def new(ctx: Context) -> str:
        await ctx.step("charge", shop.effect, "charge")
        await ctx.step("reserve", shop.effect, "reserve")
        await ctx.wait_for_signal("packed")
        return await ctx.step("ship", shop.effect, "ship")

    execution_id = await shop.in_flight()
    assert await shop.finishes(new, execution_id) == "ship"
    assert shop.done == ONCE_EACH


async def test_a_stored_step_with_another_argument_returns_what_it_stored(shop: Shop) -> None:
    async def new(ctx: Context) -> str:
        await ctx.step("reserve", shop.effect, "reserve")
        charged = await ctx.step("charge", shop.effect, "charge in euros", "EUR")
        await ctx.wait_for_signal("packed")
        return charged + await ctx.step("ship", shop.effect, "ship")

    execution_id = await shop.in_flight()
    assert await shop.finishes(new, execution_id) == "chargeship"
    assert shop.done == ONCE_EACH


# Blocked


async def inserted(shop: Shop, ctx: Context) -> str:
    await ctx.step("reserve", shop.effect, "reserve")
    await ctx.step("notify", shop.effect, "notify")
    await ctx.step("charge", shop.effect, "charge")
    await ctx.wait_for_signal("packed")
    return await ctx.step("ship", shop.effect, "ship")


async def renamed(shop: Shop, ctx: Context) -> str:
    await ctx.step("reserve", shop.effect, "reserve")
    await ctx.step("bill", shop.effect, "bill")
    await ctx.wait_for_signal("packed")
    return await ctx.step("ship", shop.effect, "ship")


async def removed(shop: Shop, ctx: Context) -> str:
    await ctx.step("charge", shop.effect, "charge")
    await ctx.wait_for_signal("packed")
    return await ctx.step("ship", shop.effect, "ship")


async def other_kind(shop: Shop, ctx: Context) -> str:
    await ctx.step("reserve", shop.effect, "reserve")
    await ctx.sleep(0)
    await ctx.wait_for_signal("packed")
    return await ctx.step("ship", shop.effect, "ship")


CHANGES = {
    "inserted before a stored step": (inserted, "notify", {"notify": 1}),
    "renamed": (renamed, "bill", {"bill": 1}),
    "removed before others": (removed, "reserve", {}),
    "of another kind": (other_kind, "sleep", {}),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_code_that_does_not_fit_blocks_the_run_until_code_that_does(
    shop: Shop, change: str
) -> None:
    code, named, _ = CHANGES[change]

    async def new(ctx: Context) -> str:
        return await code(shop, ctx)

    execution_id = await shop.in_flight()
    assert named in await shop.blocked(new, execution_id)
    assert await shop.finishes(shop.old, execution_id) == "ship"
    assert shop.done == ONCE_EACH


@pytest.mark.parametrize("change", CHANGES)
async def test_one_acceptance_lets_the_run_end_with_the_new_code(shop: Shop, change: str) -> None:
    code, _, more = CHANGES[change]

    async def new(ctx: Context) -> str:
        return await code(shop, ctx)

    execution_id = await shop.in_flight()
    assert await shop.accepted(new, execution_id) == "ship"
    assert shop.done == {**ONCE_EACH, **more}


async def test_an_acceptance_is_good_for_one_change_only(shop: Shop) -> None:
    async def accepted(ctx: Context) -> str:
        shipped = await inserted(shop, ctx)
        await ctx.wait_for_signal("delivered")
        return shipped

    async def renamed_later(ctx: Context) -> str:
        await ctx.step("reserve", shop.effect, "reserve")
        await ctx.step("notify", shop.effect, "notify")
        await ctx.step("charge", shop.effect, "charge")
        await ctx.wait_for_signal("packed")
        await ctx.step("send", shop.effect, "send")
        await ctx.wait_for_signal("delivered")
        return "sent"

    execution_id = await shop.in_flight()
    async with shop.deployed(accepted) as app:
        run = run_of(app, execution_id)
        await blocked(run)
        await run.accept_changes()
        await reached(run, PublicState.SUSPENDED)
    async with App(shop.url) as app:
        await app.signals.send(execution_id, "delivered")
    assert "send" in await shop.blocked(renamed_later, execution_id)
    assert await shop.finishes(accepted, execution_id) == "ship"
    assert shop.done == {**ONCE_EACH, "notify": 1}


async def test_a_blocked_run_is_cancelled_like_any_other(shop: Shop) -> None:
    async def new(ctx: Context) -> str:
        return await renamed(shop, ctx)

    execution_id = await shop.in_flight()
    async with shop.deployed(new) as app:
        run = run_of(app, execution_id)
        await blocked(run)
        await run.cancel()
        with pytest.raises(ExecutionCancelled):
            await run.result(timeout="20s")


async def test_a_handler_that_catches_everything_is_blocked_all_the_same(shop: Shop) -> None:
    async def new(ctx: Context) -> str:
        try:
            return await renamed(shop, ctx)
        except Exception:
            return await ctx.step("apologise", shop.effect, "apologise")
        finally:
            shop.done["left"] = 0

    execution_id = await shop.in_flight()
    await shop.blocked(new, execution_id)
    assert await shop.finishes(shop.old, execution_id) == "ship"


async def test_a_plain_function_is_blocked_as_well(shop: Shop) -> None:
    def new(ctx: Context) -> str:
        ctx.blocking.step("reserve", shop.effect, "reserve")
        ctx.blocking.step("bill", shop.effect, "bill")
        return "done"

    app = App(shop.url)
    app.task(name="order")(new)
    execution_id = await shop.in_flight()
    async with app, working(app):
        assert "bill" in await blocked(run_of(app, execution_id))
    assert await shop.finishes(shop.old, execution_id) == "ship"
    assert shop.done == ONCE_EACH


# Branches


async def load(shop: Shop, ctx: Context, who: str) -> str:
    return await ctx.step("fetch", shop.effect, f"load {who}")


async def other_branches(shop: Shop, ctx: Context) -> str:
    got = await asyncio.gather(load(shop, ctx, "ada"), load(shop, ctx, "bob"))
    await ctx.wait_for_signal("packed")
    return ", ".join(got)


async def test_a_branch_of_another_name_blocks_the_run(shop: Shop) -> None:
    async def old(ctx: Context) -> str:
        return await branched(shop, ctx)

    async def new(ctx: Context) -> str:
        return await other_branches(shop, ctx)

    execution_id = await shop.in_flight(old)
    assert "load" in await shop.blocked(new, execution_id)
    assert await shop.finishes(old, execution_id) == "fetch ada, fetch bob"
    assert shop.done == {"fetch ada": 1, "fetch bob": 1}


async def test_a_step_inserted_before_parallel_branches_blocks_the_run(shop: Shop) -> None:
    async def old(ctx: Context) -> str:
        return await branched(shop, ctx)

    async def new(ctx: Context) -> str:
        await ctx.step("notify", shop.effect, "notify")
        return await branched(shop, ctx)

    execution_id = await shop.in_flight(old)
    sentence = await shop.blocked(new, execution_id)
    assert "step 'notify' is not stored, but the branch 'fetch' is" in sentence
    assert await shop.finishes(old, execution_id) == "fetch ada, fetch bob"
    assert shop.done == {"fetch ada": 1, "fetch bob": 1}


async def test_a_step_removed_before_parallel_branches_blocks_the_run(shop: Shop) -> None:
    async def old(ctx: Context) -> str:
        await ctx.step("notify", shop.effect, "notify")
        return await branched(shop, ctx)

    async def new(ctx: Context) -> str:
        return await branched(shop, ctx)

    execution_id = await shop.in_flight(old)
    sentence = await shop.blocked(new, execution_id)
    assert "step 'notify' is and has not been asked for" in sentence
    assert await shop.finishes(old, execution_id) == "fetch ada, fetch bob"
    assert shop.done == {"notify": 1, "fetch ada": 1, "fetch bob": 1}


async def test_an_accepted_change_before_parallel_branches_leaves_their_effects_alone(
    shop: Shop,
) -> None:
    async def old(ctx: Context) -> str:
        return await branched(shop, ctx)

    async def new(ctx: Context) -> str:
        await ctx.step("notify", shop.effect, "notify")
        return await branched(shop, ctx)

    execution_id = await shop.in_flight(old)
    assert await shop.accepted(new, execution_id) == "fetch ada, fetch bob"
    assert shop.done == {"notify": 1, "fetch ada": 1, "fetch bob": 1}


async def test_stored_steps_in_another_order_leave_the_branches_after_them_alone(
    shop: Shop,
) -> None:
    async def old(ctx: Context) -> str:
        await ctx.step("notify", shop.effect, "notify")
        await ctx.step("charge", shop.effect, "charge")
        return await branched(shop, ctx)

    async def new(ctx: Context) -> str:
        await ctx.step("charge", shop.effect, "charge")
        await ctx.step("notify", shop.effect, "notify")
        return await branched(shop, ctx)

    execution_id = await shop.in_flight(old)
    assert await shop.finishes(new, execution_id) == "fetch ada, fetch bob"
    assert shop.done == {"notify": 1, "charge": 1, "fetch ada": 1, "fetch bob": 1}


# The task itself


async def test_a_new_argument_of_the_task_with_a_default_gets_it(shop: Shop) -> None:
    async def new(ctx: Context, currency: str = "EUR") -> str:
        return f"{await shop.old(ctx)} in {currency}"

    execution_id = await shop.in_flight()
    assert await shop.finishes(new, execution_id) == "ship in EUR"
    assert shop.done == ONCE_EACH


async def test_a_new_argument_of_the_task_without_a_default_blocks_the_run(shop: Shop) -> None:
    async def new(ctx: Context, currency: str) -> str:
        return f"{await shop.old(ctx)} in {currency}"

    execution_id = await shop.in_flight()
    async with shop.deployed(new) as app:
        sentence = await blocked(run_of(app, execution_id))
    assert "argument currency of order" in sentence
    assert "deploy code that fits, or cancel it" in sentence
    assert await shop.finishes(shop.old, execution_id) == "ship"
    assert shop.done == ONCE_EACH


async def test_a_removed_task_waits_until_it_is_there_again(shop: Shop) -> None:
    execution_id = await shop.in_flight()
    app = App(shop.url)

    @app.task
    async def other() -> None: ...

    async with app, working(app):
        await (await app.submit(other)).result(timeout="20s")
        found = await app.engine.explain_execution(execution_id)
        assert (found.cause, found.public_state) == (Cause.NO_WORKER, PublicState.WAITING)
    assert await shop.finishes(shop.old, execution_id) == "ship"
    assert shop.done == ONCE_EACH


# Code that changes on purpose


async def patched(shop: Shop, ctx: Context) -> str:
    await ctx.step("reserve", shop.effect, "reserve")
    if await ctx.patched("notify first"):
        await ctx.step("notify", shop.effect, "notify")
    await ctx.step("charge", shop.effect, "charge")
    await ctx.wait_for_signal("packed")
    return await ctx.step("ship", shop.effect, "ship")


async def test_a_patch_is_off_for_runs_past_it_and_on_for_others(shop: Shop) -> None:
    async def new(ctx: Context) -> str:
        return await patched(shop, ctx)

    execution_id = await shop.in_flight()
    assert await shop.finishes(new, execution_id) == "ship"
    assert shop.done == ONCE_EACH
    later = await shop.in_flight(new)
    assert await shop.finishes(new, later) == "ship"
    assert shop.done == {"reserve": 2, "charge": 2, "ship": 2, "notify": 1}


async def test_a_patch_can_be_removed_when_every_run_has_it(shop: Shop) -> None:
    async def with_patch(ctx: Context) -> str:
        return await patched(shop, ctx)

    async def without(ctx: Context) -> str:
        return await inserted(shop, ctx)

    execution_id = await shop.in_flight(with_patch)
    assert await shop.finishes(without, execution_id) == "ship"
    assert shop.done == {**ONCE_EACH, "notify": 1}


async def test_a_patch_before_parallel_branches_leaves_them_what_they_stored(shop: Shop) -> None:
    async def old(ctx: Context) -> str:
        return await branched(shop, ctx)

    async def new(ctx: Context) -> str:
        on = await ctx.patched("say so")
        return f"{on}: {await branched(shop, ctx)}"

    execution_id = await shop.in_flight(old)
    later = await shop.in_flight(new)
    assert shop.done == {"fetch ada": 2, "fetch bob": 2}
    assert await shop.finishes(old, later) == "fetch ada, fetch bob"
    assert shop.done == {"fetch ada": 2, "fetch bob": 2}
    assert await shop.finishes(new, execution_id) == "False: fetch ada, fetch bob"
    assert shop.done == {"fetch ada": 2, "fetch bob": 2}


async def test_a_plain_function_asks_for_a_patch_too(shop: Shop) -> None:
    def new(ctx: Context) -> str:
        ctx.blocking.step("reserve", shop.effect, "reserve")
        if ctx.blocking.patched("notify first"):
            ctx.blocking.step("notify", shop.effect, "notify")
        ctx.blocking.step("charge", shop.effect, "charge")
        ctx.blocking.wait_for_signal("packed")
        return ctx.blocking.step("ship", shop.effect, "ship")

    app = App(shop.url)
    app.task(name="order")(new)
    execution_id = await shop.in_flight()
    async with app, working(app):
        assert await run_of(app, execution_id).result(timeout="20s") == "ship"
    assert shop.done == ONCE_EACH


# Types


@pytest.mark.parametrize(
    ("ask", "problem"),
    [
        (asked_in_a_step, "the result of step quote: does not fit its return annotation"),
        (asked_by_signal, "payload of signal quote: does not fit the type asked for"),
        (asked_of_a_child, "the result of quote: does not fit its return annotation"),
    ],
)
async def test_what_is_stored_and_no_longer_fits_its_type_blocks_the_run(
    store_url: str, ask: Asking, problem: str
) -> None:
    shop = Quotes(store_url, ask)
    execution_id = await shop.in_flight()
    async with shop.deployed(NEW) as app:
        run = run_of(app, execution_id)
        await run.signal("paid")
        sentence = await blocked(run)
        assert f"{problem}: currency: Field required" in sentence
        assert "deploy code that fits, or cancel it." in sentence
        seen = await run.snapshot()
        assert (seen.retry_count, seen.total_attempt_count) == (0, 1)
        with pytest.raises(ExecutionNotEligible, match="changes nothing that is stored"):
            await run.accept_changes()
    async with shop.deployed(OLD) as app:
        assert await run_of(app, execution_id).result(timeout="20s") == "Quote(price=5)"
