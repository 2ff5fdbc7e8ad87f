"""What a lease holder tells the engine about its work.

The short names (`complete`, `fail`, …) take the handle that `claim` gave out;
the long ones (`complete_execution`, …) name the execution and the fence, or act
for the worker with `source="operator_override"`.
"""

import asyncio
from collections.abc import Iterable, Sequence

from msgspec import Struct, structs

from flowfabric.core import checks, executions, results
from flowfabric.core.bounds import BATCH_MAX, TEXT_BYTES_MAX, TRACEBACK_BYTES_MAX
from flowfabric.core.handles import Handle
from flowfabric.core.journal import LINE_BYTES_MAX, STEP_KEY_BYTES_MAX, STEP_NAME_BYTES_MAX
from flowfabric.core.leases import Fence, require_fence
from flowfabric.core.policies import DURATION_MAX_MS, ExecutionPolicy, RetryPolicy, parse_policy
from flowfabric.core.records import FailedStep
from flowfabric.core.states import FailureClass, PublicState
from flowfabric.engine import shell, topics
from flowfabric.engine.creation import Creation
from flowfabric.engine.leases import Leases
from flowfabric.engine.operators import Operators
from flowfabric.engine.parking import ParkingOperations
from flowfabric.engine.steps import Steps
from flowfabric.engine.sweeps import Sweeps
from flowfabric.errors import FlowFabricError, InvalidInput
from flowfabric.store.mapping import values_of


class Completion(Struct, frozen=True, kw_only=True, gc=False):
    """One finished piece of work, for `complete_many`."""

    handle: Handle | bytes
    result: bytes | None = None
    result_encoding: str | None = None


class CompletedRow(Struct, frozen=True, kw_only=True):
    """The row that `complete_leased` answers with."""

    completed: int
    positions: str | None
    awaited: bool
    in_flow: bool

    def places_among(self, count: int) -> Iterable[int]:
        """Which of so many were completed; nearly always all of them."""
        if self.completed == count:
            return range(count)
        return map(int, self.positions.split(",")) if self.positions else ()


HeldCompletion = tuple[Handle, Completion]
"""A completion whose result is checked, and its handle."""


class FailureReport(Struct, frozen=True, kw_only=True):
    """One failed piece of work, for `fail_many`."""

    handle: Handle | bytes
    reason: str
    failure_class: FailureClass = FailureClass.TRANSIENT
    category: str = ""
    traceback: str | None = None
    """Shortened to its last `TRACEBACK_BYTES_MAX` bytes."""
    step: FailedStep | None = None
    """The step whose failure it is, if it is one."""


def completion_ask(opened: HeldCompletion) -> shell.Ask[results.Completed]:
    handle, completion = opened
    result, encoding = completion.result or None, completion.result_encoding
    return shell.held_ask(
        handle,
        lambda subject, fence, timing: executions.decide_complete(
            subject, fence, result, encoding, timing
        ),
    )


def check_failure(
    reason: object, failure_class: object, category: object, traceback: object = None
) -> executions.Failure:
    """A failure to record. Reason and traceback may have any length and are shortened."""
    if not isinstance(reason, str):
        raise InvalidInput("reason", "must be a string", reason)
    if not isinstance(traceback, str | None):
        raise InvalidInput("traceback", "must be a string", traceback)
    return executions.Failure(
        reason=checks.shorten(reason, TEXT_BYTES_MAX),
        failure_class=checks.check_choice("failure_class", failure_class, FailureClass),
        category=checks.check_text("category", category),
        traceback=None if not traceback else checks.shorten_front(traceback, TRACEBACK_BYTES_MAX),
    )


def check_failed_step(step: object) -> FailedStep | None:
    """The step that failed. Its error may have any length and is shortened."""
    if step is None:
        return None
    if not isinstance(step, FailedStep):
        raise InvalidInput("step", "must be a FailedStep", step)
    checks.check_text("step_key", step.step_key, bytes_max=STEP_KEY_BYTES_MAX, empty=False)
    checks.check_text("name", step.name, bytes_max=STEP_NAME_BYTES_MAX)
    checks.check_text("line", step.line, bytes_max=LINE_BYTES_MAX)
    if not isinstance(step.error, str):
        raise InvalidInput("error", "must be a string", step.error)
    if step.duration_ms is not None:
        checks.check_int("duration_ms", step.duration_ms, 0, DURATION_MAX_MS)
    return structs.replace(step, error=checks.shorten(step.error, TEXT_BYTES_MAX))


