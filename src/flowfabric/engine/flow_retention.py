"""Forgetting flows. A flow goes as a whole, once all its members have ended.

Members carry no keep time of their own, so none is deleted while others may still
ask how it ended. Past its keep time a flow is gone for every operation, also while
a large one is still being deleted batch by batch.
"""

from flowfabric.core.checks import check_int
from flowfabric.core.flow_model import Flow
from flowfabric.core.limits import BATCH_MAX, SWEEP_BATCH
from flowfabric.engine.flow_unit import FlowOperations
from flowfabric.engine.operators import Swept
from flowfabric.store.base import Transaction

FLOWS_PER_TRIM = 50
STEPS = ("trim_flow_members", "trim_flow_edges")


class FlowRetention(FlowOperations):
    async def trim_flows(self, *, limit: int = SWEEP_BATCH) -> Swept:
        """Delete ended flows past their keep time, with all that belongs to them."""
        check_int("limit", limit, 1, BATCH_MAX)

        async def body(tx: Transaction) -> Swept:
            flows = await tx.select_records(
                Flow, "due_flows", before_ms=await tx.now_ms(), limit=FLOWS_PER_TRIM
            )
            if not flows:
                return Swept(acted=0, full=False)
            flow_ids = [flow.flow_id for flow in flows]
            partition_keys = [flow.partition_key for flow in flows]
            trimmed = 0
            for step in STEPS:
                (row,) = await tx.select(
                    step, partition_keys=partition_keys, flow_ids=flow_ids, limit=limit
                )
                trimmed += int(str(row["trimmed"]))
                if int(str(row["trimmed"])) == limit:
                    return Swept(acted=trimmed, full=True)
            await tx.select("delete_flows", partition_keys=partition_keys, flow_ids=flow_ids)
            return Swept(acted=trimmed + len(flows), full=len(flows) == FLOWS_PER_TRIM)

        return await self.store.transact(body)
