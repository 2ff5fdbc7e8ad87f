"""What stands behind a handler's context: lease, steps, reports, and the way to the engine."""

import asyncio
import concurrent.futures
import contextvars
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial, wraps
from types import CoroutineType
from typing import Concatenate, Final, NamedTuple, NoReturn, ParamSpec, TypeVar

import msgspec
from msgspec import structs

from flowfabric import errors
from flowfabric.core.checks import check_text
from flowfabric.core.ids import ExecutionId
from flowfabric.core.journal import STEP_NAME_BYTES_MAX
from flowfabric.core.results import CreateResult
from flowfabric.engine.details import Outcome
from flowfabric.engine.engine import Engine
from flowfabric.engine.ledger import BudgetOutcome, BudgetRequest
from flowfabric.engine.signals import kept_topic
from flowfabric.engine.waitpoints import PastRuns, SuspensionView
from flowfabric.json_values import encode_value
from flowfabric.logs import open_log
from flowfabric.parts import Twin
from flowfabric.store.base import HintListener
from flowfabric.submission import Options, Submissions, child_id
from flowfabric.task import Call, HandlerContext, Retry, Task
from flowfabric.worker.asyncio_tasks import inside_step
from flowfabric.worker.branches import DurableCall
from flowfabric.worker.emitter import Emitter
from flowfabric.worker.fences import FencedTransaction, FenceQueue, check_outside
from flowfabric.worker.functions import Functions, Unfinished
from flowfabric.worker.journal import GOES_ON, SWALLOWED_MAX, Journal
from flowfabric.worker.leases import (
    HeldLease,
    fenced,
)
from flowfabric.worker.parking import Parking, Pause
from flowfabric.worker.reports import Recorder, Reports
from flowfabric.worker.resources import Resources

# Noticing that a handler has called a verb and not awaited it ---------------
#
# Such a call does nothing, and a handler that returns without awaiting it looks as if it had
# done its work. So the coroutines that verbs return are remembered, and checked at the end.

LOOK_AT: Final = 64
"""How many are remembered before the awaited ones are dropped."""


class Promise(NamedTuple):
    """The coroutine a verb has returned, and the call as it is written in the code."""

    called: str
    coroutine: "CoroutineType[object, object, object]"
    caller: asyncio.Task[object] | None
    """The task of the handler, or of a branch; none in a thread."""

    @property
    def is_kept(self) -> bool:
        made = self.coroutine
        # A coroutine that has ended has no frame, and one that is under way has begun.
        return made.cr_frame is None or made.cr_suspended or made.cr_running

    def may_be_kept(self, handler: asyncio.Task[object] | None) -> bool:
        """Whether it was called by a branch that still runs and may await it."""
        return not (self.caller is handler or self.caller is None or self.caller.done())


class Promises:
    """The coroutines that the verbs of one handler have returned."""

    def __init__(self) -> None:
        self._made: list[Promise] = []
        self._look_at = LOOK_AT

    def add(self, called: str, coroutine: Coroutine[object, object, object]) -> None:
        assert isinstance(coroutine, CoroutineType), "that is what verbs are made of"
        try:
            caller = asyncio.current_task()
        except RuntimeError:
            caller = None
        # A handler that awaits its calls one by one never has more than one open.
        if self._made and self._made[-1].is_kept:
            self._made.pop()
        self._made.append(Promise(called, coroutine, caller))
        if len(self._made) > self._look_at:
            self._made = self._open()
            self._look_at = max(LOOK_AT, 2 * len(self._made))

    def check(self) -> None:
        if (unkept := self.unkept()) is not None:
            raise unkept

    def unkept(self) -> errors.NotAwaited | None:
        """That some were never awaited, by the handler or by a task that has ended."""
        handler = asyncio.current_task()
        found = [promise for promise in self._open() if not promise.may_be_kept(handler)]
        for promise in found:
            promise.coroutine.close()
        return errors.NotAwaited([promise.called for promise in found]) if found else None

    def let_go(self) -> None:
        """Drop references back to the attempt."""
        self._made.clear()

    def _open(self) -> list[Promise]:
        return [promise for promise in self._made if not promise.is_kept]


# What stands behind a handler's context: its lease, its steps, and the way to the engine

log = open_log(__name__)

T = TypeVar("T")


