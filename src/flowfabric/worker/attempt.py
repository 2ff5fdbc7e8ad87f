"""One attempt: run the handler, then report its outcome.

Every attempt ends in one of these ways: its result completes the execution, its
exception fails it, its wait parks it, the worker stops and hands it back, or its lease
is gone and there is nothing to report. No handler ends the worker.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from enum import StrEnum
from functools import partial
from operator import itemgetter
from types import CoroutineType
from typing import Final, Protocol

import msgspec
from msgspec import structs

from flowfabric import errors
from flowfabric.core.bounds import TEXT_BYTES_MAX
from flowfabric.core.changed_code import DEPLOY
from flowfabric.core.checks import ENCODED, JSON, shorten
from flowfabric.core.ids import uuid_of
from flowfabric.core.policies import ATTEMPT_TIMEOUT, span
from flowfabric.core.records import FailedStep, TimeoutBehavior
from flowfabric.core.results import AlreadySatisfied, Completed
from flowfabric.core.states import FailureClass
from flowfabric.engine.engine import Engine
from flowfabric.engine.executions import Completion, FailureReport
from flowfabric.engine.suspensions import SuspendSatisfied
from flowfabric.engine.waitpoints import PastRuns, claimed_progress
from flowfabric.inputs import JSON_WITH_INPUTS, fill_in
from flowfabric.logs import open_log
from flowfabric.outages import OUTAGES, level_of, outage_behind, statements_within
from flowfabric.task import Arguments, Bound, Task
from flowfabric.worker import failures
from flowfabric.worker.asyncio_tasks import keep_from_ending
from flowfabric.worker.blame import blamed
from flowfabric.worker.context import Context
from flowfabric.worker.leases import ENDED, HeldLease, fenced
from flowfabric.worker.parking import Parking, Pause, unfitting
from flowfabric.worker.services import Services, Shared

# How an execution leaves its worker before it has ended: parked, blocked, expired, or to rest
#
# Each of these is safe to repeat.

log = open_log(__name__)

TIMEOUT_GRACE_S: Final = 0.05
"""Waited after the deadline: the store, whose clock decides, should agree that it has passed."""
TIMEOUT_TRIES: Final = 20
OUTAGE_PAUSE_MS: Final = 1_000
"""How long a handler rests after an outage that no verb of its context waited out."""


async def park(engine: Engine, lease: HeldLease, parking: Parking) -> None:
    """Release the worker until what the branches of the handler wait for has happened."""
    handle, waits = lease.handle, parking.waits
    until_ms, why = min(waits.until_ms, key=itemgetter(0), default=(None, None))
    if parking.mismatch is not None:
        await block(engine, lease, parking.mismatch)
    elif waits.pause is not None:
        await _suspend(engine, lease, waits.pause)
    elif waits.executions:
        try:
            awaited = sorted(set(waits.executions))
            await engine.await_executions(handle, awaited, until_ms=until_ms)
        except errors.NotFound as error:
            if error.id == handle.execution_id:
                raise
            # The handler runs again at once, and gets the error where it asks for the result.
            await engine.delay(handle, lease.store_now_ms())
    else:
        assert until_ms is not None
        await engine.delay(handle, until_ms, why=why)


async def _suspend(engine: Engine, lease: HeldLease, pause: Pause) -> None:
    outcome = await engine.suspend(
        lease.handle,
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
        await engine.delay(lease.handle, 0)


async def block(engine: Engine, lease: HeldLease, mismatch: errors.CodeMismatch) -> None:
    """Wait for other code: a deploy brings it, or a person accepts this one."""
    detail = shorten(str(mismatch), TEXT_BYTES_MAX)
    by = " by changed code" if mismatch.advice is None else ""
    log.warning("blocked%s: %s", by, detail, extra=lease.log_fields)
    advice = mismatch.advice or DEPLOY
    await engine.block_on_code(lease.handle, mismatch.step_key, detail, advice=advice)


def called(lease: HeldLease) -> str:
    """Which task and run this is, for logs that show messages only."""
    return f"{lease.claimed.execution_kind} {uuid_of(lease.claimed.execution_id)}"


async def expire(engine: Engine, lease: HeldLease, ran_ms: int) -> None:
    """Let the store decide about the timeout, by its clock. If a reconciler was first, it has
    logged it."""
    for _ in range(TIMEOUT_TRIES):
        answer = await engine.expire_execution(lease.handle.execution_id, ATTEMPT_TIMEOUT)
        if not isinstance(answer, AlreadySatisfied):
            log.warning(
                "%s failed: it ran for %s, longer than its timeout",
                called(lease),
                span(ran_ms),
                extra=lease.log_fields,
            )
            return
        if answer.reason != "not_yet_due":
            return
        await asyncio.sleep(TIMEOUT_GRACE_S)


async def retry_after_outage(engine: Engine, lease: HeldLease, met: str) -> None:
    """Run again in a moment: database trouble never counts against a run."""
    why = f"it met an outage, which is no failure, and runs again: {met}"
    until_ms = lease.store_now_ms() + OUTAGE_PAUSE_MS
    await engine.delay(lease.handle, until_ms, why=shorten(why, TEXT_BYTES_MAX))


Middleware = Callable[[Context, Callable[[], Awaitable[object]]], Awaitable[object]]
"""Runs around a handler: gets its context and the call to make, returns what that returned."""

ReportCall = Callable[[], Awaitable[object]]
"""Reports the outcome of an attempt to the engine. Safe to repeat."""


class Stop(StrEnum):
    """Why a handler has to stop."""

    LOST = "lost"
    TIMEOUT = "timeout"
    DRAIN = "drain"
    PARK = "park"


class AttemptOwner(Protocol):
    """The worker that attempts belong to."""

    @property
    def middleware(self) -> Sequence[Middleware]: ...

    def stop_asked(self, attempt: "RunningAttempt") -> None:
        """The handler was told to stop."""

    def handler_ended(self, attempt: "RunningAttempt") -> None:
        """The attempt no longer holds a slot, whether or not its end was reported."""

    def attempt_ended(self, attempt: "RunningAttempt") -> None:
        """The end has been reported, or nothing more can be done about it."""


class RunningAttempt:
    """One claimed execution in the hands of this worker."""

    def __init__(
        self, shared: Shared, lease: HeldLease, task: Task[..., object], owner: AttemptOwner
    ) -> None:
        """Makes only what the handler uses: without a context, it has no journal."""
        self.lease = lease
        self.task = task
        self.stopping: Stop | None = None
        self.started_s = 0.0
        """By the monotonic clock."""
        self._shared = shared
        self._owner = owner
        self._running: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._services: Services | None = None
        """What the context uses, if there is one."""
        self._begun = False
        self._handler_ended = False
        self._abandoned = False
        self._is_ignored = False
        """Whether what became of it is reported although its handler is still running."""
        self._went_on = False
        """Whether the handler completed, or will continue later, whatever failed in it."""

    def start(self) -> None:
        self.started_s = time.monotonic()
        self.lease.on_lost = self._lost
        self._running = self._task_of(self._run())

    def _task_of(self, work: Coroutine[object, object, None]) -> "asyncio.Task[None]":
        """Make a task that runs in the worker's context, not in the caller's."""
        shared = self._shared
        return asyncio.Task(
            work,
            loop=shared.loop,
            name=self.lease.handle.execution_id,
            context=shared.context.copy(),
        )

    def stop(self, why: Stop, reason: str) -> None:
        """Deliver a cancellation into the handler, once."""
        if self.stopping is not None or self._handler_ended:
            return
        self.stopping = why
        if self._services is not None:
            self._services.stop(reason)
        # A task that has not begun would end without reporting anything.
        if self._begun and self._running is not None:
            self._running.cancel(reason)
        self._owner.stop_asked(self)

    def _park(self) -> None:
        self.stop(Stop.PARK, "waiting")

    def _lost(self, reason: str) -> None:
        self.stop(Stop.LOST, reason)

    def abandon(self, reason: str) -> None:
        """Stop waiting, even for a thread; nothing is reported from now on."""
        self._abandoned = True
        self.lease.lose(reason)
        assert self._running is not None
        self._running.cancel(reason)

    def continue_without_handler(self) -> None:
        """Report what becomes of the execution although the handler ignores that it was stopped.

        Whatever it does from now on, none of its verbs returns.
        """
        assert self._running is not None, "it was started"
        keep_from_ending(self._running)
        if self._services is not None:
            self._services.is_ignored = True
        if self.stopping is not Stop.LOST:
            self._is_ignored = True
            self._running = self._task_of(self._run_without_handler())

    async def _run_without_handler(self) -> None:
        try:
            report: Completion | ReportCall | None = self._report_of_stop()
            if self._services is not None:
                report = await self._settle(self._services, report)
            if report is not None:
                assert not isinstance(report, Completion), "it did not return"
                await self._report_or_log(report)
        finally:
            self.lease.lose("its handler ignores that it was stopped")
            self._end()

    # Running

    async def _run(self) -> None:
        self._begun = True
        result: Completion | None = None
        try:
            report = await self._run_handler()
            if self._is_ignored:
                return
            if self._services is not None:
                report = await self._settle(self._services, report)
            if isinstance(report, Completion):
                result = report
            elif report is not None:
                await self._report_or_log(report)
            elif self.lease.lost == ENDED and not self._abandoned:
                await self._hand_back_late()
        finally:
            if self._is_ignored:
                self._let_go()
            elif result is None:
                self._end()
            else:
                # The answer comes with those of other attempts, after this task has ended.
                self._let_go()
                self._shared.reports.completions.hand_in(
                    result, partial(self._completion_answered, result)
                )

    async def _hand_back_late(self) -> None:
        """Hand back a lease that was not renewed in time, so that the store counts no death."""
        with suppress(errors.FlowFabricError), statements_within(self.lease.ttl_s):
            engine = self._shared.engine
            await engine.hand_back_many([self.lease.handle], reason="it was not renewed in time")

    async def _run_handler(self) -> Completion | ReportCall | None:
        """What to report, if anything."""
        self._start_timer()
        try:
            return await self._outcome()
        except Exception as error:
            return None if self._is_ignored else self._own_failure(error)
        finally:
            self._handler_ended = True
            if self._timer is not None:
                self._timer.cancel()
            self._owner.handler_ended(self)

    async def _settle(
        self, services: Services, report: Completion | ReportCall | None
    ) -> Completion | ReportCall | None:
        """Store what the handler did not wait for, and the failures it continued past.

        If something it emitted is refused, that is a failure, unless there is another. If it was
        not stored in the time of the lease, nothing is reported: the database may still take the
        lease for live and accept an end, and what was emitted before it would be missing.
        """
        try:
            try:
                await services.settle()
            except errors.FlowFabricError as error:
                if isinstance(report, Completion) or self.stopping is Stop.PARK:
                    return self._failed(error)
            if self._went_on:
                await services.journal.store_failures()
        except errors.FlowFabricError as error:
            log.warning("a failure was not stored: %s", error, extra=self.lease.log_fields)
        except asyncio.CancelledError:
            if self.lease.lost is None:
                raise
        except Exception as error:
            return self._own_failure(error)
        if services.is_missing_frames:
            log.warning(
                "not reported: what it emitted last was not stored, its lease is gone: %s",
                self.lease.lost,
                extra=self.lease.log_fields,
            )
            return None
        return report

    def _completion_answered(self, result: Completion, answer: Completed | Exception) -> None:
        if isinstance(answer, Exception):
            self._running = self._task_of(self._complete_again(result))
        else:
            self._end()

    async def _complete_again(self, result: Completion) -> None:
        """Until the database is back, or to hear why it is refused."""
        completions = self._shared.reports.completions
        try:
            await self._report_or_log(lambda: completions.add(result))
        finally:
            self._end()

    def _end(self) -> None:
        self.lease.reported = True
        self._let_go()
        self._owner.attempt_ended(self)

    def _let_go(self) -> None:
        """Drop references back to the attempt: it is then freed without the garbage collector."""
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

    async def _outcome(self) -> Completion | ReportCall | None:
        """Run the handler; return what to report, if anything."""
        assert self._running is not None
        try:
            result = await self._handle()
        except asyncio.CancelledError as error:
            if self.stopping is None:
                # It was not asked to stop: it cancelled itself, which is a failure like any other.
                step = blamed(self.lease, error)
                why = "handler raised CancelledError"
                log.warning(
                    "%s failed: CancelledError: nobody told it to stop",
                    called(self.lease),
                    extra=self.lease.log_fields,
                )
                failure = self._failure(failures.ReportedFailure(reason=why), step)
                return await self._after_steps(failure)
            self._running.uncancel()
            return self._after_stop()
        except BaseException as error:
            try:
                report = self._after_error(error)
            except Exception as trouble:
                report = self._own_failure(trouble, error)
            return await self._after_steps(report)
        if self.stopping is not None:
            self._running.uncancel()
        if self.stopping in (Stop.LOST, Stop.TIMEOUT, Stop.PARK):
            return self._after_stop()
        if self.lease.met_outage is not None:
            return self._after_outage(self.lease.met_outage)
        self._went_on = True
        if self._services is not None:
            self._warn_about_unused_steps(self._services)
        return Completion(handle=self.lease.handle, result=result, result_encoding=JSON)

    async def _after_steps(self, report: ReportCall | None) -> ReportCall | None:
        """What to report of a failure, once the steps that ran beside it have ended."""
        assert self._running is not None
        before = self.stopping
        if self._services is not None and before is None:
            try:
                await self._services.finish_steps()
            except asyncio.CancelledError:
                self._running.uncancel()
        return report if self.stopping is before else self._after_stop()

    async def _handle(self) -> bytes:
        """The handler's encoded result."""
        if self.stopping is not None:
            raise asyncio.CancelledError("it was told to stop before it began")
        task, middleware = self.task, self._owner.middleware
        payload, context = self.lease.claimed.payload, None
        if task.arguments.takes_context or middleware or not self.lease.first_run:
            context = await self._make_context()
        if payload.startswith(ENCODED):
            payload = await self._shared.engine.from_store(payload)
        if self.lease.claimed.payload_encoding == JSON_WITH_INPUTS:
            payload = await self._with_inputs(payload)
        args, kwargs = self._arguments(payload)
        if context is not None and task.arguments.takes_context:
            args = (context, *args)
        for name, kind in task.arguments.resources.items():
            kwargs[name] = self._shared.resources.get(kind)
        if context is not None and middleware:
            call: Callable[[], Awaitable[object]] = partial(self._call, payload, args, kwargs)
            for around in reversed(middleware):
                call = partial(around, context, call)
            value = await call()
        else:
            value = await self._begin(payload, args, kwargs)
        if self._services is not None:
            self._services.promises.check()
        if task.settings.executor != "process":
            value = task.encode_result(value)
        assert isinstance(value, bytes)
        engine = self._shared.engine
        self._check_size("", value, engine.plain_bytes_max)
        return await self._to_store(value) if engine.codes_values else value

    async def _call(
        self, payload: bytes, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        return await self._begin(payload, args, kwargs)

    def _begin(
        self, payload: bytes, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Awaitable[object]:
        """Begin the function of the task, on the loop, in a thread, or in another process."""
        task, functions = self.task, self._shared.functions
        if task.is_async:
            made = task.function(*args, **kwargs)
            # Nearly always a coroutine, and checking for that costs a tenth of the other check.
            assert isinstance(made, CoroutineType) or inspect.isawaitable(made), "as registered"
            return made
        if task.settings.executor == "process":
            return functions.in_process(task, payload)
        call = partial(task.function, *args, **kwargs)
        return self._until_thread_ends(functions.in_thread(call))

    async def _make_context(self) -> Context:
        """A context, which knows what earlier runs have stored."""
        progress, told = PastRuns(), self.lease.claimed.progress
        if told is not None:
            progress = claimed_progress(told)
        elif not self.lease.first_run:
            engine, execution_id = self._shared.engine, self.lease.handle.execution_id
            loading = self._shared.reports.call_engine(
                self.lease, lambda: engine.read_progress(execution_id)
            )
            progress = await fenced(self.lease, loading)
        parking = Parking(self._park)
        self._services = Services(self._shared, self.lease, parking, progress)
        return Context(self._services)

    def _arguments(self, payload: bytes) -> Bound:
        """Arguments that fitted when they were submitted may not fit the code of today."""
        arguments = self.task.arguments
        try:
            return arguments.decode(payload)
        except errors.InvalidInput as error:
            if self.lease.first_run and names_fit(arguments, payload):
                raise
            raise unfitting(error) from None

    async def _with_inputs(self, payload: bytes) -> bytes:
        """The arguments, filled in with the results of the nodes it waited for."""
        engine, execution_id = self._shared.engine, self.lease.handle.execution_id
        results = await self._shared.reports.call_engine(
            self.lease, lambda: engine.read_execution_inputs(execution_id)
        )
        return fill_in(self.task, payload, results)

    async def _to_store(self, result: bytes) -> bytes:
        """The result as it is stored."""
        engine = self._shared.engine
        try:
            # Counts as busy: the handler has returned, whatever a branch it left behind waits for.
            with nullcontext() if self._services is None else self._services.parking.working():
                stored = await engine.to_store(result)
        except errors.CodecFailed as error:
            what = f"the result of {self.task.name}"
            raise errors.CodecFailed(error.told, decoding=False, what=what) from error.__cause__
        self._check_size(", encoded,", stored, engine.config.payload_bytes_max)
        return stored

    def _check_size(self, how: str, data: bytes, bytes_max: int) -> None:
        if len(data) > bytes_max:
            raise errors.DoNotRetry(
                f"the result of {self.task.name}{how} is {len(data)} bytes, at most {bytes_max} are"
                " stored; keep it elsewhere and return where"
            )

    async def _until_thread_ends(self, thread: "asyncio.Future[object]") -> object:
        """A thread cannot be cancelled: ask it to stop, and wait for it."""
        while not thread.done():
            try:
                await asyncio.wait([thread])
            except asyncio.CancelledError:
                if self.stopping is None or self._abandoned:
                    raise
        return thread.result()

    # How it ended

    def _after_stop(self) -> ReportCall | None:
        return None if self._is_ignored else self._report_of_stop()

    def _report_of_stop(self) -> ReportCall | None:
        engine, handle = self._shared.engine, self.lease.handle
        match self.stopping:
            case Stop.TIMEOUT:
                ran_ms = round((time.monotonic() - self.started_s) * 1_000)
                return partial(expire, engine, self.lease, ran_ms)
            case Stop.DRAIN:
                return lambda: self._shared.reports.returns.add(handle)
            case Stop.PARK if self.lease.met_outage is not None:
                return self._after_outage(self.lease.met_outage)
            case Stop.PARK:
                assert self._services is not None, "only a verb of the context can park"
                self._went_on = True
                return partial(park, engine, self.lease, self._services.parking)
            case _:
                log.warning(
                    "stopped: the lease is gone: %s", self.lease.lost, extra=self.lease.log_fields
                )
                return None

    def _after_error(self, error: BaseException) -> ReportCall | None:
        if self.stopping is Stop.PARK:
            # It does not matter what a handler raises while it is unwound: it runs again.
            return self._after_stop()
        if self.stopping in (Stop.LOST, Stop.TIMEOUT):
            log.warning("raised while it was stopped: %r", error, extra=self.lease.log_fields)
            return self._after_stop()
        return self._failed(error)

    def _failed(self, error: BaseException) -> ReportCall:
        if outage_behind(error, self.lease.broken_by):
            return self._after_outage(f"{type(error).__name__}: {failures.text_of(error)}")
        if self.lease.met_outage is not None:
            return self._after_outage(self.lease.met_outage)
        if isinstance(error, errors.CodecFailed) and error.decoding:
            error = unfitting(error)
        if isinstance(error, errors.CodeMismatch):
            return partial(block, self._shared.engine, self.lease, error)
        where = failures.theirs(error)
        failures.forget_ours(error)
        report = failures.report_of(error, self.task)
        if (unkept := self._not_awaited(error)) is not None:
            report = structs.replace(report, reason=f"{report.reason}; {unkept}")
        log.log(
            logging.ERROR if report.failure_class is FailureClass.PERMANENT else logging.WARNING,
            "%s failed: %s: %s",
            called(self.lease),
            type(error).__name__,
            failures.text_of(error),
            exc_info=None
            if where is None and not failures.elsewhere(error)
            else (type(error), error, where),
            extra=self.lease.log_fields,
        )
        return self._failure(report, blamed(self.lease, error))

    def _after_outage(self, met: str) -> ReportCall:
        """Database trouble never counts against a run."""
        # The log has reported an outage of the app's own database, but of no other.
        level = logging.INFO if OUTAGES.told_lately() else logging.WARNING
        log.log(level, "met an outage, and runs again: %s", met, extra=self.lease.log_fields)
        return partial(retry_after_outage, self._shared.engine, self.lease, met)

    def _not_awaited(self, error: BaseException) -> errors.NotAwaited | None:
        """What a handler called without `await` that has failed on what it got instead."""
        if self._services is None or "coroutine" not in failures.text_of(error):
            return None
        unkept = self._services.promises.unkept()
        if unkept is not None:
            error.add_note(str(unkept))
        return unkept

    def _failure(
        self, failure: failures.ReportedFailure, step: FailedStep | None = None
    ) -> ReportCall:
        report = FailureReport(
            handle=self.lease.handle,
            reason=failure.reason,
            failure_class=failure.failure_class,
            category=failure.category,
            traceback=failure.trace or None,
            step=step,
        )
        return lambda: self._shared.reports.failures.add(report)

    def _own_failure(self, error: Exception, raised: BaseException | None = None) -> ReportCall:
        """Fail the run for an error of our own, or it would look as if the worker had died."""
        log.error("could not determine the outcome", exc_info=error, extra=self.lease.log_fields)
        failure = failures.report_of(error)
        reason = f"the worker could not determine the outcome: {failure.reason}"
        if raised is not None:
            reason += f"; the handler raised {type(raised).__name__}: {failures.text_of(raised)}"
        return self._failure(
            structs.replace(failure, reason=reason, failure_class=FailureClass.TRANSIENT)
        )

    async def _report_or_log(self, report: ReportCall) -> None:
        try:
            try:
                await self._report_or_fail(report)
            except Exception as error:
                await self._report_or_fail(self._own_failure(error))
        except Exception:
            log.exception(
                "could not be finished; its lease will expire", extra=self.lease.log_fields
            )

    async def _report_or_fail(self, report: ReportCall) -> None:
        try:
            try:
                await self._shared.reports.call_engine(self.lease, report)
            except errors.Validation as error:
                # Every later attempt would make the same report and get the same refusal.
                refusal = failures.ReportedFailure(
                    None, str(error), FailureClass.PERMANENT, error.code
                )
                await self._shared.reports.call_engine(self.lease, self._failure(refusal))
        except errors.FlowFabricError as error:
            log.log(
                level_of(error), "the report was refused: %s", error, extra=self.lease.log_fields
            )

    def _warn_about_unused_steps(self, services: Services) -> None:
        unused = services.journal.never_asked_for()
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
        # Code with the codec may be able to read what it has written.
        return not payload.startswith(ENCODED)
    return set(arguments.required) <= given.keys() and all(map(arguments.takes, given))
