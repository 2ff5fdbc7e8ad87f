"""Help for tests of code that uses FlowFabric."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from threading import Lock
from typing import Final, TypeVar

import msgspec

from flowfabric.app import DEFAULT_NAMESPACE, MEMORY_URL, TESTS_OF_NO_APP, App
from flowfabric.blocking import Blocking
from flowfabric.core.checks import check_int, check_time
from flowfabric.core.diagnosis import Cause
from flowfabric.core.ids import ExecutionId, uuid_of
from flowfabric.core.policies import Duration, duration_ms
from flowfabric.core.states import TERMINAL_STATES, BlockingReason, PublicState
from flowfabric.engine.details import Outcome
from flowfabric.engine.engine import Engine
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.errors import Bug, ExecutionNotTerminal, InvalidInput, NotFound, OperationTimeout
from flowfabric.reconcilers import URGENT, run_due
from flowfabric.run import Endings, Opened
from flowfabric.submission import Submissions, check_task
from flowfabric.task import Task
from flowfabric.worker.inline import InlineWorker

T = TypeVar("T")

_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

ROUNDS_MAX: Final = 10_000
"""How often `drain` looks for more work before it gives up."""
PAGE: Final = 1_000
UNENDED: Final = tuple(sorted(set(PublicState) - TERMINAL_STATES))
UNENDED_NAMED_MAX: Final = 5
PATIENCE: Final = "5s"
"""How long `drain` waits, by the machine's clock, for handlers that wait for something outside."""


class SettableClock:
    """A clock that stands still until it is moved. Pass it to `connect(url, clock=…)`."""

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = check_time("start_ms", start_ms)
        # A store reads its clock on its own thread.
        self._lock = Lock()

    def now_ms(self) -> int:
        with self._lock:
            return self._now_ms

    def set_ms(self, now_ms: int) -> None:
        check_time("now_ms", now_ms)
        with self._lock:
            self._now_ms = now_ms

    def advance(
        self,
        duration: str = "",
        *,
        ms: int = 0,
        seconds: int = 0,
        minutes: int = 0,
        hours: int = 0,
        days: int = 0,
    ) -> int:
        """Move forward, by `"1h30m"` or by units, and return the new time."""
        parts = {"ms": ms, "seconds": seconds, "minutes": minutes, "hours": hours, "days": days}
        for name, count in parts.items():
            check_int(name, count, 0, 2**53)
        step_ms = (duration_ms("duration", duration) if duration else 0) + sum(
            count * unit_ms
            for count, unit_ms in zip(parts.values(), _UNIT_MS.values(), strict=True)
        )
        with self._lock:
            self._now_ms = check_time("now_ms", self._now_ms + step_ms)
            return self._now_ms


class LocalEndings(Endings):
    """Ends of executions, which only `drain` brings about: a wait that cannot succeed raises."""

    happens = False

    def __init__(self, engine: Engine, drains: Callable[[], Awaitable[bool]]) -> None:
        super().__init__(engine)
        self._local = engine
        self._drains = drains

    async def wait(self, execution_id: ExecutionId, timeout_s: float | None) -> Outcome:
        while True:
            found = await self._local.find_outcomes([execution_id])
            if execution_id in found.ended:
                return found.ended[execution_id]
            if found.missing:
                raise NotFound("execution", execution_id)
            if await self.is_idle():
                why = await self._local.explain_execution(execution_id)
                # No worker runs here: it waits for `drain`.
                now = "It is ready." if why.cause is Cause.NO_WORKER else why.sentence
                raise ExecutionNotTerminal(
                    f"{why.own_id or uuid_of(execution_id)} has not ended, and nothing happens by"
                    f" itself here. {now} `await app.drain()` runs what is ready,"
                    " `app.clock.advance(…)` moves time, `drain(skip_time=True)` does both"
                )

    async def is_idle(self) -> bool:
        # Give a drain that was started together with this wait a turn first.
        await asyncio.sleep(0)
        return not await self._drains()


