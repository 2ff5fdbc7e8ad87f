"""Deploys that insert, replace or add branches where a run in flight has stored steps."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import pytest

from flowfabric import Context
from tests.sdk.shops import Shop

Calls = Callable[[Shop, Context], Awaitable[object]]
Code = Callable[..., Awaitable[str]]


async def mail(shop: Shop, ctx: Context, who: str) -> object:
    return await ctx.step("mail", shop.effect, f"mail {who}")


async def named(shop: Shop, ctx: Context, who: str) -> object:
    with ctx.branch(who):
        return await mail(shop, ctx, who)


async def nothing(shop: Shop, ctx: Context) -> None:
    pass


async def gathered(shop: Shop, ctx: Context) -> None:
    await asyncio.gather(mail(shop, ctx, "ada"), mail(shop, ctx, "bob"))


async def other_gathered(shop: Shop, ctx: Context) -> None:
    await asyncio.gather(mail(shop, ctx, "bob"), mail(shop, ctx, "eve"))


async def more_gathered(shop: Shop, ctx: Context) -> None:
    await asyncio.gather(*(mail(shop, ctx, who) for who in ("ada", "bob", "eve")))


async def three_gathered(shop: Shop, ctx: Context) -> None:
    await asyncio.gather(*(mail(shop, ctx, who) for who in ("ada", "bob", "dan")))


async def others_of_three_moved(shop: Shop, ctx: Context) -> None:
    """The new one is where another was: that tells nothing once the others have moved."""
    await asyncio.gather(*(mail(shop, ctx, who) for who in ("dan", "eve", "ada")))


async def named_gathered(shop: Shop, ctx: Context) -> None:
    await asyncio.gather(named(shop, ctx, "ada"), named(shop, ctx, "bob"))


async def other_named_gathered(shop: Shop, ctx: Context) -> None:
    await asyncio.gather(named(shop, ctx, "bob"), named(shop, ctx, "eve"))


async def task(shop: Shop, ctx: Context) -> None:
    await asyncio.create_task(mail(shop, ctx, "ada"))


async def group(shop: Shop, ctx: Context) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(mail(shop, ctx, "ada"))
        tasks.create_task(mail(shop, ctx, "bob"))


async def arriving(shop: Shop, ctx: Context) -> None:
    for each in asyncio.as_completed([mail(shop, ctx, "ada"), mail(shop, ctx, "bob")]):
        await each


async def waited_for(shop: Shop, ctx: Context) -> None:
    await asyncio.wait([asyncio.create_task(mail(shop, ctx, "ada"))])


async def timed(shop: Shop, ctx: Context) -> None:
    await asyncio.wait_for(mail(shop, ctx, "ada"), 60)


async def nested(shop: Shop, ctx: Context) -> None:
    await asyncio.gather(gathered(shop, ctx))


INSERTED = [gathered, named_gathered, task, group, arriving, waited_for, timed, nested]
REPLACED = [
    (gathered, other_gathered),
    (gathered, more_gathered),
    (three_gathered, others_of_three_moved),
    (named_gathered, other_named_gathered),
]


def between(shop: Shop, calls: Calls) -> Code:
    async def handler(ctx: Context) -> str:
        await ctx.step("reserve", shop.effect, "reserve")
        await calls(shop, ctx)
        await ctx.step("charge", shop.effect, "charge")
        await ctx.wait_for_signal("packed")
        return str(await ctx.step("ship", shop.effect, "ship"))

    return handler


def before(shop: Shop, calls: Calls) -> Code:
    async def handler(ctx: Context) -> str:
        await calls(shop, ctx)
        return await shop.old(ctx)

    return handler


def in_a_branch(shop: Shop, calls: Calls) -> Code:
    async def ordered(ctx: Context) -> None:
        await ctx.step("reserve", shop.effect, "reserve")
        await calls(shop, ctx)
        await ctx.step("charge", shop.effect, "charge")

    async def handler(ctx: Context) -> str:
        await asyncio.gather(ordered(ctx), ctx.wait_for_signal("packed"))
        return str(await ctx.step("ship", shop.effect, "ship"))

    return handler


@pytest.mark.parametrize("place", [between, before, in_a_branch])
@pytest.mark.parametrize("inserted", INSERTED)
async def test_branches_inserted_before_stored_steps_block_the_run_before_they_run(
    shop: Shop, place: Callable[[Shop, Calls], Code], inserted: Calls
) -> None:
    execution_id = await shop.in_flight(place(shop, nothing))
    await shop.blocked(place(shop, inserted), execution_id)
    assert await shop.finishes(place(shop, nothing), execution_id) == "ship"
    assert set(shop.done.values()) == {1}


@pytest.mark.parametrize(("old", "new"), REPLACED)
async def test_a_replaced_or_added_branch_blocks_the_run_before_it_runs(
    shop: Shop, old: Calls, new: Calls
) -> None:
    execution_id = await shop.in_flight(between(shop, old))
    why = await shop.blocked(between(shop, new), execution_id)
    assert "in the branch" in why
    assert await shop.finishes(between(shop, old), execution_id) == "ship"
    assert set(shop.done.values()) == {1}
    assert "mail eve" not in shop.done


async def test_branches_added_after_all_stored_steps_run(shop: Shop) -> None:
    async def added(ctx: Context) -> str:
        await ctx.step("reserve", shop.effect, "reserve")
        await ctx.step("charge", shop.effect, "charge")
        await ctx.wait_for_signal("packed")
        await gathered(shop, ctx)
        return str(await ctx.step("ship", shop.effect, "ship"))

    execution_id = await shop.in_flight()
    assert await shop.finishes(added, execution_id) == "ship"
    assert set(shop.done.values()) == {1}


@pytest.mark.parametrize("first", [True, False])
async def test_a_branch_added_in_the_background_runs_after_all_stored_steps(
    shop: Shop, first: bool
) -> None:
    """As one would that had been busy outside of steps until now."""

    async def added(ctx: Context) -> str:
        async def note() -> None:
            await ctx.step("note", shop.effect, "note")

        tasks: list[asyncio.Task[None]] = []
        if first:
            tasks.append(asyncio.create_task(note()))
        await ctx.step("reserve", shop.effect, "reserve")
        if not first:
            tasks.append(asyncio.create_task(note()))
        await ctx.step("charge", shop.effect, "charge")
        await ctx.wait_for_signal("packed")
        await asyncio.gather(*tasks)
        return str(await ctx.step("ship", shop.effect, "ship"))

    execution_id = await shop.in_flight()
    assert await shop.finishes(added, execution_id) == "ship"
    assert set(shop.done.values()) == {1}
    assert "note" in shop.done


async def test_a_call_given_up_by_chance_is_no_sign_of_changed_code(shop: Shop) -> None:
    """A time that is up in one run and not in another leaves open what comes next."""
    late = False

    async def timed(ctx: Context) -> None:
        try:
            async with asyncio.timeout(0 if late else None):
                await ctx.step("charge", shop.effect, "charge")
        except TimeoutError:
            await ctx.step("defer", shop.effect, "defer")

    async def handler(ctx: Context) -> str:
        await asyncio.gather(timed(ctx), mail(shop, ctx, "ada"))
        await ctx.step("note", shop.effect, "note")
        await ctx.wait_for_signal("packed")
        return str(await ctx.step("ship", shop.effect, "ship"))

    execution_id = await shop.in_flight(handler)
    late = True
    assert await shop.finishes(handler, execution_id) == "ship"
    assert set(shop.done.values()) == {1}
    assert "defer" in shop.done


async def note(shop: Shop, ctx: Context) -> None:
    await ctx.step("note", shop.effect, "note")


async def note_in_a_name(shop: Shop, ctx: Context) -> None:
    with ctx.branch("notes"):
        await note(shop, ctx)


async def note_late(shop: Shop, ctx: Context) -> None:
    await asyncio.sleep(0)
    await ctx.uuid()
    await ctx.sleep(0.01)
    await note(shop, ctx)


async def note_deeper(shop: Shop, ctx: Context) -> None:
    await asyncio.gather(note(shop, ctx), mail(shop, ctx, "eve"))


async def note_like_a_stored_one(shop: Shop, ctx: Context) -> None:
    await ctx.step("charge", shop.effect, "charge", "again")
    await note(shop, ctx)


async def note_twice(shop: Shop, ctx: Context) -> None:
    await note(shop, ctx)
    await ctx.step("file", shop.effect, "file")


BACKGROUND = [note, note_in_a_name, note_late, note_deeper, note_like_a_stored_one, note_twice]


def in_background(shop: Shop, calls: Calls, place: str, past: list[str]) -> Code:
    """`past` are the results that had reached the function when `calls` began to have effects."""

    async def handler(ctx: Context) -> str:
        seen: list[str] = []

        async def watched() -> None:
            await calls(shop, ctx)
            past.extend(seen)

        tasks: list[asyncio.Task[None]] = []
        for name in ("reserve", "charge", "pack"):
            if place == f"before {name}":
                tasks.append(asyncio.create_task(watched()))
            if name == "pack":
                await asyncio.gather(mail(shop, ctx, "ada"), mail(shop, ctx, "bob"))
            else:
                await ctx.step(name, shop.effect, name)
            seen.append(name)
        await ctx.wait_for_signal("packed")
        seen.append("packed")
        await asyncio.gather(*tasks)
        return str(await ctx.step("ship", shop.effect, "ship"))

    return handler


@pytest.mark.parametrize("place", ["before reserve", "before charge", "before pack"])
@pytest.mark.parametrize("calls", BACKGROUND)
async def test_a_branch_in_the_background_runs_once_everything_stored_was_asked_for(
    shop: Shop, calls: Calls, place: str
) -> None:
    past: list[str] = []
    execution_id = await shop.in_flight(in_background(shop, calls, "nowhere", past))
    done = shop.done.copy()
    assert await shop.finishes(in_background(shop, calls, place, past), execution_id) == "ship"
    assert past[:3] == ["reserve", "charge", "pack"]
    assert shop.done["note"] == 1
    again = int(calls is note_like_a_stored_one)
    assert {name: shop.done[name] for name in done} == {**done, "charge": 1 + again}


async def alone(shop: Shop, ctx: Context, *people: str) -> list[object]:
    return [await asyncio.create_task(mail(shop, ctx, who)) for who in people]


async def together(shop: Shop, ctx: Context, *people: str) -> list[object]:
    return await asyncio.gather(*(mail(shop, ctx, who) for who in people))


async def closing(shop: Shop, ctx: Context, *people: str) -> list[object]:
    def branch(who: str) -> Coroutine[object, object, object]:
        async def inner() -> object:
            return await mail(shop, ctx, who)

        return inner()

    return await asyncio.gather(*map(branch, people))


@pytest.mark.parametrize("start", [alone, together, closing])
@pytest.mark.parametrize(
    ("people", "others"),
    [(("ada",), ("eve",)), (("ada", "bob"), ("ada", "eve")), (("ada", "bob"), ("eve", "bob"))],
)
async def test_a_branch_with_other_arguments_in_its_place_continues_what_is_stored(
    shop: Shop,
    start: Callable[..., Awaitable[list[object]]],
    people: tuple[str, ...],
    others: tuple[str, ...],
) -> None:
    """As a step does: arguments may be a time, and the order of the code says which is meant."""

    def code(names: tuple[str, ...]) -> Code:
        async def handler(ctx: Context) -> str:
            found = await start(shop, ctx, *names)
            await ctx.wait_for_signal("packed")
            return ", ".join(map(str, found))

        return handler

    execution_id = await shop.in_flight(code(people))
    found = await shop.finishes(code(others), execution_id)
    assert found == ", ".join(f"mail {who}" for who in people)
    assert shop.done == {f"mail {who}": 1 for who in people}
