"""What a lease holder tells the engine about its work.

The short names (`complete`, `fail`, …) take the handle that `claim` gave out;
the long ones (`complete_execution`, …) name the execution and the fence, or act
for the worker with `source="operator_override"`.
"""

from collections.abc import Sequence

from msgspec import Struct

from flowfabric.core.checks import (
    check_int,
    check_optional_bytes,
    check_optional_text,
    check_text,
    check_time,
    shorten,
)
from flowfabric.core.decision import Decision
from flowfabric.core.execution import (
    Failure,
    Timing,
    decide_complete,
    decide_delay,
    decide_fail,
    decide_progress,
    decide_wait_children,
)
from flowfabric.core.handles import Handle
from flowfabric.core.ids import ExecutionId
from flowfabric.core.lease import Fence
from flowfabric.core.limits import BATCH_MAX, TEXT_BYTES_MAX
from flowfabric.core.operator import decide_worker_cancel
from flowfabric.core.policies import RetryPolicy
from flowfabric.core.results import Cancelled, Completed, Delayed, FailResult, Moved, Updated
from flowfabric.core.states import FailureClass
from flowfabric.core.transition import Subject
from flowfabric.engine.unit import (
    Ask,
    Operations,
    check_fence_given,
    fence_of,
)
from flowfabric.errors import FlowFabricError, InvalidInput


class Completion(Struct, frozen=True, kw_only=True):
    """One finished piece of work, for `complete_many`."""

    handle: Handle | bytes
    result: bytes | None = None
    result_encoding: str | None = None


class FailureReport(Struct, frozen=True, kw_only=True):
    """One failed piece of work, for `fail_many`."""

    handle: Handle | bytes
    reason: str
    failure_class: FailureClass = FailureClass.TRANSIENT
    category: str = ""


