"""A worker that has lost the answer to a claim finds what it was granted, by its own mark."""

from flowfabric import Engine
from flowfabric.core.results import Claimed
from flowfabric.testing import SettableClock
from tests.conformance.given import WORKER, Given

MARK = "0123456789ab"
OTHER_MARK = "ba9876543210"
TTL_MS = 1_000


async def claim(engine: Engine, mark: str = MARK) -> list[Claimed]:
    return await engine.claim_many(["default"], limit=10, **WORKER, lease_ttl_ms=TTL_MS, mark=mark)


async def find(
    engine: Engine, mark: str = MARK, instance_id: str = WORKER["worker_instance_id"]
) -> list[Claimed]:
    found = await engine.find_claimed(
        mark, worker_id=WORKER["worker_id"], worker_instance_id=instance_id, lease_ttl_ms=TTL_MS
    )
    return sorted(found, key=lambda each: each.execution_id)


async def test_first_attempts_are_found_as_they_were_granted(engine: Engine, given: Given) -> None:
    for _ in range(3):
        await given.waiting()
    claimed = await claim(engine)
    assert len(claimed) == 3
    assert await find(engine) == sorted(claimed, key=lambda each: each.execution_id)


async def test_a_lost_lease_is_found_as_it_was_granted_again(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await given.waiting()
    await claim(engine, OTHER_MARK)
    clock.advance(ms=TTL_MS)
    await engine.expire_due_leases()
    (claimed,) = await claim(engine)
    (found,) = await find(engine)
    assert (found.handle, found.attempt_type) == (claimed.handle, claimed.attempt_type)
    assert await find(engine, OTHER_MARK) == []


async def test_what_goes_on_is_found_as_it_was_granted(
    engine: Engine, given: Given, clock: SettableClock
) -> None:
    await given.waiting()
    (first,) = await claim(engine, OTHER_MARK)
    await engine.delay(first.handle, clock.now_ms() + 10)
    clock.advance(ms=10)
    await engine.promote_due_delays()
    (claimed,) = await claim(engine)
    (found,) = await find(engine)
    assert (found.handle, found.attempt_type) == (claimed.handle, claimed.attempt_type)


async def test_others_find_nothing(engine: Engine, given: Given, clock: SettableClock) -> None:
    await given.waiting()
    (claimed,) = await claim(engine)
    assert await find(engine, OTHER_MARK) == []
    assert await find(engine, instance_id="another") == []
    clock.advance(ms=TTL_MS)
    assert await find(engine) == []
    assert claimed.lease_expires_at_ms == clock.now_ms()
