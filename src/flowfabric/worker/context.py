"""What a handler can do while it runs.

`Context` is for async handlers. Plain functions, which run in a thread, use
`ctx.blocking`, which has the same verbs without `await`.

Finished steps are stored and returned by later runs of the handler: after a crash,
a retry, a long sleep, an operator's replay. An exception is not stored: a step
that failed runs again. Arguments are not compared; a step is known by its name.
"""

import asyncio
import logging
import random as randomness
import uuid as uuids
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from functools import cached_property
from typing import Final, Generic, ParamSpec, TypeVar, TypeVarTuple, Unpack, overload

import msgspec

from flowfabric.core.checks import check_text
from flowfabric.core.durations import Duration, duration_ms
from flowfabric.core.ids import ExecutionId
from flowfabric.core.retry import decide_retry
from flowfabric.core.states import FailureClass
from flowfabric.core.step_model import StepKind
from flowfabric.errors import DoNotRetry, InvalidInput
from flowfabric.json_values import encode_value
from flowfabric.run import result_of
from flowfabric.task import Call, Retry, SubmitOptions, Task, result_codec
from flowfabric.worker.services import Fence, Services
from flowfabric.worker.signalling import BlockingSignalVerbs, SignalVerbs
from flowfabric.worker.steps import Place

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

IN_PROCESS_SLEEP_MS: Final = 5_000
"""Shorter sleeps keep the worker; unwinding and claiming again would cost more than it frees."""


