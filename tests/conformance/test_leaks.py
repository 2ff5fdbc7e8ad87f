"""Workers that die hold nothing: no lease, no slot of a limit, no part of a budget."""

from collections.abc import Awaitable, Callable

import pytest

from flowfabric import Engine
from flowfabric.core.budget_terms import BudgetDefinition
from flowfabric.core.budgets import Reserved, UsageCounted
from flowfabric.core.conditions import Single
from flowfabric.core.gates import GateName, GateOwner
from flowfabric.core.ids import ExecutionId, QuotaPolicyId, named_budget_id
from flowfabric.core.results import Claimed
from flowfabric.core.workers import WorkerDead
from flowfabric.engine.grants import GRANT_TTL_MS
from flowfabric.reconcilers import run_due
from tests.conformance.auditing import complaints_of
from tests.conformance.given import OTHER_WORKER, TTL_MS, WORKER, Given, WorkerNames

CAP = QuotaPolicyId("7d9f2c1e-1a1b-4c4d-8e8f-000000000021")
INSTANCE = WORKER["worker_instance_id"]
ALL = {"tokens": 100}
GPU = {"routing_requirements": {"required_capabilities": ["gpu"]}}


async def limited(given: Given) -> ExecutionId:
    """Work under a limit that leaves one at a time, attached to a budget."""
    team = named_budget_id("team", "default")
    return await given.waiting(
        gates=[GateName(GateOwner.QUOTA, CAP)], policy={"budget_ids": [team]}
    )


async def held(engine: Engine) -> tuple[int, int]:
    """Slots taken, and units reserved."""
    (gate,) = (await engine.list_limit_use(CAP)).gates
    status = await engine.get_budget_status("team")
    return gate.running, status.reserved.get("tokens", 0)


async def reserve_all(engine: Engine, claimed: Claimed) -> None:
    """The next attempt of an execution reserves under the same name."""
    reserved = await engine.reserve_budget(
        claimed.handle, "team", ALL, reservation_id=claimed.execution_id
    )
    assert reserved == Reserved()
    assert await held(engine) == (1, 100)


async def taken(engine: Engine, worker: WorkerNames) -> Claimed:
    claimed = await engine.claim(**worker, lease_ttl_ms=TTL_MS)
    assert claimed is not None
    return claimed


async def marked(engine: Engine, given: Given, claimed: Claimed) -> None:
    assert await engine.mark_worker_dead(INSTANCE) == WorkerDead(revoked_leases=1)


async def silent(engine: Engine, given: Given, claimed: Claimed) -> None:
    given.clock.set_ms(claimed.lease_expires_at_ms)


async def swept(engine: Engine, given: Given, claimed: Claimed) -> None:
    given.clock.set_ms(claimed.lease_expires_at_ms)
    await run_due(engine)


async def marked_late(engine: Engine, given: Given, claimed: Claimed) -> None:
    given.clock.set_ms(claimed.lease_expires_at_ms)
    await engine.mark_worker_dead(INSTANCE)
    await run_due(engine)


async def paused(engine: Engine, given: Given, claimed: Claimed) -> None:
    await engine.suspend(claimed.handle, resume_condition=Single("gate"))
    assert await engine.mark_worker_dead(INSTANCE) == WorkerDead(revoked_leases=0)


async def resumed(engine: Engine, given: Given, claimed: Claimed) -> None:
    """It was parked and went on in the hands of the same worker, and only then was lost."""
    await engine.delay(claimed.handle, given.clock.now_ms())
    await engine.promote_delayed(claimed.execution_id)
    again = await taken(engine, WORKER)
    assert again.execution_id == claimed.execution_id
    await reserve_all(engine, again)
    await marked(engine, given, again)


async def granted_again(engine: Engine, given: Given, claimed: Claimed) -> None:
    """It was lost and granted to another worker, which never came."""
    await marked(engine, given, claimed)
    await engine.issue_reclaim_grant(claimed.execution_id, **OTHER_WORKER)
    assert await held(engine) == (1, 0)
    await engine.mark_worker_dead(OTHER_WORKER["worker_instance_id"])
    given.clock.advance(ms=GRANT_TTL_MS + 1)


DEATHS: dict[str, Callable[[Engine, Given, Claimed], Awaitable[None]]] = {
    "marked dead": marked,
    "silent": silent,
    "silent and swept": swept,
    "marked dead once its lease ran out": marked_late,
    "paused and marked dead": paused,
    "resumed and marked dead": resumed,
    "granted to another that dies": granted_again,
}


@pytest.mark.parametrize("death", DEATHS)
async def test_a_dead_worker_holds_nothing(engine: Engine, given: Given, death: str) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=1)
    await engine.create_budget(BudgetDefinition(budget_id="team", hard_limits=ALL))
    await engine.register_worker(["default"], **WORKER, liveness_ttl_ms=TTL_MS)
    first, second = await limited(given), await limited(given)
    claimed = await taken(engine, WORKER)
    await reserve_all(engine, claimed)
    assert await engine.claim(**OTHER_WORKER) is None

    await DEATHS[death](engine, given, claimed)

    assert await held(engine) == (0, 0)
    done: set[ExecutionId] = set()
    for _ in range(1 if death.startswith("paused") else 2):
        again = await taken(engine, OTHER_WORKER)
        assert await engine.claim(**WORKER) is None
        await reserve_all(engine, again)
        settled = await engine.settle_reservation("team", again.execution_id, {})
        assert settled == UsageCounted()
        await engine.complete(again.handle)
        done.add(again.execution_id)
        # The room was there at once; what was lost itself is ready once that was noticed.
        await run_due(engine)
    assert done == ({second} if death.startswith("paused") else {first, second})
    assert await held(engine) == (0, 0)
    assert await complaints_of(engine) == []


async def test_what_waited_for_a_capable_worker_is_claimed_as_soon_as_one_is_there(
    engine: Engine, given: Given
) -> None:
    await engine.create_quota_policy(CAP, max_concurrent=1)
    gates = [GateName(GateOwner.QUOTA, CAP)]
    free, under_limit = (
        await given.waiting(policy=GPU),
        await given.waiting(policy=GPU, gates=gates),
    )
    for _ in range(2):
        assert await engine.claim_for_worker(["default"], **WORKER) is None

    await engine.register_worker(
        ["default"], **OTHER_WORKER, capabilities=["gpu"], liveness_ttl_ms=TTL_MS
    )

    claimed = await engine.claim_many(["default"], limit=9, capabilities=["gpu"], **OTHER_WORKER)
    assert {each.execution_id for each in claimed} == {free, under_limit}
    await engine.mark_worker_dead(OTHER_WORKER["worker_instance_id"])
    (gate,) = (await engine.list_limit_use(CAP)).gates
    assert gate.running == 0
