"""One attempt: run the handler, then say what became of it.

Whatever a handler does has one of these ends: a result that is completed, an
exception that is failed, a wait that is parked, a stop of ours that is handed
back, or a lease that is gone, after which there is nothing to say. No handler
ends the worker.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from enum import StrEnum
from functools import partial
from typing import Final

import msgspec

from flowfabric.core.checks import shorten
from flowfabric.core.expiry import ATTEMPT_TIMEOUT
from flowfabric.core.limits import TEXT_BYTES_MAX
from flowfabric.core.results import AlreadySatisfied
from flowfabric.core.states import FailureClass
from flowfabric.core.step_model import FailedStep
from flowfabric.core.suspension_model import TimeoutBehavior
from flowfabric.engine.suspensions import SuspendSatisfied
from flowfabric.engine.work import Completion, FailureReport
from flowfabric.errors import (
    CodeMismatch,
    DoNotRetry,
    FlowFabricError,
    InvalidInput,
    NotFound,
    Validation,
)
from flowfabric.logs import open_log
from flowfabric.outages import level_of, outage_behind
from flowfabric.passing import JSON_WITH_INPUTS, complete
from flowfabric.task import JSON, Arguments, Bound, Task
from flowfabric.worker.blame import blamed
from flowfabric.worker.context import Context
from flowfabric.worker.describing import category, classify, describe, elsewhere, text_of
from flowfabric.worker.held import HeldLease
from flowfabric.worker.parking import Parking, Pause
from flowfabric.worker.services import Services, Shared
from flowfabric.worker.tracebacks import theirs, traceback_text

log = open_log(__name__)

Middleware = Callable[[Context, Callable[[], Awaitable[object]]], Awaitable[object]]
"""Runs around a handler: gets its context and the call to make, returns what that returned."""

TIMEOUT_GRACE_S: Final = 0.05
"""Waited after the deadline: the store, whose clock decides, should agree that it has passed."""
TIMEOUT_TRIES: Final = 20
OUTAGE_PAUSE_MS: Final = 1_000
"""How long a handler rests that met an outage where no verb of its context waits it out."""


class Stop(StrEnum):
    """Why a handler is told to stop."""

    LOST = "lost"
    TIMEOUT = "timeout"
    DRAIN = "drain"
    PARK = "park"


class Attempt:
    """One claimed execution in the hands of this worker."""

    def __init__(
        self,
        shared: Shared,
        lease: HeldLease,
        task: Task[..., object],
        middleware: Sequence[Middleware],
        on_handler_ended: Callable[["Attempt"], None],
        on_stop: Callable[["Attempt"], None],
    ) -> None:
        """What the handler does not use is not made: without a context it has no journal."""
        self.lease = lease
        self.task = task
        self.stopping: Stop | None = None
        self._shared = shared
        self._middleware = middleware
        self._on_handler_ended = on_handler_ended
        self._on_stop = on_stop
        self._running: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._services: Services | None = None
        """What stands behind the context, if there is one."""
        self._handler_ended = False
        self._abandoned = False
        self._went_on = False
        """Whether the handler completed, or is to run on later, whatever failed in it."""

    def start(self) -> "asyncio.Task[None]":
        # In the worker's context: who frees a slot starts the next, and has one of his own.
        self._running = asyncio.get_running_loop().create_task(
            self._run(),
            name=self.lease.claimed.execution_id,
            context=self._shared.context.copy(),
        )
        return self._running

    def stop(self, why: Stop, reason: str) -> None:
        """Deliver a cancellation into the handler, once."""
        if self.stopping is not None or self._handler_ended:
            return
        self.stopping = why
        if self._services is not None:
            self._services.stop(reason)
        assert self._running is not None
        self._running.cancel(reason)
        self._on_stop(self)

    def _lost(self, reason: str) -> None:
        self.stop(Stop.LOST, reason)

    def abandon(self, reason: str) -> None:
        """Wait no longer, not for a thread either; nothing is reported any more."""
        self._abandoned = True
        self.lease.lose(reason)
        assert self._running is not None
        self._running.cancel(reason)

    # Running

    async def _run(self) -> None:
        lease = self.lease
        lease.on_lost = self._lost
        if lease.lost is not None:
            self.stop(Stop.LOST, lease.lost)
        self._start_timer()
        try:
            report = await self._outcome()
        except Exception as error:
            report = self._own_failure(error)
        finally:
            self._handler_ended = True
            if self._timer is not None:
                self._timer.cancel()
            self._on_handler_ended(self)
        try:
            if self._services is not None:
                await self._settle(self._services)
            await self._send(report)
        except Exception as error:
            await self._send(self._own_failure(error))
        finally:
            self._let_go()

    async def _settle(self, services: Services) -> None:
        """Store what the handler has not waited for, and the failures it has gone on past."""
        await services.settle()
        if not self._went_on:
            return
        try:
            await services.steps.settle()
        except FlowFabricError as error:
            log.warning("a failure was not stored: %s", error, extra=self.lease.log_fields)
        except asyncio.CancelledError:
            if self.lease.lost is None:
                raise

    def _let_go(self) -> None:
        """Of all that points back here: it would wait for the garbage collector."""
        self.lease.on_lost = None
        if self._services is not None:
            self._services.let_go()
        self._services = None

    def _start_timer(self) -> None:
        deadline_ms = self.lease.claimed.attempt_deadline_ms
        if deadline_ms is not None:
            left_s = (deadline_ms - self.lease.store_now_ms()) / 1_000
            self._timer = asyncio.get_running_loop().call_later(
                max(0.0, left_s) + TIMEOUT_GRACE_S, self.stop, Stop.TIMEOUT, "the timeout is over"
            )

    async def _outcome(self) -> Callable[[], Awaitable[object]] | None:
        """Run the handler; what is to be reported, if anything."""
        assert self._running is not None
        try:
            result = await self._handle()
        except asyncio.CancelledError as error:
            if self.stopping is None:
                # Nobody told it to stop: it cancelled itself, which is a failure like another.
                return self._failure(
                    "handler raised CancelledError",
                    FailureClass.TRANSIENT,
                    step=blamed(self.lease, error),
                )
            self._running.uncancel()
            return self._after_stop()
        except BaseException as error:
            try:
                return self._after_error(error)
            except Exception as trouble:
                return self._own_failure(trouble, error)
        if self.stopping is not None:
            self._running.uncancel()
        if self.stopping in (Stop.LOST, Stop.TIMEOUT, Stop.PARK):
            return self._after_stop()
        self._went_on = True
        if self._services is not None:
            self._warn_about_unused_steps(self._services)
        completion = Completion(handle=self.lease.handle, result=result, result_encoding=JSON)
        return lambda: self._shared.reports.completions.add(completion)

    async def _handle(self) -> bytes:
        """The handler's encoded result."""
        if self.stopping is not None:
            raise asyncio.CancelledError("it was told to stop before it began")
        context = None
        if self.task.takes_context or self._middleware or not self.lease.first_run:
            context = await self._make_context()
        payload = await self._payload()
        bound = self._arguments(payload)
        if context is None or not self._middleware:
            value = await self._call(context, bound, payload)
        else:
            call: Callable[[], Awaitable[object]] = partial(self._call, context, bound, payload)
            for around in reversed(self._middleware):
                call = partial(around, context, call)
            value = await call()
        if self._services is not None:
            self._services.promises.check()
        if self.task.settings.executor == "process":
            assert isinstance(value, bytes)
            return await self._to_store(value)
        return await self._to_store(self.task.encode_result(value))

    async def _make_context(self) -> Context:
        """A context, and what earlier runs have stored."""
        parking = Parking(partial(self.stop, Stop.PARK, "waiting"))
        self._services = Services(self._shared, self.lease, parking)
        await self._services.steps.load()
        return Context(self._services)

    def _arguments(self, payload: bytes) -> Bound:
        """Arguments that fitted when they were submitted may not fit the code of today."""
        arguments = self.task.arguments
        try:
            return arguments.decode(payload)
        except InvalidInput as error:
            if self.lease.first_run and names_fit(arguments, payload):
                raise
            raise CodeMismatch(None, str(error)) from None

    async def _payload(self) -> bytes:
        """The arguments, with results of the nodes it waited for put in."""
        claimed = self.lease.claimed
        if claimed.payload_encoding != JSON_WITH_INPUTS:
            return claimed.payload
        engine = self._shared.engine
        results = await self._shared.reports.send(
            self.lease, lambda: engine.read_execution_inputs(claimed.execution_id)
        )
        return complete(self.task, claimed.payload, results)

    async def _to_store(self, result: bytes) -> bytes:
        """The result as it is stored. What is refused here would be refused each time."""
        engine = self._shared.engine
        self._check_size("", result, engine.plain_bytes_max)
        try:
            # Busy: the handler has returned, whatever a branch it left behind waits for.
            with nullcontext() if self._services is None else self._services.parking.working():
                stored = await engine.to_store(result)
        except Exception as error:
            told = f"{type(error).__name__}: {text_of(error)}"
            raise DoNotRetry(
                f"the result of {self.task.name} cannot be encoded by the app's codec: {told}"
            ) from error
        self._check_size(", encoded,", stored, engine.config.payload_bytes_max)
        return stored

    def _check_size(self, how: str, data: bytes, bytes_max: int) -> None:
        if len(data) > bytes_max:
            raise DoNotRetry(
                f"the result of {self.task.name}{how} is {len(data)} bytes, at most {bytes_max} are"
                " stored; keep it elsewhere and return where"
            )

    async def _call(self, context: Context | None, bound: Bound, payload: bytes) -> object:
        task, (args, kwargs) = self.task, bound
        if context is not None and task.takes_context:
            args = (context, *args)
        for name, kind in task.arguments.resources.items():
            kwargs[name] = self._shared.resources.get(kind)
        if task.is_async:
            made = task.function(*args, **kwargs)
            assert inspect.isawaitable(made), "what it was registered as"
            result: object = await made
            return result
        if task.settings.executor == "process":
            return await self._shared.functions.in_process(task, payload)
        call = partial(task.function, *args, **kwargs)
        return await self._until_thread_ends(self._shared.functions.in_thread(call))

    async def _until_thread_ends(self, thread: "asyncio.Future[object]") -> object:
        """A thread cannot be cancelled: it is told, and waited for."""
        while not thread.done():
            try:
                await asyncio.wait([thread])
            except asyncio.CancelledError:
                if self.stopping is None or self._abandoned:
                    raise
        return thread.result()

    # What became of it

    def _after_stop(self) -> Callable[[], Awaitable[object]] | None:
        handle = self.lease.handle
        match self.stopping:
            case Stop.TIMEOUT:
                return self._expire
            case Stop.DRAIN:
                return lambda: self._shared.reports.returns.add(handle)
            case Stop.PARK:
                self._went_on = True
                return self._park
            case _:
                log.warning(
                    "stopped: the lease is gone: %s", self.lease.lost, extra=self.lease.log_fields
                )
                return None

    def _after_error(self, error: BaseException) -> Callable[[], Awaitable[object]] | None:
        if self.stopping is Stop.PARK:
            # What a handler raises while it is unwound is of no interest: it runs again.
            return self._after_stop()
        if self.stopping in (Stop.LOST, Stop.TIMEOUT):
            log.warning("raised while it was stopped: %r", error, extra=self.lease.log_fields)
            return self._after_stop()
        if outage_behind(error, self.lease.broken_by):
            # No trouble of the database counts against a run.
            log.info("met an outage, and runs again: %s", error, extra=self.lease.log_fields)
            return self._rest
        if isinstance(error, CodeMismatch):
            return partial(self._block, error)
        failure_class = classify(error, self.task)
        where = theirs(error)
        log.log(
            logging.ERROR if failure_class is FailureClass.PERMANENT else logging.WARNING,
            "handler failed: %s: %s",
            type(error).__name__,
            text_of(error),
            exc_info=None
            if where is None and not elsewhere(error)
            else (type(error), error, where),
            extra=self.lease.log_fields,
        )
        return self._failure(
            describe(error),
            failure_class,
            category(error),
            traceback_text(error),
            blamed(self.lease, error),
        )

    def _failure(
        self,
        reason: str,
        failure_class: FailureClass,
        named: str = "",
        where: str | None = None,
        step: FailedStep | None = None,
    ) -> Callable[[], Awaitable[object]]:
        report = FailureReport(
            handle=self.lease.handle,
            reason=reason,
            failure_class=failure_class,
            category=named,
            traceback=where,
            step=step,
        )
        return lambda: self._shared.reports.failures.add(report)

    def _own_failure(
        self, error: Exception, raised: BaseException | None = None
    ) -> Callable[[], Awaitable[object]]:
        """What goes wrong here fails the run, or it would look as if the worker had died."""
        log.error("could not tell what became of it", exc_info=error, extra=self.lease.log_fields)
        reason = f"the worker could not tell what became of it: {describe(error)}"
        if raised is not None:
            reason += f"; the handler raised {type(raised).__name__}: {text_of(raised)}"
        return self._failure(reason, FailureClass.TRANSIENT, category(error), traceback_text(error))

    async def _rest(self) -> None:
        until_ms = self.lease.store_now_ms() + OUTAGE_PAUSE_MS
        await self._shared.engine.delay(self.lease.handle, until_ms)

    async def _expire(self) -> None:
        """Let the store decide about the timeout, by its clock."""
        for _ in range(TIMEOUT_TRIES):
            answer = await self._shared.engine.expire_execution(
                self.lease.handle.execution_id, ATTEMPT_TIMEOUT
            )
            if not (isinstance(answer, AlreadySatisfied) and answer.reason == "not_yet_due"):
                return
            await asyncio.sleep(TIMEOUT_GRACE_S)

    async def _park(self) -> None:
        assert self._services is not None
        parking = self._services.parking
        if parking.mismatch is not None:
            await self._block(parking.mismatch)
            return
        handle, engine = self.lease.handle, self._shared.engine
        until_ms = min(parking.until_ms, default=None)
        if parking.conflict is not None:
            raise parking.conflict
        if parking.pause is not None:
            await self._suspend(parking.pause)
        elif parking.executions:
            try:
                await engine.await_executions(
                    handle, sorted(set(parking.executions)), until_ms=until_ms
                )
            except NotFound as error:
                if error.id == handle.execution_id:
                    raise
                # The handler runs again at once, and is told where it asks for the result.
                await engine.delay(handle, self.lease.store_now_ms())
        else:
            assert until_ms is not None
            await engine.delay(handle, until_ms)

    async def _block(self, mismatch: CodeMismatch) -> None:
        """Wait for other code: a deploy brings it, or a person accepts this one."""
        detail = shorten(str(mismatch), TEXT_BYTES_MAX)
        log.warning("blocked by changed code: %s", detail, extra=self.lease.log_fields)
        await self._shared.engine.block_on_code(self.lease.handle, mismatch.step_key, detail)

    async def _suspend(self, pause: Pause) -> None:
        outcome = await self._shared.engine.suspend(
            self.lease.handle,
            resume_condition=pause.condition,
            waitpoints=pause.fresh,
            # An earlier attempt may have made some: their tokens are handed out already.
            take_pending=True,
            suspension_id=pause.suspension_id,
            timeout_in_ms=pause.timeout_in_ms,
            timeout_behavior=None if pause.timeout_in_ms is None else TimeoutBehavior.AUTO_RESUME,
            idempotency_key=pause.suspension_id,
        )
        if isinstance(outcome, SuspendSatisfied):
            # The handler is unwound already: it runs again at once, and finds the signals.
            await self._shared.engine.delay(self.lease.handle, 0)

    async def _send(self, report: Callable[[], Awaitable[object]] | None) -> None:
        if report is None:
            return
        try:
            try:
                await self._shared.reports.send(self.lease, report)
            except Validation as error:
                # Every later attempt would ask for the same, and be refused the same.
                failure = self._failure(str(error), FailureClass.PERMANENT, error.code)
                await self._shared.reports.send(self.lease, failure)
        except FlowFabricError as error:
            log.log(
                level_of(error), "the report was refused: %s", error, extra=self.lease.log_fields
            )
        finally:
            self.lease.settled = True

    def _warn_about_unused_steps(self, services: Services) -> None:
        unused = services.steps.never_asked_for()
        if unused:
            log.warning(
                "stored steps were never asked for, has the code changed? %s",
                ", ".join(unused),
                extra=self.lease.log_fields,
            )


def names_fit(arguments: Arguments, payload: bytes) -> bool:
    """Whether the stored arguments are those of the function, whatever their values.

    If not, the function has other parameters than when the work was submitted.
    """
    try:
        given = msgspec.json.decode(payload or b"{}", type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True
    return set(arguments.required) <= given.keys() and all(map(arguments.takes, given))
