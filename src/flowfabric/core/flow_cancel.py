"""Cancelling a flow: which members go with it, and what the flow remembers of it."""

import msgspec
from msgspec import Struct, structs

from flowfabric.core.checks import check_int
from flowfabric.core.events import Event, EventCategory
from flowfabric.core.flow_records import (
    CancellationPolicy,
    EdgeGroup,
    FlowRecord,
    FlowState,
    PendingCancel,
)
from flowfabric.core.ids import ExecutionId, make_execution_id
from flowfabric.core.limits import CANCEL_WAIT_MS_MAX
from flowfabric.core.results import FlowCancelled, PartiallyCancelled, SiblingCancelAction
from flowfabric.errors import InvalidGraceMs, InvalidInput

FLOW_CANCELLED = "flow_cancelled"
"""The reason members are given when the flow's cancellation named none."""

SHORT_JOIN = "quorum_lacks_edges"
"""The reason for those whose quorum had too few edges when the flow was closed."""

RETRY_MS_MIN = 1_000
RETRY_MS_MAX = 60_000
RETRY_DOUBLINGS_MAX = 6
"""How long to leave a member alone whose cancellation failed: twice as long each time."""

_ALIASES = {"cancel_flow_only": CancellationPolicy.FLOW_ONLY}

_REACH = {
    CancellationPolicy.FLOW_ONLY: 0,
    CancellationPolicy.CANCEL_PENDING: 1,
    CancellationPolicy.CANCEL_ALL: 2,
}


class NoWait(Struct, frozen=True, tag=True):
    """Return as soon as the cancellation is recorded."""


class WaitTimeout(Struct, frozen=True, tag=True):
    """Wait this long for the members to be cancelled."""

    timeout_ms: int


class WaitIndefinite(Struct, frozen=True, tag=True):
    """Wait until the members are cancelled, within the engine's own limit."""


CancelWait = NoWait | WaitTimeout | WaitIndefinite


def check_cancellation_policy(policy: object) -> CancellationPolicy:
    try:
        return _ALIASES.get(str(policy)) or CancellationPolicy(str(policy))
    except ValueError as error:
        choices = ", ".join(CancellationPolicy)
        raise InvalidInput("cancellation_policy", f"must be one of {choices}", policy) from error


def check_grace(grace_ms: object) -> None:
    """Cancelling waits for no grace period; a malformed one is refused all the same."""
    if grace_ms is None:
        return
    if not isinstance(grace_ms, int) or isinstance(grace_ms, bool) or not 0 <= grace_ms < 2**53:
        raise InvalidGraceMs("grace_ms: must be an integer from 0 to 2^53-1")


def wait_ms(wait: object) -> int | None:
    """How long to wait; none for not at all."""
    match wait:
        case NoWait():
            return None
        case WaitTimeout(timeout_ms=timeout_ms):
            return check_int("wait.timeout_ms", timeout_ms, 0, CANCEL_WAIT_MS_MAX)
        case WaitIndefinite():
            return CANCEL_WAIT_MS_MAX
        case _:
            raise InvalidInput("wait", "must be NoWait, WaitTimeout or WaitIndefinite", wait)


def repeats_cancel(flow: FlowRecord, policy: CancellationPolicy) -> bool:
    """Whether the flow was cancelled before, and its members at least as far as `policy` goes."""
    decided = flow.cancellation_policy
    return decided is not None and _REACH[policy] <= _REACH[decided]


def cancelled_flow(
    flow: FlowRecord, policy: CancellationPolicy, reason: str, now_ms: int
) -> FlowRecord:
    """The flow closed. One that is closed stays so since then, and is cancelled further."""
    first = flow.cancelled_at_ms is None
    return structs.replace(
        flow,
        public_flow_state=FlowState.CANCELLED,
        cancelled_at_ms=now_ms if first else flow.cancelled_at_ms,
        cancel_reason=reason or flow.cancel_reason or "",
        cancellation_policy=policy,
        last_mutation_at_ms=now_ms,
        # A flow whose members had all ended ends anew, as cancelled.
        ended_at_ms=None if first else flow.ended_at_ms,
    )


def flow_cancel_event(flow: FlowRecord, member_count: int, now_ms: int) -> Event:
    """Operators' log. An event about a whole flow carries the flow's uuid as its subject."""
    details: dict[str, str | int | None] = {
        "flow_id": flow.flow_id,
        "cancellation_policy": flow.cancellation_policy,
        "reason": flow.cancel_reason,
        "member_count": member_count,
    }
    return Event(
        category=EventCategory.OPERATOR,
        event_type="flow_cancel_requested",
        partition_key=flow.partition_key,
        execution_id=make_execution_id(flow.partition_key, flow.flow_id),
        flow_id=flow.flow_id,
        namespace=flow.namespace,
        details=msgspec.json.encode(details).decode(),
        occurred_at_ms=now_ms,
    )


def postponed(row: PendingCancel, now_ms: int) -> PendingCancel:
    """The row after cancelling its member failed; it waits longer each time."""
    pause_ms = min(RETRY_MS_MAX, RETRY_MS_MIN << min(row.attempts, RETRY_DOUBLINGS_MAX))
    return structs.replace(row, attempts=row.attempts + 1, due_at_ms=now_ms + pause_ms)


def reconciled(group: EdgeGroup | None, queued: int, unended: int) -> SiblingCancelAction:
    """What is to become of the upstreams queued because a join no longer needs them."""
    if not queued:
        return SiblingCancelAction.NO_OP
    if group is None or group.cancel_reason is None:
        return SiblingCancelAction.SREMMED_STALE
    return SiblingCancelAction.NO_OP if unended else SiblingCancelAction.COMPLETED_DRAIN


def all_but(
    header: FlowCancelled, failed: tuple[ExecutionId, ...]
) -> FlowCancelled | PartiallyCancelled:
    """The answer when some members could not be cancelled yet; they stay queued."""
    if not failed:
        return header
    lost = set(failed)
    return PartiallyCancelled(
        cancellation_policy=header.cancellation_policy,
        member_execution_ids=tuple(i for i in header.member_execution_ids if i not in lost),
        failed_member_execution_ids=failed,
    )
