"""Which workers are there and what they can run.

Claims need none of this. It answers "why does nobody take this": an execution
whose route no present worker serves says so.
"""

from collections.abc import Sequence

import msgspec

from flowfabric.core.ids import WorkerInstanceId, parse_worker_id
from flowfabric.core.records import WorkerPresence
from flowfabric.core.transitions import Changes
from flowfabric.engine.leases import check_query, check_worker
from flowfabric.engine.unit import Operations
from flowfabric.store.base import Transaction


class Presence(Operations):
    async def report_presence(
        self,
        lane_ids: Sequence[str],
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Sequence[str] = (),
        kinds: Sequence[str] | None = None,
        namespace: str | None = None,
    ) -> None:
        """Say that a worker is there, what it serves, and that it was seen just now."""
        worker = check_worker(worker_id, worker_instance_id)
        query = check_query(lane_ids, kinds, capabilities, namespace)
        await self.store.execute_alone(
            "report_presence",
            worker_instance_id=worker.worker_instance_id,
            worker_id=worker.worker_id,
            namespace=query.namespace,
            lanes=_names(query.lanes),
            kinds=None if query.kinds is None else _names(query.kinds),
            capabilities=_names(query.capabilities),
        )

    async def withdraw_presence(self, worker_instance_id: str) -> None:
        """Say that a worker is gone. Safe to repeat."""
        asked = WorkerInstanceId(parse_worker_id("worker_instance_id", worker_instance_id))

        async def body(tx: Transaction) -> None:
            found = await tx.lock(WorkerPresence, [(asked,)])
            await tx.save(Changes(deletes=tuple(found.values())))

        await self.store.transact(body)


def _names(names: Sequence[str]) -> str:
    return msgspec.json.encode(names).decode()
