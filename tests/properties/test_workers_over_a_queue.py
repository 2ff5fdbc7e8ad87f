"""Random workers over a queue, under random crashes: every item gets its own results.

Branches of one durable function take items from something they share, and do something outside
of steps in between: who takes which item is another story in every run. Whatever crashes, each
item has the results of its own calls in the end, and every stored effect happened once. An effect
may happen again only if a crash fell between it and its record.

`FLOWFABRIC_EXAMPLES=5000 pytest tests/properties/test_workers_over_a_queue.py --hypothesis-seed=7`
looks longer, and elsewhere.
"""

import asyncio
import os
import random
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Literal, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

from flowfabric import Context, Retry
from flowfabric.app import MEMORY_URL
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.reconcilers import run_due
from flowfabric.testing import LocalApp, SettableClock
from flowfabric.worker import reports, turns
from tests.properties.asyncio_runner import run
from tests.properties.test_durable_functions import (
    ENDED,
    Fault,
    FaultyEngine,
    StageApp,
    worker_in_trouble,
)

EXAMPLES = int(os.environ.get("FLOWFABRIC_EXAMPLES", "100"))
ROUNDS_MAX = 200
WORDS = 60
OUTSIDE_S = (0.0, 0.0, 0.0, 0.0005, 0.002, 0.005)
"""How long something takes outside of calls: another time in every run."""

Verb = Literal[
    "step",
    "again",
    "other",
    "same",
    "hidden",
    "caught",
    "child",
    "now",
    "uuid",
    "nap",
    "sleep",
    "long sleep",
    "pair",
    "branches",
]
Source = Literal["list", "end of list", "deque", "queue", "iterator", "crawl"]
Told = Literal["text", "uuid"]
Start = Literal["gather", "group", "tasks"]


class Pool(msgspec.Struct, frozen=True):
    """Workers over a queue. The first call for an item tells which item it is."""

    workers: int
    items: int
    source: Source
    start: Start
    indexed: bool
    """Each worker has a number among its arguments."""
    verbs: tuple[Verb, ...]
    told: Told = "text"
    """What steps are given of their item."""


VERBS: tuple[Verb, ...] = ("step", *get_args(Verb))
"""Steps twice as often as anything else."""


def ends_with_a_call(verbs: tuple[Verb, ...]) -> tuple[Verb, ...]:
    """A time at the end of an item is one before the first call for the next.

    What branches of the worker call is no call of its own.
    """
    own = [verb for verb in verbs if verb != "branches"]
    return (*verbs, "other") if own[-1] == "now" else verbs


pools = st.builds(
    Pool,
    st.integers(1, 5),
    st.integers(1, 12),
    st.sampled_from(get_args(Source)),
    st.sampled_from(get_args(Start)),
    st.booleans(),
    st.builds(
        lambda first, rest: ends_with_a_call((first, *rest)),
        st.sampled_from(("step", "step", "child", "caught")),
        st.lists(st.sampled_from(VERBS), max_size=4),
    ),
    st.sampled_from(get_args(Told)),
)
faults = st.dictionaries(
    st.integers(0, WORDS),
    st.sampled_from(("crash before", "crash after", "crash after", "outage before")),
    min_size=1,
    max_size=5,
)


FOUND: tuple[tuple[Pool, dict[int, Fault]], ...] = (
    (Pool(2, 6, "list", "gather", False, ("step", "step")), {9: "crash before"}),
    # The item stored in a branch is still in the queue: another has a new call to run first.
    (
        Pool(3, 9, "deque", "tasks", True, ("step", "step", "now", "other", "caught")),
        {6: "crash after", 17: "crash before", 26: "crash after"},
    ),
    # What workers take next, others add in another order.
    (
        Pool(2, 12, "crawl", "gather", False, ("step", "other"), "uuid"),
        {8: "crash after", 17: "crash after", 30: "crash after"},
    ),
    # Equal calls for all items tell nothing: the branches after them are found by the calls before.
    (
        Pool(5, 11, "iterator", "group", True, ("caught", "step", "same", "branches")),
        {10: "crash after", 21: "outage before", 26: "crash after", 42: "crash after"},
    ),
)
"""Pools that once went wrong, for some orders of arrival."""


class Hidden:
    """None of its contents count as an argument."""

    def __init__(self, stage: "Stage", path: str) -> None:
        self._stage = stage
        self._path = path

    async def effect(self) -> list[str]:
        return await self._stage.effect(self._path)


