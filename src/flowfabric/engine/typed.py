"""Parking and progress for callers that name an execution and a fence instead of a handle.

An operator may act for the worker without a fence, and then names the attempt that is
meant, so as not to hit the one that came after it.
"""

from flowfabric.core.checks import check_int, check_optional_text, check_time
from flowfabric.core.executions import Timing, decide_delay, decide_progress, decide_wait_children
from flowfabric.core.leases import Fence, check_attempt_index, check_attempt_meant
from flowfabric.core.limits import TEXT_BYTES_MAX
from flowfabric.core.results import Delayed, Moved, Updated
from flowfabric.core.transitions import Decision, Subject
from flowfabric.engine.unit import Ask, Operations, check_fence_given
from flowfabric.errors import InvalidInput


class Typed(Operations):
    async def delay_execution(
        self,
        execution_id: str,
        *,
        delay_until_ms: int,
        fence: Fence | None = None,
        attempt_index: int | None = None,
        source: str = "worker",
    ) -> Delayed:
        """`delay` by id and fence, or by an operator without one."""
        check_time("delay_until_ms", delay_until_ms)
        given = check_fence_given(fence, source)
        check_attempt_index(attempt_index)

        def decide(subject: Subject, timing: Timing) -> Decision[Delayed]:
            check_attempt_meant(subject.execution, attempt_index)
            return decide_delay(subject, given, delay_until_ms, timing)

        return await self.decide(Ask(self.check_execution_id(execution_id), decide))

    async def move_to_waiting_children(
        self,
        execution_id: str,
        *,
        fence: Fence | None = None,
        attempt_index: int | None = None,
        source: str = "worker",
    ) -> Moved:
        """`wait_children` by id and fence, or by an operator without one."""
        given = check_fence_given(fence, source)
        check_attempt_index(attempt_index)

        def decide(subject: Subject, timing: Timing) -> Decision[Moved]:
            check_attempt_meant(subject.execution, attempt_index)
            return decide_wait_children(subject, given, timing)

        return await self.decide(Ask(self.check_execution_id(execution_id), decide))

    async def update_progress(
        self,
        execution_id: str,
        *,
        fence: Fence,
        percent: int | None = None,
        message: str | None = None,
    ) -> Updated:
        """`progress` by id and fence."""
        given = check_fence_given(fence, "worker")
        if given is None:
            raise InvalidInput("fence", "must be given")
        if percent is not None:
            check_int("percent", percent, 0, 100)
        check_optional_text("message", message, bytes_max=TEXT_BYTES_MAX)

        def decide(subject: Subject, timing: Timing) -> Decision[Updated]:
            return decide_progress(subject, given, percent, message, timing)

        return await self.decide(Ask(self.check_execution_id(execution_id), decide))
