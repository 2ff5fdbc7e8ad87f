"""Branches that differ in nothing but what their coroutine function has bound."""

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from pathlib import PurePath

import pytest

from flowfabric import App, Context, Retry
from tests.apps import blocked, working
from tests.worker.test_ambiguous import Order

AGAIN = Retry(max_retries=3, delay=0)
NAMES = ("ada", "bob", "eve")
ORDERS = (NAMES, ("eve", "ada", "bob"), ("bob", "eve", "ada"), ("eve", "bob", "ada"))
"""In which the branches are started, run by run, as from a set."""

Work = Callable[[str], Awaitable[str]]
Branch = Coroutine[object, object, str]


def closure(work: Work, who: str) -> Branch:
    async def inner() -> str:
        return await work(who)

    return inner()


def default(work: Work, who: str) -> Branch:
    async def inner(of: str = who) -> str:
        return await work(of)

    return inner()


def decorated(work: Work, who: str) -> Branch:
    async def inner() -> str:
        return await work(who)

    def logged(function: Callable[[], Awaitable[str]]) -> Callable[[], Branch]:
        @wraps(function)
        async def wrapper() -> str:
            return await function()

        return wrapper

    return logged(inner)()


def passed_on(work: Work, who: str) -> Branch:
    async def inner() -> str:
        return await work(who)

    async def around(branch: Awaitable[str]) -> str:
        return await branch

    return around(inner())


@dataclasses.dataclass(frozen=True)
class Person:
    name: str

    def works(self, work: Work) -> Callable[[], Branch]:
        async def inner() -> str:
            return await work(self.name)

        return inner


def record(work: Work, who: str) -> Branch:
    return Person(who).works(work)()


def path(work: Work, who: str) -> Branch:
    async def inner(of: PurePath) -> str:
        return await work(of.name)

    return inner(PurePath("people", who))


@pytest.mark.parametrize("verb", ["step", "child"])
@pytest.mark.parametrize("bind", [closure, default, decorated, passed_on, record, path])
async def test_branches_in_the_order_of_a_set_are_known_by_what_they_have_bound(
    app: App, bind: Callable[[Work, str], Branch], verb: str
) -> None:
    ran: Counter[str] = Counter()

    async def effect(name: str) -> str:
        ran[name] += 1
        return f"of {name}"

    @app.task
    async def child(name: str) -> str:
        return await effect(name)

    @app.task(retry=AGAIN)
    async def collect(ctx: Context) -> dict[str, str]:
        async def work(who: str) -> str:
            seen = [who]  # Nothing but the branch tells one from the other.
            if verb == "child":
                return await (await ctx.submit(child, who)).result()
            return await ctx.step("fetch", lambda: effect(seen[0]))

        order = ORDERS[ctx.retry_count]
        found = await asyncio.gather(*(bind(work, who) for who in order))
        if ctx.retry_count < len(ORDERS) - 1:
            raise RuntimeError("again")
        return dict(zip(order, found, strict=True))

    async with working(app):
        run = await app.submit(collect)
        assert await run.result(timeout="30s") == {who: f"of {who}" for who in NAMES}
    assert ran == dict.fromkeys(NAMES, 1)


class Box:
    """An object that nobody can look into."""

    def __init__(self, content: str) -> None:
        self.content = content

    async def opened(self, ctx: Context) -> str:
        return await ctx.step("open", self.open)

    def open(self) -> str:
        return self.content


async def test_branches_of_objects_in_the_order_of_the_code_need_no_name(app: App) -> None:
    @app.task(retry=AGAIN)
    async def collect(ctx: Context) -> list[str]:
        boxes = [Box(who) for who in NAMES]
        found = await asyncio.gather(*(box.opened(ctx) for box in boxes))
        found += await asyncio.gather(*(box.opened(ctx) for box in reversed(boxes)))
        if ctx.retry_count < 3:
            raise RuntimeError("again")
        return found

    async with working(app):
        run = await app.submit(collect)
        assert await run.result(timeout="30s") == [*NAMES, *reversed(NAMES)]


def open_it(box: Box) -> str:
    return box.open()


async def as_bound(ctx: Context, box: Box) -> str:
    return await ctx.step("open", box.open)


async def as_argument(ctx: Context, box: Box) -> str:
    return await ctx.step("open", open_it, box)


async def as_branch(ctx: Context, box: Box) -> str:
    return await asyncio.create_task(box.opened(ctx))


REACTIONS = [as_bound, as_argument, as_branch]


@pytest.mark.parametrize("people", ["ab", "abc"])
@pytest.mark.parametrize("react", REACTIONS)
async def test_reactions_to_objects_in_order_of_arrival_are_refused(
    app: App, react: Callable[[Context, Box], Awaitable[str]], people: str
) -> None:
    ran: list[str] = []
    order = Order(people)

    @app.task
    async def collect(ctx: Context) -> list[str]:
        order.begin(people)
        for each in asyncio.as_completed([order.arrive(who) for who in people]):
            who = await each
            ran.append(await react(ctx, Box(who)))
            order.arrived(who)
        return ran

    async with working(app):
        run = await app.submit(collect)
        why = await blocked(run)
    assert "cannot be told from others" in why
    assert "with ctx.branch(name)" in why
    assert ran == ["a"], "it is refused before anything runs"


@pytest.mark.parametrize("react", REACTIONS)
async def test_reactions_to_objects_that_have_names_come_in_any_order(
    app: App, react: Callable[[Context, Box], Awaitable[str]]
) -> None:
    order = Order("ab", "ba")

    @app.task(retry=AGAIN)
    async def collect(ctx: Context) -> dict[str, str]:
        order.begin("ab")
        found: dict[str, str] = {}
        for each in asyncio.as_completed([order.arrive(who) for who in "ab"]):
            who = await each
            with ctx.branch(who):
                found[who] = await react(ctx, Box(who))
            if not ctx.retry_count:
                raise RuntimeError("again")
            order.arrived(who)
        return found

    async with working(app):
        run = await app.submit(collect)
        assert await run.result(timeout="20s") == {"a": "a", "b": "b"}


async def test_objects_beside_a_task_that_never_ends_need_no_name(app: App) -> None:
    @app.task(retry=AGAIN)
    async def collect(ctx: Context) -> list[str]:
        beside = asyncio.create_task(asyncio.Event().wait())
        await asyncio.sleep(0)
        found = [await react(ctx, Box(who)) for react in REACTIONS for who in NAMES]
        beside.cancel()
        if ctx.retry_count < 2:
            raise RuntimeError("again")
        return found

    async with working(app):
        run = await app.submit(collect)
        assert await run.result(timeout="20s") == [*NAMES] * len(REACTIONS)


@pytest.mark.parametrize("react", REACTIONS)
async def test_objects_that_are_started_together_need_no_name(
    app: App, react: Callable[[Context, Box], Coroutine[object, object, str]]
) -> None:
    """Although others have ended before, and one has not."""

    async def load(who: str) -> Box:
        await asyncio.sleep(0)
        return Box(who)

    @app.task(retry=AGAIN)
    async def collect(ctx: Context) -> list[str]:
        beside = asyncio.create_task(asyncio.Event().wait())
        boxes = await asyncio.gather(*map(load, NAMES))
        found = await asyncio.gather(*(react(ctx, box) for box in boxes))
        beside.cancel()
        if ctx.retry_count < 2:
            raise RuntimeError("again")
        return found

    async with working(app):
        run = await app.submit(collect)
        assert await run.result(timeout="20s") == [*NAMES]
