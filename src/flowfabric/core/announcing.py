"""Making waitpoints: of a suspension, before one, or to tell of a wait beside work."""

from collections.abc import Sequence
from typing import Final

from msgspec import structs

from flowfabric.core import tokens
from flowfabric.core.limits import OPEN_WAITPOINTS_MAX, TIME_MS_MAX
from flowfabric.core.records import Execution, HmacKey, Waitpoint, WaitpointState
from flowfabric.core.suspend_request import BoundWaitpoint
from flowfabric.core.transitions import Changes, Subject, change
from flowfabric.errors import SignalLimitExceeded

ANNOUNCED_FOR_MS: Final = 600_000
"""How long a wait beside work is known; its worker announces it again in half that time."""


def new_waitpoint(
    execution: Execution, bound: BoundWaitpoint, key: HmacKey, now_ms: int
) -> Waitpoint:
    token = tokens.sign(key, execution.execution_id, bound.waitpoint_id)
    return Waitpoint(
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        waitpoint_id=bound.waitpoint_id,
        waitpoint_key=bound.waitpoint_key,
        suspension_id=None,
        attempt_index=execution.current_attempt_index,
        state=WaitpointState.PENDING,
        token_kid=key.kid,
        token_fingerprint=tokens.fingerprint(token),
        own_name_only=bound.own_name_only,
        created_at_ms=now_ms,
    )


def check_waitpoint_room(execution: Execution, more: int) -> None:
    if execution.open_waitpoint_count + more > OPEN_WAITPOINTS_MAX:
        raise SignalLimitExceeded(
            f"{execution.called} has {execution.open_waitpoint_count} open waitpoints;"
            f" at most {OPEN_WAITPOINTS_MAX} are allowed"
        )


def announce(
    subject: Subject, missing: Sequence[BoundWaitpoint], key: HmacKey, now_ms: int
) -> Changes:
    """Make waitpoints that last for a while, beside what the worker does."""
    execution = subject.execution
    if not missing:
        return Changes()
    check_waitpoint_room(execution, len(missing))
    made = tuple(
        structs.replace(
            new_waitpoint(execution, bound, key, now_ms),
            expires_at_ms=min(now_ms + ANNOUNCED_FOR_MS, TIME_MS_MAX),
        )
        for bound in missing
    )
    count = execution.open_waitpoint_count + len(made)
    return Changes(inserts=made, updates=(change(execution, now_ms, open_waitpoint_count=count),))


def unannounced(
    subject: Subject, announced: Sequence[BoundWaitpoint], now_ms: int
) -> list[BoundWaitpoint]:
    """Those of whose name there is none that lasts until the next announcement."""
    lasting = {
        each.waitpoint_key
        for each in subject.waitpoints
        if each.state is WaitpointState.PENDING
        and (each.expires_at_ms is None or each.expires_at_ms > now_ms + ANNOUNCED_FOR_MS // 2)
    }
    return [each for each in announced if each.waitpoint_key not in lasting]
