"""Schedulers, workers and operators reach for the same executions at once."""

import asyncio
from collections import Counter

from flowfabric import Engine
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import ExecutionId
from flowfabric.core.results import Claimed, ClaimGrant, Renewed
from flowfabric.core.workers import NotRegistered, Refreshed, Registered, WorkerDead
from flowfabric.errors import FlowFabricError, InvalidInput, LeaseRevoked
from tests.conformance.given import WorkerNames
from tests.races.given import claim, create, running
from tests.races.rival import DEADLOCKS, Rival

EXECUTIONS = 200
GPU = {"routing_requirements": {"required_capabilities": ["gpu"]}}


async def take_by_grant(engine: Engine, worker: str) -> list[ExecutionId]:
    """Ask a scheduler for work, and take it, until there is nothing left."""
    names = WorkerNames(worker_id=worker, worker_instance_id=f"{worker}-1")
    mine: list[ExecutionId] = []
    for _ in range(EXECUTIONS + 1):
        grant = await engine.claim_for_worker(["default"], **names)
        if grant is None:
            return mine
        assert isinstance(grant, ClaimGrant)
        claimed = await engine.claim_execution(
            grant.execution_id, **names, grant_key=grant.grant_key
        )
        mine.append(claimed.execution_id)
    raise AssertionError("more grants than executions")


async def take_plainly(engine: Engine, worker: str) -> list[ExecutionId]:
    mine: list[ExecutionId] = []
    while claimed := await claim(engine, worker, limit=3):
        mine += [each.execution_id for each in claimed]
    return mine


async def test_grants_and_claims_hand_out_each_execution_once(engine: Engine, rival: Rival) -> None:
    for _ in range(EXECUTIONS):
        await create(engine)
    shares = await asyncio.gather(
        *(take_by_grant(engine, f"granted-{n}") for n in range(6)),
        *(take_plainly(engine, f"plain-{n}") for n in range(4)),
    )
    taken = Counter(each for share in shares for each in share)
    # A scheduler that finds the best ones taken just then may say that there is nothing.
    rest = await take_plainly(engine, "last")
    assert len(taken) + len(rest) == EXECUTIONS
    assert set(taken.values()) == {1}
    assert await rival.count("select count(*) from claim_grant") == 0
    assert await rival.count("select count(*) from live where lease_epoch > 1") == 0
    assert await rival.count(DEADLOCKS) == 0


async def test_what_is_granted_meanwhile_is_not_parked(engine: Engine, rival: Rival) -> None:
    """Between a look at what waits and the lock of it, a worker was granted it."""
    created = await engine.create_execution(NewExecution(execution_kind="work", policy=GPU))
    execution_id = created.execution_id
    names = WorkerNames(worker_id="w", worker_instance_id="w-1")
    async with rival.holding("select from live for update"):
        granting, parking = await rival.queued(
            engine.issue_claim_grant(execution_id, **names, capabilities=["gpu"]),
            engine.claim_for_worker(["default"], worker_id="b", worker_instance_id="b-1"),
        )
    assert await parking is None
    grant = await granting
    assert isinstance(grant, ClaimGrant)
    claimed = await engine.claim_execution(execution_id, **names, grant_key=grant.grant_key)
    assert claimed.lease_epoch == 1


async def test_two_schedulers_are_given_different_executions(engine: Engine) -> None:
    for _ in range(2):
        await create(engine)
    grants = await asyncio.gather(
        *(
            engine.claim_for_worker(["default"], worker_id=name, worker_instance_id=name)
            for name in ("a", "b")
        )
    )
    assert len({grant.execution_id for grant in grants if grant is not None}) == 2


