"""Reading what an execution with an open join waits for."""

from flowfabric.core.diagnosis import JoinFacts, Upstream
from flowfabric.core.flow_records import EdgeGroup
from flowfabric.core.ids import make_execution_id, uuid_of
from flowfabric.core.records import Execution
from flowfabric.core.states import PublicState, TerminalOutcome
from flowfabric.core.steps import blocked_by_code
from flowfabric.engine.unit import execution_key
from flowfabric.store.base import Reader

UPSTREAMS_SHOWN_MAX = 3


async def read_join_facts(reader: Reader, execution: Execution) -> JoinFacts | None:
    """None for an execution that no join holds back."""
    key = execution_key(execution.execution_id)
    group = (await reader.get(EdgeGroup, [key])).get(key) if execution.join_pending else None
    if group is None:
        return None
    rows = await reader.select(
        "unresolved_upstreams",
        partition_key=execution.partition_key,
        downstream_id=uuid_of(execution.execution_id),
        limit=UPSTREAMS_SHOWN_MAX,
    )
    return JoinFacts(
        group=group,
        upstreams=tuple(
            Upstream(
                execution_id=make_execution_id(execution.partition_key, str(row["execution_id"])),
                name=str(row["node_name"] or row["execution_kind"]),
                public_state=PublicState(str(row["public_state"])),
                blocked=blocked_by_code(row["lifecycle_phase"], row["blocking_reason"]),
                over=row["terminal_outcome"] != TerminalOutcome.NONE
                and int(str(row["replay_count"])) < int(str(row["counts_from_replay"])),
            )
            for row in rows
        ),
    )
