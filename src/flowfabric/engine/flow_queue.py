"""The queue of flow members that have ended, as a dispatcher finds it.

Many are taken flow by flow, under the locks of the flows. A few are read without locks, with
all that telling their dependents takes.
"""

from collections.abc import Sequence

from msgspec import Struct

from flowfabric.core import flow_records
from flowfabric.core.decisions import Subject
from flowfabric.core.flow_endings import Ending
from flowfabric.core.flow_joins import count_endings, is_spared, with_last_end
from flowfabric.core.ids import ExecutionId, FlowId
from flowfabric.core.records import Execution, runs_first_attempt
from flowfabric.store.base import Joined, Transaction

FLOWS_PER_BATCH = 64
FLOWS_LOOKED_AT = 256


class QueuedEnding(Struct, frozen=True, kw_only=True):
    """An ending from the queue."""

    row: flow_records.CompletionDispatch
    ending: Ending
    stale: bool
    """The execution was replayed since: this ending no longer means anything."""
    spared: bool
    """Cancelled because a join no longer needed it."""


async def flows_with_endings(tx: Transaction, start: int) -> Sequence[flow_records.FlowRecord]:
    """A few flows that no other transaction holds, locked."""
    return await tx.select_records(
        flow_records.FlowRecord,
        "lock_dispatch_flows",
        start=start,
        candidates=FLOWS_LOOKED_AT,
        limit=FLOWS_PER_BATCH,
    )


async def take(
    tx: Transaction, flows: Sequence[flow_records.FlowRecord], limit: int
) -> list[QueuedEnding]:
    """Endings of members of these flows, which the caller has locked."""
    rows = await tx.select_joined(
        (flow_records.CompletionDispatch, flow_records.EndedUpstream),
        "take_endings",
        partition_keys=[flow.partition_key for flow in flows],
        flow_ids=[flow.flow_id for flow in flows],
        limit=limit,
    )
    return [ending for each in rows if (ending := _queued(each)) is not None]


def _queued(joined: Joined) -> QueuedEnding | None:
    """None where what the ending left is gone."""
    row, left = joined.get(flow_records.CompletionDispatch), joined.get(flow_records.EndedUpstream)
    if row is None or left is None:
        return None
    return queued(
        row,
        left.result,
        left.result_encoding,
        stale=left.current_replay_count != row.replay_count,
        cancellation_reason=left.cancellation_reason,
    )


def queued(
    row: flow_records.CompletionDispatch,
    result: bytes | None,
    result_encoding: str | None,
    *,
    stale: bool = False,
    cancellation_reason: str | None = None,
) -> QueuedEnding:
    """The ending of a row, with what the execution has left."""
    return QueuedEnding(
        row=row,
        ending=Ending(
            outcome=row.outcome,
            replay_count=row.replay_count,
            result=result,
            result_encoding=result_encoding,
        ),
        stale=stale,
        spared=is_spared(row.outcome, cancellation_reason),
    )


def counted_in(
    flow: flow_records.FlowRecord, ended: Sequence[QueuedEnding]
) -> flow_records.FlowRecord:
    counted = count_endings(
        flow, (each.row.outcome for each in ended), spared=sum(each.spared for each in ended)
    )
    return with_last_end(counted, (each.row.enqueued_at_ms for each in ended))


# A few, without locks

FOUND = (
    flow_records.FlowRecord,
    flow_records.CompletionDispatch,
    flow_records.EndedUpstream,
    flow_records.Edge,
    flow_records.JoinRecord,
    Execution,
)
"""What `read_for_dispatch` returns side by side, in the order in which `save` compares it."""


class FoundEndings(Struct, frozen=True):
    """Endings, and every row needed to tell their dependents."""

    flows: dict[FlowId, flow_records.FlowRecord] = {}
    endings: dict[ExecutionId, QueuedEnding] = {}
    edges: list[flow_records.Edge] = []
    groups: dict[ExecutionId, flow_records.JoinRecord] = {}
    subjects: dict[ExecutionId, Subject] = {}


def found_in(rows: Sequence[Joined]) -> FoundEndings | None:
    """None if an ending is stale, or if a downstream has been claimed or has more rows."""
    found = FoundEndings()
    for each in rows:
        flow, ending = each.get(flow_records.FlowRecord), _queued(each)
        if flow is None or ending is None:
            return None
        row = ending.row
        known = found.endings.get(row.execution_id)
        if ending.stale or (known is not None and known.row != row):
            return None
        found.flows[flow.flow_id] = flow
        # The result comes along with the edges that pass it.
        if known is None or known.ending.result is None:
            found.endings[row.execution_id] = ending
        if not _take_edge(found, each):
            return None
    return found


def _take_edge(found: FoundEndings, each: Joined) -> bool:
    """Add the edge of a row, if any; False if its downstream was claimed or has more rows."""
    edge, group, downstream = (
        each.get(flow_records.Edge),
        each.get(flow_records.JoinRecord),
        each.get(Execution),
    )
    if edge is None:
        return True
    if (
        group is None
        or downstream is None
        or downstream.total_attempt_count > 0
        or _has_rows(downstream)
    ):
        return False
    found.edges.append(edge)
    found.groups[edge.downstream_id] = group
    found.subjects[edge.downstream_id] = Subject(execution=downstream, attempt=None)
    return True


def _has_rows(execution: Execution) -> bool:
    """Whether there are more rows about an execution than its own and those of its attempts."""
    return (
        execution.granted_until_ms is not None
        or execution.current_suspension_id is not None
        or execution.open_waitpoint_count > 0
    )


# A member that is about to end, without locks

MEMBER = (flow_records.FlowRecord, flow_records.Edge, flow_records.JoinRecord, Execution)
"""What `read_for_completion` returns side by side, in the order in which `save` compares it."""


def member_in(rows: Sequence[Joined]) -> tuple[Subject, FoundEndings] | None:
    """The member, and every row needed to tell its dependents; None if either has a history.

    Its attempt is its first, which follows from it and has no row.
    """
    found = FoundEndings()
    member: Execution | None = None
    for each in rows:
        flow = each.get(flow_records.FlowRecord)
        if flow is None or not _take_edge(found, each):
            return None
        found.flows[flow.flow_id] = flow
        if each.get(flow_records.Edge) is None:
            member = each.get(Execution)
    if member is None or not runs_first_attempt(member) or _has_rows(member):
        return None
    return Subject(execution=member, attempt=None), found