class Shared:
    """What all attempts of a worker share."""

    def __init__(
        self,
        engine: Engine,
        reports: Reports,
        submissions: Submissions,
        functions: Functions,
        resources: Resources,
        in_process_sleep_ms: int,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`pause` waits the given seconds in place."""
        self.engine = engine
        self.reports = reports
        self.submissions = submissions
        self.functions = functions
        self.resources = resources
        self.in_process_sleep_ms = in_process_sleep_ms
        self.pause = pause
        self.loop = asyncio.get_running_loop()
        self.context = contextvars.copy_context()
        """The context variables that every handler begins with."""


class Services:
    """One attempt's view of them.

    Its parts must not refer back to it: a cycle would keep every finished attempt alive until
    the next garbage collection.
    """

    def __init__(
        self, shared: Shared, lease: HeldLease, parking: Parking, progress: PastRuns
    ) -> None:
        self._shared = shared
        self.engine = shared.engine
        self._last_pause = progress.pause
        self._loop = shared.loop
        self._thread = threading.get_ident()
        self._calls: set[asyncio.Task[object]] | None = None
        """What the handler's thread waits for."""
        self.lease = lease
        self.parking = parking
        self.resources = shared.resources
        self.in_process_sleep_ms = shared.in_process_sleep_ms
        self.pause = shared.pause
        self.stopped: str | None = None
        self._called_since = 0
        """How many verbs were called since then."""
        self.is_ignored = False
        """Whether it continues although it was stopped long ago; no verb returns to it any more."""
        self.waitpoints_made = 0
        """By this run of the handler, which makes each one again; some may be closed by now."""
        self.promises = Promises()
        self.unfinished = Unfinished()
        self._emitter: Emitter | None = None
        self._fences = FenceQueue()
        self._recorder = Recorder(shared.engine, shared.reports, lease, parking)
        self.journal = Journal(self._recorder, parking, progress.steps)

    def on_worker_loop(self) -> bool:
        """Whether this is called on the worker's event loop."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def check(self) -> None:
        """Stop here if the handler is to stop, or should have stopped by now."""
        self.lease.check()
        if self.stopped is not None:
            raise asyncio.CancelledError(self.stopped)
        check_outside(self.lease)

    def goes_on(self) -> bool:
        """Whether the handler calls verbs in a loop although it was stopped."""
        self._called_since += self.stopped is not None
        return self._called_since > SWALLOWED_MAX

    async def stop_again(self) -> NoReturn:
        """Refuse a handler that goes on, but let everything else run first."""
        await asyncio.sleep(0)
        if self.is_ignored:
            await self._loop.create_future()
        raise RuntimeError(GOES_ON)

    def stop(self, reason: str) -> None:
        """Stop the handler: whatever its thread waits for ends at once."""
        self.stopped = reason
        self.journal.close()
        for call in self._calls or ():
            call.cancel()

    def call(
        self, call: DurableCall, function: partial[object]
    ) -> Coroutine[object, object, object]:
        """Call the function of a step."""
        unfinished = self.unfinished
        return self._shared.functions.call(
            function, on_cancel=unfinished.begin, late=partial(unfinished.came_late, call)
        )

    async def finish_steps(self) -> None:
        """The handler has failed: begin nothing more, and store the steps that still run."""
        self.journal.close()
        if self.unfinished.count:
            log.info("failed; its running steps end first", extra=self.lease.log_fields)
        await self.unfinished.wait()
        for call, result in self.unfinished.late:
            # Unless the handler continued without it: then the cancellation is stored.
            if any(seen.call is call for seen in self.journal.seen):
                with suppress(errors.InvalidInput):
                    await self.journal.store(call, result=encode_step(call.key, result))

    def wait(self, work: Coroutine[object, object, T]) -> T:
        """From the handler's thread: run `work` on the worker's loop and wait for it."""
        if threading.get_ident() == self._thread:
            work.close()
            raise errors.InvalidInput(
                "ctx.blocking",
                "is for plain functions, which run in a thread; on the event loop it would wait"
                " for itself. Use the verb of ctx itself, with await",
            )
        context = contextvars.copy_context()
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def start() -> None:
            if self.stopped is not None:
                work.close()
                done.cancel()
                return
            if self._calls is None:
                self._calls = set()
            task = self._loop.create_task(_contained(work, done), context=context)
            self._calls.add(task)
            task.add_done_callback(lambda ended: _hand_over(ended, done))
            task.add_done_callback(self._calls.discard)

        self._loop.call_soon_threadsafe(start)
        try:
            return done.result()
        except concurrent.futures.CancelledError:
            raise asyncio.CancelledError(self.stopped) from None

    async def post(self, request: BudgetRequest) -> BudgetOutcome:
        """Send a request to a budget, together with those of other handlers."""
        return await self.request(lambda: self._shared.reports.usage.add(request))

    def key_of(self, identity: str) -> str:
        """The key of a call outside its execution."""
        return f"{self.lease.claimed.execution_id}:{identity}"

    async def outcome_of(self, execution_id: ExecutionId) -> Outcome | None:
        found = await self.request(lambda: self.engine.find_outcomes([execution_id]))
        if execution_id in found.missing:
            raise errors.NotFound("execution", execution_id)
        return found.ended.get(execution_id)

    async def take_signals(self, pause: Pause, *, announce: bool) -> SuspensionView | None:
        """How a pause would end at once; None if it would not."""
        return await self.request(
            lambda: self.engine.take_signals(
                self.lease.handle,
                suspension_id=pause.suspension_id,
                resume_condition=pause.condition,
                announce=announce,
            )
        )

    async def set_aside_signals(
        self, suspension_id: str, signal_ids: Sequence[str], reason: str
    ) -> None:
        await self.request(
            lambda: self.engine.set_aside_signals(
                self.lease.handle,
                suspension_id=suspension_id,
                signal_ids=signal_ids,
                reason=reason,
            )
        )

    def kept_hints(self) -> HintListener:
        """Tells when signals may have reached an execution of this worker."""
        return self.engine.store.hints([kept_topic(self.lease.claimed.handle.worker_instance_id)])

    async def describe_suspension(self, suspension_id: str) -> SuspensionView | None:
        last = self._last_pause
        if last is not None and last.suspension_id == suspension_id and not last.is_open:
            # Only this handler changes a pause that has ended.
            check_outside(self.lease)
            return last
        execution_id = self.lease.claimed.execution_id
        return await self.request(
            lambda: self.engine.describe_suspension(execution_id, suspension_id)
        )

    def fence(self, connection: object) -> "FencedTransaction":
        return FencedTransaction(
            self.engine, self.lease, connection, self._loop, self._fences, self.parking
        )

    async def submit_child(
        self, identity: str, call: Call[object], options: Options
    ) -> ExecutionId:
        """Create an execution that names this one as its parent. Safe to repeat."""
        parent = self.lease.claimed.execution_id
        if options.execution_id is None and options.idempotency_key is None:
            options = structs.replace(options, execution_id=self._child_id(parent, identity))
        submissions, namespace = self._shared.submissions, self.lease.claimed.namespace

        async def submit() -> CreateResult:
            """Safe to repeat: its id, or its idempotency key, is the same each time."""
            (checked,) = submissions.check([call], options, namespace, parent)
            return await submissions.submit(checked)

        created = await self.request(submit)
        if created.execution_id == parent:
            named = "execution_id" if options.idempotency_key is None else "idempotency_key"
            raise errors.InvalidInput(named, "is this run's own; give the child another")
        return created.execution_id

    def _child_id(self, parent: ExecutionId, identity: str) -> ExecutionId:
        # Another call, whose arguments have changed since, may have had this identity.
        while not self.journal.children.may_submit(made := child_id(self.engine, parent, identity)):
            identity += "'"
        return made

    @property
    def emitter(self) -> Emitter:
        """Made when the handler first emits something."""
        if self._emitter is None:
            self._emitter = Emitter(self.engine, self._shared.reports, self.lease)
        return self._emitter

    @property
    def emits(self) -> bool:
        """Whether something the handler has emitted is not stored yet."""
        return self._emitter is not None and not self._emitter.is_idle

    async def flush(self) -> None:
        """Wait until everything the handler has emitted is stored."""
        with self.parking.working():
            await self.emitter.flush()

    @property
    def is_missing_frames(self) -> bool:
        """Whether something the handler has emitted will not be stored."""
        return self._emitter is not None and self._emitter.is_missing_frames

    async def settle(self) -> None:
        """After the handler has ended, store everything it did not wait for."""
        await self._recorder.drain()
        if self._emitter is not None:
            await self._emitter.close()

    def let_go(self) -> None:
        """Drop references back to the attempt."""
        self.journal.let_go()
        self.parking.let_go()
        self.promises.let_go()

    async def request(self, report: Callable[[], Awaitable[T]]) -> T:
        """Make an idempotent call to the engine."""
        check_outside(self.lease)
        await self._recorder.room()
        return await fenced(self.lease, self._shared.reports.call_engine(self.lease, report))


async def _contained(work: Coroutine[object, object, T], done: "concurrent.futures.Future[T]") -> T:
    """Let errors that would end the event loop end only the handler's call."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        done.set_exception(error)
        raise asyncio.CancelledError from None


def _hand_over(task: "asyncio.Task[T]", done: "concurrent.futures.Future[T]") -> None:
    if task.cancelled() or done.done():
        done.cancel()
        return
    error = task.exception()
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())


