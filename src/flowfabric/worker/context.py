"""What a handler can do while it runs.

`Context` is for async handlers. Plain functions, which run in a thread, use
`ctx.blocking`, which has the same verbs without `await`.

The results of finished steps are stored, and later runs of the handler get them back: after a
crash, a retry, a long sleep, an operator's replay. Each verb takes its place in the journal when
it is called and does its work when it is awaited; see `worker.journal`.
"""

import asyncio
import logging
import math
import random as randomness
import uuid as uuids
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from typing import Final, Generic, ParamSpec, TypeVar, TypeVarTuple, Unpack, overload

import msgspec

from flowfabric.core.checks import check_text, split_kind, visible
from flowfabric.core.ids import AttemptId, ExecutionId
from flowfabric.core.policies import Duration, decide_retry, duration_ms
from flowfabric.core.records import StepKind
from flowfabric.core.schedules import DUE_TAG
from flowfabric.core.states import FailureClass
from flowfabric.core.streams import NewFrame
from flowfabric.engine.details import Outcome
from flowfabric.errors import DoNotRetry, InvalidInput, NotInAStep
from flowfabric.parts import waits
from flowfabric.run import result_of
from flowfabric.submission import Options, read_submission
from flowfabric.task import Call, Retry, SubmitOptions, Task, result_codec
from flowfabric.worker.asyncio_tasks import inside_step
from flowfabric.worker.blame import blame
from flowfabric.worker.branches import DurableCall
from flowfabric.worker.budgets import BlockingBudgetVerbs, BudgetVerbs
from flowfabric.worker.digests import known_by
from flowfabric.worker.emitter import frames_of, patch_of
from flowfabric.worker.failures import RESULT_OF, failure_of, stored_outcome
from flowfabric.worker.fences import FencedTransaction
from flowfabric.worker.functions import is_cancelled
from flowfabric.worker.journal import Patch
from flowfabric.worker.leases import clock_s
from flowfabric.worker.parking import fitting
from flowfabric.worker.services import (
    Services,
    check_step,
    decode_step,
    encode_step,
    on_loop,
)
from flowfabric.worker.signals import BlockingSignalVerbs, SignalVerbs

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

BRANCH_NAME_BYTES_MAX: Final = 100
PATCH_NAME_BYTES_MAX: Final = 100
IN_PROCESS_SLEEP_MS: Final = 5_000
"""Shorter sleeps keep the worker; unwinding and claiming again would cost more than it frees."""


class Child(Generic[R_co]):
    """An execution submitted by a handler."""

    def __init__(
        self, services: Services, task: Task[..., R_co], execution_id: ExecutionId
    ) -> None:
        self._services = services
        self.task = task
        self.execution_id = execution_id

    def result(self) -> Coroutine[object, object, R_co]:
        """Wait for the child's end without holding a worker, and return what it returned.

        While the child runs, the handler is parked; once it has ended, the handler runs again
        and gets the result here. Raises as `Run.result` does. How the child ended is stored,
        and the same in every later run.
        """
        services = self._services
        name = f"{RESULT_OF}{self.execution_id}"
        made = self._result(services.journal.ask(StepKind.CHILD, name))
        services.promises.add(f"result() of a child of task {self.task.name}", made)
        return made

    async def _result(self, call: DurableCall) -> R_co:
        services = self._services
        try:
            async with call:
                stored = await services.journal.find(call)
                if stored is None:
                    outcome = await self._ended(call)
                else:
                    outcome = stored_outcome(self.execution_id, stored)
                return await fitting(services.parking, partial(result_of, self.task, outcome))
        except BaseException as error:
            blame(services.lease, call, error)
            raise

    async def _ended(self, call: DurableCall) -> Outcome:
        """How it ended, stored before the handler sees it."""
        services, ends = self._services, self._services.journal.ends
        while True:
            services.check()
            with services.parking.working():
                outcome = ends.get(call.name) or await services.outcome_of(self.execution_id)
                if outcome is not None:
                    # The child may have been replayed since the handler saw how it ended.
                    outcome = ends.setdefault(call.name, outcome)
                    failure = failure_of(outcome)
                    await services.journal.store(call, result=outcome.result, failure=failure)
                    return outcome
            await services.parking.until_ended(self.execution_id)