class Work(Operations):
    # Completing

    async def complete(
        self,
        handle: Handle | bytes,
        result: bytes | None = None,
        *,
        result_encoding: str | None = None,
    ) -> Completed:
        """Finish successfully. Safe to repeat."""
        completion = Completion(handle=handle, result=result, result_encoding=result_encoding)
        return await self.decide(self._completion_ask(completion))

    async def complete_many(
        self, completions: Sequence[Completion]
    ) -> list[Completed | FlowFabricError]:
        """Finish many at once; each gets its own answer or error."""
        check_int("completions", len(completions), 0, BATCH_MAX)
        return await self.decide_many([self._completion_ask(c) for c in completions])

    def _completion_ask(self, completion: Completion) -> Ask[Completed]:
        handle = self.open_handle(completion.handle)
        return self._complete_ask(
            handle.execution_id, fence_of(handle), completion.result, completion.result_encoding
        )

    async def complete_execution(
        self,
        execution_id: str,
        *,
        fence: Fence | None = None,
        result: bytes | None = None,
        result_encoding: str | None = None,
        source: str = "worker",
    ) -> Completed:
        """Finish an execution named by id and fence, or by an operator without one."""
        ask = self._complete_ask(
            self.check_execution_id(execution_id),
            check_fence_given(fence, source),
            result,
            result_encoding,
        )
        return await self.decide(ask)

    def _complete_ask(
        self,
        execution_id: ExecutionId,
        fence: Fence | None,
        result: bytes | None,
        result_encoding: str | None,
    ) -> Ask[Completed]:
        check_optional_bytes("result", result, self.config.payload_bytes_max)
        check_optional_text("result_encoding", result_encoding)

        def decide(subject: Subject, timing: Timing) -> Decision[Completed]:
            return decide_complete(subject, fence, result or None, result_encoding, timing)

        return Ask(execution_id, decide)

    # Failing

    async def fail(
        self,
        handle: Handle | bytes,
        reason: str,
        *,
        failure_class: FailureClass = FailureClass.TRANSIENT,
        category: str = "",
    ) -> FailResult:
        """Report a failed attempt; the policy decides between a retry and the end."""
        report = FailureReport(
            handle=handle, reason=reason, failure_class=failure_class, category=category
        )
        return await self.decide(self._report_ask(report))

    async def fail_many(
        self, reports: Sequence[FailureReport]
    ) -> list[FailResult | FlowFabricError]:
        """Report many failed attempts at once; each gets its own answer or error."""
        check_int("reports", len(reports), 0, BATCH_MAX)
        return await self.decide_many([self._report_ask(report) for report in reports])

    def _report_ask(self, report: FailureReport) -> Ask[FailResult]:
        handle = self.open_handle(report.handle)
        failure = check_failure(report.reason, report.failure_class, report.category)
        return _fail_ask(handle.execution_id, fence_of(handle), failure, None)

    async def fail_execution(
        self,
        execution_id: str,
        *,
        fence: Fence | None = None,
        reason: str,
        failure_class: FailureClass = FailureClass.TRANSIENT,
        category: str = "",
        retry_policy: RetryPolicy | None = None,
        source: str = "worker",
    ) -> FailResult:
        """Fail an execution named by id and fence. `retry_policy` overrides its own."""
        ask = _fail_ask(
            self.check_execution_id(execution_id),
            check_fence_given(fence, source),
            check_failure(reason, failure_class, category),
            check_retry_policy(retry_policy),
        )
        return await self.decide(ask)

    # Parking, progress, giving up

    async def delay(self, handle: Handle | bytes, delay_until_ms: int) -> Delayed:
        """Release the worker until a time; the same attempt continues then."""
        opened = self.open_handle(handle)
        check_time("delay_until_ms", delay_until_ms)

        def decide(subject: Subject, timing: Timing) -> Decision[Delayed]:
            return decide_delay(subject, fence_of(opened), delay_until_ms, timing)

        return await self.decide(Ask(opened.execution_id, decide))

    async def wait_children(self, handle: Handle | bytes) -> Moved:
        """Release the worker until the executions this one depends on have ended."""
        opened = self.open_handle(handle)

        def decide(subject: Subject, timing: Timing) -> Decision[Moved]:
            return decide_wait_children(subject, fence_of(opened), timing)

        return await self.decide(Ask(opened.execution_id, decide))

    async def progress(
        self, handle: Handle | bytes, *, percent: int | None = None, message: str | None = None
    ) -> Updated:
        """Say how far the work is; what is not given stays as it was."""
        opened = self.open_handle(handle)
        if percent is not None:
            check_int("percent", percent, 0, 100)
        check_optional_text("message", message, bytes_max=TEXT_BYTES_MAX)

        def decide(subject: Subject, timing: Timing) -> Decision[Updated]:
            return decide_progress(subject, fence_of(opened), percent, message, timing)

        return await self.decide(Ask(opened.execution_id, decide))

    async def cancel(self, handle: Handle | bytes, reason: str) -> Cancelled:
        """Give up for good, as the lease holder. Safe to repeat."""
        opened = self.open_handle(handle)
        why = shorten(check_text("reason", reason, bytes_max=2**31), TEXT_BYTES_MAX)

        def decide(subject: Subject, timing: Timing) -> Decision[Cancelled]:
            return decide_worker_cancel(subject, fence_of(opened), why, timing)

        return await self.decide(Ask(opened.execution_id, decide))


def _fail_ask(
    execution_id: ExecutionId,
    fence: Fence | None,
    failure: Failure,
    retry_policy: RetryPolicy | None,
) -> Ask[FailResult]:
    def decide(subject: Subject, timing: Timing) -> Decision[FailResult]:
        return decide_fail(subject, fence, failure, timing, retry_policy)

    return Ask(execution_id, decide)


def check_failure(reason: object, failure_class: object, category: object) -> Failure:
    """A failure to record. A reason of any length is accepted and shortened: it is a message."""
    if not isinstance(reason, str):
        raise InvalidInput("reason", "must be a string", reason)
    try:
        known = FailureClass(str(failure_class))
    except ValueError as error:
        classes = ", ".join(FailureClass)
        raise InvalidInput("failure_class", f"must be one of {classes}", failure_class) from error
    return Failure(
        reason=shorten(reason, TEXT_BYTES_MAX),
        failure_class=known,
        category=check_text("category", category),
    )


def check_retry_policy(retry_policy: object) -> RetryPolicy | None:
    if retry_policy is None or isinstance(retry_policy, RetryPolicy):
        return retry_policy
    raise InvalidInput("retry_policy", "must be a RetryPolicy", retry_policy)
