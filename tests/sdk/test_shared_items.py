"""Branches that take items from something they share, others in every run; see docs/branches.md."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext

import pytest

from flowfabric import Context
from flowfabric.worker import pools
from tests.sdk.shops import Shop

Handler = Callable[[Context], Coroutine[None, None, str]]
Calls = Callable[[Shop, Context, int], Awaitable[str]]
OUTSIDE_S = 0.5
"""How long a handler works outside of steps: longer than another branch needs to come to a call."""


@pytest.fixture(autouse=True)
def less_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a branch that never comes waits for six times what another one takes."""
    monkeypatch.setattr(pools, "NUMBER_PATIENCE_S", 6 * OUTSIDE_S)


class Schedule:
    """Which worker takes which item, in which run: `"aba"` gives the third one to the first."""

    def __init__(self, *runs: str) -> None:
        self._runs = list(runs)
        self._order = ""
        self._taken = 0
        self._waiting: list[asyncio.Future[None]] = []

    def begin(self) -> None:
        """The last one holds for all runs that come after."""
        self._order = self._runs.pop(0) if len(self._runs) > 1 else self._runs[0]
        self._taken = 0
        self._waiting = []

    async def take(self, who: str) -> int | None:
        """The next item, when it is this worker's turn; something outside of steps decides."""
        while self._taken < len(self._order):
            if self._order[self._taken] == who:
                self._taken += 1
                for each in self._waiting:
                    if not each.done():
                        each.set_result(None)
                return self._taken - 1
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]
        return None


def pool(shop: Shop, schedule: Schedule, calls: Calls, workers: str = "ab") -> Handler:
    async def handler(ctx: Context) -> str:
        schedule.begin()
        found: dict[int, str] = {}

        async def worker(who: str) -> None:
            while (item := await schedule.take(who)) is not None:
                found[item] = await calls(shop, ctx, item)

        await asyncio.gather(*map(worker, workers))
        return ", ".join(found[item] for item in sorted(found))

    return handler


async def packed(ctx: Context, item: int) -> None:
    """The third item needs a signal."""
    if item == 2:
        await ctx.wait_for_signal("packed")


async def two_steps(shop: Shop, ctx: Context, item: int) -> str:
    charged = await ctx.step("charge", shop.effect, f"charge {item}")
    await packed(ctx, item)
    return f"{charged} {await ctx.step('mail', shop.effect, f'mail {item}')}"


async def renamed(shop: Shop, ctx: Context, item: int) -> str:
    charged = await ctx.step("debit", shop.effect, f"charge {item}")
    await packed(ctx, item)
    return f"{charged} {await ctx.step('mail', shop.effect, f'mail {item}')}"


async def renamed_at_the_end(shop: Shop, ctx: Context, item: int) -> str:
    charged = await ctx.step("charge", shop.effect, f"charge {item}")
    await packed(ctx, item)
    return f"{charged} {await ctx.step('send', shop.effect, f'mail {item}')}"


async def inserted(shop: Shop, ctx: Context, item: int) -> str:
    await ctx.step("check", shop.effect, f"check {item}")
    return await two_steps(shop, ctx, item)


async def inserted_between(shop: Shop, ctx: Context, item: int) -> str:
    charged = await ctx.step("charge", shop.effect, f"charge {item}")
    await ctx.step("check", shop.effect, f"check {item}")
    await packed(ctx, item)
    return f"{charged} {await ctx.step('mail', shop.effect, f'mail {item}')}"


def done(items: int) -> dict[str, int]:
    return {f"{what} {item}": 1 for what in ("charge", "mail") for item in range(items)}


def result(items: int) -> str:
    return ", ".join(f"charge {item} mail {item}" for item in range(items))


@pytest.mark.parametrize("later", ["bbbbb", "aaaaa", "baabb", "babab", "bbaaa", "abbab"])
async def test_each_item_gets_its_own_results_whoever_takes_it(shop: Shop, later: str) -> None:
    handler = pool(shop, Schedule("ababb", later), two_steps)
    execution_id = await shop.in_flight(handler)
    assert await shop.finishes(handler, execution_id) == result(5)
    assert shop.done == done(5)