async def test_a_claim_that_waits_behind_a_grant_gets_nothing(engine: Engine, rival: Rival) -> None:
    execution_id = await create(engine)
    names = WorkerNames(worker_id="w", worker_instance_id="w-1")
    grant = await engine.issue_claim_grant(execution_id, **names)
    key = grant.grant_key
    async with rival.holding("select from live for update"):
        # Both instances of the pool use the same key; the second finds it used.
        both = await rival.queued(
            engine.claim_execution(execution_id, **names, grant_key=key),
            engine.claim_execution(
                execution_id, worker_id="w", worker_instance_id="w-2", grant_key=key
            ),
        )
    outcomes = await asyncio.gather(*both, return_exceptions=True)
    assert sorted(isinstance(each, Claimed) for each in outcomes) == [False, True]
    assert all(isinstance(each, Claimed | FlowFabricError) for each in outcomes)
    assert await rival.count("select lease_epoch from live") == 1


async def test_a_renewal_that_waits_behind_the_death_of_its_worker_is_told(
    engine: Engine, rival: Rival
) -> None:
    (claimed,) = await running(engine)
    async with rival.holding("select from live for update"):
        dying, renewing = await rival.queued(
            engine.mark_worker_dead("holder-1"), engine.renew(claimed.handle)
        )
    assert await dying == NotRegistered(revoked_leases=1)
    (error,) = await asyncio.gather(renewing, return_exceptions=True)
    assert isinstance(error, LeaseRevoked)


async def test_a_death_that_waits_behind_a_renewal_still_takes_the_lease(
    engine: Engine, rival: Rival
) -> None:
    (claimed,) = await running(engine)
    async with rival.holding("select from live for update"):
        renewing, dying = await rival.queued(
            engine.renew(claimed.handle), engine.mark_worker_dead("holder-1")
        )
    assert isinstance(await renewing, Renewed)
    assert await dying == NotRegistered(revoked_leases=1)
    assert await rival.value("select ownership_state::text from live") == "lease_revoked"


async def register(engine: Engine, worker_id: str) -> Registered | Refreshed:
    return await engine.register_worker(
        ["default"],
        worker_id=worker_id,
        worker_instance_id="w-1",
        capabilities=["gpu"],
        liveness_ttl_ms=60_000,
    )


async def test_of_two_first_registrations_of_an_instance_one_is_first(
    engine: Engine, rival: Rival
) -> None:
    async with rival.holding("select from lane for update"):
        both = await rival.queued(register(engine, "a"), register(engine, "b"))
    outcomes = await asyncio.gather(*both, return_exceptions=True)
    assert sorted(type(each).__name__ for each in outcomes) == ["InvalidInput", "Registered"]
    assert any(isinstance(each, InvalidInput) for each in outcomes)
    assert await rival.count("select count(*) from worker_event") == 1


async def test_a_worker_dies_once(engine: Engine, rival: Rival) -> None:
    await register(engine, "a")
    async with rival.holding("select from worker for update"):
        both = await rival.queued(engine.mark_worker_dead("w-1"), engine.mark_worker_dead("w-1"))
    outcomes = await asyncio.gather(*both)
    assert sorted(type(each).__name__ for each in outcomes) == ["NotRegistered", "WorkerDead"]
    assert WorkerDead(revoked_leases=0) in outcomes
    marked = "select count(*) from worker_event where event_kind = 'marked_dead'"
    assert await rival.count(marked) == 1


async def test_work_is_not_parked_behind_the_back_of_a_worker_that_registers(
    engine: Engine, rival: Rival
) -> None:
    """Whichever of the two is first, the execution is there for the worker in the end."""
    await engine.create_execution(NewExecution(execution_kind="work", policy=GPU))
    asking = engine.claim_for_worker(["default"], worker_id="b", worker_instance_id="b-1")
    async with rival.holding("select from lane for update"):
        parking, registering = await rival.queued(asking, register(engine, "a"))
    assert (await parking, type(await registering)) == (None, Registered)
    assert await rival.count("select count(*) from live where ready") == 1

    await engine.mark_worker_dead("w-1")
    asking = engine.claim_for_worker(["default"], worker_id="b", worker_instance_id="b-1")
    async with rival.holding("select from lane for update"):
        registering, parking = await rival.queued(register(engine, "a"), asking)
    assert (await parking, type(await registering)) == (None, Registered)
    assert await rival.count("select count(*) from live where ready") == 1
