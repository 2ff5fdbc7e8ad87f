"""Which of a handler's calls an exception came out of.

An exception that leaves a call carries the call's name. So a failed attempt names the step
it failed in, even if the handler raised something else instead.
"""

from collections import deque
from typing import Final, NamedTuple

from flowfabric.core.ids import AttemptId
from flowfabric.core.records import FailedStep
from flowfabric.worker.branches import DurableCall
from flowfabric.worker.failures import MARK, text_of
from flowfabric.worker.functions import is_cancelled
from flowfabric.worker.leases import HeldLease

CHAIN_MAX: Final = 100
"""How many exceptions of a chain are looked at."""


class Mark(NamedTuple):
    """Left on an exception. Programs may raise the same object repeatedly, in many attempts."""

    attempt_id: AttemptId
    step: FailedStep


def blame(lease: HeldLease, call: DurableCall, error: BaseException) -> None:
    """Note that an exception leaves a call: it is the failure of this call."""
    if call.key and not is_cancelled(error):
        step = FailedStep(
            step_key=call.key,
            name=call.name,
            line=call.line.known_as,
            error=f"{type(error).__name__}: {text_of(error)}",
            duration_ms=call.took_ms,
        )
        _attributes(error)[MARK] = Mark(lease.handle.attempt_id, step)


def blamed(lease: HeldLease, error: BaseException) -> FailedStep | None:
    """The step whose failure left the handler: raised as it is, in a group, or as a cause."""
    waiting, seen = deque([error]), set[int]()
    while waiting and len(seen) < CHAIN_MAX:
        each = waiting.popleft()
        if id(each) in seen:
            continue
        seen.add(id(each))
        mark = _attributes(each).get(MARK)
        if isinstance(mark, Mark) and mark.attempt_id == lease.handle.attempt_id:
            return mark.step
        if isinstance(each, BaseExceptionGroup):
            waiting.extend(each.exceptions)
        waiting.extend(other for other in (each.__cause__, each.__context__) if other is not None)
    return None


def _attributes(error: BaseException) -> dict[str, object]:
    """The exception's attributes; its class is the user's and may hide them."""
    try:
        return vars(error)
    except Exception:
        return {}