class LocalBlocking(Blocking):
    """`app.blocking` of a `LocalApp`, whose database belongs to the event loop of the test."""

    def check_may_wait(self, verb: str) -> None:
        """A test may: its work is moved from within the wait."""

    def __init__(
        self,
        require: Callable[[], Opened],
        namespace: str,
        meet: Callable[[Task[..., object]], None],
    ) -> None:
        super().__init__(_never, namespace, meet)
        self._require = require

    def wait(self, work: Coroutine[object, object, T]) -> T:
        """Run it on the test's event loop; if that is the caller's own, the loop stands still."""
        loop = self._require().loop
        if loop.is_running() and not _is_running_here(loop):
            return asyncio.run_coroutine_threadsafe(work, loop).result()
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, work).result()

    def _open(self) -> Opened:
        opened = self._require()
        # Not the submissions of the loop: those under way may be waiting for the caller.
        return replace(opened, submissions=Submissions(opened.engine), again=None, blocks=True)


async def _never() -> Engine:
    raise Bug("a LocalApp is connected already")


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class LocalApp(App):
    """An app on a database in memory whose work runs when the test says so.

    Nothing happens unasked: `drain` runs what is ready and applies what is due by
    the clock, so the test decides when anything happens. While it is open it replaces the
    apps whose tasks it runs: it handles all calls made to them.
    """

    def __init__(self, of: App | None = None, clock: SettableClock | None = None) -> None:
        """`of` is the application under test: its tasks, resources, codec and settings are used."""
        if of is not None and not isinstance(of, App):
            raise InvalidInput("app", "must be an App: app=shop.app, where shop is its module", of)
        self.clock = clock or SettableClock()
        namespace = DEFAULT_NAMESPACE if of is None else of.namespace
        super().__init__(
            MEMORY_URL,
            namespace=namespace,
            codec=None if of is None else of.codec,
            config=None if of is None else of.config,
            clock=self.clock,
        )
        self._of = of
        self._drains = 0
        self._drained = asyncio.Event()
        if of is not None:
            self.adopt(of)

    def meet(self, task: Task[..., object]) -> None:
        """Adopt the app of a submitted task, unless that has been done."""
        if task.kind not in self.tasks and isinstance(task.owner, App):
            self.adopt(task.owner)

    def adopt(self, other: App) -> None:
        super().adopt(other)
        if self._opened is not None:
            other.replace_with(self)

    async def open(self) -> Opened:
        opened = await super().open()
        if self._of is None and self not in TESTS_OF_NO_APP:
            TESTS_OF_NO_APP.append(self)
        if not isinstance(opened.endings, LocalEndings):
            endings = LocalEndings(opened.engine, self._wait_for_drains)
            opened = self._opened = replace(opened, endings=endings)
            await self.store_schedules(opened.engine)
            for each in self.adopted:
                each.replace_with(self)
        return opened

    def _check_usable(self) -> None:
        """A test may always use its own app."""

    async def _wait_for_drains(self) -> bool:
        """Wait until no drain is running; False if none was."""
        # A wait on another loop blocks this one, and with it every drain.
        if not self._drains or not self._is_here():
            return False
        await self._drained.wait()
        return True

    def _is_here(self) -> bool:
        """Whether this is called on the event loop of the app."""
        return _is_running_here(self._require().loop)

    @cached_property
    def blocking(self) -> Blocking:
        """On the same database: what is submitted here runs when it is drained."""
        return LocalBlocking(self._require, self.namespace, self.meet)

    async def _pause(self, seconds: float) -> None:
        """A wait in place moves the clock."""
        self.clock.advance(ms=round(seconds * 1_000))
        await asyncio.sleep(0)

    def _move_to(self, at_ms: int) -> None:
        self.clock.advance(ms=max(0, at_ms - self.clock.now_ms()))

    async def drain(self, *, skip_time: bool = False, patience: Duration = PATIENCE) -> int:
        """Run everything that is ready or becomes ready by that; return how many attempts ran.

        Retries, sleeps and timeouts wait for the clock, unless `skip_time` moves it to
        whatever is due next until nothing is left. The retries of a step wait in place and
        move the clock. Schedules start with the app and always wait for the clock, since they
        never end.

        A handler that takes longer than `patience`, by the machine's clock, waits for something
        outside. If it has a `timeout`, the clock moves there and it times out; otherwise this
        raises `OperationTimeout`, and it is ready again. Cancelling this ends all handlers.
        """
        patience_s = duration_ms("patience", patience) / 1_000
        self._drains += 1
        self._drained.clear()
        try:
            return await self._drain(skip_time, patience_s)
        finally:
            self._drains -= 1
            if not self._drains:
                self._drained.set()

    async def _drain(self, skip_time: bool, patience_s: float) -> int:
        opened = await self.open()
        await self.declare_limits(opened.engine)
        await self.store_schedules(opened.engine)
        await self.resources.open()
        worker = InlineWorker(
            opened.engine,
            self.tasks,
            opened.submissions,
            self.resources,
            self.middlewares,
            self.namespace,
            self._pause,
            self._move_to,
        )
        ran, began_s = 0, time.monotonic()
        try:
            await worker.register()
            for _ in range(ROUNDS_MAX):
                acted = await run_due(opened.engine)
                now = await worker.run_ready(patience_s)
                ran += now
                # The end of a flow's node may end others, and so on.
                settled = not any(acted.get(name) for name in URGENT.values())
                if now == 0 and settled and not (skip_time and await self._skip_to_next()):
                    return ran
        finally:
            await worker.close()
        took_ms = round((time.monotonic() - began_s) * 1_000)
        why = f"after {ROUNDS_MAX:,} rounds more is ready or due, of {await self._unended()}"
        raise OperationTimeout("drain: the work does not end and", took_ms, why)

    async def _unended(self) -> str:
        """The executions that have not ended, as messages name them."""
        page = await self.engine.find_executions(
            ExecutionFilter(states=UNENDED), limit=UNENDED_NAMED_MAX
        )
        return ", ".join(f"{e.execution_kind} {uuid_of(e.execution_id)}" for e in page.executions)

    async def submitted(self, task: Task[..., object]) -> list[dict[str, object]]:
        """The arguments of every execution of a task, oldest first."""
        check_task("submitted", task)
        opened = await self.open()
        page = await opened.engine.find_executions(
            ExecutionFilter(execution_kind=f"{task.name}@{task.version}"), limit=PAGE
        )
        arguments: list[dict[str, object]] = []
        for snapshot in reversed(page.executions):
            context = await opened.engine.read_execution_context(snapshot.execution_id)
            arguments.append(msgspec.json.decode(context.input_payload, type=dict[str, object]))
        return arguments

    async def _skip_to_next(self) -> bool:
        """Move the clock to when work is due next; return whether there is any."""
        waits = await self.engine.next_due()
        work = [
            waits[name]
            for name in ("delayed", "awaited", "deadline", "suspension_timeout")
            if name in waits
        ]
        if self.engine.claims_again_in_s is not None:
            work.append(math.ceil(self.engine.claims_again_in_s * 1_000))
        if "budget_reset" in waits and await self._waits_for_budget():
            work.append(waits["budget_reset"])
        if not work:
            return False
        self.clock.advance(ms=max(0, min(work)))
        return True

    async def _waits_for_budget(self) -> bool:
        """Whether a reset lets anything start; otherwise resets would never end."""
        ready = ExecutionFilter(states=(PublicState.WAITING,))
        page = await self.engine.find_executions(ready, limit=PAGE)
        return any(
            each.blocking_reason is BlockingReason.WAITING_FOR_BUDGET for each in page.executions
        )

    async def close(self) -> None:
        for each in self.adopted:
            each.restore_from(self)
        try:
            await self.resources.close()
        finally:
            if self in TESTS_OF_NO_APP:
                TESTS_OF_NO_APP.remove(self)
            await super().close()


@asynccontextmanager
async def engine(
    clock: SettableClock | None = None, *, app: App | None = None
) -> AsyncIterator[LocalApp]:
    """An open `LocalApp`: `async with testing.engine(clock, app=shop.app) as app: …`.

    Inside the block, everything that uses `shop.app` uses the test's database.
    """
    async with LocalApp(app, clock) as local:
        yield local