class Items:
    """What the workers share."""

    def __init__(self, source: Source, count: int) -> None:
        items = range(count)
        self._take: Callable[[], int]
        match source:
            case "list":
                waiting = list(items)
                self.shared: object = waiting
                self._take = lambda: waiting.pop(0)
            case "end of list":
                stack = list(items)
                self.shared = stack
                self._take = stack.pop
            case "deque":
                row = deque(items)
                self.shared = row
                self._take = row.popleft
            case "queue":
                queue: asyncio.Queue[int] = asyncio.Queue()
                for each in items:
                    queue.put_nowait(each)
                self.shared = queue
                self._take = queue.get_nowait
            case "iterator" | "crawl":
                iterator = iter(items)
                self.shared = iterator
                self._take = iterator.__next__

    async def taken(self) -> AsyncIterator[int]:
        while True:
            try:
                item = self._take()
            except (IndexError, asyncio.QueueEmpty, StopIteration):
                return
            yield item

    async def found(self, item: int) -> None:
        """The first call for an item has been made."""


class Crawl(Items):
    """Each item leads to three others: in which order they come is another story in every run."""

    def __init__(self, count: int) -> None:
        super().__init__("crawl", 0)
        self._count = count
        self._left = count
        self._queue: asyncio.Queue[int | None] = asyncio.Queue()
        self._queue.put_nowait(0)
        self.shared = self._queue

    async def taken(self) -> AsyncIterator[int]:
        while (item := await self._queue.get()) is not None:
            yield item
            self._left -= 1
            if not self._left:
                break
        # Whoever waits ends, too.
        self._queue.put_nowait(None)

    async def found(self, item: int) -> None:
        for each in range(3 * item + 1, min(3 * item + 4, self._count)):
            self._queue.put_nowait(each)


class Stage:
    """A pool, run to its end by workers in trouble."""

    def __init__(self, app: LocalApp, pool: Pool, faults: dict[int, Fault], seed: int) -> None:
        self._app = app
        self._pool = pool
        self._engine = FaultyEngine(app.engine.store, app.engine.config, app.engine.deployment)
        self._engine.faults = faults
        self._engine.recorded = set()
        self._engine.crashed = set()
        self.ran: Counter[str] = Counter()
        self._ran_in: dict[str, int] = {}
        self._paths: dict[uuid.UUID, str] = {}
        self._chance = random.Random(seed)

        @app.task(name="child", retry=Retry(max_retries=0))
        async def child(ctx: Context, path: str) -> list[str]:
            return await ctx.step("effect", self.effect, path)

        self._child = child

        @app.task(name="pool", retry=Retry(max_retries=0))
        async def main(ctx: Context) -> dict[str, list[object]]:
            found: dict[str, list[object]] = {}
            is_crawl = pool.source == "crawl"
            items = Crawl(pool.items) if is_crawl else Items(pool.source, pool.items)
            await self._start([self._worker(ctx, items, found, n) for n in range(pool.workers)])
            await ctx.step("last", self.effect, "last")
            return found

        self._main = main

    async def _start(self, workers: list[Coroutine[object, object, None]]) -> None:
        match self._pool.start:
            case "gather":
                await asyncio.gather(*workers)
            case "group":
                async with asyncio.TaskGroup() as group:
                    for each in workers:
                        group.create_task(each)
            case "tasks":
                for task in [asyncio.create_task(each) for each in workers]:
                    await task

    def _worker(
        self, ctx: Context, items: Items, found: dict[str, list[object]], number: int
    ) -> Coroutine[object, object, None]:
        async def worker(shared: object) -> None:
            await self._work(ctx, items, found)

        async def indexed(number: int, shared: object) -> None:
            await self._work(ctx, items, found)

        shared = items.shared
        return indexed(number, shared) if self._pool.indexed else worker(shared)

    async def _work(self, ctx: Context, items: Items, found: dict[str, list[object]]) -> None:
        async for item in items.taken():
            own: list[object] = []
            for n, verb in enumerate(self._pool.verbs):
                await self._outside()
                own.append(await self._call(ctx, verb, f"{item}", n))
                if n == 0:
                    await items.found(item)
            found[str(item)] = own
            await self._outside()

    async def _outside(self) -> None:
        for _ in range(self._chance.choice((0, 0, 0, 1, 3))):
            await asyncio.sleep(0)
        moment = self._chance.choice(OUTSIDE_S)
        if moment:
            await asyncio.sleep(moment)

    async def _call(self, ctx: Context, verb: Verb, item: str, n: int) -> object:
        path = f"{item}.{n}"
        match verb:
            case "step" | "other":
                return await ctx.step(verb, self.valued, self._value(path))
            case "again":
                # With the name of other calls, and equal arguments each time.
                return await ctx.step("step", self.pure, item)
            case "same":
                # Nothing tells of which item it is but the call before it.
                return await ctx.step("same", self.pure, "all")
            case "hidden":
                return await ctx.step("hidden", Hidden(self, path).effect)
            case "now":
                return bool(await ctx.now())
            case "nap":
                await ctx.sleep(self._chance.random() * 0.004)
                return None
            case "caught":
                try:
                    return await ctx.step(verb, self.fail, self._value(path))
                except ValueError as error:
                    return [str(error)]
            case "child":
                child = await ctx.submit(self._child, path)
                await self._outside()
                return await child.result()
            case "uuid":
                drawn = str(await ctx.uuid())
                await self._outside()
                return (await ctx.step("use", self.effect, path, drawn))[1] == drawn
            case "sleep":
                await ctx.sleep(0.001)
                return await ctx.step("slept", self.effect, path)
            case "long sleep":
                await ctx.sleep(10)
                return await ctx.step("slept", self.effect, path)
            case "pair":
                both = await asyncio.gather(
                    ctx.step("one", self.effect, f"{path}.one"),
                    ctx.step("two", self.effect, f"{path}.two"),
                )
                return [each[0] for each in both]
            case "branches":
                return await asyncio.gather(
                    self._branch(ctx, f"{path}.one"), self._branch(ctx, f"{path}.two")
                )

    async def _branch(self, ctx: Context, path: str) -> str:
        await self._outside()
        return (await ctx.step("inside", self.effect, path))[0]

    async def effect(self, path: str, drawn: str = "") -> list[str]:
        for recorded in self._engine.recorded:
            assert f'["{path}",'.encode() not in recorded, f"{path} is stored and ran again"
        if self.ran[path]:
            assert self._ran_in[path] in self._engine.crashed, f"{path} ran again for no reason"
        self.ran[path] += 1
        self._ran_in[path] = self._engine.round
        return [path, drawn]

    def _value(self, path: str) -> str | uuid.UUID:
        if self._pool.told == "text":
            return path
        made = uuid.uuid5(uuid.NAMESPACE_OID, path)
        self._paths[made] = path
        return made

    async def valued(self, value: str | uuid.UUID) -> list[str]:
        return await self.effect(value if isinstance(value, str) else self._paths[value])

    async def pure(self, item: str) -> str:
        return item

    async def fail(self, value: str | uuid.UUID) -> None:
        raise ValueError(value if isinstance(value, str) else self._paths[value])

    def expected(self) -> dict[str, list[object]]:
        return {
            str(item): [
                self._meaning(verb, str(item), n) for n, verb in enumerate(self._pool.verbs)
            ]
            for item in range(self._pool.items)
        }

    @staticmethod
    def _meaning(verb: Verb, item: str, n: int) -> object:
        path = f"{item}.{n}"
        match verb:
            case "again":
                return item
            case "same":
                return "all"
            case "nap":
                return None
            case "caught":
                return [path]
            case "now" | "uuid":
                return True
            case "pair" | "branches":
                return [f"{path}.one", f"{path}.two"]
            case _:
                return [path, ""]

    async def play(self) -> object:
        submitted = await self._app.submit(self._main)
        async with worker_in_trouble(self._app, self._engine) as worker:
            for _ in range(ROUNDS_MAX):
                self._engine.round += 1
                await run_due(self._app.engine)
                if await worker.run_ready() == 0:
                    await self._revoke()
                    self._app.clock.advance("10s")
                    if await submitted.state() in ENDED:
                        return await submitted.result(timeout=1)
                    seen = await submitted.snapshot()
                    assert not seen.blocked, seen.blocking_detail
        raise AssertionError(f"it does not end: {await submitted.snapshot()}")

    async def _revoke(self) -> None:
        engine = self._app.engine
        for execution_id in await active(self._app):
            await engine.revoke_lease(execution_id, reason="its worker has crashed")


