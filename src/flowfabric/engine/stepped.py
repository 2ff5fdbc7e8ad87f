"""Whether an execution got on in its current attempt."""

from collections.abc import Sequence

from flowfabric.core.ids import ExecutionId, make_execution_id, uuid_of
from flowfabric.core.records import Execution
from flowfabric.store.base import Transaction


async def stepped_in_attempt(tx: Transaction, executions: Sequence[Execution]) -> set[ExecutionId]:
    """Those that have stored a step in their current attempt."""
    if not executions:
        return set()
    rows = await tx.select(
        "stepped_attempts",
        partition_keys=[each.partition_key for each in executions],
        execution_ids=[uuid_of(each.execution_id) for each in executions],
        attempt_indexes=[each.current_attempt_index for each in executions],
    )
    return {
        make_execution_id(int(str(row["partition_key"])), str(row["execution_id"])) for row in rows
    }