async def test_fewer_workers_take_over_what_others_have_begun(shop: Shop) -> None:
    execution_id = await shop.in_flight(pool(shop, Schedule("abacb"), two_steps, "abc"))
    handler = pool(shop, Schedule("aaaaa"), two_steps, "a")
    assert await shop.finishes(handler, execution_id) == result(5)
    assert shop.done == done(5)


@pytest.mark.parametrize("later", ["ababb", "bbbba"])
@pytest.mark.parametrize("change", [renamed, renamed_at_the_end, inserted, inserted_between])
async def test_another_call_for_an_item_blocks_the_run_until_the_old_code_is_back(
    shop: Shop, change: Calls, later: str
) -> None:
    execution_id = await shop.in_flight(pool(shop, Schedule("ababb"), two_steps))
    await shop.blocked(pool(shop, Schedule(later), change), execution_id)
    old = pool(shop, Schedule(later), two_steps)
    assert await shop.finishes(old, execution_id) == result(5)
    assert shop.done == done(5)


@pytest.mark.parametrize("named", [False, True])
async def test_a_value_drawn_before_an_item_is_known_is_given_to_no_other(
    shop: Shop, named: bool
) -> None:
    async def drawn(shop: Shop, ctx: Context, item: int) -> str:
        with ctx.branch(f"item {item}") if named else nullcontext():
            key = await ctx.uuid()
            return str(await ctx.step("charge", charge, item, key) == [str(item), str(key)])

    async def charge(item: int, key: object) -> list[str]:
        return [await shop.effect(str(item)), str(key)]

    async def code(ctx: Context, schedule: Schedule) -> str:
        same = await pool(shop, schedule, drawn)(ctx)
        await ctx.wait_for_signal("packed")
        return same

    async def first(ctx: Context) -> str:
        return await code(ctx, Schedule("abab"))

    async def later(ctx: Context) -> str:
        return await code(ctx, Schedule("abba"))

    execution_id = await shop.in_flight(first)
    if named:
        assert await shop.finishes(later, execution_id) == "True, True, True, True"
    else:
        why = await shop.blocked(later, execution_id)
        assert "branches that share their items have taken other ones this time" in why
    assert await shop.finishes(first, execution_id) == "True, True, True, True"
    assert shop.done == {str(item): 1 for item in range(4)}


async def test_values_drawn_after_the_first_call_for_an_item_belong_to_it(shop: Shop) -> None:
    async def drawn(shop: Shop, ctx: Context, item: int) -> str:
        await ctx.step("charge", shop.effect, f"charge {item}")
        key, now = await ctx.uuid(), await ctx.now()
        found = await ctx.step("mail", mail, item, str(key), now)
        await packed(ctx, item)
        return str(found == [f"mail {item}", str(key), str(now)])

    async def mail(item: int, key: str, now: object) -> list[str]:
        return [await shop.effect(f"mail {item}"), key, str(now)]

    handler = pool(shop, Schedule("ababb", "bbbaa"), drawn)
    execution_id = await shop.in_flight(handler)
    assert await shop.finishes(handler, execution_id) == ", ".join(["True"] * 5)
    assert shop.done == done(5)


async def test_branches_whose_arguments_are_texts_that_change_keep_to_their_own_calls(
    shop: Shop,
) -> None:
    runs = 0

    async def handler(ctx: Context) -> str:
        nonlocal runs
        runs += 1

        async def branch(who: str) -> str:
            await asyncio.sleep(0)
            first = await ctx.step("load", shop.effect, f"{who} in run {runs}")
            if who == "ada":
                await ctx.wait_for_signal("packed")
            # With equal arguments in both branches, in the run that stores it.
            return f"{first}, {await ctx.step('save', shop.effect, f'save in run {runs}')}"

        return "; ".join(await asyncio.gather(branch("ada"), branch("bob")))

    execution_id = await shop.in_flight(handler)
    found = await shop.finishes(handler, execution_id)
    assert found == "ada in run 1, save in run 2; bob in run 1, save in run 1"
    assert set(shop.done.values()) == {1}


