"""The queue of flow members that have ended, as a dispatcher finds it.

Many are taken flow by flow, under the locks of the flows. A few are read without locks, with
all that telling their dependents takes.
"""

from collections.abc import Sequence

from msgspec import Struct

from flowfabric.core import flow_records
from flowfabric.core.flow_endings import Ending
from flowfabric.core.flow_joins import count_endings, is_spared, with_last_end
from flowfabric.core.ids import ExecutionId, FlowId
from flowfabric.core.records import Execution, runs_first_attempt
from flowfabric.core.transitions import Subject
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


def _queued(found: Joined) -> QueuedEnding | None:
    """None where what the ending left is gone."""
    row, left = found.get(flow_records.CompletionDispatch), found.get(flow_records.EndedUpstream)
    if row is None or left is None:
        return None
    return QueuedEnding(
        row=row,
        ending=Ending(
            outcome=row.outcome,
            replay_count=row.replay_count,
            result=left.result,
            result_encoding=left.result_encoding,
        ),
        stale=left.current_replay_count != row.replay_count,
        spared=is_spared(row.outcome, left.cancellation_reason),
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
    flow_records.EdgeGroup,
    Execution,
)
"""What `read_for_dispatch` returns side by side, in the order in which `save` compares it."""


class FoundEndings(Struct, frozen=True):
    """Endings, and all that their telling takes."""

    flows: dict[FlowId, flow_records.FlowRecord] = {}
    endings: dict[ExecutionId, QueuedEnding] = {}
    edges: list[flow_records.Edge] = []
    groups: dict[ExecutionId, flow_records.EdgeGroup] = {}
    subjects: dict[ExecutionId, Subject] = {}

    @property
    def taken(self) -> list[QueuedEnding]:
        return list(self.endings.values())

    @property
    def fresh(self) -> dict[ExecutionId, Ending]:
        return {execution_id: each.ending for execution_id, each in self.endings.items()}


def found_in(rows: Sequence[Joined]) -> FoundEndings | None:
    """None unless endings are news, and downstreams are as they were made but for their joins."""
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
    """Whether the edge of a row, if it has one, leads to a downstream that nobody has had."""
    edge, group, downstream = (
        each.get(flow_records.Edge),
        each.get(flow_records.EdgeGroup),
        each.get(Execution),
    )
    if edge is None:
        return True
    if group is None or downstream is None or not _untouched(downstream):
        return False
    found.edges.append(edge)
    found.groups[edge.downstream_id] = group
    found.subjects[edge.downstream_id] = Subject(execution=downstream, attempt=None)
    return True


def _untouched(execution: Execution) -> bool:
    """Whether an execution has no rows but its own: nobody has ever had it."""
    return (
        execution.total_attempt_count == 0
        and execution.granted_until_ms is None
        and execution.open_waitpoint_count == 0
    )


# A member that is about to end, without locks

MEMBER = (flow_records.FlowRecord, flow_records.Edge, flow_records.EdgeGroup, Execution)
"""What `read_for_completion` returns side by side, in the order in which `save` compares it."""


def member_in(rows: Sequence[Joined]) -> tuple[Subject, FoundEndings] | None:
    """The member, and all that telling of its end takes; None unless both are as they were made.

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
    if member is None or not _runs_undisturbed(member):
        return None
    return Subject(execution=member, attempt=None), found


def succeeded(
    row: flow_records.CompletionDispatch, result: bytes | None, result_encoding: str | None
) -> QueuedEnding:
    """The ending of a member that completes, as it would be found in the queue."""
    return QueuedEnding(
        row=row,
        ending=Ending(
            outcome=row.outcome,
            replay_count=row.replay_count,
            result=result,
            result_encoding=result_encoding,
        ),
        stale=False,
        spared=False,
    )


def _runs_undisturbed(execution: Execution) -> bool:
    """Whether a running execution has no rows but its own."""
    return (
        runs_first_attempt(execution)
        and execution.granted_until_ms is None
        and execution.current_suspension_id is None
        and execution.open_waitpoint_count == 0
    )
