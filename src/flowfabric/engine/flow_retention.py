"""Forgetting flows. A flow goes as a whole, once all its members have ended.

Members carry no keep time of their own, so none is deleted while others may still
ask how it ended; when the flow's time is over they are given it, and go like any
execution. Past its keep time a flow is gone for every operation, also while a large
one is still being deleted batch by batch.
"""

from flowfabric.core.checks import check_int
from flowfabric.core.flow_model import Flow
from flowfabric.core.limits import BATCH_MAX, SWEEP_BATCH
from flowfabric.engine.flow_unit import FlowOperations
from flowfabric.engine.operators import Swept
from flowfabric.store.base import Parameter, Transaction

FLOWS_PER_TRIM = 50


class FlowRetention(FlowOperations):
    async def trim_flows(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Delete ended flows past their keep time, with all that belongs to them."""
        check_int("limit", limit, 1, BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            now_ms = await tx.now_ms()
            flows = await tx.select_records(
                Flow, "due_flows", before_ms=now_ms, limit=FLOWS_PER_TRIM
            )
            if not flows:
                return Swept(acted=0, full=False)
            which: dict[str, Parameter] = {
                "partition_keys": [flow.partition_key for flow in flows],
                "flow_ids": [flow.flow_id for flow in flows],
            }
            (row,) = await tx.select("release_flow_members", now_ms=now_ms, limit=limit, **which)
            released = int(str(row["released"]))
            if released or await tx.select("any_flow_member", **which):
                await tx.select("trim_executions", before_ms=now_ms, limit=limit)
                return Swept(acted=max(released, 1), full=True)
            (row,) = await tx.select("trim_flow_edges", limit=limit, **which)
            trimmed = int(str(row["trimmed"]))
            if trimmed == limit:
                return Swept(acted=trimmed, full=True)
            await tx.select("delete_flows", **which)
            return Swept(acted=trimmed + len(flows), full=len(flows) == FLOWS_PER_TRIM)

        return await self.store.transact(body)
