"""Work to race for."""

from flowfabric import Engine
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import ExecutionId
from flowfabric.core.results import Claimed, Created

LEASE_TTL_MS = 600_000


async def create(engine: Engine, kind: str = "work") -> ExecutionId:
    created = await engine.create_execution(NewExecution(execution_kind=kind))
    assert isinstance(created, Created)
    return created.execution_id


async def claim(
    engine: Engine, worker: str, *, limit: int = 1, lease_ttl_ms: int = LEASE_TTL_MS
) -> list[Claimed]:
    return await engine.claim_many(
        ["default"],
        limit=limit,
        worker_id=worker,
        worker_instance_id=f"{worker}-1",
        lease_ttl_ms=lease_ttl_ms,
    )


async def running(engine: Engine, count: int = 1) -> list[Claimed]:
    """So many executions, each held by one worker."""
    for _ in range(count):
        await create(engine)
    return await claim(engine, "holder", limit=count)
