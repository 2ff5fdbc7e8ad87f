"""Parallel branches: each gets its own results back, whatever order they arrive in."""

import asyncio
import contextvars
import time
from collections import Counter
from collections.abc import Coroutine, Generator
from datetime import UTC, datetime
from typing import TypeVar

import pytest

from flowfabric import App, Context, Retry, testing
from flowfabric.core.records import StepKind
from flowfabric.errors import ExecutionFailed
from flowfabric.worker.asyncio_tasks import watch_tasks
from tests.apps import working

T = TypeVar("T")

AGAIN = Retry(max_retries=3, delay=0)


class Crash(RuntimeError):
    """The attempt ends here; the next one runs the handler again."""


async def turns(count: int) -> None:
    """Let others go first: `count` times around the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_branches_get_their_own_children(app: App) -> None:
    submitted: Counter[str] = Counter()

    @app.task
    async def greet(who: str) -> str:
        submitted[who] += 1
        return f"result for {who}"

    @app.task(retry=AGAIN)
    async def both(ctx: Context) -> dict[str, str]:
        # Another branch comes first in every run.
        late = "ada" if ctx.retry_count % 2 else "bob"

        async def branch(who: str) -> tuple[str, str]:
            await turns(50 if who == late else 0)
            await ctx.step(f"prepare {who}", str.upper, who)
            child = await ctx.submit(greet, who)
            return who, await child.result()

        results = dict(await asyncio.gather(branch("ada"), branch("bob")))
        if ctx.retry_count < 3:
            raise Crash
        return results

    async with working(app):
        result = await (await app.submit(both)).result(timeout="30s")
    assert result == {"ada": "result for ada", "bob": "result for bob"}
    assert submitted == {"ada": 1, "bob": 1}


async def test_every_verb_of_a_branch_is_its_own_in_whatever_order_they_arrive(app: App) -> None:
    seen: dict[str, list[object]] = {"ada": [], "bob": [], "eve": []}

    @app.task(retry=AGAIN)
    async def all_of_them(ctx: Context) -> None:
        order = sorted(seen, reverse=ctx.retry_count % 2 == 1)

        async def branch(who: str) -> None:
            for _ in range(2):
                await turns(7 * order.index(who))
                seen[who].append(
                    [
                        await ctx.random(),
                        await ctx.uuid(),
                        await ctx.now(),
                        await ctx.step("same name", time.monotonic_ns),
                    ]
                )
                await ctx.sleep(0)

        async with asyncio.TaskGroup() as group:
            for who in seen:
                group.create_task(branch(who))
        if ctx.retry_count < 3:
            raise Crash

    async with working(app):
        await (await app.submit(all_of_them)).result(timeout="30s")
    for values in seen.values():
        assert values == values[:2] * 4
    assert len({str(values) for values in seen.values()}) == 3


async def test_branches_are_told_apart_by_arguments_when_a_set_gives_another_order(
    app: App,
) -> None:
    ran: Counter[str] = Counter()

    def note(item: str) -> str:
        ran[item] += 1
        return item.upper()

    @app.task(retry=AGAIN)
    async def unordered(ctx: Context) -> list[tuple[str, str]]:
        items = ["a", "b", "c"]
        mixed = items[ctx.retry_count % 3 :] + items[: ctx.retry_count % 3]

        async def branch(item: str) -> tuple[str, str]:
            return item, await ctx.step("note", note, item)

        found = await asyncio.gather(*(branch(item) for item in mixed))
        also = await asyncio.gather(*(ctx.step("direct", note, item * 2) for item in mixed))
        assert also == [(item * 2).upper() for item in mixed]
        if ctx.retry_count < 3:
            raise Crash
        return sorted(found)

    async with working(app):
        result = await (await app.submit(unordered)).result(timeout="30s")
    assert result == [("a", "A"), ("b", "B"), ("c", "C")]
    assert set(ran.values()) == {1}


async def test_steps_made_as_others_complete_are_told_apart_too(app: App) -> None:
    ran: Counter[str] = Counter()

    def use(item: str) -> str:
        ran[item] += 1
        return item.upper()

    @app.task(retry=AGAIN)
    async def streaming(ctx: Context) -> list[str]:
        used = []
        branches = [get_in(ctx, item) for item in "ab"]
        for each in asyncio.as_completed(branches):
            item = await each
            used.append(await ctx.step("use", use, item))
            if ctx.retry_count < 1:
                raise Crash
        if ctx.retry_count < 3:
            raise Crash
        return sorted(used)

    async def get_in(ctx: Context, item: str) -> str:
        await turns(9 if item == ("b" if ctx.retry_count % 2 else "a") else 0)
        return await ctx.step("get", str, item)

    async with working(app):
        assert await (await app.submit(streaming)).result(timeout="30s") == ["A", "B"]
    assert ran == {"a": 1, "b": 1}


async def test_branches_inside_branches(app: App) -> None:
    ran: Counter[int] = Counter()

    def note(number: int) -> int:
        ran[number] += 1
        return number

    @app.task(retry=AGAIN)
    async def nested(ctx: Context) -> list[list[int]]:
        async def leaf(number: int) -> int:
            await turns((number * (ctx.retry_count + 1)) % 5)
            return await ctx.step("note", note, number)

        async def inner(base: int) -> list[int]:
            await turns((base * ctx.retry_count) % 3)
            first = await ctx.step("inner", note, base)
            return [first, *await asyncio.gather(*(leaf(base + n) for n in (1, 2, 3)))]

        found = await asyncio.gather(inner(10), inner(20), inner(30))
        if ctx.retry_count < 3:
            raise Crash
        return list(found)

    async with working(app):
        result = await (await app.submit(nested)).result(timeout="30s")
    assert result == [[n, n + 1, n + 2, n + 3] for n in (10, 20, 30)]
    assert set(ran.values()) == {1}


async def test_a_submission_is_stored_as_a_step_with_its_child(app: App) -> None:
    @app.task
    async def greet(who: str) -> str:
        return f"hello {who}"

    @app.task
    async def both(ctx: Context) -> list[str]:
        ada, bob = await asyncio.gather(ctx.submit(greet, "ada"), ctx.submit(greet, "bob"))
        return [ada.execution_id, bob.execution_id, await ada.result(), await bob.result()]

    async with working(app):
        run = await app.submit(both)
        ada, bob, *greetings = await run.result(timeout="30s")
        steps = await app.engine.list_steps(run.execution_id)
        snapshot = await app.engine.describe_execution(ada)
    assert greetings == ["hello ada", "hello bob"]
    stored = {step.step_key: step.result for step in steps if step.kind is StepKind.SUBMIT}
    assert stored == {
        "submit greet": f'"{ada}"'.encode(),
        "submit greet#2": f'"{bob}"'.encode(),
    }
    assert snapshot is not None
    assert snapshot.parent_execution_id == run.execution_id


async def test_a_branch_with_a_name_is_known_by_that(app: App) -> None:
    ran: Counter[str] = Counter()

    @app.task(retry=AGAIN)
    async def named(ctx: Context) -> dict[str, str]:
        found = {}

        async def branch(who: list[str]) -> None:
            with ctx.branch(who[0]):
                at = await ctx.step("charge", charge, who[0], datetime.now(UTC))
                found[who[0]] = at

        people = sorted(["ada", "bob"], reverse=ctx.retry_count % 2 == 1)
        await asyncio.gather(*(branch([who]) for who in people))
        if ctx.retry_count < 3:
            raise Crash
        return found

    def charge(who: str, at: datetime) -> str:
        ran[who] += 1
        return f"charged {who}"

    async with working(app):
        run = await app.submit(named)
        result = await run.result(timeout="30s")
        keys = [step.step_key for step in await app.engine.list_steps(run.execution_id)]
    assert result == {"ada": "charged ada", "bob": "charged bob"}
    assert ran == {"ada": 1, "bob": 1}
    assert sorted(keys) == ["charge@ada", "charge@bob"]


async def test_two_branches_of_one_name_at_once_are_refused() -> None:
    async with testing.engine() as app:

        @app.task
        async def twice(ctx: Context) -> None:
            async def branch() -> None:
                with ctx.branch("same"):
                    await ctx.sleep(1)

            await asyncio.gather(branch(), branch())

        run = await app.submit(twice)
        await app.drain()
        with pytest.raises(ExecutionFailed, match="another branch of this name is under way"):
            await run.result(timeout=1)


async def test_the_order_of_an_unchanged_program_is_kept_with_times_among_its_arguments(
    app: App,
) -> None:
    ran: Counter[str] = Counter()

    def note(name: str, at: float) -> str:
        ran[name] += 1
        return name

    @app.task(retry=AGAIN)
    async def timely(ctx: Context) -> list[str]:
        async def branch(name: str, at: float) -> str:
            return await ctx.step("note", note, name, time.time())

        await ctx.step("note", note, "first", time.time())
        found = await asyncio.gather(*(branch(name, time.time()) for name in "abc"))
        last = await asyncio.wait_for(branch("last", time.time()), 20)
        if ctx.retry_count < 2:
            raise Crash
        return [*found, last]

    async with working(app):
        assert await (await app.submit(timely)).result(timeout="30s") == ["a", "b", "c", "last"]
    assert set(ran.values()) == {1}


async def test_a_handler_in_threads_of_its_own_is_answered_too(app: App) -> None:
    @app.task(retry=AGAIN)
    def plain(ctx: Context) -> list[str]:
        first = ctx.blocking.step("a", str.upper, "a")
        children = [ctx.blocking.uuid(), ctx.blocking.uuid()]
        if ctx.retry_count < 2:
            raise Crash
        return [first, *map(str, children)]

    async with working(app):
        first, *uuids = await (await app.submit(plain)).result(timeout="30s")
    assert first == "A"
    assert len(set(uuids)) == 2


async def test_the_task_factory_is_as_before_when_no_worker_watches() -> None:
    loop = asyncio.get_running_loop()
    made: list[str] = []

    def theirs(
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[object, object, T] | Generator["asyncio.Future[object]", None, T],
    ) -> "asyncio.Task[T]":
        made.append(str(coroutine))
        return asyncio.Task(coroutine, loop=loop)

    before = loop.get_task_factory()
    loop.set_task_factory(theirs)
    try:
        first, second = watch_tasks(loop), watch_tasks(loop)
        await asyncio.create_task(turns(1))
        first()
        assert loop.get_task_factory() != theirs
        second()
        assert loop.get_task_factory() is theirs
    finally:
        loop.set_task_factory(before)
    assert ["turns" in each for each in made] == [True]


async def test_a_branch_without_steps_of_its_own_may_have_arguments_that_change(app: App) -> None:
    ran: Counter[str] = Counter()

    def note(item: str) -> None:
        ran[item] += 1

    @app.task(retry=AGAIN)
    async def nested(ctx: Context) -> None:
        async def inner(item: str) -> None:
            await ctx.step("note", note, item)

        async def outer(item: str, changes: str) -> None:
            await asyncio.gather(inner(f"{item}1"), inner(f"{item}2"))

        await asyncio.gather(*(outer(item, f"{time.monotonic_ns()}") for item in "ab"))
        if ctx.retry_count < 2:
            raise Crash

    async with working(app):
        await (await app.submit(nested)).result(timeout="30s")
    assert ran == dict.fromkeys(("a1", "a2", "b1", "b2"), 1)


async def test_branches_after_calls_over_a_set_are_found_again(app: App) -> None:
    ran: Counter[str] = Counter()

    def note(item: str) -> None:
        ran[item] += 1

    @app.task(retry=AGAIN)
    async def unordered(ctx: Context) -> None:
        async def branch(item: str) -> None:
            await ctx.step("branch", note, f"branch {item}")

        mixed = "ab" if ctx.retry_count % 2 else "ba"
        await asyncio.gather(*(ctx.step("direct", note, item) for item in mixed))
        await asyncio.gather(*(branch(item) for item in mixed))
        if ctx.retry_count < 2:
            raise Crash

    async with working(app):
        await (await app.submit(unordered)).result(timeout="30s")
    assert ran == dict.fromkeys(("a", "b", "branch a", "branch b"), 1)


async def test_a_branch_that_comes_before_a_stored_one_may_be_new(app: App) -> None:
    ran: Counter[str] = Counter()

    def note(item: str) -> None:
        ran[item] += 1

    @app.task(retry=AGAIN)
    async def one_by_one(ctx: Context) -> None:
        async def branch(item: str) -> None:
            if item == "slow" and ctx.retry_count == 0:
                await asyncio.Event().wait()
            await ctx.step("note", note, item)

        slow = asyncio.create_task(branch("slow"))
        await turns(10)
        await asyncio.create_task(branch("quick"))
        if ctx.retry_count == 0:
            slow.cancel()
            raise Crash
        await slow

    async with working(app):
        await (await app.submit(one_by_one)).result(timeout="30s")
    assert ran == {"slow": 1, "quick": 1}


async def test_branches_are_found_again_after_calls_that_came_in_another_order(app: App) -> None:
    charged: Counter[str] = Counter()

    @app.task(retry=AGAIN)
    async def bill(ctx: Context) -> None:
        async def fetch(name: str) -> str:
            await turns(40 if (name == "f1") == (ctx.retry_count % 2 == 0) else 0)
            return await ctx.step(f"fetch {name}", str.upper, name)

        async def charge(who: str) -> None:
            await ctx.step("charge", charged.update, [who])

        for fetched in asyncio.as_completed([fetch("f1"), fetch("f2")]):
            await ctx.step(f"note {await fetched}", str)
        await asyncio.gather(charge("ada"), charge("bob"))
        if ctx.retry_count < 3:
            raise Crash

    async with working(app):
        await (await app.submit(bill)).result(timeout="30s")
    assert charged == {"ada": 1, "bob": 1}


async def test_tasks_that_are_given_a_context_are_branches_of_their_own(app: App) -> None:
    charged: Counter[str] = Counter()

    @app.task(retry=AGAIN)
    async def bill(ctx: Context) -> list[str]:
        late = "ada" if ctx.retry_count % 2 else "bob"

        def note(who: str) -> str:
            charged[who] += 1
            return who

        async def charge(who: str) -> str:
            await turns(40 if who == late else 0)
            return await ctx.step("charge", note, who)

        context = contextvars.copy_context()
        tasks = [asyncio.create_task(charge(who), context=context) for who in ("ada", "bob")]
        results = [await task for task in tasks]
        if ctx.retry_count < 3:
            raise Crash
        return results

    async with working(app):
        assert await (await app.submit(bill)).result(timeout="30s") == ["ada", "bob"]
    assert charged == {"ada": 1, "bob": 1}


async def test_a_call_cancelled_at_once_in_a_later_run_is_given_up_for_good(app: App) -> None:
    charged: Counter[str] = Counter()

    @app.task(retry=AGAIN)
    async def bill(ctx: Context) -> list[str]:
        def note(who: str) -> str:
            charged[who] += 1
            return who

        if ctx.retry_count == 0:
            raise Crash
        try:
            async with asyncio.timeout(0 if ctx.retry_count == 1 else 0.1):
                first = await ctx.step("charge", note, "ada")
        except TimeoutError:
            first = "nobody"
        second = await ctx.step("charge", note, "bob")
        if ctx.retry_count < 3:
            raise Crash
        return [first, second]

    async with working(app):
        assert await (await app.submit(bill)).result(timeout="30s") == ["nobody", "bob"]
    assert charged["bob"] == 1


@pytest.mark.parametrize("late", [(0, 50), (50, 0)])
async def test_the_body_of_a_group_may_come_further_in_one_run_than_in_another(
    app: App, late: tuple[int, int]
) -> None:
    ran: Counter[str] = Counter()

    @app.task(retry=Retry(max_retries=1, delay=0))
    async def rounds(ctx: Context) -> str:
        async def note(what: str) -> str:
            ran[what] += 1
            return what

        async def refuse(number: int) -> None:
            ran[f"refuse {number}"] += 1
            raise ValueError(number)

        async def check(number: int) -> None:
            await ctx.step("check", refuse, number)

        for number in range(3):
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(check(number))
                    # The branch may fail before this, or after.
                    await turns(late[ctx.retry_count])
                    await ctx.step("note", note, f"note {number}")
            except* ValueError:
                pass
        last = await ctx.step("note", note, "last")
        if not ctx.retry_count:
            raise Crash
        return last

    async with working(app):
        assert await (await app.submit(rounds)).result(timeout="30s") == "last"
    assert set(ran.values()) == {1}
    assert {"refuse 0", "refuse 1", "refuse 2", "last"} <= ran.keys()


async def test_a_call_made_together_with_a_branch_may_have_arguments_that_change(app: App) -> None:
    ran: Counter[str] = Counter()

    @app.task(retry=Retry(max_retries=1, delay=0))
    async def order(ctx: Context) -> str:
        async def create(number: str) -> str:
            ran["create"] += 1
            return number

        async def watch() -> None:
            await ctx.step("watch", str.upper, "ada")

        watching = asyncio.create_task(watch())
        number = await ctx.step("create", create, f"order {time.monotonic_ns()}")
        await watching
        if not ctx.retry_count:
            raise Crash(number)
        return number

    async with working(app):
        assert await (await app.submit(order)).result(timeout="30s")
    assert ran == {"create": 1}