class BlockingChild(Generic[R_co]):
    """An execution submitted by a plain handler."""

    def __init__(self, child: Child[R_co]) -> None:
        self._child = child
        self.execution_id = child.execution_id

    def result(self) -> R_co:
        return self._child._services.wait(self._child.result())


class Context(SignalVerbs, BudgetVerbs):
    """The execution a handler works on, and what the handler can do."""

    def __init__(self, services: Services, *, waits: bool = False) -> None:
        self._services = services
        self._waits = waits
        claimed = services.lease.claimed
        self.execution_id: ExecutionId = claimed.execution_id
        self.attempt_index: int = claimed.attempt_index
        self.retry_count: int = claimed.retry_count
        name, version = split_kind(claimed.execution_kind)
        self.task_name: str = name
        self.task_version: int = version
        self.lane: str = claimed.lane_id
        self.priority: int = claimed.priority
        self.worker_instance_id: str = claimed.handle.worker_instance_id

    @property
    def attempt_id(self) -> AttemptId:
        """Changes with every attempt, but not with a sleep or a wait."""
        return self._services.lease.claimed.attempt_id

    @property
    def lease_remaining(self) -> timedelta:
        """How long the lease is known to last. The worker renews it all the time: if this shrinks
        towards zero, the database does not answer."""
        left_s = self._services.lease.left_s
        return timedelta.max if math.isinf(left_s) else timedelta(seconds=max(0.0, left_s))

    @on_loop
    async def tags(self) -> Mapping[str, str]:
        """The tags of the execution as they are now."""
        services = self._services
        execution_id = services.lease.claimed.execution_id
        found = await services.request(lambda: services.engine.read_execution_context(execution_id))
        return found.tags

    @on_loop
    async def scheduled_for(self) -> datetime | None:
        """The due time it was created for, if a schedule created it; when it was run by hand, that
        time."""
        due_ms = (await self.tags()).get(DUE_TAG)
        return None if due_ms is None else datetime.fromtimestamp(int(due_ms) / 1_000, UTC)

    @cached_property
    def log(self) -> "logging.LoggerAdapter[logging.Logger]":
        """A logger whose records carry execution, attempt and worker."""
        logger = logging.getLogger(f"flowfabric.task.{self.task_name}")
        return logging.LoggerAdapter(logger, self._services.lease.log_fields)

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop: cancelled, timed out, or its lease is gone."""
        return self._services.stopped is not None

    @property
    def stop_reason(self) -> str | None:
        """Why the handler should stop, in words."""
        return self._services.stopped

    @property
    def blocking(self) -> "BlockingContext":
        """The same verbs for plain functions, which run in a thread."""
        return BlockingContext(Context(self._services, waits=True))

    def get(self, kind: type[T]) -> T:
        """The resource of this type; see `App.provide`."""
        return self._services.resources.get(kind)

    # Steps

    @overload
    def step(
        self, name: str, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[object, object, R]: ...
    @overload
    def step(
        self, name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[object, object, R]: ...
    @overload
    def step(
        self,
        name: str,
        function: Callable[[Unpack[Ts]], Awaitable[R]],
        /,
        *args: *Ts,
        retry: Retry | None,
    ) -> Coroutine[object, object, R]: ...
    @overload
    def step(
        self,
        name: str,
        function: Callable[[Unpack[Ts]], R],
        /,
        *args: *Ts,
        retry: Retry | None,
    ) -> Coroutine[object, object, R]: ...
    @on_loop
    def step(
        self,
        name: str,
        function: Callable[..., object],
        /,
        *args: object,
        retry: Retry | None = None,
        **kwargs: object,
    ) -> Coroutine[object, object, object]:
        """Run a function once, whatever crashes; return what it returned.

        The result is stored as JSON, and what you get is what was stored, decoded by the
        function's return annotation. Plain functions run in a thread. `retry` tries again
        within this run of the handler; after the last try the exception reaches the handler.
        """
        check_step(name, function, retry)
        known = known_by(function, *args, kwargs)
        call = self._services.journal.ask(StepKind.CALL, name, known)
        return self._step(call, function, partial(function, *args, **kwargs), retry)

    async def _step(
        self,
        call: DurableCall,
        function: Callable[..., object],
        bound: partial[object],
        retry: Retry | None,
    ) -> object:
        services, journal = self._services, self._services.journal
        # Not that of `bound.func`: a function that was partial already has no annotations.
        decode = result_codec(function).decoder.decode
        try:
            async with call:
                stored = await journal.look_up(call)
                if stored is not None:
                    await journal.deliver(stored)
                    read = partial(decode_step, call.key, decode, stored.result or b"null")
                    return await fitting(services.parking, read)
                services.unfinished.begin()
                try:
                    data = encode_step(call.key, await self._tried(call, bound, retry))
                    # Before it is stored: a result that does not fit fails the step.
                    result = decode_step(call.key, decode, data)
                    if services.emits:
                        await services.flush()
                    await journal.store(call, result=data)
                finally:
                    services.unfinished.end()
                return result
        except BaseException as error:
            blame(services.lease, call, error)
            raise

    async def _tried(
        self, call: DurableCall, function: partial[object], retry: Retry | None
    ) -> object:
        final = (DoNotRetry, NotInAStep, *(() if retry is None else retry.final))
        retry_count, began_s = 0, clock_s()
        while True:
            self._services.check()
            inside = inside_step.set(call)
            try:
                return await self._services.call(call, function)
            except (Exception, asyncio.CancelledError) as error:
                if retry is None or isinstance(error, final) or is_cancelled(error):
                    raise
                delay_ms = decide_retry(
                    retry.policy,
                    retry_count=retry_count,
                    failure_class=FailureClass.TRANSIENT,
                    category="",
                    chance=randomness.random(),
                )
                if delay_ms is None:
                    raise
                self.log.warning("step %s failed, trying again: %s", call.key, visible(repr(error)))
            finally:
                inside_step.reset(inside)
                call.took_ms = max(0, round((clock_s() - began_s) * 1_000))
            retry_count += 1
            await self._services.pause(delay_ms / 1_000)

    @on_loop
    def sleep(self, duration: Duration) -> Coroutine[object, object, None]:
        """Wait durably. A long sleep releases the worker; the handler runs again afterwards."""
        sleep_ms = duration_ms("duration", duration)
        call = self._services.journal.ask(StepKind.SLEEP, "sleep", known_by(sleep_ms))
        return self._sleep(call, sleep_ms)

    async def _sleep(self, call: DurableCall, sleep_ms: int) -> None:
        services = self._services
        async with call:
            stored = await services.journal.find(call)
            if stored is None:
                services.check()
                if sleep_ms > services.in_process_sleep_ms:
                    services.parking.check_free()
                with services.parking.working():
                    wake_at_ms = await services.journal.store_sleep(call, sleep_ms)
            elif stored.position is not None:
                return
            else:
                wake_at_ms = stored.wake_at_ms or 0
            left_ms = wake_at_ms - services.lease.store_now_ms()
            if left_ms > services.in_process_sleep_ms:
                await services.parking.until(wake_at_ms, left_ms / 1_000)
            elif left_ms > 0:
                await asyncio.sleep(left_ms / 1_000)
            await services.journal.woke(call)

    @on_loop
    def now(self) -> Coroutine[object, object, datetime]:
        """The time on the store's clock; later runs of the handler get the same."""
        return self._now(self._services.journal.ask(StepKind.NOW, "now"))

    async def _now(self, call: DurableCall) -> datetime:
        services = self._services
        async with call:
            stored = await services.journal.find(call)
            if stored is None:
                with services.parking.working():
                    at_ms = (await services.journal.store(call)).at_ms
            else:
                at_ms = stored.recorded_at_ms
        return datetime.fromtimestamp(at_ms / 1_000, UTC)

    @on_loop
    def random(self) -> Coroutine[object, object, float]:
        """A number from 0 to 1; later runs of the handler get the same."""
        call = self._services.journal.ask(StepKind.RANDOM, "random")
        return self._recorded(call, randomness.random, float)

    @on_loop
    def uuid(self) -> Coroutine[object, object, uuids.UUID]:
        """A random uuid; later runs of the handler get the same."""
        call = self._services.journal.ask(StepKind.UUID, "uuid")
        return self._recorded(call, uuids.uuid4, uuids.UUID)

    async def _recorded(self, call: DurableCall, make: Callable[[], T], as_: type[T]) -> T:
        services = self._services
        async with call:
            stored = await services.journal.find(call)
            if stored is not None:
                return msgspec.json.decode(stored.result or b"null", type=as_)
            value = make()
            with services.parking.working():
                await services.journal.store(call, result=msgspec.json.encode(value))
        return value

    @on_loop
    def patched(self, name: str) -> Coroutine[object, object, bool]:
        """Whether a change of the code applies to this run: `if await ctx.patched("…"):`.

        True if the run gets here for the first time, and from then on; false if it passed this
        place with the old code. Each place in the code decides separately. See docs/deploys.md.
        """
        check_text("name", name, bytes_max=PATCH_NAME_BYTES_MAX, empty=False)
        return self._patched(self._services.journal.ask_patch(name))

    async def _patched(self, patch: Patch) -> bool:
        self._services.check()
        with self._services.parking.working():
            return await self._services.journal.patched(patch)

    def branch(self, name: str) -> AbstractContextManager[None]:
        """Give a branch of the function a name: `with ctx.branch("ada"): …`.

        Calls inside are identified by that name, wherever and in whatever order they run. Use it
        for parallel branches that cannot be told apart otherwise.
        """
        check_text("name", name, bytes_max=BRANCH_NAME_BYTES_MAX, empty=False)
        return self._services.journal.branch(name)

    def fence(self, connection: object) -> FencedTransaction:
        """Commit business rows only while this worker owns the execution.

        Use it inside an open transaction: `with` it, or `async with` it for an async
        connection. A worker that has lost its lease stops here. While the transaction lasts,
        ten minutes at most, no other worker can take the lease. The verbs of the context do
        not work inside.
        """
        return self._services.fence(connection)

    # Other executions

    @overload
    def submit(
        self, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[object, object, Child[R]]: ...
    @overload
    def submit(
        self,
        task: Callable[[Unpack[Ts]], Call[R]],
        /,
        *args: *Ts,
        **options: Unpack[SubmitOptions],
    ) -> Coroutine[object, object, Child[R]]: ...
    @overload
    def submit(
        self, call: Call[R], /, **options: Unpack[SubmitOptions]
    ) -> Coroutine[object, object, Child[R]]: ...
    @on_loop
    def submit(
        self, what: object, /, *args: object, **keywords: object
    ) -> Coroutine[object, object, Child[object]]:
        """Submit another execution. A later run of the handler finds the same one."""
        return self._submit_any(what, args, keywords)

    def _submit_any(
        self, what: object, args: tuple[object, ...], keywords: dict[str, object]
    ) -> Coroutine[object, object, Child[object]]:
        submission, options = read_submission(what, args, keywords)
        if options.connection is not None:
            raise InvalidInput("connection", "a handler submits through its own ctx.submit")
        self._check_namespace(submission.task)
        arguments = submission.payload if isinstance(what, Call) else args
        call = self._services.journal.ask(
            StepKind.SUBMIT, f"submit {submission.task.name}", known_by(arguments, keywords)
        )
        return self._submit(call, submission, options)

    def _check_namespace(self, task: Task[..., object]) -> None:
        here = self._services.lease.claimed.namespace
        if task.namespaces and here not in task.namespaces:
            raise InvalidInput(
                "submit",
                f"{task.name} is a task of namespace {', '.join(sorted(task.namespaces))!r}, and a"
                f" child is in that of its parent, {here!r}; submit it through its own app inside a"
                " step, or adopt that app",
            )

    async def _submit(
        self, call: DurableCall, submission: Call[object], options: Options
    ) -> Child[object]:
        services = self._services
        async with call:
            stored = await services.journal.find(call)
            if stored is None:
                services.check()
                with services.parking.working():
                    made = await services.submit_child(call.identity, submission, options)
                    # Later runs find the same child by its id, or its idempotency key.
                    await services.journal.store_later(call, result=msgspec.json.encode(made))
            else:
                made = ExecutionId(msgspec.json.decode(stored.result or b"null", type=str))
        return Child(services, submission.task, made)

    # What others can see

    @on_loop
    async def emit(
        self,
        content: object,
        *,
        kind: str = "",
        live: Duration | None = None,
        correlation_id: str | None = None,
    ) -> None:
        """Send text, bytes or any JSON value to those who follow the run.

        It is on its way when this returns, and stored before the attempt ends. `kind` is your
        own label. With `live="10s"` only live viewers see it, and it is deleted soon after. A
        frame emitted in a step counts as long as the step does; outside of steps, as long as
        the attempt. What was emitted before a pause is not emitted again.
        """
        self._services.check()
        await self._say(frames_of(content, kind, live, correlation_id))

    @on_loop
    async def summary(self, patch: Mapping[str, object]) -> None:
        """Change the run's summary: members replace those of the same name, None deletes one.

        Objects are merged, lists replaced. Every attempt has its own summary.
        """
        self._services.check()
        await self._say([patch_of(patch)])

    async def _say(self, frames: Sequence[NewFrame]) -> None:
        emitter = self._services.emitter
        if emitter.is_new and not emitter.is_full:
            emitter.add(frames)
            return
        with self._services.parking.working():
            if emitter.is_new or not await emitter.repeats():
                emitter.add(frames)
                await emitter.room()

    @on_loop
    async def progress(self, percent: int | None = None, message: str | None = None) -> None:
        """Report progress. An omitted value stays as it was."""
        services, handle = self._services, self._services.lease.handle
        services.check()
        with services.parking.working():
            await services.request(
                lambda: services.engine.progress(handle, percent=percent, message=message)
            )


class BlockingContext(BlockingSignalVerbs[Context], BlockingBudgetVerbs[Context]):
    """A context's verbs for plain functions. Call it from the handler's own thread."""

    @overload
    def step(
        self, name: str, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    def step(
        self, name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    def step(
        self,
        name: str,
        function: Callable[[Unpack[Ts]], Awaitable[R]],
        /,
        *args: *Ts,
        retry: Retry | None,
    ) -> R: ...
    @overload
    def step(
        self,
        name: str,
        function: Callable[[Unpack[Ts]], R],
        /,
        *args: *Ts,
        retry: Retry | None,
    ) -> R: ...
    def step(
        self,
        name: str,
        function: Callable[..., object],
        /,
        *args: object,
        **keywords: object,
    ) -> object:
        """Run a function once, whatever crashes; see `Context.step`."""
        context = self._context
        return context._services.wait(context.step(name, function, *args, **keywords))

    sleep = waits(Context.sleep)
    now = waits(Context.now)
    random = waits(Context.random)
    uuid = waits(Context.uuid)
    patched = waits(Context.patched)
    emit = waits(Context.emit)
    summary = waits(Context.summary)
    progress = waits(Context.progress)
    tags = waits(Context.tags)
    scheduled_for = waits(Context.scheduled_for)

    @overload
    def submit(
        self, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> BlockingChild[R]: ...
    @overload
    def submit(
        self,
        task: Callable[[Unpack[Ts]], Call[R]],
        /,
        *args: *Ts,
        **options: Unpack[SubmitOptions],
    ) -> BlockingChild[R]: ...
    def submit(self, task: object, /, *args: object, **keywords: object) -> BlockingChild[object]:
        """Submit another execution; see `Context.submit`."""
        context = self._context
        return BlockingChild(context._services.wait(context._submit_any(task, args, keywords)))
