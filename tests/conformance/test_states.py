"""The situations the other tests start from."""

from flowfabric import Engine
from tests.conformance.given import EVERY_STATE, Given

PUBLIC = {
    "waiting": "waiting",
    "resumable": "waiting",
    "delayed": "delayed",
    "retrying": "delayed",
    "parked": "delayed",
    "blocked": "delayed",
    "waiting_children": "waiting_children",
    "suspended": "suspended",
    "gated": "rate_limited",
    "running": "active",
    "overdue_lease": "active",
    "expired_lease": "active",
    "revoked": "active",
    "completed": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
    "expired": "expired",
}


async def test_every_situation_reads_as_its_public_state(engine: Engine, given: Given) -> None:
    found = {
        state: await engine.read_execution_state(await given.state(state)) for state in EVERY_STATE
    }
    assert found == PUBLIC
