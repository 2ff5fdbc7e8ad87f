"""The tasks of the simulated system, and what each of them must return."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchmarks.simulation.ledger import Ledger
from flowfabric import App, Context, Retry
from flowfabric.task import Task

Job = Task[[int], int]

FAILURES: Final = 3
"""A flaky task fails up to this often before it succeeds."""
DEATHS_MAX: Final = 1_000
"""Workers die often here, and not because of their work."""
RETRY: Final = Retry(max_retries=5, delay="200ms", max_delay="2s")


@dataclass(frozen=True)
class Program:
    """Tasks by name, and the result of each for its argument."""

    tasks: dict[str, Job]
    total: Task[[list[int]], int]
    """Adds up what the nodes of a flow returned."""
    expected: dict[str, Callable[[int], int]]


def declare(app: App, ledger: Ledger) -> Program:
    """Register every task with `app`."""
    tasks = (*_working(app, ledger), *_waiting(app, ledger))

    @app.task(max_worker_deaths=DEATHS_MAX)
    async def total(ctx: Context, numbers: list[int]) -> int:
        return await Acting(ctx, ledger)("total", sum(numbers))

    return Program(
        total=total,
        tasks={task.name: task for task in tasks},
        expected={
            "quick": lambda n: n * 2,
            "stepped": lambda n: n + 2,
            "flaky": lambda n: n + 1,
            "sleeper": lambda n: n + 1,
            "parent": lambda n: 2 * n + 3,
            "approval": lambda n: n + n,
            "branches": lambda n: 6 * (n + 1),
        },
    )


def _working(app: App, ledger: Ledger) -> tuple[Job, ...]:
    """Tasks that need nothing but a worker."""

    @app.task(max_worker_deaths=DEATHS_MAX)
    async def quick(ctx: Context, number: int) -> int:
        return number * 2

    @app.task(max_worker_deaths=DEATHS_MAX)
    async def stepped(ctx: Context, number: int) -> int:
        acting = Acting(ctx, ledger)
        first = await acting("first", number)
        second = await acting("second", first + 1)
        return await acting("third", second + 1)

    @app.task(retry=RETRY, max_worker_deaths=DEATHS_MAX)
    async def flaky(ctx: Context, number: int) -> int:
        acting = Acting(ctx, ledger)
        kept = await acting("kept", number)
        if ctx.retry_count < number % FAILURES:
            raise ValueError(f"failure {ctx.retry_count}")
        return await acting("done", kept + 1)

    return quick, stepped, flaky


def _waiting(app: App, ledger: Ledger) -> tuple[Job, ...]:
    """Tasks that wait: for time, for others, for people, and for several of these."""

    @app.task(max_worker_deaths=DEATHS_MAX)
    async def sleeper(ctx: Context, number: int) -> int:
        acting = Acting(ctx, ledger)
        before = await acting("before", number)
        await ctx.sleep(f"{5 + number % 20}s")
        return await acting("after", before + 1)

    @app.task(keep="0s", keep_failed="0s")
    async def child(ctx: Context, number: int) -> int:
        """Gone as soon as nobody needs it any more: its parent does."""
        acting = Acting(ctx, ledger)
        return await acting("second", 1 + await acting("first", number))

    @app.task(max_worker_deaths=DEATHS_MAX)
    async def parent(ctx: Context, number: int) -> int:
        acting = Acting(ctx, ledger)
        began = await acting("began", number)
        children = [await ctx.submit(child, began + each) for each in range(2)]
        results = [await each.result() for each in children]
        return await acting("collected", sum(results))

    @app.task(max_worker_deaths=DEATHS_MAX)
    async def approval(ctx: Context, number: int) -> int:
        acting = Acting(ctx, ledger)
        asked = await acting("asked", number)
        decision = await ctx.wait_for_signal("decided", type=int)
        return await acting("acted", asked + decision.payload)

    @app.task(max_worker_deaths=DEATHS_MAX)
    async def branches(ctx: Context, number: int) -> int:
        acting = Acting(ctx, ledger)

        async def branch(each: int) -> int:
            first = await acting(f"open-{each}", number + each)
            await ctx.sleep(f"{1 + each * 6}s")
            return await acting(f"close-{each}", first * 2)

        return sum(await asyncio.gather(*(branch(each) for each in range(3))))

    return sleeper, parent, approval, branches


class Acting:
    """The effects of one run of a handler, each a step of its own."""

    def __init__(self, ctx: Context, ledger: Ledger) -> None:
        self._ctx = ctx
        self._ledger = ledger
        self._performance = ledger.begin(ctx.execution_id)

    async def __call__(self, name: str, value: int) -> int:
        async def act() -> int:
            return await self._ledger.act(self._performance, name, value)

        return await self._ctx.step(name, act)