# What the verbs of a context have in common, and what they refuse at once

P = ParamSpec("P")
V = TypeVar("V", bound="Verbs")
V_co = TypeVar("V_co", bound="Verbs", covariant=True)

IN_STEPS: Final = ("progress", "emit", "summary", "tags")
"""The verbs that a step's function may call; all others are refused inside a step."""


class Verbs(HandlerContext):
    """Some of the verbs of a context."""

    _services: Services
    _waits: bool = False
    """Whether a thread waits for what the verbs return: `ctx.blocking` does."""


class BlockingVerbs(Twin[V_co]):
    """The same verbs for plain functions, which run in a thread."""

    def __init__(self, context: V_co) -> None:
        self._context = context

    def _call(
        self, method: Callable[[V_co], Coroutine[object, object, T]], connection: object
    ) -> T:
        return self._context._services.wait(method(self._context))


def on_loop(
    verb: Callable[Concatenate[V, P], Coroutine[object, object, T]],
) -> Callable[Concatenate[V, P], Coroutine[object, object, T]]:
    """Refuse a verb at once where it cannot be awaited, as in a plain function, and check later
    that it was awaited."""

    @wraps(verb)
    def checked(self: V, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[object, object, T]:
        return called(self, verb.__name__, args, partial(verb, self, *args, **kwargs))

    return checked


def called(
    verbs: Verbs,
    name: str,
    args: Sequence[object],
    verb: Callable[[], Coroutine[object, object, T]],
) -> Coroutine[object, object, T]:
    """Call a verb, and remember what it returns: the handler has to await it."""
    check_awaitable(verbs, name)
    services = verbs._services
    made = services.stop_again() if services.goes_on() else verb()
    if not verbs._waits:
        services.promises.add(_shown(name, args), made)
    return made


def _shown(verb: str, args: Sequence[object]) -> str:
    """The call, roughly as it is written in the code."""
    about = args[0] if args else ""
    if isinstance(about, Task | Call):
        about = about.name if isinstance(about, Task) else about.task.name
        return f"ctx.{verb}({about}, …)"
    return f"ctx.{verb}({about!r}, …)" if isinstance(about, str) and about else f"ctx.{verb}(…)"


def check_awaitable(verbs: Verbs, name: str) -> None:
    if verbs._waits or verbs._services.on_worker_loop():
        return
    if inside_step.get() is None or name in IN_STEPS:
        raise errors.InvalidInput(
            f"ctx.{name}",
            "must be awaited on the worker's event loop; in a plain function use"
            f" ctx.blocking.{name}(…)",
        )


def check_step(given: object, function: object, retry: object) -> None:
    """Check the arguments of `ctx.step`."""
    if callable(given) and not isinstance(given, str):
        raise errors.InvalidInput("name", 'comes first, as in ctx.step("fetch", fetch, url)', given)
    name = check_text("name", given, bytes_max=STEP_NAME_BYTES_MAX, empty=False)
    if not isinstance(retry, Retry | None):
        raise errors.InvalidInput("retry", "must be a Retry", retry)
    step = f"the function of step {name}"
    if isinstance(function, Task | Call):
        task = function if isinstance(function, Task) else function.task
        raise errors.InvalidInput(
            step,
            f"is a task; `await ctx.submit({task.name}, …)` runs it as an execution of its own, and"
            f" {task.name}.function is its function",
        )
    verb = getattr(function, "__name__", "")
    if isinstance(getattr(function, "__self__", None), Verbs) and verb not in IN_STEPS:
        raise errors.NotInAStep(f"ctx.{verb}", name)
    if callable(function):
        return
    if inspect.iscoroutine(function):
        function.close()
    raise errors.InvalidInput(
        step,
        f"has been called already; pass it and its arguments, as in ctx.step({name!r}, fetch, url)",
        function,
    )


def encode_step(key: str, value: object) -> bytes:
    return encode_value(f"the result of step {key}", value)


def decode_step(key: str, decode: Callable[[bytes], object], data: bytes) -> object:
    try:
        return decode(data)
    except msgspec.DecodeError as error:
        raise errors.InvalidInput(
            f"the result of step {key}", f"does not fit its return annotation: {error}"
        ) from error
