"""What may have been left behind in a flow, and whether it really was.

Endings and what follows from them are written together, so nothing is ever left behind;
unless somebody mended the database by hand, or a rule here was wrong once. The audit
finds executions that would otherwise wait for ever.
"""

from collections.abc import Iterable, Mapping

from msgspec import structs

from flowfabric.core.flow_build import new_group
from flowfabric.core.flow_model import Edge, EdgeGroup, Flow, FlowAudit, GroupState
from flowfabric.core.flow_resolve import holds_back, waits_for_worker
from flowfabric.core.ids import FIRST_UUID, ExecutionId
from flowfabric.core.limits import AUDIT_EVERY_MS
from flowfabric.core.model import Execution
from flowfabric.core.states import EligibilityState, LifecyclePhase, TerminalOutcome


def next_audit(audit: FlowAudit, last: tuple[str, str] | None, now_ms: int) -> FlowAudit:
    """The audit after it has looked at members up to `last`; none when there are no more."""
    after_flow_id, after_execution_id = last or (FIRST_UUID, FIRST_UUID)
    return structs.replace(
        audit,
        after_flow_id=after_flow_id,
        after_execution_id=after_execution_id,
        due_at_ms=now_ms + AUDIT_EVERY_MS,
    )


def untold_edges(edges: Iterable[Edge], upstreams: Mapping[ExecutionId, Execution]) -> list[Edge]:
    """Open edges whose upstream has ended, in a way that still counts for them."""
    return [edge for edge in edges if _counts(edge, upstreams[edge.upstream_id])]


def _counts(edge: Edge, upstream: Execution) -> bool:
    if upstream.lifecycle_phase is not LifecyclePhase.TERMINAL:
        return False
    if upstream.terminal_outcome is TerminalOutcome.SUCCESS or edge.reopened_at_ms is None:
        return True
    assert upstream.completed_at_ms is not None
    return upstream.completed_at_ms > edge.reopened_at_ms


def overlooked(flow: Flow, execution: Execution, group: EdgeGroup | None) -> EdgeGroup | None:
    """The fired group of an execution that waits although nothing holds it back; none if it does.

    An execution without a group, or with one that has no edges, waits for nothing.
    """
    if (
        not waits_for_worker(execution)
        or execution.cancel_requested
        or execution.eligibility_state is not EligibilityState.BLOCKED_BY_DEPENDENCIES
    ):
        return None
    if group is not None and group.group_state is GroupState.IMPOSSIBLE:
        return group
    if holds_back(group):
        return None
    return structs.replace(
        group or new_group(flow, execution.execution_id), group_state=GroupState.SATISFIED
    )
