"""`make walks`: how much of the package a reader passes to follow one thing from end to end.

For each walk: the functions of the package that are entered, the files they are in, and how
many of its own functions stand on each other at the deepest point. Code is counted, not time,
so the figures are the same on every machine. What the passing of time does anyway, whether or
not there is work, is not part of a walk.
"""

import asyncio
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

from rich.console import Console
from rich.table import Table

import flowfabric
from flowfabric import App, Context
from flowfabric.core.states import PublicState
from flowfabric.reconcilers import run_due
from flowfabric.testing import LocalApp
from flowfabric.worker.inline import InlineWorker

PACKAGE: Final = str(Path(flowfabric.__file__).parent)
SWEEPING: Final = run_due.__code__
WORKING: Final = InlineWorker.run_ready.__code__
TIMES: Final = 5
"""How often each walk from outside is taken. The first one meets empty caches and is left out."""
NAMELESS: Final = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Walk:
    """What was entered while it was open."""

    def __init__(self) -> None:
        self.work: set[CodeType] = set()
        self.sweeps: set[CodeType] = set()
        self.deepest = 0

    @property
    def files(self) -> set[str]:
        return {code.co_filename for code in self.work}

    @classmethod
    def common(cls, walks: Sequence["Walk"]) -> "Walk":
        """What every one of them passed: what happened beside them by chance is left out."""
        same = cls()
        same.work = set.intersection(*(walk.work for walk in walks))
        same.deepest = min(walk.deepest for walk in walks)
        return same

    def without(self, idle: "Walk") -> "Walk":
        """Sweeps count for what they do here and not when there is nothing to do."""
        rest = Walk()
        rest.work = self.work | (self.sweeps - idle.sweeps)
        rest.deepest = self.deepest
        return rest


class Recorder:
    """Sees every call in every thread, and writes down those of the package into the open walk."""

    def __init__(self) -> None:
        self.walk: Walk | None = None
        self.sweeping = False
        threading.setprofile(self.see)
        sys.setprofile(self.see)

    def see(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        walk = self.walk
        if walk is None or event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if code in (SWEEPING, WORKING):
            self.sweeping = code is SWEEPING
        if code.co_name in NAMELESS:
            return
        (walk.sweeps if self.sweeping else walk.work).add(code)
        if not self.sweeping:
            walk.deepest = max(walk.deepest, own_depth(frame))

    @contextmanager
    def walking(self, *, drained: bool = False) -> Iterator[Walk]:
        """With `drained`, from where the worker begins to look for work."""
        self.sweeping = drained
        self.walk = walk = Walk()
        try:
            yield walk
        finally:
            self.walk = None


def own_depth(frame: FrameType) -> int:
    depth = 0
    each: FrameType | None = frame
    while each is not None:
        depth += each.f_code.co_filename.startswith(PACKAGE)
        each = each.f_back
    return depth


async def from_outside(recorder: Recorder, url: str) -> dict[str, Walk]:
    """What a program does that has the work done elsewhere."""
    app = App(url)

    @app.task
    async def one_step(ctx: Context) -> int:
        return await ctx.step("count", lambda: 1)

    @app.task
    async def ask(ctx: Context) -> object:
        return (await ctx.wait_for_signal("answer")).payload

    walks: dict[str, list[Walk]] = {"submit": [], "result": [], "signal": []}
    async with app:
        for _ in range(TIMES):
            with recorder.walking() as submit:
                run = await app.submit(one_step)
            question = await app.submit(ask)
            async with working(app):
                await run.result("1m")
                while True:
                    if await question.state() == PublicState.SUSPENDED:
                        break
                    await asyncio.sleep(0)
            with recorder.walking() as result:
                await app.run(one_step, run.execution_id).result("1m")
            with recorder.walking() as signal:
                await question.signal("answer", 42)
            for name, walk in (("submit", submit), ("result", result), ("signal", signal)):
                walks[name].append(walk)
    return {name: Walk.common(times[1:]) for name, times in walks.items()}


@asynccontextmanager
async def working(app: App) -> AsyncIterator[None]:
    stop = asyncio.Event()
    worker = asyncio.create_task(app.run_worker(stop=stop, signals=False))
    try:
        yield
    finally:
        stop.set()
        await worker


async def from_inside(recorder: Recorder) -> dict[str, Walk]:
    """What a worker does with what it finds ready."""
    app = LocalApp()

    @app.task
    async def one_step(ctx: Context) -> int:
        return await ctx.step("count", lambda: 1)

    @app.task
    async def ask(ctx: Context) -> object:
        return (await ctx.wait_for_signal("answer")).payload

    @app.task
    async def add(left: int, right: int) -> int:
        return left + right

    async with app:
        for task in (one_step, ask):
            await app.submit(task)
        await app.drain()
        with recorder.walking(drained=True) as idle:
            await app.drain()
        await app.submit(one_step)
        with recorder.walking(drained=True) as job:
            await app.drain()
        await app.submit(ask)
        with recorder.walking(drained=True) as pause:
            await app.drain()
        with recorder.walking() as flow:
            graph = app.flow("sums")
            first = graph.add(add, 1, 2)
            graph.add(add, first, 3)
            await graph.start()
            await app.drain()
    return {
        "claim + one step + complete": job.without(idle),
        "run up to a suspension": pause.without(idle),
        "flow of two nodes": flow.without(idle),
    }


ORDER: Final = (
    "submit",
    "claim + one step + complete",
    "result",
    "run up to a suspension",
    "signal",
    "flow of two nodes",
)


async def main() -> None:
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as directory:
        walks = await from_outside(recorder, f"sqlite:///{directory}/walks.db")
    walks |= await from_inside(recorder)
    table = Table("walk", title="Walks through the package", title_justify="left")
    for column in ("functions", "files", "deepest own stack"):
        table.add_column(column, justify="right")
    for name in ORDER:
        walk = walks[name]
        table.add_row(name, str(len(walk.work)), str(len(walk.files)), str(walk.deepest))
    Console().print(table)


if __name__ == "__main__":
    asyncio.run(main())
