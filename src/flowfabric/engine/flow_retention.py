"""Forgetting flows. A flow goes as a whole, once all its members have ended.

Members carry no keep time of their own, so none is deleted while others may still
ask how it ended; when the flow's time is over they are given it, and go like any
execution. A flow with a member that somebody outside still needs stays as a whole.
Past its keep time a flow is gone for every operation, also while a large one is still
being deleted batch by batch.
"""

from collections.abc import Sequence

from msgspec import Struct, structs

from flowfabric.core.checks import check_int
from flowfabric.core.flow_records import FlowRecord
from flowfabric.core.limits import BATCH_MAX, SWEEP_BATCH
from flowfabric.core.transitions import Changes, held_until_ms
from flowfabric.engine.flow_unit import FlowOperations
from flowfabric.engine.operators import Swept, trim_executions
from flowfabric.store.base import Parameter, Transaction

FLOWS_PER_TRIM = 50


class FlowRetention(FlowOperations):
    async def trim_flows(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Delete ended flows past their keep time, with all that belongs to them."""
        check_int("limit", limit, 1, BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            now_ms = await tx.now_ms()
            flows = await tx.select_records(
                FlowRecord, "due_flows", before_ms=now_ms, limit=FLOWS_PER_TRIM
            )
            forgot = await forget(tx, flows, limit)
            more = len(flows) == FLOWS_PER_TRIM and forgot.complete
            return Swept(acted=forgot.acted, full=forgot.more or more)

        return await self.store.transact(body)


class Forgot(Struct, frozen=True, kw_only=True):
    """What a step of deleting flows did."""

    acted: int
    more: bool = False
    """Whether the next step will do more."""
    complete: bool = False
    """Whether of all flows there is nothing left that may go."""


async def forget(tx: Transaction, due: Sequence[FlowRecord], limit: int) -> Forgot:
    """Delete the next rows of flows past their keep time; the caller has locked them."""
    now_ms = await tx.now_ms()
    flows = await _let_go(tx, due, now_ms)
    if not flows:
        return Forgot(acted=0, complete=True)
    which = _which(flows)
    (row,) = await tx.select("release_flow_members", now_ms=now_ms, limit=limit, **which)
    released = int(str(row["released"]))
    if released or await tx.select("any_flow_member", **which):
        trimmed, _ = await trim_executions(tx, now_ms, limit)
        return Forgot(acted=max(released, trimmed), more=bool(released or trimmed))
    (row,) = await tx.select("trim_flow_edges", limit=limit, **which)
    trimmed = int(str(row["trimmed"]))
    if trimmed == limit:
        return Forgot(acted=trimmed, more=True)
    await tx.select("delete_flows", **which)
    return Forgot(acted=trimmed + len(flows), complete=True)


async def _let_go(tx: Transaction, flows: Sequence[FlowRecord], now_ms: int) -> list[FlowRecord]:
    """The flows that may go. One with a member that somebody still needs stays as a whole."""
    fresh = [flow for flow in flows if not flow.going]
    rows = await tx.select("needed_flows", **_which(fresh)) if fresh else []
    needed = {str(row["flow_id"]) for row in rows}
    held = tuple(
        structs.replace(
            flow, retain_until_ms=held_until_ms(flow.ended_at_ms or flow.created_at_ms, now_ms)
        )
        for flow in fresh
        if flow.flow_id in needed
    )
    going = tuple(structs.replace(flow, going=True) for flow in fresh if flow.flow_id not in needed)
    await tx.save(Changes(updates=(*held, *going)))
    return [flow for flow in flows if flow.flow_id not in needed]


def _which(flows: Sequence[FlowRecord]) -> dict[str, Parameter]:
    return {
        "partition_keys": [flow.partition_key for flow in flows],
        "flow_ids": [flow.flow_id for flow in flows],
    }