class Context(SignalVerbs):
    """The execution a handler works on, and the verbs it has."""

    def __init__(self, services: Services) -> None:
        self._services = services
        claimed = services.lease.claimed
        self.execution_id: ExecutionId = claimed.execution_id
        self.attempt_index: int = claimed.attempt_index
        self.retry_count: int = claimed.retry_count
        self.task_name: str = claimed.execution_kind
        self.lane: str = claimed.lane_id
        self.priority: int = claimed.priority
        self.worker_instance_id: str = claimed.handle.worker_instance_id

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
        return BlockingContext(self)

    def get(self, kind: type[T]) -> T:
        """The application's resource of a type; see `App.provide`."""
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
    def step(
        self,
        name: str,
        function: Callable[..., object],
        /,
        *args: object,
        **given: object,
    ) -> Coroutine[object, object, object]:
        """Run a function once, whatever crashes; return what it returned.

        The result is stored as JSON and what you get is what was stored, decoded by
        the function's return annotation. Plain functions run in a thread. `retry`
        tries again within this run of the handler; after the last try the exception
        reaches the handler.
        """
        check_text("name", name, empty=False)
        # Taken here and not in the coroutine: steps are numbered in the order of the code.
        place = self._services.steps.take(name, StepKind.CALL)
        return self._step(place, function, args, given)

    async def _step(
        self,
        place: Place,
        function: Callable[..., object],
        args: tuple[object, ...],
        given: dict[str, object],
    ) -> object:
        kwargs = dict(given)
        retry = kwargs.pop("retry", None)
        if not isinstance(retry, Retry | None):
            raise InvalidInput("retry", "must be a Retry", retry)
        services = self._services
        decoder = result_codec(function).decoder
        stored = await services.steps.find(place)
        if stored is not None:
            return decode_step(place.key, decoder.decode, stored.result or b"null")
        services.check()
        with services.parking.working():
            value = await self._tried(place, function, args, kwargs, retry)
            data = encode_step(place.key, value)
            await services.steps.store(place, result=data)
        return decode_step(place.key, decoder.decode, data)

    async def _tried(
        self,
        place: Place,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        retry: Retry | None,
    ) -> object:
        retry_count = 0
        while True:
            self._services.check()
            try:
                return await self._services.functions.call(function, *args, **kwargs)
            except Exception as error:
                if retry is None or isinstance(error, (DoNotRetry, *retry.never_on)):
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
                self.log.warning("step %s failed, trying again: %r", place.key, error)
            retry_count += 1
            await asyncio.sleep(delay_ms / 1_000)

    async def sleep(self, duration: Duration) -> None:
        """Wait durably. A long sleep releases the worker; the handler runs again after it."""
        sleep_ms = duration_ms("duration", duration)
        services = self._services
        place = services.steps.take("sleep", StepKind.SLEEP)
        stored = await services.steps.find(place)
        if stored is None:
            services.check()
            with services.parking.working():
                stored_at_ms = (await services.steps.store(place, sleep_ms=sleep_ms)).at_ms
            wake_at_ms = stored_at_ms + sleep_ms
        else:
            wake_at_ms = stored.wake_at_ms or 0
        left_ms = wake_at_ms - services.lease.store_now_ms()
        if left_ms > services.in_process_sleep_ms:
            await services.parking.until(wake_at_ms)
        elif left_ms > 0:
            await asyncio.sleep(left_ms / 1_000)

    async def now(self) -> datetime:
        """The time by the store's clock; later runs of the handler get the same."""
        services = self._services
        place = services.steps.take("now", StepKind.NOW)
        stored = await services.steps.find(place)
        at_ms = (
            (await services.steps.store(place)).at_ms if stored is None else stored.recorded_at_ms
        )
        return datetime.fromtimestamp(at_ms / 1_000, UTC)

    async def random(self) -> float:
        """A number from 0 to 1; later runs of the handler get the same."""
        return await self._recorded("random", StepKind.RANDOM, randomness.random, float)

    async def uuid(self) -> uuids.UUID:
        """A random uuid; later runs of the handler get the same."""
        return await self._recorded("uuid", StepKind.UUID, uuids.uuid4, uuids.UUID)

    async def _recorded(self, name: str, kind: StepKind, make: Callable[[], T], as_: type[T]) -> T:
        services = self._services
        place = services.steps.take(name, kind)
        stored = await services.steps.find(place)
        if stored is not None:
            return msgspec.json.decode(stored.result or b"null", type=as_)
        value = make()
        await services.steps.store(place, result=msgspec.json.encode(value))
        return value

    def fence(self, connection: object) -> Fence:
        """Commit business rows only while this worker owns the execution.

        Use it inside an open transaction: `with` it, or `async with` it for an async
        connection. A worker that has lost its lease is stopped here, and while the
        transaction lasts, ten minutes at most, nobody else can take the lease. No verb of
        the context works in there.
        """
        return self._services.fence(connection)

    # Other executions

    @overload
    async def submit(
        self, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> "Child[R]": ...
    @overload
    async def submit(
        self,
        task: Callable[[Unpack[Ts]], Call[R]],
        /,
        *args: *Ts,
        **options: Unpack[SubmitOptions],
    ) -> "Child[R]": ...
    @overload
    async def submit(self, call: Call[R], /, **options: Unpack[SubmitOptions]) -> "Child[R]": ...
    async def submit(self, what: object, /, *args: object, **given: object) -> "Child[object]":
        """Submit another execution. A later run of the handler finds the same one."""
        place = self._services.steps.take("submit", StepKind.CHILD)
        self._services.check()
        task, execution_id = await self._services.submit_child(place.key, what, args, given)
        return Child(self, task, execution_id)

    async def progress(self, percent: int | None = None, message: str | None = None) -> None:
        """Say how far the work is. What is not given stays as it was."""
        self._services.check()
        await self._services.progress(percent, message)


class Child(Generic[R_co]):
    """An execution submitted by a handler."""

    def __init__(self, context: Context, task: Task[..., R_co], execution_id: ExecutionId) -> None:
        self._context = context
        self.task = task
        self.execution_id = execution_id

    def result(self) -> Coroutine[object, object, R_co]:
        """Wait for its end without holding a worker, and return what it returned.

        While it runs, the handler is parked; when it has ended, the handler runs again
        and comes by here with the result. Raises as `Run.result` does.
        """
        place = self._context._services.steps.take(f"result of {self.execution_id}", StepKind.CHILD)
        return self._result(place)

    async def _result(self, place: Place) -> R_co:
        services = self._context._services
        stored = await services.steps.find(place)
        if stored is not None:
            return self.task.decode_result(stored.result)
        services.check()
        with services.parking.working():
            outcome = await services.outcome_of(self.execution_id)
            if outcome is not None:
                value = result_of(self.task, outcome)
                await services.steps.store(place, result=outcome.result)
                return value
        await services.parking.until_ended(self.execution_id)
        raise AssertionError("a parked handler is unwound")


def encode_step(key: str, value: object) -> bytes:
    return encode_value(f"the result of step {key}", value)


def decode_step(key: str, decode: Callable[[bytes], object], data: bytes) -> object:
    try:
        return decode(data)
    except msgspec.DecodeError as error:
        raise InvalidInput(
            f"the result of step {key}", f"does not fit its return annotation: {error}"
        ) from error


class BlockingContext(BlockingSignalVerbs):
    """A context's verbs for plain functions. Call it from the handler's own thread."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._context = context

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
        **given: object,
    ) -> object:
        """Run a function once, whatever crashes; see `Context.step`."""
        check_text("name", name, empty=False)
        services = self._context._services
        place = services.steps.take(name, StepKind.CALL)
        return services.wait(self._context._step(place, function, args, given))

    def sleep(self, duration: Duration) -> None:
        """Wait durably; see `Context.sleep`."""
        self._context._services.wait(self._context.sleep(duration))

    def now(self) -> datetime:
        return self._context._services.wait(self._context.now())

    def random(self) -> float:
        return self._context._services.wait(self._context.random())

    def uuid(self) -> uuids.UUID:
        return self._context._services.wait(self._context.uuid())

    def progress(self, percent: int | None = None, message: str | None = None) -> None:
        self._context._services.wait(self._context.progress(percent, message))

    @overload
    def submit(
        self, task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> "BlockingChild[R]": ...
    @overload
    def submit(
        self,
        task: Callable[[Unpack[Ts]], Call[R]],
        /,
        *args: *Ts,
        **options: Unpack[SubmitOptions],
    ) -> "BlockingChild[R]": ...
    def submit(self, task: object, /, *args: object, **given: object) -> "BlockingChild[object]":
        """Submit another execution; see `Context.submit`."""
        services = self._context._services
        place = services.steps.take("submit", StepKind.CHILD)
        found, execution_id = services.wait(services.submit_child(place.key, task, args, given))
        return BlockingChild(Child(self._context, found, execution_id))


class BlockingChild(Generic[R_co]):
    """An execution submitted by a plain handler."""

    def __init__(self, child: Child[R_co]) -> None:
        self._child = child
        self.execution_id = child.execution_id

    def result(self) -> R_co:
        return self._child._context._services.wait(self._child.result())
