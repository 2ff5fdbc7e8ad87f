"""Everything the holder of a lease can ask, each in the same shape."""

from collections.abc import Awaitable, Callable

from msgspec import structs

from flowfabric import Engine, FlowFabricError
from flowfabric.core.leases import Fence
from flowfabric.engine.executions import Completion, FailureReport
from tests.conformance.observed import call


async def the_only(batch: Awaitable[object]) -> object:
    """The one answer of a batch of one; its error is raised."""
    outcomes = await batch
    assert isinstance(outcomes, list)
    (outcome,) = outcomes
    if isinstance(outcome, FlowFabricError):
        raise outcome
    return outcome


def completion(handle: object) -> Completion:
    return structs.replace(Completion(handle=b"", result=b"result"), handle=handle)


def report(handle: object) -> FailureReport:
    return structs.replace(FailureReport(handle=b"", reason="broken"), handle=handle)


WithHandle = Callable[[Engine, object], Awaitable[object]]
WITH_HANDLE: dict[str, WithHandle] = {
    "renew": lambda engine, handle: call(engine, "renew", handle),
    "renew_many": lambda engine, handle: the_only(call(engine, "renew_many", [handle])),
    "progress": lambda engine, handle: call(engine, "progress", handle, percent=5),
    "complete": lambda engine, handle: call(engine, "complete", handle, b"result"),
    "complete_many": lambda engine, handle: the_only(
        call(engine, "complete_many", [completion(handle)])
    ),
    "fail": lambda engine, handle: call(engine, "fail", handle, "broken"),
    "fail_many": lambda engine, handle: the_only(call(engine, "fail_many", [report(handle)])),
    "delay": lambda engine, handle: call(engine, "delay", handle, 0),
    "wait_children": lambda engine, handle: call(engine, "wait_children", handle),
    "hand_back": lambda engine, handle: call(engine, "hand_back", handle, reason="closing"),
    "hand_back_many": lambda engine, handle: the_only(
        call(engine, "hand_back_many", [handle], reason="closing")
    ),
    "cancel": lambda engine, handle: call(engine, "cancel", handle, "enough"),
}
"""Operations that take the handle a claim gave out. Values of other types are passed on too."""


WithFence = Callable[[Engine, str, Fence | None], Awaitable[object]]
WITH_FENCE: dict[str, WithFence] = {
    "renew_lease": lambda engine, execution_id, fence: engine.renew_lease(
        execution_id, fence=fence
    ),
    "complete_execution": lambda engine, execution_id, fence: engine.complete_execution(
        execution_id, fence=fence, result=b"result"
    ),
    "fail_execution": lambda engine, execution_id, fence: engine.fail_execution(
        execution_id, fence=fence, reason="broken"
    ),
}
"""The same by execution and fence."""