async def active(app: LocalApp) -> Iterable[str]:
    page = await app.engine.find_executions(ExecutionFilter(namespace=app.namespace), limit=1_000)
    return [each.execution_id for each in page.executions if each.public_state == "active"]


async def check(app: LocalApp, pool: Pool, faults: dict[int, Fault], seed: int) -> None:
    async with app:
        stage = Stage(app, pool, faults, seed)
        assert await stage.play() == stage.expected()
        if "child" not in pool.verbs:
            return
        page = await app.engine.find_executions(
            ExecutionFilter(namespace=app.namespace), limit=1_000
        )
        children = [each for each in page.executions if each.execution_kind == "child"]
        assert len(children) == pool.items * pool.verbs.count("child"), "every child once"


@pytest.mark.timeout(600 + EXAMPLES)
def test_every_item_gets_its_own_results_whoever_takes_it(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "BACKOFF_FIRST_S", 0.0)
    # As if everything outside of steps took fifty times as long.
    monkeypatch.setattr(turns, "PATIENCE_S", 0.004)
    examples = EXAMPLES if store_url == MEMORY_URL else max(1, EXAMPLES // 10)
    clock = SettableClock()

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(pool=pools, faults=faults, seed=st.integers(0, 2**32))
    def holds(pool: Pool, faults: dict[int, Fault], seed: int) -> None:
        note(f"{pool}")
        run(check(StageApp(store_url, clock), pool, faults, seed))

    for pool, faults_once in FOUND:
        holds = example(pool=pool, faults=faults_once, seed=1)(holds)
    holds()