@pytest.mark.parametrize("stored_by_both", [False, True])
async def test_a_new_item_waits_for_the_branch_that_is_about_to_take_an_earlier_one(
    shop: Shop, stored_by_both: bool
) -> None:
    runs = 0

    async def handler(ctx: Context) -> str:
        nonlocal runs
        runs += 1
        items, found = [0, 1], list[str]()
        first_is_done = asyncio.Event()

        async def worker(who: str) -> None:
            if stored_by_both:
                await ctx.step("greet", shop.effect, f"greet {who}")
            if runs == 1 and who == "b":
                await first_is_done.wait()
            if runs > 1 and who == "a":
                await asyncio.sleep(0)
            while items:
                item = items.pop(0)
                if who == "b":
                    await asyncio.sleep(OUTSIDE_S)
                found.append(await ctx.step(f"call {item}", shop.effect, f"item {item}"))
                if item == 0:
                    await ctx.wait_for_signal("packed")
                first_is_done.set()

        await asyncio.gather(worker("b"), worker("a"))
        return ", ".join(sorted(found))

    execution_id = await shop.in_flight(handler)
    assert await shop.finishes(handler, execution_id) == "item 0, item 1"
    assert set(shop.done.values()) == {1}


class Letter:
    """Of what it holds nothing counts as an argument."""

    def __init__(self, shop: Shop, item: int) -> None:
        self._shop = shop
        self._item = item

    async def send(self) -> str:
        return await self._shop.effect(f"mail {self._item}")


async def test_a_branch_that_skips_an_item_of_its_own_gets_the_results_of_the_next_one(
    shop: Shop,
) -> None:
    async def calls(shop: Shop, ctx: Context, item: int) -> str:
        if item == 2 and shop.done["charge 3"]:
            await asyncio.sleep(OUTSIDE_S)
        charged = await ctx.step("charge", shop.effect, f"charge {item}")
        if item == 0:
            await ctx.wait_for_signal("packed")
        return f"{charged} {await ctx.step('mail', Letter(shop, item).send)}"

    handler = pool(shop, Schedule("abbbb", "ababb"), calls)
    execution_id = await shop.in_flight(handler)
    assert await shop.finishes(handler, execution_id) == result(5)
    assert shop.done == done(5)


async def test_sleeps_may_last_as_long_as_others_did_before(shop: Shop) -> None:
    lengths_s = iter([0.003, 0.001, 0.001, 0.002])

    async def handler(ctx: Context) -> str:
        for n in (1, 2):
            await ctx.sleep(next(lengths_s))
            await ctx.step("charge", shop.effect, f"charge {n}")
        await ctx.wait_for_signal("packed")
        return await ctx.step("ship", shop.effect, "ship")

    execution_id = await shop.in_flight(handler)
    assert await shop.finishes(handler, execution_id) == "ship"
    assert set(shop.done.values()) == {1}


async def test_a_sleep_for_an_item_is_given_to_no_other(shop: Shop) -> None:
    runs = 0

    async def calls(shop: Shop, ctx: Context, item: int) -> str:
        charged = await ctx.step("charge", shop.effect, f"charge {item}")
        if item == 0:
            await ctx.wait_for_signal("packed")
        if item == 1 and runs > 1:
            await asyncio.sleep(OUTSIDE_S)
        await ctx.sleep(0.01)
        return f"{charged} {await ctx.step('mail', Letter(shop, item).send)}"

    schedule = Schedule("abb", "baa")

    async def handler(ctx: Context) -> str:
        nonlocal runs
        runs += 1
        return await pool(shop, schedule, calls)(ctx)

    execution_id = await shop.in_flight(handler)
    assert await shop.finishes(handler, execution_id) == result(3)
    assert shop.done == done(3)