def check_retry_policy(retry_policy: object) -> RetryPolicy | None:
    if retry_policy is None:
        return None
    if not isinstance(retry_policy, RetryPolicy):
        raise InvalidInput("retry_policy", "must be a RetryPolicy", retry_policy)
    return parse_policy(ExecutionPolicy(retry_policy=retry_policy)).retry_policy


def _check_progress(percent: object, message: object) -> None:
    if percent is not None:
        checks.check_int("percent", percent, 0, 100)
    checks.check_optional_text("message", message, bytes_max=TEXT_BYTES_MAX)


class Executions(Creation, Leases, Steps, ParkingOperations, Operators, Sweeps):
    """The life of an execution: created, claimed, its steps, its end.

    What people and time do to it is here as well.
    """

    # Completing

    async def open_completions(
        self, completions: Sequence[Completion]
    ) -> list[HeldCompletion | FlowFabricError]:
        """Check completions, and pack their results as they are stored."""
        checks.check_list("completions", completions, 0, BATCH_MAX)
        packed = await self.shell.values.through_all(completions, self._packed)
        return [shell.value_or_error(self._open_completion, completion) for completion in packed]

    async def complete_opened(
        self, opened: Sequence[HeldCompletion | FlowFabricError]
    ) -> list[results.Completed | FlowFabricError]:
        """Finish many at once; each gets its own answer or error."""
        return await self.shell.decide_opened(
            opened, completion_ask, sure=await self._complete_sure(opened)
        )

    def _packed(self, completion: Completion) -> Completion:
        return structs.replace(completion, result=self.shell.values.pack(completion.result))

    def _check_result(self, result: object, encoding: object) -> None:
        if encoding is not None and encoding != checks.JSON:
            checks.check_optional_text("result_encoding", encoding)
        if result is not None:
            checks.check_json(
                "result", result, self.shell.config.payload_bytes_max, encoding=encoding
            )

    def _open_completion(self, completion: object) -> HeldCompletion:
        if not isinstance(completion, Completion):
            raise InvalidInput("completions", "must be a list of Completion", completion)
        self._check_result(completion.result, completion.result_encoding)
        return self.shell.open_handle(completion.handle), completion

    async def _complete_sure(
        self, opened: Sequence[HeldCompletion | FlowFabricError]
    ) -> dict[int, results.Completed]:
        """Complete those whose lease is certainly live, in one statement, by position."""
        given = {i: each for i, each in enumerate(opened) if isinstance(each, tuple)}
        if not given:
            return {}
        places, handles = list(given), [handle for handle, _ in given.values()]
        rows = await self.store.execute_alone(
            "complete_leased",
            (topics.COMPLETION_TOPIC,),
            results=[each.result or None for _, each in given.values()],
            result_encodings=[each.result_encoding for _, each in given.values()],
            **shell.lease_columns(handles),
        )
        (answer,) = values_of(CompletedRow, rows)
        woken = topics.topics_after(
            lanes=self.gated.lanes_released(handles),
            ended=answer.completed > 0,
            awaited=answer.awaited,
            in_flow=answer.in_flow,
        )
        for topic in woken - {topics.COMPLETION_TOPIC}:
            self.store.hint(topic)
        if topics.DISPATCH_TOPIC in woken:
            # Give a dispatcher in this process a turn first: it releases dependents.
            await asyncio.sleep(0)
        return {
            places[position]: results.Completed(
                execution_id=handles[position].execution_id,
                public_state=PublicState.COMPLETED,
            )
            for position in answer.places_among(len(handles))
        }

    async def complete_execution(
        self,
        execution_id: str,
        *,
        fence: Fence | None = None,
        attempt_index: int | None = None,
        result: bytes | None = None,
        result_encoding: str | None = None,
        source: str = "worker",
    ) -> results.Completed:
        """Finish an execution named by id and fence, or by an operator without one.

        An operator may name the attempt that is meant; any other is refused.
        """
        stored = None if result is None else await self.to_store(result)
        self._check_result(stored, result_encoding)
        return await self.shell.decide_fenced(
            execution_id,
            lambda subject, given, timing: executions.decide_complete(
                subject, given, stored or None, result_encoding, timing
            ),
            fence=fence,
            attempt_index=attempt_index,
            source=source,
        )

    async def to_store(self, result: bytes) -> bytes:
        """A result as it is stored. Safe to repeat."""
        return await self.shell.values.through(result, self.shell.values.pack)

    async def from_store(self, data: bytes) -> bytes:
        """The reverse, for arguments that could not be decoded when they were claimed."""
        return await self.shell.values.through(data, self.shell.values.unpack)

    # Failing

    async def fail(
        self,
        handle: Handle | bytes,
        reason: str,
        *,
        failure_class: FailureClass = FailureClass.TRANSIENT,
        category: str = "",
        traceback: str | None = None,
        step: FailedStep | None = None,
    ) -> results.FailResult:
        """Report a failed attempt; the policy decides between a retry and the end."""
        report = FailureReport(
            handle=handle,
            reason=reason,
            failure_class=failure_class,
            category=category,
            traceback=traceback,
            step=step,
        )
        return await self.shell.decide(self._report_ask(report))

    async def fail_many(
        self, reports: Sequence[FailureReport]
    ) -> list[results.FailResult | FlowFabricError]:
        """Report many failed attempts at once; each gets its own answer or error."""
        checks.check_list("reports", reports, 0, BATCH_MAX)
        opened = [shell.value_or_error(self._report_ask, report) for report in reports]
        return await self.shell.decide_opened(opened, lambda ask: ask)

    def _report_ask(self, report: object) -> shell.Ask[results.FailResult]:
        if not isinstance(report, FailureReport):
            raise InvalidInput("reports", "must be a list of FailureReport", report)
        handle = self.shell.open_handle(report.handle)
        failure = structs.replace(
            check_failure(report.reason, report.failure_class, report.category, report.traceback),
            step=check_failed_step(report.step),
        )
        return shell.held_ask(
            handle,
            lambda subject, fence, timing: executions.decide_fail(subject, fence, failure, timing),
        )

    async def fail_execution(
        self,
        execution_id: str,
        *,
        fence: Fence | None = None,
        attempt_index: int | None = None,
        reason: str,
        failure_class: FailureClass = FailureClass.TRANSIENT,
        category: str = "",
        retry_policy: RetryPolicy | None = None,
        source: str = "worker",
    ) -> results.FailResult:
        """Fail an execution named by id and fence. `retry_policy` overrides its own."""
        failure = check_failure(reason, failure_class, category)
        policy = check_retry_policy(retry_policy)
        return await self.shell.decide_fenced(
            execution_id,
            lambda subject, given, timing: executions.decide_fail(
                subject, given, failure, timing, policy
            ),
            fence=fence,
            attempt_index=attempt_index,
            source=source,
        )

    # Progress, giving up

    async def progress(
        self, handle: Handle | bytes, *, percent: int | None = None, message: str | None = None
    ) -> results.Updated:
        """Report progress. Omitted values are left unchanged."""
        opened = self.shell.open_handle(handle)
        _check_progress(percent, message)
        return await self.shell.decide_held(
            opened,
            lambda subject, fence, timing: executions.decide_progress(
                subject, fence, percent, message, timing
            ),
        )

    async def cancel(self, handle: Handle | bytes, reason: str) -> results.Cancelled:
        """Give up for good, as the lease holder. Safe to repeat."""
        opened = self.shell.open_handle(handle)
        why = checks.check_reason(reason)
        return await self.shell.decide_held(
            opened,
            lambda subject, fence, timing: executions.decide_worker_cancel(
                subject, fence, why, timing
            ),
        )

    async def update_progress(
        self,
        execution_id: str,
        *,
        fence: Fence,
        percent: int | None = None,
        message: str | None = None,
    ) -> results.Updated:
        """`progress` by id and fence."""
        given = require_fence(fence)
        _check_progress(percent, message)
        return await self.shell.decide_about(
            execution_id,
            lambda subject, timing: executions.decide_progress(
                subject, given, percent, message, timing
            ),
        )

    # Giving work back

    async def hand_back(self, handle: Handle | bytes, *, reason: str) -> results.HandedBack:
        """Give up a lease early, so that another worker can claim the execution at once."""
        (outcome,) = await self.hand_back_many([handle], reason=reason)
        return shell.answered(outcome)

    async def hand_back_many(
        self, handles: Sequence[Handle | bytes], *, reason: str
    ) -> list[results.HandedBack | FlowFabricError]:
        """Return many leases at once; each gets its own answer or error."""
        checks.check_list("handles", handles, 0, BATCH_MAX)
        why = checks.check_reason(reason)
        opened = [shell.value_or_error(self.shell.open_handle, handle) for handle in handles]

        def ask(handle: Handle) -> shell.Ask[results.HandedBack]:
            return shell.held_ask(
                handle,
                lambda subject, fence, timing: executions.decide_hand_back(
                    subject, fence, why, timing
                ),
            )

        return await self.shell.decide_opened(opened, ask)
