"""What may have been left behind in a flow, and whether it really was.

Endings and their effects are written in one transaction, so nothing is left behind
unless the database was mended by hand, or a rule was wrong once. The audit
finds executions that would otherwise wait for ever.
"""

from msgspec import structs

from flowfabric.core.bounds import AUDIT_EVERY_MS
from flowfabric.core.flow_endings import FLOW_CANCELLED, holds_back
from flowfabric.core.flow_joins import new_group
from flowfabric.core.flow_records import (
    FlowAudit,
    FlowRecord,
    GroupState,
    JoinRecord,
    PendingCancel,
)
from flowfabric.core.ids import FIRST_UUID, next_uuid
from flowfabric.core.records import Execution
from flowfabric.core.situations import Hold, held_by


def next_audit(
    audit: FlowAudit, last: tuple[str, str] | None, last_waiter: str | None, now_ms: int
) -> FlowAudit:
    """The audit after it has looked at members up to `last`; none when there are no more.

    Likewise for those who wait.
    """
    flow_id, execution_id = (FIRST_UUID, FIRST_UUID) if last is None else _following(*last)
    return structs.replace(
        audit,
        next_flow_id=flow_id,
        next_execution_id=execution_id,
        after_waiter=last_waiter or "",
        due_at_ms=now_ms + AUDIT_EVERY_MS,
    )


def _following(flow_id: str, execution_id: str) -> tuple[str, str]:
    """The first member there could be after one; the first of all after the last."""
    following = next_uuid(execution_id)
    if following is not None:
        return flow_id, following
    return next_uuid(flow_id) or FIRST_UUID, FIRST_UUID


def overlooked(
    flow: FlowRecord, execution: Execution, group: JoinRecord | None
) -> JoinRecord | None:
    """The fired group of an execution that waits although nothing holds it back; none if it does.

    An execution without a group, or with one that has no edges, waits for nothing. One that
    waits for the end of a child is woken by it.
    """
    if held_by(execution) in (Hold.ENDED, Hold.CANCELLATION):
        return None
    if not execution.join_pending and held_by(execution) is not Hold.JOIN:
        return None
    if group is not None and group.group_state is GroupState.IMPOSSIBLE:
        return group
    if holds_back(group):
        return None
    return structs.replace(
        group or new_group(flow, execution.execution_id), group_state=GroupState.SATISFIED
    )


def requeued(flow: FlowRecord, execution: Execution, now_ms: int) -> PendingCancel | None:
    """Why a member that is marked for it is cancelled; None for one that is not."""
    if held_by(execution) is not Hold.CANCELLATION:
        return None
    return PendingCancel(
        partition_key=execution.partition_key,
        execution_id=execution.execution_id,
        flow_id=flow.flow_id,
        reason=flow.cancel_reason or FLOW_CANCELLED,
        enqueued_at_ms=now_ms,
        due_at_ms=now_ms,
    )
